"""Sample calls of router and router_grad, and where padding stands in them.

T rows (tokens), E experts, K top-k, B sequences. Logits as in samples.py: keys that differ stay apart in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.router import RouterCall, RouterGradCall
from thdops.ops.layouts import Layout, layout
from thdops.ops.padding.reference import padding_mask
from thdops.ops.padding.samples import metadata_replays
from thdops.ops.router import reference
from thdops.ops.router.samples import (
    NAN,
    bias_of,
    choice,
    chosen_mask,
    logits_of,
    mask_of,
    nowhere,
    odd_logits,
    padding_of_choice,
    tied_logits,
)
from thdops.registry import Padding, PadRows, Sample

_OTHERS: dict[str, Any] = {
    "expert_bias": None,
    "padding_mask": None,
    "cu_seqlens": None,
    "cu_seqlens_padded": None,
    "total_num_tokens_tensor": None,
    "aux_coeff_tensor": None,
    "z_coeff_tensor": None,
    "aux_score_function": "softmax",
    "reduction": "mean",
    "total_num_tokens": None,
    "aux_coeff": None,
    "z_coeff": None,
}


def _call(logits: Tensor, topk: int = 2, **changed: Any) -> tuple[Any, ...]:
    others = _OTHERS | {name: value for name, value in changed.items() if name in _OTHERS}
    settings = choice(topk, **{name: value for name, value in changed.items() if name not in _OTHERS})
    return tuple(RouterCall(logits=logits, **others, **settings))


def _one(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _packed(base: Layout) -> dict[str, Tensor | None]:
    return {"cu_seqlens": base.cu_seqlens, "cu_seqlens_padded": base.padded}


def router_samples(device: torch.device) -> Iterator[Sample]:
    bias, many = bias_of(12, device), mask_of(16, device)
    losses: dict[str, Any] = {"aux_coeff": 0.5, "z_coeff": 0.25}
    in_order: dict[str, Any] = {"probs_format": "topk", "routing_format": "indices"}
    yield Sample(
        "softmax, mask",
        _call(logits_of(16, 8, device), padding_mask=many, **losses),
        (
            {"padding_mask": ~many, "logits": logits_of(16, 8, device, seed=4)},
            {"padding_mask": torch.ones_like(many)},
            {"padding_mask": torch.zeros_like(many)},
        ),
        compile=True,
    )
    yield Sample("softmax, mask, other sizes", _call(logits_of(24, 40, device), 3, padding_mask=mask_of(24, device), **losses))
    gaps = layout("gaps and tail", device)
    coefficients = {"aux_coeff_tensor": _one(0.5, device), "z_coeff_tensor": _one(0.25, device)}
    none, some = {name: _one(0.0, device) for name in coefficients}, {name: _one(2.0, device) for name in coefficients}
    yield Sample(
        "sigmoid, bias, sequences and a mask, coefficients on the device",
        _call(
            logits_of(25, 12, device),
            3,
            score_function="sigmoid",
            aux_score_function="sigmoid",
            expert_bias=bias,
            padding_mask=mask_of(25, device),
            **coefficients,
            **_packed(gaps),
            **in_order,
        ),
        (
            {"padding_mask": nowhere(25, device), "expert_bias": -bias, **none},
            *({**contents, **some} for contents in metadata_replays(gaps)),
        ),
        compile=True,
    )
    for name, dtype, reduction in (
        ("empty sequences", torch.int64, "mean"),
        ("tail", torch.int32, "sum"),
        ("rows before the first", torch.int32, "mean"),
        ("no valid row", torch.int32, "mean"),
        ("sentinels", torch.int64, "sum"),
        ("no sequence", torch.int32, "mean"),
    ):
        base = layout(name, device, dtype)
        yield Sample(
            f"{name}, {reduction}",
            _call(logits_of(base.total, 12, device), 3, pre_softmax=True, reduction=reduction, **losses, **_packed(base)),
            metadata_replays(base),
        )
    yield Sample("int count", _call(logits_of(9, 12, device), 3, total_num_tokens=40, **losses))
    for dtype in (torch.int32, torch.int64, torch.float32):
        yield Sample(
            f"{str(dtype).removeprefix('torch.')} count on the device",
            _call(
                logits_of(16, 8, device),
                padding_mask=many,
                total_num_tokens_tensor=_one(37, device, dtype).reshape((1,) if dtype == torch.int32 else ()),
                **losses,
            ),
            tuple(
                {"total_num_tokens_tensor": _one(n, device, dtype).reshape((1,) if dtype == torch.int32 else ())} for n in (5, 0)
            ),
        )
    yield Sample("count 0", _call(logits_of(9, 8, device), total_num_tokens=0, **losses))
    yield Sample("no coefficient", _call(logits_of(9, 8, device)))
    yield Sample(
        "sqrtsoftplus, groups, scaled, bitmap",
        _call(
            logits_of(19, 12, device),
            4,
            score_function="sqrtsoftplus",
            aux_score_function="sqrtsoftplus",
            expert_bias=bias_of(12, device, torch.bfloat16),
            padding_mask=mask_of(19, device),
            num_groups=4,
            group_topk=2,
            scaling_factor=2.5,
            routing_format="bitmap",
            **losses,
        ),
    )
    yield Sample(
        "padding is routed",
        _call(
            logits_of(25, 12, device),
            3,
            score_function="sigmoid",
            padding_mask=mask_of(25, device),
            pad_routing="keep",
            **losses,
            **_packed(gaps),
            **in_order,
        ),
        metadata_replays(gaps),
    )
    yield Sample("NaN and -inf", _call(odd_logits(9, 12, device), 3, score_function="sigmoid", **losses))
    yield Sample("bf16, ties", _call(tied_logits(13, 20, device), 6, aux_score_function="sigmoid", **losses))
    yield Sample(
        "fp16, K = 1, not normalised",
        _call(logits_of(13, 20, device, torch.float16), 1, score_function="sigmoid", normalize=False, **losses),
    )
    yield Sample("all experts", _call(logits_of(7, 5, device), 5, **losses, **in_order))
    yield Sample("one expert", _call(logits_of(5, 1, device), 1, score_function="sigmoid", **losses))
    yield Sample("no row", _call(logits_of(0, 8, device), **losses))
    yield Sample("many experts, large K", _call(logits_of(3, 300, device), 36, **losses))
    yield Sample("transposed", _call(logits_of(12, 10, device).t(), 3, **losses))
    yield Sample(
        "sliced columns, strided bias",
        _call(
            logits_of(10, 20, device)[:, 3:15],
            score_function="sigmoid",
            expert_bias=bias_of(24, device)[::2],
            padding_mask=mask_of(20, device)[::2],
            **losses,
        ),
    )


def _padding_rows(call: RouterCall | RouterGradCall) -> Tensor:
    """bool [T]: rows that do not count."""
    rows = nowhere(len(call.logits), call.logits.device) if call.padding_mask is None else call.padding_mask
    if call.cu_seqlens is None:
        return rows
    return rows | padding_mask(call.cu_seqlens, call.cu_seqlens_padded, len(call.logits))


def router_padding(*args: Any) -> Padding:
    call = RouterCall(*args)
    inputs, outputs = padding_of_choice(call, _padding_rows(call))
    return Padding(inputs, outputs + (None,) * 8)


# --- router_grad ------------------------------------------------------------------------------------------------------------------

_INCOMING = ("grad_probs", "grad_aux", "grad_z", "grad_score_sums", "grad_z_sum")


def router_grad_samples(device: torch.device) -> Iterator[Sample]:
    """The gradients of the samples of router: all of them, or one of them alone."""
    for number, sample in enumerate(router_samples(device)):
        call = RouterCall(*sample.args)
        wanted = _INCOMING if sample.compile or number % 3 == 0 else (_INCOMING[number % len(_INCOMING)],)

        def contents(call: RouterCall, seed: int, wanted: tuple[str, ...] = wanted) -> dict[str, Any]:
            probs, _, chosen, _, aux_loss, z_loss, score_sums, counts, z_sum, _, coefficients = reference.router(*call)
            grads: dict[str, Tensor | None] = dict.fromkeys(_INCOMING)
            for i, (name, result) in enumerate(zip(_INCOMING, (probs, aux_loss, z_loss, score_sums, z_sum), strict=True)):
                if name in wanted:
                    numbers = logits_of(1, result.numel(), device, result.dtype, seed=10 * seed + i)
                    grads[name] = numbers.reshape(result.shape)
            grad_probs = grads["grad_probs"]
            if grad_probs is not None and call.probs_format == "dense":
                grads["grad_probs"] = torch.where(chosen_mask(chosen, probs.shape[1]), grad_probs, NAN)
            return {
                "logits": call.logits,
                "chosen": chosen,
                **grads,
                "counts": counts,
                "coefficients": coefficients,
                "padding_mask": call.padding_mask,
                "cu_seqlens": call.cu_seqlens,
                "cu_seqlens_padded": call.cu_seqlens_padded,
            }

        first, *others = (contents(call._replace(**change), number + i) for i, change in enumerate(({}, *sample.replays)))
        settings = (call.score_function, call.pre_softmax, call.normalize, call.scaling_factor, call.probs_format)
        replays = tuple({name: value for name, value in other.items() if value is not None} for other in others)
        yield Sample(sample.name, (*first.values(), *settings, call.aux_score_function), replays, sample.compile)


def router_grad_padding(*args: Any) -> Padding:
    call = RouterGradCall(*args)
    nowhere_routed = call.chosen[:, 0] < 0
    inputs = {"logits": PadRows(nowhere_routed & _padding_rows(call))}
    if call.grad_probs is not None:
        inputs["grad_probs"] = PadRows(nowhere_routed)
    return Padding(inputs, (PadRows(nowhere_routed & _padding_rows(call)),))
