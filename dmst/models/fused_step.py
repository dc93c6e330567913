"""The first line of a block as one kernel (`kernels.step`): z + drop_path(scale * operator(norm z)).

It calls none of the modules. So it is used only if they are unmodified (no hook, adapter or parametrization:
`tracing.is_plain`), without dropout, and with everything in the dtype of z. `kernels.step` says whether the kernels can.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dmst import tracing
from dmst.kernels import compute_dtype, plan, step
from dmst.models.residual import Residual
from dmst.operators import Operator
from dmst.operators.family import TokenStatistics


def serves(norm: nn.LayerNorm, operator: Operator, residual: Residual, z: Tensor) -> bool:
    if not (plan.STEPS and isinstance(z, Tensor) and isinstance(operator, TokenStatistics)):  # torch.fx passes a proxy
        return False
    if not step.serves(z, operator.form, compute_dtype(z)) or (operator.skip_silent and not torch.is_grad_enabled()):
        return False
    if not (isinstance(norm, nn.LayerNorm) and norm.normalized_shape == (operator.dim,) and norm.bias is not None):
        return False
    drop = operator.proj_drop
    if (drop.p and drop.training) or not (operator.is_plain() and tracing.is_plain(norm, operator, drop, residual)):
        return False
    held = (norm.weight, norm.bias, residual.scale, operator.subspace.weight)
    return all(x is None or x.dtype == z.dtype for x in held)


def run(norm: nn.LayerNorm, operator: Operator, residual: Residual, z: Tensor, grid: tuple[int, int] | None) -> Tensor:
    assert isinstance(operator, TokenStatistics)
    operator.check(z)
    scale = residual.scale
    if scale is not None and operator.wants_scalar_scale:
        scale = scale.reshape(())  # type: ignore[assignment]
    weights, keep = operator.weights(), residual.draw(z)
    return step.residual_step(z, norm.weight, norm.bias, norm.eps, weights, operator.form, scale=scale, keep=keep, grid=grid)
