"""A check that cannot fail is a defect: each is shown red on an op that is wrong on purpose, and for the right reason."""

from __future__ import annotations

import broken_ops
import pytest
import third_party_op
import torch

from thdops.conformance import CHECKS, OpUnderTest, interpreter, outcome

# (check, op, what the reason must speak of)
CAUGHT = [
    ("pieces", "without_replays", "a sample with replays"),
    ("errors", "other_error_from_fake", "in a fake tensor mode: says"),
    ("opcheck", "returns_its_input", "alias"),
    ("reference", "rounded", "elements are off"),
    ("kernel", "wrong_kernel", "y: 20 of 30 elements are off"),
    ("ahead of time", "does_not_compile", "_does_not_compile sm_80: CompileTimeAssertionFailure"),
    ("repeatable", "jittering", "squares, a second time"),
    ("fake", "wrong_fake_strides", "the fake has strides (1, 6)"),
    ("input strides", "ignores_strides", "with x transposed"),
    ("inputs untouched", "writes_its_input", "input x after the call"),
    ("no alias", "returns_its_input", "y shares memory with input x"),
    ("no alias", "two_views_of_one_buffer", "squares shares memory with y"),
    ("mutation", "without_version_bump", "its version"),
    ("all written", "leaves_a_row_unwritten", "y in poisoned memory: 5 of 30 elements are off, at [5, 0] nan stands for"),
    ("padding values", "minus_zero", "-0 stands for 0"),
    ("poisoned padding", "multiplies", "nan on padding rows of the inputs"),
    ("malformed metadata", "reads_beyond", "cu_seqlens a little beyond T': the kernel reads outside its tensors"),
    ("malformed metadata", "writes_beyond", "cu_seqlens a little beyond T': the kernel writes outside its tensors"),
    ("malformed metadata", "raises_on_malformed", "ValueError: decreasing"),
    ("gradients", "drops_squares", "gradient of x from squares"),
    ("gradient strides", "assumes_contiguous", "the gradient of y being expanded"),
    ("checkpoint", "unpacks_twice", "cannot be checkpointed"),
    ("double backward", "silent_second", "second derivative"),
    ("forward mode", "drops_tangents", "forward_ad: accepted, and the tangent is dropped"),
    ("compile", "fake_reads_values", "data-dependent"),
    ("inductor", "fake_reads_values", "data-dependent"),
    ("dynamic sizes", "sizes_baked_in", "recompiled for other sizes"),
    ("no recompile", "count_on_the_host", "recompiled for the contents of replay 1"),
    ("export", "fake_reads_values", "data-dependent"),
    ("vmap", "wrong_vmap", "under vmap"),
    ("dtensor", "wrong_sharding", "this rank holds"),
]
CAUGHT_ON_GPU = [
    ("cuda graph used", "skips_cuda_graphs", "CUDA graph"),
    ("graph replay", "reads_on_the_host", "the host waits for the device"),
    ("kernel", "wrong_kernel", "elements are off"),
    ("input strides", "ignores_strides", "with x transposed"),
    ("malformed metadata", "writes_beyond", "memory around x"),
]
_BY_NAME = {check.name: check for check in CHECKS}


def _found(check: str, op: str, device: str) -> str:
    if op == "wrong_sharding":
        broken_ops.shard_wrongly()
    return outcome(_BY_NAME[check], OpUnderTest(broken_ops.REGISTRY, broken_ops.REGISTRY[op], torch.device(device)))


@pytest.mark.parametrize(("check", "op", "reason"), CAUGHT)
def test_caught(check: str, op: str, reason: str) -> None:
    wrong_kernel = broken_ops.REGISTRY[op].cuda != third_party_op.GOOD.cuda
    if wrong_kernel and check != "ahead of time" and interpreter.why_not():
        pytest.skip(f"only its kernel is wrong, and {interpreter.why_not()}")
    found = _found(check, op, "cpu")
    assert found.startswith("FAIL")
    assert reason in found


@pytest.mark.gpu
@pytest.mark.parametrize(("check", "op", "reason"), CAUGHT_ON_GPU)
def test_caught_on_gpu(check: str, op: str, reason: str) -> None:
    found = _found(check, op, "cuda")
    assert found.startswith("FAIL")
    assert reason in found


def test_every_check_has_a_broken_op() -> None:
    assert {check for check, _, _ in CAUGHT + CAUGHT_ON_GPU} == set(_BY_NAME)


def test_every_broken_op_is_caught() -> None:
    assert {op for _, op, _ in CAUGHT + CAUGHT_ON_GPU} == {spec.name for spec in broken_ops.REGISTRY}
