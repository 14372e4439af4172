"""delta = <dO, O> - dLSE of every query row on Hopper, made by `queries_kernel` on its way: that has dO, and lacks only O.

A consumer begins to load O while Q and dO are on their way to shared memory. Where dQ comes by reduction, or from sections of the
keys, `delta_kernel` makes delta before all else.

Measured on an H200 (Triton 3.6, bf16, causal, all of a backward, us) with and without: D 128, 128 x 256 rows 856, 926; D 64, 331,
360, and under a window of 128 1218, 1306. 192/128 has no registers left for it: 4129, 4104.
"""

# Branches on constants vanish while a kernel is traced, which Python's types cannot express.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from thdops.ops.attention_thd.kernels_hopper_common import wide


@gluon.jit
def delta_sources(out, out_row, out_head, grad_lse, grad_lse_head, grad_lse_row):
    """What delta is made of, and () for a dLSE of None; nothing where there is no `out`."""
    if out is None:
        return ()
    elif grad_lse is None:
        return (out, out_row, out_head), ()
    else:
        return (out, out_row, out_head), (grad_lse, grad_lse_head, grad_lse_row)


@gluon.jit
def begin_delta(sources, do, head, row, valid, LAYOUT: gl.constexpr):
    """(O of a consumer's rows, in chunks as dO; dLSE in LAYOUT), 0 from row `valid` on."""
    out, stride, out_head = sources[0]
    here = out + row.to(gl.int64) * stride + head.to(gl.int64) * out_head
    loaded = ()
    for c in gl.static_range(len(do)):
        loaded = loaded + (_load_chunk(here + do[0].shape[2] * c, stride, valid, do[c].shape[1], do[c].shape[2]),)
    return loaded, _grad_lse(sources[1], head, row, valid, do[0].shape[1], LAYOUT)


@gluon.jit
def finish_delta(begun, do, part, lse_r, valid, LAYOUT: gl.constexpr):
    """delta of a consumer's rows, once dO is there; 0 on padding rows and where no key is seen, whatever stands there."""
    out, grad_lse = begun
    ROWS: gl.constexpr = do[0].shape[1]
    total = gl.zeros([ROWS], gl.float32, LAYOUT)
    for c in gl.static_range(len(do)):
        grads = do[c].index(part).load(out[c].type.layout).to(gl.float32)
        total += gl.convert_layout(gl.sum(out[c].to(gl.float32) * grads, axis=1), LAYOUT)
    r = gl.arange(0, ROWS, LAYOUT)
    return gl.where((r < valid) & (lse_r > float("-inf")), total - grad_lse, 0.0)


@gluon.jit
def unmet_delta(sources, lse, head, row, valid, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """delta of rows that see no key: O is 0, and LSE a sink's, if there is one. `lse`: that of the first row."""
    r = gl.arange(0, ROWS, LAYOUT)
    lse_r = gl.load(lse + r, mask=r < valid, other=float("-inf"))
    return gl.where(lse_r > float("-inf"), -_grad_lse(sources[1], head, row, valid, ROWS, LAYOUT), 0.0)


@gluon.jit
def _load_chunk(out, stride, valid, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = wide(COLUMNS, gl.num_warps())
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    at = gl.multiple_of(out + r.to(gl.int64) * stride + d, [1, 16])
    return gl.load(at, mask=(r < valid) & (d >= 0), other=0.0)


@gluon.jit
def _grad_lse(source, head, row, valid, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    r = gl.arange(0, ROWS, LAYOUT)
    if len(source) > 0:
        grad_lse, head_stride, row_stride = source
        here = grad_lse + head.to(gl.int64) * head_stride + (row + r).to(gl.int64) * row_stride
        return gl.load(here, mask=r < valid, other=0.0)
    else:
        return gl.zeros([ROWS], gl.float32, LAYOUT)
