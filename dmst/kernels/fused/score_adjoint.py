"""From dscores back to the tokens and to `assign`.

    dpooled_k   = pullback(gate_scale dg)_k / n                       every token has this share in the pooled score
    dz_n        = (dS W_in)_n + rot_n^T sum_k dscores_nk assign_k     the product is read, dz is written
    dassign_k   = sum_n dscores_nk rot_n z_n                          one row of partial sums a program

The sums over heads and over tokens are small matrix products on the tensor cores (TF32 for 16-bit tokens, else float32).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.gate import pull_back
from dmst.kernels.fused.turn import load_pairs, turns


@triton.jit
def gate_adjoint_kernel(
    dgate_ptr, pooled_ptr, dpooled_ptr, n, scale, K: tl.constexpr, ALL: tl.constexpr, GATE: tl.constexpr, ACTIVE: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, ALL)
    dgate = tl.load(dgate_ptr + sample * K + head, mask=head < K, other=0.0) * scale
    pooled = tl.load(pooled_ptr + sample * K + head, mask=head < K, other=0.0)
    dpooled = pull_back(dgate, pooled, head, K, GATE, ACTIVE) / (n * 1.0)
    tl.store(dpooled_ptr + sample * K + head, dpooled, mask=head < K)


@triton.jit
def _dscores(dscores_ptr, dpooled_ptr, sample, row, here, head, K: tl.constexpr, GATED: tl.constexpr):
    """(tokens, heads), 0 where there is none."""
    some = here[:, None] & (head[None, :] < K)
    value = tl.load(dscores_ptr + row[:, None] * K + head[None, :], mask=some, other=0.0)
    if GATED:
        dpooled = tl.load(dpooled_ptr + sample * K + head, mask=head < K, other=0.0)
        value = tl.where(some, value + dpooled[None, :], 0.0)
    return value


@triton.jit
def into_tokens_kernel(
    assign_ptr, dscores_ptr, dpooled_ptr, product_ptr, far_cos, far_sin, near_cos, near_sin, dz_ptr,
    n, step, tiles,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    ASSIGN: tl.constexpr, ROTARY: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    EVEN: tl.constexpr = D % CHANNELS == 0
    head = tl.arange(0, HEADS)
    start = tl.program_id(1) * CHANNELS
    channel = start + tl.arange(0, CHANNELS)
    index = tl.program_id(0)
    sample, tile = (index // tiles).to(tl.int64), index % tiles
    token = tile * TOKENS + tl.arange(0, TOKENS)
    here = token < n
    row = sample * n + token
    at = row[:, None] * D + channel[None, :]
    full = here[:, None] if EVEN else here[:, None] & (channel[None, :] < D)
    product = tl.load(product_ptr + at, mask=full, other=0.0, eviction_policy="evict_first")
    dscores = _dscores(dscores_ptr, dpooled_ptr, sample, row, here, head, K, GATED)
    if ROTARY:
        pair = start // 2 + tl.arange(0, PAIRS)
        cos, sin = turns(far_cos, far_sin, near_cos, near_sin, token, pair, step, n, D // 2, EVEN)
        real = (head[:, None] < K) & (2 * pair[None, :] < D)
        w_even, w_odd = load_pairs(assign_ptr, head[:, None], pair[None, :], real, ASSIGN, D, EVEN and K == HEADS)
        even = tl.dot(dscores, w_even, input_precision=PRECISION)
        odd = tl.dot(dscores, w_odd, input_precision=PRECISION)
        dz = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (TOKENS, CHANNELS))
    else:
        real = (head[:, None] < K) & (channel[None, :] < D)
        w = tl.load(assign_ptr + head[:, None] * D + channel[None, :], mask=real, other=0.0).to(tl.float32)
        dz = tl.dot(dscores, w, input_precision=PRECISION)
    tl.store(dz_ptr + at, (product.to(tl.float32) + dz).to(dz_ptr.dtype.element_ty), mask=full)


@triton.jit
def into_assign_kernel(
    z_ptr, dscores_ptr, dpooled_ptr, far_cos, far_sin, near_cos, near_sin, dassign_ptr, dbias_ptr,
    n, step, tiles, run, last_tile,
    D: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    Z: tl.constexpr, ROTARY: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = CHANNELS // 2
    EVEN: tl.constexpr = D % CHANNELS == 0
    head = tl.arange(0, HEADS)
    start = tl.program_id(1) * CHANNELS
    channel = start + tl.arange(0, CHANNELS)
    pair = start // 2 + tl.arange(0, PAIRS)
    if ROTARY:
        dw_even, dw_odd = tl.zeros((HEADS, PAIRS), tl.float32), tl.zeros((HEADS, PAIRS), tl.float32)
    else:
        dw = tl.zeros((HEADS, CHANNELS), tl.float32)
    bias = tl.zeros((TOKENS, HEADS), tl.float32)
    begin = tl.program_id(0) * run
    for index in tl.range(begin, tl.minimum(begin + run, last_tile), num_stages=1):
        sample, tile = (index // tiles).to(tl.int64), index % tiles
        token = tile * TOKENS + tl.arange(0, TOKENS)
        here = token < n
        row = sample * n + token
        dscores = _dscores(dscores_ptr, dpooled_ptr, sample, row, here, head, K, GATED)
        across = tl.trans(dscores)
        if ROTARY:
            cos, sin = turns(far_cos, far_sin, near_cos, near_sin, token, pair, step, n, D // 2, EVEN)
            real = here[:, None] if EVEN else here[:, None] & (2 * pair[None, :] < D)
            even, odd = load_pairs(z_ptr, row[:, None], pair[None, :], real, Z, D, False)
            dw_even = tl.dot(across, even * cos - odd * sin, dw_even, input_precision=PRECISION)
            dw_odd = tl.dot(across, odd * cos + even * sin, dw_odd, input_precision=PRECISION)
        else:
            full = here[:, None] & (channel[None, :] < D)
            z = tl.load(z_ptr + row[:, None] * D + channel[None, :], mask=full, other=0.0).to(tl.float32)
            dw = tl.dot(across, z, dw, input_precision=PRECISION)
        if BIAS:
            bias += dscores
    out = tl.program_id(0).to(tl.int64)
    if ROTARY:
        dw = tl.reshape(tl.join(dw_even, dw_odd), (HEADS, CHANNELS))
    real = (head[:, None] < K) & (channel[None, :] < D)
    tl.store(dassign_ptr + (out * K + head[:, None]) * D + channel[None, :], dw, mask=real)
    if BIAS and tl.program_id(1) == 0:
        tl.store(dbias_ptr + out * K + head, tl.sum(bias, 0), mask=head < K)
