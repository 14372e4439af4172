"""Sample calls, refusals, padding, cost and benches of the attention ops.

T rows (Tq of queries, Tk of keys), B sequences, Hq and Hkv heads, Dqk and Dv head dims. Samples are tiny; between them they see
every layout and every feature. On CUDA each sample takes the backend that `backend=None` would, and the reference where that is
the only one that serves it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.attention_thd import BACKENDS, Call, GradCall, key_metadata, unserved
from thdops.ops.attention_thd import measured, reference
from thdops.ops.layouts import Layout, layout, others, prefix_sums
from thdops.ops.padding.reference import padding_mask
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# --- calls ---------------------------------------------------------------------------------------------------------------------


def _random(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=generator).to(device, dtype)


def _call(
    base: Layout,
    keys: Layout | None = None,
    *,
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    window: tuple[int, int] = (-1, -1),
    fused: bool = False,
    **settings: Any,
) -> Call:
    """A legal call on the layout's device. `fused` makes q, k and v slices of one [T, Hq + 2 Hkv, D] buffer."""
    device = base.cu_seqlens.device
    generator = torch.Generator().manual_seed(base.total + sum(heads) + sum(dims))
    (heads_q, heads_kv), (dim_qk, dim_v) = heads, dims
    rows_kv = base.total if keys is None else keys.total
    if fused:
        packed = _random(generator, (base.total, heads_q + 2 * heads_kv, dim_qk), dtype, device)
        q, k, v = packed.split((heads_q, heads_kv, heads_kv), 1)
    else:
        q = _random(generator, (base.total, heads_q, dim_qk), dtype, device)
        k = _random(generator, (rows_kv, heads_kv, dim_qk), dtype, device)
        v = _random(generator, (rows_kv, heads_kv, dim_v), dtype, device)
    usual: dict[str, Any] = {
        "sink": None,
        "causal": False,
        "bottom_right": False,
        "scale": dim_qk**-0.5,
        "softmax": "vanilla",
        "softcap": 0.0,
        "max_seqlen_q": 0,
        "max_seqlen_kv": 0,
        "deterministic": True,
        "return_max_logit": False,
    }
    if settings.get("softmax") == "learnable":
        usual["sink"] = _random(generator, (heads_q,), _FP64 if dtype == _FP64 else _FP32, device)
    call = Call(
        q=q,
        k=k,
        v=v,
        window_left=window[0],
        window_right=window[1],
        backend="reference",
        **_metadata(base, keys),
        **{**usual, **settings},
    )
    return call._replace(backend=measured.choose(call) or "reference")


def _metadata(base: Layout, keys: Layout | None) -> dict[str, Tensor | None]:
    return {
        "cu_seqlens_q": base.cu_seqlens,
        "cu_seqlens_q_padded": base.padded,
        "cu_seqlens_kv": None if keys is None else keys.cu_seqlens,
        "cu_seqlens_kv_padded": None if keys is None else keys.padded,
    }


def _cross(device: torch.device, dtype: torch.dtype = torch.int32) -> tuple[Layout, Layout]:
    """Queries and keys of different lengths: more keys, fewer keys (rows that see none under bottom-right), none, no query."""
    queries, keys = [3, 5, 2, 0], [5, 2, 0, 4]
    padded_q, padded_kv = [4, 6, 2, 1], [6, 2, 3, 4]
    return (
        Layout(prefix_sums(queries, device, dtype), prefix_sums(padded_q, device, dtype), 15),
        Layout(prefix_sums(keys, device, dtype), prefix_sums(padded_kv, device, dtype), 18),
    )


class _Entry(NamedTuple):
    """A sample before it has a layout: `make` builds the call from one for queries and one for keys (None = the same)."""

    name: str
    base: Layout
    keys: Layout | None
    make: Callable[..., Call]
    compiled: bool  # worth a compilation


