"""Illegal calls of the router ops, with the whole text of the error. T rows, E experts, K top-k; here T = 6, E = 8, K = 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.router import RouterCall, RouterGradCall, TopkCall
from thdops.ops.router.samples import choice, logits_of, nowhere
from thdops.registry import Refusal

_Call = Callable[..., tuple[Any, ...]]


def _refusal(op: str, name: str, args: tuple[Any, ...], text: str, error: type[Exception] = ValueError) -> Refusal:
    return Refusal(name, args, error, f"{op}: {text}")


def _of_logits(op: str, device: torch.device, call: _Call) -> Iterator[Refusal]:
    logits = logits_of(6, 8, device)
    text = "logits must have 2 dimensions [T, E], got shape [2, 3, 8]; reshape it"
    yield _refusal(op, "logits of rank 3", call(logits=logits.view(2, 3, 8)), text)
    text = f"logits must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it"
    yield _refusal(op, "integer logits", call(logits=logits.int()), text, TypeError)
    text = "logits must have at least one column, got shape [6, 0]; pass one column per expert"
    yield _refusal(op, "no expert", call(logits=logits[:, :0]), text)
    if device.type == "cuda":
        text = "logits must be float32 or bfloat16 or float16, got float64 on cuda; fp64 is served on CPU only, cast it to float32"
        yield _refusal(op, "fp64 on a GPU", call(logits=logits.double()), text, TypeError)


def _of_topk(op: str, call: _Call) -> Iterator[Refusal]:
    for topk in (0, 9):
        text = f"topk must be from 1 to the number of experts (8), got {topk}; pass another"
        yield _refusal(op, f"topk {topk}", call(topk=topk), text)


def _of_score_function(op: str, call: _Call, argument: str = "score_function") -> Iterator[Refusal]:
    text = f"{argument} must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one"
    yield _refusal(op, f"unknown {argument}", call(**{argument: "relu"}), text)


def _of_scoring(op: str, call: _Call) -> Iterator[Refusal]:
    yield from _of_score_function(op, call)
    text = (
        "pre_softmax must be False unless score_function is softmax, got True with 'sigmoid';"
        " pass normalize=False for scores that are not renormalised"
    )
    yield _refusal(op, "pre_softmax of sigmoid scores", call(score_function="sigmoid", pre_softmax=True), text)
    text = (
        "normalize must be True for a softmax over the chosen logits, got False;"
        " pass pre_softmax=True for the softmax over all experts"
    )
    yield _refusal(op, "softmax that is not normalised", call(normalize=False), text)


def _of_mask(op: str, device: torch.device, call: _Call) -> Iterator[Refusal]:
    text = "padding_mask must be bool, True on padding rows, got int64; cast it with .bool()"
    yield _refusal(op, "mask of integers", call(padding_mask=nowhere(6, device).long()), text, TypeError)
    for shape in ((5,), (6, 1)):
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        text = (
            f"padding_mask must be [T] with one entry per row of logits (6), got shape {list(shape)};"
            " flatten it like the rows of logits"
        )
        yield _refusal(op, f"mask of shape {list(shape)}", call(padding_mask=mask), text)
    if device.type == "cuda":
        text = f"padding_mask must be on the device of logits ({torch.empty(0, device=device).device}), got cpu; move it"
        yield _refusal(op, "mask on another device", call(padding_mask=nowhere(6, torch.device("cpu"))), text)


def _of_bias(op: str, device: torch.device, call: _Call) -> Iterator[Refusal]:
    bias = torch.zeros(8, device=device)
    text = "expert_bias must be None with score_function 'softmax', got a tensor; a bias is added to sigmoid or sqrtsoftplus scores"
    yield _refusal(op, "bias of a softmax", call(expert_bias=bias), text)
    text = "expert_bias must be [E] with one entry per expert (8), got shape [4]; pass one number per column of logits"
    yield _refusal(op, "bias of another length", call(expert_bias=bias[:4], score_function="sigmoid"), text)
    text = f"expert_bias must be float32 or bfloat16 or float16, got int64 on {device.type}; cast it"
    yield _refusal(op, "bias of integers", call(expert_bias=bias.long(), score_function="sigmoid"), text, TypeError)


def _of_groups(op: str, call: _Call) -> Iterator[Refusal]:
    for name, text, changed in (
        (
            "groups without group_topk",
            "group_topk must be given where num_groups is, got None; pass both or neither",
            {"num_groups": 4},
        ),
        (
            "group_topk without groups",
            "num_groups must be given where group_topk is, got None; pass both or neither",
            {"group_topk": 2},
        ),
        (
            "groups that do not divide the experts",
            "num_groups must divide the number of experts (8), got 3; groups are equally large",
            {"num_groups": 3, "group_topk": 1},
        ),
        (
            "more groups chosen than there are",
            "group_topk must be from 1 to num_groups (4), got 5; pass another",
            {"num_groups": 4, "group_topk": 5},
        ),
        (
            "topk that groups do not divide",
            "topk must be a multiple of group_topk (2), got 3; a group is ranked by its topk / group_topk best experts",
            {"num_groups": 4, "group_topk": 2, "topk": 3},
        ),
        (
            "more experts than the groups hold",
            "topk must be at most the experts of 2 groups (4), got 6; choose more groups",
            {"num_groups": 4, "group_topk": 2, "topk": 6},
        ),
    ):
        yield _refusal(op, name, call(**changed), text)


def _of_formats(op: str, device: torch.device, call: _Call) -> Iterator[Refusal]:
    for argument, field, known in (
        ("probs", "probs_format", "dense, topk"),
        ("routing", "routing_format", "mask, indices, bitmap"),
        ("pad_routing", "pad_routing", "nowhere, keep"),
    ):
        text = f"{argument} must be one of {known}, got 'list'; choose one"
        yield _refusal(op, f"unknown {argument}", call(**{field: "list"}), text)
    text = "routing must have an order with probs='topk', got 'bitmap'; pass routing='indices', or probs='dense'"
    yield _refusal(op, "bitmap beside probs in order", call(probs_format="topk", routing_format="bitmap"), text)
    text = "index_dtype must be int16 or int32 or int64, got uint8; pass one of these"
    yield _refusal(op, "index_dtype uint8", call(index_dtype=torch.uint8), text, TypeError)
    text = "index_dtype must hold 32768 experts, got int16; pass torch.int32"
    wide = call(logits=logits_of(1, 2**15, device), routing_format="indices", index_dtype=torch.int16)
    yield _refusal(op, "more experts than int16 holds", wide, text)
    text = "pad_index must be -1 or the number of experts (8), got 7; choose one"
    yield _refusal(op, "pad_index that is an expert", call(pad_index=7), text)


def _of_choice(op: str, device: torch.device, call: _Call) -> Iterator[Refusal]:
    """What is illegal in router_topk and in router."""
    yield from _of_logits(op, device, call)
    yield from _of_topk(op, call)
    yield from _of_scoring(op, call)
    yield from _of_bias(op, device, call)
    yield from _of_groups(op, call)
    yield from _of_formats(op, device, call)
    yield from _of_mask(op, device, call)


def _of_sequences(op: str, device: torch.device, call: _Call) -> Iterator[Refusal]:
    ends = torch.tensor([0, 2, 6], device=device)
    text = "cu_seqlens_padded must come with cu_seqlens, got it alone; pass both or neither"
    yield _refusal(op, "padded offsets alone", call(cu_seqlens=None, cu_seqlens_padded=ends), text)
    text = "cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)"
    yield _refusal(op, "float cu_seqlens", call(cu_seqlens=ends.float()), text, TypeError)
    text = "cu_seqlens_padded must have as many entries as cu_seqlens (3), got 2; pass B+1 offsets in both"
    yield _refusal(op, "padded offsets of another length", call(cu_seqlens=ends, cu_seqlens_padded=ends[:2]), text)


def _of_chosen(op: str, call: _Call, chosen: Tensor) -> Iterator[Refusal]:
    text = "chosen must be int32, got int64; pass the forward's"
    yield _refusal(op, "chosen of a bad dtype", call(chosen=chosen.long()), text, TypeError)
    text = "chosen must be [T, K] with T = 6 rows and K from 1 to 8, got shape [5, 2]; pass the forward's"
    yield _refusal(op, "chosen of other rows", call(chosen=chosen[:5]), text)
    text = "chosen must be contiguous, got strides [1, 6]; pass the forward's"
    yield _refusal(op, "chosen, transposed", call(chosen=chosen.t().contiguous().t()), text)


def _of_grad_probs(op: str, call: _Call, logits: Tensor) -> Iterator[Refusal]:
    text = "grad_probs must have shape [6, 8], got [6, 2]; pass the forward's, or its gradient"
    yield _refusal(op, "gradient of other probs", call(grad_probs=logits[:, :2]), text)
    text = "grad_probs must be float32, got bfloat16; pass the forward's, or its gradient"
    yield _refusal(op, "gradient of a bad dtype", call(grad_probs=logits.bfloat16()), text, TypeError)


# --- router_topk, router_topk_grad ------------------------------------------------------------------------------------------------


def router_topk_refusals(device: torch.device) -> Iterator[Refusal]:
    tensors: dict[str, Any] = {"logits": logits_of(6, 8, device), "expert_bias": None, "padding_mask": None}

    def call(**changed: Any) -> tuple[Any, ...]:
        return tuple(TopkCall(**(tensors | choice() | changed)))

    yield from _of_choice("router_topk", device, call)


def router_topk_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    op, logits = "router_topk_grad", logits_of(6, 8, device)
    chosen = torch.zeros(6, 2, dtype=torch.int32, device=device)
    arguments = {
        "grad_probs": logits,
        "logits": logits,
        "chosen": chosen,
        "score_function": "softmax",
        "pre_softmax": False,
        "normalize": True,
        "scaling_factor": None,
        "probs_format": "dense",
    }

    def call(**changed: Any) -> tuple[Any, ...]:
        return tuple((arguments | changed).values())

    yield from _of_logits(op, device, call)
    yield from _of_scoring(op, call)
    yield _refusal(op, "unknown probs", call(probs_format="list"), "probs must be one of dense, topk, got 'list'; choose one")
    yield from _of_chosen(op, call, chosen)
    yield from _of_grad_probs(op, call, logits)


# --- router_scores, router_scores_grad --------------------------------------------------------------------------------------------


def router_scores_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "router_scores"
    arguments = {
        "logits": logits_of(6, 8, device),
        "padding_mask": None,
        "topk": 2,
        "score_function": "softmax",
        "routing_format": "mask",
    }

    def call(**changed: Any) -> tuple[Any, ...]:
        return tuple((arguments | changed).values())

    yield from _of_logits(op, device, call)
    yield from _of_topk(op, call)
    yield from _of_score_function(op, call)
    text = "routing must be mask or bitmap, got 'indices'; call router_topk, which orders them"
    yield _refusal(op, "indices", call(routing_format="indices"), text)
    text = "routing must be one of mask, indices, bitmap, got 'list'; choose one"
    yield _refusal(op, "unknown routing", call(routing_format="list"), text)
    yield from _of_mask(op, device, call)


def router_scores_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    op, logits = "router_scores_grad", logits_of(6, 8, device)
    arguments = {"grad_scores": logits, "logits": logits, "padding_mask": None, "score_function": "softmax"}

    def call(**changed: Any) -> tuple[Any, ...]:
        return tuple((arguments | changed).values())

    yield from _of_logits(op, device, call)
    yield from _of_score_function(op, call)
    text = "grad_scores must have shape [6, 8], got [6, 7]; pass the forward's, or its gradient"
    yield _refusal(op, "gradient of other scores", call(grad_scores=logits[:, :7]), text)
    text = "grad_scores must be float32, got float16; pass the forward's, or its gradient"
    yield _refusal(op, "gradient of a bad dtype", call(grad_scores=logits.half()), text, TypeError)
    yield from _of_mask(op, device, call)


# --- router, router_grad ----------------------------------------------------------------------------------------------------------


def router_refusals(device: torch.device) -> Iterator[Refusal]:
    op, one = "router", torch.ones((), device=device)
    tensors = dict.fromkeys(RouterCall._fields) | {"logits": logits_of(6, 8, device)}
    settings = {"aux_score_function": "softmax", "reduction": "mean"}

    def call(**changed: Any) -> tuple[Any, ...]:
        fields: dict[str, Any] = tensors | choice() | settings | changed
        return tuple(RouterCall(**fields))

    yield from _of_choice(op, device, call)
    yield from _of_score_function(op, call, "aux_score_function")
    text = "reduction must be one of mean, sum, got 'none'; choose one"
    yield _refusal(op, "unknown reduction", call(reduction="none"), text)
    yield from _of_sequences(op, device, call)
    ends = torch.tensor([0, 2, 6], device=device)
    text = "total_num_tokens must be None where cu_seqlens is given, got both; leave it out: each sequence counts its own rows"
    yield _refusal(op, "a count of the batch and sequences", call(cu_seqlens=ends, total_num_tokens=6), text)
    text = "total_num_tokens must be at least 0, got -1; pass a larger one"
    yield _refusal(op, "negative count", call(total_num_tokens=-1), text)
    text = "total_num_tokens must be int32 or int64 or float32, got bool; cast it"
    yield _refusal(op, "count of a bad dtype", call(total_num_tokens_tensor=one.bool()), text, TypeError)
    for argument in ("aux_coeff", "z_coeff"):
        text = f"{argument} must be float32, got bfloat16; cast it"
        yield _refusal(op, f"{argument} of a bad dtype", call(**{f"{argument}_tensor": one.bfloat16()}), text, TypeError)
        text = f"{argument} must have one element, got shape [2]; pass a 0-d tensor"
        yield _refusal(op, f"several {argument}", call(**{f"{argument}_tensor": one.expand(2)}), text)
        text = (
            f"{argument} must be given either as {argument} (a float) or as {argument}_tensor, got both;"
            " pass exactly one and None for the other"
        )
        yield _refusal(op, f"two of {argument}", call(**{f"{argument}_tensor": one, argument: 1.0}), text)


def router_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    op, logits = "router_grad", logits_of(6, 8, device)
    chosen = torch.zeros(6, 2, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = dict.fromkeys(RouterGradCall._fields) | {
        "logits": logits,
        "chosen": chosen,
        "counts": torch.zeros(1, 8, dtype=torch.int64, device=device),
        "coefficients": torch.zeros(2, device=device),
        "score_function": "softmax",
        "pre_softmax": False,
        "normalize": True,
        "probs_format": "dense",
        "aux_score_function": "softmax",
    }

    def call(**changed: Any) -> tuple[Any, ...]:
        return tuple(RouterGradCall(**(arguments | changed)))

    yield from _of_logits(op, device, call)
    yield from _of_scoring(op, call)
    yield from _of_score_function(op, call, "aux_score_function")
    yield _refusal(op, "unknown probs", call(probs_format="list"), "probs must be one of dense, topk, got 'list'; choose one")
    yield from _of_chosen(op, call, chosen)
    yield from _of_mask(op, device, call)
    yield from _of_sequences(op, device, call)
    yield from _of_grad_probs(op, call, logits)
    text = "grad_aux must have shape [], got [1]; pass the forward's, or its gradient"
    yield _refusal(op, "gradient of another loss", call(grad_aux=logits[0, :1]), text)
    text = "coefficients must have shape [2], got [3]; pass the forward's, or its gradient"
    yield _refusal(op, "coefficients of sequences", call(coefficients=logits[0, :3]), text)
    text = "counts must be int64, got int32; pass the forward's, or its gradient"
    yield _refusal(op, "counts of a bad dtype", call(counts=chosen[:1].expand(1, 2)), text, TypeError)
