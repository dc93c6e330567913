"""From dscores back to the tokens and to `assign`.

    dz_n        = (dS W_in)_n + rot_n^T sum_k dscores_nk assign_k     the product is read, dz is written
    dassign_k   = sum_n dscores_nk rot_n z_n                          one row of partial sums a program

In plain float32 arithmetic. As in `score`, a thread owns a few pairs of a few tokens. On the way to the tokens it goes through
all heads; on the way to `assign` it keeps the sums of eight heads for its pairs while it goes through the tokens.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.fused.launch import flops, launch, op
from dmst.kernels.fused.score import GROUP
from dmst.kernels.fused.turn import beside, fetch, four, kind, places, turn, turns, unpack, weight_pairs
from dmst.kernels.plan import over


@triton.jit
def _dscores(
    dscores_ptr, dpooled_ptr, sample, row, here, first_head,
    K: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Of eight heads, (tokens, lanes) each, the same in every lane; 0 for heads that do not exist."""
    head = first_head + tl.arange(0, 4 * LANES)[None, :] % 4
    low = tl.load(dscores_ptr + row * K + head, mask=here & (head < K), other=0.0)
    high = tl.load(dscores_ptr + row * K + head + 4, mask=here & (head + 4 < K), other=0.0)
    if GATED:
        low += tl.load(dpooled_ptr + sample * K + head, mask=head < K, other=0.0)
        high += tl.load(dpooled_ptr + sample * K + head + 4, mask=head + 4 < K, other=0.0)
    return four(low, TOKENS, LANES) + four(high, TOKENS, LANES)


