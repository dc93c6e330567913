"""Layer norm of float32 tokens in 16 bits: what an eager call would round in a pass of its own.

y = x w + b,  x = (z - mean z) / sqrt(var z + eps)
dz = (h - mean h - x mean(h x)) / sqrt(var z + eps) + more,  h = w dy        dw = sum_n dy x,  db = sum_n dy

Means are over the channels of a token, which fit in registers, so that nothing is kept beside z. The step adds its update to
the same z: `layer_norm` hands z on to it, so that what comes back that way, `more`, is added here in no pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from dmst.kernels import plan
from dmst.kernels.attempt import attempt
from dmst.kernels.casting import aligned
from dmst.kernels.fused.core import rounded
from dmst.kernels.fused.launch import Once, launch, op


@triton.jit
def _normal(z_ptr, at, real, D: tl.constexpr, eps: tl.constexpr):
    """x and 1 / sqrt(var z + eps) of some tokens."""
    z = tl.load(z_ptr + at, mask=real, other=0.0)
    z = tl.where(real, z - tl.sum(z, 1)[:, None] / D, 0.0)
    scale = tl.rsqrt(tl.sum(z * z, 1)[:, None] / D + eps)
    return tl.where(real, z * scale, 0.0), scale


@triton.jit
def norm_kernel(
    z_ptr, weight_ptr, bias_ptr, y_ptr, rows, eps: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token, channel = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    real = (token[:, None] < rows) & (channel[None, :] < D)
    at = token[:, None] * D + channel[None, :]
    x, _ = _normal(z_ptr, at, real, D, eps)
    weight = tl.load(weight_ptr + channel, mask=channel < D, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=channel < D, other=0.0)
    tl.store(y_ptr + at, (x * weight[None, :] + bias[None, :]).to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def norm_adjoint_kernel(
    z_ptr, weight_ptr, dy_ptr, more_ptr, dz_ptr, sums_ptr, rows, span, eps: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """`span` tokens; they leave a row of dw and one of db."""
    channel, start = tl.arange(0, WIDTH), tl.program_id(0).to(tl.int64) * span
    weight = tl.load(weight_ptr + channel, mask=channel < D, other=0.0)
    dweight, dbias = tl.zeros((TOKENS, WIDTH), tl.float32), tl.zeros((TOKENS, WIDTH), tl.float32)
    for first in range(0, tl.minimum(span, rows - start), TOKENS):
        token = start + first + tl.arange(0, TOKENS)
        real = (token[:, None] < rows) & (channel[None, :] < D)
        at = token[:, None] * D + channel[None, :]
        x, scale = _normal(z_ptr, at, real, D, eps)
        dy = tl.load(dy_ptr + at, mask=real, other=0.0).to(tl.float32)
        dweight += dy * x
        dbias += dy
        h = dy * weight[None, :]
        dz = scale * (h - tl.sum(h, 1)[:, None] / D - x * (tl.sum(h * x, 1)[:, None] / D))
        tl.store(dz_ptr + at, rounded(dz) + tl.load(more_ptr + at, mask=real, other=0.0), mask=real)
    sums_ptr += tl.program_id(0) * 2 * D + channel
    tl.store(sums_ptr, tl.sum(dweight, 0), mask=channel < D)
    tl.store(sums_ptr + D, tl.sum(dbias, 0), mask=channel < D)


def _tile(d: int, dtype: torch.dtype) -> dict[str, Any]:
    cut, width = plan.cut("norm", d, dtype), plan.power_of_two(d)
    return {"D": d, "WIDTH": width, "TOKENS": max(1, cut.tokens * cut.channels // width), "num_warps": cut.warps}


@op()
def norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """y in `dtype`, of z (..., d)."""
    rows, tile = z.numel() // z.shape[-1], _tile(z.shape[-1], dtype)
    y = torch.empty_like(z, dtype=dtype)
    launch(norm_kernel, (plan.over(rows, tile["TOKENS"]),), z, weight, bias, y, rows, eps=eps, **tile)
    return y


@op()
def norm_adjoint(z: Tensor, weight: Tensor, dy: Tensor, more: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dz, and rows of dw and db (programs, 2, d)."""
    rows, tile = z.numel() // z.shape[-1], _tile(z.shape[-1], dy.dtype)
    span = plan.over(plan.over(rows, plan.PROGRAMS["norm"]), tile["TOKENS"]) * tile["TOKENS"]
    dz, sums = torch.empty_like(z), z.new_empty(plan.over(rows, span), 2, z.shape[-1])
    launch(norm_adjoint_kernel, (sums.shape[0],), z, weight, dy, more, dz, sums, rows, span, eps=eps, **tile)
    return dz, sums


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple:
        ctx.save_for_backward(z, weight, bias)
        ctx.eps = eps
        return attempt(norm, _plain, (z, weight, bias, eps, dtype), z, _kind(z)), z

    @staticmethod
    def backward(ctx: Any, dy: Tensor, more: Tensor) -> tuple:
        z, weight, bias = ctx.saved_tensors
        with torch.no_grad():
            dz, sums = attempt(norm_adjoint, _plain_adjoint, (z, weight, aligned(dy), aligned(more), ctx.eps), z, _kind(z))
            grads = (dz, *sums.sum(0).unbind())
        return *(Once.apply(3, *grads, dy, more, z, weight, bias) if torch.is_grad_enabled() else grads), None, None


def layer_norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    given = (aligned(z), aligned(weight), aligned(bias), eps, dtype)
    return _Norm.apply(*given) if torch.is_grad_enabled() else (attempt(norm, _plain, given, z, _kind(z)), z)


# --- plain torch in their place --------------------------------------------------------------------------------------


def _kind(z: Tensor) -> tuple:
    return "the layer norm", z.shape[-1], z.device


def _plain(z: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.layer_norm(z, z.shape[-1:], weight, bias, eps).to(dtype)


def _plain_adjoint(z: Tensor, weight: Tensor, dy: Tensor, more: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shape = list(z.shape[-1:])
    _, mean, scale = torch.native_layer_norm(z, shape, weight, None, eps)
    dz, *sums = torch.ops.aten.native_layer_norm_backward(dy.float(), z, shape, mean, scale, weight, weight, [True] * 3)
    return dz + more, torch.stack(sums).unsqueeze(0)
