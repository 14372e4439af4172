"""Launchers of the native attention kernels: backend "native".

T rows, B sequences, H heads, D head dims. A call is a tile table of each side that is cut (`kernels_tiles.py`) and persistent
kernels that take tiles until none is left: the grid is as large as the GPU, whatever the batch, and no length is known on the host.
On Hopper, calls that the kernels written for it serve go to these; plain Triton serves the rest, and every other GPU.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels import attention_thd as contract
from meta_kernels.attention_thd import Call, GradCall, key_metadata
from thdops.ops.attention_thd.kernels_backward import (
    attention_grad_keys_kernel,
    attention_grad_queries_kernel,
    delta_kernel,
    sink_grad_kernel,
)
from thdops.ops.attention_thd.kernels_blocks import LOG2E, parts
from thdops.ops.attention_thd.kernels_forward import attention_forward_kernel
from thdops.ops.attention_thd.kernels_tiles import tile_table
from thdops.ops.launch import launch, multiprocessors


class Blocks(NamedTuple):
    """How a kernel is cut: query rows and key rows of a block, warps, stages of the loads' pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


_BLOCKS_FP32 = Blocks(32, 32, 4, 1)
_BLOCKS_SMALL = Blocks(32, 32, 4, 1)
_SHARED_MEMORY = 160 * 1024
_LONG = 1024  # visible keys from which adding up dq in memory beats a second kernel, measured on an H200


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, Dv], lse fp32 [Hq, Tq], max_logit fp32 [Hq] or [0]). Padding rows: out 0, lse -inf."""
    out, lse, max_logit = contract.fake_attention(*call)
    if call.return_max_logit:
        max_logit.fill_(-math.inf)
    q, k, v = (_loadable(x) for x in call[:3])
    sink = None if call.sink is None else call.sink.contiguous()
    if is_hopper(q.get_device()) and not call.return_max_logit:
        from thdops.ops.attention_thd import kernels_hopper_forward as hopper

        if hopper.serves(q, k, v, call.scale):
            tiles, sequences = _query_tiles(call, hopper.BLOCK_M), call.cu_seqlens_q.shape[0] - 1
            softmax = "sink" if call.softmax == "learnable" else call.softmax
            hopper.forward(q, k, v, *tiles, out, lse, sink, sequences, *_window(call), call.scale, call.softcap, softmax)
            return out, lse, max_logit

    blocks = _forward_blocks(call)
    unit, *strides = _strides(q, k, v)
    negative, factor = call.scale < 0, max(abs(call.scale), 1e-30)  # as good as 0, and keeps -inf * 0 away
    _persistent(
        attention_forward_kernel,
        (q, k, v, sink, out, lse, max_logit, *_query_tiles(call, blocks.queries)),
        (*strides, q.shape[0], q.shape[1], q.shape[1] // k.shape[1], *_window(call)),
        (factor if call.softcap else factor * LOG2E.value, call.softcap),
        (negative, *_widths(call), *_bounded(call), call.softmax, call.softcap != 0, call.return_max_logit, unit),
        blocks,
    )
    return out, lse, max_logit


def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink fp32 [Hq] or [0]). Padding rows: 0."""
    dq, dk, dv, dsink = contract.fake_attention_grad(*call)
    q, k, v = (_loadable(x) for x in call[2:5])
    grad_out = _loadable(q.new_zeros(()).expand(call.out.shape) if call.grad_out is None else call.grad_out)
    lse = call.lse.contiguous()
    if is_hopper(q.get_device()) and call.softcap == 0:
        from thdops.ops.attention_thd import kernels_hopper_backward as hopper

        if hopper.serves(q, k, v, grad_out):
            rows_q, rows_k = hopper.tile_rows(q.shape[2], v.shape[2])
            tiles = _query_tiles(call, rows_q)
            reduced = _is_long(call) and call.scale > 0 and hopper.reduces(q.shape[2], v.shape[2], call.deterministic)
            sums = torch.empty(q.shape, dtype=torch.float32, device=q.device) if reduced else None
            delta = _delta(call, grad_out, lse, *tiles, dsink, sums)
            key_tiles = _key_tiles(call, rows_k)
            hopper.backward(q, k, v, grad_out, lse, delta, dq, dk, dv, sums, tiles, key_tiles, *_window(call), call.scale)
            return dq, dk, dv, dsink

    heads, heads_kv = q.shape[1], k.shape[1]
    before, behind = _window(call)
    left, right = _bounded(call)
    unit, *strides = _strides(q, k, v, grad_out)
    strides.append(q.shape[0])
    factors = (call.scale, call.scale if call.softcap else call.scale * LOG2E.value, call.softcap)
    blocks = _queries_blocks(call)
    tiles, counts = _query_tiles(call, blocks.queries)
    delta = _delta(call, grad_out, lse, tiles, counts, dsink)
    operands = (q, k, v, grad_out, lse, delta)
    _persistent(
        attention_grad_queries_kernel,
        (*operands, dq, tiles, counts),
        (*strides, heads, heads // heads_kv, before, behind),
        factors,
        (*_widths(call), left, right, call.softcap != 0, unit),
        blocks,
    )
    blocks = _keys_blocks(call)
    # Seen from a key, queries stand on the other side of the diagonal.
    _persistent(
        attention_grad_keys_kernel,
        (*operands, dk, dv, *_key_tiles(call, blocks.keys)),
        (*strides, heads_kv, heads // heads_kv, behind, before),
        factors,
        (*_widths(call), right, left, call.softcap != 0, unit),
        blocks,
    )
    return dq, dk, dv, dsink


@cache
def is_hopper(device_index: int) -> bool:
    """Whether a GPU runs the kernels written for compute capability 9.0; all others get plain Triton."""
    return device_index >= 0 and torch.cuda.get_device_capability(device_index) == (9, 0)


def _is_long(call: GradCall) -> bool:
    """Whether a query sees many keys, as far as shapes and the window tell."""
    left, right = _window(call)
    windowed = left >= 0 and right >= 0 and left + right < _LONG
    return not windowed and call.k.shape[0] >= _LONG * (call.cu_seqlens_q.shape[0] - 1)


def _delta(
    call: GradCall, grad_out: Tensor, lse: Tensor, tiles: Tensor, counts: Tensor, dsink: Tensor, sums: Tensor | None = None
) -> Tensor:
    """fp32 [Hq, Tq], from the forward's out as it was rounded; on the way dsink, and zeros into `sums`, where there are these."""
    out = _loadable(call.out)
    total, heads, dim = out.shape
    delta = torch.empty(heads, total, dtype=torch.float32, device=out.device)
    grad_lse_strides = (0, 0) if call.grad_lse is None else call.grad_lse.stride()
    unit, *strides = _strides(out, grad_out)
    args = (out, grad_out, lse, call.grad_lse, delta, sums, tiles, counts, *strides, *grad_lse_strides, total, heads)
    width = max(16, 1 << (dim - 1).bit_length())
    launch(delta_kernel, (_programs(tiles, heads, 8), 1, 1), args, (dim, width, 0 if sums is None else sums.shape[2], unit, 32))
    if call.sink is not None:
        launch(sink_grad_kernel, (heads, 1, 1), (call.sink.contiguous(), lse, delta, dsink, total), (1024,), 8)
    return delta


def _persistent(
    kernel: Any,
    tensors: tuple[Any, ...],
    numbers: tuple[int, ...],
    factors: tuple[float, ...],
    flags: tuple[Any, ...],
    blocks: Blocks,
) -> None:
    """`tensors` end in tiles and counts; `numbers` have the heads in front of (group, before, behind)."""
    tiles, heads = tensors[-2], numbers[-4]
    launch(
        kernel,
        (_programs(tiles, heads, 3), 1, 1),
        (*tensors, *numbers, *factors),
        (*flags, blocks.queries, blocks.keys),
        blocks.warps,
        stages=blocks.stages,
    )


def _programs(tiles: Tensor, heads: int, per_multiprocessor: int) -> int:
    """Enough to fill the GPU (those that come later find no work), and no more than there can be work items."""
    return min(tiles.shape[0] * heads, multiprocessors(tiles.get_device()) * per_multiprocessor)


# --- metadata ------------------------------------------------------------------------------------------------------------------


def _query_tiles(call: Call | GradCall, block: int) -> tuple[Tensor, Tensor]:
    keys = None if call.cu_seqlens_kv is None else (*key_metadata(call), call.k.shape[0])
    return tile_table((call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0]), keys, call.bottom_right, block)


def _key_tiles(call: Call | GradCall, block: int) -> tuple[Tensor, Tensor]:
    queries = (call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])
    if call.cu_seqlens_kv is None:
        return tile_table(queries, None, False, block)
    return tile_table((*key_metadata(call), call.k.shape[0]), queries, call.bottom_right, block)


