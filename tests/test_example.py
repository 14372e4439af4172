"""The main job, run small: the modes agree, a resumed run repeats bitwise, and what is wrong is said and shows in the exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thdops

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_packed_moe as job  # noqa: E402  # a script, found beside its modules
from packed_moe import checkpoint, checks, data, loop, modes, parallel, training  # noqa: E402
from packed_moe.config import CPU_SIZES, UserError, make_config  # noqa: E402

from thdops.integrations.grouped import grouped_linear  # noqa: E402

TEXT = str(Path(sysconfig.get_paths()["stdlib"]) / "json")
STEPS = 20
SIZES = {
    "steps": STEPS,
    "max_tokens": 192,
    "max_seqs": 8,
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "experts": 3,
    "ffn": 16,
}
QUICK = ["--device", "cpu", "--data", TEXT, *(str(x) for name, n in SIZES.items() for x in (f"--{name.replace('_', '-')}", n))]


def run(out: Path, *options: str) -> int:
    """The job at test size; its exit code."""
    return job.main([*QUICK, "--out", str(out), *options])


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def history(out: Path, mode: str) -> list[list[float]]:
    return next(entry["history"] for entry in summary(out)["modes"] if entry["mode"] == mode)


def failed(out: Path) -> set[str]:
    return {check["name"] for check in summary(out)["checks"] if not check["passed"]}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """At these sizes a second thread only waits for the first; on a busy machine, for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of all modes."""
    out = tmp_path_factory.mktemp("finished")
    assert run(out, "--mode", "all", "--check-every", "8") == 0
    return out


# --- all modes --------------------------------------------------------------------------------------------------------------------


def test_eager_and_compiled_agree_and_every_check_is_made(finished: Path) -> None:
    seen = summary(finished)
    assert seen["ok"]
    assert [entry["mode"] for entry in seen["modes"]] == ["eager", "compile"]
    assert "cudagraph" in seen["not_run"]
    made = {(check["mode"], check["name"]) for check in seen["checks"]}
    for mode in ("eager", "compile"):
        for name in (
            "padding rows exactly zero",
            "NaN in padding changes nothing",
            "padding zero inside every step",
            "losses finite",
        ):
            assert (mode, name) in made
    assert ("compile", "compiled once, never again") in made
    assert ("compile", "losses follow eager's") in made
    assert ("compile", "a step equals eager's up to rounding") in made
    eager, compiled = (torch.tensor(history(finished, mode)) for mode in ("eager", "compile"))
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)


def test_batches_change_and_the_model_learns(finished: Path) -> None:
    seen = summary(finished)
    tokens = [row[seen["metrics"].index("tokens")] for row in history(finished, "eager")]
    assert tokens == [sum(lengths) for lengths in seen["document_lengths"]]
    assert len(set(tokens)) > STEPS // 2
    cross_entropy = [row[1] for row in history(finished, "eager")]
    assert cross_entropy[-1] < cross_entropy[0]
    assert all(0 < entry["padding_share"] < 1 and entry["tokens_per_second"] > 0 for entry in seen["modes"])


def test_padding_is_checked_on_the_way_too(finished: Path) -> None:
    when = [check["detail"] for check in summary(finished)["checks"] if check["name"] == "padding rows exactly zero"]
    assert [detail.rpartition(" ")[2] for detail in when] == ["8", "16", "20"] * 2


def test_the_picture_is_drawn(finished: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    assert (finished / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_one_mode_that_cannot_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--mode", "cudagraph") == 2
    assert "--mode cudagraph: cannot run here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_graph_equals_eager_bitwise(tmp_path: Path) -> None:
    sizes = ["--steps", "50", "--max-tokens", "4096", "--dim", "256", "--layers", "2"]
    assert job.main(["--mode", "all", "--out", str(tmp_path), *sizes]) == 0
    seen = {(check["mode"], check["name"]): check for check in summary(tmp_path)["checks"]}
    assert seen["cudagraph", "bitwise equal to eager"]["passed"]
    assert seen["cudagraph", "one graph served every step"]["detail"] == "1 capture, 50 replays, 50 steps"
    assert history(tmp_path, "cudagraph") == history(tmp_path, "eager")


# --- ranks ------------------------------------------------------------------------------------------------------------------------


def run_ranks(ranks: int, out: Path, *options: str) -> None:
    """The job under torchrun; its checks passed, that against one process among them, and one rank spoke."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*torchrun, str(EXAMPLES / "train_packed_moe.py"), *options, "--cp", str(ranks), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("parameters") == 1
    assert f"{ranks} ranks equal one up to rounding" in {check["name"] for check in summary(out)["checks"]}


def test_two_ranks_lose_what_one_process_loses(finished: Path, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, *QUICK, "--mode", "eager")
    found, expected = (torch.tensor(history(out, "eager")) for out in (tmp_path, finished))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("comm", parallel.COMMS)
