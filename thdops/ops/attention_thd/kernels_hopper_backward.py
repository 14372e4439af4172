"""The backward of packed attention on Hopper: TMA copies, mbarriers and asynchronous wgmma, in Gluon.

T rows, H heads, D head dim, G = Hq / Hkv query heads of a key head; blocks are BLOCK_Q queries and BLOCK_K keys.

    S = Q K^T    P = exp(scale S - LSE)    dP = dO V^T    dS = P (dP - delta)
    dV = P^T dO    dK = scale dS^T Q    dQ = scale dS K

`keys_kernel` owns tiles of keys, walks over the queries that see them and makes dK and dV. dQ comes in one of two ways:
- `queries_kernel` owns tiles of queries and walks over the keys they see. Everything is summed in registers in a fixed order, so
  results repeat bitwise; S and dP are computed twice, seven products in all.
- With REDUCE, `keys_kernel` adds its share of dQ to an fp32 buffer (TMA reduction), in any order or in a fixed one
  (`kernels_hopper_shares.py`): five products, and the buffer has to be zeroed or begun, and converted after.

One warp copies; PARTS consumers multiply, each for ROWS rows of the tile. A tile's rows are the rows of every product, so that P
and dS leave the tensor cores in the registers in which they return as left operands. A single consumer lets the last product of a
block run on while the loop turns (RUNS_ON); two consumers fill each other's gaps instead, for ptxas serialises every product of a
kernel in which another than the first partition carries one around a loop. Head dims are split into chunks of a power of two.

Measured on an H200 with Triton 3.6 (bf16, causal, 8 x 4096 rows, ms for keys / queries; see the plans for what is used):
- D 128, 32/8 heads: one consumer 3.53 / 3.36, its products not running on 3.62 / 3.04 (128 keys a block), two consumers 3.83 /
  2.57, two grids of one warpgroup on a multiprocessor - / 2.45. dQ by reduction: 5.22 with dK and dV, and 0.42 around it.
- D 64, 16/16: one consumer 1.43 / 1.04, two 1.13 / 0.78, three grids of one warpgroup 1.78 / 1.30. All of a backward by reduction
  1.75 ms (two consumers, 64 queries a block in three stages; in two 1.85; one consumer 2.08), by two kernels 1.90.
- 192/128, 16/16: one consumer 2.73 / 1.93, two 2.83 / 1.54; 32 queries a block, as 64 leave no registers for dK.
Since then tiles leave by TMA, items come with what their tile is, LSE is loaded early, and slots are released without a meeting
(`kernels_hopper_slots.py`): 192/128 2.13 / 1.41 (2.33 / 1.47 before tiles left by TMA), D 64 1.00 / 0.76, D 128 with 128 x 256 rows
0.40 / 0.32 (before all that 0.49 / 0.41); queries 0.37 where they make delta, too, which took 0.15 by itself.
- dS of hidden pairs: ptxas turns a branch around a selection into a selection in every block, three instructions an element; a
  branch that makes the mask again stays one. It takes D 64 from 0.80 to 0.77 for queries and all of its backward by reduction from
  1.87 to 1.82; D 128 is slower with it, as are short sequences (128 x 256, keys 0.51 instead of 0.47) and narrow windows (D 64,
  64/8 heads, window 128: 0.58 / 0.70 instead of 0.50 / 0.60; in blocks of 128 rows 1.21 / 0.88).
- S of the next block before dP of this one, with two consumers: D 64 0.89 instead of 0.80 for queries; 192/128 spills.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thdops.ops.attention_thd.kernels_hopper_common import ELEMENT, Boxes, addressable, box_of, key_order, query_order
from thdops.ops.attention_thd.kernels_hopper_keys import keys_kernel
from thdops.ops.attention_thd.kernels_hopper_queries import queries_kernel
from thdops.ops.attention_thd.kernels_tiles import SHORT, capacity, narrow
from thdops.ops.launch import Launch, multiprocessors
from thdops.ops.plans import meta


class _Plan(NamedTuple):
    """Measured on an H200. Rows of a tile and consumers that share it, rows of a block and how many are on their way, warps of the
    first consumer, grids per multiprocessor and, where more than one, registers of a thread.
    """

    rows: int
    parts: int
    block: int
    stages: int
    warps: int
    per_sm: int = 1
    registers: int | None = None
    branches: bool = True  # dS of hidden pairs is zeroed in blocks that have some; else by a selection in every block


def _plans(long: _Plan, short: _Plan | None = None) -> tuple[_Plan, _Plan]:
    """For long sequences, and for short ones or narrow windows, where most blocks have hidden pairs and branches do not pay."""
    return long, (short or long)._replace(branches=False)


_KEYS = {
    (64, 64): _plans(_Plan(128, 2, 64, 3, 4)),
    (96, 96): _plans(_Plan(128, 1, 64, 2, 8)),
    (128, 128): _plans(_Plan(128, 1, 64, 2, 8, branches=False)),
    (192, 128): _plans(_Plan(128, 1, 32, 3, 8)),
}
_QUERIES = {
    (64, 64): _plans(_Plan(128, 2, 128, 2, 4), _Plan(128, 2, 64, 3, 4)),
    (96, 96): _plans(_Plan(128, 2, 64, 2, 4)),
    (128, 128): _plans(_Plan(64, 1, 64, 2, 4, 2, 128, branches=False)),
    (192, 128): _plans(_Plan(128, 2, 64, 2, 4)),
}
# With the reduction, where that was the faster way to dQ: tiles as above. By a single consumer in a fixed order, by two in any.
_REDUCED = {
    (64, 64): _Plan(128, 2, 64, 3, 4),
    (128, 128): _Plan(128, 1, 64, 2, 8, branches=False),
}
# Where there are registers for it (96/96: not timed).
_MAKING_DELTA = {(64, 64), (96, 96), (128, 128)}


def _short(mean: float, left: int, right: int) -> bool:
    """Which of `_plans`."""
    return mean < SHORT or narrow(left, right)


def serves(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> bool:
    """Whether `Keys` and `Queries` take these: a tuned pair of head dims, 16 bits, rows that TMA can address, something to do."""
    return (q.shape[2], v.shape[2]) in _KEYS and q.dtype in ELEMENT and all(map(addressable, (q, k, v, do)))


def tile_rows(d_qk: int, d_v: int) -> tuple[int, int]:
    """Rows of a query tile and of a key tile: what the tile tables are made with."""
    return _QUERIES[d_qk, d_v][0].rows, _KEYS[d_qk, d_v][0].rows


def reduces(d_qk: int, d_v: int, deterministic: bool) -> bool:
    """Whether `Keys` had better be given the fp32 sums for dQ, and adds to them in a fixed order if so asked."""
    plan = _REDUCED.get((d_qk, d_v))
    return plan is not None and (plan.parts == 1 or not deterministic)


def begins_sums(d_qk: int, d_v: int) -> bool:
    """Whether `Keys` may begin sums by storing the first shares of blocks: it adds in order, and they are tiles of queries."""
    plan = _REDUCED.get((d_qk, d_v))
    return plan is not None and plan.parts == 1 and plan.block == tile_rows(d_qk, d_v)[0]


def makes_delta(d_qk: int, out: Tensor) -> bool:
    """Whether `Queries` had better be given the forward's `out`, to make delta of it."""
    return (d_qk, out.shape[2]) in _MAKING_DELTA and addressable(out)


