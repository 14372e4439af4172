"""The stand-in for Megatron-Core's `TEDotProductAttention`: signatures, layouts, masks, parallelism, and what it refuses.

What a call must give is `thdops.attention` on one sequence after the other, without padding. The example's run is at the end.
T rows, B sequences, S rows of each, Hq and Hkv heads, W context-parallel ranks.
"""

from __future__ import annotations

import enum
import inspect
import math
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import thdops
from thdops import context_parallel
from thdops.integrations.megatron import DotProductAttention, dot_product_attention, layouts
from thdops.packing import PackSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import megatron_microbatches  # a script, found beside its modules
from packed_moe import microbatches
from packed_moe.config import make_config
from packed_moe.data import load_documents

# --- what Megatron-Core has (commit 004fe2f) --------------------------------------------------------------------------------------

NOTHING = inspect.Parameter.empty
SIGNATURES: dict[Any, dict[str, Any]] = {
    DotProductAttention.__init__: {
        "self": NOTHING,
        "config": NOTHING,
        "layer_number": NOTHING,
        "attn_mask_type": NOTHING,
        "attention_type": NOTHING,
        "attention_dropout": None,
        "softmax_scale": None,
        "k_channels": None,
        "v_channels": None,
        "num_splits": None,
        "cp_comm_type": "p2p",
        "pg_collection": None,
    },
    DotProductAttention.forward: {
        "self": NOTHING,
        "query": NOTHING,
        "key": NOTHING,
        "value": NOTHING,
        "attention_mask": NOTHING,
        "attn_mask_type": NOTHING,
        "attention_bias": None,
        "packed_seq_params": None,
        "num_splits": None,
    },
    DotProductAttention.sharded_state_dict: {"self": NOTHING, "prefix": "", "sharded_offsets": (), "metadata": None},
}
OURS = {"model_comm_pgs": None}  # what pg_collection was called before
OPTIONAL = {"attn_mask_type"}  # TransformerEngine's own forward does without it


class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


@dataclass
class PackedSeqParams:
    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: Any = None
    cp_group: Any = None
    total_tokens: Any = None
    seq_idx: Any = None


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    expected = SIGNATURES[function]
    assert list(parameters) == [*expected, *(OURS if function is DotProductAttention.__init__ else ())]
    for name, parameter in parameters.items():
        assert parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        wanted = {**OURS, **expected}[name]
        assert parameter.default == (None if name in OPTIONAL and wanted is NOTHING and "query" in expected else wanted), name


def test_neither_library_is_imported() -> None:
    assert not {"megatron", "transformer_engine"} & {name.partition(".")[0] for name in sys.modules}


# --- calls -----------------------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, WIDTH = 4, 2, 16


def config(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"num_attention_heads": HEADS, "num_query_groups": KV_HEADS, "kv_channels": WIDTH, **settings})


def module(kind: Any = AttnMaskType.causal, attention_type: str = "self", **settings: Any) -> DotProductAttention:
    names = ("attention_dropout", "softmax_scale", "k_channels", "v_channels", "cp_comm_type", "pg_collection", "layer_number")
    given = {name: settings.pop(name) for name in names if name in settings}
    return DotProductAttention(config(**settings), given.pop("layer_number", 1), kind, attention_type, **given)


