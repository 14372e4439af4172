"""Sample calls, refusals, padding, cost and benches of the sequence-wise aux loss. T rows, E experts, K top-k, B sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype
from thdops.ops.balancing import reference
from thdops.ops.balancing.samples import as_bitmap, as_indices, as_mask, one, uniform
from thdops.ops.layouts import layout
from thdops.ops.padding.reference import padding_mask
from thdops.ops.padding.samples import cu_refusals, metadata, metadata_replays, size_of
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_INT32, _INT64 = torch.int32, torch.int64


# --- moe_seq_aux_loss -------------------------------------------------------------------------------------------------------------


def moe_seq_aux_loss_samples(device: torch.device) -> Iterator[Sample]:
    base = layout("gaps and tail", device)
    rows = base.total
    replays = tuple(
        metadata | {"scores": uniform(rows, 8, device, seed=k), "routing": as_mask(rows, 8, 2, device, seed=k)}
        for k, metadata in enumerate(metadata_replays(base))
    )
    metadata = (base.cu_seqlens, base.padded)
    yield Sample(
        "mask, gaps and tail",
        (uniform(rows, 8, device), as_mask(rows, 8, 2, device), *metadata, None, 8, 2, "mean", 0.01),
        replays,
        compile=True,
    )
    empties = layout("empty sequences", device)
    yield Sample(
        "mask, empty sequences",
        (
            uniform(empties.total, 12, device), as_mask(empties.total, 12, 3, device), empties.cu_seqlens, empties.padded, None,
            12, 3, "mean", 0.01,
        ),
        metadata_replays(empties),
    )  # fmt: skip
    sentinels = layout("sentinels", device, _INT64)
    scores, ids = uniform(sentinels.total, 8, device), as_indices(sentinels.total, 8, 2, device, _INT32)
    yield Sample(
        "indices, sentinels, coefficient on the device, a loss each",
        (scores, ids, sentinels.cu_seqlens, sentinels.padded, one(0.01, device), 8, 2, "none", None),
        tuple(m | {"coeff_tensor": one(c, device)} for m, c in zip(metadata_replays(sentinels), (0.1, 0.0, 1.0, 0.5), strict=True)),
        compile=True,
    )
    tail = layout("tail", device, _INT64)
    for dtype in (torch.bfloat16, torch.float16):
        scores, bits = uniform(tail.total, 20, device, dtype), as_bitmap(tail.total, 20, 4, device)
        yield Sample(f"bitmap, tail, {dtype}", (scores, bits, tail.cu_seqlens, None, None, 20, 4, "sum", 1.0))
    transposed = uniform(8, rows, device).t(), as_mask(rows, 8, 2, device).t().contiguous().t()
    yield Sample("transposed", (*transposed, *metadata, one(0.5, device).reshape(1), 8, 2, "sum", None))
    sliced = uniform(rows, 20, device)[:, 3:15], as_mask(rows, 24, 2, device)[:, ::2]
    yield Sample("sliced columns", (*sliced, *metadata, None, 12, 2, "none", 1.0))
    for name in ("rows before the first", "no valid row", "no sequence"):
        other = layout(name, device)
        call = uniform(other.total, 8, device), as_mask(other.total, 8, 2, device), other.cu_seqlens, other.padded
        yield Sample(name, (*call, None, 8, 2, "mean", 1.0), metadata_replays(other))
    yield Sample("coefficient 0", (uniform(rows, 8, device), as_mask(rows, 8, 2, device), *metadata, None, 8, 2, "sum", 0.0))
    yield Sample("no row", (uniform(0, 8, device), as_mask(0, 8, 2, device), metadata[0] * 0, None, None, 8, 2, "mean", 1.0))
    yield Sample("one expert", (uniform(rows, 1, device), as_mask(rows, 1, 1, device), *metadata, None, 1, 1, "mean", 1.0))
    wide = uniform(rows, 300, device), as_indices(rows, 300, 3, device)
    yield Sample("wider than a block", (*wide, *metadata, None, 300, 3, "mean", 1.0))


def moe_seq_aux_loss_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "moe_seq_aux_loss"
    scores, mask = uniform(25, 8, device), as_mask(25, 8, 2, device)
    cu, padded = metadata(device)

    def call(**other: Any) -> tuple[Any, ...]:
        args = {
            "scores": scores,
            "routing": mask,
            "cu_seqlens": cu,
            "cu_seqlens_padded": padded,
            "coeff_tensor": None,
            "num_experts": 8,
            "topk": 2,
            "reduction": "mean",
            "coeff": 0.01,
        }
        return tuple((args | other).values())

    yield Refusal(
        "other experts",
        call(num_experts=4),
        ValueError,
        f"{op}: scores must have a column per expert (4), got shape [25, 8]; pass the scores over all experts: [T, E]",
    )
    for topk in (0, 9):
        text = f"{op}: topk must be from 1 to num_experts (8), got {topk}; pass the router's top-k"
        yield Refusal(f"topk {topk}", call(topk=topk), ValueError, text)
    yield Refusal(
        "integer scores",
        call(scores=scores.int()),
        TypeError,
        f"{op}: scores must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it",
    )
    yield Refusal(
        "routing of other rows",
        call(routing=mask[:24]),
        ValueError,
        f"{op}: routing must have the rows of scores (25), got shape [24, 8]; pass both of the same tokens",
    )
    yield Refusal(
        "a mask of other experts",
        call(routing=mask[:, :7]),
        ValueError,
        f"{op}: routing must have a column per expert (8), got shape [25, 7]; pass the mask [T, E], and E or None as num_experts",
    )
    yield Refusal(
        "unknown reduction",
        call(reduction="max"),
        ValueError,
        f"{op}: reduction must be one of mean, sum, none, got 'max'; choose one",
    )
    yield Refusal(
        "two coefficients",
        call(coeff_tensor=one(0.01, device)),
        ValueError,
        f"{op}: coeff must be given either as coeff (a float) or as coeff_tensor, got both;"
        " pass exactly one and None for the other",
    )
    yield from cu_refusals(op, device, lambda c, p: call(cu_seqlens=c, cu_seqlens_padded=p))


def moe_seq_aux_loss_padding(*args: Any) -> Padding:
    scores, _, cu_seqlens, cu_seqlens_padded, *_ = args
    rows = PadRows(padding_mask(cu_seqlens, cu_seqlens_padded, scores.shape[0]))
    return Padding({"scores": rows, "routing": rows}, (None, None, None))


def moe_seq_aux_loss_cost(*args: Any) -> Cost:
    scores, routing, cu_seqlens, cu_seqlens_padded, *_ = args
    written = (cu_seqlens.shape[0] - 1) * scores.shape[1] * accumulation_dtype(scores.dtype).itemsize
    return Cost(size_of(scores, routing, cu_seqlens, cu_seqlens_padded), written, 2.0 * scores.numel())


_BENCH_ROWS, _BENCH_EXPERTS, _BENCH_TOPK, _BENCH_SEQUENCES = 65536, 256, 8, 128
_BENCH = f"T={_BENCH_ROWS} E={_BENCH_EXPERTS} B={_BENCH_SEQUENCES}"


def _bench_metadata(device: torch.device) -> Tensor:
    """Sequences of 64 and of 576 rows, back to back."""
    length = _BENCH_ROWS // _BENCH_SEQUENCES
    ends = torch.arange(_BENCH_SEQUENCES + 1, device=device) * length
    shift = torch.arange(_BENCH_SEQUENCES + 1, device=device) % 8 * (length // 8)
    return torch.where((ends > 0) & (ends < _BENCH_ROWS), ends + shift, ends).int()


def moe_seq_aux_loss_benches(device: torch.device) -> Iterator[Bench]:
    def make(indexed: bool) -> tuple[Any, ...]:
        choose = as_indices if indexed else as_mask
        routing = choose(_BENCH_ROWS, _BENCH_EXPERTS, _BENCH_TOPK, device)
        scores = torch.rand(_BENCH_ROWS, _BENCH_EXPERTS, device=device)
        return scores, routing, _bench_metadata(device), None, None, _BENCH_EXPERTS, _BENCH_TOPK, "mean", 0.01

    yield Bench(f"mask, {_BENCH}", lambda: make(False), _loss_by_hand)
    yield Bench(f"indices, {_BENCH}", lambda: make(True), _loss_by_hand)


def _sequence_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    # bucketize, not searchsorted: Inductor of torch 2.11 compiles the latter wrong on CUDA for int32 boundaries and int64 rows.
    return torch.bucketize(torch.arange(rows, device=cu_seqlens.device), cu_seqlens[1:], right=True)


def _loss_by_hand(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores, routing, cu_seqlens, _, _, num_experts, topk, _, coeff = args
    sequence = _sequence_of_rows(cu_seqlens, scores.shape[0])
    if routing.dtype != torch.bool:
        inside = (routing >= 0) & (routing < num_experts)
        routing = torch.zeros_like(scores, dtype=torch.int64).scatter_add_(1, routing.clamp(0, num_experts - 1), inside.long())
    tokens = cu_seqlens.diff()
    zeros = scores.new_zeros(tokens.shape[0], num_experts)
    score_sums, counts = zeros.index_add(0, sequence, scores), zeros.index_add(0, sequence, routing.to(scores.dtype))
    slopes = (coeff * num_experts / topk / tokens / tokens)[:, None] * counts
    losses = (slopes * score_sums).sum(1)
    return losses.mean(), slopes, torch.full_like(losses[0], 1 / tokens.shape[0])


# --- moe_seq_aux_loss_grad --------------------------------------------------------------------------------------------------------


def _grad_call(call: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The arguments of the gradient that follow from those of a forward."""
    loss, slopes, share = reference.moe_seq_aux_loss(*call)
    scores, _, cu_seqlens, cu_seqlens_padded, *_ = call
    grad_loss = uniform(1, max(loss.numel(), 1), loss.device, seed=9)[0, : loss.numel()].reshape(loss.shape) - 0.3
    return grad_loss, slopes, share, cu_seqlens, cu_seqlens_padded, scores.shape[0], dtype


