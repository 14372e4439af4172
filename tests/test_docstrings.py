"""Code in docstrings runs as it stands, on what its text takes for granted; code that nobody prepared for is a failure."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thdops
from thdops import packing
from thdops.registry import Registry

THDOPS = Path(thdops.__file__).parent
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
PADDED = torch.tensor([0, 8, 16], dtype=torch.int32)


def _snippets() -> Iterator[tuple[str, str]]:
    """(where, code) of every docstring's first indented block that is Python."""
    for file in sorted(THDOPS.rglob("*.py")):
        module = ".".join(("thdops", *file.relative_to(THDOPS).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
                text = inspect.cleandoc(ast.get_docstring(node) or "")
                text = re.split(r"^(?:Args|Attributes|Returns|Yields|Raises):$", text, maxsplit=1, flags=re.M)[0]
                found = re.search(r"\n\n((?: {4}.*\n|\n)+)", text + "\n")
                if found is not None and _is_python(code := inspect.cleandoc("\n" + found[1])):
                    yield f"{module}.{node.name}" if not isinstance(node, ast.Module) else module, code


def _is_python(text: str) -> bool:
    try:
        return any(isinstance(node, (ast.Call, ast.FunctionDef)) for node in ast.walk(ast.parse(text)))
    except SyntaxError:  # a formula, a command line, a table
        return False


SNIPPETS = dict(_snippets())


def _rows(heads: int = 2, rows: int = 16) -> Tensor:
    return torch.randn(rows, heads, 16, requires_grad=True)


def _qkv() -> dict[str, Any]:
    return {"q": _rows(), "k": _rows(), "v": _rows()}


def _documents() -> list[list[int]]:
    return [[1, 2, 3], [4, 5, 6, 7, 8]]


def _checkpoint() -> dict[str, Any]:
    import functools

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    names = {"functools": functools, "checkpoint": checkpoint}
    names["create_selective_checkpoint_contexts"] = create_selective_checkpoint_contexts
    return {**names, "x": _rows(), "block": lambda x: thdops.attention(x, x, x, CU)}


def _virtual() -> dict[str, Any]:
    """Metadata of the whole batch, and one rank that is the whole group."""
    from thdops import context_parallel

    place = {"total": 16, "world": 1, "rank": 0, "group": "virtual:1"}
    names = {"context_parallel": context_parallel, "torch": torch, "x": _rows(), "project": lambda x: (x, x, x)}
    return {**names, **place, **_qkv(), "valid": CU, "padded": PADDED}


def _communicator() -> dict[str, Any]:
    from thdops.context_parallel import communicator

    return {**vars(communicator), "compute": torch.clone}


def _graphs() -> dict[str, Any]:
    from thdops import PackedSequences, graphs

    names = {"PackedSequences": PackedSequences, "graphs": graphs, "documents": _documents(), "corpus": _documents() * 3}
    return {**names, "tensors_that_step_changes": [], "step": lambda batch: batch.tokens.sum()}


def _mesh() -> Any:
    """Of this process alone."""
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def _sharding() -> dict[str, Any]:
    batch = thdops.PackedSequences.allocate(16, 2, pad_multiple=2).load_(_documents())
    names = {"batch": batch, "mesh": _mesh(), "embed": lambda tokens: tokens.float(), "topk": 2}
    return {**names, "project": lambda x, positions: (_rows(), _rows(), _rows()), "logits": lambda out: out.flatten(1)}


def _dtensor() -> dict[str, Any]:
    mesh = _mesh()
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from thdops.integrations import dtensor

    q, k, v = (distribute_tensor(torch.randn(16, 2, 16), mesh, [Shard(1)]) for _ in "qkv")
    return {"dtensor": dtensor, "given": (q, k, v), "cu_seqlens": distribute_tensor(CU, mesh, [Replicate()])}


def _transformers() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install 'thdops[transformers]')")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    ids = torch.arange(8)[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    names = {"Qwen3MoeForCausalLM": transformers.Qwen3MoeForCausalLM, "batch": batch}
    return {**names, "config": transformers.Qwen3MoeConfig(**sizes, **heads)}


def _dispatch() -> dict[str, Any]:
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    names = {"x": x, "num_experts": 4, "indices": torch.randint(0, 4, (16, 2)), "probs": torch.rand(16, 2)}
    return {**names, "torch": torch, "weight": torch.randn(4, 32, 32, dtype=torch.bfloat16)}


def _partition() -> dict[str, Any]:
    from thdops.context_parallel import partition_indices

    return {"partition_indices": partition_indices, "padded": PADDED, "tokens": torch.arange(16), "labels": torch.arange(16)}


def _merge() -> dict[str, Any]:
    return {"q": _rows(), **{f"{x}_{part}": _rows() for x in "kv" for part in "ab"}, "cu_q": CU, "cu_a": CU, "cu_b": PADDED // 2}


def _packing() -> dict[str, Any]:
    return {"PackedSequences": thdops.PackedSequences, "corpus": _documents(), **{x: _rows(rows=8192) for x in "qkv"}}


def _slots() -> dict[str, Any]:
    names = {"PackedSlots": packing.PackedSlots, "PackSpec": packing.PackSpec, "documents": _documents(), "i": 2}
    weight = torch.ones((), requires_grad=True)
    return {**names, "model": lambda batch: (batch.tokens * weight).sum()}


PREPARED: dict[str, Callable[[], dict[str, Any]]] = {
    "thdops.checkpointing.save_ops": _checkpoint,
    "thdops.conformance": lambda: {"registry": Registry("empty")},
    "thdops.context_parallel": _virtual,
    "thdops.context_parallel.communicator": _communicator,
    "thdops.context_parallel.op.attention": _virtual,
    "thdops.context_parallel.op.simulate": _virtual,
    "thdops.graphs": _graphs,
    "thdops.integrations.dtensor": _dtensor,
    "thdops.integrations.transformers": _transformers,
    "thdops.ops.context.op.partition_indices": _partition,
    "thdops.ops.dispatch.op.permute_tokens": _dispatch,
    "thdops.ops.merge.op.merge_attention": _merge,
    "thdops.packing": _packing,
    "thdops.packing.PackedSlots": _slots,
    "thdops.sharding": _sharding,
}


def test_every_snippet_is_prepared_for() -> None:
    assert set(SNIPPETS) == set(PREPARED)


@pytest.mark.parametrize("where", PREPARED)
def test_a_snippet_runs(where: str) -> None:
    code = SNIPPETS[where].replace('device="cuda"', 'device="cpu"').replace("q, k, v = ...", "q, k, v = given")
    try:
        exec(compile(code, where, "exec"), {"thdops": thdops, **PREPARED[where]()})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
