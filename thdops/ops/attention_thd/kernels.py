"""Launchers of the native attention kernels: backend "native".

T rows, B sequences, H heads, D head dims. A call is a tile table of each side that is cut (`kernels_tiles.py`) and persistent
kernels that take tiles until none is left: the grid is as large as the GPU, whatever the batch, and no length is known on the host.
On Hopper, calls that the kernels written for it serve go to these; plain Triton serves the rest, and every other GPU.

What follows from the kind of a call is planned once for all calls of that kind (`Plans`): which kernels, their blocks and windows,
strides, tile tables. A plan is an object that is called with the tensors; it allocates and launches.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from meta_kernels import attention_thd as contract
from meta_kernels.attention_thd import Call, GradCall
from thdops.ops.attention_thd.kernels_backward import (
    attention_grad_keys_kernel,
    attention_grad_queries_kernel,
    convert_kernel,
    delta_kernel,
    sink_grad_kernel,
)
from thdops.ops.attention_thd.kernels_blocks import LOG2E, parts
from thdops.ops.attention_thd.kernels_forward import attention_forward_kernel
from thdops.ops.attention_thd.kernels_tiles import SHORT, Tiles, TileTable
from thdops.ops.launch import Launch, multiprocessors
from thdops.ops.plans import Blank, Plans, meta


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
_UNSURE = 4096  # rows from which it pays to look at the offsets, where shapes alone say that sequences are short


Operands = tuple[Tensor, Tensor, Tensor]


class Found(NamedTuple):
    """Where attention to some keys leaves its results, and those for other keys that it begins with."""

    out: Tensor  # [Tq, Hq, Dv], q's dtype or fp32
    lse: Tensor  # fp32 [Hq, Tq]; a head's rows side by side
    max_logit: Tensor  # fp32 [Hq], raised to what is found; or [0]
    before: Tensor | None = None  # fp32 [Tq, Hq, Dv] in units of e^unit, with `lse` for its LSE; `out` itself if that is fp32
    unit: Tensor | None = None  # as `lse`; for an fp32 `out`, and for `before`
    owned: str = "all"  # rows that are written; see `TileTable`


class Attention:
    """(out [Tq, Hq, Dv], lse fp32 [Hq, Tq], max_logit fp32 [Hq] or [0]) of calls of one kind. Padding rows: out 0, lse -inf."""

    def __init__(self, call: Call) -> None:
        results = contract.fake_attention(*call)
        self._blank = Blank(*results)
        self._attend = _Attend(call, Found(*results))

    def __call__(self, call: Call) -> tuple[Tensor, ...]:
        results = out, lse, max_logit = self._blank(call.q.device)
        if call.return_max_logit:
            max_logit.fill_(-math.inf)
        self._attend(call, Found(out, lse, max_logit))
        return results


def attention_into(call: Call, found: Found) -> None:
    """`Attention`, written to `found`; with `found.before`, attention to those keys and to these (softmax "vanilla" then)."""
    _, attend = _attends(call, found)
    attend(call, found)


class _Attend:
    """`attention_into` of one kind, by one kernel, or by one for short sequences and one for long ones."""

    def __init__(self, call: Call, found: Found) -> None:
        q, k, v = _operands(call)
        self._ways: list[tuple[TileTable, str, Any]] = []  # the last for sequences of such lengths
        if is_hopper(q.get_device()) and not call.return_max_logit:
            from thdops.ops.attention_thd import kernels_hopper_forward as hopper

            if hopper.serves(q, k, v, call.scale):
                softmax = "sink" if call.softmax == "learnable" else call.softmax
                lengths = ("long",) if found.unit is not None else _lengths(call)  # of a section, whatever its length
                shapes = {hopper.shape_of(q, v, *_window(call), length == "short"): length for length in lengths}
                looks = len(shapes) > 1
                mean = _mean_rows(k, call)
                for shape, length in shapes.items():
                    tiles = _query_tiles(call, shape.rows, found.owned, looks)
                    how = mean, *_window(call), call.scale, call.softcap, softmax
                    kernel = hopper.Forward(q, k, v, found.out, found.lse, shape, *how)
                    self._ways.append((tiles, length if looks else "any", kernel))
                return

        blocks = _forward_blocks(call)
        tiles = _query_tiles(call, blocks.queries, found.owned)
        unit, *strides = _strides(q, k, v)
        negative, factor = call.scale < 0, max(abs(call.scale), 1e-30)  # as good as 0, and keeps -inf * 0 away
        kernel = _persistent(
            attention_forward_kernel,
            tiles,
            (*strides, found.lse.stride(0), q.shape[1], q.shape[1] // k.shape[1], *_window(call)),
            (factor if call.softcap else factor * LOG2E.value, call.softcap),
            (negative, *_widths(call), *_bounded(call), call.softmax, call.softcap != 0, call.return_max_logit, unit),
            blocks,
            q.get_device(),
        )
        self._ways.append((tiles, "any", kernel))

    def __call__(self, call: Call, found: Found) -> None:
        out, lse, max_logit, before, unit, _ = found
        sink = None if call.sink is None else call.sink.contiguous()
        operands, (queries, keys) = _operands(call), _sides(call)
        for tiles, lengths, kernel in self._ways:
            kernel(*operands, sink, before, unit, out, lse, max_logit, *tiles(*queries, *keys).of(lengths))


_attends = Plans(_Attend)


class AttentionGrad:
    """(dq, dk, dv, dsink fp32 [Hq] or [0]) of calls of one kind. Padding rows: 0.

    dq by a kernel of its own for short sequences, and by reduction, together with dk and dv, for long ones: where it may be and
    shapes do not tell which they are, everything is launched, and one half of it finds nothing to do.
    """

    def __init__(self, call: GradCall) -> None:
        results = dq, *_ = contract.fake_attention_grad(*call)
        self._blank = Blank(*results)
        q, k, v = _operands(call)
        grad_out = _grad_out(call)
        call = call._replace(q=q, k=k, v=v, out=_loadable(call.out), grad_out=grad_out)  # once for all that is planned
        lengths = _lengths(call) if _may_reduce(call, grad_out) else ("short",)
        looks = len(lengths) > 1
        self._short, self._long = ("short", "long") if looks else ("any", "any")
        here = "any"  # sequences that `_upstream` makes delta for
        if "short" in lengths and _makes_delta(call, grad_out):
            here = "long" if looks else "none"
        begins = "long" in lengths and _begins_sums(call, grad_out)
        self._upstream = _AttentionUpstream(call, "long" in lengths, looks, here, begins)
        self._queries = self._keys = self._reducing = None
        if "short" in lengths:
            self._queries = _GradQueries(call, grad_out, adds=False)
            self._keys = _GradKeys(call, grad_out, adds=False, reduces=False, looks=looks)
            self._table = self._keys.table
        if "long" in lengths:
            self._reducing = _GradKeys(call, grad_out, adds=False, reduces=True, looks=looks, begins=begins)
            self._table = self._reducing.table
            self._rounded = _rounding(call, dq, call.scale)

    def __call__(self, call: GradCall) -> tuple[Tensor, ...]:
        results = dq, dk, dv, dsink = self._blank(call.q.device)
        operands, (queries, keys) = _operands(call), _sides(call)
        upstream = self._upstream(call)
        tiles = self._table(*keys, *queries)
        if self._queries and self._keys:
            self._queries(operands, upstream, dq, upstream.tiles.of(self._short))
            self._keys(operands, upstream._replace(sums=None), dk, dv, tiles.of(self._short))
        if self._reducing:
            self._reducing(operands, upstream, dk, dv, tiles.of(self._long))
            self._rounded(upstream.sums, dq, *upstream.tiles.of(self._long))
        self._upstream.sink(call, upstream, dsink)
        return results


class Upstream(NamedTuple):
    """What comes down to every key of a backward, whichever they are attended to with."""

    grad_out: Tensor
    lse: Tensor
    delta: Tensor  # fp32 [Hq, Tq]
    made_of: tuple[Tensor | None, ...]  # out and dLSE, of which the kernel for dq is to make delta; () where it is there
    sums: Tensor | None  # fp32 [Tq, Hq, Dqk]; where not None, dq / scale is added to it on the way to dk and dv
    tiles: Tiles  # of the call's queries, all of them


def attention_upstream(call: GradCall, dsink: Tensor, reduces: bool) -> Upstream:
    """For all sections of the keys: once, whatever they are. Writes dsink. `reduces`: dq may come by reduction."""
    _, plan = _upstreams(call, reduces)
    upstream = plan(call)
    plan.sink(call, upstream, dsink)
    return upstream


class _AttentionUpstream:
    """`attention_upstream` of one kind, but for `sink`. delta is made of the forward's out as it was rounded; valid rows of `sums`
    are zeroed on the way. here: for which sequences ("any", "long", "none"); for all others the kernel for dq makes delta. begins:
    rows whose sums `_GradKeys` begins are not zeroed.
    """

    def __init__(self, call: GradCall, reduces: bool, looks: bool = False, here: str = "any", begins: bool = False) -> None:
        q, out, grad_out = call.q, _loadable(call.out), _grad_out(call)
        total, heads, dim = out.shape
        self._tiles = _upstream_table(call, looks)
        self._here = here
        grad_lse_strides = (0, 0) if call.grad_lse is None else call.grad_lse.stride()
        unit, *strides = _strides(out, grad_out)
        width = max(16, 1 << (dim - 1).bit_length())
        self._delta = Launch(
            delta_kernel,
            (_programs(self._tiles, heads, 8, q.get_device()), 1, 1),
            (*strides, *grad_lse_strides, total, heads, *_window(call)),
            (dim, width, q.shape[2] if reduces else 0, _queries_rows(call, grad_out) if begins else 0, unit, 32),
        )
        self._dsink = Launch(sink_grad_kernel, (heads, 1, 1), (total,), (1024,), 8)
        blank = [meta(heads, total, dtype=torch.float32)]
        if reduces:
            blank.append(meta(*q.shape, dtype=torch.float32))
        self._blank = Blank(*blank)

    def __call__(self, call: GradCall) -> Upstream:
        lse, out, grad_out = call.lse.contiguous(), _loadable(call.out), _grad_out(call)
        queries, keys = _sides(call)
        tiles = self._tiles(*queries, *keys)
        delta, *more = self._blank(lse.device)
        sums = more[0] if more else None
        if self._here != "none":
            self._delta(out, grad_out, lse, call.grad_lse, delta, sums, *tiles.of(self._here))
        made_of = () if self._here == "any" else (out, call.grad_lse)
        return Upstream(grad_out, lse, delta, made_of, sums, tiles)

    def sink(self, call: GradCall, upstream: Upstream, dsink: Tensor) -> None:
        """dsink, once there is delta."""
        if call.sink is not None:
            self._dsink(call.sink.contiguous(), upstream.lse, upstream.delta, dsink)


def _upstream(call: GradCall, reduces: bool) -> _AttentionUpstream:
    return _AttentionUpstream(call, reduces and _may_reduce(call, _grad_out(call)) and _lengths(call) == ("long",))


_upstreams = Plans(_upstream)


def _upstream_table(call: GradCall, looks: bool = False) -> TileTable:
    """Of all rows of the call's queries."""
    return _query_tiles(call, _queries_rows(call, _grad_out(call)), looks=looks)


