"""gelu(h + 3x3(h)) on a grid of patches, each channel by itself: h (b, n, C), nine taps (9, C), n = rows * columns.

    pre_n  = h_n + sum_t tap_t h_(n + t)              t: the eight neighbours and the place itself; beyond the edge is 0
    y      = gelu(pre)                                exact, by erf
    dpre   = dy gelu'(pre)                            pre computed again: only h is kept
    dtap_t = sum_n dpre_n h_(n + t)                   a program adds up its samples, one row a program
    dh_n   = dpre_n + sum_t tap_t dpre_(n - t)

A tile is some tokens and channels of one sample; neighbours are read again, from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels.fused.launch import launched

TOKENS, CHANNELS, WARPS = 16, 64, 4  # 56 registers a thread; nine sums in the adjoint: twice the warps
PROGRAMS = 1024  # of the adjoint, about


@triton.jit
def _tile(sample, first, n, columns, C: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Places in memory, which of them are real, the tokens' rows and columns, the channels."""
    token = first + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return (sample * n + token) * C + channel, (token < n) & (channel < C), token // columns, token % columns, channel


@triton.jit
def _near(ptr, at, real, row, column, rows, columns, down, right, C: tl.constexpr):
    """What lies `down` and `right` of each place; 0 beyond the edge."""
    inside = (row + down >= 0) & (row + down < rows) & (column + right >= 0) & (column + right < columns)
    return tl.load(ptr + at + (down * columns + right) * C, mask=real & inside, other=0.0).to(tl.float32)


@triton.jit
def _tap(tap_ptr, which, channel, C: tl.constexpr):
    return tl.load(tap_ptr + which * C + channel, mask=channel < C, other=0.0).to(tl.float32)


@launched
@triton.jit
def local_kernel(
    h_ptr, tap_ptr, out_ptr, n, rows, columns, tiles,
    C: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sample, first = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TOKENS
    at, real, row, column, channel = _tile(sample, first, n, columns, C, TOKENS, CHANNELS)
    pre = tl.load(h_ptr + at, mask=real, other=0.0).to(tl.float32)
    for t in tl.static_range(9):
        pre += _tap(tap_ptr, t, channel, C) * _near(h_ptr, at, real, row, column, rows, columns, t // 3 - 1, t % 3 - 1, C)
    y = 0.5 * pre * (1.0 + tl.erf(pre * 0.7071067811865476))
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=real)


@launched
@triton.jit
def local_adjoint_kernel(
    dy_ptr, h_ptr, tap_ptr, dpre_ptr, part_ptr, b, n, rows, columns, span,
    C: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dpre of `span` samples, and their part of dtap (programs, 9, C)."""
    none = tl.zeros((TOKENS, CHANNELS), tl.float32)
    totals = (none, none, none, none, none, none, none, none, none)
    start = tl.program_id(0) * span
    for which in range(start, tl.minimum(start + span, b)):
        for first in range(0, n, TOKENS):
            at, real, row, column, channel = _tile(tl.cast(which, tl.int64), first, n, columns, C, TOKENS, CHANNELS)
            pre = tl.load(h_ptr + at, mask=real, other=0.0).to(tl.float32)
            seen = ()
            for t in tl.static_range(9):
                near = _near(h_ptr, at, real, row, column, rows, columns, t // 3 - 1, t % 3 - 1, C)
                pre += _tap(tap_ptr, t, channel, C) * near
                seen += (near,)
            density = tl.exp(-0.5 * pre * pre) * 0.3989422804014327
            slope = 0.5 * (1.0 + tl.erf(pre * 0.7071067811865476)) + pre * density
            dpre = tl.load(dy_ptr + at, mask=real, other=0.0).to(tl.float32) * slope
            tl.store(dpre_ptr + at, dpre.to(dpre_ptr.dtype.element_ty), mask=real)
            added = ()
            for t in tl.static_range(9):
                added += (totals[t] + dpre * seen[t],)
            totals = added
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    for t in tl.static_range(9):
        place = part_ptr + (tl.program_id(0) * 9 + t).to(tl.int64) * C + channel
        tl.store(place, tl.sum(totals[t], 0), mask=channel < C)


@launched
@triton.jit
def local_spread_kernel(
    dpre_ptr, tap_ptr, dh_ptr, n, rows, columns, tiles,
    C: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sample, first = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TOKENS
    at, real, row, column, channel = _tile(sample, first, n, columns, C, TOKENS, CHANNELS)
    dh = tl.load(dpre_ptr + at, mask=real, other=0.0).to(tl.float32)
    for t in tl.static_range(9):
        dh += _tap(tap_ptr, t, channel, C) * _near(dpre_ptr, at, real, row, column, rows, columns, 1 - t // 3, 1 - t % 3, C)
    tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=real)


def forward(h: Tensor, taps: Tensor, rows: int, columns: int) -> Tensor:
    """y, in the dtype of h."""
    b, n, c = h.shape
    tiles, out = -(-n // TOKENS), torch.empty_like(h)
    grid = (b * tiles, -(-c // CHANNELS))
    local_kernel[grid](h, taps, out, n, rows, columns, tiles, C=c, TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=WARPS)
    return out


def backward(dy: Tensor, h: Tensor, taps: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """dh, dtaps."""
    b, n, c = h.shape
    tiles, across = -(-n // TOKENS), -(-c // CHANNELS)
    span = -(-b * across // PROGRAMS)
    programs = -(-b // span)
    dpre, dh = torch.empty_like(h), torch.empty_like(h)
    part = torch.empty(programs, 9, c, dtype=torch.float32, device=h.device)
    cut = {"C": c, "TOKENS": TOKENS, "CHANNELS": CHANNELS}
    local_adjoint_kernel[(programs, across)](dy, h, taps, dpre, part, b, n, rows, columns, span, **cut, num_warps=2 * WARPS)
    local_spread_kernel[(b * tiles, across)](dpre, taps, dh, n, rows, columns, tiles, **cut, num_warps=WARPS)
    return dh, part.sum(0).to(taps.dtype)
