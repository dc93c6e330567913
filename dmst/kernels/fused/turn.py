"""Rotary position in registers: rot_n = far_(n // step) near_(n % step), two short tables (`rotary.factors`).

    (even, odd) -> (even cos - odd sin, odd cos + even sin)

A table as long as the image would be read once a sample and push the tokens out of the cache; of these two the near rows (48 kB
at width 384 and 32 rows) stay next to the processor and a tile needs few far rows.

A tile of the kernels that rotate is (tokens, pairs). Where it lies within one step (`LEVEL`), it has one far row and its near
rows follow each other, so that little is read.

At the end, the rotation as a pass of its own, for GMSA: its keys read rotated tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.fused.launch import launch, op
from dmst.kernels.plan import Tile, over

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


# --- a pass of its own -----------------------------------------------------------------------------------------------


@triton.jit
def turn_kernel(
    z_ptr, far_cos, far_sin, near_cos, near_sin, low_ptr, turned_ptr, sum_ptr, n, step, tiles,
    D: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, Z: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    token, far, near = places(tile, n, step, TOKENS, LEVEL)
    row = sample * n + token
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)[None, :]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = (token < n) & (channel[None, :] < D)
    first, second = fetch(z_ptr, row, pair, (token < n) & (2 * pair < D), Z, D)
    even, odd = unpack(first, second, Z)
    at = row * D + channel[None, :]
    if LOW:
        low = tl.reshape(tl.join(even, odd), (TOKENS, CHANNELS))
        tl.store(low_ptr + at, low.to(low_ptr.dtype.element_ty), mask=here)
    cos, sin = turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, D // 2, D % CHANNELS == 0)
    turned = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (TOKENS, CHANNELS))
    tl.store(turned_ptr + at, turned.to(turned_ptr.dtype.element_ty), mask=here)
    tl.store(sum_ptr + (sample * tiles + tile) * D + channel, tl.sum(turned, 0), mask=channel < D)


@triton.jit
def turn_back_kernel(
    dturned_ptr, share_ptr, product_ptr, far_cos, far_sin, near_cos, near_sin, dz_ptr, n, step, tiles,
    D: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, Z: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    token, far, near = places(tile, n, step, TOKENS, LEVEL)
    row = sample * n + token
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)[None, :]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    here = (token < n) & (channel < D)
    first, second = fetch(dturned_ptr, row, pair, (token < n) & (2 * pair < D), Z, D)
    even, odd = unpack(first, second, Z)
    if GATED:
        some = 2 * pair < D
        even += tl.load(share_ptr + sample * D + 2 * pair, mask=some, other=0.0)
        odd += tl.load(share_ptr + sample * D + 2 * pair + 1, mask=some, other=0.0)
    cos, sin = turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, D // 2, D % CHANNELS == 0)
    back = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (TOKENS, CHANNELS))
    at = row * D + channel
    dz = back + tl.load(product_ptr + at, mask=here, other=0.0).to(tl.float32)
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=here)


@op()
def turn_tokens(z: Tensor, tables: list[Tensor], step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """z in `dtype` (empty where it is so already), rot_n z_n in it, and sums of that by tile, (b, tiles, d)."""
    (b, n, d), tile, cast = z.shape, plan.into_tokens(z.shape[-1]), z.dtype != dtype
    tiles = over(n, tile.tokens)
    low = torch.empty_like(z, dtype=dtype) if cast else z.new_empty(0)
    turned = torch.empty_like(z, dtype=dtype)
    sums = torch.empty(b, tiles, d, device=z.device, dtype=torch.float32)
    given = turn(tables, step, d, tile, z)
    launch(
        turn_kernel, (b * tiles, over(d, tile.channels)), z, *given.tables, low, turned, sums, n, step, tiles,
        Z=kind(z), LOW=cast, **given.constants,
    )  # fmt: skip
    return low, turned, sums


@op()
def turn_tokens_back(
    dturned: Tensor, share: Tensor | None, product: Tensor, tables: list[Tensor], step: int, dtype: torch.dtype
) -> Tensor:
    """product + rot_n^T (dturned_n + share), in `dtype`; share (b, d) is the same for every token."""
    (b, n, d), tile = product.shape, plan.into_tokens(product.shape[-1])
    tiles = over(n, tile.tokens)
    dz = torch.empty_like(product, dtype=dtype)
    given = turn(tables, step, d, tile, product)
    launch(
        turn_back_kernel, (b * tiles, over(d, tile.channels)), dturned, share, product, *given.tables, dz, n, step, tiles,
        Z=kind(dturned), GATED=share is not None, **given.constants,
    )  # fmt: skip
    return dz