def moe_seq_aux_loss_grad_samples(device: torch.device) -> Iterator[Sample]:
    for sample in moe_seq_aux_loss_samples(device):
        if sample.args[0].dtype == torch.float32 and sample.name not in ("transposed", "sliced columns"):
            replays = tuple({k: v for k, v in replay.items() if k.startswith("cu_seqlens")} for replay in sample.replays)
            yield Sample(sample.name, _grad_call(sample.args), replays, sample.compile)
        elif sample.args[0].dtype != torch.float32:
            yield Sample(sample.name, _grad_call(sample.args, sample.args[0].dtype))
    base = layout("gaps and tail", device)
    call = uniform(base.total, 8, device), as_mask(base.total, 8, 2, device), base.cu_seqlens, base.padded, None, 8, 2, "none", 1.0
    grad_loss, slopes, *rest = _grad_call(call)
    strided = torch.stack((grad_loss, grad_loss), 1)[:, 0], slopes.t().contiguous().t()
    yield Sample("strided gradient, transposed slopes", (*strided, *rest))
    yield Sample("a gradient of 0", (grad_loss * 0, slopes, *rest))


def moe_seq_aux_loss_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "moe_seq_aux_loss_grad"
    cu, padded = metadata(device)
    ones = one(1.0, device)
    slopes = uniform(4, 8, device)

    def call(**other: Any) -> tuple[Any, ...]:
        args = {
            "grad_loss": ones,
            "slopes": slopes,
            "share": ones,
            "cu_seqlens": cu,
            "cu_seqlens_padded": padded,
            "rows": 25,
            "dtype": torch.float32,
        }
        return tuple((args | other).values())

    yield Refusal(
        "slopes of other sequences",
        call(slopes=slopes[:3]),
        ValueError,
        f"{op}: slopes must be [B, E] with B = 4 sequences, got shape [3, 8]; pass what the forward returned",
    )
    yield Refusal(
        "gradient of other sequences",
        call(grad_loss=ones.expand(3)),
        ValueError,
        f"{op}: grad_loss must be 0-d or [B] with B = 4 sequences, got shape [3]; pass the gradient of the loss",
    )
    yield Refusal("share of a bad dtype", call(share=ones.half()), TypeError, f"{op}: share must be float32, got float16; cast it")
    yield Refusal("negative rows", call(rows=-1), ValueError, f"{op}: rows must be at least 0, got -1; pass a larger one")
    yield Refusal(
        "integer dtype",
        call(dtype=_INT32),
        TypeError,
        f"{op}: dtype must be float32 or bfloat16 or float16, got int32 on {device.type}; pass the dtype of scores",
    )
    yield from cu_refusals(op, device, lambda c, p: call(cu_seqlens=c, cu_seqlens_padded=p))


