"""The norm before a step, y = norm(z), for products to read.

Under autocast torch makes y in 32 bits, and the products round it in a pass of their own. Eager calls on a GPU write 16 bits at
once (`kernels/fused/norm.py`), and z comes back with them for the residual: so one pass adds its gradients of both.
torch.compile joins these passes by itself.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from dmst import tracing
from dmst.kernels import compute_dtype
from dmst.kernels.choice import chosen, machine_problem

WIDEST = 2048  # channels that fit in the registers of a program


def normed(norm: nn.Module, z: Tensor) -> tuple[Tensor, Tensor]:
    """norm(z), and z for the residual."""
    if not _narrows(norm, z):
        return norm(z), z
    from dmst.kernels.fused.norm import layer_norm  # Triton is imported only where it is used

    return layer_norm(z, norm.weight, norm.bias, norm.eps, compute_dtype(z))


def _narrows(norm: nn.Module, z: Tensor) -> TypeGuard[nn.LayerNorm]:
    if type(norm) is not nn.LayerNorm or not isinstance(z, Tensor) or not tracing.is_plain_eager():  # a proxy of torch.fx
        return False
    alike = z.dtype == torch.float32 and all(x is not None and x.dtype == z.dtype for x in (norm.weight, norm.bias))
    if not alike or compute_dtype(z).itemsize != 2 or chosen() == "reference" or z.shape[-1] > WIDEST:
        return False
    return tracing.is_plain(norm) and not machine_problem(z.device.type, z.device.index or 0, chosen() == "fused")