def _calls(device: torch.device) -> Iterator[_Entry]:
    usual = _FP32 if device.type == "cpu" else _BF16

    def one(
        name: str, base: str, dtype: torch.dtype = usual, compiled: bool = False, index: torch.dtype = torch.int32, **rest: Any
    ) -> _Entry:
        return _Entry(name, layout(base, device, index), None, partial(_call, dtype=dtype, **rest), compiled)

    def two(name: str, dtype: torch.dtype = usual, compiled: bool = False, index: torch.dtype = torch.int32, **rest: Any) -> _Entry:
        return _Entry(name, *_cross(device, index), partial(_call, dtype=dtype, **rest), compiled)

    yield one("causal, tail", "tail", compiled=True, causal=True)
    yield one("every row valid", "full")
    yield one("MQA, gaps and tail, int64", "gaps and tail", index=torch.int64, heads=(4, 1), causal=True)
    yield one("one head per key head, empty sequences", "empty sequences", heads=(2, 2))
    yield one("slices of one fused buffer", "gaps and tail", fused=True, causal=True)
    yield one("sliding window, rows before the first", "rows before the first", causal=True, window=(2, -1))
    yield one("window on both sides, fp16", "gaps and tail", _FP16, window=(1, 2))
    yield one("no valid row", "no valid row", causal=True)
    yield one("sentinels", "sentinels", causal=True)
    yield one("no sequence", "no sequence")
    yield one("bf16, own scale", "gaps and tail", _BF16, causal=True, scale=0.7)
    yield two("cross attention")
    yield two("cross attention, bottom-right causal", compiled=True, causal=True, bottom_right=True)
    yield two("cross attention, bottom-right window", window=(1, 1), bottom_right=True)
    yield two("cross attention, bottom-right, bounded on the left", index=torch.int64, window=(1, -1), bottom_right=True)
    yield two("cross attention, top-left causal, off by one", causal=True, softmax="off_by_one")
    yield one("off by one, no valid row", "no valid row", softmax="off_by_one")
    yield two("learnable sink, window, bottom-right", softmax="learnable", window=(0, 1), bottom_right=True)
    yield one("learnable sink, bf16", "gaps and tail", _BF16, softmax="learnable", causal=True)
    yield one("MLA 24/16", "gaps and tail", dims=(24, 16), causal=True)
    yield one("MLA 16/24, softcap", "empty sequences", dims=(16, 24), softcap=1.5)
    yield one("softcap, max_logit, fp16", "tail", _FP16, softcap=2.0, causal=True, return_max_logit=True)
    yield two("max_logit, bottom-right", causal=True, bottom_right=True, return_max_logit=True)
    yield one("max_logit, no valid row", "no valid row", return_max_logit=True)
    yield one("fp32, sink, softcap, window", "sentinels", _FP32, softmax="learnable", softcap=1.0, window=(3, 0), causal=True)


def _layout_replays(base: Layout, keys: Layout | None) -> list[tuple[Layout, Layout | None]]:
    if keys is None:
        return [(other, None) for other in others(base)]
    return list(zip(others(base), reversed(others(keys)), strict=True))


def attention_samples(device: torch.device) -> Iterator[Sample]:
    for name, base, keys, make, compiled in _calls(device):
        replays = tuple(_given(_metadata(*pair)) for pair in _layout_replays(base, keys))
        yield Sample(name, make(base, keys), replays, compiled)


def attention_grad_samples(device: torch.device) -> Iterator[Sample]:
    for i, (name, base, keys, make, compiled) in enumerate(_calls(device)):
        call = make(base, keys)
        if call.return_max_logit:  # has no gradient, and without it the call is another sample's
            continue
        # Some without one of the two gradients, as autograd leaves them out; some strided.
        which = (i % 6 != 5, i % 6 != 4, i % 3 == 0)
        grad = _gradients(call, *which)
        replays = []
        for pair in _layout_replays(base, keys):
            metadata = _metadata(*pair)
            other = _gradients(call._replace(**metadata), *which)
            replays.append(_given({**metadata, "out": other.out, "lse": other.lse}))
        yield Sample(name, grad, tuple(replays), compiled)


