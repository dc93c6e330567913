"""gelu(x) = x Phi(x), with Phi the normal distribution function; gelu'(x) = Phi(x) + x phi(x), with phi its density.

PyTorch's own, but in what the compiler makes for a GPU in bfloat16: there a pass waits for erf rather than for its bytes, and

    Phi(-a) = t (b1 + t (b2 + t (b3 + t (b4 + t b5)))) exp(-a^2 / 2),   t = 1 / (1 + c a),   a >= 0

(Abramowitz and Stegun 7.1.26) takes two thirds of the instructions, is off by at most 7.5e-8, and shares its exponential with
the slope. Graphs that are exported keep the operator by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import tracing

C = 0.2316418882
B = (0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145)
PEAK = 0.3989422804014327  # phi(0) = 1 / sqrt(2 pi)


def gelu(x: Tensor) -> Tensor:
    return _Short.apply(x) if _waits(x) else F.gelu(x)


class Gelu(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x) if self.approximate == "none" else super().forward(x)


def _waits(x: Tensor) -> bool:
    """Whether erf is what a pass waits for, and nobody reads the graph or looks through the function (per-sample gradients)."""
    if not torch.compiler.is_dynamo_compiling() or tracing.exported() or tracing.transformed():
        return False
    return x.dtype == torch.bfloat16 and _on_gpu(x)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        below, _ = _normal(x.float())
        return (x * below).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].float()
        below, bell = _normal(x)
        return (grad * (below + x * (PEAK * bell))).to(grad.dtype)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Phi(x), and exp(-x^2 / 2)."""
    bell, t = torch.exp(-0.5 * x * x), 1 / (1 + C * x.abs())
    tail = t * (B[0] + t * (B[1] + t * (B[2] + t * (B[3] + t * B[4])))) * bell
    return torch.where(x > 0, 1 - tail, tail), bell