@triton.jit
def _add(e0, e1, e2, e3, o0, o1, o2, o3, dscore, assign_ptr, head, pair, D: tl.constexpr, K: tl.constexpr,
         LANES: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """The pairs of each token, and dscore w added to them, for one head."""
    even, odd = weight_pairs(assign_ptr, head, pair, KIND, D, K, D % (8 * LANES) == 0 and K % 8 == 0)
    w0, w1, w2, w3 = four(even, 1, LANES)
    v0, v1, v2, v3 = four(odd, 1, LANES)
    e0, o0 = tl.fma(dscore, tl.broadcast_to(w0, e0.shape), e0), tl.fma(dscore, tl.broadcast_to(v0, e0.shape), o0)
    e1, o1 = tl.fma(dscore, tl.broadcast_to(w1, e0.shape), e1), tl.fma(dscore, tl.broadcast_to(v1, e0.shape), o1)
    e2, o2 = tl.fma(dscore, tl.broadcast_to(w2, e0.shape), e2), tl.fma(dscore, tl.broadcast_to(v2, e0.shape), o2)
    e3, o3 = tl.fma(dscore, tl.broadcast_to(w3, e0.shape), e3), tl.fma(dscore, tl.broadcast_to(v3, e0.shape), o3)
    return e0, e1, e2, e3, o0, o1, o2, o3


@triton.jit
def into_tokens_kernel(
    assign_ptr, dscores_ptr, dpooled_ptr, product_ptr, far_cos, far_sin, near_cos, near_sin, dz_ptr,
    n, step, tiles,
    D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    ASSIGN: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    LANES: tl.constexpr = PAIRS // 4
    EVEN: tl.constexpr = D % CHANNELS == 0
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    token, far, near = places(tile, n, step, TOKENS, LEVEL)
    here = token < n
    row = sample * n + token
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)[None, :]
    full = here if EVEN else here & (channel < D)
    product = tl.load(product_ptr + row * D + channel, mask=full, other=0.0, eviction_policy="evict_first")
    e0 = tl.zeros((TOKENS, LANES), tl.float32)
    e1, e2, e3, o0, o1, o2, o3 = e0, e0, e0, e0, e0, e0, e0
    for head in tl.range(0, K, 8, num_stages=1):
        dscores = _dscores(dscores_ptr, dpooled_ptr, sample, row, here, head, K, TOKENS, LANES, GATED)
        for h in tl.static_range(8):
            if h < K:
                e0, e1, e2, e3, o0, o1, o2, o3 = _add(
                    e0, e1, e2, e3, o0, o1, o2, o3, dscores[h], assign_ptr, head + h, pair, D, K, LANES, ASSIGN
                )
    even, odd = beside(e0, e1, e2, e3, TOKENS, LANES), beside(o0, o1, o2, o3, TOKENS, LANES)
    if ROTARY:
        cos, sin = turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, D // 2, EVEN)
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    dz = product.to(tl.float32) + tl.reshape(tl.join(even, odd), (TOKENS, CHANNELS))
    tl.store(dz_ptr + row * D + channel, dz.to(dz_ptr.dtype.element_ty), mask=full)


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The upper and the lower half of the rows of x (2 ROWS, COLUMNS)."""
    return tl.split(tl.permute(tl.reshape(x, (2, ROWS, COLUMNS)), (1, 2, 0)))


@triton.jit
def _share(even_sum, odd_sum, even_0, odd_0, even_1, odd_1, dscore, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The sums of one head, and dscore times the two halves of this tile added to them."""
    upper, lower = _halves(dscore, ROWS, LANES)
    upper = tl.reshape(tl.broadcast_to(upper[:, :, None], (ROWS, LANES, 4)), (ROWS, 4 * LANES))
    lower = tl.reshape(tl.broadcast_to(lower[:, :, None], (ROWS, LANES, 4)), (ROWS, 4 * LANES))
    even_sum, odd_sum = tl.fma(upper, even_0, even_sum), tl.fma(upper, odd_0, odd_sum)
    return tl.fma(lower, even_1, even_sum), tl.fma(lower, odd_1, odd_sum)


@triton.jit
def _leave(dassign_ptr, even_sum, odd_sum, head, pair, D: tl.constexpr, K: tl.constexpr):
    at = dassign_ptr + head * D + 2 * pair
    tl.store(at, tl.sum(even_sum, 0), mask=(head < K) & (2 * pair < D))
    tl.store(at + 1, tl.sum(odd_sum, 0), mask=(head < K) & (2 * pair + 1 < D))


@triton.jit
def into_assign_kernel(
    z_ptr, dscores_ptr, dpooled_ptr, far_cos, far_sin, near_cos, near_sin, dassign_ptr,
    n, step, tiles, run, last_tile,
    D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, Z: tl.constexpr,
    ROTARY: tl.constexpr, LEVEL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    LANES: tl.constexpr = PAIRS // 4
    EVEN: tl.constexpr = D % CHANNELS == 0
    first_head = tl.program_id(2) * 8
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)[None, :]
    ROWS: tl.constexpr = TOKENS // 2
    none = tl.zeros((ROWS, PAIRS), tl.float32)
    evens, odds = (none, none, none, none, none, none, none, none), (none, none, none, none, none, none, none, none)
    begin = tl.program_id(0) * run
    sample, tile = (begin // tiles).to(tl.int64), begin % tiles
    for _ in tl.range(begin, tl.minimum(begin + run, last_tile), num_stages=1):
        token, far, near = places(tile, n, step, TOKENS, LEVEL)
        here = token < n
        row = sample * n + token
        first, second = fetch(z_ptr, row, pair, here if EVEN else here & (2 * pair < D), Z, D)
        even, odd = unpack(first, second, Z)
        if ROTARY:
            cos, sin = turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, D // 2, EVEN)
            even, odd = even * cos - odd * sin, odd * cos + even * sin
        even_0, even_1 = _halves(even, ROWS, PAIRS)
        odd_0, odd_1 = _halves(odd, ROWS, PAIRS)
        dscores = _dscores(dscores_ptr, dpooled_ptr, sample, row, here, first_head, K, TOKENS, LANES, GATED)
        new_evens, new_odds = (), ()
        for h in tl.static_range(8):
            even_sum, odd_sum = evens[h], odds[h]
            if h < K:
                even_sum, odd_sum = _share(even_sum, odd_sum, even_0, odd_0, even_1, odd_1, dscores[h], ROWS, LANES)
            new_evens += (even_sum,)
            new_odds += (odd_sum,)
        evens, odds = new_evens, new_odds
        over = tile + 1 == tiles
        sample, tile = tl.where(over, sample + 1, sample), tl.where(over, 0, tile + 1)
    out = dassign_ptr + tl.program_id(0).to(tl.int64) * (K * D)
    flat = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    for h in tl.static_range(8):
        if h < K:
            _leave(out, evens[h], odds[h], first_head + h, flat, D, K)


@op()
def into_tokens(
    product: Tensor, dscores: Tensor, dpooled: Tensor | None, assign: Tensor, tables: list[Tensor], step: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dz (b, n, d) from dS U^T and dscores (b, n, k); dpooled (b, k) is each token's share of the gate."""
    (b, n, d), tile = product.shape, plan.into_tokens(product.shape[-1])
    tiles = over(n, tile.tokens)
    dz = torch.empty_like(product, dtype=dtype)
    turned = turn(tables, step, d, tile, product)
    launch(
        into_tokens_kernel, (b * tiles, over(d, tile.channels)),
        assign, dscores, dpooled, product, *turned.tables, dz, n, step, tiles,
        K=dscores.shape[-1], ASSIGN=kind(assign), GATED=dpooled is not None, **turned.constants,
    )  # fmt: skip
    return dz


@op()
def into_assign(z: Tensor, dscores: Tensor, dpooled: Tensor | None, tables: list[Tensor], step: int) -> Tensor:
    """Partial sums (rows, k, d) of the gradient of `assign`."""
    (b, n, d), k = z.shape, dscores.shape[-1]
    tile = plan.into_assign(d)
    tiles = over(n, tile.tokens)
    run = over(b * tiles, plan.ASSIGN_PROGRAMS)
    part = torch.empty(over(b * tiles, run), k, d, device=z.device, dtype=torch.float32)
    turned = turn(tables, step, d, tile, z)
    launch(
        into_assign_kernel, (part.shape[0], over(d, tile.channels), over(k, GROUP)),
        z, dscores, dpooled, *turned.tables, part, n, step, tiles, run, b * tiles,
        K=k, Z=kind(z), GATED=dpooled is not None, **turned.constants,
    )  # fmt: skip
    return part


flops("into_tokens", lambda product, dscores, *_: 2 * math.prod(product) * dscores[-1])
flops("into_assign", lambda z, dscores, *_: 2 * math.prod(z) * dscores[-1])
