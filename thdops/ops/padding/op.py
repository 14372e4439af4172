"""Public functions and specs of the padding ops.

T rows, B sequences. C = cu_seqlens, P = cu_seqlens_padded (C where that is None): sequence b owns rows [P[b], P[b+1]), its valid
rows are the first C[b+1]-C[b] of them, every other row is padding (gaps, the tail from P[B] on, rows before P[0]).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meta_kernels import padding as contract
from meta_kernels.contract import check_tensors, refusal
from thdops.namespace import REGISTRY
from thdops.ops.padding import reference, samples, samples_zero_fill
from thdops.registry import OpSpec, register

_KERNELS = "thdops.ops.padding.kernels"
_PADDED = ("cu_seqlens_padded",)


# --- public functions -----------------------------------------------------------------------------


def zero_fill(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Tensor:
    """A copy of `x` whose padding rows are +0.0, whatever stood there (NaN and Inf included).

    Args:
        x: `[T, ...]`, any strides, any dtype that has a zero (fp8 e4m3/e5m2, integers and bool included).
        cu_seqlens: int32 or int64 `[B+1]` on x's device; valid rows per sequence as prefix sums.
        cu_seqlens_padded: physical offsets, same shape and dtype; None where sequences stand back to back.

    Returns:
        Contiguous, x's shape and dtype; zero on padding rows. Its gradient is zero-filled likewise.

    Raises:
        ValueError, TypeError: wrong rank, dtype, device or length of an argument.
    """
    check_tensors("zero_fill", _PADDED, x=x, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    return torch.ops.thdops.zero_fill(x, cu_seqlens, cu_seqlens_padded)


def zero_fill_(
    tensors: Tensor | Sequence[Tensor],
    cu_seqlens: Tensor | Sequence[Tensor],
    cu_seqlens_padded: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """Write +0.0 to the padding rows of one tensor or several, in place.

    On CUDA up to eight tensors (fewer where a row has more than two strides) are one launch, which reads nothing of them and
    writes padding rows only. The CPU reference writes valid rows too, with what they hold.

    Args:
        tensors: `[T_i, ...]` each, of different row counts, widths, dtypes and strides, slices of one buffer included.
            Must not require grad in grad mode.
        cu_seqlens: int32 or int64 `[B+1]`: one for all tensors, or one per tensor (dQ has the query's, dK and dV the key's).
        cu_seqlens_padded: physical offsets, in the same form as `cu_seqlens`; None where sequences stand back to back.

    Raises:
        ValueError, TypeError: wrong rank, dtype, device or count of an argument; a tensor that requires grad in grad mode.
    """
    padded = [] if cu_seqlens_padded is None else _listed("cu_seqlens_padded", cu_seqlens_padded)
    torch.ops.thdops.zero_fill_(_listed("tensors", tensors), _listed("cu_seqlens", cu_seqlens), padded)


def _listed(argument: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    listed = list(tensors) if isinstance(tensors, (list, tuple)) else []
    if (not listed and not isinstance(tensors, (list, tuple))) or not all(isinstance(x, Tensor) for x in listed):
        got = f"a {type(tensors).__name__}" + (" of other things" if listed else "")
        raise refusal("zero_fill_", argument, "be a tensor or a list of tensors", got, "pass torch.as_tensor(...)", TypeError)
    return listed


class _ZeroFillGrad(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Saved, not kept as an attribute: metadata overwritten before the backward must raise, not zero other rows.
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return torch.ops.thdops.zero_fill(grad, *ctx.saved_tensors), None, None


def zero_fill_grad(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Tensor:
    """`x` itself, no copy; the gradient that comes back through it is +0.0 on padding rows.

    Put it around an attention that is not ours, on q, k and v, so that garbage in its gradients stops there. Arguments and errors
    as `zero_fill`.
    """
    check_tensors("zero_fill_grad", _PADDED, x=x, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    contract.check_zero_fill(x, cu_seqlens, cu_seqlens_padded)
    return _ZeroFillGrad.apply(x, cu_seqlens, cu_seqlens_padded)


def padding_mask(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    """bool `[T]`, True on padding rows: gaps, tail, and rows before the first sequence. T = `total_tokens`.

    Raises:
        ValueError, TypeError: wrong rank, dtype or length of an argument; `total_tokens` below 0.
    """
    check_tensors("padding_mask", _PADDED, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    _static("padding_mask", total_tokens=total_tokens)
    return torch.ops.thdops.padding_mask(cu_seqlens, cu_seqlens_padded, total_tokens)


def sequence_ids(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    """int32 `[T]`: the sequence of each valid row, from 0; -1 on padding rows. Errors as `padding_mask`."""
    check_tensors("sequence_ids", _PADDED, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    _static("sequence_ids", total_tokens=total_tokens)
    return torch.ops.thdops.sequence_ids(cu_seqlens, cu_seqlens_padded, total_tokens)


def positions(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, *, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    """int32 `[T]`: the position of each valid row in its sequence, from 0 (for RoPE); 0 on padding rows.

    With context parallelism, `cu_seqlens` and `cu_seqlens_padded` are the whole batch's, `total_tokens` counts this rank's rows,
    and the result is the position in the whole sequence of each of them (zigzag partition: rank r of W holds chunks r and
    2W-1-r of every sequence's 2W; padded lengths must be multiples of 2W, which only the host could check). Errors as
    `padding_mask`, and `cp_rank` outside `[0, cp_size)`.
    """
    check_tensors("positions", _PADDED, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    _static("positions", total_tokens=total_tokens, cp_size=cp_size, cp_rank=cp_rank)
    return torch.ops.thdops.positions(cu_seqlens, cu_seqlens_padded, total_tokens, cp_size, cp_rank)


def compact_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> tuple[Tensor, Tensor]:
    """A permutation of the rows that puts valid rows first, and its inverse: (index, inverse), int32 `[T]` each.

    `x.index_select(0, index)` has the valid rows in front, in order and without gaps (what a kernel that knows one cu_seqlens
    wants: give it `cu_seqlens - cu_seqlens[0]`), then the padding rows, in order. `index_select(0, inverse)` puts them back.
    Static size, so no sync. Errors as `padding_mask`.
    """
    check_tensors("compact_rows", _PADDED, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    _static("compact_rows", total_tokens=total_tokens)
    return torch.ops.thdops.compact_rows(cu_seqlens, cu_seqlens_padded, total_tokens)


def cu_seqlens_from_positions(position_ids: Tensor, max_seqs: int) -> Tensor:
    """int32 `[max_seqs+1]`: cu_seqlens of a packed batch that is described by position ids alone.

    A sequence starts at row 0 and wherever a position does not continue its predecessor's by one. Rows of negative position are
    tail padding: they belong to no sequence and must stand behind all others. Entries past the last sequence repeat the end.
    More sequences than `max_seqs` cannot raise without a host sync: every entry is then -1, so that all rows count as padding
    and `packing.validate` names the cause; nothing is cut off silently.

    Raises:
        ValueError, TypeError: `position_ids` not int32/int64 `[T]`; `max_seqs` below 1.
    """
    check_tensors("cu_seqlens_from_positions", position_ids=position_ids)
    _static("cu_seqlens_from_positions", max_seqs=max_seqs)
    return torch.ops.thdops.cu_seqlens_from_positions(position_ids, max_seqs)


def cu_seqlens_from_lengths(lengths: Tensor, max_seqs: int) -> Tensor:
    """int32 `[max_seqs+1]`: prefix sums of `lengths` (int32/int64 `[n]`, n <= max_seqs), the end repeated. Negative counts as 0.

    The sum must stay below 2**31, as every row number does.

    Raises:
        ValueError, TypeError: `lengths` not int32/int64 1-D, or longer than `max_seqs`.
    """
    check_tensors("cu_seqlens_from_lengths", lengths=lengths)
    _static("cu_seqlens_from_lengths", max_seqs=max_seqs)
    return torch.ops.thdops.cu_seqlens_from_lengths(lengths, max_seqs)


def slice_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, start: int, length: int) -> tuple[Tensor, Tensor]:
    """(cu_seqlens, cu_seqlens_padded) of rows `[start, start + length)`, in the slice's own row numbers, same shape and dtype.

    For sequence parallelism, which cuts documents: a sequence's valid rows stay a prefix of its piece, a sequence without a row
    in the slice becomes empty. Errors as `padding_mask`; `start` or `length` below 0.
    """
    check_tensors("slice_cu_seqlens", _PADDED, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    _static("slice_cu_seqlens", start=start, length=length)
    return torch.ops.thdops.slice_cu_seqlens(cu_seqlens, cu_seqlens_padded, start, length)


def _static(op: str, **sizes: Any) -> None:
    """Refuse a size given as a tensor: the dispatcher would read it on the host, which syncs and cannot be captured."""
    for argument, value in sizes.items():
        if isinstance(value, Tensor):
            raise refusal(op, argument, "be a Python integer", "a tensor", "pass the static size, a capacity", TypeError)


# --- autograd -------------------------------------------------------------------------------------


def _save_metadata(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cu_seqlens, cu_seqlens_padded = inputs
    ctx.save_for_backward(cu_seqlens, cu_seqlens_padded)


def _zero_fill_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.thdops.zero_fill(grad, *ctx.saved_tensors), None, None


# --- specs ----------------------------------------------------------------------------------------

_ROW_MAP = "(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt total_tokens"


def _spec(name: str, schema: str, summary: str, cases: ModuleType = samples, **rest: Any) -> None:
    pieces = {
        "check": getattr(contract, f"check_{name}"),
        "fake": getattr(contract, f"fake_{name}"),
        "reference": getattr(reference, name),
        "cuda": f"{_KERNELS}:{name}",
        "samples": getattr(cases, f"{name}_samples"),
        "refusals": getattr(cases, f"{name}_refusals"),
        "cost": getattr(cases, f"{name}_cost"),
        "benches": getattr(cases, f"{name}_benches"),
        "padding": getattr(cases, f"{name}_padding", None),
    }
    register(OpSpec(name=name, schema=schema, summary=summary, **{**pieces, **rest}), REGISTRY)


_spec(
    "zero_fill",
    "(Tensor x, Tensor cu_seqlens, Tensor? cu_seqlens_padded=None) -> Tensor",
    "a copy with padding rows exactly zero",
    samples_zero_fill,
    setup_context=_save_metadata,
    backward=_zero_fill_backward,
    pads_zeroed=True,
    cuda=f"{_KERNELS}_zero_fill:zero_fill",
    launcher_checks=True,
)
_spec(
    "zero_fill_",
    "(Tensor(a!)[] tensors, Tensor[] cu_seqlens, Tensor[] cu_seqlens_padded) -> ()",
    "padding rows of several tensors zeroed in place, one launch",
    samples_zero_fill,
    mutates=("tensors",),
    pads_zeroed=True,
    cuda=f"{_KERNELS}_zero_fill:zero_fill_",
    launcher_checks=True,
)
_spec("padding_mask", f"{_ROW_MAP}) -> Tensor", "True on padding rows", pads_zeroed=True)
_spec("sequence_ids", f"{_ROW_MAP}) -> Tensor", "the sequence of each row, -1 on padding", pads_zeroed=True)
_spec(
    "positions",
    f"{_ROW_MAP}, SymInt cp_size=1, SymInt cp_rank=0) -> Tensor",
    "the position of each row in its sequence, 0 on padding",
    pads_zeroed=True,
)
_spec("compact_rows", f"{_ROW_MAP}) -> (Tensor, Tensor)", "permutation that puts valid rows first, and its inverse")
_spec(
    "cu_seqlens_from_positions",
    "(Tensor position_ids, SymInt max_seqs) -> Tensor",
    "fixed-size cu_seqlens from position ids",
)
_spec("cu_seqlens_from_lengths", "(Tensor lengths, SymInt max_seqs) -> Tensor", "fixed-size cu_seqlens from lengths")
_spec(
    "slice_cu_seqlens",
    "(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt start, SymInt length) -> (Tensor, Tensor)",
    "metadata of a contiguous row slice",
)
