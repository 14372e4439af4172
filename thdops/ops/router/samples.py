"""Sample calls of router_topk and router_topk_grad, where padding stands in them, and the pieces that the other samples share.

T rows (tokens), E experts, K top-k, G groups of E/G experts. Samples are tiny: conformance runs dozens of checks on each.

Conformance holds kernels in fp32 against the truth in fp64, so keys that are not equal must stay apart in fp32, and keys that are
equal in one must be in the other: ties are ties of equal logits under equal biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.router import RouterCall, TopkCall
from thdops.ops.router import reference
from thdops.registry import Padding, PadRows, Sample

NAN, INF = float("nan"), float("inf")


# --- pieces of a call -------------------------------------------------------------------------------------------------------------


def logits_of(
    rows: int, experts: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.5
) -> Tensor:
    """Random logits; made on the CPU so that all devices see the same."""
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, experts, generator=generator)).to(device, dtype)


def tied_logits(rows: int, experts: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Logits from a handful of values, both zeros among them: every row is full of ties, and every third holds one value only."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (rows, experts), generator=generator) / 4
    logits = torch.where(torch.rand(rows, experts, generator=generator) < 0.2, -0.0, logits)
    logits[::3] = 0.25
    return logits.to(device, dtype)


def odd_logits(rows: int, experts: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Before ordinary rows: one of -inf and NaN, one of NaN, one with fewer numbers than a top-k wants, one with some -inf, one
    with one NaN."""
    logits = logits_of(rows, experts, device, dtype, seed=7)
    logits[0, : experts // 2] = -INF
    logits[0, experts // 2 :] = NAN
    logits[1] = NAN
    logits[2, 1:] = NAN
    logits[3, ::2] = -INF
    logits[4, experts // 2] = NAN
    return logits


def bias_of(experts: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Biases that change many choices."""
    generator = torch.Generator().manual_seed(seed)
    return (0.5 * torch.randn(experts, generator=generator)).to(device, dtype)


def mask_of(rows: int, device: torch.device, seed: int = 2) -> Tensor:
    """About a third of the rows is padding: some in the middle, and the last two."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, generator=generator) < 0.3
    mask[-2:] = True
    return mask.to(device)


def choice(topk: int = 2, **changed: Any) -> dict[str, Any]:
    """The settings that router_topk and router share, by name: its public defaults, and what a sample changes."""
    settings: dict[str, Any] = {
        "topk": topk,
        "score_function": "softmax",
        "pre_softmax": False,
        "normalize": True,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "probs_format": "dense",
        "routing_format": "mask",
        "index_dtype": torch.int64,
        "pad_routing": "nowhere",
        "pad_index": -1,
    }
    return settings | changed


def nowhere(rows: int, device: torch.device) -> Tensor:
    """A mask without a padding row."""
    return torch.zeros(rows, dtype=torch.bool, device=device)


def padding_of_choice(call: TopkCall | RouterCall, padding: Tensor) -> tuple[dict[str, PadRows], tuple[PadRows, ...]]:
    """(padding rows of inputs, of probs, routing and chosen) where `padding`, bool [T], marks the rows that are padding."""
    kept = call.pad_routing == "keep"
    rows = nowhere(len(padding), padding.device) if kept else padding
    value = call.pad_index if call.routing_format == "indices" else 0
    return {} if kept else {"logits": PadRows(rows)}, (PadRows(rows), PadRows(rows, value=value), PadRows(rows, value=-1))


# --- router_topk ------------------------------------------------------------------------------------------------------------------


def _call(
    logits: Tensor, expert_bias: Tensor | None = None, padding_mask: Tensor | None = None, topk: int = 2, **changed: Any
) -> tuple[Any, ...]:
    return tuple(TopkCall(logits, expert_bias, padding_mask, **choice(topk, **changed)))


def router_topk_samples(device: torch.device) -> Iterator[Sample]:
    mask, bias = mask_of(19, device), bias_of(12, device)
    grouped: dict[str, Any] = {"num_groups": 4, "group_topk": 2}
    in_order: dict[str, Any] = {"probs_format": "topk", "routing_format": "indices"}
    yield Sample(
        "softmax, dense, mask",
        _call(logits_of(16, 8, device), None, mask_of(16, device)),
        (
            {"padding_mask": mask_of(16, device, seed=3), "logits": logits_of(16, 8, device, seed=4)},
            {"padding_mask": torch.ones(16, dtype=torch.bool, device=device)},
            {"padding_mask": nowhere(16, device)},
        ),
        compile=True,
    )
    yield Sample("softmax, dense, mask, other sizes", _call(logits_of(24, 40, device), None, mask_of(24, device), 3))
    yield Sample(
        "sigmoid, bias, groups, in order, int32",
        _call(
            logits_of(19, 12, device),
            bias,
            mask,
            4,
            score_function="sigmoid",
            index_dtype=torch.int32,
            pad_index=12,
            **grouped,
            **in_order,
        ),
        ({"padding_mask": ~mask, "expert_bias": bias_of(12, device, seed=5)}, {"expert_bias": -bias}),
        compile=True,
    )
    yield Sample(
        "sqrtsoftplus, bf16 bias, scaled, bitmap",
        _call(
            logits_of(19, 12, device),
            bias_of(12, device, torch.bfloat16),
            mask,
            3,
            score_function="sqrtsoftplus",
            scaling_factor=2.5,
            routing_format="bitmap",
        ),
        ({"padding_mask": ~mask},),
    )
    yield Sample("softmax over all experts, scaled", _call(logits_of(11, 44, device), topk=6, pre_softmax=True, scaling_factor=2.5))
    yield Sample(
        "softmax over all experts, in order, int16",
        _call(logits_of(19, 12, device), None, mask, 3, pre_softmax=True, index_dtype=torch.int16, **in_order),
    )
    yield Sample("softmax, groups, bitmap of eighths", _call(logits_of(9, 16, device), topk=4, routing_format="bitmap", **grouped))
    yield Sample(
        "sigmoid, not normalised", _call(logits_of(9, 12, device), bias, topk=3, score_function="sigmoid", normalize=False)
    )
    for score_function in ("sigmoid", "sqrtsoftplus"):
        yield Sample(
            f"{score_function}, K = 1, fp16 bias",
            _call(logits_of(9, 12, device), bias_of(12, device, torch.float16), topk=1, score_function=score_function),
        )
    yield Sample(
        "groups of one expert",
        _call(logits_of(9, 8, device), bias_of(8, device), score_function="sigmoid", num_groups=8, group_topk=2),
    )
    yield Sample("one group", _call(logits_of(9, 8, device), score_function="sigmoid", num_groups=1, group_topk=1))
    yield Sample("all experts", _call(logits_of(7, 5, device), topk=5, **in_order))
    yield Sample("one expert", _call(logits_of(5, 1, device), topk=1, score_function="sqrtsoftplus"))
    yield Sample("no row", _call(logits_of(0, 8, device), None, nowhere(0, device)))
    yield Sample("no row, groups, bitmap", _call(logits_of(0, 12, device), topk=4, routing_format="bitmap", **grouped))
    yield Sample("scaled by 0", _call(logits_of(5, 8, device), scaling_factor=0.0))
    yield Sample("many experts, large K", _call(logits_of(3, 300, device), topk=36, **in_order))

    yield Sample("bf16, ties", _call(tied_logits(13, 20, device), None, mask_of(13, device), 6, **in_order))
    yield Sample(
        "bf16, ties of scores and of groups",
        _call(
            tied_logits(13, 24, device),
            torch.tensor([0.0, 0.5] * 12, device=device),
            topk=4,
            score_function="sigmoid",
            **grouped,
            **in_order,
        ),
    )
    yield Sample("fp32, ties", _call(tied_logits(8, 12, device, torch.float32), topk=5, score_function="sqrtsoftplus"))
    for score_function in ("softmax", "sigmoid", "sqrtsoftplus"):
        yield Sample(
            f"NaN and -inf, {score_function}", _call(odd_logits(9, 12, device), topk=3, score_function=score_function, **in_order)
        )
    yield Sample("NaN and -inf, softmax over all experts", _call(odd_logits(9, 12, device), topk=3, pre_softmax=True))
    yield Sample(
        "NaN and -inf, groups", _call(odd_logits(9, 12, device), bias, topk=4, score_function="sqrtsoftplus", **grouped, **in_order)
    )

    kept = _call(logits_of(19, 12, device), bias, mask, 3, score_function="sigmoid", routing_format="indices", pad_routing="keep")
    yield Sample("padding is routed", kept, ({"padding_mask": ~mask},))
    yield Sample("fp16, transposed", _call(logits_of(12, 10, device, torch.float16).t(), topk=3, score_function="sigmoid"))
    yield Sample(
        "sliced columns, strided bias",
        _call(logits_of(10, 20, device)[:, 3:15], bias_of(24, device)[::2], mask_of(20, device)[::2], score_function="sigmoid"),
    )
    yield Sample("every second row and column", _call(logits_of(18, 24, device)[::2, ::2], topk=3, pre_softmax=True))
    yield Sample("expanded row", _call(logits_of(1, 8, device).expand(6, 8), topk=3))


def router_topk_padding(*args: Any) -> Padding:
    call = TopkCall(*args)
    padding = nowhere(len(call.logits), call.logits.device) if call.padding_mask is None else call.padding_mask
    return Padding(*padding_of_choice(call, padding))


# --- router_topk_grad -------------------------------------------------------------------------------------------------------------


def router_topk_grad_samples(device: torch.device) -> Iterator[Sample]:
    """The gradients of the samples of router_topk. Those of weights that were not chosen are NaN: nobody may read them."""
    for number, sample in enumerate(router_topk_samples(device)):
        call = TopkCall(*sample.args)
        settings = (call.score_function, call.pre_softmax, call.normalize, call.scaling_factor, call.probs_format)

        def contents(call: TopkCall, seed: int) -> dict[str, Tensor]:
            probs, _, chosen = reference.router_topk(*call)
            grad = logits_of(*probs.shape, device=device, dtype=probs.dtype, seed=seed)
            if call.probs_format == "dense":
                grad = torch.where(chosen_mask(chosen, probs.shape[1]), grad, NAN)
            return {"grad_probs": grad, "logits": call.logits, "chosen": chosen}

        first, *others = (contents(call._replace(**change), number + i) for i, change in enumerate(({}, *sample.replays)))
        yield Sample(sample.name, (*first.values(), *settings), tuple(others), sample.compile)


def chosen_mask(chosen: Tensor, experts: int) -> Tensor:
    """bool [T, E]: True at the chosen experts."""
    mask = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device)
    return mask.scatter(1, chosen.clamp(min=0).long(), chosen >= 0)


def router_topk_grad_padding(*args: Any) -> Padding:
    _, _, chosen, *_ = args
    rows = PadRows(chosen[:, 0] < 0)
    return Padding({"grad_probs": rows, "logits": rows}, (rows,))
