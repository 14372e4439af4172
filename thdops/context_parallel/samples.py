"""Sample calls, refusals, padding, cost and benches of the context-parallel attention ops, on virtual ranks.

W ranks, T rows of the whole batch, B sequences, H heads, D head dims. Tensors hold the rows of all ranks, one rank after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meta_kernels import attention_thd
from meta_kernels.context_attention import VIRTUAL, Call, GradCall, sizes_of
from thdops.context_parallel import run
from thdops.ops.attention_thd.samples import attention_cost, attention_grad_cost
from thdops.ops.context import reference as rows
from thdops.ops.layouts import Layout, prefix_sums
from thdops.ops.padding.reference import padding_mask
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# --- calls ---------------------------------------------------------------------------------------------------------------------

# name -> (valid lengths, padded lengths or None, rows before the first sequence, rows behind the last); all for up to 4 ranks
_LAYOUTS: dict[str, tuple[list[int], list[int] | None, int, int]] = {
    "gaps and tail": ([3, 20, 0, 8], [8, 24, 8, 16], 0, 8),
    "rows before the first": ([13, 5], [16, 8], 8, 8),
    "back to back": ([8, 16], None, 0, 0),
    "back to back, tail": ([16, 8], None, 0, 8),
    "no valid row": ([0, 0], [8, 16], 0, 8),
    "no sequence": ([], None, 0, 8),
    "no row": ([0, 0], None, 0, 0),
}


def _layout(name: str, device: torch.device, index: torch.dtype = torch.int32) -> Layout:
    valid, padded, before, behind = _LAYOUTS[name]
    total = before + sum(padded or valid) + behind
    offsets = None if padded is None else prefix_sums(padded, device, index, before)
    return Layout(prefix_sums(valid, device, index), offsets, total)


def _others(base: Layout) -> list[dict[str, Tensor]]:
    """Other metadata for the same buffers: one sequence has it all; all are empty; the last chunks of a long one are empty."""
    entries, device, dtype = base.cu_seqlens.shape[0], base.cu_seqlens.device, base.cu_seqlens.dtype
    if entries == 1 or base.total == 0:
        return []
    whole = [base.total] + [0] * (entries - 2)
    if base.padded is None:
        return [{"cu_seqlens": prefix_sums(lengths, device, dtype)} for lengths in (whole, [0] * (entries - 1))]
    pairs = ((whole, whole), ([0] * (entries - 1), whole), ([base.total // 2 - 1] + [0] * (entries - 2), whole))
    names = ("cu_seqlens", "cu_seqlens_padded")
    return [dict(zip(names, (prefix_sums(lengths, device, dtype) for lengths in pair), strict=True)) for pair in pairs]


def _call(
    base: Layout,
    comm: str = "p2p",
    cp_size: int | tuple[int, int] = 4,
    *,
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 4),
    dims: tuple[int, int] = (16, 16),
    window: tuple[int, int] = (-1, -1),
    fused: bool = False,
    **settings: Any,
) -> Call:
    """A legal call on the layout's device. `fused` makes q, k and v slices of one [T, Hq + 2 Hkv, D] buffer."""
    device = base.cu_seqlens.device
    generator = torch.Generator().manual_seed(base.total + sum(heads) + sum(dims))

    def new(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, like)

    (heads_q, heads_kv), (dim_qk, dim_v) = heads, dims
    if fused:
        q, k, v = new(base.total, heads_q + 2 * heads_kv, dim_qk).split((heads_q, heads_kv, heads_kv), 1)
    else:
        q, k, v = new(base.total, heads_q, dim_qk), new(base.total, heads_kv, dim_qk), new(base.total, heads_kv, dim_v)
    learnable = settings.get("softmax") == "learnable"
    usual: dict[str, Any] = {
        "sink": new(heads_q, like=_FP64 if dtype == _FP64 else _FP32) if learnable else None,
        "partition": "zigzag",
        "causal": False,
        "scale": dim_qk**-0.5,
        "softmax": "vanilla",
        "softcap": 0.0,
        "deterministic": True,
        "backend": "native" if device.type == "cuda" else "reference",
        "return_max_logit": False,
        "total_tokens": base.total,
    }
    return Call(
        q=q,
        k=k,
        v=v,
        cu_seqlens=base.cu_seqlens,
        cu_seqlens_padded=base.padded,
        groups=[f"{VIRTUAL}{size}" for size in (cp_size if isinstance(cp_size, tuple) else (cp_size,))],
        comm=comm,
        window_left=window[0],
        window_right=window[1],
        **{**usual, **settings},
    )


