"""Rotary position in registers: rot_n = far_(n // step) near_(n % step), two short tables (`rotary.factors`).

    (even, odd) -> (even cos - odd sin, odd cos + even sin)

A table as long as the image would be read once a sample and push the tokens out of the cache; of these two the near rows (48 kB
at width 384 and 32 rows) stay next to the processor and a tile needs few far rows.

A tile of the kernels that rotate is (tokens, pairs). Where it lies within one step (`LEVEL`), it has one far row and its near
rows follow each other, so that little is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels.plan import Tile

PLAIN: tl.constexpr = tl.constexpr(0)
BF16: tl.constexpr = tl.constexpr(1)
F16: tl.constexpr = tl.constexpr(2)
F32: tl.constexpr = tl.constexpr(3)
_KINDS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def kind(x: Tensor) -> int:
    """How `fetch` reads x: a pair as one integer where pairs are aligned so, else number by number."""
    aligned = x.shape[-1] % 2 == 0 and x.storage_offset() * x.element_size() % 16 == 0
    return _KINDS.get(x.dtype, 0) if aligned else 0


class Turn(NamedTuple):
    """What the kernels that rotate are given."""

    tables: tuple[Any, ...]
    constants: dict[str, Any]


def turn(tables: list[Tensor], step: int, dim: int, tile: Tile, unused: Tensor) -> Turn:
    """`tables` are cos and sin of the far and of the near factor, or nothing."""
    turned = len(tables) > 0
    constants = {
        "D": dim, "TOKENS": tile.tokens, "CHANNELS": tile.channels, "num_warps": tile.warps,
        "ROTARY": turned, "LEVEL": turned and step % tile.tokens == 0,
    }  # fmt: skip
    return Turn(tuple(tables) if turned else (unused,) * 4, constants)


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
def turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, HALF: tl.constexpr, EVEN: tl.constexpr):
    """cos and sin of the angle of each pair, in the far and near rows given."""
    real = pair < HALF
    far, near = far * HALF + pair, near * HALF + pair
    nc, ns = _value(near_cos, near, real, 1.0, EVEN), _value(near_sin, near, real, 0.0, EVEN)
    fc, fs = _value(far_cos, far, real, 1.0, EVEN), _value(far_sin, far, real, 0.0, EVEN)
    return fc * nc - fs * ns, fs * nc + fc * ns


@triton.jit
def fetch(ptr, row, pair, mask, KIND: tl.constexpr, D: tl.constexpr):
    """These pairs of these rows as they are in memory, for `unpack`: two tensors, of which words fill only the first."""
    if KIND == PLAIN:
        first = tl.load(ptr + row * D + 2 * pair, mask=mask, other=0.0)
        second = tl.load(ptr + row * D + 2 * pair + 1, mask=mask & (2 * pair + 1 < D), other=0.0)
    else:
        first = tl.load(_words(ptr, KIND) + row * (D // 2) + pair, mask=mask, other=0, eviction_policy="evict_first")
        second = first
    return first, second


@triton.jit
def _words(ptr, KIND: tl.constexpr):
    return ptr.to(tl.pointer_type(tl.int64 if KIND == F32 else tl.int32), bitcast=True)


@triton.jit
def unpack(first, second, KIND: tl.constexpr):
    """The even and odd channels, float32. Bfloat16 is the upper half of a float32, so a shift and a mask unpack its words."""
    if KIND == PLAIN:
        even, odd = first.to(tl.float32), second.to(tl.float32)
    elif KIND == BF16:
        even, odd = (first << 16).to(tl.float32, bitcast=True), (first & -65536).to(tl.float32, bitcast=True)
    elif KIND == F16:
        even = (first & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (first >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = first.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (first >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def weight_pairs(ptr, row, pair, KIND: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """The even and odd channels of one row of a weight; EVEN: all of these rows and pairs exist."""
    if EVEN and KIND != PLAIN:
        word = tl.load(_words(ptr, KIND) + row * (D // 2) + pair)
        even, odd = unpack(word, word, KIND)
    else:
        first, second = fetch(ptr, row, pair, (2 * pair < D) & (row < ROWS), KIND, D)
        even, odd = unpack(first, second, KIND)
    return even, odd


@triton.jit
def four(x, A: tl.constexpr, LANES: tl.constexpr):
    """(A, 4 LANES) as four tensors (A, LANES): the four neighbours that one thread holds, apart."""
    left, right = tl.split(tl.reshape(x, (A, LANES, 2, 2)))
    x0, x2 = tl.split(left)
    x1, x3 = tl.split(right)
    return x0, x1, x2, x3


@triton.jit
def beside(x0, x1, x2, x3, A: tl.constexpr, LANES: tl.constexpr):
    """Back from `four`."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (A, 4 * LANES))
