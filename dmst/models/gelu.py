"""GELU, and the hidden channels of an MLP, gelu(z W^T + b), as fast as memory allows.

What torch.compile makes of 16-bit numbers on a GPU waits for erf. There GELU is a formula of ten multiplications:

    gelu(x) = x / (1 + 2^(x q(x^2)))        q a polynomial, fitted: off by at most 6e-7, and from -3 on by 2e-5 of itself

Its limits are right: q falls for ever. In inference in bfloat16 the library takes GELU of the float32 sums of its product, so
that the hidden channels are written once. That is the tanh formula, off by at most 5e-4; with the rounding that it saves, the
hidden channels are nearer to float64 than by two steps (`test_hidden_channels_are_nearer_to_float64`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from dmst import onednn, tracing
from dmst.kernels import compute_dtype, without_autocast
from dmst.kernels.casting import autocast_is_on, cast
from dmst.kernels.choice import chosen

Q = (-4.78161562e-9, 3.62801069e-7, -1.10290295e-5, 1.5569583e-4, 1.10615411e-4, -0.104863936, -2.30219511)


def gelu(x: Tensor) -> Tensor:
    return Formula.apply(x) if tracing.compiled() and x.is_cuda and x.dtype.itemsize == 2 else F.gelu(x)


def normal(x: Tensor) -> Tensor:
    """The normal distribution function by the formula, so that gelu(x) = x normal(x)."""
    square = x * x
    q = square * Q[0] + Q[1]
    for more in Q[2:]:
        q = q * square + more
    return 1 / (1 + torch.exp2(x * q))


class Formula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * normal(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        density = torch.exp2(wide * wide * (-0.5 / math.log(2))) / math.sqrt(2 * math.pi)
        return (grad.float() * (normal(wide) + wide * density)).to(grad.dtype)


def hidden(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(z W^T + b), (..., h), in the compute dtype."""
    if not z.is_cuda:
        return onednn.linear(z, weight, bias, "gelu")
    if not _in_one_product(z, weight):
        return gelu(F.linear(z, weight, bias))
    dtype = compute_dtype(z)
    with without_autocast(z):
        given = cast(z, dtype), cast(weight, dtype), cast(bias, dtype)
        return _product(*given) if tracing.is_plain_eager() else _operator(*given)


def _in_one_product(z: Tensor, weight: Tensor) -> bool:
    if torch.is_grad_enabled() or chosen() == "reference":
        return False
    if tracing.exported() or tracing.transformed() or tracing.dispatched() or compute_dtype(z) != torch.bfloat16:
        return False
    alike = autocast_is_on(z) or z.dtype == weight.dtype
    return alike and z.device == weight.device and z.shape[-1] == weight.shape[1]


def _product(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    made = torch._addmm_activation(bias, z.flatten(0, -2), weight.transpose(0, 1), use_gelu=True)
    return made.view(*z.shape[:-1], weight.shape[0])


# an operator of its own: the compiler would take it apart
_operator = torch.library.custom_op("dmst::hidden", _product, mutates_args=())
_operator.register_fake(lambda z, weight, bias: z.new_empty(*z.shape[:-1], weight.shape[0]))
register_flop_formula(torch.ops.dmst.hidden)(lambda z, weight, bias, **_: 2 * math.prod(z) * weight[0])