def moe_seq_aux_loss_grad_padding(*args: Any) -> Padding:
    _, _, _, cu_seqlens, cu_seqlens_padded, rows, _ = args
    return Padding(outputs=(PadRows(padding_mask(cu_seqlens, cu_seqlens_padded, rows)),))


def moe_seq_aux_loss_grad_cost(*args: Any) -> Cost:
    grad_loss, slopes, share, cu_seqlens, cu_seqlens_padded, rows, dtype = args
    written = rows * slopes.shape[1] * dtype.itemsize
    return Cost(size_of(grad_loss, slopes, share, cu_seqlens, cu_seqlens_padded), written, 1.0 * rows * slopes.shape[1])


def moe_seq_aux_loss_grad_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        slopes = torch.rand(_BENCH_SEQUENCES, _BENCH_EXPERTS, device=device)
        share = one(1 / _BENCH_SEQUENCES, device)
        return one(1.0, device), slopes, share, _bench_metadata(device), None, _BENCH_ROWS, torch.float32

    yield Bench(_BENCH, make, _grad_by_hand)


def _grad_by_hand(*args: Any) -> Tensor:
    grad_loss, slopes, share, cu_seqlens, _, rows, dtype = args
    return (grad_loss * share * slopes).to(dtype)[_sequence_of_rows(cu_seqlens, rows)]
