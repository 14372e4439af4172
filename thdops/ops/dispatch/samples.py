"""Sample calls, refusals, padding, cost and benches of the dispatch ops.

T rows (tokens), E experts, K top-k. Ids of -1, of E and far outside stand for no expert; some tokens have none at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from thdops.ops.dispatch import reference
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_BENCH_TOKENS = (65536, 8192)
_BENCH_WIDTH, _BENCH_TOPK, _BENCH_EXPERTS = 2048, 8, 128


# --- pieces of a call -------------------------------------------------------------------------------------------------------------


def _ids(
    tokens: int, topk: int, experts: int, device: torch.device, dtype: torch.dtype = torch.int64, seed: int = 0, none: float = 0.2
) -> Tensor:
    """Experts of each token, a share `none` of the tokens without any and as many single pairs; the same on all devices."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, topk), generator=generator)
    outside = torch.tensor([-1, experts, torch.iinfo(dtype).min, torch.iinfo(dtype).max])
    other = outside[torch.randint(0, 4, (tokens, topk), generator=generator)]
    without = (torch.rand(tokens, topk, generator=generator) < none) | (torch.rand(tokens, 1, generator=generator) < none)
    return torch.where(without, other, ids).to(device, dtype)


def _values(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 4 - 2).to(device, dtype)


def _map(ids: Tensor, experts: int) -> Tensor:
    return reference.permute_tokens(ids[:, 0], ids, experts)[2]


def _tokens_without(map: Tensor) -> PadRows:
    """Tokens that have no expert."""
    return PadRows((map < 0).all(1))


def _rows_without(map: Tensor) -> PadRows:
    """Rows that belong to no expert: the last ones."""
    rows = torch.arange(map.numel(), device=map.device)
    return PadRows(rows >= (map >= 0).sum())


def _bytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


# --- permute_tokens ---------------------------------------------------------------------------------------------------------------


def permute_tokens_samples(device: torch.device) -> Iterator[Sample]:
    def contents(tokens: int, topk: int, experts: int, dtype: torch.dtype = torch.int64) -> tuple[dict[str, Any], ...]:
        """Replays: another routing, every token at one expert, none at any."""
        none = torch.full((tokens, topk), -1, dtype=dtype, device=device)
        return (
            {"indices": _ids(tokens, topk, experts, device, dtype, seed=7)},
            {"indices": torch.full_like(none, experts - 1)},
            {"indices": none},
        )

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _values(*shape, device=device, dtype=dtype)

    yield Sample("fp32", (new(16, 24), _ids(16, 3, 6, device), 6), contents(16, 3, 6), compile=True)
    yield Sample("fp32, other sizes", (new(13, 20), _ids(13, 2, 5, device), 5))
    yield Sample(
        "bf16 [T, H, D], int32",
        (new(10, 2, 8, dtype=torch.bfloat16), _ids(10, 4, 8, device, torch.int32), 8),
        contents(10, 4, 8, torch.int32),
        compile=True,
    )
    yield Sample(
        "fp16 slice, int16, one choice",
        (new(12, 9, dtype=torch.float16)[:, 1:6], _ids(12, 1, 3, device, torch.int16), 3),
        contents(12, 1, 3, torch.int16),
    )
    yield Sample("fp32 transposed, one expert", (new(8, 11).t(), _ids(11, 2, 1, device), 1))
    yield Sample("fp32 expanded, more experts than pairs", (new(1, 6).expand(5, 6), _ids(5, 2, 40, device), 40))
    yield Sample("several chunks of pairs", (new(270, 4), _ids(270, 4, 7, device, torch.int32), 7))
    yield Sample("every pair has an expert", (new(9, 130), _ids(9, 2, 4, device, none=0.0), 4))
    yield Sample("every other row and column", (new(14, 12)[::2, ::2], _ids(14, 4, 4, device)[::2, ::2], 4))
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.bool):
        name = str(dtype).removeprefix("torch.")
        yield Sample(f"{name}, width 5", (new(7, 5, dtype=dtype), _ids(7, 2, 4, device), 4))
    yield Sample("int64 [T]", (torch.arange(1, 12, device=device), _ids(11, 3, 4, device), 4))
    yield Sample("zero width", (new(5, 0), _ids(5, 2, 4, device), 4))
    yield Sample("no token", (new(0, 8), _ids(0, 2, 4, device), 4))