def _calls(device: torch.device) -> Iterator[tuple[str, Call, bool]]:
    """(name, call, whether worth a compilation)."""
    usual = _FP32 if device.type == "cpu" else _BF16

    def one(
        name: str, base: str, *how: Any, dtype: torch.dtype = usual, compiled: bool = False, index: Any = torch.int32, **rest: Any
    ) -> tuple[str, Call, bool]:
        return name, _call(_layout(base, device, index), *how, dtype=dtype, **rest), compiled

    causal: dict[str, Any] = {"causal": True}
    grouped: dict[str, Any] = {"heads": (4, 2), "return_max_logit": True, **causal}
    yield one("ring, causal", "gaps and tail", "p2p", 4, compiled=True, **grouped)
    yield one("ring, full", "rows before the first", "p2p", 2, dtype=_FP16, index=torch.int64)
    yield one("ring, causal, other sizes", "rows before the first", "p2p", 4, **grouped)
    yield one("ring, contiguous, sink", "gaps and tail", "p2p", 2, partition="contiguous", softmax="learnable", **causal)
    yield one("ring, MLA", "back to back, tail", "p2p", 2, dtype=_BF16, dims=(24, 16), **causal)
    yield one("ring of one", "gaps and tail", "p2p", 1, fused=True, **causal)
    yield one("gathered, causal", "gaps and tail", "all_gather", 4, heads=(4, 2), **causal)
    yield one(
        "gathered, window", "rows before the first", "all_gather", 2, window=(3, 2), softmax="off_by_one", return_max_logit=True
    )
    yield one("gathered, full", "back to back", "all_gather", 2, dtype=_BF16)
    yield one("heads, sink", "gaps and tail", "a2a", 2, compiled=True, softmax="learnable", return_max_logit=True, **causal)
    yield one("heads, window, softcap", "rows before the first", "a2a", 4, window=(3, -1), softcap=0.8, fused=True, **causal)
    yield one("heads and ring", "gaps and tail", "a2a+p2p", (2, 2), softmax="learnable", return_max_logit=True, **causal)
    yield one("no valid row", "no valid row", "p2p", 2, **causal)
    yield one("no sequence", "no sequence", "all_gather", 2, **causal)
    yield one("no row", "no row", "a2a", 2)
    if device.type == "cpu":
        yield one("fp64", "gaps and tail", "p2p", 4, dtype=_FP64, **grouped)


def context_attention_samples(device: torch.device) -> Iterator[Sample]:
    for name, call, compiled in _calls(device):
        yield Sample(name, call, tuple(_others(_layout_of(call))), compiled)


def context_attention_grad_samples(device: torch.device) -> Iterator[Sample]:
    for i, (name, call, compiled) in enumerate(_calls(device)):
        call = call._replace(return_max_logit=False)
        grad = _gradients(call, i % 6 != 5, i % 3 != 1, strided=i % 4 == 3)
        replays = []
        for metadata in _others(_layout_of(call)):
            other = _gradients(call._replace(**metadata), True, True)
            replays.append({**metadata, "out": other.out, "lse": other.lse})
        yield Sample(name, grad, tuple(replays), compiled)


def _layout_of(call: Call) -> Layout:
    return Layout(call.cu_seqlens, call.cu_seqlens_padded, call.q.shape[0])


def _gradients(call: Call, has_out: bool, has_lse: bool, strided: bool = False) -> GradCall:
    with torch.no_grad():
        out, lse, _ = run.context_attention(*call)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.transpose(0, 1).shape, generator=generator).to(out.device, out.dtype).transpose(0, 1)
    grad_lse = torch.randn(lse.t().shape, generator=generator).to(lse.device, lse.dtype).t()
    if not strided:
        grad_out, grad_lse = grad_out.contiguous(), grad_lse.contiguous()
    return GradCall(grad_out if has_out else None, grad_lse if has_lse else None, *call[:3], out, lse, *call[3:17])


# --- padding -------------------------------------------------------------------------------------------------------------------


def _mask(call: Call | GradCall) -> Tensor:
    """Padding rows in the order of the tensors: rank by rank."""
    mask = padding_mask(call.cu_seqlens, call.cu_seqlens_padded, call.q.shape[0])
    padded = call.cu_seqlens if call.cu_seqlens_padded is None else call.cu_seqlens_padded
    return rows.to_rank_order(mask, padded, math.prod(sizes_of("samples", call.groups)), call.partition)


def context_attention_padding(*args: Any) -> Padding:
    mask = _mask(Call(*args))
    inputs = {name: PadRows(mask) for name in ("q", "k", "v")}
    return Padding(inputs=inputs, outputs=(PadRows(mask), PadRows(mask, dim=1, value=-torch.inf), None))


