"""Attention beside other libraries': the shapes, and each peer as its own users call it.

T rows, B sequences, Hq and Hkv heads, Dqk and Dv head dims. Three contests a shape: forward, backward, and the backward that
repeats bitwise. `native` is the op on its native backend, zeros on padding included; the peers hold no padding contract and get
what suits them best: metadata in their own form, hints equal to the longest sequence, and for cuDNN the LSE in its own layout,
prepared outside the timed call. "op fa4" and so on are the op on that backend, contract and conversions included: what a user of
`backend="fa4"` gets, and what the table of `backend=None` is made from.

FlexAttention is compiled, its block mask built outside the timed call. Its backward hides behind autograd and is not captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.attention_thd import HINTED, Call, GradCall, unserved
from thdops.ops.attention_thd import adapter, cudnn_backend, fa4_backend, judge, measured, samples, torch_backend
from thdops.ops.layouts import prefix_sums
from thdops.registry import Contest, Outcome, Unserved

Prepared = Callable[[], Any]
Provider = Callable[..., Prepared]
Providers = Mapping[str, Provider]

_ROWS = 65_536


class _Shape(NamedTuple):
    """Lengths of sequences, the gap behind each, and the rows behind the last."""

    name: str
    lengths: Sequence[int]
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    gap: int = 0
    tail: int = 0
    window: int = -1
    sink: bool = False

    @property
    def rows(self) -> int:
        return sum(self.lengths) + self.gap * len(self.lengths) + self.tail


def _documents(rows: int, mean: int = 600) -> list[int]:
    """Lognormal lengths (sigma 1) that sum to `rows`; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < rows:
        drawn = math.exp(math.log(mean) - 0.5 + torch.randn((), generator=generator).item())
        lengths.append(max(1, min(int(drawn), rows - sum(lengths))))
    return lengths


def _padded(share: float) -> _Shape:
    """A buffer of 65,536 rows, `share` of it empty: half as gaps, half as a tail."""
    lengths = _documents(int(_ROWS * (1 - share)))
    gap = int(_ROWS * share / 2) // len(lengths)
    tail = _ROWS - sum(lengths) - gap * len(lengths)
    return _Shape(f"{share:.0%} of {_ROWS} rows empty, 32/8, D 128", lengths, gap=gap, tail=tail)


def _exact(share: float) -> _Shape:
    """The same documents in a buffer of just their size."""
    return _Shape(f"the documents of {share:.0%} empty, exact size, 32/8, D 128", _documents(int(_ROWS * (1 - share))))


_MLA = (192, 128)


def _shapes(device: torch.device) -> Iterator[_Shape]:
    if device.type != "cuda":
        yield _Shape("40 + 24, 4/2, D 32", [40, 24], (4, 2), (32, 32))
        yield _Shape("gaps and tail, 2/2, D 24/16", [40, 0, 24], (2, 2), (24, 16), 3, 5)
        yield _Shape("sink, window 9, 4/2, D 16", [40, 24], (4, 2), (16, 16), window=9, sink=True)
        return
    yield _Shape("8 x 4096, 32/8, D 128", [4096] * 8)
    yield _Shape("2 x 16384, 16/16, D 128", [16384] * 2, (16, 16))
    yield _Shape("128 x 256, 32/8, D 128", [256] * 128)
    yield _Shape("8 x 4096, 16/16, D 64", [4096] * 8, (16, 16), (64, 64))
    yield _Shape("8 x 4096, 16/16, D 192/128", [4096] * 8, (16, 16), _MLA)
    yield _Shape("documents, mean 600, 65536 rows, 32/8, D 128", _documents(_ROWS))
    yield _Shape("32768 + 500 x 64, 32/8, D 128", [32768] + [64] * 500)
    yield _Shape("1 x 131072, 32/8, D 128", [131_072])
    yield _Shape("8 x 4096, 64/8, D 128", [4096] * 8, (64, 8))
    yield _Shape("4 x 4096, 128/128, D 192/128", [4096] * 4, (128, 128), _MLA)
    yield _Shape("8 x 4096, 64/8, D 64, sink, window 128", [4096] * 8, (64, 8), (64, 64), window=128, sink=True)
    yield _Shape("8 x 4096 + 512 empty, 32/8, D 128", [4096] * 8 + [0] * 512)
    for share in (0.1, 0.5, 0.9):
        yield _padded(share)
        yield _exact(share)


class _Subject(NamedTuple):
    shape: str
    kind: measured.Kind
    direction: str


