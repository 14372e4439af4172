"""Triton kernels and launchers of the merge ops.

T rows, H heads, D head dim, R = T * H pairs (t, h), numbered as they lie in memory. A program has BLOCK_R pairs behind one another:
a run of [T, H, D], and a few entries of each of some rows of [H, T], whose neighbours are wanted by the programs that run beside it
and come from the cache.

Bytes are all that counts: each part is read once, and not at all where its LSE is -inf. Widths and strides reach a kernel in units
of VECTOR elements, 16 bytes where every head starts on such a boundary: a product with a constant tells the compiler that heads are
aligned, without specialising it for a value of the integer.

Measured on an H200 (torch 2.11, Triton 3.6, [65536, 32, 128], microseconds; a sum of two such bf16 tensors takes 369, 4.36 TB/s):
bf16 forward 381 (4.29 TB/s; one head a program, its rows apart in memory: 425; compiled PyTorch 391), backward 677 (4.03 TB/s; with
blocks of 4096 elements 818; compiled PyTorch 643); fp32 and bf16 forward 638, backward 1041 (with two warps 1195).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import merge as contract
from thdops.ops.launch import launch

_WIDEST = 256  # columns of a block; wider heads take several
_BYTES = 4096  # of a block of the widest tensor; the backward has five of them in flight, and half as many bytes of each
_BYTES_GRAD = 2048


@triton.jit
def locate(rows, heads, width, VECTOR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """(pair, its t and h, whether it exists, each [BLOCK_R]; columns [BLOCK_D]; width in elements).

    Divides in 64 bits once, and from there on in 32. Example: H = 3, BLOCK_R = 4, program 1: pairs 4..7, t = 1 1 2 2, h = 1 2 0 1.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    ahead = (first % heads).to(tl.int32) + tl.arange(0, BLOCK_R)
    t = first // heads + ahead // heads.to(tl.int32)
    h = (ahead % heads.to(tl.int32)).to(tl.int64)
    return first + tl.arange(0, BLOCK_R), t, h, t < rows, tl.arange(0, BLOCK_D), width.to(tl.int64) * VECTOR


@triton.jit
def load_seen(at, exists):
    """(an LSE, whether its part saw a key)."""
    lse = tl.load(at, mask=exists, other=float("-inf"))
    return lse, lse != float("-inf")


@triton.jit
def weigh(lse_a, lse_b, both):
    """(weight of a, weight of b, merged LSE) of parts that both saw a key; of others nothing that counts, and no NaN.

    Example: lse_a = lse_b = 3 gives 1/2, 1/2 and 3 + log 2.
    """
    gap = tl.where(both, lse_a - lse_b, 0.0)
    share = tl.exp(-tl.abs(gap))  # of the lighter part, in units of the heavier one's
    heavier, lighter = 1 / (1 + share), share / (1 + share)
    lse = tl.maximum(lse_a, lse_b) + tl.log(1 + share)
    return tl.where(gap >= 0, heavier, lighter), tl.where(gap >= 0, lighter, heavier), lse


