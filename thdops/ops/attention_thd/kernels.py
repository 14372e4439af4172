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
import triton
from torch import Tensor

from meta_kernels import attention_thd as contract
from meta_kernels.attention_thd import Call, GradCall, key_metadata
from thdops.ops.attention_thd.kernels_backward import (
    attention_grad_keys_kernel,
    attention_grad_queries_kernel,
    convert_kernel,
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
_FEW = 8  # tiles of keys a multiprocessor, below which a causal mask's heavy ones have to come first
_LONG = 1024  # visible keys from which adding up dq in memory beats a second kernel, measured on an H200


class Found(NamedTuple):
    """Where attention to some keys leaves its results, and those for other keys that it begins with."""

    out: Tensor  # [Tq, Hq, Dv], q's dtype or fp32
    lse: Tensor  # fp32 [Hq, Tq]; a head's rows side by side
    max_logit: Tensor  # fp32 [Hq], raised to what is found; or [0]
    before: Tensor | None = None  # fp32 [Tq, Hq, Dv] in units of e^unit, with `lse` for its LSE; `out` itself if that is fp32
    unit: Tensor | None = None  # as `lse`; for an fp32 `out`, and for `before`
    owned: str = "all"  # rows that are written; see `tile_table`


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, Dv], lse fp32 [Hq, Tq], max_logit fp32 [Hq] or [0]). Padding rows: out 0, lse -inf."""
    out, lse, max_logit = contract.fake_attention(*call)
    if call.return_max_logit:
        max_logit.fill_(-math.inf)
    attention_into(call, Found(out, lse, max_logit))
    return out, lse, max_logit


def attention_into(call: Call, found: Found) -> None:
    """`attention`, written to `found`; with `found.before`, attention to those keys and to these (softmax "vanilla" then)."""
    out, lse, max_logit, before, base, owned = found
    q, k, v = (_loadable(x) for x in call[:3])
    sink = None if call.sink is None else call.sink.contiguous()
    if is_hopper(q.get_device()) and not call.return_max_logit:
        from thdops.ops.attention_thd import kernels_hopper_forward as hopper

        if hopper.serves(q, k, v, call.scale):
            tiles, sequences = _query_tiles(call, hopper.BLOCK_M, owned), call.cu_seqlens_q.shape[0] - 1
            softmax = "sink" if call.softmax == "learnable" else call.softmax
            how = (sequences, *_window(call), call.scale, call.softcap, softmax, before, base)
            hopper.forward(q, k, v, *tiles, out, lse, sink, *how)
            return

    blocks = _forward_blocks(call)
    unit, *strides = _strides(q, k, v)
    negative, factor = call.scale < 0, max(abs(call.scale), 1e-30)  # as good as 0, and keeps -inf * 0 away
    _persistent(
        attention_forward_kernel,
        (q, k, v, sink, before, base, out, lse, max_logit, *_query_tiles(call, blocks.queries, owned)),
        (*strides, lse.stride(0), q.shape[1], q.shape[1] // k.shape[1], *_window(call)),
        (factor if call.softcap else factor * LOG2E.value, call.softcap),
        (negative, *_widths(call), *_bounded(call), call.softmax, call.softcap != 0, call.return_max_logit, unit),
        blocks,
    )


class Upstream(NamedTuple):
    """What comes down to every key of a backward, whichever they are attended to with."""

    grad_out: Tensor
    lse: Tensor
    delta: Tensor  # fp32 [Hq, Tq]
    sums: Tensor | None  # fp32 [Tq, Hq, Dqk]; where not None, dq / scale is added to it on the way to dk and dv
    tiles: tuple[Tensor, Tensor]  # of the call's queries


def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink fp32 [Hq] or [0]). Padding rows: 0."""
    dq, dk, dv, dsink = contract.fake_attention_grad(*call)
    call = call._replace(q=_loadable(call.q), k=_loadable(call.k), v=_loadable(call.v))  # once for all kernels
    upstream = attention_upstream(call, dsink, not call.deterministic)
    if upstream.sums is None:
        attention_grad_queries(call, upstream, dq, False, upstream.tiles)
    attention_grad_keys(call, upstream, dk, dv, False)
    if upstream.sums is not None:
        rounded(upstream.sums, dq, call.scale)
    return dq, dk, dv, dsink


def attention_upstream(call: GradCall, dsink: Tensor, reduces: bool) -> Upstream:
    """For all sections of the keys: once, whatever they are. Writes dsink. `reduces`: dq may come by reduction, in any order."""
    q = call.q
    grad_out = _loadable(q.new_zeros(()).expand(call.out.shape) if call.grad_out is None else call.grad_out)
    lse, sums = call.lse.contiguous(), None
    hopper = _hopper_backward(call, grad_out)
    if hopper is None:
        rows = _queries_blocks(call).queries
    else:
        rows, _ = hopper.tile_rows(q.shape[2], call.v.shape[2])
        if reduces and _is_long(call) and call.scale > 0 and hopper.reduces(q.shape[2], call.v.shape[2]):
            sums = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    tiles = _query_tiles(call, rows)
    return Upstream(grad_out, lse, _delta(call, grad_out, lse, *tiles, dsink, sums), sums, tiles)


