"""The table of checks: declared once, read by pytest, by `run()` and by the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thdops.conformance import ahead, compiled, declared, gradients, graphs, memory, padding, strides, transforms, values
from thdops.conformance.case import NotRun, OpUnderTest


@dataclass(frozen=True)
class Check:
    """One thing that an op must hold. `applies` says which ops it is about; `gpu` that only a GPU can tell."""

    name: str
    function: Callable[[OpUnderTest], None]
    applies: Callable[[OpUnderTest], bool]
    gpu: bool = False

    @property
    def promise(self) -> str:
        """What holds if it passes, in one sentence."""
        return (self.function.__doc__ or "").strip().splitlines()[0]

    def __call__(self, case: OpUnderTest) -> None:
        if self.gpu and case.device.type != "cuda":
            raise NotRun("no GPU")
        self.function(case)


def _always(case: OpUnderTest) -> bool:
    return True


def _functional(case: OpUnderTest) -> bool:
    return not case.spec.mutates


def _mutates(case: OpUnderTest) -> bool:
    return bool(case.spec.mutates)


def _triton(case: OpUnderTest) -> bool:
    return "triton" in case.spec.backends


def _takes_floats(case: OpUnderTest) -> bool:
    return _functional(case) and any(gradients.grad_slots(case, s.args) for s in case.compile_samples())


def _has_padding(case: OpUnderTest) -> bool:
    return case.spec.padding is not None


def _pads_inputs(case: OpUnderTest) -> bool:
    return _has_padding(case) and any(case.padding_slots(s.args) for s in case.samples())


def _deterministic(case: OpUnderTest) -> bool:
    return case.spec.deterministic


def _graph_safe(case: OpUnderTest) -> bool:
    return case.spec.graph_safe


CHECKS: tuple[Check, ...] = (
    Check("pieces", declared.check_pieces, _always),
    Check("errors", declared.check_refusals, _always),
    Check("opcheck", values.check_opcheck, _always),
    Check("reference", values.check_reference, _always),
    Check("kernel", values.check_kernel, lambda case: _triton(case) or case.device.type == "cuda"),
    Check("ahead of time", ahead.check_ahead_of_time, _triton),
    Check("repeatable", values.check_repeatable, _deterministic),
    Check("fake", strides.check_fake, _always),
    Check("input strides", strides.check_input_strides, _always),
    Check("inputs untouched", memory.check_inputs_untouched, _always),
    Check("no alias", memory.check_no_alias, _functional),
    Check("mutation", memory.check_mutation, _mutates),
    Check("all written", memory.check_every_element_written, _always),
    Check("padding values", padding.check_padding_values, _has_padding),
    Check("poisoned padding", padding.check_poisoned_padding, _pads_inputs),
    Check("malformed metadata", memory.check_malformed_metadata, OpUnderTest.has_metadata),
    Check("gradients", gradients.check_gradients, gradients.differentiable),
    Check("gradient strides", gradients.check_gradient_strides, gradients.differentiable),
    Check("checkpoint", gradients.check_checkpoint, gradients.differentiable),
    Check("double backward", gradients.check_double_backward, _takes_floats),
    Check("forward mode", gradients.check_forward_mode, _takes_floats),
    Check("compile", compiled.check_compile, _always),
    Check("inductor", compiled.check_inductor, _always),
    Check("dynamic sizes", compiled.check_dynamic_sizes, _always),
    Check("no recompile", compiled.check_no_recompile, _always),
    Check("export", compiled.check_export, _always),
    Check("vmap", transforms.check_vmap, _always),
    Check("dtensor", transforms.check_dtensor, _always),
    Check("cuda graph used", compiled.check_cuda_graphs_used, _graph_safe, gpu=True),
    Check("graph replay", graphs.check_graph_replay, _graph_safe, gpu=True),
)
