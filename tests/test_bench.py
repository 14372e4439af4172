"""The benchmark command, on a small registry of its own: what it compares, refuses and writes, not how fast anything is."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from thdops import bench, bench_ranks, timing
from thdops.bench_peers import Peers
from thdops.registry import Bench, Contest, Cost, OpSpec, Outcome, Registry, Unserved, register

REGISTRY = Registry("bench_test")
CPU = torch.device("cpu")


def _check(x: Tensor) -> None:
    if x.dim() != 1:
        raise ValueError(f"x must be 1-D, got {x.dim()}-D; flatten it")


def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def double(x: Tensor) -> Tensor:
    """Reference and CUDA launcher in one: the registry only asks for a callable."""
    return x * 2


def _check_in_place(tensors: list[Tensor]) -> None:
    return None


def double_in_place(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(2)


def _cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops=x.numel())


def _host_sync(x: Tensor) -> Tensor:
    return x + x if x.abs().sum().item() >= 0 else x


def _benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Tensor]:
        return (torch.randn(1000, device=device),)

    yield Bench("add", make, lambda x: x + x)
    yield Bench("host sync", make, _host_sync)


def _wrong_benches(device: torch.device) -> Iterator[Bench]:
    yield Bench("off by a little", lambda: (torch.randn(1000, device=device),), lambda x: x * 2.01)


def _failing_benches(device: torch.device) -> Iterator[Bench]:
    yield Bench("a matrix", lambda: (torch.randn(10, 10, device=device),), lambda x: x + x)
    yield Bench("a vector", lambda: (torch.randn(10, device=device),), lambda x: x + x)


def _in_place_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[list[Tensor]]:
        buffer = torch.randn(20, 8, device=device)
        return (list(buffer.split(4, dim=1)),)

    yield Bench("two views of one buffer", make, double_in_place)
    yield Bench("baseline that returns", make, lambda tensors: [t * 2 for t in tensors])


def _spec(name: str, benches: object, **more: Any) -> None:
    register(
        OpSpec(
            name=name,
            schema="(Tensor x) -> Tensor",
            check=_check,
            fake=_fake,
            reference=double,
            cuda=f"{__name__}:double",
            samples=lambda device: (),
            refusals=lambda device: (),
            cost=_cost,
            benches=benches,  # pyright: ignore[reportArgumentType]  (three generators of one type)
            **more,
        ),
        REGISTRY,
    )


def _contests(device: torch.device) -> Iterator[Contest]:
    def absent(x: Tensor) -> Callable[[], Tensor]:
        raise Unserved("is not installed")

    def failing(x: Tensor) -> Callable[[], Tensor]:
        return lambda: x.view(7)

    providers = {
        "ours": lambda x: lambda: x * 2,
        "theirs": lambda x: lambda: (x + x, "nothing more"),
        "others'": lambda x: lambda: x.add(x),
        "near": lambda x: lambda: x * 2.01,
        "absent": absent,
        "failing": failing,
    }
    for size in (10, 20):
        yield Contest(
            f"{size} numbers",
            size,
            lambda size=size: (torch.ones(size, device=device),),
            providers,
            lambda args, results: (list(results[:1]), [args[0] * 2]),
            lambda x: Cost(flops=1e6 * x.numel()),
        )


WRITTEN: list[tuple[Sequence[Outcome], Mapping[str, str]]] = []


def _write_table(device: torch.device, outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> Path:
    WRITTEN.append((outcomes, facts))
    return Path("table.json")


_spec("double", _benches, contests=_contests, write_table=_write_table)
_spec("wrong", _wrong_benches)
_spec("failing", _failing_benches)
_spec("unbenched", lambda device: ())
register(
    OpSpec(
        name="double_",
        schema="(Tensor(a!)[] tensors) -> ()",
        check=_check_in_place,
        fake=_check_in_place,
        reference=double_in_place,
        cuda=f"{__name__}:double_in_place",
        samples=lambda device: (),
        refusals=lambda device: (),
        cost=lambda tensors: Cost(written=sum(t.nbytes for t in tensors)),
        benches=_in_place_benches,
        mutates=("tensors",),
    ),
    REGISTRY,
)


def _run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(argv), REGISTRY)


# --- the command ------------------------------------------------------------------------------------------------------------------


def test_rows_and_header_and_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "bench.json"
    assert _run("double", "double_", "unbenched", "--cpu", "--json", str(file)) == 0
    document = json.loads(file.read_text())
    assert {"gpu", "torch", "triton", "cuda", "driver", "date", "command"} <= document["header"].keys()
    assert document["header"]["torch"] == torch.__version__
    assert [(r["op"], r["bench"], r["provider"]) for r in document["rows"]] == [
        (op, name, provider)
        for op, names in (("double", ("add", "host sync")), ("double_", ("two views of one buffer", "baseline that returns")))
        for name in names
        for provider in ("thdops", "op compiled", "eager", "compiled")
    ] + [("unbenched", "none", "-")]
    for row in document["rows"][:-1]:
        assert row["us"] > 0
        assert not row["failed"]
        assert (row["speedup"] is None) == (row["provider"] in ("thdops", "op compiled"))
        assert row["unit"] == "GB/s"
    out = capsys.readouterr().out
    assert "host sync" in out
    assert "offers no bench" in out
    assert "WRONG" not in out


def test_some_benches_and_what_is_compiled_left_out(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert _run("double", "--cpu", "--eager", "--match", "sync", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["bench"], r["provider"]) for r in rows] == [("host sync", "thdops"), ("host sync", "eager")]


def test_a_wrong_result_gets_no_speed_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert _run("wrong", "double", "--cpu", "--json", str(file)) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[lines.index("wrong: off by a little") + 1].startswith("  thdops      WRONG: result 0: error up to")
    rows = json.loads(file.read_text())["rows"]
    assert [r["speedup"] for r in rows if r["op"] == "wrong"] == [None]
    assert len([r for r in rows if r["op"] == "double"]) == 8, "the run goes on behind a wrong op"
    assert "1 of 9 rows wrong or failed" in captured.err


def test_a_bench_that_raises_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("failing", "--cpu") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("failing: a matrix") + 1] == "  -           FAILED: ValueError: x must be 1-D, got 2-D; flatten it"
    behind = lines[lines.index("failing: a vector") + 1 :]
    assert [line.split()[0] for line in behind] == ["thdops", "op", "eager", "compiled"]


def test_unknown_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("dubble", "--cpu") == 2
    assert "no op named dubble; known: double, wrong" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _run("double") == 2
    captured = capsys.readouterr()
    assert "there is no GPU here" in captured.err
    assert captured.out == ""


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    file = tmp_path / "bench.png"
    assert _run("double", "--cpu", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_plot_draws_a_roofline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    from thdops.bench_plot import draw

    rows = [bench.Row("op", "b", p, us=us, floor_us=2.0, speedup=s) for p, us, s in (("thdops", 3.0, None), ("eager", 9.0, 3.0))]
    facts = {"gpu": "none", "torch": "2", "triton": "3", "date": "today"}
    file = tmp_path / "bench.svg"
    draw(file, rows, facts)
    assert "roofline" in _texts_of(file)


def _texts_of(picture: Path) -> str:
    """The texts of an SVG, which are comments beside their outlines."""
    return "\n".join(re.findall("<!-- (.*?) -->", picture.read_text(), re.S))


def test_a_picture_of_peers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    file, written = tmp_path / "peers.svg", tmp_path / "peers.json"
    assert _run("double", "--peers", "--cpu", "--plot", str(file), "--json", str(written)) == 1  # "near" is wrong
    texts = _texts_of(file)
    assert all(name in texts for name in ("ours", "theirs", "others'"))
    assert not any(name in texts for name in ("near", "absent", "failing"))
    assert "10 numbers" in texts
    assert "20 numbers" in texts
    times = [row["speedup"] for row in json.loads(written.read_text())["rows"] if row["speedup"]]
    assert len(times) == 4
    assert all(f"({speedup:.2f}x)" in texts for speedup in times)


def test_nothing_to_time_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before a file that may hold other times is written over."""
    file = tmp_path / "bench.json"
    assert _run("double", "--cpu", "--match", "treble", "--json", str(file)) == 2
    assert "these ops have nothing to time with 'treble' in its name; leave out --match" in capsys.readouterr().err
    assert not file.exists()
    assert _run("unbenched", "--cpu", "--peers") == 2
    assert capsys.readouterr().err.endswith("bench: these ops have nothing to time\n")


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured is in the JSON all the same."""
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    file = tmp_path / "bench.json"
    assert _run("double", "--cpu", "--eager", "--plot", str(tmp_path / "bench.xyz"), "--json", str(file)) == 2
    assert "bench.xyz cannot be written: Format 'xyz' is not supported" in capsys.readouterr().err
    assert json.loads(file.read_text())["rows"]


def test_a_picture_without_matplotlib_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _run("double", "--cpu", "--plot", "bench.png") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--plot needs matplotlib; install it with: pip install 'thdops[plot]'" in captured.err


# --- right or wrong ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "expected", "what"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.00001]), ""),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), "error up to 0.1"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), "error up to 0.001"),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.01]), ""),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "50.00% of elements"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), "50.00% of elements"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), "50.00% of elements"),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf]), ""),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), "error up to inf"),
        (torch.tensor([1.0, 5.0]), torch.tensor([1.0, -torch.inf]), "error up to inf"),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 5.0]), "error up to inf"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 elements differ"),
        (torch.tensor([True]), torch.tensor([True]), ""),
        (torch.zeros(2, 1), torch.zeros(2), "shape [2, 1] against [2]"),
        (torch.zeros(0), torch.zeros(0), ""),
    ],
)
def test_difference(got: Tensor, expected: Tensor, what: str) -> None:
    found = bench.difference([got], [expected])
    assert what in found
    assert bool(found) == bool(what)


def test_difference_wants_every_result_of_the_baseline() -> None:
    one = torch.ones(1)
    assert bench.difference([one, one], [one]) == ""
    assert bench.difference([one], [one, one]) == "1 results against the baseline's 2"
    assert bench.difference([one], []) == "1 results against the baseline's 0"


# --- copies of arguments ----------------------------------------------------------------------------------------------------------


def test_clones_keep_values_strides_and_aliasing() -> None:
    buffer = torch.randn(6, 8)
    left, right = buffer[:, :5], buffer[:, 5:]
    flipped = torch.randn(3, 4, requires_grad=True)
    new = bench.clone_arguments(([left, right], flipped, None, 3))
    for old, copy in zip((left, right, flipped), (*new[0], new[1]), strict=True):
        assert torch.equal(old, copy)
        assert old.stride() == copy.stride()
        assert old.requires_grad == copy.requires_grad
        assert old.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()
    assert new[0][0].untyped_storage().data_ptr() == new[0][1].untyped_storage().data_ptr()
    assert new[2:] == (None, 3)
    before = buffer.clone()
    new[0][0].fill_(7)
    assert torch.equal(buffer, before)


def test_small_tensors_are_shared() -> None:
    small, large = torch.zeros(8, dtype=torch.int32), torch.zeros(1000)
    new = bench.clone_arguments((small, large), share_up_to=32)
    assert new[0] is small
    assert new[1].data_ptr() != large.data_ptr()


@pytest.mark.parametrize(
    ("elements", "cost", "free", "copies"),
    [
        (2**20, Cost(read=4 * 2**20, written=4 * 2**20), 2**40, 26),  # 8 MiB a call against 4 x 50 MiB
        (2**20, Cost(read=2.0**30), 2**40, 26),  # a cost cannot exceed what can be touched: twice what is held
        (2**28, Cost(read=2.0**30), 2**40, 1),  # beyond the cache by itself
        (2**20, Cost(), 2**40, 32),  # touches nothing: the cap
        (2**20, Cost(), 2**26, 4),  # little memory: a quarter of it
        (2**20, Cost(), 0, 1),
        (2**10, Cost(), 2**40, 1),  # nothing but metadata
    ],
)
def test_how_many_copies(elements: int, cost: Cost, free: int, copies: int) -> None:
    args = (torch.empty(elements, dtype=torch.float32), torch.zeros(5, dtype=torch.int32))
    assert bench.copies_wanted(args, cost, 50 * 2**20, free) == copies


# --- timing -----------------------------------------------------------------------------------------------------------------------


def test_roofline_floor_follows_the_mix() -> None:
    roofline = timing.Roofline(read=4000.0, write=3000.0, copy=2000.0, matmul=500.0)
    assert roofline.bandwidth(Cost(read=1.0)) == 4000
    assert roofline.bandwidth(Cost(written=1.0)) == 3000
    assert roofline.bandwidth(Cost(read=95.0, written=5.0)) == 4000
    assert roofline.bandwidth(Cost(read=5.0, written=95.0)) == 3000
    assert roofline.bandwidth(Cost(read=1.0, written=1.0)) == 2000
    assert roofline.floor_us(Cost(read=1e6, written=1e6)) == pytest.approx(1.0)
    assert roofline.floor_us(Cost(read=1e6, written=1e6, flops=1e9)) == pytest.approx(2.0)
    assert roofline.floor_us(Cost()) == 0


def test_host_time_drains_the_queue_between_batches() -> None:
    events: list[int | str] = []
    result = timing.host_time(events.append, 3, lambda: events.append("sync"), calls=200)
    measured = events[events.index("sync") :]
    batches = [run.count(",") for run in ",".join(map(str, measured)).split("sync")[1:-1]]
    assert len(batches) == 10
    assert max(batches) - 1 <= 20
    assert set(events) == {0, 1, 2, "sync"}
    assert result.p20 <= result.p50 <= result.p80


def test_spread() -> None:
    timing_ = timing.Timing.of([float(i) for i in range(1, 102)], "graph")
    assert (timing_.p20, timing_.p50, timing_.p80) == (21.0, 51.0, 81.0)
    assert timing_.spread == pytest.approx(30 / 51)
    assert timing.Timing.of([5.0], "wall").spread == 0


# --- on a GPU ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = timing.measure_roofline(torch.device("cuda"), gib=0.25, matmul=1024)
    assert min(small.read, small.write, small.copy, small.matmul) > 0
    monkeypatch.setattr(bench, "measure_roofline", lambda device: small)
    file = tmp_path / "bench.json"
    assert _run("double", "double_", "--json", str(file)) == 0
    document = json.loads(file.read_text())
    how = {(r["bench"], r["provider"]): (r["how"], r["note"]) for r in document["rows"]}
    assert how["add", "thdops"] == ("graph", "")
    assert how["add", "compiled"] == ("graph", "")
    assert how["host sync", "thdops"] == ("graph", "")
    assert how["host sync", "eager"] == ("events", "host sync: no graph, timed eagerly")
    for row in document["rows"]:
        assert row["us"] > 0
        assert row["host_us"] > 0
        assert row["above_floor_us"] == pytest.approx(row["us"] - row["floor_us"])
    assert document["header"]["driver"] != "none"
    assert "* host sync" in capsys.readouterr().out


# --- beside peers -----------------------------------------------------------------------------------------------------------------


def test_peers_are_judged_then_timed(tmp_path: Path) -> None:
    """Right ones have a time and a speed-up of the first over them, wrong ones neither; who cannot run says why."""
    file = tmp_path / "peers.json"
    assert _run("double", "unbenched", "--peers", "--cpu", "--match", "20", "--json", str(file)) == 1  # "near" is wrong
    listed = json.loads(file.read_text())["rows"]
    assert {row["bench"] for row in listed} == {"20 numbers"}
    rows = {row["provider"]: row for row in listed}
    assert list(rows) == ["ours", "theirs", "others'", "near", "absent", "failing"]
    assert rows["ours"]["rate"] == pytest.approx(20 / rows["ours"]["us"])
    assert rows["ours"]["unit"] == "TFLOP/s"
    assert rows["ours"]["speedup"] is None
    assert rows["theirs"]["speedup"] == pytest.approx(rows["theirs"]["us"] / rows["ours"]["us"])
    assert all(rows[name]["us"] is None for name in ("near", "absent", "failing"))
    assert rows["near"]["note"].startswith("WRONG: result 0: error up to 0.01")
    assert rows["absent"]["note"] == "is not installed"
    assert rows["failing"]["note"].startswith("FAILED: RuntimeError")
    assert [name for name, row in rows.items() if row["failed"]] == ["near"]


def test_peers_are_held_against_the_roofline() -> None:
    peers = Peers(CPU, "20", ["theirs"], timing.Roofline(read=1.0, write=1.0, copy=1.0, matmul=2.0))
    (row,) = peers.rows([REGISTRY["double"]])
    assert row.us is not None
    assert row.floor_us == pytest.approx(20e6 / 2.0 / 1e6)
    assert row.roofline == pytest.approx(10 / row.us)
    assert row.above_floor_us == pytest.approx(row.us - 10)


def test_only_some_peers(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    assert _run("double", "--peers", "--cpu", "--only", "theirs", "others'", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["bench"], row["provider"]) for row in rows] == [
        (f"{size} numbers", name) for size in (10, 20) for name in ("theirs", "others'")
    ]
    assert all(row["speedup"] is None for row in rows)  # there is no first provider to compare with


def test_what_peers_took_goes_to_the_op(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "header", lambda device: {"gpu": "none"})
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(["double", "--peers", "--write-table", "--only", "ours", "theirs", "absent"])
    assert bench._against_peers(args, [REGISTRY["double"], REGISTRY["unbenched"]], CPU) == 0
    ((outcomes, facts),) = WRITTEN
    assert [(o.contest.subject, o.provider) for o in outcomes] == [(size, name) for size in (10, 20) for name in ("ours", "theirs")]
    assert facts["gpu"] == "none"
    assert "wrote table.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--only", "ours", "--cpu"], "--only and --write-table are options of --peers"),
        (["--write-table", "--cpu"], "--only and --write-table are options of --peers"),
        (["--peers", "--write-table", "--cpu"], "--write-table keeps times, and those of --cpu say nothing"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("double", *options) == 2
    assert text in capsys.readouterr().err


# --- ranks ------------------------------------------------------------------------------------------------------------------------


def test_rows_of_ranks_arrive_and_a_process_that_failed_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Processes themselves are started in `test_context_parallel_distributed.py`."""
    row = bench.Row("context_attention", "tiny, forward, p2p", "2 ranks", 5.0, 0.0, "wall", note="50% of the exchanges hidden")

    class Processes:
        def join(self, timeout: float) -> bool:
            raise RuntimeError("-- Process 1 terminated with the following error:\nTraceback:\nValueError: no luck")

    def spawn(function: object, args: tuple[Any, ...], ranks: int, **options: object) -> Processes:
        assert (args[0], ranks, args[2:4]) == (2, 2, ("cpu", "tiny"))
        args[-1].put(row)
        return Processes()

    monkeypatch.setattr(bench_ranks, "spawn", spawn)
    found = tmp_path / "rows.json"
    assert _run("context_parallel", "--cpu", "--match", "tiny", "--json", str(found)) == 1
    rows = json.loads(found.read_text())["rows"]
    assert [(row["provider"], row["note"]) for row in rows] == [
        ("2 ranks", "50% of the exchanges hidden"),
        ("-", "FAILED: ValueError: no luck"),
    ]
    assert "1 of 2 rows wrong or failed" in capsys.readouterr().err
    assert _run("context_parallel", "--cpu", "--peers") == 2
    assert "leave them out with context_parallel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((10.0, 8.0, 4.0), "50% of the exchanges hidden"),
        ((8.0, 8.0, 4.0), "100% of the exchanges hidden"),
        ((14.0, 8.0, 4.0), "longer than steps and exchanges one after the other"),
        ((8.0, 8.2, 0.8), "100% of the exchanges hidden"),
        ((8.0, 12.0, 4.0), "times are too noisy to tell what is hidden"),
        ((10.0, 8.0, 0.4), "exchanges are under 5% of it"),
        ((10.0, 8.0, None), "exchanges are under 5% of it"),
    ],
)
def test_share_of_exchanges_hidden(times: tuple[float, float, float | None], text: str) -> None:
    assert bench_ranks.hidden(*times) == text


@pytest.mark.gpu
def test_all_gpus_beside_one(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    assert _run("context_parallel", "--match", "8 x 4096, 32/8 heads, D 128, causal, forward, p2p", "--json", str(found)) == 0
    rows = json.loads(found.read_text())["rows"]
    assert {"one GPU", "steps"} <= {row["provider"] for row in rows}
    assert all(row["us"] > 0 for row in rows)