def permute_tokens_refusals(device: torch.device) -> Iterator[Refusal]:
    x, ids = _values(6, 8, device=device), _ids(6, 2, 4, device)
    op = "permute_tokens: "
    yield Refusal(
        "a scalar",
        (x[0, 0], ids, 4),
        ValueError,
        f"{op}x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0",
    )
    if hasattr(torch, "float8_e8m0fnu"):
        yield Refusal(
            "a dtype without a zero",
            (x.to(torch.float8_e8m0fnu), ids, 4),
            TypeError,
            f"{op}x must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only",
        )
    fix = "pass expert ids [T, K], from router_topk(..., routing='indices')"
    for name, wrong, got in (("float ids", ids.float(), "float32"), ("a mask for ids", ids > 0, "bool")):
        text = f"{op}indices must be int16 or int32 or int64, got {got}; {fix}"
        yield Refusal(name, (x, wrong, 4), TypeError, text)
    yield Refusal(
        "ids of rank 1", (x, ids[:, 0], 4), ValueError, f"{op}indices must have 2 dimensions [T, K], got shape [6]; reshape it"
    )
    yield Refusal(
        "no choice",
        (x, ids[:, :0], 4),
        ValueError,
        f"{op}indices must have at least one column [T, K], got shape [6, 0]; pass the router's top-k",
    )
    yield Refusal(
        "2**31 pairs",
        (x[:, 0][:1].expand(2**20), ids[:1, :1].expand(2**20, 2**11), 4),
        ValueError,
        f"{op}indices must have fewer than 2**31 elements, got 2147483648; dispatch fewer tokens at a time",
    )
    yield Refusal("fewer ids", (x, ids[:5], 4), ValueError, f"{op}indices must have one row per row of x (6), got 5; pass [T, K]")
    yield Refusal("no expert", (x, ids, 0), ValueError, f"{op}num_experts must be at least 1, got 0; pass a larger one")
    if device.type == "cuda":
        yield Refusal(
            "ids on another device",
            (x, ids.cpu(), 4),
            ValueError,
            f"{op}indices must be on the device of x ({x.device}), got cpu; move it",
        )


def permute_tokens_padding(x: Tensor, indices: Tensor, num_experts: int) -> Padding:
    map = _map(indices, num_experts)
    return Padding({"x": _tokens_without(map)}, (_rows_without(map), None, None))


def permute_tokens_cost(x: Tensor, indices: Tensor, num_experts: int) -> Cost:
    copies = indices.shape[1]
    return Cost(read=_bytes(x, indices), written=_bytes(x) * copies + 4 * num_experts + 4 * indices.numel())


def _bench_name(tokens: int) -> str:
    return f"T={tokens} H={_BENCH_WIDTH} K={_BENCH_TOPK} E={_BENCH_EXPERTS} bf16"


def _bench_ids(tokens: int, device: torch.device) -> Tensor:
    """Distinct experts of each token."""
    return torch.rand(tokens, _BENCH_EXPERTS, device=device).topk(_BENCH_TOPK).indices


def permute_tokens_benches(device: torch.device) -> Iterator[Bench]:
    for tokens in _BENCH_TOKENS:

        def make(tokens: int = tokens) -> tuple[Any, ...]:
            x = torch.randn(tokens, _BENCH_WIDTH, device=device, dtype=torch.bfloat16)
            return x, _bench_ids(tokens, device), _BENCH_EXPERTS

        yield Bench(_bench_name(tokens), make, _permute_by_hand)