def _queries_rows(call: GradCall, grad_out: Tensor) -> int:
    """Of a tile of queries."""
    hopper = _hopper_backward(call, grad_out)
    return _queries_blocks(call).queries if hopper is None else hopper.tile_rows(call.q.shape[2], call.v.shape[2])[0]


def attention_grad_queries(call: GradCall, upstream: Upstream, dq: Tensor, adds: bool, tiles: Tiles | None = None) -> None:
    """dq, contiguous, over the call's keys. `adds`: to what dq holds, fp32, and rows that meet no key stay as they are."""
    _, grad = _queries_grads(call, upstream, dq, adds)
    queries, keys = _sides(call)
    own = grad.table(*queries, *keys) if tiles is None else tiles
    grad(_operands(call), upstream, dq, own.of("any"))


class _GradQueries:
    """`attention_grad_queries` of one kind, but for the tiles, those of `table` or as they would be."""

    def __init__(self, call: GradCall, grad_out: Tensor, adds: bool) -> None:
        q, k, v = _operands(call)
        self.table = _query_tiles(call, _queries_rows(call, grad_out), "met" if adds else "all")
        hopper = _hopper_backward(call, grad_out)
        if hopper is not None:
            mean, window, out = _mean_rows(k, call), _window(call), _loadable(call.out)
            self._kernel: Any = hopper.Queries(q, k, v, grad_out, mean, *window, call.scale, adds, out, call.grad_lse)
            return
        blocks = _queries_blocks(call)
        unit, *strides = _strides(q, k, v, grad_out)
        self._kernel = _persistent(
            attention_grad_queries_kernel,
            self.table,
            (*strides, q.shape[0], q.shape[1], q.shape[1] // k.shape[1], *_window(call)),
            _factors(call),
            (*_widths(call), *_bounded(call), call.softcap != 0, adds, unit),
            blocks,
            q.get_device(),
        )

    def __call__(self, operands: Operands, upstream: Upstream, dq: Tensor, tiles: tuple[Tensor, Tensor]) -> None:
        self._kernel(*operands, upstream.grad_out, upstream.lse, upstream.delta, dq, *tiles, *upstream.made_of)


_queries_grads = Plans(lambda call, upstream, dq, adds: _GradQueries(call, upstream.grad_out, adds))


def attention_grad_keys(call: GradCall, upstream: Upstream, dk: Tensor, dv: Tensor, adds: bool) -> None:
    """dk and dv, contiguous, over the call's queries, and a share of `upstream.sums` if there are these. `adds`: as above."""
    _, grad = _keys_grads(call, upstream, dk, dv, adds)
    queries, keys = _sides(call)
    grad(_operands(call), upstream, dk, dv, grad.table(*keys, *queries).of("any"))


class _GradKeys:
    """`attention_grad_keys` of one kind, but for the tiles, those of `table`."""

    def __init__(
        self, call: GradCall, grad_out: Tensor, adds: bool, reduces: bool, looks: bool = False, begins: bool = False
    ) -> None:
        q, k, v = _operands(call)
        hopper = _hopper_backward(call, grad_out)
        blocks = _keys_blocks(call)
        rows = blocks.keys if hopper is None else hopper.tile_rows(q.shape[2], v.shape[2])[1]
        self.table = _key_tiles(call, rows, "met" if adds else "all", looks)
        if hopper is not None:
            window, sequences = _window(call), _sequences(call)
            self._kernel: Any = hopper.Keys(q, k, v, grad_out, sequences, *window, call.scale, adds, reduces, begins)
            return
        # Seen from a key, queries stand on the other side of the diagonal.
        before, behind = _window(call)
        left, right = _bounded(call)
        unit, *strides = _strides(q, k, v, grad_out)
        self._kernel = _persistent(
            attention_grad_keys_kernel,
            self.table,
            (*strides, q.shape[0], k.shape[1], q.shape[1] // k.shape[1], behind, before),
            _factors(call),
            (*_widths(call), right, left, call.softcap != 0, adds, unit),
            blocks,
            q.get_device(),
        )

    def __call__(self, operands: Operands, upstream: Upstream, dk: Tensor, dv: Tensor, tiles: tuple[Tensor, Tensor]) -> None:
        grad_out, lse, delta, _, sums, _ = upstream
        self._kernel(*operands, grad_out, lse, delta, dk, dv, *tiles, *(() if sums is None else (sums,)))


_keys_grads = Plans(lambda call, upstream, dk, dv, adds: _GradKeys(call, upstream.grad_out, adds, upstream.sums is not None))


def rounded(call: GradCall, sums: Tensor, grad: Tensor, tiles: Tiles, scale: float = 1.0) -> None:
    """grad = scale sums, fp32, on the valid rows of the call's queries, whose `tiles` these are, and 0 on all others."""
    _, rounding = _roundings(call, grad, scale)
    rounding(sums, grad, *tiles.of("any"))


def _rounding(call: GradCall, grad: Tensor, scale: float) -> Launch:
    """`rounded` of one kind."""
    chunk, block, shares = 8, 4096, 16  # head dims are multiples of 8
    programs = _programs(_upstream_table(call), shares, 8, grad.get_device())
    row = grad.shape[1] * grad.shape[2]
    return Launch(convert_kernel, (programs, 1, 1), (row // chunk, shares, scale), (chunk, block), 8)


_roundings = Plans(_rounding)


def _factors(call: GradCall) -> tuple[float, float, float]:
    """(scale, what makes logits of products, softcap)."""
    return call.scale, call.scale if call.softcap else call.scale * LOG2E.value, call.softcap


def _hopper_backward(call: GradCall, grad_out: Tensor) -> Any:
    """The module of the Hopper kernels if they serve the call."""
    if not is_hopper(call.q.get_device()) or call.softcap != 0:
        return None
    from thdops.ops.attention_thd import kernels_hopper_backward as hopper

    return hopper if hopper.serves(*_operands(call), grad_out) else None


@cache
def is_hopper(device_index: int) -> bool:
    """Whether a GPU runs the kernels written for compute capability 9.0; all others get plain Triton."""
    return device_index >= 0 and torch.cuda.get_device_capability(device_index) == (9, 0)


def _lengths(call: Call | GradCall) -> tuple[str, ...]:
    """What sequences may be on the average, "short", "long", or both: offsets that end in empty sequences hide it from the host."""
    rows, sequences = call.k.shape[0], _sequences(call)
    if rows >= SHORT * sequences:
        return ("long",)
    return ("short",) if rows < _UNSURE else ("short", "long")


def _may_reduce(call: GradCall, grad_out: Tensor) -> bool:
    """Whether adding up dq in memory beats a second kernel for long sequences. Under a window a query sees too few keys."""
    left, right = _window(call)
    windowed = left >= 0 and right >= 0 and left + right < SHORT
    hopper = _hopper_backward(call, grad_out)
    dims = call.q.shape[2], call.v.shape[2]
    return hopper is not None and not windowed and call.scale > 0 and hopper.reduces(*dims, call.deterministic)


def _begins_sums(call: GradCall, grad_out: Tensor) -> bool:
    """Whether the kernel for dk and dv may begin sums for dq, instead of adding to zeros."""
    hopper = _hopper_backward(call, grad_out)
    return hopper is not None and hopper.begins_sums(call.q.shape[2], call.v.shape[2])


def _makes_delta(call: GradCall, grad_out: Tensor) -> bool:
    """Whether the kernel for dq had better make delta, too."""
    hopper = _hopper_backward(call, grad_out)
    return hopper is not None and hopper.makes_delta(call.q.shape[2], call.out)


def _persistent(
    kernel: Any,
    tiles: TileTable,
    numbers: tuple[int, ...],
    factors: tuple[float, ...],
    flags: tuple[Any, ...],
    blocks: Blocks,
    device_index: int,
) -> Launch:
    """`numbers` have the heads in front of (group, before, behind)."""
    return Launch(
        kernel,
        (_programs(tiles, numbers[-4], 3, device_index), 1, 1),
        (*numbers, *factors),
        (*flags, blocks.queries, blocks.keys),
        blocks.warps,
        stages=blocks.stages,
    )


def _programs(tiles: TileTable, heads: int, per_multiprocessor: int, device_index: int) -> int:
    """Enough to fill the GPU (those that come later find no work), and no more than there can be work items."""
    return min(tiles.capacity * heads, multiprocessors(device_index) * per_multiprocessor)


# --- metadata ------------------------------------------------------------------------------------------------------------------


def _sides(call: Call | GradCall) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(cu_seqlens, padded offsets) of queries and of keys."""
    cu, padded = call.cu_seqlens_q, call.cu_seqlens_q_padded
    queries = (cu, cu if padded is None else padded)
    cu, padded = call.cu_seqlens_kv, call.cu_seqlens_kv_padded
    return queries, queries if cu is None else (cu, cu if padded is None else padded)


def _sequences(call: Call | GradCall) -> int:
    return call.cu_seqlens_q.shape[0] - 1


def _mean_rows(x: Tensor, call: Call | GradCall) -> float:
    """Of a sequence on one side; there may be no sequence."""
    return x.shape[0] / max(_sequences(call), 1)


def _query_tiles(call: Call | GradCall, block: int, owned: str = "all", looks: bool = False) -> TileTable:
    shared, sequences = call.cu_seqlens_kv is None, _sequences(call)
    return TileTable(call.q.shape[0], call.k.shape[0], sequences, shared, call.bottom_right, block, owned, looks=looks)


def _key_tiles(call: Call | GradCall, block: int, owned: str = "all", looks: bool = False) -> TileTable:
    shared, sequences = call.cu_seqlens_kv is None, _sequences(call)
    rows, heads, _ = call.k.shape
    few = triton.cdiv(_FEW * multiprocessors(call.q.get_device()), heads) if call.causal else 0
    bottom_right = call.bottom_right and not shared
    return TileTable(rows, call.q.shape[0], sequences, shared, bottom_right, block, owned, few, looks)


def _window(call: Call | GradCall) -> tuple[int, int]:
    """(left, right) bounds of a query; clipped, so that nothing overflows where a position is added."""
    beyond = call.q.shape[0] + call.k.shape[0]
    return min(call.window_left, beyond), 0 if call.causal else min(call.window_right, beyond)


def _bounded(call: Call | GradCall) -> tuple[bool, bool]:
    return call.window_left >= 0, call.causal or call.window_right >= 0


# --- operands ------------------------------------------------------------------------------------------------------------------


def _operands(call: Call | GradCall) -> Operands:
    """q, k, v as kernels read them."""
    return _loadable(call.q), _loadable(call.k), _loadable(call.v)


def _grad_out(call: GradCall) -> Tensor:
    return _loadable(call.q.new_zeros(()).expand(call.out.shape) if call.grad_out is None else call.grad_out)


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
