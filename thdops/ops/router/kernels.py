"""Launchers of the router ops: how rows are cut, and which parts of `route_rows`, `finish` and `route_rows_grad` an op needs.

T rows, E experts, K chosen, B sequences, S sets of sums (B, or 1). What does not depend on the number of rows is constant in a
kernel: a router's E, K and rules do not change while it trains. All of it follows from the kind of a call, so it is derived once
for each kind (`Plans`); a call then allocates and launches.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from meta_kernels import router as contract
from meta_kernels.contract import takes
from meta_kernels.router import RouterCall, RouterGradCall, TopkCall
from thdops.ops.launch import launch_as, multiprocessors
from thdops.ops.plans import Blank, Plans, meta
from thdops.ops.router.kernels_backward import route_rows_grad
from thdops.ops.router.kernels_forward import finish, fold, route_rows

_PROGRAMS = 1000  # per multiprocessor, at most: short programs share a GPU better
_SUM_PROGRAMS = 12  # the same, where programs keep sums, which then have to be added
_RARE = 0.004  # how often a lane may have had more to give: such a row is chosen again
_FILL = 1024  # elements of a store of zeros
_WAYS = 32  # of the search for the sequence of a row
_FOLDED = 64  # rows that the partial sums of many programs are added up to, before `finish` adds the rest
_FOLD_P, _FOLD_E, _FOLD_WARPS = 32, 32, 8
_FINISH_P, _FINISH_E, _FINISH_S, _FINISH_WARPS = _FOLDED, 32, 64, 8


# --- how rows are cut -------------------------------------------------------------------------------------------------------------


class _Tiling(NamedTuple):
    """A chunk is `block_t` rows by `lanes` columns; `chunks` of them are a row. With groups, one chunk of `group_lanes` is."""

    lanes: int
    chunks: int
    width: int
    group_lanes: int
    block_t: int
    num_warps: int
    registers: int | None


@lru_cache
def _tiling(experts: int, num_groups: int, kind: str) -> _Tiling:
    """Few experts: several rows a warp. Up to 512: one, a chunk of 32 columns at a time. Above: a row for one to four warps.

    `kind` is "rows", "sums" (registers hold sums, too) or "grad". Measured on an H200.
    """
    padded = triton.next_power_of_2(experts)
    width = triton.next_power_of_2(experts // num_groups) if num_groups else 1
    group_lanes = triton.next_power_of_2(num_groups) * width if num_groups else 0
    if padded <= 64:
        lanes, block_t, registers = 8, 8 if kind == "sums" else 4, None
    elif padded <= 128:
        lanes, block_t = {"rows": (8, 4), "sums": (16, 2), "grad": (16, 4)}[kind]
        registers = 128 if kind == "sums" else None
    else:
        lanes, block_t = max(padded // 16, 32), 2 if kind == "grad" and padded <= 256 else 1
        registers = (128 if padded <= 256 else 168) if kind == "sums" and padded <= 512 else None
    return _Tiling(lanes, -(-experts // lanes), width, group_lanes, block_t, max(lanes // 64, 1), registers)


@lru_cache
def _depth(chunks: int, lanes: int, topk: int) -> int:
    """How many of its columns a lane keeps in order: so many that it seldom has more of a row's best `topk` + 1."""
    depth = 1
    while depth < min(chunks, topk + 1) and comb(topk + 1, depth) / lanes ** (depth - 1) > _RARE:
        depth += 1
    return depth


class _Rows(NamedTuple):
    """The rows of a call: `programs` programs of `tiles` tiles, and the integers of `route_rows` that describe the logits."""

    tiling: _Tiling
    programs: int
    tiles: int
    contiguous: bool
    keys: int
    fill: int


