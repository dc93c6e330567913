"""Rotary position in registers: rot_n = far_(n // step) near_(n % step), two short tables (`rotary.factors`).

    (even, odd) -> (even cos - odd sin, odd cos + even sin)

A table as long as the image would be read once a sample and push the tokens out of the cache; of these two the near rows (24 kB
at width 384 and 16 rows) stay next to the processor and a tile needs few far rows.

A tile of the kernels that rotate is (blocks, rows, pairs), `blocks * rows` tokens in a row. Where a block is as long as a step,
all blocks share their near rows and each has one far row, so that little is read (`LEVEL`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PLAIN: tl.constexpr = tl.constexpr(0)
BF16: tl.constexpr = tl.constexpr(1)
F16: tl.constexpr = tl.constexpr(2)
_WORDS = {torch.bfloat16: (torch.int32, 1), torch.float16: (torch.int32, 2), torch.float32: (torch.int64, 3)}


def words(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x as `load_pairs` reads it, and how: a pair as one integer, where they are aligned so."""
    if x.shape[-1] % 2 or x.data_ptr() % 16 or x.dtype not in _WORDS:
        return x, 0
    word, kind = _WORDS[x.dtype]
    return x.view(word), kind


@triton.jit
def places(tile, n, step, BLOCKS: tl.constexpr, ROWS: tl.constexpr, LEVEL: tl.constexpr):
    """The tokens (blocks, rows, 1) of a tile and their far and near rows. Beyond the last token the tables end: take the last."""
    block, row = tl.arange(0, BLOCKS)[:, None, None], tl.arange(0, ROWS)[None, :, None]
    token = tile * (BLOCKS * ROWS) + block * ROWS + row
    if LEVEL:
        far, near = tl.minimum(tile * BLOCKS + block, (n - 1) // step), row
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
def row_of(cos_ptr, sin_ptr, at, pair, HALF: tl.constexpr, EVEN: tl.constexpr):
    """cos and sin of these rows of one table."""
    real = pair < HALF
    return _value(cos_ptr, at * HALF + pair, real, 1.0, EVEN), _value(sin_ptr, at * HALF + pair, real, 0.0, EVEN)


@triton.jit
def turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, HALF: tl.constexpr, EVEN: tl.constexpr):
    """cos and sin of the angle of each pair, in the far and near rows given."""
    fc, fs = row_of(far_cos, far_sin, far, pair, HALF, EVEN)
    nc, ns = row_of(near_cos, near_sin, near, pair, HALF, EVEN)
    return fc * nc - fs * ns, fs * nc + fc * ns


@triton.jit
def load_pairs(ptr, row, pair, mask, KIND: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """The even and odd channels, float32, of these pairs of these rows. EVEN: all of them exist.

    Pairs come as one integer (`words`). Bfloat16 is the upper half of a float32, so a shift and a mask unpack it.
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
        elif KIND == F16:
            even = (word & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            even = word.to(tl.int32).to(tl.float32, bitcast=True)
            odd = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def four(x, A: tl.constexpr, B: tl.constexpr, LANES: tl.constexpr):
    """(A, B, 4 LANES) as four tensors (A, B, LANES): the four neighbours that one thread holds, apart."""
    left, right = tl.split(tl.reshape(x, (A, B, LANES, 2, 2)))
    x0, x2 = tl.split(left)
    x1, x3 = tl.split(right)
    return x0, x1, x2, x3


@triton.jit
def beside(x0, x1, x2, x3, A: tl.constexpr, B: tl.constexpr, LANES: tl.constexpr):
    """Back from `four`."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (A, B, 4 * LANES))
