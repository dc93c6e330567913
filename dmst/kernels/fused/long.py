"""Long samples, each with an output weight of its own: no token is read for the update, nor for sweep 1 of the adjoint.

W_b = W diag(c_b)                    pi s W_b is the output: `hopper` leaves pi s with its moments, and multiplies by W_b
D_b = dout_b^T pi s                  a product a sample, from which both of these come
dW = sum_b D_b diag(c_b)             `unfold_kernel`
A_bi = sum_n G pi s = sum_j W_ji D_bji      `gather_kernel`, G = dout W
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.form import Form
from dmst.kernels.fused.core import MODES, attenuation, factor, rounded
from dmst.kernels.fused.launch import launch, op
from dmst.kernels.fused.moments import F32, finish
from dmst.kernels.plan import over, power_of_two


@triton.jit
def unfold_kernel(
    product_ptr, moment_ptr, gate_ptr, out_ptr, b,
    sign: tl.constexpr,
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


@op()
def fold(energy: Tensor, mass: Tensor, gate: Tensor | None, weight: Tensor, n: int, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """T, its divisor and W_b (b, d, k p), from rows of sums."""
    moment, divisor, folded = finish(energy, mass, gate, weight, n, Form.read(form))
    assert folded is not None
    return moment, divisor, folded


def products(dout: Tensor, weighted: Tensor) -> Tensor:
    """D_b (b, d, d). Few samples go in pieces: the library is slower at sums over more tokens."""
    b, n, d = dout.shape
    pieces = plan.pieces(b, n)
    cut = (b * pieces, n // pieces, d)
    made = dout.view(cut).mT @ weighted.view(cut)
    return made if pieces == 1 else made.view(b, pieces, d, d).sum(1, dtype=F32)


@op()
def unfold(product: Tensor, moment: Tensor, gate: Tensor | None, form: str) -> Tensor:
    """dW (d, d), float32."""
    told, (b, d, _) = Form.read(form), product.shape
    k, out = told.num_heads, torch.empty(d, d, device=product.device, dtype=F32)
    launch(
        unfold_kernel, (over(d, 8), k), product, moment, gate, out, b,
        sign=told.sign,
        D=d, K=k, P=d // k, WIDTH=power_of_two(d // k), ROWS=8, SAMPLES=4, MODE=MODES[told.mode], GATED=gate is not None,
        STAGES=3,
    )  # fmt: skip
    return out


@op()
def gather(product: Tensor, weight: Tensor, heads: int) -> Tensor:
    """A (b, k, p). Every row at once, if so many fit: by a quarter of them at a time it took a third longer."""
    (b, d, _), p = product.shape, product.shape[-1] // heads
    out, width = torch.empty(b, heads, p, device=product.device, dtype=F32), power_of_two(p)
    rows = max(16, min(power_of_two(d), 32768 // width))
    launch(
        gather_kernel, (b, heads), product, weight, out, *weight.stride(),
        D=d, K=heads, P=p, WIDTH=width, ROWS=rows, num_warps=max(1, min(16, rows * width // 2048)),
    )  # fmt: skip
    return out