def qkv(*shape: int, widths: tuple[int, int] = (WIDTH, WIDTH), keys: Sequence[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    q, v = widths
    keys = shape if keys is None else keys
    shapes = (*shape, HEADS, q), (*keys, KV_HEADS, q), (*keys, KV_HEADS, v)
    return tuple(torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes)  # pyright: ignore[reportReturnType]


def alone(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """One sequence, `[n, H, D]` each, as `[n, H * D]`."""
    ends = [torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k)]
    return thdops.attention(q, k, v, *ends, **options).flatten(1)


def assert_same(out: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> None:
    """Values and gradients; `expected` has zeros where padding is."""
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True)
    for gradient, wanted in pairs:
        torch.testing.assert_close(gradient, wanted)


LENGTHS = [3, 0, 5, 1]
GAPS = [4, 2, 6, 1]  # rows of each, padding included; three more behind them


def packed(**fields: Any) -> PackedSeqParams:
    valid, padded = (torch.tensor([0, *n]).cumsum(0).int() for n in (LENGTHS, GAPS))
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return PackedSeqParams("thd", **{**dict(zip(names, (valid, valid, padded, padded), strict=True)), **fields})


def one_by_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The pack of `packed`, sequence by sequence."""
    out = torch.zeros(len(q), HEADS * v.shape[-1], dtype=q.dtype)
    parts, starts = [], torch.tensor([0, *GAPS]).cumsum(0).tolist()
    for n, rows, start in zip(LENGTHS, GAPS, starts, strict=False):
        own = slice(start, start + n)
        parts += [alone(q[own], k[own], v[own], **options), out[: rows - n]]
    return torch.cat([*parts, out[:3]])


SETTINGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "causal": (AttnMaskType.causal, {}, {"causal": True}),
    "by a string": ("padding,causal", {}, {"causal": True}),
    "full": (AttnMaskType.no_mask, {}, {}),
    "no causal mask, no window": ("padding", {"window_size": (-1, 0)}, {}),
    "window": (AttnMaskType.padding_causal, {"window_size": (2, 0)}, {"causal": True, "window": (2, 0)}),
    "window to both sides": (AttnMaskType.padding, {"window_size": (1, 2)}, {"window": (1, 2)}),
    "a layer without its window": (
        "causal",
        {"window_size": (2, 0), "window_attn_skip_freq": 3, "layer_number": 6},
        {"causal": True},
    ),
    "a pattern of windows": (
        "causal",
        {"window_size": (1, 0), "window_attn_skip_freq": [0, 1], "layer_number": 2},
        {"causal": True, "window": (1, 0)},
    ),
    "MLA, a scale": (
        "causal",
        {"k_channels": 24, "v_channels": 16, "softmax_scale": 0.3},
        {"causal": True, "scale": 0.3},
    ),
    "off by one": ("causal", {"softmax_type": "off-by-one"}, {"causal": True, "softmax": "off_by_one"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_packed_batches(name: str) -> None:
    kind, settings, options = SETTINGS[name]
    leaves = qkv(sum(GAPS) + 3, widths=(settings.get("k_channels", WIDTH), WIDTH))
    with torch.no_grad():
        padding = thdops.padding_mask(packed().cu_seqlens_q, packed().cu_seqlens_q_padded, len(leaves[0]))
        for x in leaves:
            x[padding] = torch.nan
    out = module(kind, **settings)(*leaves, None, kind, packed_seq_params=packed())
    assert out.shape == (sum(GAPS) + 3, HEADS * WIDTH)
    assert_same(out, one_by_one(*leaves, **options), leaves)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", None])
@pytest.mark.parametrize("name", SETTINGS)
def test_batches_without_padding(layout: str | None, name: str) -> None:
    kind, settings, options = SETTINGS[name]
    if "padding" in str(kind):
        kind = "causal" if options.get("causal") else "no_mask"
    shape = (2, 5) if layout == "bshd" else (5, 2)
    leaves = qkv(*shape, widths=(settings.get("k_channels", WIDTH), WIDTH))
    params = None if layout is None else PackedSeqParams(qkv_format=layout)
    out = module(kind, **settings)(*leaves, torch.ones(1, 1, 5, 5).bool(), packed_seq_params=params)
    along = 0 if layout == "bshd" else 1
    expected = [alone(*(x.select(along, b) for x in leaves), **options) for b in range(2)]
    assert out.is_contiguous()
    assert_same(out, torch.stack(expected, along), leaves)


@pytest.mark.parametrize("layout", ["thd", "sbhd", "bshd"])
def test_rows_are_views_also_of_slices_of_one_projection(layout: str) -> None:
    shape = {"thd": (6,), "sbhd": (3, 2), "bshd": (2, 3)}[layout]
    projected = torch.randn(*shape, KV_HEADS, 4 * WIDTH)  # per key head: two query heads, a key, a value, as Megatron has them
    q = projected[..., : 2 * WIDTH].reshape(*shape, HEADS, WIDTH)
    k, v = projected[..., 2 * WIDTH : 3 * WIDTH], projected[..., 3 * WIDTH :]
    mask = layouts.mask_of("causal")
    rows = layouts.rows_of(layout, q, k, v, mask, None, packed(), True, 1)
    assert [x.data_ptr() for x in rows[:3]] == [x.data_ptr() for x in (q, k, v)]


MASKS = {
    "right": [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("given", ["right", "left", "cu_seqlens"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_batches_with_padding(layout: str, given: str) -> None:
    padding = torch.tensor(MASKS["right" if given == "cu_seqlens" else given]).bool()
    along = 1 if layout == "sbhd" else 0
    leaves = qkv(*((5, 3) if along else (3, 5)))
    with torch.no_grad():
        for x in leaves:
            x[padding.t() if along else padding] = torch.nan
    params = PackedSeqParams(qkv_format=layout)
    mask = padding[:, None, None]
    if given == "cu_seqlens":
        mask, params.cu_seqlens_q = None, torch.nn.functional.pad((~padding).sum(1).cumsum(0), (1, 0))
    out = module("padding_causal")(*leaves, mask, AttnMaskType.padding_causal, packed_seq_params=params)
    expected = []
    for b in range(3):
        first, n = int((~padding[b]).int().argmax()), int((~padding[b]).sum())
        own = slice(first, first + n)
        part = alone(*(x.select(along, b)[own] for x in leaves), causal=True)
        expected.append(torch.nn.functional.pad(part, (0, 0, first, 5 - first - n)))
    assert out.is_contiguous()
    assert_same(out, torch.stack(expected, along), leaves)


@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (3, 0)])
def test_batches_without_a_row(batch: int, length: int, layout: str, kind: str) -> None:
    shape = (length, batch) if layout == "sbhd" else (batch, length)
    leaves = qkv(*shape)
    attend = module(kind, qk_clip=True)
    out = attend(*leaves, torch.zeros(batch, 1, 1, length).bool(), packed_seq_params=PackedSeqParams(layout))
    assert out.shape == (*shape, HEADS * WIDTH)
    assert [x.shape for x in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in leaves]
    assert attend.current_max_attn_logits is not None
    assert attend.current_max_attn_logits.tolist() == [-torch.inf] * HEADS


CROSS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("no_mask", {}, {}),
    "causal": ("causal", {}, {"causal": True}),
    "causal, bottom right": ("causal_bottom_right", {}, {"causal": True, "causal_alignment": "bottom_right"}),
    "window": ("no_mask", {"window_size": (1, 1)}, {"window": (1, 1), "causal_alignment": "bottom_right"}),
}


@pytest.mark.parametrize("layout", ["thd", "sbhd", "bshd"])
@pytest.mark.parametrize("name", CROSS)
def test_cross_attention(layout: str, name: str) -> None:
    """Three queries and five keys; packed, two such sequences."""
    kind, settings, options = CROSS[name]
    queries, keys = {"thd": ((6,), (10,)), "sbhd": ((3, 2), (5, 2)), "bshd": ((2, 3), (2, 5))}[layout]
    leaves = qkv(*queries, keys=keys)
    ends = {"cu_seqlens_q": torch.tensor([0, 3, 6]), "cu_seqlens_kv": torch.tensor([0, 5, 10])} if layout == "thd" else {}
    out = module(kind, "cross", **settings)(*leaves, None, packed_seq_params=PackedSeqParams(layout, **ends))
    along = 1 if layout == "sbhd" else 0
    if layout == "thd":
        parts = [alone(*(x[b * len(x) // 2 : (b + 1) * len(x) // 2] for x in leaves), **options) for b in range(2)]
        expected = torch.cat(parts)
    else:
        expected = torch.stack([alone(*(x.select(along, b) for x in leaves), **options) for b in range(2)], along)
    assert_same(out, expected, leaves)


@pytest.mark.parametrize(("attention_type", "lengths"), [("cross", (2, 4)), ("self", (4, 6))])
def test_keys_with_sequences_of_their_own(attention_type: str, lengths: tuple[int, int]) -> None:
    """As many as queries in cross-attention, more in self-attention (a cache)."""
    first, second = lengths
    leaves = qkv(6, keys=(first + second,))
    ends = {"cu_seqlens_q": torch.tensor([0, 3, 6]), "cu_seqlens_kv": torch.tensor([0, first, first + second])}
    out = module("causal_bottom_right", attention_type)(*leaves, None, packed_seq_params=PackedSeqParams("thd", **ends))
    q, k, v = leaves
    options: dict[str, Any] = {"causal": True, "causal_alignment": "bottom_right"}
    parts = [alone(q[:3], k[:first], v[:first], **options), alone(q[3:], k[first:], v[first:], **options)]
    assert_same(out, torch.cat(parts), leaves)


def test_cross_attention_with_padding() -> None:
    leaves = qkv(2, 3, keys=(2, 5))
    masks = torch.tensor([[0, 0, 1], [0, 0, 0]]).bool(), torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()
    attend = module("padding", "cross")
    out = attend(*leaves, tuple(mask[:, None, None] for mask in masks), packed_seq_params=PackedSeqParams("bshd"))
    q, k, v = leaves
    first = torch.nn.functional.pad(alone(q[0, :2], k[0, :4], v[0, :4]), (0, 0, 0, 1))
    assert_same(out, torch.stack((first, alone(q[1], k[1, :2], v[1, :2]))), leaves)
    same = masks[0][:, None, None]  # for keys as many as queries
    whole = attend(q, k[:, :3], v[:, :3], (same, same), packed_seq_params=PackedSeqParams("bshd"))
    torch.testing.assert_close(whole[0, :2], alone(q[0, :2], k[0, :2], v[0, :2]))


@pytest.mark.parametrize("layout", ["thd", "sbhd"])
def test_a_learnable_softmax_offset(layout: str) -> None:
    """TransformerEngine's name and shape, cut by heads in tensor parallelism; its gradient is summed over the batch."""
    attend = module(softmax_type="learnable")
    offset = attend.softmax_offset
    assert offset is not None
    assert {name: tuple(p.shape) for name, p in attend.named_parameters()} == {"softmax_offset": (HEADS,)}
    assert not offset.any()
    assert vars(offset) == {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
    with torch.no_grad():
        offset.copy_(torch.randn(HEADS))
    leaves = (*qkv(*((sum(GAPS) + 3,) if layout == "thd" else (5, 2))), offset)
    options: dict[str, Any] = {"causal": True, "softmax": "learnable", "sink": offset}
    if layout == "thd":
        out = attend(*leaves[:3], None, packed_seq_params=packed())
        expected = one_by_one(*leaves[:3], **options)
    else:
        out = attend(*leaves[:3], None)
        expected = torch.stack([alone(*(x[:, b] for x in leaves[:3]), **options) for b in range(2)], 1)
    assert_same(out, expected, leaves)
    for plain in ("vanilla", "off-by-one"):
        assert module(softmax_type=plain).softmax_offset is None
    assert (
        attend.bfloat16()(*(x.bfloat16() for x in leaves[:3]), None, packed_seq_params=packed() if layout == "thd" else None)
        .isfinite()
        .all()
    )


def test_the_largest_logits_since_the_last_look() -> None:
    attend = module(qk_clip=True, softmax_scale=1.0)
    assert attend.current_max_attn_logits is None
    largest = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for turn in range(3):
        q, k, v = qkv(5, 2)
        with torch.inference_mode(turn == 0):
            attend(q, k, v, None)
        logits = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(2, 2))
        hidden = torch.ones(5, 5).triu(1).bool()
        largest = torch.maximum(largest, logits.masked_fill(hidden, -torch.inf).amax((0, 2, 3)).detach())
        torch.testing.assert_close(attend.current_max_attn_logits, largest)
    assert module(log_max_attention_logit=True).max_logits_wanted
    assert not module().max_logits_wanted


def test_hints_and_determinism_reach_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = dot_product_attention.attention
    monkeypatch.setattr(dot_product_attention, "attention", lambda *args, **options: seen.append(options) or real(*args, **options))
    leaves = qkv(sum(GAPS) + 3)
    module(deterministic_mode=True)(*leaves, None, packed_seq_params=packed(max_seqlen_q=6, max_seqlen_kv=torch.tensor(6)))
    module()(*leaves, None, packed_seq_params=packed())
    assert [seen[0][name] for name in ("deterministic", "max_seqlen_q", "max_seqlen_kv")] == [True, 6, None]
    assert [seen[1][name] for name in ("deterministic", "max_seqlen_q", "max_seqlen_kv")] == [None, None, None]


@pytest.mark.parametrize("layout", ["thd", "sbhd"])
def test_compiled_in_one_graph(layout: str) -> None:
    attend = module(softmax_type="learnable", window_size=(2, 0))
    leaves = qkv(*((sum(GAPS) + 3,) if layout == "thd" else (5, 2)))
    params = packed() if layout == "thd" else None
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_same(
        compiled(*leaves, None, AttnMaskType.causal, packed_seq_params=params),
        attend(*leaves, None, packed_seq_params=params),
        leaves,
    )


# --- parallel --------------------------------------------------------------------------------------------------------------------


def test_a_tensor_parallel_rank_has_its_heads() -> None:
    leaves = qkv(5, 1)
    attend = DotProductAttention(
        config(num_attention_heads=8, num_query_groups=4, tensor_model_parallel_size=2), 1, "causal", "self"
    )
    assert_same(attend(*leaves, None), module()(*leaves, None), leaves)
    assert DotProductAttention(config(num_query_groups=None), 1, "causal", "self").kv_heads == HEADS


@pytest.mark.parametrize("comm", ["p2p", None, "all_gather", "a2a", "a2a+p2p"])
def test_context_parallelism(comm: str | None) -> None:
    """Virtual ranks: tensors hold the rows of all of them, one rank after the other. The ring has two, heads are cut in two."""
    ranks = 4 if comm == "a2a+p2p" else 2
    groups = SimpleNamespace(tp=None, cp="virtual:2", hcp=["virtual:2", "virtual:2"])
    attend = module(context_parallel_size=ranks, cp_comm_type=comm, pg_collection=groups, softmax_type="learnable")
    valid, padded = torch.tensor([0, 13, 13, 20]), torch.tensor([0, 16, 24, 32])
    leaves = qkv(40)
    options: dict[str, Any] = {"causal": True, "softmax": "learnable", "sink": attend.softmax_offset}
    expected = thdops.attention(*leaves, valid, cu_seqlens_q_padded=padded, **options).flatten(1)
    by_rank = [context_parallel.to_rank_order(x, padded, ranks) for x in leaves]
    params = PackedSeqParams("thd", valid, valid, padded, padded)
    out = context_parallel.from_rank_order(attend(*by_rank, None, packed_seq_params=params), padded, ranks)
    assert attend.softmax_offset is not None
    assert_same(out, expected, (*leaves, attend.softmax_offset))


def test_groups_of_all_ways_and_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine has the group that exchanges heads first; sequences of a batch are as long as all ranks' rows."""
    seen: list[dict[str, Any]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, padded: Any, **options: Any) -> Tensor:
        seen.append({"rows": q.shape, "ends": cu_seqlens.tolist(), **options})
        return q

    monkeypatch.setattr(dot_product_attention.context_parallel, "attention", record)
    two, three = "two", "three"
    sizes = {two: 2, three: 3}
    monkeypatch.setattr(
        dot_product_attention,
        "place_in",
        lambda op, group: (math.prod(map(sizes.__getitem__, [group] if isinstance(group, str) else group)), 0),
    )
    attend = module(
        context_parallel_size=6, cp_comm_type="a2a+p2p", model_comm_pgs=None, pg_collection=SimpleNamespace(hcp=[two, three])
    )
    attend(*qkv(4, 5), None)
    assert (seen[-1]["group"], seen[-1]["rows"], seen[-1]["ends"]) == ((three, two), (4, 5 * HEADS, WIDTH), [0, 24])
    attend = module(context_parallel_size=2, pg_collection=SimpleNamespace(cp=two))
    attend(*qkv(5, 4), None, packed_seq_params=PackedSeqParams("bshd"))
    assert (seen[-1]["group"], seen[-1]["comm"], seen[-1]["ends"]) == (two, "p2p", [0, 8, 16, 24, 32, 40])
    leaves = qkv(sum(GAPS) + 3)
    attend(*leaves, None, packed_seq_params=packed(cp_group=three, local_cp_size=3))
    attend.set_context_parallel_group(three, [0, 1, 2], None, "all_gather")
    attend(*leaves, None, packed_seq_params=packed())
    assert [call["group"] for call in seen[-2:]] == [three, three]
    assert [call["comm"] for call in seen[-2:]] == ["p2p", "all_gather"]
    count = len(seen)
    assert_same(
        attend(*leaves, None, packed_seq_params=packed(local_cp_size=1)),
        module()(*leaves, None, packed_seq_params=packed()),
        leaves,
    )
    attend.set_context_parallel_group(None)
    assert len(seen) == count
    old = DotProductAttention(config(context_parallel_size=2), 1, "causal", "self", model_comm_pgs=SimpleNamespace(cp=two))
    assert old.cp_group is two


def test_distributed_checkpoints_cut_the_offset_by_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = types.ModuleType("megatron.core.transformer.utils")
    fake.make_sharded_tensors_for_checkpoint = lambda *args, **groups: {"args": args, **groups}
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    attend = module(softmax_type="learnable", pg_collection=SimpleNamespace(tp="tp", cp=None))
    made = attend.sharded_state_dict("core.", ((0, 1, 2),), {"dp_cp_group": "dp"})
    assert made["args"] == ({"softmax_offset": attend.softmax_offset}, "core.", {"softmax_offset": 0}, ((0, 1, 2),))
    assert (made["tp_group"], made["dp_cp_group"]) == ("tp", "dp")
    assert module().sharded_state_dict("core.") == {}


# --- refusals --------------------------------------------------------------------------------------------------------------------

_BATCH = PackedSeqParams("bshd")
_HOLE = torch.tensor([[0, 1, 0], [0, 0, 0]]).bool()[:, None, None]
REFUSED_MODULES: list[tuple[dict[str, Any], str]] = [
    ({"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1; set it to 0.0 in the configuration"),
    (
        {"fp8_dot_product_attention": True},
        "config.fp8_dot_product_attention must be False, got True; attention in FP8 is not served",
    ),
    ({"softmax_type": "other"}, "config.softmax_type must be one of vanilla, off-by-one, learnable, got 'other'"),
    ({"kind": AttnMaskType.arbitrary}, "attn_mask_type must be one of no_mask, padding, causal"),
    ({"kind": None}, "attn_mask_type must be one of"),
    ({"attention_type": "other"}, "attention_type must be one of self, cross, got 'other'"),
    ({"cp_comm_type": "ring"}, "cp_comm_type must be one of p2p, all_gather, a2a, a2a+p2p, got 'ring'"),
    ({"window_size": (1, 2, 3)}, "config.window_size must be a pair of integers (left, right), got (1, 2, 3)"),
    (
        {"window_size": (1, 0), "window_attn_skip_freq": [1], "layer_number": 2},
        "config.window_attn_skip_freq must be a number or reach layer 2, got [1]",
    ),
    ({"window_size": (1, 0), "window_attn_skip_freq": 0}, "config.window_attn_skip_freq must be a number or reach layer 1, got 0"),
    ({"tensor_model_parallel_size": 4}, "config.num_query_groups must be a multiple of tensor_model_parallel_size (4), got 2"),
]
REFUSED_CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"attention_bias": torch.zeros(1)}, "attention_bias must be None, got a Tensor; biases are not served"),
    ({}, {"attn_mask_type": AttnMaskType.arbitrary}, "attn_mask_type must be one of no_mask, padding"),
    ({}, {"packed_seq_params": PackedSeqParams("sbh3d")}, "qkv_format must be one of thd, sbhd, bshd, got 'sbh3d'"),
    ({}, {"packed_seq_params": packed()}, "query must be [T, H, D] with qkv_format='thd', got shape [2, 3, 4, 16]; reshape it"),
    ({"num_attention_heads": 8}, {}, "query must have 8 heads, as the configuration says, got 4; pass one tensor-parallel rank's"),
    ({"num_query_groups": 4}, {}, "key must have 4 heads, as the configuration says, got 2"),
    (
        {"kind": "padding"},
        {"packed_seq_params": _BATCH},
        "attention_mask must be bool [2, 1, 1, 3], True on padding, with a mask type",
    ),
    (
        {"kind": "padding"},
        {"packed_seq_params": _BATCH, "attention_mask": _HOLE},
        "attention_mask must have its tokens side by side in each sequence, got a hole",
    ),
    (
        {"kind": "padding"},
        {"packed_seq_params": PackedSeqParams("bshd", torch.tensor([0, 1]))},
        "cu_seqlens_q must have B + 1 entries (3), got 2 entries",
    ),
    (
        {"kind": "padding", "attention_type": "cross"},
        {"packed_seq_params": _BATCH, "attention_mask": ~_HOLE},
        "attention_mask must be a pair of masks in cross-attention, got a Tensor",
    ),
    ({"context_parallel_size": 2}, {}, "pg_collection must name the context-parallel ranks, got none; pass it, call"),
    (
        {},
        {"packed_seq_params": PackedSeqParams(local_cp_size=2)},
        "packed_seq_params.cp_group must name the context-parallel ranks",
    ),
    (
        {"kind": "padding", "context_parallel_size": 2, "pg_collection": SimpleNamespace(cp="two ranks")},
        {"packed_seq_params": _BATCH},
        "qkv_format must be 'thd' with padding and context parallelism, got qkv_format='bshd' and a mask with padding",
    ),
    (
        {"attention_type": "cross", "context_parallel_size": 2, "pg_collection": SimpleNamespace(cp="two ranks")},
        {},
        "attention_type must be 'self' under context parallelism, got keys of their own",
    ),
    (
        {"cp_comm_type": "a2a+p2p", "context_parallel_size": 2, "pg_collection": SimpleNamespace(hcp="two ranks")},
        {},
        "group must be a pair (of 'a2a', of 'p2p') with 'a2a+p2p', got 'two ranks'; pass both, or choose another",
    ),
    ({}, {"query": torch.zeros(16)}, "query must be [S, B, H, D] with qkv_format='sbhd', got shape [16]; reshape it"),
    ({}, {"key": torch.zeros(2, 1, 2, 16)}, "key must have the 3 sequences of query, got 1; pass keys of the same sequences"),
    (
        {"attention_type": "cross"},
        {"key": torch.zeros(3, 3, 2, 16), "packed_seq_params": _BATCH},
        "key must have the 2 sequences of query, got 3",
    ),
    ({}, {"value": torch.zeros(2, 6, 1, 16)}, "value must have 2 heads, as the configuration says, got 1"),
    ({}, {"value": torch.zeros(3, 2, 2, 16)}, "value must stand in the rows of key ([2, 3, 2, 16]), got [3, 2, 2, 16]"),
    (
        {"kind": "padding"},
        {"packed_seq_params": PackedSeqParams("bshd", torch.tensor(3))},
        "cu_seqlens_q must have 1 dimension [B+1], got shape []",
    ),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED_MODULES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_modules_that_cannot_be_served(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"DotProductAttention: {text}")):
        module(**settings)


