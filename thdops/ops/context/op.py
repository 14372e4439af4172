"""Public functions and specs of the context-parallel row ops.

T rows, B sequences, W ranks (cp_size), n = T / W rows of a rank. P = cu_seqlens_padded: sequence b owns rows [P[b], P[b+1]); the
others, before P[0] and from P[B] on, belong to no sequence. T and every P are multiples of 2W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta_kernels import context as contract
from meta_kernels.contract import check_integers, check_kinds, check_tensors
from thdops.namespace import REGISTRY
from thdops.ops.context import reference, samples
from thdops.registry import OpSpec, register

# --- public functions: metadata ------------------------------------------------------------------------------------------------


def partition_indices(
    cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int, *, partition: str = "zigzag"
) -> Tensor:
    """The rows of the whole batch that a rank has, in the order in which it has them.

        mine = partition_indices(padded, 16, 2, 0)  # padded = [0, 8, 16]: rows 0 1 6 7, 8 9 14 15
        tokens, labels = tokens[mine], labels[mine]

    Each sequence is cut into 2W chunks of equal size. "zigzag": rank r has chunks r and 2W-1-r, so that causal attention is as much
    work for every rank. "contiguous": chunks 2r and 2r+1. Rows of no sequence, before P[0] and from P[B] on, are cut into W
    pieces, of which rank r has the r-th. So every row has exactly one owner, and a rank's rows are a packed batch again: rows
    before its first sequence, its pieces of the sequences, its tail. `local_cu_seqlens` says where they lie.

    Args:
        cu_seqlens_padded: int32 or int64 `[B+1]` offsets of the whole batch; `cu_seqlens` where sequences stand back to back.
        total_tokens: T, the rows of the whole batch; a multiple of 2 * cp_size.
        cp_size: W, how many ranks share the batch.
        cp_rank: which of them, from 0.
        partition: "zigzag" or "contiguous".

    Returns:
        int32 `[T / W]`. Every offset must be a multiple of 2 * cp_size, which is known on the device alone: where one is not, some
            rows have no owner or two (`packing.validate(..., pad_multiple=2 * cp_size)` tells, on the host). Whatever the offsets
            hold, every index is in `[0, T)`.

    Raises:
        ValueError, TypeError: wrong rank or dtype of an argument; `total_tokens` no such multiple; `cp_rank` outside `[0, W)`.
    """
    check_tensors("partition_indices", cu_seqlens_padded=cu_seqlens_padded)
    check_integers("partition_indices", total_tokens=total_tokens, cp_size=cp_size, cp_rank=cp_rank)
    check_kinds("partition_indices", str, partition=partition)
    return torch.ops.thdops.partition_indices(cu_seqlens_padded, total_tokens, cp_size, cp_rank, partition)


def local_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    cp_size: int,
    cp_rank: int,
    *,
    half: str | None = None,
    partition: str = "zigzag",
) -> tuple[Tensor, Tensor]:
    """(cu_seqlens, cu_seqlens_padded) of a rank's rows, or of one half of them, from those of the whole batch.

    A sequence of n valid rows and chunks of c rows gives a rank clamp(n - k c, 0, c) valid rows of its chunk k: exact counts,
    0 for a chunk that lies in the padding. Its second chunk has a valid row only if its first is full, so its valid rows are a
    prefix of its rows, as everywhere in thdops, and every op serves a rank unchanged.

    Args:
        cu_seqlens: int32 or int64 `[B+1]` of the whole batch; valid rows per sequence as prefix sums.
        cu_seqlens_padded: physical offsets, same shape and dtype; None where sequences stand back to back.
        cp_size: W, how many ranks share the batch.
        cp_rank: which of them, from 0.
        half: None for all rows of the rank, as `partition_indices` orders them; "first" or "second" for the rows that `half` takes
            of them.
        partition: "zigzag" or "contiguous".

    Returns:
        valid: `[B+1]` in the dtype of the input, from 0.
        padded: `[B+1]`, P / W, or P / 2W for a half: it starts above 0 where P does, behind the share of the rows before P[0].
            Offsets that are no multiples of 2W are rounded down.

    Raises:
        ValueError, TypeError: wrong rank, dtype or length of an argument; `cp_rank` outside `[0, W)`.
    """
    op = "local_cu_seqlens"
    check_tensors(op, ("cu_seqlens_padded",), cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    check_integers(op, cp_size=cp_size, cp_rank=cp_rank)
    check_kinds(op, str, partition=partition, **({} if half is None else {"half": half}))
    return torch.ops.thdops.local_cu_seqlens(cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, half, partition)


# --- public functions: rows ----------------------------------------------------------------------------------------------------


def to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, *, partition: str = "zigzag") -> Tensor:
    """The rows of all ranks one after the other: what a reduce-scatter takes, and an all-gather would have made.

    Rows `[r T/W, (r+1) T/W)` of the result are `x[partition_indices(cu_seqlens_padded, T, W, r)]`. Rows are moved bit for bit,
    padding included. The gradient is moved back, by `from_rank_order`.

    Args:
        x: `[T, ...]`, any strides, any dtype (fp8, integers and bool included), rows in the order of the batch.
        cu_seqlens_padded: int32 or int64 `[B+1]` offsets of the whole batch; `cu_seqlens` where sequences stand back to back.
        cp_size: W. T and every offset must be multiples of 2 * cp_size; where an offset is not, rows are lost and others appear
            twice, but nothing outside x is read.
        partition: "zigzag" or "contiguous", as in `partition_indices`.

    Returns:
        Contiguous, x's shape and dtype.

    Raises:
        ValueError, TypeError: wrong rank, dtype or device of an argument; T no multiple of 2 * cp_size.
    """
    _check_order("to_rank_order", x, cu_seqlens_padded, cp_size, partition)
    return torch.ops.thdops.to_rank_order(x, cu_seqlens_padded, cp_size, partition)


def from_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, *, partition: str = "zigzag") -> Tensor:
    """The inverse of `to_rank_order`: what an all-gather over the ranks gave, in the order of the batch. All else as there."""
    _check_order("from_rank_order", x, cu_seqlens_padded, cp_size, partition)
    return torch.ops.thdops.from_rank_order(x, cu_seqlens_padded, cp_size, partition)


def half(x: Tensor, cu_seqlens_padded: Tensor, which: str, *, dim: int = 0) -> Tensor:
    """The first or the second half of each sequence of a rank's rows: one of its two chunks. Rows of no sequence are halved too.

    The result is a packed batch whose offsets are `cu_seqlens_padded / 2`; `local_cu_seqlens(..., half=which)` gives its metadata.
    Rows are moved bit for bit, padding included. The gradient is moved back by `from_half`: +0.0 on the other half.

    Args:
        x: n rows along `dim`, n even; any strides, any dtype.
        cu_seqlens_padded: int32 or int64 `[B+1]` offsets of the rank's rows, all even (from `local_cu_seqlens`). Where one is odd,
            some rows are in neither half or in both, but nothing outside x is read.
        which: "first" or "second".
        dim: where the rows are: 0, or -1 for an LSE `[H, n]`.

    Returns:
        Contiguous, n / 2 rows along `dim`.

    Raises:
        ValueError, TypeError: wrong rank, dtype or device of an argument; an odd number of rows.
    """
    _check_half("half", x, cu_seqlens_padded, which, dim)
    return torch.ops.thdops.half(x, cu_seqlens_padded, which, dim)


def from_half(x: Tensor, cu_seqlens_padded: Tensor, which: str, *, dim: int = 0) -> Tensor:
    """The inverse of `half`: n rows along `dim`, those of the half from x, those of the other half +0.0.

    Args:
        x: n / 2 rows along `dim`, any strides, any dtype that has a zero.
        cu_seqlens_padded: offsets of the n rows, as for `half` (not those of the half).
        which: "first" or "second".
        dim: where the rows are.

    Returns:
        Contiguous, n rows along `dim`. Its gradient is `half` of the incoming one: what stands on the other half reaches nothing.

    Raises:
        ValueError, TypeError: wrong rank, dtype or device of an argument.
    """
    _check_half("from_half", x, cu_seqlens_padded, which, dim)
    return torch.ops.thdops.from_half(x, cu_seqlens_padded, which, dim)


def _check_order(op: str, x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str) -> None:
    check_tensors(op, x=x, cu_seqlens_padded=cu_seqlens_padded)
    check_integers(op, cp_size=cp_size)
    check_kinds(op, str, partition=partition)


def _check_half(op: str, x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int) -> None:
    check_tensors(op, x=x, cu_seqlens_padded=cu_seqlens_padded)
    check_integers(op, dim=dim)
    check_kinds(op, str, which=which)


# --- autograd ------------------------------------------------------------------------------------------------------------------


def _save_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cu_seqlens_padded, *ctx.how = inputs
    ctx.save_for_backward(cu_seqlens_padded)


def _backward_by(inverse: str) -> Any:
    """Each of these ops is the adjoint of another one, called with the same arguments."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return getattr(torch.ops.thdops, inverse)(grad, *ctx.saved_tensors, *ctx.how), None, None, None

    return backward


