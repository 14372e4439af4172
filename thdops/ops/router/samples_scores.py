"""Sample calls of router_scores and router_scores_grad, and where padding stands in them. T rows (tokens), E experts, K top-k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype
from thdops.ops.router.samples import logits_of, mask_of, nowhere, odd_logits, tied_logits
from thdops.registry import Padding, PadRows, Sample


def router_scores_samples(device: torch.device) -> Iterator[Sample]:
    mask, many = mask_of(19, device), mask_of(16, device)
    yield Sample(
        "softmax, mask",
        (logits_of(16, 8, device), many, 2, "softmax", "mask"),
        (
            {"padding_mask": ~many, "logits": logits_of(16, 8, device, seed=4)},
            {"padding_mask": torch.ones_like(many)},
            {"padding_mask": torch.zeros_like(many)},
        ),
        compile=True,
    )
    yield Sample("softmax, mask, other sizes", (logits_of(24, 40, device), mask_of(24, device), 3, "softmax", "mask"))
    yield Sample(
        "sigmoid, bitmap",
        (logits_of(19, 12, device), mask, 3, "sigmoid", "bitmap"),
        ({"padding_mask": ~mask},),
        compile=True,
    )
    yield Sample("sqrtsoftplus, bitmap", (logits_of(9, 44, device), None, 6, "sqrtsoftplus", "bitmap"))
    for score_function in ("softmax", "sigmoid", "sqrtsoftplus"):
        yield Sample(f"K = 1, {score_function}", (logits_of(9, 12, device), None, 1, score_function, "mask"))
        # Without the row of both: whether the gradient of a -inf beside a NaN is 0 or NaN is nobody's promise.
        yield Sample(f"NaN and -inf, {score_function}", (odd_logits(9, 12, device)[1:], None, 3, score_function, "mask"))
        yield Sample(f"bf16, ties, {score_function}", (tied_logits(13, 20, device), None, 6, score_function, "mask"))
    yield Sample("all experts", (logits_of(7, 5, device), None, 5, "sigmoid", "mask"))
    yield Sample("one expert", (logits_of(5, 1, device), None, 1, "softmax", "mask"))
    yield Sample("no row", (logits_of(0, 8, device), nowhere(0, device), 2, "softmax", "bitmap"))
    yield Sample("many experts, large K", (logits_of(3, 300, device), None, 36, "sqrtsoftplus", "mask"))
    yield Sample("fp16, transposed", (logits_of(12, 10, device, torch.float16).t(), None, 3, "sigmoid", "mask"))
    yield Sample(
        "sliced columns, strided mask", (logits_of(10, 20, device)[:, 3:15], mask_of(20, device)[::2], 3, "softmax", "bitmap")
    )
    yield Sample("expanded row", (logits_of(1, 8, device).expand(6, 8), None, 3, "softmax", "mask"))


def router_scores_padding(*args: Any) -> Padding:
    logits, mask, *_ = args
    rows = PadRows(nowhere(len(logits), logits.device) if mask is None else mask)
    return Padding({"logits": rows}, (rows, rows))


def router_scores_grad_samples(device: torch.device) -> Iterator[Sample]:
    for sample in router_scores_samples(device):
        logits, mask, _, score_function, _ = sample.args

        def grad(seed: int, logits: Tensor = logits) -> Tensor:
            return logits_of(*logits.shape, device=device, dtype=accumulation_dtype(logits.dtype), seed=seed)

        replays = tuple({**contents, "grad_scores": grad(i)} for i, contents in enumerate(sample.replays))
        yield Sample(sample.name, (grad(9), logits, mask, score_function), replays, sample.compile)


def router_scores_grad_padding(*args: Any) -> Padding:
    _, logits, mask, _ = args
    rows = PadRows(nowhere(len(logits), logits.device) if mask is None else mask)
    return Padding({"grad_scores": rows, "logits": rows}, (rows,))
