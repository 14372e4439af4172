"""Sample calls, refusals, padding, cost and benches of the aux-loss ops. T rows, E experts, K top-k, M folded sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_BENCH_SHAPES = ((65536, 64), (65536, 256), (65536, 512), (8192, 256))


# --- pieces of a call -------------------------------------------------------------------------------------------------------------


def _probs(rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Positive scores, at most 1, different in every row and column; made on the CPU so that all devices see the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator).to(device, dtype)


def _tokens(columns: int, device: torch.device, dtype: torch.dtype = torch.int64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (columns,), generator=generator).to(device, dtype)


def _mask(rows: int, folds: int | None, device: torch.device, seed: int = 2) -> Tensor:
    """About a third of the rows is padding: some in the middle, and (in every folded sequence) the last two."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand((rows,) if folds is None else (rows, folds), generator=generator) < 0.3
    mask[-2:] = True
    return mask.to(device)


def _one(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


# --- moe_aux_loss -----------------------------------------------------------------------------------------------------------------


def moe_aux_loss_samples(device: torch.device) -> Iterator[Sample]:
    def contents(columns: int, tokens_dtype: torch.dtype, **others: list[Any]) -> tuple[dict[str, Any], ...]:
        """Replays: other tokens per expert each time, and the k-th of every list in `others`."""
        replays = len(next(iter(others.values())))
        return tuple(
            {"tokens_per_expert": _tokens(columns, device, tokens_dtype, 10 + k)}
            | {name: values[k] for name, values in others.items()}
            for k in range(replays)
        )

    mask = _mask(16, None, device)
    masks = [torch.zeros_like(mask), torch.ones_like(mask), ~mask]
    counts = [_one(n, device, torch.int64) for n in (16, 0, 5)]
    yield Sample(
        "int count",
        (_probs(40, 8, device), _tokens(8, device), None, None, None, 8, 2, 40, 0.01),
        contents(8, torch.int64, probs=[_probs(40, 8, device, seed=3)]),
        compile=True,
    )
    yield Sample(
        "int64 count, coefficient and mask on the device",
        (_probs(16, 8, device), _tokens(8, device), _one(11, device, torch.int64), _one(0.01, device), mask, 8, 2, None, None),
        contents(
            8,
            torch.int64,
            total_num_tokens_tensor=counts,
            coeff_tensor=[_one(c, device) for c in (0.1, 1.0, 0.0)],
            padding_mask=masks,
        ),
        compile=True,
    )
    yield Sample(
        "int32 count, int32 tokens",
        (_probs(33, 12, device), _tokens(12, device, torch.int32), _one(33, device, torch.int32), None, None, 12, 3, None, 0.5),
        contents(12, torch.int32, total_num_tokens_tensor=[_one(n, device, torch.int32) for n in (1, 0)]),
    )
    yield Sample(
        "float32 count of one element, float tokens",
        (
            _probs(20, 4, device),
            _tokens(4, device, torch.float32),
            _one(19.5, device).reshape(1),
            _one(1.0, device),
            None,
            4,
            1,
            None,
            None,
        ),
        contents(4, torch.float32, total_num_tokens_tensor=[_one(n, device).reshape(1) for n in (7, 0)]),
    )
    for dtype, tokens_dtype in (
        (torch.bfloat16, torch.int16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
    ):
        name = str(dtype).removeprefix("torch.")
        yield Sample(
            f"{name}, strided tokens per expert",
            (
                _probs(40, 8, device, dtype),
                _tokens(16, device, tokens_dtype)[::2],
                None,
                None,
                _mask(40, None, device),
                8,
                4,
                31,
                0.01,
            ),
        )
    wide = _probs(17, 24, device)
    yield Sample(
        "folded sequences, one mask for all",
        (wide, _tokens(24, device), _one(6, device, torch.int64), None, _mask(17, None, device), 8, 2, None, 0.01),
        contents(24, torch.int64, padding_mask=[_mask(17, None, device, 5)]),
    )
    fold_mask = _mask(17, 3, device)
    yield Sample(
        "folded sequences, a mask each",
        (wide, _tokens(24, device), _one(6, device, torch.int64), None, fold_mask, 8, 2, None, 0.01),
        contents(24, torch.int64, padding_mask=[_mask(17, 3, device, 5), torch.ones_like(fold_mask)]),
        compile=True,
    )
    yield Sample(
        "transposed probs, transposed mask",
        (_probs(12, 19, device).t(), _tokens(12, device), None, None, _mask(19, 2, device).t().contiguous().t(), 6, 2, 19, 0.01),
    )
    yield Sample("sliced columns", (_probs(21, 20, device)[:, 3:15], _tokens(12, device), None, None, None, 12, 2, 21, 0.01))
    yield Sample(
        "every second row and column", (_probs(30, 16, device)[::2, ::2], _tokens(8, device), None, None, None, 8, 2, 15, 1.0)
    )
    yield Sample("expanded row", (_probs(1, 8, device).expand(9, 8), _tokens(8, device), None, None, None, 8, 2, 9, 0.01))
    yield Sample("count 0", (_probs(9, 8, device), _tokens(8, device), None, None, None, 8, 2, 0, 0.01))
    yield Sample("no row", (_probs(0, 8, device), _tokens(8, device), None, None, None, 8, 2, 5, 0.01))
    yield Sample("one expert", (_probs(5, 1, device), _tokens(1, device), None, None, None, 1, 1, 5, 0.01))
    on_device = _one(7, device, torch.int64), _one(0.01, device)
    yield Sample("wider than a block", (_probs(3, 1536, device), _tokens(1536, device), *on_device, None, 1536, 8, None, None))
    yield Sample("columns no power of two", (_probs(50, 132, device), _tokens(132, device), *on_device, None, 44, 3, None, None))


def moe_aux_loss_refusals(device: torch.device) -> Iterator[Refusal]:
    probs, tokens = _probs(6, 8, device), _tokens(8, device)

    def call(**other: Any) -> tuple[Any, ...]:
        args = {
            "probs": probs,
            "tokens_per_expert": tokens,
            "total_num_tokens_tensor": None,
            "coeff_tensor": None,
            "padding_mask": None,
            "num_experts": 8,
            "topk": 2,
            "total_num_tokens": 6,
            "coeff": 0.01,
        }
        return tuple((args | other).values())

    op = "moe_aux_loss: "
    yield Refusal(
        "probs of rank 3",
        call(probs=probs[None]),
        ValueError,
        f"{op}probs must have 2 dimensions [T, M*E], got shape [1, 6, 8]; reshape it",
    )
    yield Refusal(
        "integer probs",
        call(probs=probs.int()),
        TypeError,
        f"{op}probs must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it",
    )
    yield Refusal("no expert", call(num_experts=0), ValueError, f"{op}num_experts must be at least 1, got 0; pass a larger one")
    for topk in (0, 9):
        text = f"{op}topk must be from 1 to num_experts (8), got {topk}; pass the router's top-k"
        yield Refusal(f"topk {topk}", call(topk=topk), ValueError, text)
    yield Refusal(
        "columns no multiple of experts",
        call(num_experts=3),
        ValueError,
        f"{op}probs must have a multiple of num_experts (3) columns, got shape [6, 8]; fold whole sequences into columns: [T, M*E]",
    )
    yield Refusal(
        "no column",
        call(probs=probs[:, :0], tokens_per_expert=tokens[:0]),
        ValueError,
        f"{op}probs must have a multiple of num_experts (8) columns, got shape [6, 0]; fold whole sequences into columns: [T, M*E]",
    )
    yield Refusal(
        "tokens of another length",
        call(tokens_per_expert=tokens[:4]),
        ValueError,
        f"{op}tokens_per_expert must be [M*E] with one entry per column of probs (8), got shape [4];"
        " flatten it like the columns of probs",
    )
    yield Refusal(
        "tokens of a bad dtype",
        call(tokens_per_expert=tokens.bool()),
        TypeError,
        f"{op}tokens_per_expert must be int16 or int32 or int64 or float32 or bfloat16 or float16, got bool; cast it",
    )
    yield Refusal(
        "negative count",
        call(total_num_tokens=-1),
        ValueError,
        f"{op}total_num_tokens must be at least 0, got -1; pass a larger one",
    )
    yield Refusal(
        "no count",
        call(total_num_tokens=None),
        ValueError,
        f"{op}total_num_tokens must be given either as total_num_tokens (an int) or as total_num_tokens_tensor, got neither;"
        " pass exactly one and None for the other",
    )
    yield Refusal(
        "two coefficients",
        call(coeff_tensor=_one(0.01, device)),
        ValueError,
        f"{op}coeff must be given either as coeff (a float) or as coeff_tensor, got both; pass exactly one and None for the other",
    )
    yield Refusal(
        "count of a bad dtype",
        call(total_num_tokens=None, total_num_tokens_tensor=_one(6, device, torch.int16)),
        TypeError,
        f"{op}total_num_tokens must be int32 or int64 or float32, got int16; cast it",
    )
    yield Refusal(
        "several counts",
        call(total_num_tokens=None, total_num_tokens_tensor=tokens),
        ValueError,
        f"{op}total_num_tokens must have one element, got shape [8]; pass a 0-d tensor",
    )
    yield Refusal(
        "coefficient of a bad dtype",
        call(coeff=None, coeff_tensor=_one(0.01, device, torch.bfloat16)),
        TypeError,
        f"{op}coeff must be float32, got bfloat16; cast it",
    )
    yield Refusal(
        "mask of a bad dtype",
        call(padding_mask=tokens[:6]),
        TypeError,
        f"{op}padding_mask must be bool, True on padding rows, got int64; cast it with .bool()",
    )
    for name, shape in (("mask of another length", (5,)), ("mask of other sequences", (6, 2))):
        yield Refusal(
            name,
            call(padding_mask=torch.zeros(shape, dtype=torch.bool, device=device)),
            ValueError,
            f"{op}padding_mask must be [T] or [T, M] with T = 6 rows and M = 1 folded sequences, got shape {list(shape)};"
            " flatten it like the rows of probs",
        )


def moe_aux_loss_padding(*args: Any) -> Padding:
    mask = args[4]
    return Padding({} if mask is None else {"probs": PadRows(_in_every_sequence(mask))}, (None, None))


def _in_every_sequence(mask: Tensor) -> Tensor:
    """Rows that are padding in all folded sequences."""
    return mask if mask.dim() == 1 else mask.all(1)


def moe_aux_loss_cost(*args: Any) -> Cost:
    probs, tokens_per_expert, _, _, mask, *_ = args
    read = _bytes(probs) + _bytes(tokens_per_expert) + (0 if mask is None else _bytes(mask))
    return Cost(read, 2 * accumulation_dtype(probs.dtype).itemsize, 2.0 * probs.numel())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def moe_aux_loss_benches(device: torch.device) -> Iterator[Bench]:
    for rows, experts in _BENCH_SHAPES:

        def make(rows: int = rows, experts: int = experts) -> tuple[Any, ...]:
            scores = torch.rand(rows, experts, device=device).softmax(-1)
            tokens = torch.randint(1, 1000, (experts,), device=device)
            return scores, tokens, _one(rows, device, torch.int64), None, None, experts, 8, None, 0.01

        yield Bench(f"T={rows} E={experts}", make, _loss_by_hand)


def _loss_by_hand(*args: Any) -> tuple[Tensor, Tensor]:
    probs, tokens_per_expert, count, _, _, num_experts, topk, _, coeff = args
    coefficient = num_experts * coeff / (topk * count * count)
    return torch.sum(probs.sum(0) * tokens_per_expert) * coefficient, coefficient


# --- moe_aux_loss_grad ------------------------------------------------------------------------------------------------------------


def moe_aux_loss_grad_samples(device: torch.device) -> Iterator[Sample]:
    one, coefficient = _one(1.0, device), _one(0.003, device)
    mask = _mask(13, None, device)
    fold_mask = _mask(13, 3, device)
    yield Sample(
        "no mask",
        (one, coefficient, _tokens(8, device), None, 37, torch.float32),
        (
            {"grad_loss": _one(-2.5, device), "tokens_per_expert": _tokens(8, device, seed=4)},
            {"grad_loss": one, "coefficient": _one(0.0, device)},
        ),
        compile=True,
    )
    yield Sample(
        "mask",
        (_one(3.0, device), coefficient, _tokens(8, device, torch.int32), mask, 13, torch.float32),
        ({"padding_mask": ~mask}, {"padding_mask": torch.ones_like(mask)}, {"padding_mask": torch.zeros_like(mask)}),
        compile=True,
    )
    yield Sample(
        "folded sequences, a mask each",
        (_one(3.0, device), coefficient, _tokens(12, device), fold_mask, 13, torch.float32),
        ({"padding_mask": ~fold_mask},),
    )
    for dtype, tokens_dtype in ((torch.bfloat16, torch.int16), (torch.float16, torch.bfloat16)):
        name = str(dtype).removeprefix("torch.")
        yield Sample(
            f"{name}, strided tokens per expert", (one, coefficient, _tokens(16, device, tokens_dtype)[::2], mask, 13, dtype)
        )
    yield Sample("one element each", (one.reshape(1), coefficient.reshape(1, 1), _tokens(8, device), None, 3, torch.float32))
    yield Sample("coefficient 0", (one, _one(0.0, device), _tokens(8, device), None, 9, torch.float32))
    yield Sample("no row", (one, coefficient, _tokens(8, device), None, 0, torch.float32))
    yield Sample("one expert", (one, coefficient, _tokens(1, device), None, 5, torch.float32))
    yield Sample("wider than a block", (one, coefficient, _tokens(1536, device), None, 3, torch.float32))


def moe_aux_loss_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    one, tokens = _one(1.0, device), _tokens(8, device)
    mask = torch.zeros(6, 3, dtype=torch.bool, device=device)
    op = "moe_aux_loss_grad: "
    yield Refusal(
        "gradient of several elements",
        (one.expand(2), one, tokens, None, 6, torch.float32),
        ValueError,
        f"{op}grad_loss must have one element, got shape [2]; pass a 0-d tensor",
    )
    yield Refusal(
        "coefficient of a bad dtype",
        (one, one.bfloat16(), tokens, None, 6, torch.float32),
        TypeError,
        f"{op}coefficient must be float32, got bfloat16; cast it",
    )
    yield Refusal(
        "tokens of rank 2",
        (one, one, tokens[None], None, 6, torch.float32),
        ValueError,
        f"{op}tokens_per_expert must have 1 dimension [M*E], got shape [1, 8]; reshape it",
    )
    yield Refusal(
        "integer dtype",
        (one, one, tokens, None, 6, torch.int32),
        TypeError,
        f"{op}dtype must be float32 or bfloat16 or float16, got int32 on {device.type}; pass the dtype of probs",
    )
    yield Refusal(
        "negative rows",
        (one, one, tokens, None, -1, torch.float32),
        ValueError,
        f"{op}rows must be at least 0, got -1; pass a larger one",
    )
    yield Refusal(
        "mask of other sequences",
        (one, one, tokens, mask, 6, torch.float32),
        ValueError,
        f"{op}padding_mask must be [T, M] with M a divisor of the 8 columns, got shape [6, 3]; pass the mask of the forward",
    )


def moe_aux_loss_grad_padding(*args: Any) -> Padding:
    _, _, tokens_per_expert, mask, rows, _ = args
    if mask is None:
        return Padding(outputs=(PadRows(torch.zeros(rows, dtype=torch.bool, device=tokens_per_expert.device)),))
    return Padding(outputs=(PadRows(_in_every_sequence(mask)),))


def moe_aux_loss_grad_cost(*args: Any) -> Cost:
    _, _, tokens_per_expert, mask, rows, dtype = args
    read = 8 + _bytes(tokens_per_expert) + (0 if mask is None else _bytes(mask))
    return Cost(read, rows * tokens_per_expert.numel() * dtype.itemsize, 2.0 * tokens_per_expert.numel())


def moe_aux_loss_grad_benches(device: torch.device) -> Iterator[Bench]:
    for rows, experts in _BENCH_SHAPES:

        def make(rows: int = rows, experts: int = experts) -> tuple[Any, ...]:
            tokens = torch.randint(1, 1000, (experts,), device=device)
            return _one(1.0, device), _one(1e-10, device), tokens, None, rows, torch.float32

        yield Bench(f"T={rows} E={experts}", make, _grad_by_hand)


def _grad_by_hand(*args: Any) -> Tensor:
    grad_loss, coefficient, tokens_per_expert, _, rows, dtype = args
    return (coefficient * tokens_per_expert * grad_loss).to(dtype).expand(rows, -1).contiguous()