def context_attention_grad_padding(*args: Any) -> Padding:
    call = GradCall(*args)
    mask = _mask(call)
    along = {"q": 0, "k": 0, "v": 0, "out": 0, "lse": 1, "grad_out": 0, "grad_lse": 1}
    inputs = {name: PadRows(mask, dim=dim) for name, dim in along.items() if getattr(call, name) is not None}
    return Padding(inputs=inputs, outputs=(PadRows(mask), PadRows(mask), PadRows(mask), None))


# --- refusals ------------------------------------------------------------------------------------------------------------------


def context_attention_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _refusals("context_attention", device, lambda call: call)
    call = _call(_layout("gaps and tail", device), dtype=_FP32)
    # Virtual ranks' tensors hold all rows of the batch: as if one rank had them.
    yield Refusal(
        "a group of the wrong size",
        call._replace(total_tokens=2 * call.total_tokens),
        ValueError,
        "context_attention: group must have total_tokens / n ranks, got 1 for 64 of 128 rows; pass the group that rows were"
        " partitioned for",
    )


def context_attention_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _refusals("context_attention_grad", device, _as_grad)
    grad = _as_grad(_call(_layout("gaps and tail", device), dtype=_FP32))
    yield Refusal(
        "out of another shape",
        grad._replace(out=grad.out[:-1]),
        ValueError,
        "context_attention_grad: out must have the forward's shape [64, 4, 16], got [63, 4, 16]; pass the forward's",
    )
    yield Refusal(
        "grad_lse of another dtype",
        grad._replace(grad_lse=grad.lse.to(_FP16)),
        TypeError,
        "context_attention_grad: grad_lse must be float32, got float16; cast it",
    )


def _as_grad(call: Call) -> GradCall:
    count, heads = (*call.q.shape, 1)[:2]
    out = call.q.new_zeros(count, heads, call.v.shape[-1])
    return GradCall(None, None, *call[:3], out, call.q.new_zeros(heads, count, dtype=_FP32), *call[3:17])


def _refusals(op: str, device: torch.device, args: Callable[[Call], tuple[Any, ...]]) -> Iterator[Refusal]:
    call = _call(_layout("gaps and tail", device), dtype=_FP32)
    q, k, v = call[:3]

    def no(name: str, text: str, error: type[Exception] = ValueError, of: Call = call, **changed: Any) -> Refusal:
        return Refusal(name, args(of._replace(**changed)), error, f"{op}: {text}")

    yield no("q of two dimensions", "q must have 3 dimensions [T / W, Hq, Dqk], got shape [64, 64]; reshape it", q=q.flatten(1))
    yield no("k of fewer rows", "k must have the rows of q (64), got 56; pass the same rows of the batch", k=k[:56], v=v[:56])
    yield no(
        "float cu_seqlens",
        "cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)",
        TypeError,
        cu_seqlens=call.cu_seqlens.float(),
    )
    yield no(
        "v of another dtype",
        "v must have the dtype of q (float32), got bfloat16; cast one of them",
        TypeError,
        v=v.to(_BF16),
    )
    yield no(
        "a sink without its softmax",
        "sink must come with softmax='learnable', got a sink with softmax='vanilla'; leave it out, or pass softmax='learnable'",
        sink=torch.zeros(4, device=device),
    )
    yield no("unknown comm", "comm must be one of p2p, all_gather, a2a, a2a+p2p, got 'ring'; choose one", comm="ring")
    yield no("unknown partition", "partition must be one of zigzag, contiguous, got 'blocks'; choose one", partition="blocks")
    yield no(
        "one group for two dimensions",
        "group must be a mesh of two dimensions or a pair of groups with comm='a2a+p2p', got 1; pass (ring group, heads group)",
        comm="a2a+p2p",
    )
    yield no(
        "two groups for one dimension",
        "group must be one group with comm='p2p', got 2; pass one dimension of the mesh, or comm='a2a+p2p'",
        groups=["virtual:2", "virtual:2"],
    )
    yield no(
        "no such group",
        "group must be a process group of this process, got 'nobody'; pass a group of this process; torch.distributed must be"
        " initialised",
        groups=["nobody"],
    )
    yield no(
        "no virtual rank",
        "group must name a positive number of virtual ranks, got ['virtual:0']; pass 'virtual:4'",
        groups=["virtual:0"],
    )
    yield no(
        "rows that do not divide",
        "q must have T / W rows, T a multiple of 2 * W (W = 4 here), got 60 rows of all ranks; pad the batch, and every sequence,"
        " to multiples of 2 * W rows",
        q=q[:60],
        k=k[:60],
        v=v[:60],
    )
    yield no(
        "a window round the ring",
        "window must be (-1, -1) with comm='p2p', got (3, 0); pass comm='all_gather' or 'a2a': a ring would send keys that no query"
        " of the next ranks sees",
        window_left=3,
        window_right=0,
    )
    yield no(
        "key heads that do not divide",
        "heads of q and k must be multiples of the 4 ranks that share them, got 4 and 2; pass comm='p2p' or 'all_gather', or split"
        " heads over fewer ranks with 'a2a+p2p'",
        comm="a2a",
        k=k[:, :2],
        v=v[:, :2],
    )
    if device.type == "cpu":
        yield no(
            "a backend that is not there",
            "backend must serve the call, got 'native', which runs on CUDA only; change the call, or pass backend='reference'"
            " (every feature, slow)",
            backend="native",
        )


