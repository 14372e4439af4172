"""Malformed metadata under compute-sanitizer: no kernel reads or writes outside its tensors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

_SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
_PROGRAM = """
import torch, thdops
from thdops.ops.attention_thd import kernels
device = torch.device("cuda")
rows = 40


def attend(dim, lengths, cu, padded):
    kernels._lengths = lambda call: (lengths,)
    some = rows + (lengths == "long")  # another shape, for what follows from shapes is found once
    q, k, v = (torch.randn(some, heads, dim, device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    for keys in ({}, {"cu_seqlens_kv": cu.flip(0).contiguous(), "cu_seqlens_kv_padded": padded}):
        thdops.attention(q, k, v, cu, cu_seqlens_q_padded=padded, causal=True, backend="native", **keys).sum().backward()


malformed = ([0, 5, 3, 20], [-7, 4, 90, 12], [0, 10**6, 2 * 10**6, 3 * 10**6], [39, 40, 41, 44], [20, 10, 0, -10])
for ends in malformed:
    for dtype in (torch.int32, torch.int64):
        cu = torch.tensor(ends, device=device, dtype=dtype)
        for padded in (None, cu.flip(0).contiguous(), torch.tensor([0, 10, 20, 30], device=device, dtype=dtype)):
            x = torch.randn(rows, 3, 8, device=device, requires_grad=True)
            thdops.zero_fill(x, cu, padded).sum().backward()
            thdops.zero_fill_([torch.ones(rows, 6, device=device), torch.ones(rows, device=device)], cu, padded)
            thdops.padding_mask(cu, padded, rows), thdops.sequence_ids(cu, padded, rows), thdops.compact_rows(cu, padded, rows)
            thdops.positions(cu, padded, rows), thdops.positions(cu, padded, rows // 2, cp_size=2, cp_rank=1)
            thdops.slice_cu_seqlens(cu, padded, 7, 20)
            for dim, lengths in ((16, "short"), (64, "short"), (128, "short"), (64, "long"), (128, "long")):
                attend(dim, lengths, cu, padded)
            for routing in (torch.rand(rows, 8, device=device) < 0.3, torch.randint(-3, 12, (rows, 2), device=device)):
                scores = torch.rand(rows, 8, device=device, requires_grad=True)
                losses = thdops.moe_seq_aux_loss(scores, routing, cu, padded, num_experts=8, topk=2, coeff=1.0, reduction="none")
                losses.sum().backward()
                thdops.tokens_per_expert(routing, num_experts=8)
    thdops.cu_seqlens_from_lengths(torch.tensor(ends, device=device), 5)
    thdops.cu_seqlens_from_positions(torch.tensor(ends * 10, device=device), 5)
probs = torch.rand(rows, 8, device=device, requires_grad=True)
thdops.moe_z_loss(probs, 1.0).backward()
thdops.expert_bias_update(torch.zeros(8, device=device), torch.ones(8, device=device), 0.1)
thdops.moe_aux_loss(probs, torch.ones(8, device=device), 3, num_experts=8, topk=2, coeff=1.0).backward()
for dtype in (torch.int16, torch.int32, torch.int64):
    for ids in (torch.arange(-20, 100, device=device), torch.full((120,), torch.iinfo(dtype).min, device=device)):
        x = torch.randn(rows, 20, device=device, requires_grad=True)
        permuted, _, where = thdops.permute_tokens(x, ids.to(dtype).view(rows, 3), 8)
        for map in (where, where * 1000, where.flip(0) + 100, torch.full_like(where, -(2**31))):
            weights = torch.rand(rows, 3, device=device, requires_grad=True)
            thdops.unpermute_tokens(permuted, map, weights).sum().backward(retain_graph=True)
            thdops.unpermute_tokens(permuted, map).sum().backward(retain_graph=True)
torch.cuda.synchronize()
print("ran to the end")
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(_SANITIZER is None, reason="compute-sanitizer is not installed")
def test_malformed_metadata_stays_inside_its_tensors() -> None:
    # Without the caching allocator every tensor is an allocation of its own, so that one byte too far is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [str(_SANITIZER), "--error-exitcode", "7", sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "ran to the end" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