def contests(device: torch.device) -> Iterator[Contest]:
    """On CPU small shapes by the reference and FlexAttention: there to exercise the machinery, not to be quoted."""
    gpu = device.type == "cuda"
    for shape in _shapes(device):
        yield _contest(shape, "forward", partial(_call, device, shape), _providers(_FORWARD, gpu))
        for direction in ("backward", "backward, deterministic"):
            make = partial(_gradients, device, shape, direction != "backward")
            yield _contest(shape, direction, make, _providers(_BACKWARD, gpu))


def _contest(shape: _Shape, direction: str, make: Callable[[], Call | GradCall], providers: Providers) -> Contest:
    forward = direction == "forward"
    kind = measured.kind(shape.dims, True, (shape.window, -1), shape.rows, len(shape.lengths))
    return Contest(
        f"{shape.name}: {direction}",
        _Subject(shape.name, kind, direction),
        make,
        providers,
        _judge_forward if forward else _judge_backward,
        samples.attention_cost if forward else samples.attention_grad_cost,
    )


def _judge_forward(args: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return judge.attention(Call(*args), results)


def _judge_backward(args: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return judge.attention_grad(GradCall(*args), results)


def write_table(device: torch.device, outcomes: Sequence[Outcome], circumstances: Mapping[str, str]) -> Path:
    """Into `measured.json`: backends by the time of forward and default backward of each shape that has both."""
    times: dict[tuple[_Subject, str], list[float]] = {}
    for outcome in outcomes:
        subject: _Subject = outcome.contest.subject
        backend = _BACKEND_OF.get(outcome.provider)  # None for a peer by itself
        if backend is not None and subject.direction in ("forward", "backward"):
            times.setdefault((subject._replace(direction=""), backend), []).append(outcome.us)
    whole = [(subject.kind, backend, sum(us)) for (subject, backend), us in times.items() if len(us) == 2]
    return measured.write(device, whole, circumstances)


# --- arguments -----------------------------------------------------------------------------------------------------------------


def _call(device: torch.device, shape: _Shape) -> Call:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def new(heads: int, dim: int) -> Tensor:
        return torch.randn(shape.rows, heads, dim, device=device, dtype=dtype, generator=generator)

    (heads, kv_heads), (dim_qk, dim_v) = shape.heads, shape.dims
    longest = max(shape.lengths)
    gaps = shape.gap > 0
    call = Call(
        q=new(heads, dim_qk),
        k=new(kv_heads, dim_qk),
        v=new(kv_heads, dim_v),
        cu_seqlens_q=prefix_sums(list(shape.lengths), device),
        cu_seqlens_q_padded=prefix_sums([n + shape.gap for n in shape.lengths], device) if gaps else None,
        cu_seqlens_kv=None,
        cu_seqlens_kv_padded=None,
        sink=torch.randn(heads, device=device, generator=generator) if shape.sink else None,
        causal=True,
        bottom_right=False,
        window_left=shape.window,
        window_right=-1,
        scale=dim_qk**-0.5,
        softmax="learnable" if shape.sink else "vanilla",
        softcap=0.0,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        deterministic=False,
        backend="",
        return_max_logit=False,
    )
    return call._replace(backend=measured.choose(call) or "reference")


def _gradients(device: torch.device, shape: _Shape, deterministic: bool) -> GradCall:
    call = _call(device, shape)._replace(deterministic=deterministic)
    out, lse, _ = torch.ops.thdops.attention(*call)
    grad = torch.randn(out.shape, device=device, dtype=out.dtype, generator=torch.Generator(device).manual_seed(1))
    return GradCall(grad, None, *call[:3], out, lse, *call[3:19])


# --- providers -----------------------------------------------------------------------------------------------------------------


def _op(backend: str, *args: Any) -> Prepared:
    call = Call(*args)._replace(backend=backend)
    _serves(backend, call)
    return lambda: torch.ops.thdops.attention(*call)[:2]


def _op_grad(backend: str, *args: Any) -> Prepared:
    call = GradCall(*args)._replace(backend=backend)
    _serves(backend, call)
    return lambda: torch.ops.thdops.attention_grad(*call)[:3]


def _serves(backend: str, call: Call | GradCall) -> None:
    reason = unserved(backend, call, False)
    if reason:
        raise Unserved(reason)


def _alone(backend: str, peer: adapter.Peer, call: Call | GradCall) -> adapter.Plan:
    """The plan of a peer without its adapter, on rows as they stand."""
    _serves(backend, call)
    plan = adapter.make_plan(peer, call)
    if plan.queries.gather is not None:
        raise Unserved("one cu_seqlens for address and length: cannot see gaps")
    return plan


def _fa4(*args: Any) -> Prepared:
    call = Call(*args)
    plan = _alone("fa4", fa4_backend.PEER, call)
    forward, told = fa4_backend.interface()._flash_attn_fwd, fa4_backend.told(plan)
    return lambda: forward(*call[:3], return_lse=True, **told)[:2]


def _fa4_grad(*args: Any) -> Prepared:
    call = GradCall(*args)
    plan = _alone("fa4", fa4_backend.PEER, call)
    backward, told = fa4_backend.interface()._flash_attn_bwd, fa4_backend.told(plan)
    given = (*call[2:6], call.grad_out, call.lse)
    return lambda: backward(*given, deterministic=call.deterministic, **told)[:3]


def _cudnn(*args: Any) -> Prepared:
    call = Call(*args)
    plan = _alone("cudnn", cudnn_backend.PEER, call)
    forward, told = cudnn_backend.ops().sdpa_fwd, cudnn_backend.told(plan)

    def run() -> tuple[Tensor, Tensor]:
        out, lse = forward(*call[:3], **told, return_lse=True)
        return out, lse.squeeze(2).t()

    return run


def _cudnn_grad(*args: Any) -> Prepared:
    call = GradCall(*args)
    plan = _alone("cudnn", cudnn_backend.PEER, call)
    backward, told = cudnn_backend.ops().sdpa_bwd, cudnn_backend.told(plan)
    lse = cudnn_backend.by_sequence(call.lse, plan.queries.ends, plan.longest_q)
    return lambda: backward(call.grad_out, *call[2:6], lse, **told, is_deterministic=call.deterministic)


def _fa2(*args: Any) -> Prepared:
    call = Call(*args)
    plan = _alone("torch", torch_backend.PEER, call)
    return lambda: torch_backend.PEER.forward(plan, *call[:3])


def _fa2_grad(*args: Any) -> Prepared:
    call = GradCall(*args)
    plan, grad = _alone("torch", torch_backend.PEER, call), call.grad_out
    if grad is None:
        raise Unserved("is timed with a gradient of out")
    return lambda: torch_backend.PEER.backward(plan, grad, *call[2:7])[:3]


def _flex(*args: Any) -> Prepared:
    call = Call(*args)
    attend = _flex_attention(call)
    with torch.no_grad():
        attend(*call[:3])  # compiles

    def run() -> Tensor:
        with torch.no_grad():
            return attend(*call[:3])

    return run


def _flex_grad(*args: Any) -> Prepared:
    call = GradCall(*args)
    if call.q.device.type != "cuda":
        raise Unserved("has no backward on CPU")
    leaves = [x.detach().requires_grad_() for x in call[2:5]]
    out = _flex_attention(call)(*leaves)
    # A host read, so that a capture fails at once: autograd runs on the stream of the forward, which is not the capture's.
    return lambda: (torch.cuda.synchronize(), torch.autograd.grad(out, leaves, call.grad_out, retain_graph=True))[1]


def _flex_attention(call: Call | GradCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(q, k, v) -> out, rows first as everywhere here."""
    if call.sink is not None:
        raise Unserved("has no sink")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, device = call.q.shape[0], call.q.device
    document = torch.ops.thdops.sequence_ids(call.cu_seqlens_q, call.cu_seqlens_q_padded, rows)
    left = rows if call.window_left < 0 else call.window_left

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (j <= i) & (i - j <= left)

    fast = device.type == "cuda"
    build, attend = (
        (torch.compile(create_block_mask), torch.compile(flex_attention)) if fast else (create_block_mask, flex_attention)
    )
    mask = build(visible, None, None, rows, rows, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out: Any = attend(q, k, v, block_mask=mask, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)

    return run


_FORWARD: tuple[Provider, Providers] = (_op, {"fa4": _fa4, "cudnn": _cudnn, "FA2": _fa2, "Flex": _flex})
_BACKWARD: tuple[Provider, Providers] = (_op_grad, {"fa4": _fa4_grad, "cudnn": _cudnn_grad, "FA2": _fa2_grad, "Flex": _flex_grad})
_BACKEND_OF = {"native": "native", **{f"op {name}": name for name in HINTED}}


def _providers(both: tuple[Provider, Providers], gpu: bool) -> Providers:
    """Native first, peers by themselves, then the op on their backends."""
    op, peers = both
    if not gpu:
        return {"reference": partial(op, "reference"), "Flex": peers["Flex"]}
    native, *adapters = ((name, partial(op, backend)) for name, backend in _BACKEND_OF.items())
    return dict([native, *peers.items(), *adapters])