def _window(call: Call | GradCall) -> tuple[int, int]:
    """(left, right) bounds of a query; clipped, so that nothing overflows where a position is added."""
    beyond = call.q.shape[0] + call.k.shape[0]
    return min(call.window_left, beyond), 0 if call.causal else min(call.window_right, beyond)


def _bounded(call: Call | GradCall) -> tuple[bool, bool]:
    return call.window_left >= 0, call.causal or call.window_right >= 0


# --- operands ------------------------------------------------------------------------------------------------------------------


def _loadable(x: Tensor) -> Tensor:
    """Kernels want the head dim's elements side by side; any other stride is theirs to follow."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """A unit, and the strides of rows and heads in it: 8 elements where all are multiples of that, so that loads are wide."""
    strides = [stride for x in tensors for stride in x.stride()[:2]]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return unit, *(stride // unit for stride in strides)


def _widths(call: Call | GradCall) -> tuple[int, ...]:
    """(Dqk, its parts, Dv, its parts)."""
    dim, dim_v = call.q.shape[2], call.v.shape[2]
    return dim, *parts(dim), dim_v, *parts(dim_v)


# --- blocks --------------------------------------------------------------------------------------------------------------------


def _width(call: Call | GradCall) -> int:
    """The wider of the head dims, as the kernels hold it."""
    _, *qk, _, first, second = _widths(call)
    return max(sum(qk), first + second)


def _forward_blocks(call: Call) -> Blocks:
    if call.q.dtype == torch.float32:
        return _BLOCKS_FP32
    if not _has_room(call.q.get_device()):
        return _BLOCKS_SMALL
    width = _width(call)
    if width <= 64:
        return Blocks(128, 64, 4, 3)
    return Blocks(128, 64, 8, 3 if width <= 128 else 2)


def _keys_blocks(call: GradCall) -> Blocks:
    if call.q.dtype == torch.float32:
        return _BLOCKS_FP32
    if not _has_room(call.q.get_device()):
        return _BLOCKS_SMALL
    # Of 8 x 4096 rows on an H200, ms: D 64 with two stages 1.84 and three 1.58; D 128 6.5, and 7.4 to 18 with other blocks; D 256
    # (16 heads) 13.2, with 64 queries 14.3. Fewer queries than 64 must not be pipelined on Hopper: Triton 3.6 lets the loads of the
    # next block overwrite what the asynchronous product for dk still reads, if another product of the loop is a synchronous one.
    width = _width(call)
    if width <= 128:
        return Blocks(64, 64, 4, 3 if width <= 64 else 2)
    return Blocks(32, 64, 8, 1)


def _queries_blocks(call: GradCall) -> Blocks:
    if call.q.dtype == torch.float32:
        return _BLOCKS_FP32
    if not _has_room(call.q.get_device()):
        return _BLOCKS_SMALL
    return Blocks(128, 64, 8, 2 if _width(call) <= 128 else 1)


@cache
def _has_room(device_index: int) -> bool:
    """Whether a program may have the shared memory that the large blocks take (A100, H100 and later data-centre GPUs)."""
    return device_index < 0 or torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin >= _SHARED_MEMORY
