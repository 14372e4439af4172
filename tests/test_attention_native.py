"""The native attention kernels: tiles, sections of blocks, every feature against a loop over rows, random layouts, full sizes.

On CPU they run in Triton's interpreter in fp32, cut into blocks so small that every sequence has several, and every address is
held against the tensors' memory. On a GPU they are called as ops.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_oracle import (
    BEFORE,
    FEWER_KEYS,
    GAPS,
    KEYS,
    MASKS,
    QUERIES,
    SOFTMAX,
    Answers,
    Batch,
    Case,
    Numbers,
    check_padding,
    compare,
    computed,
    forget_plans,
    from_offsets,
    numbers,
    oracle,
    poisoned,
)
from capturing import captured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import thdops
from meta_kernels.attention_thd import GradCall
from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.conformance.memory import poisoned_allocations
from thdops.ops.attention_thd import backends, samples
from thdops.ops.attention_thd import op as attention_op
from thdops.ops.layouts import prefix_sums
from thdops.ops.padding.reference import locate_rows

CUDA = torch.cuda.is_available()
UNITS = 16
"""Of fp32 that results may be off. A logit L comes from a product in fp32, so e^L is off by about L units: logits reach 10 here."""
interpreted = pytest.mark.skipif(not CUDA and why_not() != "", reason=why_not() or "interpreted")

LONG = Batch([37, 0, 20, 1], [40, 3, 20, 5], 75, before=2)
LONG_KEYS = Batch([20, 4, 35, 0], [21, 8, 40, 0], 70)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_plans(monkeypatch)
    if why_not() == "" and not CUDA:
        from thdops.ops.attention_thd import kernels

        monkeypatch.setattr(kernels, "_BLOCKS_FP32", kernels.Blocks(16, 16, 4, 1))


def native(case: Case, given: Numbers, **more: Any) -> Answers:
    """What the native kernels give, fp32; padding rows are checked to be exact on the way."""
    if CUDA:
        return computed(case, given, "cuda", backend="native", **more)
    metadata, options = case.arguments("cpu")
    names = ("cu_seqlens_q", "cu_seqlens_kv")
    call = attention_op._call(
        *given[:3], **dict(zip(names, metadata, strict=False)), sink=given.sink, return_max_logit=True, **{**options, **more}
    )
    with guarded_memory([x for x in (*call, *given) if isinstance(x, Tensor)]):
        out, lse, max_logit = backends.attention(*call)
        grad = GradCall(given.grad_out, given.grad_lse, *call[:3], out, lse, *call[3:19])
        dq, dk, dv, dsink = backends.attention_grad(*grad)
    gradients = (dq, dk, dv) if given.sink is None else (dq, dk, dv, dsink)
    answers = Answers(out, lse, max_logit, gradients)
    check_padding(case, answers)
    return answers


def holds(case: Case, seed: int = 0) -> None:
    """Against the oracle; and with NaN on padding rows, the same bits."""
    given = numbers(case, torch.float32, seed)
    answers = native(case, given, deterministic=True)
    compare(answers, oracle(case, given), torch.float32, UNITS)
    again = native(case, poisoned(case, given), deterministic=True)
    for a, b in zip((again.out, again.lse, *again.gradients), (answers.out, answers.lse, *answers.gradients), strict=True):
        assert torch.equal(a, b)


_FEATURES = {**MASKS, "many blocks": {"window": (24, 20)}, "causal, many blocks": {"causal": True, "window": (18, -1)}}
_PAIRS = [*((mask, "vanilla") for mask in _FEATURES), *(("causal, many blocks", kind) for kind in SOFTMAX if kind != "vanilla")]


@interpreted
@pytest.mark.parametrize(("mask", "softmax"), _PAIRS)
@pytest.mark.parametrize("alignment", ["self", "top_left", "bottom_right"])
def test_every_feature_over_several_blocks(alignment: str, mask: str, softmax: str) -> None:
    options = {**_FEATURES[mask], **SOFTMAX[softmax]}
    if alignment == "self":
        case = Case(LONG, options=options)
    else:
        case = Case(LONG, LONG_KEYS, options={**options, "causal_alignment": alignment})
    given = numbers(case, torch.float32)
    compare(native(case, given), oracle(case, given), torch.float32, UNITS)


@interpreted
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 2), (24, 16)), ((4, 4), (16, 40)), ((4, 1), (48, 32)), ((6, 2), (104, 72))], ids=str
)
def test_heads_and_widths_of_one_and_two_parts(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    holds(Case(LONG, heads=heads, dims=dims, options={"causal": True}))


@interpreted
@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_scales_of_any_sign(scale: float) -> None:
    case = Case(LONG, options={"causal": True, "scale": scale})
    given = numbers(case, torch.float32)
    expected = oracle(case._replace(options={"causal": True, "scale": scale or 1e-30}), given)
    compare(native(case, given), expected, torch.float32, 8 * UNITS)  # logits reach 60 here


@interpreted
def test_reported_layouts() -> None:
    """Cases 3, 7, 8, 9, 11, 12 and 16 on these kernels: gaps, slots of length zero, garbage on padding, one row a sequence."""
    bottom_right = {"causal": True, "causal_alignment": "bottom_right"}
    for case in (
        Case(from_offsets([0, 1, 2, 3, 7, 10, 12, 13, 14], [0, 1, 2, 4, 8, 12, 14, 15, 16], 18), options={"causal": True}),
        Case(Batch([5, 3, 6, 0], None, 16), options={"causal": True}),
        Case(from_offsets([0, 3, 5, 9], [0, 4, 8, 13], 15)),
        Case(Batch([1, 0, 1], None, 2), Batch([3, 0, 5], None, 8), heads=(9, 3), options=bottom_right),
        Case(*FEWER_KEYS, options=bottom_right),
        Case(QUERIES, KEYS, options={"softmax": "learnable", "window": (0, 0)}),
        Case(Batch([0] * 12 + [9] + [0] * 12 + [4], None, 13), options={"causal": True}),
        Case(GAPS),
        Case(BEFORE, options={"causal": True}),
    ):
        holds(case)


def test_launchers_refuse_what_the_ops_refuse() -> None:
    """They check every kind of call themselves, before anything is planned."""
    device = torch.device("cpu")
    for launcher, refusals in (
        (backends.attention, samples.attention_refusals),
        (backends.attention_grad, samples.attention_grad_refusals),
    ):
        for refusal in refusals(device):
            for _ in range(2):
                with pytest.raises(refusal.error) as raised:
                    launcher(*refusal.args)
                assert str(raised.value) == refusal.text.format(device)


@pytest.mark.skipif(CUDA or why_not() != "", reason=why_not() or "on a GPU, the memory between rows would be there")
@pytest.mark.parametrize("lengths", [[32, 1], [33]], ids=["between sequences", "within one"])
def test_rows_of_a_fused_view_past_two_to_the_31_elements(lengths: list[int]) -> None:
    """Case 13 on these kernels: q, k, v and a gradient in one buffer, whose last row stands 2^31 elements behind the first."""
    case = Case(Batch(lengths, None, 33), heads=(2, 1), dims=(16, 16), options={"causal": True})
    given = numbers(case, torch.float32)
    near = native(case, given, deterministic=True)
    wide = torch.empty(2**31 + 96, dtype=torch.float32).as_strided((33, 6, 16), (2**26, 16, 1))
    q, k, v, grad_out = wide.split((2, 1, 1, 2), 1)
    for view, x in zip((q, k, v, grad_out), (*given[:3], given.grad_out), strict=True):
        view.copy_(x)
    far = native(case, given._replace(q=q, k=k, v=v, grad_out=grad_out), deterministic=True)
    for a, b in zip((far.out, far.lse, *far.gradients), (near.out, near.lse, *near.gradients), strict=True):
        assert torch.equal(a, b)


@interpreted
def test_a_strided_sink() -> None:
    case = Case(GAPS, options={"causal": True, "softmax": "learnable"})
    given = numbers(case, torch.float32)
    wide = torch.full((4, 3), 7.0)
    wide[:, 1] = given.sink
    expected = oracle(case, given)
    compare(native(case, given._replace(sink=wide[:, 1])), expected, torch.float32, UNITS)


@interpreted
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_layouts(data: st.DataObject) -> None:
    sequences = data.draw(st.integers(0, 4))
    draw = lambda high: data.draw(st.lists(st.integers(0, high), min_size=sequences, max_size=sequences))  # noqa: E731

    def side() -> Batch:
        lengths, gaps = draw(24), draw(5)
        before, tail = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
        padded = [length + gap for length, gap in zip(lengths, gaps, strict=True)]
        return Batch(lengths, padded, before + sum(padded) + tail, before)

    options = {
        "causal": data.draw(st.booleans()),
        "window": (data.draw(st.integers(-1, 30)), data.draw(st.integers(-1, 30))),
        "causal_alignment": data.draw(st.sampled_from(["top_left", "bottom_right"])),
    }
    keys = side() if data.draw(st.booleans()) else None
    holds(Case(side(), keys, heads=(2, 1), options=options), data.draw(st.integers(0, 99)))


# --- tiles --------------------------------------------------------------------------------------------------------------------


def _tiles_of(x: Batch, y: Batch, bottom_right: bool, block: int) -> list[list[int]]:
    """The table as a loop makes it."""
    starts = list(itertools.accumulate(x.padded or x.lengths, initial=x.before))
    starts_y = list(itertools.accumulate(y.padded or y.lengths, initial=y.before))
    segments = [(0, x.before, 0, 0, 0)]
    for b, (n, m) in enumerate(zip(x.lengths, y.lengths, strict=True)):
        segments.append((starts[b], starts[b + 1], n, starts_y[b], m))
    segments.append((starts[-1], x.total, 0, 0, 0))
    table = []
    for segment, (start, end, valid, other, others) in enumerate(segments):
        for first in reversed(range(start, end, block)):
            row = first - start
            table.append(
                [
                    first,
                    min(end - first, block),
                    max(0, min(valid - row, block)),
                    other,
                    others,
                    row + (others - valid if bottom_right else 0),
                    row // block,
                    segment,
                ]
            )
    return table


@interpreted
@pytest.mark.parametrize("sequences", [0, 1, 3, 40, 300])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_tile_table(sequences: int, bottom_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has one tile; 300 sequences are made to need several chunks of the count."""
    from thdops.ops.attention_thd import kernels_tiles
    from thdops.ops.attention_thd.kernels_tiles import Tiles, TileTable

    monkeypatch.setattr(kernels_tiles, "_TOGETHER", 64)
    generator = torch.Generator().manual_seed(sequences)
    draw = lambda values: [values[i] for i in torch.randint(len(values), (sequences,), generator=generator)]  # noqa: E731
    x, y = (
        Batch(lengths, [n + gap for n, gap in zip(lengths, gaps, strict=True)], sum(lengths) + sum(gaps) + 12, before=5)
        for lengths, gaps in ((draw([0, 0, 3, 17, 40]), draw([0, 2, 9])) for _ in range(2))
    )
    device = "cuda" if CUDA else "cpu"

    offsets = [
        cu if padded is None else padded for side in (x, y) for cu, padded in [side.metadata(device)] for padded in (cu, padded)
    ]

    def tile_table(*how: Any, **more: Any) -> Tiles:
        return TileTable(x.total, y.total, sequences, False, *how, **more)(*offsets)

    tiles, count, *unasked = tile_table(bottom_right, 16)
    expected = _tiles_of(x, y, bottom_right, 16)
    assert count.tolist() == [len(expected), 0]
    assert unasked == [None, None]
    for tile, wanted in zip(tiles[: len(expected)].tolist(), expected, strict=True):
        fields = 8 if wanted[2] else 3  # what a tile without a valid row says of the other side is not read
        assert tile[:fields] == wanted[:fields]
    if not bottom_right:
        rows = tiles[: len(expected)].tolist()
        busy = sum(tile[2] > 0 for tile in rows)
        spread = tile_table(False, 16, few=busy + 1).entries
        assert spread[: len(expected)].tolist() == sorted(rows, key=lambda tile: -tile[5])
        not_spread = tile_table(False, 16, few=busy).entries
        assert not_spread[: len(expected)].tolist() == rows
    lengths = [length for side in (x, y) for length in side.lengths]
    mean, some = sum(n * n for n in lengths) // max(sum(lengths), 1), any(lengths)
    for limit, of_short, of_long in ((mean, 0, len(expected)), (mean + 1, len(expected) * some, len(expected) * (not some))):
        monkeypatch.setattr(kernels_tiles, "MIXED", limit)
        looked = tile_table(bottom_right, 16, looks=True)
        counts = [looked.of(kind)[1].tolist() for kind in ("any", "short", "long")]
        assert counts == [[len(expected), 0], [of_short, 0], [of_long, 0]]
    for owned in ("valid", "met") if sequences <= 40 else ():
        few, (number, _) = (table.tolist() for table in tile_table(bottom_right, 16, owned).of("any"))
        assert [tile[1:3] for tile in few[:number]] == [[tile[2]] * 2 for tile in few[:number]]
        kept = [tile for tile in expected if tile[2] > 0 and (owned == "valid" or tile[4] > 0)]
        assert [[*tile[:1], *tile[2:]] for tile in few[:number]] == [[*tile[:1], *tile[2:]] for tile in kept]


