"""Context-parallel attention on virtual ranks against one device: every comm, mask, head shape and layout, in fp64 on CPU.

T rows of the whole batch, W ranks, H heads, D head dims.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import Batch, from_offsets
from context_parallel_problems import LAYOUTS, MASKS, WINDOWS, Problem, Results, compare, one_device, problem, results, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meta_kernels.context_attention import Call
from thdops import context_parallel
from thdops.context_parallel import ring, samples
from thdops.context_parallel.communicator import AllToAll, Place, Shift, Steps, Wait, places, run_together
from thdops.context_parallel.sections import Section, Whole

CPU = torch.device("cpu")
SIZES: list[Any] = [("p2p", 2), ("p2p", 4), ("all_gather", 2), ("all_gather", 4), ("a2a", 2), ("a2a", 4), ("a2a+p2p", (2, 2))]


def simulated(given: Problem, comm: str, cp_size: int | tuple[int, int]) -> Results:
    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        how = {"cp_size": cp_size, "comm": comm, **given.options, **more}
        return context_parallel.simulate(q, k, v, given.cu_seqlens, given.padded, **how)

    return results(attend, given.qkv, given.sink, given.grad_out, given.grad_lse)


def check(comm: str, cp_size: int | tuple[int, int], given: Problem, tolerance: float = 1e-12) -> None:
    compare(simulated(given, comm, cp_size), one_device(given), given.batch.padding(), tolerance)


# --- against one device --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("comm", "cp_size"), SIZES)
def test_ranks_find_what_one_device_finds(comm: str, cp_size: Any, mask: str) -> None:
    for batch in LAYOUTS.values():
        check(comm, cp_size, problem(batch, MASKS[mask]))


@pytest.mark.parametrize("mask", WINDOWS)
@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("comm", "cp_size"), [("all_gather", 4), ("a2a", 2)])
def test_windows(comm: str, cp_size: int, partition: str, mask: str) -> None:
    for batch in LAYOUTS.values():
        check(comm, cp_size, problem(batch, {"partition": partition, **WINDOWS[mask]}))


@pytest.mark.parametrize(("comm", "cp_size"), SIZES)
def test_infinities_on_padding_rows_and_fp32(comm: str, cp_size: Any) -> None:
    check(comm, cp_size, problem(LAYOUTS["gaps"], MASKS["causal"], dtype=torch.float32, poison=torch.inf), 1e-5)


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
@pytest.mark.parametrize("heads", [(3, 1), (5, 5)], ids=str)
def test_heads_that_ranks_could_not_share(comm: str, heads: tuple[int, int]) -> None:
    check(comm, 2, problem(LAYOUTS["gaps"], MASKS["causal"], heads=heads))


@pytest.mark.parametrize(("comm", "cp_size"), [("p2p", 8), ("all_gather", 4), ("a2a", 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_rounded_once_more_at_most(comm: str, cp_size: int, dtype: torch.dtype) -> None:
    """Two roundings, of each part and of the whole, are sqrt(2) times the error of one; eight parts added up in `dtype`, 2.3."""
    low = problem(Batch([128], [128], 144), {}, heads=(2, 2), dtype=dtype)
    q, k, v = (x.double() for x in low.qkv)
    exact = low._replace(qkv=(q, k, v), grad_out=low.grad_out.double(), grad_lse=low.grad_lse.double())
    truth, *both = ((r.out, *r.gradients) for r in (one_device(exact), one_device(low), simulated(low, comm, cp_size)))
    for true, alone, shared in zip(truth, *both, strict=True):
        assert (shared - true).square().mean().sqrt() < 1.7 * (alone - true).square().mean().sqrt()


# --- lengths -------------------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, Batch]:
    """W and up to four sequences; chunks at the end of a sequence often hold no token, nor may all the others."""
    cp_size = draw(st.sampled_from([2, 4]))
    unit = 2 * cp_size
    chunks = draw(st.lists(st.integers(0, 3), max_size=4))
    padded = [unit * count for count in chunks]
    lengths = [draw(st.integers(0, rows)) for rows in padded]
    before, behind = (unit * draw(st.integers(0, 1)) for _ in range(2))
    return cp_size, Batch(lengths, padded, before + sum(padded) + behind, before)


@settings(max_examples=60, deadline=None)
@given(
    layouts(),
    st.sampled_from([("p2p", {}), ("all_gather", {}), ("all_gather", {"window": (3, 2)}), ("a2a", {})]),
    st.booleans(),
    st.sampled_from(["zigzag", "contiguous"]),
)
def test_any_lengths(layout: tuple[int, Batch], how: tuple[str, dict[str, Any]], causal: bool, partition: str) -> None:
    (cp_size, batch), (comm, options) = layout, how
    check(comm, cp_size, problem(batch, {"causal": causal, "partition": partition, **options}, heads=(4, 4)))


# --- inputs on which other projects failed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_case_1_last_chunks_without_a_token(comm: str) -> None:
    batch = from_offsets([0, 9, 17, 25, 37, 45, 57], [0, 12, 20, 28, 40, 48, 60], 60)
    check(comm, 2, problem(batch, {"causal": True}, heads=(12, 12), dims=(128, 128), dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_case_4_padding_is_zero_behind_the_merge(comm: str) -> None:
    batch = from_offsets([0, 3, 8], [0, 4, 12], 16)
    assert batch.padding().nonzero().flatten().tolist() == [3, *range(9, 16)]
    check(comm, 2, problem(batch, {"causal": True}))


def test_case_10_lengths_that_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"must have a multiple of 2 \* cp_size \(4\) rows, got 10; pad the batch, and every sequence"
    ):
        check("p2p", 2, problem(Batch([4, 3], [5, 5], 10), {"causal": True}))
    for comm in ("p2p", "all_gather", "a2a"):
        check(comm, 2, problem(Batch([4, 3], [4, 4], 8), {"causal": True}))


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_case_14_values_narrower_than_keys(comm: str) -> None:
    given = problem(LAYOUTS["gaps"], {"causal": True}, heads=(16, 4), dims=(192, 128), dtype=torch.float32)
    found = simulated(given, comm, 4)
    assert [x.shape[1:] for x in (found.out, *found.gradients)] == [(16, 128), (16, 192), (4, 192), (4, 128)]
    compare(found, one_device(given), given.batch.padding(), 1e-5)


# --- how it gets there ---------------------------------------------------------------------------------------------------------


def test_virtual_ranks_hold_their_rows_one_rank_after_the_other() -> None:
    given = problem(LAYOUTS["gaps"], MASKS["causal"])
    whole, rows = one_device(given), [context_parallel.partition_indices(given.offsets, 64, 4, rank).long() for rank in range(4)]
    q, k, v = (x[torch.cat(rows)] for x in given.qkv)
    out, lse = context_parallel.attention(q, k, v, given.cu_seqlens, given.padded, group="virtual:4", causal=True, return_lse=True)
    expected = rows_of(whole, torch.cat(rows))
    torch.testing.assert_close((out, lse), (expected.out, expected.lse))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_causal_ring_computes_no_pair_that_is_hidden_and_ranks_share_the_work(size: int) -> None:
    length = 2 * size * 5
    given = problem(Batch([length], [length], length), {})
    (sample, *_) = samples.context_attention_samples(CPU)  # a causal ring in zigzag, whatever else
    call = Call(*sample.args)

    def pairs(section: Section) -> int:
        queries = int(section.queries.valid[-1])
        return queries * (queries + 1) // 2 if section.causal else queries * int((section.keys or section.queries).valid[-1])

    work = []
    for place in places([size]):
        diagonal, others = ring._sections(call, Whole(given.cu_seqlens, given.offsets), place)
        work.append(sum(pairs(section) for section in (diagonal, *others) if section is not None))
    assert work == [work[0]] * size
    assert sum(work) == length * (length + 1) // 2


def test_ranks_in_lock_step_exchange_along_an_axis_of_the_mesh() -> None:
    def talk(place: Place) -> Steps[list[float]]:
        x = torch.tensor([10.0 * place.ranks[0] + place.ranks[1]])
        (shifted,) = yield Wait((yield Shift((x,), axis=0)))
        blocks = yield AllToAll(x + torch.arange(2.0)[:, None] / 10, axis=1)
        return [float(shifted), *blocks.flatten().tolist()]

    found = run_together([talk(place) for place in places([3, 2])], [3, 2])
    for (ring_rank, heads_rank), mine in zip((place.ranks for place in places([3, 2])), found, strict=True):
        before = (ring_rank - 1) % 3
        assert mine == pytest.approx([10 * before + heads_rank, *(10 * ring_rank + other + heads_rank / 10 for other in range(2))])


# --- what is refused on the way to the op --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"group": None}, ValueError, "group must be a process group, its name, or a DeviceMesh, got None; pass torch.distributed"),
        (
            {"group": -100},
            ValueError,
            "group must be a process group, its name, or a DeviceMesh, got a group that this rank is not in;",
        ),
        (
            {"group": ("virtual:2", 3)},
            ValueError,
            "group must be a process group, its name, or a DeviceMesh, got a group that this",
        ),
        ({"window": 3}, ValueError, r"window must be a pair of integers \(left, right\), got 3; pass -1 for an unbounded side"),
        ({"window": (1.5, 2)}, TypeError, r"window_left must be an int, got a float; pass int\(...\)"),
        ({"softcap": torch.ones(())}, TypeError, "softcap must be a Python number, got a tensor; pass a static value"),
        ({"comm": None}, TypeError, "comm must be a string, got None"),
        (
            {"total_tokens": 32},
            ValueError,
            "group must have total_tokens / n ranks, got 1 for 64 of 32 rows; pass the group that rows",
        ),
        ({"sink": 1.0}, TypeError, "sink must be a tensor, got a float"),
    ],
)
def test_arguments_are_refused_in_words(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    given = problem(LAYOUTS["gaps"], {})
    q, k, v = given.qkv
    with pytest.raises(error, match=f"^context_attention: {text}"):
        context_parallel.attention(q, k, v, given.cu_seqlens, given.padded, **{"group": "virtual:2", **changes})