def test_ranks_on_gpus(comm: str, tmp_path: Path) -> None:
    """With NCCL, all exchanges in one graph; with one rank where there is one GPU."""
    sizes = ["--steps", "20", "--max-tokens", "4096", "--dim", "256", "--layers", "2", "--cp-comm", comm]
    run_ranks(min(2, torch.cuda.device_count()), tmp_path, "--mode", "all" if comm == "p2p" else "cudagraph", *sizes)
    seen = {(check["mode"], check["name"]): check["detail"] for check in summary(tmp_path)["checks"]}
    assert seen["cudagraph", "one graph served every step"] == "1 capture, 20 replays, 20 steps"


def test_ranks_that_nobody_started_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "5", "--cp", "2"])
    assert run(tmp_path, "--cp", "2") == 2
    command = "torchrun --nproc-per-node 2 train.py --steps 5 --cp 2"
    assert capsys.readouterr().err == f"error: --cp 2 wants 2 processes, which torchrun starts; run: {command}\n"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(tmp_path, "--cp", "2") == 2
    text = "--cp must be the number of processes that torchrun started (4), got 2; pass it so, or start as many as --cp says"
    assert capsys.readouterr().err == f"error: {text}\n"


def test_a_check_that_failed_on_one_rank_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(into: list[Any], own: list[checks.Check]) -> None:
        into[:] = [own, [own[0]._replace(passed=False, detail="seen there")], own]

    monkeypatch.setattr(parallel, "group", lambda: "a group")
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(parallel.dist, "all_gather_object", gather)
    own = checks.Check("eager", "padding", True, "seen here")
    assert parallel.of_all_ranks([own]) == [checks.Check("eager", "padding", False, "seen there (rank 1)")]


