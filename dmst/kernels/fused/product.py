"""The hidden channels of an MLP, gelu(x W^T + b), as one product: they are written once.

GELU is taken of the float32 sums of a tile, before they are rounded. gelu(x) = x Phi(x) = x / (1 + 2^(x q(x^2))), q a
polynomial: fitted, in float32 off by at most 6e-7, and from -3 on by 2e-5 of itself. Its limits are right: q falls for ever.
erf itself takes twice the time of the product.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels import plan
from dmst.kernels.fused.launch import flops, launch, op
from dmst.kernels.plan import over

GELU: tl.constexpr = tl.constexpr(  # the highest coefficient first
    (-4.78161562e-9, 3.62801069e-7, -1.10290295e-5, 1.5569583e-4, 1.10615411e-4, -0.104863936, -2.30219511)
)


@triton.jit
def gelu(x):
    square = x * x
    q = square * GELU[0] + GELU[1]
    for k in tl.static_range(2, 7):
        q = q * square + GELU[k]
    return x / (1.0 + tl.exp2(x * q))


@triton.jit
def linear_gelu_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows,
    D: tl.constexpr, H: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Neighbouring programs have the same rows, so that these are read from memory once."""
    blocks: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at = tl.arange(0, CHANNELS)
    x_ptr += row * D + at[None, :]
    weight_ptr += column * D + at[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, D, CHANNELS, num_stages=STAGES):
        if D % CHANNELS == 0 and H % COLUMNS == 0:
            x, weight = tl.load(x_ptr + first, mask=row < rows, other=0.0), tl.load(weight_ptr + first)
        else:
            x = tl.load(x_ptr + first, mask=(row < rows) & (first + at[None, :] < D), other=0.0)
            weight = tl.load(weight_ptr + first, mask=(column < H) & (first + at[:, None] < D), other=0.0)
        total = tl.dot(x, weight, total)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + column, gelu(total).to(out_ptr.dtype.element_ty), mask=(row < rows) & (column < H))


@op()
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., d) and weight (h, d), both in memory order: (..., h)."""
    (h, d), rows, tile = weight.shape, x.numel() // x.shape[-1], plan.cut("product", weight.shape[-1], x.dtype, weight.shape[0])
    out = x.new_empty(*x.shape[:-1], h)
    launch(
        linear_gelu_kernel, (over(rows, tile.tokens) * over(h, tile.columns),), x, weight, bias, out, rows,
        D=d, H=h, BIAS=bias is not None, ROWS=tile.tokens, COLUMNS=tile.columns, CHANNELS=tile.channels, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return out


flops("linear_gelu", lambda x, weight, *_: 2 * math.prod(x) * weight[0])