def _gradients(call: Call, has_out: bool, has_lse: bool, strided: bool) -> GradCall:
    out, lse, _ = reference.attention(*call)
    generator = torch.Generator().manual_seed(1)
    rows, heads, dim = out.shape
    grad_out = _random(generator, (heads, rows, dim), out.dtype, out.device).transpose(0, 1)
    grad_lse = _random(generator, (rows, heads), lse.dtype, lse.device).t()
    if not strided:
        grad_out, grad_lse = grad_out.contiguous(), grad_lse.contiguous()
    return GradCall(grad_out if has_out else None, grad_lse if has_lse else None, *call[:3], out, lse, *call[3:19])


def _given(contents: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in contents.items() if tensor is not None}


# --- padding -------------------------------------------------------------------------------------------------------------------


def _masks(call: Call | GradCall) -> tuple[Tensor, Tensor]:
    queries = padding_mask(call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])
    return queries, padding_mask(*key_metadata(call), call.k.shape[0])


def attention_padding(*args: Any) -> Padding:
    queries, keys = _masks(Call(*args))
    return Padding(
        inputs={"q": PadRows(queries), "k": PadRows(keys), "v": PadRows(keys)},
        outputs=(PadRows(queries), PadRows(queries, dim=1, value=-torch.inf), None),
    )


def attention_grad_padding(*args: Any) -> Padding:
    call = GradCall(*args)
    queries, keys = _masks(call)
    inputs = {
        "q": PadRows(queries),
        "k": PadRows(keys),
        "v": PadRows(keys),
        "out": PadRows(queries),
        "lse": PadRows(queries, dim=1),
    }
    if call.grad_out is not None:
        inputs["grad_out"] = PadRows(queries)
    if call.grad_lse is not None:
        inputs["grad_lse"] = PadRows(queries, dim=1)
    return Padding(inputs=inputs, outputs=(PadRows(queries), PadRows(keys), PadRows(keys), None))


# --- refusals ------------------------------------------------------------------------------------------------------------------


def attention_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _refusals("attention", device, lambda call: call)
    call = _call(layout("tail", device), dtype=_FP32)
    reasons = "; ".join(f"{name} {unserved(name, call, False)}" for name in BACKENDS[:-1])
    yield Refusal(
        "no fast backend",
        call._replace(backend=""),
        ValueError,
        f"attention: backend must serve the call, got None, and no fast backend does ({reasons});"
        " change the call, or pass backend='reference' (every feature, slow)",
    )


def attention_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _refusals("attention_grad", device, lambda call: _as_grad(call))
    grad = _as_grad(_call(layout("tail", device), dtype=_FP32))
    yield Refusal(
        "out of another shape",
        grad._replace(out=grad.out[:-1]),
        ValueError,
        "attention_grad: out must have the forward's shape [23, 4, 16], got [22, 4, 16]; pass the forward's",
    )
    yield Refusal(
        "lse of another dtype",
        grad._replace(lse=grad.lse.to(_BF16)),
        TypeError,
        "attention_grad: lse must be float32, got bfloat16; cast it",
    )
    yield Refusal(
        "grad_out of another shape",
        grad._replace(grad_out=grad.out.transpose(0, 1)),
        ValueError,
        "attention_grad: grad_out must have the forward's shape [23, 4, 16], got [4, 23, 16]; pass the forward's",
    )
    yield Refusal(
        "grad_lse of another dtype",
        grad._replace(grad_lse=grad.lse.to(_FP16)),
        TypeError,
        "attention_grad: grad_lse must be float32, got float16; cast it",
    )