# --- checkpoints ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Press Ctrl-C once a checkpoint of that step is written."""

    def at(step: int) -> None:
        real = checkpoint.save

        def save(path: Path, content: dict[str, Any]) -> None:
            real(path, content)
            if content["step"] == step:
                monkeypatch.setattr(checkpoint, "save", real)
                raise KeyboardInterrupt

        monkeypatch.setattr(checkpoint, "save", save)

    return at


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bitwise(
    mode: str, finished: Path, tmp_path: Path, interrupt: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(7)
    assert run(tmp_path, "--mode", mode, "--checkpoint-every", "7") == 130
    assert "--resume" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()
    assert run(tmp_path, "--mode", mode, "--resume") == 0
    assert summary(tmp_path)["modes"][0]["resumed_at"] == 7
    assert history(tmp_path, mode) == history(finished, mode)


def test_restoring_undoes_warm_up_steps_in_place() -> None:
    """What a capture relies on: steps that only warm up leave no trace, and no tensor moves."""
    documents = data.load_documents(TEXT, 96)
    config = make_config("cpu", 0, **SIZES)
    trainer, untouched = training.Trainer(config), training.Trainer(config)
    for one in (trainer, untouched):
        one.load(data.draw(documents, config, 0), 0)
    addresses = [tensor.data_ptr() for tensor in trainer.state().values()]
    before = trainer.snapshot()
    for _ in range(3):
        trainer.step()
    trainer.restore(before)
    for one in (trainer, untouched):
        one.step()
    assert torch.equal(trainer.metrics, untouched.metrics)
    assert all(torch.equal(a, b) for a, b in zip(trainer.state().values(), untouched.state().values(), strict=True))
    assert addresses == [tensor.data_ptr() for tensor in trainer.state().values()]


def test_resuming_a_finished_run_reports_it_again(finished: Path, tmp_path: Path) -> None:
    name = "checkpoint-eager.pt"
    (tmp_path / name).write_bytes((finished / name).read_bytes())
    assert run(tmp_path, "--mode", "eager", "--resume") == 0
    assert history(tmp_path, "eager") == history(finished, "eager")


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": _flip,
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "another file": lambda content: b"hello",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "checkpoint-eager.pt"
    path.write_bytes(DAMAGES[damage]((finished / path.name).read_bytes()))
    assert run(tmp_path, "--mode", "eager", "--resume") == 2
    assert f"{path} is corrupt or no checkpoint of this example" in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "checkpoint-eager.pt"
    path.write_bytes((finished / path.name).read_bytes())
    assert run(tmp_path, "--mode", "eager", "--resume", "--lr", "0.5") == 2
    assert "belongs to another run: lr was 0.01, is now 0.5; resume with the same settings" in capsys.readouterr().err


def test_nothing_to_resume_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--resume") == 2
    assert "--resume: no checkpoint in" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"run": {}, "step": 1})

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(path, {"run": {}, "step": 2})
    assert checkpoint.load(path, {})["step"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.pt"]


# --- checks that fail -------------------------------------------------------------------------------------------------------------


class _GarbageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(padding)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (padding,) = ctx.saved_tensors
        return torch.where(padding, 1.0, grad), None


def _attention_that(fault: str) -> Callable[..., Tensor]:
    real = thdops.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
        padding = thdops.padding_mask(cu_seqlens, options["cu_seqlens_q_padded"], q.shape[0])[:, None, None]
        if fault == "leaves garbage in dk":
            k = _GarbageGradient.apply(k, padding)
        out = real(q, k, v, cu_seqlens, **options)
        if fault == "leaves garbage in out":
            return torch.where(padding, 1.0, out)
        if fault == "leaves -0.0 in out":
            return torch.where(padding, -0.0, out)
        if fault == "multiplies":
            return out + 0 * v.sum()
        return out

    return attention


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("leaves garbage in out", {"padding rows exactly zero", "padding zero inside every step"}),
        ("leaves -0.0 in out", {"padding rows exactly zero"}),
        ("leaves garbage in dk", {"padding rows exactly zero", "padding zero inside every step"}),
        ("multiplies", {"NaN in padding changes nothing", "padding rows exactly zero"}),
    ],
)
def test_a_faulty_attention_makes_the_exit_code_1(
    fault: str,
    caught_by: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(thdops, "attention", _attention_that(fault))
    assert run(tmp_path, "--mode", "eager", "--steps", "2") == 1
    assert failed(tmp_path) == caught_by
    assert "FAILED: eager: " in capsys.readouterr().out


def test_a_recompilation_makes_the_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = training.Trainer.load

    def load(self: training.Trainer, documents: list[Tensor], step: int) -> None:
        real(self, documents, step)
        vars(self.model.blocks[0].experts)["z_coeff"] = 1e-3 * (1 + step)

    monkeypatch.setattr(training.Trainer, "load", load)
    monkeypatch.setattr(modes, "_cpp_compiler", lambda: False)
    assert run(tmp_path, "--mode", "compile", "--steps", "2") == 1
    assert failed(tmp_path) == {"compiled once, never again"}
    assert summary(tmp_path)["modes"][0]["label"] == "compile (aot_eager: no C++ compiler found)"


def test_a_mode_that_breaks_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(torch, "compile", broken)
    assert run(tmp_path, "--steps", "2") == 1
    assert [entry["mode"] for entry in summary(tmp_path)["modes"]] == ["eager"]
    assert failed(tmp_path) == {"ran to the end"}
    assert "RuntimeError: no such luck" in capsys.readouterr().out


def _result(mode: str, losses: list[float], weight: float = 0.0) -> loop.Result:
    rows = torch.zeros(len(losses), len(training.METRICS))
    rows[:, 0] = torch.tensor(losses)
    weights = {"w": torch.tensor(weight)}
    return loop.Result(mode, mode, rows, weights, [], [[1]], 0, 1.0, 1, 1, 1)


def test_a_compiled_step_that_differs_is_seen() -> None:
    config = make_config("cpu", 0, **SIZES)
    trainer = training.Trainer(config)
    trainer.load(data.draw(data.load_documents(None, config.max_tokens // 2), config, 0), 0)
    (same,) = checks.check_compiled(trainer, "now")
    assert same.passed
    weight = trainer.parameters[0]
    trainer.forward = lambda batch, probe: (losses := trainer.model(batch, probe))._replace(
        total=losses.total + 1e-2 * weight.sum()
    )
    (other,) = checks.check_compiled(trainer, "now")
    assert not other.passed


def test_comparisons_can_fail() -> None:
    eager = _result("eager", [2.0, 1.0])
    next_float = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert checks.compare(eager, _result("cudagraph", [2.0, 1.0]), False).passed
    assert not checks.compare(eager, _result("cudagraph", [2.0, next_float]), False).passed
    assert not checks.compare(eager, _result("cudagraph", [2.0, 1.0], weight=1.0), False).passed
    assert checks.compare(eager, _result("compile", [2.0, next_float]), False).passed
    assert not checks.compare(eager, _result("compile", [2.0, 1.01]), False).passed
    assert not checks.compare(eager, _result("compile", [2.0, float("nan")]), False).passed
    assert not checks.check_variety([[3, 4], [4, 3]]).passed


# --- the experts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("offsets", [[4, 4, 9], [0, 0, 0], [12, 12, 12], [3, 8, 12]])
def test_every_expert_sees_its_own_rows_and_nobody_the_rest(device: str, offsets: list[int]) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    end = offsets[-1]
    x, weight, grad = torch.randn(12, 16), torch.randn(3, 16, 8), torch.randn(12, 8)
    x[end:] = float("nan")
    grad[end:] = 0  # as `unpermute_tokens` gives it
    x, weight, grad = (tensor.to(device, dtype) for tensor in (x, weight, grad))
    leaves = x.requires_grad_(), weight.requires_grad_()
    out = grouped_linear(*leaves, torch.tensor(offsets, dtype=torch.int32, device=device))
    own = torch.tensor([sum(n >= stop for stop in offsets) for n in range(end)], dtype=torch.int64, device=device)
    expected = (x[:end, None].float() @ weight.float()[own])[:, 0].to(dtype)
    (grad_x, grad_weight), (expected_grad_x, expected_grad_weight) = (
        torch.autograd.grad(result, leaves, incoming) for result, incoming in ((out, grad), (expected, grad[:end]))
    )
    torch.testing.assert_close(out[:end], expected)
    torch.testing.assert_close(grad_x[:end], expected_grad_x[:end])
    torch.testing.assert_close(grad_weight, expected_grad_weight)


# --- data and sizes ---------------------------------------------------------------------------------------------------------------


def test_the_default_documents_are_the_standard_library() -> None:
    documents = data.load_documents(None, 512)
    assert documents.source == sysconfig.get_paths()["stdlib"]
    lengths = [len(text) for text in documents.texts]
    assert len(lengths) > 1000
    assert 2 <= min(lengths) < max(lengths) == 512
    assert documents.digest == data.load_documents(None, 512).digest


def test_steps_are_drawn_from_seed_and_step_alone_and_fit() -> None:
    documents = data.load_documents(TEXT, 96)
    config = make_config("cpu", 3, **SIZES)
    for step in range(50):
        drawn = data.draw(documents, config, step)
        again = data.draw(documents, config, step)
        assert all(a is b for a, b in zip(drawn, again, strict=True))
        assert 1 <= len(drawn) <= config.max_seqs
        assert sum(-(-len(text) // config.pad_multiple) * config.pad_multiple for text in drawn) <= config.max_tokens
    other = data.draw(documents, dataclasses.replace(config, seed=4), 0)
    assert [len(text) for text in other] != [len(text) for text in data.draw(documents, config, 0)]


@pytest.mark.parametrize("content", ["no folder", "empty", "binary", "a file"])
def test_a_folder_without_text_is_an_error(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    if content == "a file":
        folder.write_text("text")
    elif content != "no folder":
        folder.mkdir()
    if content == "binary":
        (folder / "picture").write_bytes(b"\x89PNG\0\0")
    assert run(tmp_path / "out", "--data", str(folder)) == 2
    expected = "--data must be a folder" if content in ("no folder", "a file") else "--data: no text found below"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_tokens": 100}, "--max-tokens must be a multiple of --pad-multiple (8), got 100; 96 would do"),
        ({"max_tokens": 8}, "--max-tokens must hold two padded documents (16 rows), got 8; raise it"),
        ({"max_seqs": 0}, "--max-seqs must be at least 1, got 0; pass a positive number"),
        ({"steps": -1}, "--steps must be at least 1, got -1; pass a positive number"),
        ({"heads": 3}, "--heads must be a multiple of --kv-heads (2), got 3; change one of them"),
        ({"topk": 9}, "--topk must be at most --experts (4), got 9; lower it"),
        ({"lr": -1.0}, "--lr must be a finite number above 0, got -1.0; try 0.001"),
        ({"lr": float("nan")}, "--lr must be a finite number above 0, got nan; try 0.001"),
        ({"head_dim": 20}, "--head-dim must be a multiple of 8 from 16 to 256, got 20; attention takes no other"),
        (
            {"cp": 3},
            "--pad-multiple must be a multiple of 2 * --cp (6), got 8; each rank has two pieces of every document; pass the same to"
            " the run that it is compared with",
        ),
        (
            {"cp": 4, "cp_comm": "a2a"},
            "--kv-heads must be a multiple of --cp (4) with --cp-comm a2a, got 2; each rank has as many heads; use another"
            " --cp-comm",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as refused:
        make_config("cpu", 0, **sizes)
    assert str(refused.value) == text
    assert set(sizes) <= {*CPU_SIZES, "cp", "cp_comm"}


@pytest.mark.parametrize("size", ["dim", "ffn"])
def test_sizes_that_no_grouped_product_takes_are_refused(size: str) -> None:
    text = "must be a multiple of 8 on a GPU, got 100; the experts' grouped product wants bf16 rows of whole 16 bytes"
    with pytest.raises(UserError, match=f"--{size} {text}"):
        make_config("cuda", 0, **{size: 100})
    make_config("cpu", 0, **{size: 100})


def test_a_bad_size_on_the_command_line_gives_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--max-tokens", "100") == 2
    assert capsys.readouterr().err.startswith("error: --max-tokens must be a multiple of --pad-multiple (8), got 100")