# --- specs ---------------------------------------------------------------------------------------------------------------------


def _spec(name: str, schema: str, summary: str, **rest: Any) -> None:
    pieces = {piece: getattr(contract, f"{piece}_{name}") for piece in ("check", "fake")}
    pieces |= {piece: getattr(samples, f"{name}_{piece}") for piece in ("samples", "refusals", "cost", "benches")}
    register(
        OpSpec(
            name=name,
            schema=schema,
            summary=summary,
            reference=getattr(reference, name),
            cuda=f"thdops.ops.context.kernels:{name}",
            **pieces,
            **rest,
        ),
        REGISTRY,
    )


def _spec_rows(name: str, arguments: str, summary: str, inverse: str) -> None:
    schema = f"(Tensor x, Tensor cu_seqlens_padded, {arguments}) -> Tensor"
    _spec(name, schema, summary, setup_context=_save_offsets, backward=_backward_by(inverse))


_spec(
    "partition_indices",
    '(Tensor cu_seqlens_padded, SymInt total_tokens, SymInt cp_size, SymInt cp_rank, str partition="zigzag") -> Tensor',
    "the rows of the batch that a context-parallel rank has",
)
_spec(
    "local_cu_seqlens",
    "(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt cp_size, SymInt cp_rank, str? half=None,"
    ' str partition="zigzag") -> (Tensor valid, Tensor padded)',
    "metadata of a rank's rows, or of half of them",
)
_spec_rows(
    "to_rank_order", 'SymInt cp_size, str partition="zigzag"', "rows of all ranks, one rank after the other", "from_rank_order"
)
_spec_rows(
    "from_rank_order", 'SymInt cp_size, str partition="zigzag"', "rows of all ranks in the order of the batch", "to_rank_order"
)
_spec_rows("half", "str which, int dim=0", "one half of every sequence of a rank", "from_half")
_spec_rows("from_half", "str which, int dim=0", "that half among zeros, where it came from", "half")
