"""Rotary position in registers: rot_n = far_(n // step) near_(n % step), two short tables (`rotary.factors`).

    (even, odd) -> (even cos - odd sin, odd cos + even sin)

A table as long as the image would be read once a sample and push the tokens out of the cache; with steps of 16 tokens the near
rows (24 kB at width 384) stay next to the processor and a tile needs few far rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PLAIN: tl.constexpr = tl.constexpr(0)
BF16: tl.constexpr = tl.constexpr(1)


def words(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x as `load_pairs` reads it, and how: 16-bit pairs as one integer where they are aligned so."""
    if x.shape[-1] % 2 or x.data_ptr() % 16 or x.dtype not in (torch.bfloat16, torch.float16):
        return x, 0
    return x.view(torch.int32), 1 if x.dtype == torch.bfloat16 else 2


@triton.jit
def _value(table, at, real, other, EVEN: tl.constexpr):
    """EVEN: every pair exists, so that no load needs a mask and a value for what is masked."""
    if EVEN:
        return tl.load(table + at, eviction_policy="evict_last")
    return tl.load(table + at, mask=real, other=other, eviction_policy="evict_last")


@triton.jit
def turns(far_cos, far_sin, near_cos, near_sin, token, pair, step, n, HALF: tl.constexpr, EVEN: tl.constexpr):
    """cos and sin (tokens, pairs) of the angle of each token's pair. Beyond the last token the tables end: take the last."""
    token = tl.minimum(token, n - 1)
    real = pair[None, :] < HALF
    near = (token % step)[:, None] * HALF + pair[None, :]
    far = (token // step)[:, None] * HALF + pair[None, :]
    nc, ns = _value(near_cos, near, real, 1.0, EVEN), _value(near_sin, near, real, 0.0, EVEN)
    fc, fs = _value(far_cos, far, real, 1.0, EVEN), _value(far_sin, far, real, 0.0, EVEN)
    return fc * nc - fs * ns, fs * nc + fc * ns


@triton.jit
def load_pairs(ptr, row, pair, mask, KIND: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """The even and odd channels, float32, of these pairs of these rows.

    EVEN: all of them exist. Sixteen-bit pairs come as one integer (`words`): bfloat16 is the upper half of a float32, so a
    shift and a mask unpack it.
    """
    if KIND == PLAIN:
        even = tl.load(ptr + row * D + 2 * pair, mask=mask, other=0.0).to(tl.float32)
        odd = tl.load(ptr + row * D + 2 * pair + 1, mask=mask & (2 * pair + 1 < D), other=0.0).to(tl.float32)
    else:
        if EVEN:
            word = tl.load(ptr + row * (D // 2) + pair)
        else:
            word = tl.load(ptr + row * (D // 2) + pair, mask=mask, other=0, eviction_policy="evict_first")
        if KIND == BF16:
            even = (word << 16).to(tl.float32, bitcast=True)
            odd = (word & -65536).to(tl.float32, bitcast=True)
        else:
            even = (word & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd
