"""The update itself, one sweep: update_nki = f(pi_nk, c_ki) s_nki, with f and c of `core`. In the dtype of s.

weighted    what is kept is s' = pi s: update = c s'. Then the output weight's gradient needs no update at all:
            dW = sum_b dout_b^T update_b = sum_b (dout_b^T s'_b) diag(c_b), from one product D_b = dout_b^T s'_b a sample
            (`unfold_kernel`). Nor does the adjoint's A need a sweep of its own: with G = dout W,
            A_bi = sum_n G s' = sum_j W_ji D_bji (`gather_kernel`)
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmst.kernels.fused.core import PROXIMAL, attenuation, factor, gate_of_heads, head_block, rounded, tile, weigh


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


@triton.jit
def unfold_kernel(
    product_ptr, moment_ptr, gate_ptr, out_ptr, b, sign,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
    MODE: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The columns of one head of dW, a few rows: out (d, d), product (b, d, d), some samples at a time."""
    row, which, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.arange(0, WIDTH)
    real = (row[:, None] < D) & (channel[None, :] < P)
    at = row[:, None] * D + which * P + channel[None, :]
    total = tl.zeros((SAMPLES, ROWS, WIDTH), tl.float32)
    for first in tl.range(0, b, SAMPLES, num_stages=STAGES):
        sample = first + tl.arange(0, SAMPLES)
        some = sample < b
        here = product_ptr + sample[:, None, None].to(tl.int64) * (D * D) + at[None]
        here = tl.load(here, mask=some[:, None, None] & real[None], other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + sample * K + which, mask=some, other=0.0)[:, None] if GATED else 1.0
        moment = moment_ptr + (sample[:, None] * K + which) * P + channel[None, :]
        moment = tl.load(moment, mask=some[:, None] & (channel[None, :] < P), other=0.0)
        total += here * factor(attenuation(moment, gate), gate, 1.0, sign, MODE)[:, None, :]
    tl.store(out_ptr + at, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def gather_kernel(
    product_ptr, weight_ptr, out_ptr, along_rows, along_columns,
    D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A of one head of one sample: out (b, k, p), product (b, d, d)."""
    sample, which, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    column = which * P + channel[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in tl.range(0, D, ROWS, num_stages=1):
        row = first + tl.arange(0, ROWS)[:, None]
        real = (row < D) & (channel[None, :] < P)
        here = tl.load(product_ptr + sample * (D * D) + row * D + column, mask=real, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + row * along_rows + column * along_columns, mask=real, other=0.0).to(tl.float32)
        total += rounded(here * weight)
    tl.store(out_ptr + (sample * K + which) * P + channel, tl.sum(total, 0), mask=channel < P)
