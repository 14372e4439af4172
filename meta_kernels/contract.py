"""Rules that many ops share, and the one wording of an error: the op and argument, the rule, what arrived, what to do.

T rows, B sequences. Shapes may be symbolic: compare them, never cast them with `int()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums, losses and statistics of tensors of `dtype` are held in: fp32, or fp64 where they are fp64 (CPU)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refusal(op: str, argument: str, rule: str, got: object, fix: str, error: type[Exception] = ValueError) -> Exception:
    """The exception to raise: `refusal("zero_fill", "x", "have at least one dimension", "a scalar", "pass [T, ...]")`."""
    return error(f"{op}: {argument} must {rule}, got {got}; {fix}")


def shape_of(tensor: Tensor) -> str:
    """A tensor's shape as people write it: `[8, 4]`."""
    return f"[{', '.join(str(n) for n in tensor.shape)}]"


def dtype_of(tensor: Tensor) -> str:
    """A dtype's short name: `int32`."""
    return str(tensor.dtype).removeprefix("torch.")


def names_of(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes as an alternative: `int32 or int64`."""
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def kind_of(value: object) -> str:
    """What arrived, as people say it: `None`, `a list`, `an int`."""
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def check_tensors(op: str, optional: Sequence[str] = (), **arguments: object) -> None:
    """Every argument is a tensor; those named `optional` may be None. For public functions: the dispatcher's own refusal of a list
    prints a schema and does not say what to do."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor) and not (value is None and name in optional):
            fix = "pass torch.as_tensor(...) on the device of the others"
            raise refusal(op, name, "be a tensor", kind_of(value), fix, TypeError)


def check_static(op: str, **numbers: object) -> None:
    """Each is a Python number, or None. The dispatcher would read a tensor on the host, which syncs and cannot be captured; of
    anything else its refusal would not say what to do. For public functions."""
    for name, value in numbers.items():
        if isinstance(value, Tensor):
            raise refusal(op, name, "be a Python number", "a tensor", "pass a static value", TypeError)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat))):
            raise refusal(op, name, "be a Python number", kind_of(value), "pass int(...) or float(...)", TypeError)


def check_integers(op: str, optional: Sequence[str] = (), **numbers: object) -> None:
    """Each is an int; those named `optional` may be None. For public functions."""
    for name, value in numbers.items():
        whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
        if not whole and not (value is None and name in optional):
            check_static(op, **{name: value})
            raise refusal(op, name, "be an int", kind_of(value), "pass int(...)", TypeError)


def check_kinds(op: str, kind: type, **values: object) -> None:
    """Each is a `kind`: str, bool or torch.dtype. For public functions, as `check_static`."""
    name_of = {str: "a string", bool: "a bool", torch.dtype: "a torch.dtype"}
    for name, value in values.items():
        if not isinstance(value, kind):
            raise refusal(op, name, f"be {name_of[kind]}", kind_of(value), "see the function's arguments", TypeError)


def split_count(op: str, argument: str, value: int | Tensor) -> tuple[int | None, Tensor | None]:
    """A token count as the two arguments of a schema, one of them None. For public functions."""
    if isinstance(value, Tensor):
        return None, value
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value, None
    fix = "pass int(...), or the device tensor"
    raise refusal(op, argument, "be an int or a one-element tensor", type(value).__name__, fix, TypeError)


def split_scale(op: str, argument: str, value: float | Tensor) -> tuple[float | None, Tensor | None]:
    """A coefficient as the two arguments of a schema, one of them None. For public functions."""
    if isinstance(value, Tensor):
        return None, value
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        return float(value), None
    fix = "pass float(...), or the device tensor"
    raise refusal(op, argument, "be a float or a one-element fp32 tensor", type(value).__name__, fix, TypeError)