def _permute_by_hand(x: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = indices.flatten()
    number = ids.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device).scatter_add_(0, ids, torch.ones_like(ids))
    rows = x.index_select(0, number // indices.shape[1])
    return rows, counts.cumsum(0).int(), number.argsort().int().view_as(indices)


# --- unpermute_tokens -------------------------------------------------------------------------------------------------------------


def unpermute_tokens_samples(device: torch.device) -> Iterator[Sample]:
    def contents(tokens: int, topk: int, experts: int) -> tuple[dict[str, Any], ...]:
        """Replays: another routing, none at all."""
        ids = _ids(tokens, topk, experts, device, seed=7)
        return {"map": _map(ids, experts)}, {"map": _map(torch.full_like(ids, -1), experts)}

    for name, rows, map, weights in _calls(device):
        tokens, topk = map.shape
        replays = contents(tokens, topk, 6) if name in _COMPILED else ()
        yield Sample(name, (rows, map, weights), replays, compile=name in _COMPILED)
    yield Sample("no row", (_values(0, 8, device=device), _map(_ids(0, 2, 4, device), 4), _values(0, 2, device=device)))


_COMPILED = ("fp32", "bf16 [T, H, D], no weights")


def _calls(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """(name, rows, map, weights)."""

    def new(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
        return _values(*shape, device=device, dtype=dtype, seed=seed)

    def map(tokens: int, topk: int, experts: int, none: float = 0.2) -> Tensor:
        return _map(_ids(tokens, topk, experts, device, none=none), experts)

    half = torch.bfloat16
    yield "fp32", new(48, 24), map(16, 3, 6), new(16, 3, seed=2)
    yield "fp32, other sizes", new(26, 20), map(13, 2, 5), new(13, 2, seed=2)
    yield "bf16 [T, H, D], no weights", new(40, 2, 8, dtype=half), map(10, 4, 8), None
    yield "bf16, fp32 weights", new(30, 130, dtype=half), map(10, 3, 8), new(10, 3, seed=2)
    yield "fp32, bf16 weights, transposed", new(6, 22).t(), map(11, 2, 4), new(2, 11, dtype=half, seed=2).t()
    yield "fp16 slice, one choice", new(12, 9, dtype=torch.float16)[:, 1:6], map(12, 1, 3), new(12, 1, dtype=torch.float16, seed=2)
    yield "more choices than are in flight", new(60, 7), map(5, 12, 20), new(5, 12, seed=2)
    yield "every pair has an expert", new(18, 16), map(9, 2, 4, none=0.0), new(9, 2, seed=2)
    yield "[T*K], every other element", new(56)[::2], map(7, 4, 4), new(7, 8, seed=2)[:, ::2]
    yield "expanded rows and weights", new(1, 6).expand(10, 6), map(5, 2, 4), new(1, 1).expand(5, 2)
    yield "zero width", new(10, 0), map(5, 2, 4), new(5, 2)


def unpermute_tokens_refusals(device: torch.device) -> Iterator[Refusal]:
    rows, map, weights = _values(12, 8, device=device), _map(_ids(6, 2, 4, device), 4), _values(6, 2, device=device)
    op = "unpermute_tokens: "
    yield Refusal(
        "a scalar",
        (rows[0, 0], map, None),
        ValueError,
        f"{op}rows must have at least one dimension [T*K, ...], got a 0-d tensor; rows are dimension 0",
    )
    yield Refusal(
        "integer rows",
        (rows.int(), map, None),
        TypeError,
        f"{op}rows must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it",
    )
    yield Refusal(
        "ids for a map",
        (rows, map.long(), None),
        TypeError,
        f"{op}map must be int32, got int64; pass the map that permute_tokens returned",
    )
    yield Refusal(
        "a flat map", (rows, map.flatten(), None), ValueError, f"{op}map must have 2 dimensions [T, K], got shape [12]; reshape it"
    )
    yield Refusal(
        "rows left out",
        (rows[:10], map, None),
        ValueError,
        f"{op}rows must have one row per element of map (12), got 10; pass all rows that permute_tokens made",
    )
    yield Refusal(
        "weights of another shape",
        (rows, map, weights[:, :1]),
        ValueError,
        f"{op}weights must have the shape of map [6, 2], got [6, 1]; pass one per pair, [T, K]",
    )
    yield Refusal(
        "integer weights",
        (rows, map, weights.int()),
        TypeError,
        f"{op}weights must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it",
    )
    if device.type == "cuda":
        yield Refusal(
            "map on another device",
            (rows, map.cpu(), None),
            ValueError,
            f"{op}map must be on the device of rows ({rows.device}), got cpu; move it",
        )


def unpermute_tokens_padding(rows: Tensor, map: Tensor, weights: Tensor | None = None) -> Padding:
    inputs = {"rows": _rows_without(map)} | ({} if weights is None else {"weights": _tokens_without(map)})
    return Padding(inputs, (_tokens_without(map),))


def unpermute_tokens_cost(rows: Tensor, map: Tensor, weights: Tensor | None = None) -> Cost:
    share = (map >= 0).float().mean().item() if map.numel() else 0.0
    return Cost(share * _bytes(rows) + _bytes(map, weights), _bytes(rows) / map.shape[1], 2.0 * rows.numel())


def unpermute_tokens_benches(device: torch.device) -> Iterator[Bench]:
    for tokens in _BENCH_TOKENS:

        def make(tokens: int = tokens) -> tuple[Any, ...]:
            rows = torch.randn(tokens * _BENCH_TOPK, _BENCH_WIDTH, device=device, dtype=torch.bfloat16)
            map = _map(_bench_ids(tokens, device), _BENCH_EXPERTS)
            return rows, map, torch.rand(tokens, _BENCH_TOPK, device=device)

        yield Bench(_bench_name(tokens), make, _unpermute_by_hand)


def _unpermute_by_hand(rows: Tensor, map: Tensor, weights: Tensor) -> Tensor:
    each = rows.index_select(0, map.flatten()).view(*map.shape, -1)
    return (each * weights[..., None]).sum(1).to(rows.dtype)


# --- unpermute_tokens_grad --------------------------------------------------------------------------------------------------------


def unpermute_tokens_grad_samples(device: torch.device) -> Iterator[Sample]:
    def gradient(rows: Tensor, map: Tensor) -> Tensor:
        return _values(map.shape[0], *rows.shape[1:], device=device, dtype=rows.dtype, seed=3)

    for name, rows, map, weights in _calls(device):
        tokens, topk = map.shape
        other = {"map": _map(_ids(tokens, topk, 6, device, seed=7), 6)}
        replays = (other, {"map": ~torch.arange(map.numel(), dtype=torch.int32, device=device).view_as(map)})
        kept = None if weights is None else rows
        compiled = name in _COMPILED
        yield Sample(name, (gradient(rows, map), kept, map, weights), replays if compiled else (), compile=compiled)
    map, weights = _map(_ids(9, 2, 4, device), 4), _values(9, 2, device=device, seed=2)
    yield Sample("weights without a gradient", (_values(9, 16, device=device), None, map, weights))
    yield Sample("transposed gradient", (_values(5, 9, device=device).t(), _values(18, 5, device=device), map, weights))
    yield Sample("expanded gradient", (_values(1, device=device).expand(9, 5), _values(18, 5, device=device), map, weights))
    no_map = _map(_ids(0, 2, 4, device), 4)
    yield Sample("no row", (_values(0, 8, device=device), _values(0, 8, device=device), no_map, _values(0, 2, device=device)))


def unpermute_tokens_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    grad, rows = _values(6, 8, device=device), _values(12, 8, device=device)
    map, weights = _map(_ids(6, 2, 4, device), 4), _values(6, 2, device=device)
    op = "unpermute_tokens_grad: "
    yield Refusal(
        "a short gradient",
        (grad[:5], rows, map, weights),
        ValueError,
        f"{op}grad must have one row per row of map (6), got 5; pass out's gradient",
    )
    yield Refusal(
        "rows without weights",
        (grad, rows, map, None),
        ValueError,
        f"{op}rows must be None where weights is None, got shape [12, 8]; only weights' gradient reads rows",
    )
    yield Refusal(
        "narrow rows",
        (grad, rows[:, :7], map, weights),
        ValueError,
        f"{op}rows must have the shape [12, 8], got [12, 7]; pass the rows of the forward",
    )
    yield Refusal(
        "rows of another dtype",
        (grad, rows.bfloat16(), map, weights),
        TypeError,
        f"{op}rows must be float32, got bfloat16; out has the dtype of rows",
    )
    yield Refusal(
        "weights of another shape",
        (grad, rows, map, weights[:5]),
        ValueError,
        f"{op}weights must have the shape of map [6, 2], got [5, 2]; pass one per pair, [T, K]",
    )


def unpermute_tokens_grad_padding(grad: Tensor, rows: Tensor | None, map: Tensor, weights: Tensor | None = None) -> Padding:
    inputs = {"grad": _tokens_without(map)}
    if rows is not None:
        inputs["rows"] = _rows_without(map)
    if weights is not None:
        inputs["weights"] = _tokens_without(map)
    return Padding(inputs, (_rows_without(map), None if rows is None else _tokens_without(map)))


def unpermute_tokens_grad_cost(grad: Tensor, rows: Tensor | None, map: Tensor, weights: Tensor | None = None) -> Cost:
    share = (map >= 0).float().mean().item() if map.numel() else 0.0
    copies = map.shape[1]
    read = _bytes(grad, map, weights) + share * _bytes(rows)
    written = copies * _bytes(grad) + (0 if rows is None else _bytes(weights))
    return Cost(read, written, (3.0 if rows is not None else 1.0) * copies * grad.numel())


def unpermute_tokens_grad_benches(device: torch.device) -> Iterator[Bench]:
    for tokens in _BENCH_TOKENS:

        def make(tokens: int = tokens) -> tuple[Any, ...]:
            grad = torch.randn(tokens, _BENCH_WIDTH, device=device, dtype=torch.bfloat16)
            rows = torch.randn(tokens * _BENCH_TOPK, _BENCH_WIDTH, device=device, dtype=torch.bfloat16)
            map = _map(_bench_ids(tokens, device), _BENCH_EXPERTS)
            return grad, rows, map, torch.rand(tokens, _BENCH_TOPK, device=device)

        yield Bench(_bench_name(tokens), make, _grad_by_hand)


def _grad_by_hand(grad: Tensor, rows: Tensor, map: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    number = map.flatten().long()
    scaled = (grad[:, None] * weights[..., None]).to(rows.dtype).flatten(0, 1)
    grad_rows = torch.empty_like(rows).index_copy_(0, number, scaled)
    each = rows.index_select(0, number).view(*map.shape, -1)
    return grad_rows, (each * grad[:, None].to(weights.dtype)).sum(-1)
