"""FSDP2, selective activation checkpointing and compiled blocks over the example's model, in two Gloo processes.

T rows, K experts a token. A process computes a batch of its own; its gradients are those of the mean of both losses.
"""

from __future__ import annotations

import datetime
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import thdops
from thdops.namespace import REGISTRY

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import fsdp_packed_moe as job  # a script, found beside its modules
from packed_moe import data, model, training
from packed_moe.config import Config, make_config

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without torch.distributed or Gloo"
)

RANKS, LAYERS, STEPS = 2, 2, 2
SIZES = {"max_tokens": 96, "max_seqs": 6, "dim": 16, "layers": LAYERS, "heads": 2, "kv_heads": 1, "experts": 3, "ffn": 16}
TIMEOUT = datetime.timedelta(seconds=120)
COMPILER = "aot_eager_decomp_partition"  # all of torch.compile but the generated code


class Found(NamedTuple):
    """Of a step on one process: the loss, every gradient, how often attention and router ran, each dispatch's experts `[T, K]`."""

    loss: Tensor
    gradients: dict[str, Tensor]
    attention_calls: int
    router_calls: int
    experts: list[Tensor]


def config() -> Config:
    return make_config("cpu", 0, steps=STEPS, **SIZES)


def documents() -> data.Documents:
    return data.load_documents(str(Path(sysconfig.get_paths()["stdlib"]) / "json"), SIZES["max_tokens"] // 2)


def batch_of(rank: int) -> model.Batch:
    pack = thdops.PackedSequences.allocate(SIZES["max_tokens"], SIZES["max_seqs"], pad_multiple=config().pad_multiple)
    pack.load_(data.draw(documents(), config(), rank))
    return model.Batch.of(pack)


def step(parallelize: Callable[[model.PackedMoE], None], rank: int, scale: float = 1.0) -> Found:
    """Forward and backward of a fresh model; `parallelize` is what is done to it first."""
    torch.manual_seed(0)
    moe = model.PackedMoE(config())
    parallelize(moe)
    with _dispatches("attention") as attended, _dispatches("router") as routed, _dispatches("permute_tokens") as permuted:
        loss = moe(batch_of(rank), torch.zeros(SIZES["max_tokens"], SIZES["dim"])).total
        (scale * loss).backward()
    gradients = {_plain(name): _whole(parameter.grad) for name, parameter in moe.named_parameters()}
    return Found(loss.detach(), gradients, len(attended), len(routed), [indices.clone() for _, indices, *_ in permuted])


@contextmanager
def _dispatches(name: str) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every call that reaches an op's kernel, from eager or compiled code, in a forward or again in a backward."""
    spec, calls = REGISTRY[name], []
    run = spec.reference

    def counted(*args: Any) -> Any:
        calls.append(args)
        return run(*args)

    with mock.patch.dict(vars(spec), reference=counted):
        yield calls


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


# --- one rank ---------------------------------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: str) -> None:
    """A step in every way, and the example; results go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    try:
        found: dict[str, Any] = {
            "eager": step(functools.partial(job.parallelize, backend=None), rank)._asdict(),
            "compiled": step(functools.partial(job.parallelize, backend=COMPILER), rank)._asdict(),
        }
        with mock.patch.object(thdops, "save_ops", list):
            found["nothing kept"] = step(functools.partial(job.parallelize, backend=None), rank)._asdict()
        found["losses"] = job.train(config(), documents(), backend=None)
        torch.save(found, f"{folder}/{rank}.pt")
        dist.barrier()  # a rank that leaves early takes its end of the other's connections with it
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (str(folder),), RANKS, daemon=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


# --- against one process ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> list[Found]:
    """Each batch on the whole model, without any of it; the gradients are those of half the loss."""
    return [step(lambda moe: None, rank, 1 / RANKS) for rank in range(RANKS)]


@pytest.mark.parametrize("way", ["eager", "compiled", "nothing kept"])
def test_losses_and_gradients_are_those_of_one_process(way: str, ranks: list[dict[str, Any]], alone: list[Found]) -> None:
    """Eagerly to the last bit: halving is exact, and a sum of two has no order."""
    rtol, atol = (1e-5, 1e-6) if way == "compiled" else (0, 0)
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found[way]["loss"], alone[rank].loss, rtol=rtol, atol=atol)
        assert found[way]["gradients"].keys() == alone[0].gradients.keys()
        for name, gradient in found[way]["gradients"].items():
            torch.testing.assert_close(gradient, alone[0].gradients[name] + alone[1].gradients[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize(("way", "runs"), [("eager", 1), ("compiled", 1), ("nothing kept", 2)])
def test_attention_and_router_run_once_a_layer(way: str, runs: int, ranks: list[dict[str, Any]], alone: list[Found]) -> None:
    """And the same experts are used in the backward, whether the choice was kept or made again."""
    for rank, found in enumerate(ranks):
        assert (found[way]["attention_calls"], found[way]["router_calls"]) == (runs * LAYERS, runs * LAYERS)
        experts = found[way]["experts"]
        assert len(experts) == 2 * LAYERS, "the dispatch is computed again"
        again = [*range(LAYERS), *reversed(range(LAYERS))]  # the backward starts at the last layer
        for call, layer in enumerate(again):
            assert torch.equal(experts[call], alone[rank].experts[layer])


def test_the_example_trains_the_same_model(ranks: list[dict[str, Any]]) -> None:
    trainer = training.Trainer(config())
    expected = []
    for step in range(STEPS):
        totals = []
        for gradient in trainer.gradients:
            gradient.zero_()
        for rank in range(RANKS):
            trainer.load(data.draw(documents(), config(), step * RANKS + rank), step)
            totals.append(trainer.model(trainer.batch, trainer.probe).total)
            (totals[-1] / RANKS).backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters, trainer.config.clip)
        trainer.optimizer.step()
        expected.append(float(torch.stack(totals).detach().mean()))
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["losses"] == pytest.approx(expected, rel=1e-5)
    assert expected[1] < expected[0]


# --- GPU --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_example_trains_on_a_gpu(tmp_path: Path) -> None:
    """One process over NCCL, bf16: eager and compiled blocks see the same losses up to roundings, and learn."""
    sizes = {"steps": 4, "max_tokens": 1024, "max_seqs": 24, "dim": 128, "layers": 2, "heads": 4, "ffn": 64}
    texts = data.load_documents(str(Path(sysconfig.get_paths()["stdlib"]) / "json"), 512)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=TIMEOUT)
    try:
        eager, compiled = (job.train(make_config("cuda", 0, **sizes), texts, backend) for backend in (None, COMPILER))
    finally:
        dist.destroy_process_group()
    assert compiled == pytest.approx(eager, rel=2e-2)
    assert eager[-1] < eager[0]