class Keys:
    """dk and dv [Tk, Hkv, D], planned for tensors that `serves` takes; zeros on padding rows.

    sequences: how many; the order of work follows, and room for counts. left, right: rows of the window on either side of the
    diagonal, -1 for all of them. adds: gradients are added to what stands in the rows of tiles, fp32. reduces: there will be
    `sums`. begins: in whole blocks but the first of a sequence, a first share is stored over what they hold.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, sequences: int, left: int, right: int, scale: float, adds: bool,
        reduces: bool, begins: bool,
    ) -> None:  # fmt: skip
        shape = (q.shape[2], v.shape[2])
        mean = q.shape[0] / max(sequences, 1)
        plan = _REDUCED[shape] if reduces else _KEYS[shape][_short(mean, left, right)]
        self._operands = _Operands(q, k, v, do, plan.block, plan.rows // plan.parts)
        rows = plan.rows // plan.parts
        self._dk, self._dv = (_Chunks(meta(*x.shape, dtype=x.dtype), rows) for x in (k, v))
        self._sums = box_of(meta(*q.shape, dtype=torch.float32), plan.block, q.shape[2])
        tuned = plan.parts, plan.stages, plan.branches
        constexprs = (*shape, int(left >= 0), int(right >= 0), *tuned, int(reduces), int(adds))
        turns_a_head = capacity(q.shape[0], sequences, plan.block)  # counts for adding in order: one of each block of queries
        self._turns = (q.shape[1], turns_a_head) if reduces and plan.parts == 1 else None
        numbers = (turns_a_head, int(begins), *key_order(q, k, v, mean), left, right, scale)
        self._launch = _launch(keys_kernel, plan, q, numbers, constexprs)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
        tiles: Tensor, counts: Tensor, sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """lse and delta = rowsum(dO * O) - dLSE: fp32 [Hq, Tq], contiguous. Tiles of `tile_rows` rows each, the work counter zero.
        sums: fp32 [Tq, Hq, Dqk], to which dq / scale is added on the way to dk and dv.
        """
        descs = self._operands(q, k, v, do)
        added = descs[0] if sums is None else Boxes(sums, *self._sums)
        turns = None if self._turns is None else torch.zeros(self._turns, dtype=torch.int32, device=q.device)
        out = [*self._dk(dk), *self._dv(dv)] if dk.dtype == k.dtype else descs[2:6]  # TMA stores no fp32: any
        self._launch(*descs, *out, added, turns, *self._operands.columns, lse, delta, dk, dv, q.shape[0], tiles, counts)


class Queries:
    """dq [Tq, Hq, D]: as `Keys`. mean: rows of k that a sequence has on the average; only the order of work follows from it."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mean: float, left: int, right: int, scale: float, adds: bool,
        out: Tensor, grad_lse: Tensor | None,
    ) -> None:  # fmt: skip
        shape = (q.shape[2], v.shape[2])
        plan = _QUERIES[shape][_short(mean, left, right)]
        self._operands = _Operands(q, k, v, do, plan.rows // plan.parts, plan.block)
        self._dq = _Chunks(meta(*q.shape, dtype=q.dtype), plan.rows // plan.parts)
        self._strides = out.stride()[:2], (0, 0) if grad_lse is None else grad_lse.stride()
        constexprs = (*shape, int(left >= 0), int(right >= 0), plan.parts, plan.stages, plan.branches, int(adds))
        self._launch = _launch(queries_kernel, plan, q, (*query_order(q, k, v, mean), left, right, scale), constexprs)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, tiles: Tensor, counts: Tensor,
        out: Tensor | None = None, grad_lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        """As there; with `out`, for which `makes_delta`, delta is written on the way, and tiles have to be of all rows."""
        descs = self._operands(q, k, v, do)
        to = self._dq(dq) if dq.dtype == q.dtype else descs[:2]  # any, as above
        of_out, of_grad_lse = self._strides
        self._launch(
            *descs, *to, *self._operands.columns, lse, delta, dq, q.shape[0], tiles, counts,
            out, *of_out, grad_lse, *of_grad_lse,
        )  # fmt: skip


def _launch(kernel: Any, plan: _Plan, q: Tensor, numbers: tuple[Any, ...], constexprs: tuple[Any, ...]) -> Launch:
    grid = (multiprocessors(q.get_device()) * plan.per_sm, 1, 1)
    return Launch(kernel, grid, numbers, constexprs, plan.warps, plan.registers)


class _Operands:
    """Descriptors of the chunks of q, k, v, do; `columns` between heads."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, q_rows: int, k_rows: int) -> None:
        self.columns = (q.stride(1), k.stride(1), v.stride(1), do.stride(1))
        self._chunks = [_Chunks(x, rows) for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows), (do, q_rows))]

    def __call__(self, *operands: Tensor) -> list[Any]:
        return [desc for x, chunks in zip(operands, self._chunks, strict=True) for desc in chunks(x)]


class _Chunks:
    """Descriptors of a tensor in two chunks of the head dim, the second None where one will do, in boxes of so many rows."""

    def __init__(self, x: Tensor, rows: int) -> None:
        chunks = {192: (128, 64), 96: (64, 32)}.get(x.shape[2], (x.shape[2],))
        self._boxes = [box_of(x, rows, columns) for columns in chunks] + [None] * (2 - len(chunks))

    def __call__(self, x: Tensor) -> list[Any]:
        return [box and Boxes(x, *box) for box in self._boxes]