def check_dtype(op: str, argument: str, tensor: Tensor, dtypes: Sequence[torch.dtype], fix: str = "cast it") -> None:
    """`tensor` has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise refusal(op, argument, f"be {names_of(dtypes)}", dtype_of(tensor), fix, TypeError)


def check_float(op: str, argument: str, tensor: Tensor) -> None:
    """fp32, bf16 or fp16; fp64 on CPU, where the reference serves it."""
    if tensor.dtype in FLOAT_DTYPES or (tensor.dtype == torch.float64 and tensor.device.type == "cpu"):
        return
    fix = "fp64 is served on CPU only, cast it to float32" if tensor.dtype == torch.float64 else "cast it"
    raise refusal(op, argument, f"be {names_of(FLOAT_DTYPES)}", f"{dtype_of(tensor)} on {tensor.device.type}", fix, TypeError)


def check_dtype_and_device(
    op: str, argument: str, tensor: Tensor, dtypes: Sequence[torch.dtype], device: torch.device, owner: str
) -> None:
    """`tensor` has one of `dtypes`, or fp64 on CPU (the reference's own precision), and stands on `device`, which is `owner`'s."""
    if tensor.dtype not in dtypes and (tensor.dtype != torch.float64 or device.type != "cpu"):
        check_dtype(op, argument, tensor, dtypes)
    check_device(op, argument, tensor, device, owner)


def check_rank(op: str, argument: str, tensor: Tensor, rank: int, layout: str) -> None:
    """`tensor` has `rank` dimensions; `layout` names them, such as `[T]`."""
    if tensor.dim() != rank:
        raise refusal(op, argument, f"have {rank} dimension{'s' * (rank != 1)} {layout}", f"shape {shape_of(tensor)}", "reshape it")


def check_device(op: str, argument: str, tensor: Tensor, device: torch.device, owner: str) -> None:
    """`tensor` stands on the device of `owner`."""
    if tensor.device != device:
        raise refusal(op, argument, f"be on the device of {owner} ({device})", str(tensor.device), "move it")


def check_cu_seqlens(
    op: str,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    device: torch.device | None = None,
    owner: str = "",
    argument: str = "cu_seqlens",
) -> None:
    """Both are int32 or int64, 1-D, at least one entry, of equal length and dtype, on one device (that of `owner`, if given)."""
    for name, tensor in ((argument, cu_seqlens), (f"{argument}_padded", cu_seqlens_padded)):
        if tensor is None:
            continue
        check_dtype(op, name, tensor, INDEX_DTYPES, "cast it, for example with .to(torch.int32)")
        if tensor.dim() != 1 or tensor.shape[0] == 0:
            raise refusal(op, name, "be 1-D [B+1] with at least one entry", f"shape {shape_of(tensor)}", "pass B+1 offsets")
        if tensor.stride(0) != 1 and tensor.shape[0] > 1:
            raise refusal(op, name, "be contiguous", f"stride {tensor.stride(0)}", "call .contiguous()")
        if device is not None:
            check_device(op, name, tensor, device, owner)
    if cu_seqlens_padded is None:
        return
    padded = f"{argument}_padded"
    if cu_seqlens_padded.shape[0] != cu_seqlens.shape[0]:
        raise refusal(
            op,
            padded,
            f"have as many entries as {argument} ({cu_seqlens.shape[0]})",
            cu_seqlens_padded.shape[0],
            "pass B+1 offsets in both",
        )
    if cu_seqlens_padded.dtype != cu_seqlens.dtype:
        raise refusal(
            op,
            padded,
            f"have the dtype of {argument} ({dtype_of(cu_seqlens)})",
            dtype_of(cu_seqlens_padded),
            "cast one of them",
            TypeError,
        )
    check_device(op, padded, cu_seqlens_padded, cu_seqlens.device, argument)


def check_mask(op: str, mask: Tensor, device: torch.device, owner: str) -> None:
    """`mask`, the argument `padding_mask`, is bool and stands on the device of `owner`."""
    if mask.dtype != torch.bool:
        raise refusal(op, "padding_mask", "be bool, True on padding rows", dtype_of(mask), "cast it with .bool()", TypeError)
    check_device(op, "padding_mask", mask, device, owner)


def check_one_element(op: str, argument: str, tensor: Tensor) -> None:
    """`tensor` is a number: 0-d, or of one element."""
    if tensor.numel() != 1:
        raise refusal(op, argument, "have one element", f"shape {shape_of(tensor)}", "pass a 0-d tensor")


def check_either(op: str, argument: str, value: object, tensor: Tensor | None, kind: str) -> None:
    """Of a number and a tensor that stand for one argument, exactly one is given."""
    if (value is None) == (tensor is None):
        got = "neither" if value is None else "both"
        rule = f"be given either as {argument} ({kind}) or as {argument}_tensor"
        raise refusal(op, argument, rule, got, "pass exactly one and None for the other")


def check_choice(op: str, argument: str, value: str, known: Sequence[str]) -> None:
    """`value` is one of `known`."""
    if value not in known:
        raise refusal(op, argument, f"be one of {', '.join(known)}", repr(value), "choose one")


def check_count(op: str, argument: str, value: int, least: int) -> None:
    """A size given as a Python int (or a symbolic one) is at least `least`."""
    if value < least:
        raise refusal(op, argument, f"be at least {least}", value, "pass a larger one")


def contiguous(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What every launcher allocates: contiguous, whatever the strides of the inputs (`empty_like` would copy a permutation)."""
    return torch.empty(shape, dtype=dtype, device=device)


def takes(record: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Let a function of one record be called with the record's fields, which is how the schema's arguments arrive."""
    defaults = record._field_defaults
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults.get(name, inspect.Parameter.empty))
        for name in record._fields
    ]

    def decorate(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def spread(*fields: Any) -> Any:
            return function(record(*fields))

        spread.__name__, spread.__doc__ = function.__name__, function.__doc__
        spread.__signature__ = inspect.Signature(parameters)
        return spread

    return decorate
