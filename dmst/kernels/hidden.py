"""gelu(z W^T + b), the hidden channels of an MLP: plain torch, or on a GPU, where no gradient is wanted, one kernel.

The kernel (`fused/product.py`) takes GELU of its float32 sums, so that the hidden channels are written once, and read by the
second product alone. Where a gradient is wanted plain torch stays: z W^T + b must be kept then, and what the compiler makes of
GELU there keeps nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import tracing
from dmst.kernels import choice, compute_dtype, plan, without_autocast
from dmst.kernels.arithmetic import cast
from dmst.kernels.attempt import attempt
from dmst.kernels.autocast import autocast_is_on


def serves(z: Tensor, weight: Tensor) -> bool:
    """Whether the kernel computes the hidden channels of tokens z (..., d) by a weight (h, d), now."""
    if not _on_gpu(z) or torch.is_grad_enabled() or choice.chosen() == "reference":
        return False
    if tracing.exported() or tracing.transformed() or tracing.dispatched():
        return False
    (h, d), alike = weight.shape, autocast_is_on(z) or z.dtype == weight.dtype
    if not alike or z.device != weight.device or z.shape[-1] != d or not _fits(z.device.index, compute_dtype(z), h, d):
        return False
    return tracing.surely(z.numel() // d >= plan.GELU_ROWS)


def linear_gelu(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(z W^T + b), (..., h), in the compute dtype. Only where `serves`."""
    low = cast(z, compute_dtype(z))  # in the graph: the compiler writes it so where it makes z
    with without_autocast(z):
        return attempt(_fused, _plain, (low, weight, bias), low, ("an MLP", weight.shape, low.dtype, z.device))


def _on_gpu(z: Tensor) -> bool:
    return z.is_cuda


def _fits(index: int, dtype: torch.dtype, h: int, d: int) -> bool:
    """Asked once while a graph is traced: it has the answer as a constant."""
    if choice.machine_problem("cuda", index, False):
        return False
    return dtype in (torch.bfloat16, torch.float16) and d % 16 == 0 and h % 16 == 0


_fits._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fused(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from dmst.kernels.fused import product  # Triton is imported only where it is used

    return product.linear_gelu(z, weight.to(z.dtype), cast(bias, z.dtype))


def _plain(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.gelu(F.linear(z, cast(weight, z.dtype), cast(bias, z.dtype)))