_MASKS_OF_BEGUN: list[dict[str, Any]] = [
    {},
    {"causal": True, "causal_alignment": "bottom_right"},
    {"causal": True, "window": (2, -1)},
    {"window": (0, -1)},
    {"window": (0, 1), "causal_alignment": "bottom_right"},
]


def _fewer_and_more_keys(mask: dict[str, Any]) -> GradCall:
    """Sequences with whole and partial tiles of 4 rows, some of them without keys, between gaps."""
    device = "cuda" if CUDA else "cpu"
    x, y = Batch([9, 12, 4, 8, 7, 0], [9, 13, 4, 8, 9, 2], 48, before=1), Batch([0, 4, 2, 5, 11, 3], None, 26)
    q, k, v = (torch.randn(rows, 1, 16, device=device) for rows in (48, 26, 26))
    names = ("cu_seqlens_kv", "cu_seqlens_kv_padded")
    (cu, padded), keys = x.metadata(device), dict(zip(names, y.metadata(device), strict=True))
    call = attention_op._call(q, k, v, cu, cu_seqlens_q_padded=padded, **keys, **mask)
    return GradCall(torch.randn_like(q), None, *call[:3], torch.randn_like(q), torch.zeros(1, 48, device=device), *call[3:19])


@interpreted
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("long", [False, True, None])
def test_what_reductions_need_is_left_out_where_nothing_is_reduced(
    long: bool | None, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros before, and a conversion behind: of valid rows, where sequences are long, as the device sees or (None) the host; zeros
    of fewer rows if a kernel `begins` the sums.
    """
    from thdops.ops.attention_thd import kernels, kernels_tiles

    monkeypatch.setattr(kernels_tiles, "MIXED", 0 if long else 2**20)
    monkeypatch.setattr(kernels, "_queries_rows", lambda call, grad_out: 4)
    for mask in _MASKS_OF_BEGUN if begins else [{}]:
        call = _fewer_and_more_keys(mask)
        with poisoned_allocations():
            upstream = kernels._AttentionUpstream(call, True, long is not None, "any" if long is None else "long", begins)(call)
        assert upstream.sums is not None
        valid = locate_rows(call.cu_seqlens_q, call.cu_seqlens_q_padded, len(call.q)).valid
        zeroed = (upstream.sums == 0).all(2).all(1)
        begun = _begun(call, 4) if begins else torch.zeros_like(valid)
        assert torch.equal(zeroed, valid & ~begun & (long is not False))
        assert bool((upstream.delta[:, ~valid] == 0).all()) is (long is not False)
        grad = torch.full_like(call.q, 5)
        sums = torch.full_like(grad, torch.nan)
        sums[valid] = 4
        kernels._rounding(call, grad, 0.5)(sums, grad, *upstream.tiles.of("any" if long is None else "long"))
        assert bool((grad[valid] == (5 if long is False else 2)).all())
        assert bool((grad[~valid] == (5 if long is False else 0)).all())


def _begun(call: GradCall, tile: int) -> Tensor:
    """Which rows are in whole tiles, not the first of a sequence, that meet a key."""
    from thdops.ops.attention_thd import kernels

    (cu, padded), (cu_keys, _) = kernels._sides(call)
    left, right = kernels._window(call)
    mask = torch.zeros(len(call.q), dtype=torch.bool, device=call.q.device)

    def sees(diagonal: int, keys: int) -> bool:
        low = max(diagonal - left, 0) if left >= 0 else 0
        return low < (min(diagonal + right + 1, keys) if right >= 0 else keys)

    for first, queries, keys in zip(padded.tolist(), cu.diff().tolist(), cu_keys.diff().tolist(), strict=False):
        shift = keys - queries if call.bottom_right else 0
        for start in range(tile, queries - tile + 1, tile):
            mask[first + start : first + start + tile] = any(sees(start + row + shift, keys) for row in range(tile))
    return mask


# --- full sizes on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("total", [900, 5000], ids=["short", "looked at"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_delta_by_the_kernel_for_dq_is_that_of_its_own(dim: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients of an LSE that has a sink in it, on rows without keys, too; NaN on padding rows; parts of tiles."""
    from thdops.ops.attention_thd import kernels_hopper_backward

    x = Batch([70, 0, 63, 130, 1, 200], [71, 7, 64, 130, 3, 260], total, before=5)
    y = Batch([90, 12, 0, 170, 20, 25], [91, 12, 4, 170, 25, 25], total, before=3)
    device = torch.device("cuda")
    padding, unseen = (side.padding().to(device) for side in (x, y))
    new = lambda rows, heads: torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16)  # noqa: E731
    blank = lambda t, mask: t.masked_fill(mask.view(-1, *[1] * (t.dim() - 1)), torch.nan)  # noqa: E731
    q, k, v = (blank(new(total, h), mask).requires_grad_() for h, mask in ((6, padding), (2, unseen), (2, unseen)))
    sink = torch.randn(6, device=device, requires_grad=True)
    upstream = blank(new(total, 6), padding), blank(torch.randn(total, 6, device=device), padding).T
    offsets = (*x.metadata(device), *y.metadata(device))
    names = ("cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded")

    def gradients(on_the_way: bool) -> tuple[Tensor, ...]:
        forget_plans(monkeypatch)
        monkeypatch.setattr(kernels_hopper_backward, "makes_delta", lambda *_: on_the_way)
        settings: dict[str, Any] = {"causal": True, "softmax": "learnable", "deterministic": dim != 64, "backend": "native"}
        both = thdops.attention(q, k, v, **dict(zip(names, offsets, strict=True)), sink=sink, return_lse=True, **settings)
        return torch.autograd.grad(both, (q, k, v, sink), upstream)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        size = b.float().square().mean().sqrt()
        assert bool(((a.float() - b.float()).abs() <= 2**-7 * (b.float().abs() + size)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "as chosen"])
