"""Context-parallel attention between processes: four Gloo ranks, as one group, as two pairs and as a mesh, eager and compiled.

On GPUs: NCCL with one rank, and with two where there are two GPUs; eager, compiled, and captured and replayed with other lengths.

T rows of the whole batch, W ranks.
"""

from __future__ import annotations

import datetime
import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from attention_oracle import Batch
from context_parallel_problems import LAYOUTS, MASKS, WINDOWS, Problem, Results, compare, one_device, problem, results, rows_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from thdops import context_parallel
from thdops.bench import Row
from thdops.bench_ranks import Shape, hidden, rows_of_rank
from thdops.integrations.megatron import DotProductAttention
from thdops.packing import PackedSequences

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without torch.distributed or Gloo"
)

RANKS = 4
TINY = Shape(2, 16, (4, 4), 16)
TIMEOUT = datetime.timedelta(seconds=120)


class Case(NamedTuple):
    """`group` is the name of one of `groups_of`."""

    comm: str
    group: str
    options: dict[str, Any]
    layout: str = "gaps"
    compiled: bool = False


CASES = {
    "ring of four": Case("p2p", "world", MASKS["causal"]),
    "ring of four, full, contiguous": Case("p2p", "name", MASKS["contiguous"], "before and behind"),
    "ring of two": Case("p2p", "pair", MASKS["causal, sink"]),
    "ring without a token": Case("p2p", "world", MASKS["causal"], "no token"),
    "four gather": Case("all_gather", "mesh", MASKS["causal"]),
    "two gather, window": Case("all_gather", "pair", WINDOWS["window"], "before and behind"),
    "four share heads": Case("a2a", "world", MASKS["causal, sink"]),
    "two share heads, window": Case("a2a", "pair", WINDOWS["causal window"]),
    "heads and ring": Case("a2a+p2p", "mesh of two dimensions", MASKS["causal, sink"]),
    "heads and ring, two groups": Case("a2a+p2p", "two groups", MASKS["full"], "before and behind"),
    "ring, compiled": Case("p2p", "world", MASKS["causal"], compiled=True),
    "gather, compiled": Case("all_gather", "name", WINDOWS["causal window"], compiled=True),
    "share heads, compiled": Case("a2a", "mesh", MASKS["causal, sink"], compiled=True),
    "heads and ring, compiled": Case("a2a+p2p", "mesh of two dimensions", MASKS["causal"], compiled=True),
}


def problem_of(case: Case) -> Problem:
    return problem(LAYOUTS[case.layout], case.options, dtype=torch.float32)


# --- one rank --------------------------------------------------------------------------------------------------------------------


