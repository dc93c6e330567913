"""Scores of every token, rotated in registers, and what the gate needs of them.

    l_nk = <rot_n z_n, assign_k> + bias          membership_nk = sigmoid(l_nk), or the score itself
    score_sum_k = sum over the tile's tokens of l_nk, one row a tile: added up in a fixed order later

A program takes a tile of tokens and eight heads, in plain float32 arithmetic, exact. A thread owns the four pairs that one wide
load brings, of a few tokens: it adds up its own products (`four` gives it each pair by name), so that a head has one
accumulator a token, and the lanes are summed once, at the end.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.fused.launch import flops, launch, op
from dmst.kernels.fused.turn import fetch, four, kind, places, turn, turns, unpack, weight_pairs
from dmst.kernels.plan import over

GROUP = 8  # heads of one program


@triton.jit
def _add(total, e0, e1, e2, e3, o0, o1, o2, o3, assign_ptr, head, pair, D: tl.constexpr, K: tl.constexpr,
         LANES: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """total + sum over the pairs of even w_even + odd w_odd, for one head."""
    even, odd = weight_pairs(assign_ptr, head, pair, KIND, D, K, D % (8 * LANES) == 0 and K % 8 == 0)
    w0, w1, w2, w3 = four(even, 1, LANES)
    v0, v1, v2, v3 = four(odd, 1, LANES)
    total = tl.fma(e0, tl.broadcast_to(w0, total.shape), total)
    total = tl.fma(o0, tl.broadcast_to(v0, total.shape), total)
    total = tl.fma(e1, tl.broadcast_to(w1, total.shape), total)
    total = tl.fma(o1, tl.broadcast_to(v1, total.shape), total)
    total = tl.fma(e2, tl.broadcast_to(w2, total.shape), total)
    total = tl.fma(o2, tl.broadcast_to(v2, total.shape), total)
    total = tl.fma(e3, tl.broadcast_to(w3, total.shape), total)
    return tl.fma(o3, tl.broadcast_to(v3, total.shape), total)


@triton.jit
def _column(total, which, slot):
    """The sums over the lanes of `total` as column `which` of a table (tokens, slots) that is 0 elsewhere."""
    return tl.where(slot == which, tl.sum(total, 1)[:, None], 0.0)


@triton.jit
def score_kernel(
    z_ptr, assign_ptr, bias_ptr, far_cos, far_sin, near_cos, near_sin, out_ptr, sum_ptr,
    n, step, tiles,
    D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, Z: tl.constexpr,
    ASSIGN: tl.constexpr, ROTARY: tl.constexpr, LEVEL: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    LANES: tl.constexpr = PAIRS // 4
    EVEN: tl.constexpr = D % CHANNELS == 0
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    first_head = tl.program_id(1) * 8
    token, far, near = places(tile, n, step, TOKENS, LEVEL)
    here = token < n
    row = sample * n + token
    none = tl.zeros((TOKENS, LANES), tl.float32)
    totals = (none, none, none, none, none, none, none, none)
    pair = tl.arange(0, PAIRS)[None, :]
    now = fetch(z_ptr, row, pair, here & (2 * pair < D), Z, D)
    for first in tl.range(0, D, CHANNELS, num_stages=1):
        pair = first // 2 + tl.arange(0, PAIRS)[None, :]
        ahead = fetch(z_ptr, row, pair + PAIRS, here & (2 * pair + CHANNELS < D), Z, D)  # on its way during the arithmetic
        even, odd = unpack(now[0], now[1], Z)
        now = ahead
        if ROTARY:
            cos, sin = turns(far_cos, far_sin, near_cos, near_sin, far, near, pair, D // 2, EVEN)
            even, odd = even * cos - odd * sin, odd * cos + even * sin
        e0, e1, e2, e3 = four(even, TOKENS, LANES)
        o0, o1, o2, o3 = four(odd, TOKENS, LANES)
        added = ()
        for h in tl.static_range(8):
            total = totals[h]
            if h < K:
                total = _add(total, e0, e1, e2, e3, o0, o1, o2, o3, assign_ptr, first_head + h, pair, D, K, LANES, ASSIGN)
            added += (total,)
        totals = added
    slot = tl.arange(0, 8)[None, :]
    scores = tl.zeros((TOKENS, 8), tl.float32)
    for h in tl.static_range(8):
        scores += _column(totals[h], h, slot)
    head = first_head + slot
    if BIAS:
        scores += tl.load(bias_ptr + head, mask=head < K, other=0.0).to(tl.float32)
    if SUMS:
        total = tl.sum(tl.where(here, scores, 0.0), 0)
        which = first_head + tl.arange(0, 8)
        tl.store(sum_ptr + (sample * tiles + tile) * K + which, total, mask=which < K)
    value = tl.sigmoid(scores) if SIGMOID else scores
    tl.store(out_ptr + row * K + head, value, mask=here & (head < K))


@op()
def score(
    z: Tensor, assign: Tensor, bias: Tensor | None, tables: list[Tensor], step: int, sigmoid: bool, pooled: bool
) -> tuple[Tensor, Tensor]:
    """pi or l of z (b, n, d), as (b, n, k); with `pooled` sums of l by tile, (b, tiles, k)."""
    (b, n, d), k = z.shape, assign.shape[0]
    tile = plan.score(d)
    tiles = over(n, tile.tokens)
    out = torch.empty(b, n, k, device=z.device, dtype=torch.float32)
    sums = torch.empty(b, tiles if pooled else 0, k, device=z.device, dtype=torch.float32)
    turned = turn(tables, step, d, tile, z)
    launch(
        score_kernel, (b * tiles, over(k, GROUP)), z, assign, bias, *turned.tables, out, sums, n, step, tiles,
        K=k, Z=kind(z), ASSIGN=kind(assign), BIAS=bias is not None, SIGMOID=sigmoid, SUMS=pooled, maxnreg=128,
        **turned.constants,
    )  # fmt: skip
    return out, sums


flops("score", lambda z, assign, *_: 2 * math.prod(z) * assign[0])
