"""The attention kernels for Hopper compile, in every tuned variant, without a GPU and under the Triton that is installed.

Triton's interpreter knows no Gluon, so that only a Hopper runs these kernels. They are written against names of Gluon that change
from release to release; this is where such a change is seen.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from meta_kernels.attention_thd import Call, GradCall

SHARED_MEMORY = 227 * 1024  # bytes that a block may have on compute capability 9.0
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
WINDOWS = tuple(itertools.product((False, True), (False, True)))  # bounded on the left, on the right
SETTINGS = tuple(itertools.product(("vanilla", "off_by_one", "learnable"), (0.0, 30.0)))  # softmax, softcap
WINDOW = ("HAS_LEFT", "HAS_RIGHT", "LEFT", "RIGHT")  # what a kernel calls them; those with both are compiled to the end
SHORT, LONG = 64, 1024


def calls() -> Iterator[tuple[Call, GradCall]]:
    """Head dims x windows x length, all of them; softmax and softcap take turns, for they meet none of the others in a kernel."""
    settings = itertools.cycle(SETTINGS)
    for dims, (left, right), rows in itertools.product(DIMS, WINDOWS, (SHORT, LONG)):
        yield _call(torch.bfloat16, *dims, rows, left, right, *next(settings))
    yield _call(torch.float16, 128, 128, SHORT, False, True, "vanilla", 0.0)


def _call(
    dtype: torch.dtype, dim: int, dim_v: int, rows: int, left: bool, right: bool, softmax: Any, softcap: float
) -> tuple[Call, GradCall]:
    """One sequence of `rows`; short ones want a deterministic gradient, long ones any."""
    q, k, v, out = (torch.zeros(rows, heads, d, dtype=dtype) for heads, d in ((4, dim), (2, dim), (2, dim_v), (4, dim_v)))
    sink = torch.zeros(4) if softmax == "learnable" else None
    call = Call(
        *(q, k, v, torch.tensor([0, rows], dtype=torch.int32), None, None, None, sink),
        causal=right,
        bottom_right=False,
        window_left=rows if left else -1,
        window_right=-1,
        scale=dim**-0.5,
        softmax=softmax,
        softcap=softcap,
        max_seqlen_q=0,
        max_seqlen_kv=0,
        deterministic=rows == SHORT,
        backend="reference",  # the one that may be asked for on CPU
        return_max_logit=False,
    )
    rest = call._replace(softcap=0.0)[3:-1]  # the gradient's kernels know no softcap
    return call, GradCall(out, torch.zeros(4, rows) if left else None, q, k, v, out, torch.zeros(4, rows), *rest)


def compile_all() -> None:
    """In a process of its own, and a second one: compile each variant that a call launches; print what `outcomes` returns."""
    import triton

    from thdops.conformance.ahead import _Driver
    from thdops.ops.attention_thd import backends, kernels
    from thdops.ops.launch import intercept

    driver: Any = triton.runtime.driver
    driver.set_active(_Driver([90]))
    kernels.is_hopper = lambda device_index: True
    with intercept(_note):
        for call, grad_call in calls():
            backends.attention(*call)
            backends.attention_grad(*grad_call)
        for left, right in WINDOWS:  # long ones by a second kernel
            _, grad_call = _call(torch.bfloat16, 64, 64, LONG, left, right, "vanilla", 0.0)
            backends.attention_grad(*grad_call._replace(deterministic=True))
        _launch_sections()
    with multiprocessing.get_context("fork").Pool(2) as pool:  # forked, for the launches that were noted
        print(json.dumps(dict(zip(_launches, pool.map(_outcome, _launches, chunksize=1), strict=True))))


def _launch_sections() -> None:
    """What context parallelism launches: the first section of keys, one between others, the last one; gradients that are added."""
    from thdops.ops.attention_thd import kernels

    for dim in (64, 128):
        call, grad_call = _call(torch.bfloat16, dim, dim, LONG, False, True, "vanilla", 0.0)
        out, sums, lse, none = torch.empty_like(call.q), call.q.float(), torch.empty(4, LONG), torch.empty(0)
        for to, before in ((sums, None), (sums, sums), (out, sums)):
            kernels.attention_into(call, kernels.Found(to, lse, none, before, lse))
        for reduces, adds in itertools.product((False, True), repeat=2):
            upstream = kernels.attention_upstream(grad_call, none, reduces)
            kernels.attention_grad_queries(grad_call, upstream, sums, adds)
            kernels.attention_grad_keys(grad_call, upstream, call.k.float(), call.v.float(), adds)


class _Enough(Exception):
    """A variant, whose IR this holds, has got as far as LLVM, where names no longer matter and most of the time goes."""


_launches: dict[str, Any] = {}


def _note(kernel: Any, grid: Any, args: tuple[Any, ...], constexprs: tuple[Any, ...], options: dict[str, int]) -> None:
    if "hopper" in kernel.fn.__module__:
        flags = [bool(constant) for name, constant in zip(kernel.arg_names[len(args) :], constexprs, strict=True) if name in WINDOW]
        launch = (kernel, grid, args, constexprs, options, all(flags))
        given = "".join("-" if x is None else "4" if getattr(x, "dtype", None) == torch.float32 else "." for x in args)
        _launches[f"{kernel.__name__} {given} {' '.join(map(str, constexprs))} {args[0].base.dtype}"] = launch


def _outcome(variant: str) -> Any:
    from triton.backends.nvidia.compiler import CUDABackend

    from thdops.conformance.ahead import _reason

    def stop(module: Any, *_: Any) -> None:
        raise _Enough(str(module))

    kernel, grid, args, constexprs, options, whole = _launches[variant]
    try:
        with contextlib.nullcontext() if whole else mock.patch.object(CUDABackend, "make_llir", side_effect=stop):
            compiled = kernel.warmup(*args, *constexprs, grid=grid, **options)
        module, size = compiled.asm["ttgir"], compiled.metadata.shared
        if others := _barriers_of_slots(compiled.asm["ptx"]):
            return f"Triton itself uses the named barriers {others}"
    except _Enough as enough:
        module, size = str(enough), None
    except Exception as error:
        return _reason(error)
    unused = _unused_barriers(module)
    return f"nothing uses the barriers {unused}" if unused else size


def _barriers_of_slots(ptx: str) -> list[int]:
    """Named barriers that were not asked for, and are those of `kernels_hopper_slots.py`: these are found by a register."""
    from thdops.ops.attention_thd.kernels_hopper_slots import FIRST

    taken = {int(number) for number in re.findall(r"\bbar(?:rier)?\.[a-z.]+\s+(\d+)", ptx)}
    return sorted(number for number in taken if number >= FIRST.value)


def _unused_barriers(module: str) -> list[str]:
    """Barriers that are made and not used again. Their memory would be lent to others while the hardware takes it for a barrier's:
    when another process took the GPU, what was there was overwritten, and with it the work item that a program had just taken.
    """
    barriers = re.findall(r"init_barrier (%\w+)", module)
    arrays = dict(re.findall(r"(%\w+) = ttg.memdesc_index (%\w+)\[", module))
    makes_it = re.compile(r"init_barrier|= ttg.memdesc_index|= ttg.local_alloc")
    rest = "\n".join(line for line in module.splitlines() if not makes_it.search(line))
    # One that is found by a number known only at run time is used through its array.
    found = {array for name, array in arrays.items() if re.search(rf"{name}\b", rest)}
    used = {name for name in barriers if re.search(rf"{name}\b|{arrays.get(name, name)}\b", rest)}
    return [name for name in barriers if name not in used and arrays.get(name) not in found]


def _outcomes() -> dict[str, Any]:
    """What became of each variant: the bytes of shared memory that it takes (None: not known so early) or its error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import compile_all; compile_all()"
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles for NVIDIA GPUs on Linux only")
def test_every_variant_compiles_fits_shared_memory_and_is_there() -> None:
    """But for the widest heads, long rows have other blocks; two pairs of head dims have dQ by reduction, and in the backward three
    have other plans for long sequences than for short ones.
    """
    outcomes = _outcomes()
    assert {variant: why for variant, why in outcomes.items() if isinstance(why, str)} == {}
    assert {variant: size for variant, size in outcomes.items() if isinstance(size, int) and size > SHARED_MEMORY} == {}
    counts = Counter(f"{variant.split()[0]} {variant.split()[-1]}" for variant in outcomes)
    windows = len(WINDOWS)
    assert counts == {
        "attention_forward torch.bfloat16": 4 * 2 * windows + 2 * 3,  # where they are the same, twice as many settings; sections
        "keys_kernel torch.bfloat16": (4 + 2 + 3) * windows + 2 * 4,
        "queries_kernel torch.bfloat16": (4 + 3) * windows + 2 * 2,
        "attention_forward torch.float16": 1,
        "keys_kernel torch.float16": 1,
        "queries_kernel torch.float16": 1,
    }
    forward = [variant.split() for variant in outcomes if variant.startswith("attention_forward")]
    assert {(softmax, softcap) for *_, softmax, softcap, _ in forward} == set(
        itertools.product(("vanilla", "off_by_one", "sink"), ("True", "False"))
    )