def groups_of(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    world = dist.group.WORLD
    assert world is not None
    pairs = [dist.new_group([first, first + 1], timeout=TIMEOUT) for first in (0, 2)]
    return {
        "world": world,
        "name": world.group_name,
        "mesh": init_device_mesh("cpu", (RANKS,)),
        "mesh of two dimensions": mesh,
        "two groups": (mesh["ring"], mesh["heads"].get_group()),
        "pair": pairs[rank // 2],
        "another's pair": pairs[1 - rank // 2],
        "another's mesh": [DeviceMesh("cpu", [first, first + 1]) for first in (0, 2)][1 - rank // 2],
    }


def place_in(group: Any, rank: int) -> tuple[int, int]:
    """(W, this rank) as `partition_indices` counts them."""
    return (2, rank % 2) if group == "pair" else (RANKS, rank)


def rows_in(case: Case, given: Problem, rank: int) -> Tensor:
    size, number = place_in(case.group, rank)
    partition = case.options.get("partition", "zigzag")
    return context_parallel.partition_indices(given.offsets, given.batch.total, size, number, partition=partition).long()


def run_case(case: Case, groups: dict[str, Any], rank: int) -> Results:
    given = problem_of(case)
    rows = rows_in(case, given, rank)

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        how = {"group": groups[case.group], "comm": case.comm, **case.options, **more}
        return context_parallel.attention(q, k, v, given.cu_seqlens, given.padded, total_tokens=given.batch.total, **how)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if case.compiled else attend
    qkv = tuple(x[rows] for x in given.qkv)
    return results(function, qkv, given.sink, given.grad_out[rows], given.grad_lse[:, rows])


def refusals(groups: dict[str, Any]) -> list[str]:
    """What a rank is told that calls with a group that does not fit: before anything is sent, so nobody waits for it."""
    given = problem_of(CASES["ring of four"])
    rows = rows_in(CASES["ring of four"], given, 0)
    qkv = tuple(x[rows] for x in given.qkv)
    calls: list[dict[str, Any]] = [
        {"group": groups["pair"], "total_tokens": given.batch.total},
        {"group": groups["mesh of two dimensions"]},
        {"group": groups["another's pair"]},
        {"group": groups["another's mesh"]},
        {"group": groups["world"], "comm": "a2a+p2p"},
    ]
    return [told(context_parallel.attention, *qkv, given.cu_seqlens, given.padded, **call) for call in calls]


def shares(groups: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Which rows of a pack each group leaves to this rank, in eager mode and compiled."""
    pack = PackedSequences.allocate(64, 2, pad_multiple=2 * RANKS)
    own = {name: group for name, group in groups.items() if not name.startswith("another's")}
    found = {name: tuple(pack.shard(group, "contiguous").share) for name, group in own.items()}
    compiled = torch.compile(lambda pack: pack.shard(groups["mesh"]).share, fullgraph=True, backend="aot_eager")
    return {**found, "compiled": tuple(compiled(pack))}


def told(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def megatron_module(**settings: Any) -> DotProductAttention:
    config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, **settings)
    comm, groups = settings.get("comm"), settings.get("groups")
    return DotProductAttention(config, 1, "causal", "self", cp_comm_type=comm, pg_collection=groups)


def megatron_batch() -> list[Tensor]:
    """q, k, v and the gradient of out of two sequences of 16 rows, `[S, B, H, D]`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 2, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2, 4)]


def megatron_results(module: DotProductAttention, tensors: list[Tensor]) -> list[Tensor]:
    *qkv, grad = tensors
    out = module(*qkv, None)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad.flatten(2))]


def megatron_rows(rank: int) -> Tensor:
    return context_parallel.partition_indices(torch.tensor([0, 16]), 16, RANKS, rank).long()


def run_megatron(groups: dict[str, Any], rank: int) -> dict[str, list[Tensor]]:
    """Megatron's module on a batch without padding, each rank with its rows of every sequence."""
    mesh = groups["mesh of two dimensions"]
    found = {}
    for comm, named in (
        ("p2p", {"cp": groups["world"]}),
        ("a2a+p2p", {"hcp": [mesh["heads"].get_group(), mesh["ring"].get_group()]}),
    ):
        module = megatron_module(comm=comm, groups=SimpleNamespace(**named), context_parallel_size=RANKS)
        found[comm] = megatron_results(module, [x[megatron_rows(rank)] for x in megatron_batch()])
    return found


def left_alone(groups: dict[str, Any], rank: int) -> str:
    """What rank 2 is told whose neighbour died."""
    if rank == 3:
        os._exit(0)
    if rank < 2:
        return ""
    given = problem_of(CASES["ring of two"])
    rows = rows_in(CASES["ring of two"], given, 2)
    qkv = tuple(x[rows] for x in given.qkv)
    return told(context_parallel.attention, *qkv, given.cu_seqlens, given.padded, group=groups["pair"], causal=True)


def run_rank(rank: int, folder: str) -> None:
    """Every case on one rank; results go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    groups = groups_of(rank)
    found: dict[str, Any] = {name: tuple(run_case(case, groups, rank)) for name, case in CASES.items()}
    found["refusals"] = refusals(groups)
    found["megatron"] = run_megatron(groups, rank)
    found["shares"] = shares(groups)
    found["bench"] = [tuple(asdict(row).values()) for row in rows_of_rank(torch.device("cpu"), groups["world"], [TINY], "forward")]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # a rank that leaves early takes its end of the others' connections with it
    Path(folder, f"{rank}.txt").write_text(left_alone(groups, rank))


def run_processes(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """`function(rank, *args)` in a process for each rank; all have ended well, or this raises."""
    context = spawn(function, args, ranks, join=False, daemon=True)
    assert context is not None
    deadline = time.monotonic() + 2 * TIMEOUT.total_seconds()
    while not context.join(timeout=max(deadline - time.monotonic(), 0)):
        assert time.monotonic() < deadline, "the processes did not end in time"


# --- against one device ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_processes(run_rank, RANKS, str(folder))
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_finds_its_rows_of_what_one_device_finds(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    given = problem_of(case)
    whole, padding = one_device(given), given.batch.padding()
    shares = []
    for rank in range(RANKS):
        rows = rows_in(case, given, rank)
        found = Results(*ranks[rank][name])
        shares.append(found.gradients[3:])
        # The gradient of a sink is shared out: no rank has all of it.
        expected = rows_of(whole, rows)._replace(gradients=tuple(x[rows] for x in whole.gradients[:3]))
        compare(found._replace(gradients=found.gradients[:3]), expected, padding[rows], 1e-5)
    if given.sink is not None:
        members = shares[:2] if case.group == "pair" else shares
        torch.testing.assert_close(sum(share[0] for share in members), whole.gradients[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("comm", ["p2p", "a2a+p2p"])
def test_megatron_s_module_on_a_batch_without_padding(comm: str, ranks: list[dict[str, Any]]) -> None:
    whole = megatron_results(megatron_module(), megatron_batch())
    for rank in range(RANKS):
        for found, expected in zip(ranks[rank]["megatron"][comm], whole, strict=True):
            torch.testing.assert_close(found, expected[megatron_rows(rank)], rtol=1e-5, atol=1e-5)


def test_a_group_that_does_not_fit_is_refused(ranks: list[dict[str, Any]]) -> None:
    op = "ValueError: context_attention: group must"
    for found in ranks:
        wrong_size, two_dimensions, *foreign, one_dimension = found["refusals"]
        assert wrong_size == (
            f"{op} have total_tokens / n ranks, got 2 for 16 of 64 rows; pass the group that rows were partitioned for"
        )
        assert two_dimensions == (f"{op} be one group with comm='p2p', got 2; pass one dimension of the mesh, or comm='a2a+p2p'")
        for text in foreign:
            assert text.startswith(f"{op} be a process group, its name, or a DeviceMesh, got a group that this rank is not in;")
        assert one_dimension == (
            f"{op} be a mesh of two dimensions or a pair of groups with comm='a2a+p2p', got 1; pass (ring group, heads group)"
        )


def test_a_pack_is_shared_out_by_any_kind_of_group(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        expected = {name: (*place_in(name, rank), "contiguous") for name in found["shares"]}
        assert found["shares"] == {**expected, "compiled": (RANKS, rank, "zigzag")}


def test_the_benchmark_compares_then_times(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        rows = [Row(*values) for values in found["bench"]]
        assert not [row.note for row in rows if row.failed]
        assert [row.provider for row in rows] == ["4 ranks", "one GPU", "steps", "exchanges"] * 3
        assert [row.bench for row in rows[::4]] == [f"{TINY}, forward, {comm}" for comm in ("p2p", "all_gather", "a2a")]
        for together, alone, steps, exchanges in zip(*(iter(rows),) * 4, strict=True):
            assert None not in (together.us, alone.us, steps.us, exchanges.us)
            assert alone.speedup == alone.us / together.us
            assert together.note == hidden(together.us, steps.us, exchanges.us)
    assert ranks[0]["bench"] == ranks[3]["bench"]  # the slowest rank's times, on every rank


def test_a_rank_whose_neighbour_died_is_told(folder: Path) -> None:
    text = (folder / "2.txt").read_text()
    assert text.startswith("RuntimeError: context_attention: group must carry every exchange, got an error in ")
    assert text.endswith("; see whether a rank died, or called it with other shapes or another comm")


# --- NCCL ------------------------------------------------------------------------------------------------------------------------

GPU_CASES = {
    "ring": Case("p2p", "world", MASKS["causal, sink"]),
    "gather": Case("all_gather", "mesh", WINDOWS["causal window"]),
    "share heads": Case("a2a", "name", MASKS["causal, sink"]),
    "heads and ring": Case("a2a+p2p", "mesh of two dimensions", MASKS["causal"]),
}
MODES = ("eager", "compiled", "captured")
# As many rows and sequences each, so that one captured graph serves all.
LENGTHS = (
    LAYOUTS["gaps"],
    Batch([64, 0, 0, 0], [64, 0, 0, 0], 64),
    Batch([0, 7, 13, 1], [8, 8, 16, 8], 64, before=8),
    Batch([0, 0, 0, 0], [8, 24, 8, 16], 64),
)
TOLERANCE = {"cuda": 3e-2, "cpu": 1e-5}  # bf16 and fp32
GPU_TIMEOUT = datetime.timedelta(seconds=8)


def problem_on(device: str, options: dict[str, Any], batch: Batch) -> Problem:
    given = problem(batch, options, dims=(64, 64), dtype=torch.bfloat16 if device == "cuda" else torch.float32)

    def moved(value: Any) -> Any:
        return tuple(map(moved, value)) if type(value) is tuple else value.to(device) if isinstance(value, Tensor) else value

    return Problem(*map(moved, given))


def share_of(given: Problem, rows: Tensor) -> Problem:
    q, k, v = (x[rows] for x in given.qkv)
    return given._replace(qkv=(q, k, v), grad_out=given.grad_out[rows], grad_lse=given.grad_lse[:, rows])


def load_(buffers: Problem, given: Problem) -> None:
    """Another problem at the same addresses."""

    def tensors(of: Problem) -> list[Tensor]:
        return [x for x in (of.cu_seqlens, of.padded, *of.qkv, of.sink, of.grad_out, of.grad_lse) if x is not None]

    for buffer, new in zip(tensors(buffers), tensors(given), strict=True):
        buffer.copy_(new)


def run_mode(mode: str, case: Case, group: Any, rank: int, size: int, device: str) -> None:
    """The rank finds its rows of what one device finds, whatever lengths stand in the same buffers."""

    def rows(given: Problem) -> Tensor:
        return context_parallel.partition_indices(given.offsets, given.batch.total, size, rank).long()

    problems = [problem_on(device, case.options, batch) for batch in LENGTHS]
    start = problem_on(device, case.options, LENGTHS[0])
    buffers = share_of(start, rows(start))

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        how = {"group": group, "comm": case.comm, **case.options, **more}
        return context_parallel.attention(q, k, v, buffers.cu_seqlens, buffers.padded, **how)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if mode == "compiled" else attend

    def call() -> Results:
        return results(function, buffers.qkv, buffers.sink, buffers.grad_out, buffers.grad_lse)

    run = replayed(call) if mode == "captured" and device == "cuda" else call
    for given in problems:
        own = rows(given)
        load_(buffers, share_of(given, own))
        found, whole = run(), one_device(given)
        expected, padding = rows_of(whole, own), given.batch.padding().to(device)[own]
        found, shares = found._replace(gradients=found.gradients[:3]), found.gradients[3:]
        compare(found, expected._replace(gradients=expected.gradients[:3]), padding, TOLERANCE[device])
        for share, total in zip(shares, whole.gradients[3:], strict=True):
            summed = share.clone()
            dist.all_reduce(summed)
            torch.testing.assert_close(summed, total, rtol=TOLERANCE[device], atol=TOLERANCE[device])


def replayed(call: Callable[[], Results]) -> Callable[[], Results]:
    """A graph of `call`, exchanges and backward included; every replay gives the same tensors."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = call()

    def replay() -> Results:
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        return captured

    return replay


def run_gpu_case(process: int, folder: str, size: int, device: str = "cuda") -> None:
    """One rank of one case, in every mode; what went wrong goes to a file. A case's ranks are `size` processes side by side."""
    (name, case), rank = list(GPU_CASES.items())[process // size], process % size
    folder = f"{folder}/{name}"
    start_gpu_rank(rank, folder, size, device, TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    groups: dict[str, Callable[[], Any]] = {
        "world": lambda: world,
        "name": lambda: world.group_name,
        "mesh": lambda: init_device_mesh(device, (size,)),
        "mesh of two dimensions": lambda: init_device_mesh(device, (size, 1)),
    }
    group = groups[case.group]()
    found = {mode: raised(run_mode, mode, case, group, rank, size, device) for mode in MODES}
    torch.save(found, f"{folder}/{rank}.pt")
    gc.collect()  # graphs hold on to communicators
    dist.barrier()
    dist.destroy_process_group()


def start_gpu_rank(rank: int, folder: str, size: int, device: str, timeout: datetime.timedelta) -> None:
    how: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        how = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout, **how)


def raised(function: Callable[..., None], *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_gpu_rank_left_alone(rank: int, folder: str, size: int) -> None:
    """Rank 1 dies between two calls; rank 0 goes on."""
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # or the end waits for a report that nobody reads
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # or for a copy of all that is mapped, GPUs' memory too
    start_gpu_rank(rank, folder, size, "cuda", GPU_TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    given = problem_on("cuda", MASKS["causal"], LENGTHS[0])
    rows = context_parallel.partition_indices(given.offsets, given.batch.total, size, rank).long()
    for death in (False, True):
        if death and rank == 1:
            os._exit(0)
        q, k, v = (x[rows] for x in given.qkv)
        context_parallel.attention(q, k, v, given.cu_seqlens, given.padded, group=world, causal=True)
        torch.cuda.synchronize()


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def gpu_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """By case and rank, what went wrong in each mode. All cases at once: most of their time is compilation."""
    size, gpus = request.param, torch.cuda.device_count()
    if gpus < size:
        pytest.skip(f"{size} NCCL ranks need as many GPUs, here are {gpus}")
    folder = tmp_path_factory.mktemp("nccl")
    for name in GPU_CASES:
        (folder / name).mkdir()
    run_processes(run_gpu_case, size * len(GPU_CASES), str(folder), size)
    return {name: [torch.load(folder / name / f"{rank}.pt", weights_only=True) for rank in range(size)] for name in GPU_CASES}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GPU_CASES)
def test_nccl_ranks_find_their_rows_of_what_one_gpu_finds(name: str, mode: str, gpu_ranks: dict[str, list[dict[str, str]]]) -> None:
    assert {rank: found[mode] for rank, found in enumerate(gpu_ranks[name]) if found[mode]} == {}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_nccl_rank_whose_neighbour_died_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises((ProcessExitedException, ProcessRaisedException)) as ended:
        run_processes(run_gpu_rank_left_alone, 2, str(tmp_path), 2)
    assert ended.value.error_index == 0