def attention_grad_queries(
    call: GradCall, upstream: Upstream, dq: Tensor, adds: bool, tiles: tuple[Tensor, Tensor] | None = None
) -> None:
    """dq, contiguous, over the call's keys. `adds`: to what dq holds, fp32, and rows that meet no key stay as they are."""
    q, k, v = (_loadable(x) for x in call[2:5])
    grad_out, lse, delta = upstream[:3]
    hopper = _hopper_backward(call, grad_out)
    if tiles is None:
        rows = _queries_blocks(call).queries if hopper is None else hopper.tile_rows(q.shape[2], v.shape[2])[0]
        tiles = _query_tiles(call, rows, "met" if adds else "all")
    if hopper is not None:
        hopper.backward(q, k, v, grad_out, lse, delta, dq, None, None, None, tiles, None, *_window(call), call.scale, adds)
        return
    unit, *strides = _strides(q, k, v, grad_out)
    _persistent(
        attention_grad_queries_kernel,
        (q, k, v, grad_out, lse, delta, dq, *tiles),
        (*strides, q.shape[0], q.shape[1], q.shape[1] // k.shape[1], *_window(call)),
        _factors(call),
        (*_widths(call), *_bounded(call), call.softcap != 0, adds, unit),
        _queries_blocks(call),
    )


def attention_grad_keys(call: GradCall, upstream: Upstream, dk: Tensor, dv: Tensor, adds: bool) -> None:
    """dk and dv, contiguous, over the call's queries, and a share of `upstream.sums` if there are these. `adds`: as above."""
    q, k, v = (_loadable(x) for x in call[2:5])
    grad_out, lse, delta, sums, _ = upstream
    owned = "met" if adds else "all"
    hopper = _hopper_backward(call, grad_out)
    if hopper is not None:
        tiles = _key_tiles(call, hopper.tile_rows(q.shape[2], v.shape[2])[1], owned)
        hopper.backward(q, k, v, grad_out, lse, delta, None, dk, dv, sums, None, tiles, *_window(call), call.scale, adds)
        return
    blocks = _keys_blocks(call)
    # Seen from a key, queries stand on the other side of the diagonal.
    before, behind = _window(call)
    left, right = _bounded(call)
    unit, *strides = _strides(q, k, v, grad_out)
    _persistent(
        attention_grad_keys_kernel,
        (q, k, v, grad_out, lse, delta, dk, dv, *_key_tiles(call, blocks.keys, owned)),
        (*strides, q.shape[0], k.shape[1], q.shape[1] // k.shape[1], behind, before),
        _factors(call),
        (*_widths(call), right, left, call.softcap != 0, adds, unit),
        blocks,
    )


def rounded(sums: Tensor, grad: Tensor, scale: float = 1.0) -> None:
    """grad = scale sums, fp32; both contiguous."""
    chunk, block = 8, 4096  # head dims are multiples of 8
    grid = (triton.cdiv(grad.numel(), block), 1, 1)
    launch(convert_kernel, grid, (sums, grad, grad.numel() // chunk, scale), (chunk, block), 8)


def _factors(call: GradCall) -> tuple[float, float, float]:
    """(scale, what makes logits of products, softcap)."""
    return call.scale, call.scale if call.softcap else call.scale * LOG2E.value, call.softcap


def _hopper_backward(call: GradCall, grad_out: Tensor) -> Any:
    """The module of the Hopper kernels if they serve the call."""
    if not is_hopper(call.q.get_device()) or call.softcap != 0:
        return None
    from thdops.ops.attention_thd import kernels_hopper_backward as hopper

    q, k, v = (_loadable(x) for x in call[2:5])
    return hopper if hopper.serves(q, k, v, grad_out) else None


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


def _query_tiles(call: Call | GradCall, block: int, owned: str = "all") -> tuple[Tensor, Tensor]:
    keys = None if call.cu_seqlens_kv is None else (*key_metadata(call), call.k.shape[0])
    return tile_table((call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0]), keys, call.bottom_right, block, owned)


def _key_tiles(call: Call | GradCall, block: int, owned: str = "all") -> tuple[Tensor, Tensor]:
    queries = (call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])
    rows, heads, _ = call.k.shape
    uneven = call.causal and rows * heads < _FEW * block * multiprocessors(call.q.get_device())
    if call.cu_seqlens_kv is None:
        return tile_table(queries, None, False, block, owned, uneven)
    return tile_table((*key_metadata(call), rows), queries, call.bottom_right, block, owned, uneven)


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
    width = _width(call)
    if not _multiplies_asynchronously(call.q.get_device()):
        return Blocks(64, 64, 4, 2) if width <= 64 else Blocks(32, 128 if width <= 128 else 64, 8, 2)
    # Of 8 x 4096 rows on an H200, ms: D 64 with two stages 1.84 and three 1.58; D 128 6.5, and 7.4 to 18 with other blocks; D 256
    # (16 heads) 13.2, with 64 queries 14.3. Fewer queries than 64 must not be pipelined here: their products are synchronous, and
    # beside these Triton 3.6 lets the loads of the next block overwrite what the asynchronous product for dk still reads.
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
def _multiplies_asynchronously(device_index: int) -> bool:
    """Whether products of 64 rows and more run beside what follows them: from Hopper on. Taken to be so where there is no GPU."""
    return device_index < 0 or torch.cuda.get_device_capability(device_index) >= (9, 0)


@cache
def _has_room(device_index: int) -> bool:
    """Whether a program may have the shared memory that the large blocks take (A100, H100 and later data-centre GPUs)."""
    return device_index < 0 or torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin >= _SHARED_MEMORY
