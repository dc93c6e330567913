"""Rotary position in registers: rot_n = far_(n // step) near_(n % step), two short tables (`rotary.factors`).

    (even, odd) -> (even cos - odd sin, odd cos + even sin)            back: the same with -sin

A table as long as the image would be read once a sample and push the tokens out of the cache; of these two the near rows (48 kB
at width 384 and 32 rows) stay next to the processor and a tile needs few far rows. Where a tile lies within one step (`LEVEL`),
it has one far row and its near rows follow each other, so that little is read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places(tile, n, step, TOKENS: tl.constexpr, LEVEL: tl.constexpr):
    """The tokens (tokens, 1) of a tile and their far and near rows. Beyond the last token the tables end: take the last."""
    here = tl.arange(0, TOKENS)[:, None]
    token = tile * TOKENS + here
    if LEVEL:
        far, near = tile * TOKENS // step, tile * TOKENS % step + here
    else:
        last = tl.minimum(token, n - 1)
        far, near = last // step, last % step
    return token, far, near


@triton.jit
def _value(table, at, real, other, EVEN: tl.constexpr):
    """EVEN: every pair exists, so that no load needs a mask and a value for what is masked."""
    if EVEN:
        return tl.load(table + at, eviction_policy="evict_last")
    return tl.load(table + at, mask=real, other=other, eviction_policy="evict_last")


@triton.jit
def angles(far_cos, far_sin, near_cos, near_sin, far, near, first, D: tl.constexpr, CHANNELS: tl.constexpr):
    """cos and sin (tokens, pairs) of the channels from `first` on, an even number."""
    HALF: tl.constexpr = D // 2
    EVEN: tl.constexpr = D % CHANNELS == 0
    pair = first // 2 + tl.arange(0, CHANNELS // 2)[None, :]
    real, far, near = pair < HALF, far * HALF + pair, near * HALF + pair
    nc, ns = _value(near_cos, near, real, 1.0, EVEN), _value(near_sin, near, real, 0.0, EVEN)
    fc, fs = _value(far_cos, far, real, 1.0, EVEN), _value(far_sin, far, real, 0.0, EVEN)
    return fc * nc - fs * ns, fs * nc + fc * ns


@triton.jit
def rotate(x, cos, sin, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BACK: tl.constexpr):
    """x (tokens, channels)."""
    even, odd = tl.split(tl.reshape(x, (TOKENS, CHANNELS // 2, 2)))
    if BACK:
        pairs = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    else:
        pairs = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(pairs, (TOKENS, CHANNELS))