def _as_grad(call: Call) -> GradCall:
    """With an out and an LSE that fit q and v, whatever else is wrong with the call."""
    rows, heads = (*call.q.shape, 1)[:2]
    out = call.q.new_zeros(rows, heads, call.v.shape[-1])
    return GradCall(None, None, *call[:3], out, call.q.new_zeros(heads, rows, dtype=_FP32), *call[3:19])


def _refusals(op: str, device: torch.device, args: Callable[[Call], tuple[Any, ...]]) -> Iterator[Refusal]:
    call = _call(layout("gaps and tail", device), dtype=_FP32)._replace(backend="reference")
    q, k, v, cu = call.q, call.k, call.v, call.cu_seqlens_q
    base, keys = _cross(device)
    cross = _call(base, keys, dtype=_FP32)._replace(backend="reference")
    sink = torch.zeros(4, device=device)
    learnable = {"softmax": "learnable", "sink": sink}

    def no(name: str, text: str, error: type[Exception] = ValueError, of: Call = call, **changed: Any) -> Refusal:
        return Refusal(name, args(of._replace(**changed)), error, f"{op}: {text}")

    yield no("q of two dimensions", "q must have 3 dimensions [Tq, Hq, Dqk], got shape [25, 64]; reshape it", q=q.flatten(1))
    yield no("integer q", f"q must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it", TypeError, q=q.int())
    yield no("k of another dtype", "k must have the dtype of q (float32), got bfloat16; cast one of them", TypeError, k=k.to(_BF16))
    yield no(
        "v of fewer rows",
        "v must have the rows and heads of k ([25, 2, 16]), got [24, 2, 16]; pass values of the same keys",
        v=v[:-1],
    )
    yield no(
        "head dim too small",
        "q must have a head dim that is a multiple of 8 from 16 to 256, got 8; pad the head dim with zeros",
        q=q[..., :8],
        k=k[..., :8],
    )
    yield no(
        "odd head dim",
        "v must have a head dim that is a multiple of 8 from 16 to 256, got 15; pad the head dim with zeros",
        v=v[..., :15],
    )
    yield no(
        "head dim too large",
        "v must have a head dim that is a multiple of 8 from 16 to 256, got 264; pad the head dim with zeros",
        v=v.new_zeros(25, 2, 264),
    )
    yield no(
        "k of another head dim", "k must have the head dim of q (16), got 24; pass keys of the same width", k=k.new_zeros(25, 2, 24)
    )
    yield no(
        "heads that do not divide",
        "q must have a positive multiple of k's heads (3), got 4; each key head serves Hq / Hkv query heads",
        k=k.new_zeros(25, 3, 16),
        v=v.new_zeros(25, 3, 16),
    )
    yield no(
        "float cu_seqlens_q",
        "cu_seqlens_q must be int32 or int64, got float32; cast it, for example with .to(torch.int32)",
        TypeError,
        cu_seqlens_q=cu.float(),
    )
    yield no(
        "padded offsets of another length",
        "cu_seqlens_q_padded must have as many entries as cu_seqlens_q (5), got 4; pass B+1 offsets in both",
        cu_seqlens_q_padded=cu[:-1],
    )
    yield no(
        "padded offsets of keys alone",
        "cu_seqlens_kv_padded must come with cu_seqlens_kv, got it alone; pass both, or neither for the query's metadata",
        cu_seqlens_kv_padded=cu,
    )
    yield no(
        "keys of other rows without cu_seqlens_kv",
        "k must have the rows of q (25) without cu_seqlens_kv, got 24; pass cu_seqlens_kv",
        k=k[:-1],
        v=v[:-1],
    )
    yield no(
        "another number of sequences of keys",
        "cu_seqlens_kv must have as many entries as cu_seqlens_q (5), got 4;"
        " pass B+1 offsets in both; a sequence without keys has length 0",
        of=cross,
        cu_seqlens_kv=keys.cu_seqlens[:-1],
        cu_seqlens_kv_padded=None,
    )
    yield no(
        "two dtypes of metadata",
        "cu_seqlens_kv must have the dtype of cu_seqlens_q (int32), got int64; cast one of them",
        TypeError,
        of=cross,
        cu_seqlens_kv=keys.cu_seqlens.long(),
        cu_seqlens_kv_padded=None,
    )
    beside = "pass how many keys beside the diagonal are visible"
    yield no("left bound", f"window_left must be at least -1 (-1 = unbounded), got -2; {beside}", window_left=-2)
    yield no("right bound", f"window_right must be at least -1 (-1 = unbounded), got -3; {beside}", window_right=-3)
    yield no("negative hint", "max_seqlen_q must be at least 0, got -1; pass a larger one", max_seqlen_q=-1)
    yield no("infinite scale", "scale must be finite, got inf; pass a number, or None for Dqk**-0.5", scale=float("inf"))
    yield no("negative softcap", "softcap must be 0 (none) or positive and finite, got -1.0; pass another", softcap=-1.0)
    yield no("unknown softmax", "softmax must be one of vanilla, off_by_one, learnable, got 'quiet'; choose one", softmax="quiet")
    yield no(
        "learnable without a sink",
        "sink must be given with softmax='learnable', got None; pass a float32 [Hq], or another softmax",
        softmax="learnable",
    )
    yield no(
        "a sink without learnable",
        "sink must come with softmax='learnable', got a sink with softmax='vanilla'; leave it out, or pass softmax='learnable'",
        sink=sink,
    )
    yield no(
        "sink of the wrong size",
        "sink must have one entry per query head [4], got [3]; reshape it",
        **{**learnable, "sink": sink[:3]},
    )
    yield no("bf16 sink", "sink must be float32, got bfloat16; cast it", TypeError, **{**learnable, "sink": sink.to(_BF16)})
    slow = "change the call, or pass backend='reference' (every feature, slow)"
    yield no(
        "unknown backend",
        f"backend must be one of {', '.join(BACKENDS)}, got 'magic'; choose one, or None for the fastest",
        backend="magic",
    )
    reason = unserved("torch", call, False)
    yield no("fp32 for torch", f"backend must serve the call, got 'torch', which {reason}; {slow}", backend="torch")


