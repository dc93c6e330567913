"""The update itself, one sweep: update_nki = f(pi_nk, c_ki) s_nki, with f and c of `core`. In the dtype of s.

weighted    what is kept is s' = pi s: update = c s'. Then the output weight's gradient needs no update at all:
            dW = sum_b dout_b^T update_b = sum_b (dout_b^T s'_b) diag(c_b), from one product D_b = dout_b^T s'_b a sample
            (`unfold_kernel`). Nor does A need a sweep of its own: with G = dout W, A_bi = sum_n G s' = sum_j W_ji D_bji
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.core import PROXIMAL, attenuation, factor, gate_of_heads, head_block, rounded, tile, weigh
from dmst.kernels.fused.launch import launched


@launched
@triton.jit
def update_kernel(
    s_ptr, membership_ptr, moment_ptr, gate_ptr, theta_ptr, out_ptr,
    n, span, sign,
    K: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    MODE: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column, inside = head_block(HEADS, WIDTH, K, P, tl.program_id(2) * HEADS)
    gate = gate_of_heads(gate_ptr, sample, head, K, GATED)[:, None]
    a = attenuation(tl.load(moment_ptr + sample * (K * P) + column, mask=inside, other=0.0), gate)
    theta = tl.load(theta_ptr).to(tl.float32) if MODE == PROXIMAL else 1.0
    c = factor(a, gate, theta, sign, MODE)
    stop = tl.minimum((split + 1) * span, n)
    for first in tl.range(split * span, stop, TOKENS, num_stages=STAGES):
        at, real, place, some = tile(first, stop, sample, n, head, column, inside, K, P, TOKENS)
        s = tl.load(s_ptr + at, mask=real, other=0.0).to(tl.float32)
        if WEIGHTED:
            update = c[None] * s
        else:
            pi = tl.load(membership_ptr + place, mask=some, other=0.0)
            update = weigh(pi[:, :, None], c[None], MODE) * s
        tl.store(out_ptr + at, update.to(out_ptr.dtype.element_ty), mask=real)


@launched
@triton.jit
def unfold_kernel(
    product_ptr, moment_ptr, gate_ptr, weight_ptr, out_ptr, part_ptr, b, along_rows, along_columns, sign,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr,
    GATED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The columns of one head of dW, a few rows: out (d, d), product (b, d, d); and what these rows add to each sample's A."""
    row, which, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.arange(0, WIDTH)
    real = (row[:, None] < D) & (channel[None, :] < P)
    at = row[:, None] * D + which * P + channel[None, :]
    weight, part = 0.0, part_ptr
    if SUM:
        weight = weight_ptr + row[:, None] * along_rows + (which * P + channel[None, :]) * along_columns
        weight = tl.load(weight, mask=real, other=0.0).to(tl.float32)
        part += (tl.program_id(0) * K + which) * P + channel
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    product = product_ptr + at
    for sample in tl.range(0, b, num_stages=4):
        gate = tl.load(gate_ptr + sample * K + which) if GATED else 1.0
        moment = tl.load(moment_ptr + (sample * K + which) * P + channel, mask=channel < P, other=0.0)
        c = factor(attenuation(moment, gate), gate, 1.0, sign, MODE)
        here = tl.load(product, mask=real, other=0.0).to(tl.float32)
        total += here * c[None, :]
        if SUM:
            tl.store(part, tl.sum(rounded(here * weight), 0), mask=channel < P)
            part += tl.num_programs(0) * D
        product += D * D
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=real)