def _rows(logits: Tensor, topk: int, num_groups: int, kind: str) -> _Rows:
    rows, experts = logits.shape
    row_stride, column_stride = logits.stride()
    tiling = _tiling(experts, num_groups, kind)
    per_multiprocessor = _SUM_PROGRAMS if kind == "sums" else _PROGRAMS
    blocks = -(-rows // tiling.block_t)
    tiles = max(-(-blocks // (multiprocessors(logits.get_device()) * per_multiprocessor)), 1)
    return _Rows(
        tiling,
        -(-blocks // tiles),
        tiles,
        column_stride == 1 and row_stride == experts,
        max(triton.next_power_of_2(topk), tiling.lanes),
        min(triton.next_power_of_2(tiling.block_t * experts), _FILL),
    )


def _stride(mask: Tensor | None) -> int:
    return 0 if mask is None else mask.stride(0)


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _packed(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None else bias.contiguous()


def _constants(
    rows: _Rows,
    experts: int,
    topk: int,
    parts: tuple[bool, bool, bool],
    scoring: tuple[str, str, bool, bool],
    groups: tuple[int, int],
    formats: tuple[str, str, bool],
) -> tuple[Any, ...]:
    """The constants of `route_rows`, in its order: (route, scores, sums), (score, aux, pre, normalize), (groups, chosen groups),
    (probs, routing, keep).
    """
    tiling = rows.tiling
    layout = (tiling.lanes, tiling.chunks, _depth(tiling.chunks, tiling.lanes, topk), tiling.group_lanes, tiling.block_t)
    end = (rows.fill, triton.next_power_of_2(-(-experts // 8)), _WAYS)
    return (experts, topk, rows.keys, *parts, *scoring, *groups, tiling.width, *formats, rows.contiguous, *layout, *end)


# --- router_topk ------------------------------------------------------------------------------------------------------------------


def _plan_topk(*fields: Any) -> tuple[_Rows, tuple[Any, ...], Blank]:
    contract.check_router_topk(*fields)
    call = TopkCall(*fields)
    groups = (call.num_groups or 0, call.group_topk or 0)
    rows = _rows(call.logits, call.topk, groups[0], "rows")
    scoring = (call.score_function, call.score_function, call.pre_softmax, call.normalize)
    formats = (call.probs_format, call.routing_format, call.pad_routing == "keep")
    constants = _constants(rows, call.logits.shape[1], call.topk, (True, False, False), scoring, groups, formats)
    return rows, constants, Blank(*contract.fake_router_topk(*fields))


_topk_plans = Plans(_plan_topk)


@takes(TopkCall)
def router_topk(call: TopkCall) -> tuple[Tensor, ...]:
    number, (rows, constants, blank) = _topk_plans(*call)
    outputs = probs, routing, chosen = blank(call.logits.device)
    mask = None if call.pad_routing == "keep" else call.padding_mask
    launch_as(
        number,
        route_rows,
        (rows.programs, 1, 1),
        (
            call.logits, _packed(call.expert_bias), mask, None, None, probs, routing, chosen, *[None] * 7,
            call.logits.shape[0], rows.tiles, *call.logits.stride(), _stride(mask), 0, call.pad_index,
            1.0 if call.scaling_factor is None else call.scaling_factor,
        ),
        constants,
        rows.tiling.num_warps,
        rows.tiling.registers,
    )  # fmt: skip
    return outputs


# --- router_scores ----------------------------------------------------------------------------------------------------------------


def _plan_scores(
    logits: Tensor, padding_mask: Tensor | None, topk: int, score_function: str, routing_format: str
) -> tuple[_Rows, tuple[Any, ...], Blank]:
    contract.check_router_scores(logits, padding_mask, topk, score_function, routing_format)
    rows = _rows(logits, topk, 0, "rows")
    scoring = (score_function, score_function, False, True)
    formats = ("none", routing_format, False)
    constants = _constants(rows, logits.shape[1], topk, (False, True, False), scoring, (0, 0), formats)
    return rows, constants, Blank(*contract.fake_router_scores(logits, padding_mask, topk, score_function, routing_format))


_scores_plans = Plans(_plan_scores)


def router_scores(
    logits: Tensor, padding_mask: Tensor | None, topk: int, score_function: str, routing_format: str = "mask"
) -> tuple[Tensor, Tensor]:
    number, (rows, constants, blank) = _scores_plans(logits, padding_mask, topk, score_function, routing_format)
    scores, routing = blank(logits.device)
    launch_as(
        number,
        route_rows,
        (rows.programs, 1, 1),
        (
            logits, None, padding_mask, None, None, None, routing, None, scores, *[None] * 6, logits.shape[0],
            rows.tiles, *logits.stride(), _stride(padding_mask), 0, -1, 1.0,
        ),
        constants,
        rows.tiling.num_warps,
        rows.tiling.registers,
    )  # fmt: skip
    return scores, routing


# --- router -----------------------------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """How partial sums are kept and added: `pairs` rows of them, `folded` more if there are many; the constants of `finish`."""

    rows: _Rows
    constants: tuple[Any, ...]
    sets: int
    sequences: int
    pairs: int
    folded: int
    blocks: int
    finish: tuple[Any, ...]
    blank: Blank


def _plan_router(*fields: Any) -> _Sums:
    contract.check_router(*fields)
    call = RouterCall(*fields)
    experts = call.logits.shape[1]
    groups = (call.num_groups or 0, call.group_topk or 0)
    rows = _rows(call.logits, call.topk, groups[0], "sums")
    scoring = (call.score_function, call.aux_score_function, call.pre_softmax, call.normalize)
    formats = (call.probs_format, call.routing_format, call.pad_routing == "keep")
    sets = contract.sets_of_sums(call.cu_seqlens)
    sequences = 0 if call.cu_seqlens is None else sets
    total = "tensor" if call.total_num_tokens_tensor is not None else "int" if call.total_num_tokens is not None else "own"
    mean = call.reduction == "mean" and call.cu_seqlens is not None
    pairs = rows.programs + sequences + 1
    folded = _FOLDED if sequences == 0 and rows.programs > _FOLDED else 0
    height, blocks = pairs + folded, -(-experts // _FINISH_E)
    partial = (
        meta(height, experts, dtype=torch.float32),
        meta(2, height, experts, dtype=torch.int32),
        meta(height + 1, dtype=torch.int32),
        meta(height + sets * blocks, dtype=torch.float32),
    )
    return _Sums(
        rows,
        _constants(rows, experts, call.topk, (True, False, True), scoring, groups, formats),
        sets,
        sequences,
        pairs,
        folded,
        blocks,
        (experts, call.topk, total, mean, _FINISH_P, _FINISH_E, _FINISH_S),
        Blank(*contract.fake_router(*fields), *partial),
    )


_router_plans = Plans(_plan_router)


@takes(RouterCall)
def router(call: RouterCall) -> tuple[Tensor, ...]:
    tokens = call.total_num_tokens
    # A count that changes from call to call makes no new kind; a negative one does, and is refused.
    kind = call if tokens is None else call._replace(total_num_tokens=min(tokens, 0))
    number, plan = _router_plans(*kind)
    rows, tiling = plan.rows, plan.rows.tiling
    *outputs, sums, integers, row_counts, z_sums = plan.blank(call.logits.device)
    probs, routing, chosen, tokens_per_expert, aux_loss, z_loss, score_sums, counts, z_sum, num_tokens, coefficients = outputs
    total, experts = call.logits.shape
    height = plan.pairs + plan.folded
    chosen_counts, routed_counts = integers
    ticket = row_counts[height:]
    balances = z_sums[height:]
    if total == 0:
        ticket.zero_()
    padded = call.cu_seqlens if call.cu_seqlens_padded is None else call.cu_seqlens_padded
    launch_as(
        (number, "route"),
        route_rows,
        (rows.programs, 1, 1),
        (
            call.logits, _packed(call.expert_bias), call.padding_mask, call.cu_seqlens, padded, probs, routing, chosen, None, sums,
            chosen_counts, row_counts, routed_counts, z_sums, ticket, total, rows.tiles, *call.logits.stride(),
            _stride(call.padding_mask), plan.sequences, call.pad_index, 1.0 if call.scaling_factor is None else call.scaling_factor,
        ),
        plan.constants,
        tiling.num_warps,
        tiling.registers,
    )  # fmt: skip
    if plan.folded:
        launch_as(
            (number, "fold"),
            fold,
            (plan.folded, -(-experts // _FOLD_E), 1),
            (sums, chosen_counts, row_counts, routed_counts, z_sums, rows.programs, plan.pairs),
            (experts, _FOLD_P, _FOLD_E),
            _FOLD_WARPS,
        )
    launch_as(
        (number, "finish", tokens is None or tokens < 2**31),
        finish,
        (max(plan.sets, 1), plan.blocks, 1),
        (
            sums, chosen_counts, row_counts, routed_counts, z_sums, padded, call.total_num_tokens_tensor, call.aux_coeff_tensor,
            call.z_coeff_tensor, score_sums, counts, tokens_per_expert, num_tokens, aux_loss, z_loss, z_sum, coefficients, balances,
            ticket, plan.pairs if plan.folded else 0, plan.folded or rows.programs, rows.tiles * tiling.block_t, total, plan.sets,
            tokens or 0, call.aux_coeff or 0.0, call.z_coeff or 0.0,
        ),
        plan.finish,
        _FINISH_WARPS,
    )  # fmt: skip
    return tuple(outputs)


# --- gradients --------------------------------------------------------------------------------------------------------------------


class _Incoming(NamedTuple):
    """What `route_rows_grad` takes besides the logits: incoming gradients, what the forward saved, and its settings."""

    chosen: Tensor | None = None
    grad_probs: Tensor | None = None
    padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    padded: Tensor | None = None
    grad_scores: Tensor | None = None
    counts: Tensor | None = None
    coefficients: Tensor | None = None
    grad_aux: Tensor | None = None
    grad_z: Tensor | None = None
    grad_score_sums: Tensor | None = None
    grad_z_sum: Tensor | None = None


def _grad_plan(
    logits: Tensor, given: _Incoming, score: str, aux: str, pre: bool, normalize: bool, probs: str
) -> tuple[_Rows, tuple[Any, ...]]:
    topk = 1 if given.chosen is None else given.chosen.shape[1]
    rows = _rows(logits, topk, 0, "grad")
    tiling = rows.tiling
    aux_grad = not (given.grad_scores is None and given.grad_aux is None and given.grad_score_sums is None)
    z_grad = not (given.grad_z is None and given.grad_z_sum is None)
    layout = (tiling.lanes, tiling.chunks, tiling.block_t, rows.fill, _WAYS)
    settings = (score, aux, pre, normalize, probs, aux_grad, z_grad, rows.contiguous)
    return rows, (logits.shape[1], topk, rows.keys, *settings, *layout)


def _launch_grad(
    grad: Tensor, logits: Tensor, given: _Incoming, planned: tuple[int, tuple[_Rows, tuple[Any, ...]]], scaling_factor: float | None
) -> Tensor:
    number, (rows, constants) = planned
    launch_as(
        number,
        route_rows_grad,
        (rows.programs * rows.tiles, 1, 1),
        (
            grad, logits, *given, logits.shape[0], *logits.stride(), _stride(given.padding_mask),
            contract.sets_of_sums(given.cu_seqlens), *_strides(given.grad_probs),
            *_strides(given.grad_scores), *_strides(given.grad_score_sums), 1.0 if scaling_factor is None else scaling_factor,
        ),
        constants,
        rows.tiling.num_warps,
        rows.tiling.registers,
    )  # fmt: skip
    return grad


def _plan_topk_grad(*fields: Any) -> tuple[_Rows, tuple[Any, ...]]:
    contract.check_router_topk_grad(*fields)
    grad_probs, logits, chosen, score_function, pre_softmax, normalize, _, probs_format = fields
    given = _Incoming(chosen=chosen, grad_probs=grad_probs)
    return _grad_plan(logits, given, score_function, score_function, pre_softmax, normalize, probs_format)


_topk_grad_plans = Plans(_plan_topk_grad)


def router_topk_grad(
    grad_probs: Tensor,
    logits: Tensor,
    chosen: Tensor,
    score_function: str,
    pre_softmax: bool,
    normalize: bool,
    scaling_factor: float | None,
    probs_format: str,
) -> Tensor:
    fields = (grad_probs, logits, chosen, score_function, pre_softmax, normalize, scaling_factor, probs_format)
    planned = _topk_grad_plans(*fields)
    grad = contract.fake_router_topk_grad(*fields)
    return _launch_grad(grad, logits, _Incoming(chosen=chosen, grad_probs=grad_probs), planned, scaling_factor)


def _plan_scores_grad(
    grad_scores: Tensor, logits: Tensor, padding_mask: Tensor | None, score_function: str
) -> tuple[_Rows, tuple[Any, ...]]:
    contract.check_router_scores_grad(grad_scores, logits, padding_mask, score_function)
    given = _Incoming(padding_mask=padding_mask, grad_scores=grad_scores)
    return _grad_plan(logits, given, score_function, score_function, False, True, "none")


_scores_grad_plans = Plans(_plan_scores_grad)


def router_scores_grad(grad_scores: Tensor, logits: Tensor, padding_mask: Tensor | None, score_function: str) -> Tensor:
    planned = _scores_grad_plans(grad_scores, logits, padding_mask, score_function)
    grad = contract.fake_router_scores_grad(grad_scores, logits, padding_mask, score_function)
    return _launch_grad(grad, logits, _Incoming(padding_mask=padding_mask, grad_scores=grad_scores), planned, None)


def _incoming(call: RouterGradCall) -> _Incoming:
    return _Incoming(
        chosen=call.chosen,
        grad_probs=call.grad_probs,
        padding_mask=call.padding_mask,
        cu_seqlens=call.cu_seqlens,
        padded=call.cu_seqlens if call.cu_seqlens_padded is None else call.cu_seqlens_padded,
        counts=call.counts,
        coefficients=call.coefficients.contiguous(),
        grad_aux=call.grad_aux,
        grad_z=call.grad_z,
        grad_score_sums=call.grad_score_sums,
        grad_z_sum=call.grad_z_sum,
    )


def _plan_router_grad(*fields: Any) -> tuple[_Rows, tuple[Any, ...]]:
    contract.check_router_grad(*fields)
    call = RouterGradCall(*fields)
    scoring = (call.score_function, call.aux_score_function, call.pre_softmax, call.normalize)
    return _grad_plan(call.logits, _incoming(call), *scoring, call.probs_format)


_router_grad_plans = Plans(_plan_router_grad)


@takes(RouterGradCall)
def router_grad(call: RouterGradCall) -> Tensor:
    planned = _router_grad_plans(*call)
    return _launch_grad(contract.fake_router_grad(*call), call.logits, _incoming(call), planned, call.scaling_factor)