# --- cost and benches ----------------------------------------------------------------------------------------------------------


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _pairs(call: Call | GradCall) -> float:
    """Visible (query, key) pairs of one head; plain causal counts as half of all pairs, as people quote it."""
    queries = reference.valid_lengths(call.cu_seqlens_q, call.cu_seqlens_q_padded)
    keys = reference.valid_lengths(*key_metadata(call))
    total = 0.0
    for n_q, n_k in zip(queries.tolist(), keys.tolist(), strict=True):
        if call.window_left < 0 and (call.causal or call.window_right < 0):
            total += n_q * n_k * (0.5 if call.causal else 1.0)
            continue
        shift = n_k - n_q if call.bottom_right else 0
        diagonal = torch.arange(n_q) + shift
        right = 0 if call.causal else call.window_right
        last = (diagonal + right).clamp(max=n_k - 1) if right >= 0 else torch.full_like(diagonal, n_k - 1)
        first = (diagonal - call.window_left).clamp(min=0) if call.window_left >= 0 else torch.zeros_like(diagonal)
        total += (last - first + 1).clamp(min=0).sum().item()
    return total


def _cost(call: Call | GradCall, outputs: int, products_qk: int, products_v: int) -> Cost:
    """Every input read once; a product of width D costs 2 D operations a pair and head."""
    operations = 2 * call.q.shape[1] * (products_qk * call.q.shape[2] + products_v * call.v.shape[2])
    return Cost(read=_bytes(*(x for x in call if isinstance(x, Tensor))), written=outputs, flops=_pairs(call) * operations)


def attention_cost(*args: Any) -> Cost:
    """Two products: scores, and the values they weigh."""
    call = Call(*args)
    rows, heads, _ = call.q.shape
    out = rows * heads * call.v.shape[2] * call.q.element_size()
    return _cost(call, out + 4 * rows * heads, 1, 1)