@pytest.mark.parametrize(
    ("settings", "call", "text"), REFUSED_CALLS, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_calls_that_cannot_be_served(
    settings: dict[str, Any], call: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot_product_attention, "place_in", lambda op, group: (2, 0))
    attend = module(**settings)
    with pytest.raises(ValueError, match=re.escape(f"DotProductAttention: {text}")):
        attend(**{**dict(zip(("query", "key", "value"), qkv(2, 3), strict=True)), "attention_mask": None, **call})


def test_what_is_no_tensor_is_refused_by_name() -> None:
    query, key, _ = qkv(2, 3)
    not_one: Any = None
    with pytest.raises(TypeError, match="DotProductAttention: value must be a tensor, got None"):
        module()(query, key, not_one, None)
    with pytest.raises(TypeError, match="DotProductAttention: cu_seqlens_q must be a tensor, got a list"):
        module("padding")(*qkv(2, 3), None, packed_seq_params=PackedSeqParams("bshd", [0, 3, 6]))
    ends = torch.tensor([0, 3, 6])
    with pytest.raises(TypeError, match="DotProductAttention: cu_seqlens_kv must be a tensor, got None"):
        module("padding", "cross")(*qkv(2, 3, keys=(2, 4)), None, packed_seq_params=PackedSeqParams("bshd", ends))
    with pytest.raises(ValueError, match="DotProductAttention: cp_comm_type must be one of p2p"):
        module().set_context_parallel_group(None, cp_comm_type="ring")


def test_a_pack_without_lengths_is_refused() -> None:
    with pytest.raises(
        ValueError, match="packed_seq_params must have cu_seqlens_q with qkv_format='thd', got none; pass prefix sums"
    ):
        module()(*qkv(5), None, packed_seq_params=PackedSeqParams("thd"))


# --- the example -----------------------------------------------------------------------------------------------------------------

SMALL = ["--max-tokens", "64", "--max-seqs", "6", "--dim", "16", "--ffn", "16", "--layers", "1", "--replays", "2"]


def test_the_order_of_micro_batches() -> None:
    order = [f"{kind[0]}{m}" for kind, m in microbatches.one_forward_one_backward(4)]
    assert order == ["f0", "f1", "f2", "f3", "b0", "f4", "b1", "b2", "b3", "b4"]
    assert [kind[0] for kind, _ in microbatches.one_forward_one_backward(1)] == ["f", "b"] * 5


@pytest.fixture
def small_text(tmp_path: Path) -> list[str]:
    (tmp_path / "text").write_text("\n\n".join("words " * n for n in range(1, 20)))
    return [*SMALL, "--data", str(tmp_path)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="sizes of a CPU")
def test_the_example_passes_its_checks(small_text: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert megatron_microbatches.main(small_text) == 0
    said = capsys.readouterr().out
    assert said.count("  pass  ") == 7
    assert "not shown, for want of a GPU: CUDA graphs" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="sizes of a CPU")
@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("read early", ["eager: losses and weights finite", "eager: the scale of the backward counts"]),
        ("left out", ["eager: the scale of the backward counts"]),
        ("knows of others", ["eager: in flight as one at a time"]),
    ],
)
def test_faults_make_the_exit_code_1(
    fault: str, caught: list[str], small_text: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = thdops.attach_loss
    if fault == "read early":
        monkeypatch.setattr(thdops, "attach_loss", lambda x, loss, scale: real(x, loss * scale.clone(), 1.0))
    elif fault == "left out":
        monkeypatch.setattr(thdops, "attach_loss", lambda x, loss, scale: x)
    else:
        forward = microbatches.Pipeline.forward

        def counting(self: microbatches.Pipeline, m: int) -> None:
            forward(self, m)
            self.waiting[m] = self.waiting[m] * len(self.waiting)

        monkeypatch.setattr(microbatches.Pipeline, "forward", counting)
    assert megatron_microbatches.main(small_text) == 1
    failed = capsys.readouterr().out.rpartition("FAILED: ")[2].strip().split("; ")
    assert set(caught) <= set(failed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="sizes of a CPU")
def test_every_slot_has_layers_captured_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the capture: it calls each layer on its samples, as the real one does, and hands the layers back."""
    captured = []

    def capture(layers: Any, samples: Any) -> Any:
        for layer, sample in zip(layers, samples, strict=True):
            layer(*sample)
        captured.append(layers)
        return layers

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    sizes = {"max_tokens": 64, "max_seqs": 6, "dim": 16, "ffn": 16, "layers": 2, "steps": 1}
    size = make_config("cpu", 0, **sizes)
    drawn = microbatches.draw_microbatches(load_documents(None, 32), size, 0)
    eager, layers = microbatches.Pipeline(size), microbatches.Pipeline(size)
    microbatches.eager(eager)(drawn, False)
    microbatches.graphed_layers(layers, drawn)(drawn, False)
    assert len({id(layer) for of_slot in captured for layer in of_slot}) == 4 * 2
    assert layers.layers == captured
    assert torch.equal(layers.bits, eager.bits)
    lengths = sorted(sum(map(len, texts)) for texts in drawn)
    assert lengths[:2] == [0, 1]
    assert lengths[-1] == 64


@pytest.mark.parametrize("sizes", [{"max_tokens": 56, "max_seqs": 4}, {"max_tokens": 64, "max_seqs": 1}], ids=str)
def test_a_full_micro_batch_has_as_many_documents_as_fit(sizes: dict[str, int]) -> None:
    size = make_config("cpu", 0, **sizes)
    texts = load_documents(None, size.max_tokens // 2)
    pack = PackSpec(size.max_tokens, size.max_seqs, pad_multiple=size.pad_multiple)
    for iteration in range(8):
        drawn = microbatches.draw_microbatches(texts, size, iteration)
        assert all(map(pack.fits, drawn))
        assert max(sum(map(len, documents)) for documents in drawn) == size.max_tokens


def test_sizes_that_cannot_work_give_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert megatron_microbatches.main(["--replays", "0"]) == 2
    assert capsys.readouterr().err == "error: --replays must be at least 1, got 0; pass a positive number\n"


@pytest.mark.gpu
def test_on_a_gpu_graphs_equal_eager_bitwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert megatron_microbatches.main(["--replays", "20"]) == 0
    said = capsys.readouterr().out
    assert said.count("bitwise equal to eager") == 2
    assert "graphs captured: 1" in said
