"""Scores of every token, rotated in registers, and what the gate needs of them.

    l_nk = <rot_n z_n, assign_k> + bias          membership_nk = sigmoid(l_nk), or the score itself
    score_sum_k = sum over the tile's tokens of l_nk, one row a tile: added up in a fixed order later

A program takes a tile of tokens and eight heads. Each head has an accumulator as wide as one step along the channels, and is
summed across lanes once, at the end. Plain float32 arithmetic: exact, and measured faster than the tensor cores, which would
have to be fed three products of split operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.turn import load_pairs, turns

ROTARY = {"none": 0, "1d": 1, "2d": 1}
GROUP = 8  # heads of one program


@triton.jit
def _add(total, even, odd, assign_ptr, head, pair, D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
         PAIRS: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """total + even w_even + odd w_odd, for one head."""
    w_even, w_odd = load_pairs(
        assign_ptr, head, pair, (2 * pair < D) & (head < K), KIND, D, D % (2 * PAIRS) == 0 and K % 8 == 0
    )
    total = tl.fma(even, tl.broadcast_to(w_even[None, :], (TOKENS, PAIRS)), total)
    return tl.fma(odd, tl.broadcast_to(w_odd[None, :], (TOKENS, PAIRS)), total)


@triton.jit
def _column(total, which, slot):
    """The row sums of `total` as column `which` of a table (tokens, slots) that is 0 elsewhere."""
    return tl.where(slot[None, :] == which, tl.sum(total, 1)[:, None], 0.0)


@triton.jit
def score_kernel(
    z_ptr, assign_ptr, bias_ptr, far_cos, far_sin, near_cos, near_sin, out_ptr, sum_ptr,
    n, step, tiles,
    D: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, Z: tl.constexpr, ASSIGN: tl.constexpr,
    ROTARY: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    EVEN: tl.constexpr = D % CHANNELS == 0
    sample, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    first_head = tl.program_id(1) * 8
    token = tile * TOKENS + tl.arange(0, TOKENS)
    here = token < n
    row = sample * n + token
    a0 = tl.zeros((TOKENS, PAIRS), tl.float32)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for first in tl.range(0, D, CHANNELS, num_stages=1):
        pair = first // 2 + tl.arange(0, PAIRS)
        real = here[:, None] if EVEN else here[:, None] & (2 * pair[None, :] < D)
        even, odd = load_pairs(z_ptr, row[:, None], pair[None, :], real, Z, D, False)
        if ROTARY:
            cos, sin = turns(far_cos, far_sin, near_cos, near_sin, token, pair, step, n, D // 2, EVEN)
            even, odd = even * cos - odd * sin, odd * cos + even * sin
        a0 = _add(a0, even, odd, assign_ptr, first_head, pair, D, K, TOKENS, PAIRS, ASSIGN)
        if K > 1:
            a1 = _add(a1, even, odd, assign_ptr, first_head + 1, pair, D, K, TOKENS, PAIRS, ASSIGN)
        if K > 2:
            a2 = _add(a2, even, odd, assign_ptr, first_head + 2, pair, D, K, TOKENS, PAIRS, ASSIGN)
        if K > 3:
            a3 = _add(a3, even, odd, assign_ptr, first_head + 3, pair, D, K, TOKENS, PAIRS, ASSIGN)
        if K > 4:
            a4 = _add(a4, even, odd, assign_ptr, first_head + 4, pair, D, K, TOKENS, PAIRS, ASSIGN)
        if K > 5:
            a5 = _add(a5, even, odd, assign_ptr, first_head + 5, pair, D, K, TOKENS, PAIRS, ASSIGN)
        if K > 6:
            a6 = _add(a6, even, odd, assign_ptr, first_head + 6, pair, D, K, TOKENS, PAIRS, ASSIGN)
        if K > 7:
            a7 = _add(a7, even, odd, assign_ptr, first_head + 7, pair, D, K, TOKENS, PAIRS, ASSIGN)
    slot = tl.arange(0, 8)
    scores = _column(a0, 0, slot) + _column(a1, 1, slot) + _column(a2, 2, slot) + _column(a3, 3, slot)
    scores += _column(a4, 4, slot) + _column(a5, 5, slot) + _column(a6, 6, slot) + _column(a7, 7, slot)
    head = first_head + slot
    if BIAS:
        scores += tl.load(bias_ptr + head, mask=head < K, other=0.0).to(tl.float32)[None, :]
    if SUMS:
        total = tl.sum(tl.where(here[:, None], scores, 0.0), 0)
        tl.store(sum_ptr + (sample * tiles + tile) * K + head, total, mask=head < K)
    value = tl.sigmoid(scores) if SIGMOID else scores
    tl.store(out_ptr + row[:, None] * K + head[None, :], value, mask=here[:, None] & (head[None, :] < K))
