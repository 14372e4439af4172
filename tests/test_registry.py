"""`register()` refuses pieces that disagree, in words; what it binds runs on the right device and launches a kernel by its key."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import third_party_op
import torch
from torch import Tensor

import thdops
from thdops.namespace import REGISTRY
from thdops.registry import Registry, load_launcher, register

GOOD = replace(third_party_op.GOOD, setup_context=None, backward=None)


@pytest.fixture
def registry() -> Registry:
    return Registry("thdops_refused")


def _other_name(y: Tensor, cu_seqlens: Tensor) -> None: ...


def _default(x: Tensor, cu_seqlens: Tensor, scale: float = 2.0) -> None: ...


def _no_default(x: Tensor, cu_seqlens: Tensor, scale: float) -> None: ...


def _scaled(x: Tensor, cu_seqlens: Tensor, scale: float = 1.0) -> None: ...


def _keyword_only(x: Tensor, cu_seqlens: Tensor, *, scale: float = 1.0) -> None: ...


def _swallows(x: Tensor, *cu_seqlens: Tensor) -> None: ...


SCALED = "(Tensor x, Tensor cu_seqlens, float scale=1.0) -> (Tensor y, Tensor squares)"
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a schema that does not parse": ({"schema": "(Tensor x"}, r"schema '\(Tensor x' does not parse: "),
    "a keyword-only tensor": (
        {"schema": "(Tensor x, *, Tensor cu_seqlens) -> (Tensor y, Tensor squares)"},
        r"arguments must be positional in the schema, \['cu_seqlens'\] are keyword-only; leave out",
    ),
    "a keyword-only number": (
        {"schema": SCALED.replace("float", "*, float"), "check": _scaled, "fake": _scaled, "reference": _scaled},
        r"arguments must be positional in the schema, \['scale'\] are keyword-only; leave out",
    ),
    "a number that can be given by keyword only": (
        {"schema": SCALED, "check": _keyword_only},
        "check and schema disagree: argument 'scale' cannot be given by position here",
    ),
    "an argument that swallows the rest": (
        {"check": _swallows},
        "check and schema disagree: argument 'cu_seqlens' cannot be given by position here",
    ),
    "an overload": (
        {"schema": ".out(Tensor x, Tensor cu_seqlens) -> (Tensor y, Tensor squares)"},
        "the schema must have no overload, got 'out'; register one op per signature",
    ),
    "no tensor at all": (
        {"schema": "(int x, int cu_seqlens) -> (Tensor y, Tensor squares)"},
        "a schema needs a tensor that is always",
    ),
    "no tensor that is always given": (
        {"schema": "(Tensor? x, Tensor? cu_seqlens) -> (Tensor y, Tensor squares)"},
        "a schema needs a tensor that is always given",
    ),
    "a write that may be left out": (
        {"schema": "(Tensor x, Tensor(a!)? cu_seqlens) -> ()", "mutates": ("cu_seqlens",)},
        r"tensors that are written must always be given, \['cu_seqlens'\] are optional; leave out the",
    ),
    "a write that the spec does not name": (
        {"schema": "(Tensor(a!) x, Tensor cu_seqlens) -> ()"},
        r"the schema writes \['x'\] but the spec says mutates=\[\]; make them equal",
    ),
    "a write that the schema does not have": (
        {"mutates": ("x",)},
        r"the schema writes \[\] but the spec says mutates=\['x'\]; make them equal",
    ),
    "a mutation that returns": (
        {"schema": "(Tensor(a!) x, Tensor cu_seqlens) -> Tensor", "mutates": ("x",)},
        r"an op that mutates must return \(\)",
    ),
    "an alias of the input": (
        {"schema": "(Tensor(a) x, Tensor cu_seqlens) -> Tensor(a)"},
        "an op must not return an alias of its input; use an autograd.Function",
    ),
    "backward alone": ({"backward": third_party_op.backward}, "backward and setup_context come together; give both or neither"),
    "a mutation with a backward": (
        {
            "schema": "(Tensor(a!) x, Tensor cu_seqlens) -> ()",
            "mutates": ("x",),
            "backward": third_party_op.backward,
            "setup_context": third_party_op.setup_context,
        },
        "an op that mutates cannot have a backward formula; offer a functional op beside it",
    ),
    "a traced that no call would reach": (
        {"schema": "(Tensor(a!) x, Tensor cu_seqlens) -> ()", "mutates": ("x",), "traced": _other_name},
        "traced is not called for an op that mutates; leave it out",
    ),
    "no_gradient of nothing": ({"no_gradient": ("count",)}, r"no_gradient names \['count'\], which the schema has neither"),
    "a promise that nothing checks": ({"padding": None}, "pads_zeroed is promised but the spec has no padding function"),
    "a launcher without a function": (
        {"cuda": "kernels_third_party"},
        "cuda must read 'module:function', got 'kernels_third_party'",
    ),
    "another argument": (
        {"check": _other_name},
        r"check and schema disagree: arguments are \['y', 'cu_seqlens'\], the schema has \['x', 'cu_seqlens'\]",
    ),
    "another default": (
        {"schema": SCALED, "check": _default},
        "check and schema disagree: argument 'scale' has 1.0 in the schema and 2.0 here",
    ),
    "a default that is missing": (
        {"schema": SCALED, "check": _no_default},
        "check and schema disagree: argument 'scale' has 1.0 in the schema and no default here",
    ),
    "a fake of other arguments": ({"fake": _default}, "fake and schema disagree: "),
    "a reference of other arguments": ({"reference": _default}, "reference and schema disagree: "),
    "eager code of other arguments": ({"eager": _default}, "eager and schema disagree: "),
    "a traced of other arguments": ({"traced": _default}, "traced and schema disagree: "),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_pieces_that_disagree_are_refused_and_nothing_is_registered(what: str, registry: Registry) -> None:
    changes, text = DISAGREEMENTS[what]
    with pytest.raises(ValueError, match=rf"^register\(thdops_refused::double_rows\): {text}"):
        register(replace(GOOD, **changes), registry)
    assert len(registry) == 0
    assert not hasattr(torch.ops.thdops_refused, "double_rows")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="the name is taken; registering twice is an error, choose another name"):
        register(third_party_op.GOOD, third_party_op.REGISTRY)
    assert len(third_party_op.REGISTRY) == 2


@pytest.mark.parametrize("name", ["double_rows.out", "double rows", "2rows", ""])
def test_a_name_that_is_no_name_is_refused_and_nothing_is_registered(name: str, registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"the name must be a Python identifier without an overload; choose another name"):
        register(replace(GOOD, name=name), registry)
    assert len(registry) == 0


def test_a_name_that_another_registry_of_the_namespace_has_taken_is_refused() -> None:
    registry = Registry(third_party_op.REGISTRY.namespace)
    with pytest.raises(ValueError, match=r"^register\(third_party::double_rows\): torch refuses the definition: Tried to register"):
        register(GOOD, registry)
    assert len(registry) == 0


def test_the_launcher_is_held_against_the_schema_when_it_is_loaded() -> None:
    wrong = replace(GOOD, cuda=f"{__name__}:_other_name")
    with pytest.raises(
        ValueError, match=r"test_registry:_other_name and the schema of third_party::double_rows disagree: arguments"
    ):
        load_launcher(wrong, third_party_op.REGISTRY.schema("double_rows"))


def test_a_registry_names_what_it_has() -> None:
    with pytest.raises(ValueError, match="namespace must be a Python identifier, got 'my-ops'; use a name such as 'my_ops'"):
        Registry("my-ops")
    with pytest.raises(KeyError, match="no op named 'zero' in registry 'third_party'; registered: double_rows_grad, double_rows"):
        third_party_op.REGISTRY["zero"]
    assert [spec.name for spec in third_party_op.REGISTRY] == ["double_rows_grad", "double_rows"]
    assert "double_rows" in third_party_op.REGISTRY
    assert "zero_fill" not in third_party_op.REGISTRY
    assert not hasattr(torch.ops.thdops, "double_rows")


def test_every_public_function_has_its_op() -> None:
    """Two are the identity around one, two compute nothing, losses from sums are plain PyTorch."""
    without_op = {"attach_loss", "zero_fill_grad", "attention_backends", "save_ops", "aux_loss_from_sums", "z_loss_from_sums"}
    functions = {n for n in thdops.__all__ if callable(getattr(thdops, n)) and not isinstance(getattr(thdops, n), type)}
    assert functions - {spec.name for spec in REGISTRY} == without_op


# --- launching --------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_that_lets_integers_specialise_it_is_refused() -> None:
    from thdops.ops import launch

    class Parameter:
        def __init__(self, name: str, do_not_specialize: bool) -> None:
            self.name, self.do_not_specialize = name, do_not_specialize

    class Kernel:
        __name__ = "kernel"

        def __init__(self, *parameters: Parameter) -> None:
            self.params = parameters

    x, loose, strict = Parameter("x", False), Parameter("rows", False), Parameter("rows", True)
    launch._refuse_specialised_integers(Kernel(x, strict), (torch.ones(1), 8))
    for argument in (8, (8, 16)):
        with pytest.raises(TypeError, match="parameter 'rows' of kernel kernel must be in do_not_specialize, got an integer"):
            launch._refuse_specialised_integers(Kernel(x, loose), (torch.ones(1), argument))


@pytest.fixture
def remembered() -> Iterator[dict[Any, Any]]:
    from thdops.ops import launch

    kept = dict(launch._compiled)
    launch._compiled.clear()
    yield launch._compiled
    launch._compiled.update(kept)


@pytest.mark.gpu
def test_a_second_launch_finds_the_compiled_kernel(remembered: dict[Any, Any]) -> None:
    """One entry a kind of arguments: contents, addresses and repeated calls add none."""
    cu = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
    entries = []
    for contents in (0, 3, 5):
        cu[1] = contents
        for _ in range(2):
            assert int(thdops.padding_mask(cu, None, 5).sum()) == 5 - contents
            thdops.zero_fill_([torch.ones(5, 16, device="cuda")], cu)
            entries.append(len(remembered))
    assert entries == [2] * 6


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_op_runs_on_the_device_of_its_tensors() -> None:
    assert torch.cuda.current_device() == 0
    for index in (1, 0, 1):
        x = torch.full((8, 16), float("nan"), device=f"cuda:{index}", requires_grad=True)
        cu = torch.tensor([0, 0], dtype=torch.int32, device=x.device)
        y = thdops.zero_fill(x, cu)
        y.sum().backward()
        assert x.grad is not None
        for result in (y, x.grad):
            assert result.device == x.device
            assert result.eq(0).all()
    assert torch.cuda.current_device() == 0


def _multiplies(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return x @ torch.eye(x.shape[1], dtype=x.dtype), x.float().square().sum(-1)


def test_an_op_outlives_the_name_of_its_registry() -> None:
    op = register(replace(GOOD, name="kept"), Registry("thdops_kept"))
    gc.collect()
    y, _ = op(torch.ones(2, 3), torch.tensor([0, 2], dtype=torch.int32))  # crashed the process once
    assert torch.equal(y, torch.full((2, 3), 2.0))


def test_a_reference_does_not_run_under_the_callers_autocast() -> None:
    op = register(replace(GOOD, name="multiplies", reference=_multiplies), Registry("thdops_autocast"))
    x = torch.full((2, 3), 1.001)
    with torch.autocast("cpu", torch.bfloat16):
        product, _ = op(x, torch.tensor([0, 2], dtype=torch.int32))
    assert product.dtype == torch.float32  # its CUDA launcher would not be cast either
    assert torch.equal(product, x)


def _sum(x: list[Tensor], cu_seqlens: Tensor) -> Tensor:
    return torch.stack(x).sum(0)


def _count(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.count = len(inputs[0])


def _shares(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    return [grad * (i + 1) for i in range(ctx.count)], None


def test_gradients_reach_the_tensors_of_a_list() -> None:
    """Autograd looks at tensors among the arguments, and not inside of them."""
    schema, pieces = "(Tensor[] x, Tensor cu_seqlens) -> Tensor", {"check": _sum, "fake": _sum, "reference": _sum}
    rest: dict[str, Any] = {"eager": None, "setup_context": _count, "backward": _shares, "flops": None}
    registry = Registry("thdops_lists")
    op = register(replace(GOOD, name="sum_of_list", schema=schema, **pieces, **rest), registry)
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    grads = torch.autograd.grad(op([x, y], torch.zeros(1)).sum(), (x, y))
    assert [grad.tolist() for grad in grads] == [[1.0] * 3, [2.0] * 3]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.inputs = len(inputs)


def _as_needed(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    assert len(ctx.needs_input_grad) == ctx.inputs
    return tuple(grads[0] if needed else None for needed in ctx.needs_input_grad)


def test_a_formula_is_asked_for_as_many_gradients_as_the_op_has_arguments() -> None:
    """Whatever else is handed on with them; and again when the graph is walked again."""
    op = register(replace(GOOD, name="asks", setup_context=_remember, backward=_as_needed), Registry("thdops_asks"))
    x = torch.zeros(2, 3, requires_grad=True)
    y, _ = op(x, torch.tensor([0, 2], dtype=torch.int32))
    for _ in range(2):
        y.backward(torch.ones(2, 3), retain_graph=True)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