def attention_grad_cost(*args: Any) -> Cost:
    """Five products: scores again, dq and dk over Dqk; dP and dv over Dv."""
    call = GradCall(*args)
    return _cost(call, _bytes(call.q, call.k, call.v, call.sink), 3, 2)


# name -> (sequences, rows of each, (Hq, Hkv), D)
_GPU_BENCHES = {"8 x 4096": (8, 4096, (32, 8), 128), "128 x 256": (128, 256, (32, 8), 128)}
_CPU_BENCHES = {"4 x 96": (4, 96, (4, 2), 32)}


def _bench_call(device: torch.device, sequences: int, rows: int, heads: tuple[int, int], dim: int) -> Call:
    base = Layout(prefix_sums([rows] * sequences, device), None, rows * sequences)
    dtype = _BF16 if device.type == "cuda" else _FP32
    call = _call(base, dtype=dtype, heads=heads, dims=(dim, dim), causal=True, deterministic=False)
    return call._replace(max_seqlen_q=rows, max_seqlen_kv=rows)


def _bench_gradients(*shape: Any) -> GradCall:
    call = _bench_call(*shape)
    out, lse, _ = torch.ops.thdops.attention(*call)
    return GradCall(torch.randn_like(out), None, *call[:3], out, lse, *call[3:19])


def attention_benches(device: torch.device) -> Iterator[Bench]:
    """The peer on CUDA is `torch.nn.attention.varlen`, on CPU a masked `scaled_dot_product_attention`."""
    yield from _benches(device, _bench_call, _varlen if device.type == "cuda" else _masked)


def attention_grad_benches(device: torch.device) -> Iterator[Bench]:
    """The peer is the backward of the forward's."""
    yield from _benches(device, _bench_gradients, _varlen_backward if device.type == "cuda" else _masked_backward)


def _benches(device: torch.device, make: Callable[..., Any], people: Callable[..., Any]) -> Iterator[Bench]:
    shapes = _GPU_BENCHES if device.type == "cuda" else _CPU_BENCHES
    for name, (sequences, rows, heads, dim) in shapes.items():
        title = f"{name}, {heads[0]}/{heads[1]} heads, D {dim}, {'bf16' if device.type == 'cuda' else 'fp32'}, causal"
        yield Bench(title, partial(make, device, sequences, rows, heads, dim), people)


def _varlen(*args: Any) -> Any:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    call = Call(*args)
    cu, longest = call.cu_seqlens_q, call.max_seqlen_q
    # Where it is an argument it must be given, where it is not groups just work.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    lse = AuxRequest(lse=True)
    return varlen_attn(*call[:3], cu, cu, longest, longest, return_aux=lse, scale=call.scale, window_size=(-1, 0), **grouped)


def _varlen_backward(*args: Any) -> Any:
    import torch.nn.attention.varlen  # defines the op

    call = GradCall(*args)
    cu, longest = call.cu_seqlens_q, call.max_seqlen_q
    state = torch.zeros(2, dtype=torch.uint64, device=cu.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        call.grad_out, *call[2:7], cu, cu, longest, longest, True, state, call.scale, [-1, 0]
    )


def _masked(*args: Any) -> Tensor:
    call = Call(*args)
    return _masked_attention(call, call.q, call.k, call.v)


def _masked_backward(*args: Any) -> tuple[Tensor, ...]:
    call = GradCall(*args)
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    return torch.autograd.grad(_masked_attention(call, *leaves), leaves, call.grad_out)


def _masked_attention(call: Call | GradCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal self-attention over sequences back to back, with a mask [T, T]."""
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(call.cu_seqlens_q[1:], rows, right=True)
    mask = (sequence[:, None] == sequence) & (rows[:, None] >= rows)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=call.scale, enable_gqa=True)
    return out[0].transpose(0, 1)