# --- forward -------------------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "rows", "heads", "width", "a_row", "a_head", "b_row", "b_head", "lse_a_head", "lse_a_row", "lse_b_head", "lse_b_row",
    ]
)  # fmt: skip
def merge_kernel(
    out_a, lse_a, out_b, lse_b, out, lse,
    rows, heads, width, a_row, a_head, b_row, b_head, lse_a_head, lse_a_row, lse_b_head, lse_b_row,
    VECTOR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out and lse of [BLOCK_R] pairs."""
    pair, t, h, exists, d, wide = locate(rows, heads, width, VECTOR, BLOCK_R, BLOCK_D)
    value_a, seen_a = load_seen(lse_a + h * lse_a_head + t * lse_a_row, exists)
    value_b, seen_b = load_seen(lse_b + h * lse_b_head + t * lse_b_row, exists)
    both = seen_a & seen_b
    weight_a, weight_b, merged = weigh(value_a, value_b, both)
    tl.store(lse + h * rows + t, tl.where(both, merged, tl.where(seen_a, value_a, value_b)), mask=exists)

    at_a = out_a + (t * a_row * VECTOR + h * a_head * VECTOR)[:, None] + d[None, :]
    at_b = out_b + (t * b_row * VECTOR + h * b_head * VECTOR)[:, None] + d[None, :]
    at = out + (pair * wide)[:, None] + d[None, :]
    for block in tl.static_range(BLOCKS):
        first = block * BLOCK_D
        inside = (first + d < wide)[None, :]
        a = tl.load(at_a + first, mask=seen_a[:, None] & inside, other=0).to(tl.float32)
        b = tl.load(at_b + first, mask=seen_b[:, None] & inside, other=0).to(tl.float32)
        mixed = weight_a[:, None] * a + weight_b[:, None] * b
        alone = tl.where(seen_a[:, None], a, b)
        tl.store(at + first, tl.where(both[:, None], mixed, alone).to(out.dtype.element_ty), mask=exists[:, None] & inside)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = contract.fake_merge_attention(out_a, lse_a, out_b, lse_b, dtype)
    out_a, out_b = _in_runs(out_a), _in_runs(out_b)
    grid, vector, blocks = _tiling(_BYTES, out, out_a, out_b)
    rows, heads, width = out.shape
    launch(
        merge_kernel,
        grid,
        (
            out_a, lse_a, out_b, lse_b, out, lse,
            rows, heads, width // vector, *_steps(out_a, vector), *_steps(out_b, vector), *lse_a.stride(), *lse_b.stride(),
        ),
        (vector, *blocks),
        num_warps=2,
    )  # fmt: skip
    return out, lse


# --- backward ------------------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "rows", "heads", "width", "g_row", "g_head", "a_row", "a_head", "b_row", "b_head", "g_lse_head", "g_lse_row",
        "lse_a_head", "lse_a_row", "lse_b_head", "lse_b_row",
    ]
)  # fmt: skip
def merge_grad_kernel(
    grad_out, grad_lse, out_a, lse_a, out_b, lse_b, grad_a, grad_lse_a, grad_b, grad_lse_b,
    rows, heads, width, g_row, g_head, a_row, a_head, b_row, b_head, g_lse_head, g_lse_row,
    lse_a_head, lse_a_row, lse_b_head, lse_b_row,
    VECTOR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """All four gradients of [BLOCK_R] pairs. A gradient that is None is zero."""
    pair, t, h, exists, d, wide = locate(rows, heads, width, VECTOR, BLOCK_R, BLOCK_D)
    value_a, seen_a = load_seen(lse_a + h * lse_a_head + t * lse_a_row, exists)
    value_b, seen_b = load_seen(lse_b + h * lse_b_head + t * lse_b_row, exists)
    both = seen_a & seen_b
    weight_a, weight_b, _ = weigh(value_a, value_b, both)

    at_a = out_a + (t * a_row * VECTOR + h * a_head * VECTOR)[:, None] + d[None, :]
    at_b = out_b + (t * b_row * VECTOR + h * b_head * VECTOR)[:, None] + d[None, :]
    at = (pair * wide)[:, None] + d[None, :]
    products = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for block in tl.static_range(BLOCKS):
        first = block * BLOCK_D
        inside = (first + d < wide)[None, :]
        if grad_out is None:
            g = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        else:
            at_g = grad_out + (t * g_row * VECTOR + h * g_head * VECTOR)[:, None] + d[None, :]
            g = tl.load(at_g + first, mask=(seen_a | seen_b)[:, None] & inside, other=0).to(tl.float32)
            a = tl.load(at_a + first, mask=both[:, None] & inside, other=0).to(tl.float32)
            b = tl.load(at_b + first, mask=both[:, None] & inside, other=0).to(tl.float32)
            products += tl.where(both[:, None], g * (a - b), 0.0)
        of_a = tl.where(both[:, None], weight_a[:, None] * g, tl.where(seen_a[:, None], g, 0.0))
        of_b = tl.where(both[:, None], weight_b[:, None] * g, tl.where(seen_b[:, None], g, 0.0))
        tl.store(grad_a + at + first, of_a.to(grad_a.dtype.element_ty), mask=exists[:, None] & inside)
        tl.store(grad_b + at + first, of_b.to(grad_b.dtype.element_ty), mask=exists[:, None] & inside)

    across = tl.sum(products, axis=1)
    if grad_lse is None:
        g_lse = tl.zeros([BLOCK_R], tl.float32)
    else:
        g_lse = tl.load(grad_lse + h * g_lse_head + t * g_lse_row, mask=seen_a | seen_b, other=0)
    of_a = tl.where(both, weight_a * (g_lse + weight_b * across), tl.where(seen_a, g_lse, 0.0))
    of_b = tl.where(both, weight_b * (g_lse - weight_a * across), tl.where(seen_b, g_lse, 0.0))
    tl.store(grad_lse_a + h * rows + t, of_a, mask=exists)
    tl.store(grad_lse_b + h * rows + t, of_b, mask=exists)


def merge_attention_grad(
    grad_out: Tensor | None, grad_lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = contract.fake_merge_attention_grad(grad_out, grad_lse, out_a, lse_a, out_b, lse_b)
    grad_a, _, grad_b, _ = results
    out_a, out_b = _in_runs(out_a), _in_runs(out_b)
    g = None if grad_out is None else _in_runs(grad_out)
    grid, vector, blocks = _tiling(_BYTES_GRAD, grad_a, grad_b, out_a, out_b, *(() if g is None else (g,)))
    rows, heads, width = out_a.shape
    launch(
        merge_grad_kernel,
        grid,
        (
            g, grad_lse, out_a, lse_a, out_b, lse_b, *results,
            rows, heads, width // vector, *((0, 0) if g is None else _steps(g, vector)), *_steps(out_a, vector),
            *_steps(out_b, vector), *((0, 0) if grad_lse is None else grad_lse.stride()), *lse_a.stride(), *lse_b.stride(),
        ),
        (vector, *blocks),
        num_warps=2 if max(x.itemsize for x in (out_a, out_b)) == 2 else 4,
    )  # fmt: skip
    return results


# --- tiles ---------------------------------------------------------------------------------------------------------------------


def _in_runs(x: Tensor) -> Tensor:
    """`x`, or a copy where the elements of a head are not adjacent."""
    return x if x.stride(2) == 1 else x.contiguous()


def _tiling(size: int, *tensors: Tensor) -> tuple[tuple[int, int, int], int, tuple[int, int, int]]:
    """(grid, VECTOR, (BLOCK_R, BLOCK_D, BLOCKS)) of tensors of one shape, `size` bytes in a block of the widest."""
    rows, heads, width = tensors[0].shape
    vector = 16 // min(x.itemsize for x in tensors)
    steps = (width, *(step for x in tensors for step in (x.stride(0), x.stride(1))))
    if any(x.data_ptr() % 16 for x in tensors) or any(step % vector for step in steps):
        vector = 1
    block_d = _block_width(max(width, 1))
    block_r = size // max(x.itemsize for x in tensors) // block_d
    return (triton.cdiv(rows * heads, block_r), 1, 1), vector, (block_r, block_d, triton.cdiv(width, block_d))


def _block_width(width: int) -> int:
    """A power of two that divides `width` if that is not a narrow one, so that no lane idles; else the next one."""
    divisor = width & -width
    return min(divisor if divisor >= 64 else triton.next_power_of_2(width), _WIDEST)


def _steps(x: Tensor, vector: int) -> tuple[int, int]:
    """From row to row and from head to head, in units of VECTOR elements."""
    return x.stride(0) // vector, x.stride(1) // vector