@pytest.mark.parametrize("dims", [(40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(("sequences", "rows"), [(1500, 64), (300, 200)])
def test_many_tiles_a_program(
    sequences: int, rows: int, dims: tuple[int, int], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs take one tile after the other; the first and the last sequences against dense attention in fp32."""
    from thdops.ops.attention_thd import kernels

    if plain:
        monkeypatch.setattr(kernels, "is_hopper", lambda index: False)
    heads, heads_kv, total, device = 16, 4, sequences * rows, torch.device("cuda")
    q, k, v, grad = (
        torch.randn(total, h, d, device=device, dtype=torch.bfloat16)
        for h, d in ((heads, dims[0]), (heads_kv, dims[0]), (heads_kv, dims[1]), (heads, dims[1]))
    )
    cu = torch.arange(0, total + 1, rows, device=device, dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for deterministic in (True, False):
        out = thdops.attention(leaves[0], leaves[1], leaves[2], cu, causal=True, backend="native", deterministic=deterministic)
        answers = (out, *torch.autograd.grad(out, leaves, grad))
        for first in (0, total - 40 * rows):
            few = slice(first, first + 40 * rows)
            batch = [x.detach()[few].float().unflatten(0, (40, rows)).transpose(1, 2).requires_grad_() for x in leaves]
            dense = torch.nn.functional.scaled_dot_product_attention(batch[0], batch[1], batch[2], is_causal=True, enable_gqa=True)
            up = grad[few].float().unflatten(0, (40, rows)).transpose(1, 2)
            for name, a, b in zip(("out", "dq", "dk", "dv"), answers, (dense, *torch.autograd.grad(dense, batch, up)), strict=True):
                a = a[few].float().unflatten(0, (40, rows)).transpose(1, 2)
                torch.testing.assert_close(a, b, rtol=0, atol=0.015 * float(b.abs().max()), msg=f"{name} from row {first} on")


@pytest.mark.parametrize("dim", [16, 64, 96, 128, 192, 256])
def test_loads_are_pipelined_only_where_all_products_of_a_loop_are_asynchronous(dim: int) -> None:
    """On Hopper a product of fewer than 64 rows is synchronous; beside it Triton does not wait for others (seen as wrong dk)."""
    from thdops.ops.attention_thd import kernels

    (sample, *_) = samples.attention_grad_samples(torch.device("cpu"))
    call = GradCall(*sample.args)
    x = torch.zeros(8, 2, dim, dtype=torch.bfloat16)
    call = call._replace(grad_out=x, q=x, k=x, v=x, out=x)
    for blocks in (kernels._keys_blocks(call), kernels._queries_blocks(call)):
        assert blocks.queries >= 64 or blocks.stages == 1


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)], ids=str)
def test_whether_sequences_are_long_is_found_on_the_device(
    dims: tuple[int, int], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 sequences in 8192 rows are short, or most are empty; a graph that serves both gives what each kernel alone does."""
    from thdops.ops.attention_thd import kernels

    device, rows = torch.device("cuda"), 8192
    q, k = (torch.randn(rows, heads, dims[0], device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2))
    v = torch.randn(rows, 2, dims[1], device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, 8, dims[1], device=device, dtype=torch.bfloat16)
    layouts = {
        "short": [[128] * 64, [100, 0] * 32],
        "long": [[4096, 4000] + [0] * 62, [0] * 60 + [2048] * 4, [5000] + [50] * 63, [0] * 64],
    }
    cu = prefix_sums(layouts["short"][0], device)

    def step() -> tuple[Tensor, ...]:
        with poisoned_allocations():
            out = thdops.attention(q, k, v, cu, causal=True, deterministic=deterministic, backend="native")
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    def alone(length: str) -> tuple[Tensor, ...]:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_lengths", lambda call: (length,))
            forget_plans(patch)
            return step()

    graph, results = captured(step)
    for length, lengths in ((length, one) for length, some in layouts.items() for one in some):
        cu.copy_(prefix_sums(lengths, device))
        graph.replay()
        for found in (results, step()):
            for a, b, other in zip(found, alone(length), alone("long" if length == "short" else "short"), strict=True):
                if deterministic:
                    assert torch.equal(a, b)
                for x in (b, other):  # rows of few keys are larger than others, and so are their roundings
                    size = x.float().square().mean((1, 2), keepdim=True).sqrt() + x.float().square().mean().sqrt()
                    off = (a.float() - x.float()).abs()
                    assert bool((off <= 2**-6 * (x.float().abs() + size)).all()), (length, lengths, float(off.max()))