# --- cost and benches ----------------------------------------------------------------------------------------------------------


def on_one_device(call: Call, **tensors: Tensor) -> attention_thd.Call:
    """The call that one device makes for the whole batch."""
    given = {"q": call.q, "k": call.k, "v": call.v, **tensors}
    settings = call[9:17]
    causal, left, right, scale, softmax, softcap, deterministic, backend = settings
    metadata = (call.cu_seqlens, call.cu_seqlens_padded, None, None, call.sink)
    mask = (causal, False, left, right, scale, softmax, softcap, 0, 0, deterministic, backend, call.return_max_logit)
    return attention_thd.Call(given["q"], given["k"], given["v"], *metadata, *mask)


def context_attention_cost(*args: Any) -> Cost:
    """That of attention on one device; what ranks send is not in it."""
    return attention_cost(*on_one_device(Call(*args)))


def context_attention_grad_cost(*args: Any) -> Cost:
    call = GradCall(*args)
    whole = on_one_device(forward_of(call))
    return attention_grad_cost(call.grad_out, call.grad_lse, *whole[:3], call.out, call.lse, *whole[3:19])


def forward_of(call: GradCall) -> Call:
    """The call whose gradients are asked for."""
    return Call(*call[2:5], *call[7:21], return_max_logit=False, total_tokens=0)


def _bench_call(device: torch.device, comm: str) -> Call:
    sequences, length, heads, dim = (8, 4096, (32, 8), 128) if device.type == "cuda" else (4, 96, (4, 4), 32)
    base = Layout(prefix_sums([length] * sequences, device), None, length * sequences)
    dtype = _BF16 if device.type == "cuda" else _FP32
    return _call(base, comm, 4, dtype=dtype, heads=heads, dims=(dim, dim), causal=True, deterministic=False)


def _bench_gradients(device: torch.device, comm: str) -> GradCall:
    return _gradients(_bench_call(device, comm), True, False)


def context_attention_benches(device: torch.device) -> Iterator[Bench]:
    """What four ranks compute, one after the other, beside one device; messages cost nothing here."""
    yield from _benches(_bench_call, _alone, device)


def context_attention_grad_benches(device: torch.device) -> Iterator[Bench]:
    yield from _benches(_bench_gradients, _alone_backward, device)


def _benches(make: Callable[..., Any], alone: Callable[..., Any], device: torch.device) -> Iterator[Bench]:
    size = "8 x 4096, 32/8 heads, D 128, bf16" if device.type == "cuda" else "4 x 96, 4/4 heads, D 32, fp32"
    for comm in ("p2p", "all_gather", "a2a"):
        yield Bench(f"4 virtual ranks, {comm}, {size}, causal", partial(make, device, comm), alone)


def _alone(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One device, with rows put in the order of the batch and back."""
    call = Call(*args)
    to_batch, to_ranks = _moves(call)
    out, lse, max_logit = torch.ops.thdops.attention(
        *on_one_device(call, **{name: to_batch(getattr(call, name)) for name in "qkv"})
    )
    return to_ranks(out), to_ranks(lse.t()).t(), max_logit


def _alone_backward(*args: Any) -> tuple[Tensor, ...]:
    call = GradCall(*args)
    to_batch, to_ranks = _moves(call)
    whole = on_one_device(forward_of(call), **{name: to_batch(getattr(call, name)) for name in "qkv"})
    given = (None if call.grad_out is None else to_batch(call.grad_out), None)
    dq, dk, dv, dsink = torch.ops.thdops.attention_grad(
        *given, *whole[:3], to_batch(call.out), to_batch(call.lse.t()).t(), *whole[3:19]
    )
    return to_ranks(dq), to_ranks(dk), to_ranks(dv), dsink


def _moves(call: Call | GradCall) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """(rows of all ranks to the order of the batch, and back)."""
    how = (call.cu_seqlens if call.cu_seqlens_padded is None else call.cu_seqlens_padded, 4, call.partition)
    return lambda x: torch.ops.thdops.from_rank_order(x, *how), lambda x: torch.ops.thdops.to_rank_order(x, *how)
