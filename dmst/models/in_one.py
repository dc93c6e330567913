"""The first line of a block as one kernel (`kernels.step`): z + drop_path(scale * operator(norm z)).

Only where nobody can tell: the usual norm, operator and residual, nobody who listens to one of them, no dropout between them,
and everything in the dtype of z. Whether the kernels serve is for `kernels.step` to say.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dmst import tracing
from dmst.kernels import compute_dtype, plan
from dmst.kernels import step as kernel
from dmst.models.residual import Residual
from dmst.operators import Operator
from dmst.operators.family import TokenStatistics


def step(
    norm: nn.LayerNorm,
    operator: Operator,
    residual: Residual,
    z: Tensor,
    grid: tuple[int, int] | None,
    pending: Tensor | None = None,
) -> Tensor:
    assert isinstance(operator, TokenStatistics)
    operator.check(z)
    given, scale = (norm.weight, norm.bias, norm.eps, operator.weights(), operator.form), residual.scale
    scale = scale.reshape(()) if scale is not None and operator.wants_scalar_scale else scale  # type: ignore[assignment]
    return kernel.residual_step(z, *given, scale=scale, keep=residual.draw(z), pending=pending, grid=grid)


def serves(norm: nn.LayerNorm, operator: Operator, residual: Residual, z: Tensor) -> bool:
    if not plan.STEPS or tracing.proxied(z):
        return False
    if not isinstance(operator, TokenStatistics) or not _usual(norm, operator, residual):
        return False
    drop = operator.proj_drop
    if (drop.p and drop.training) or tracing.everywhere() or any(map(tracing.hooked, (norm, operator, residual, drop))):
        return False
    if not operator.is_plain():
        return False
    held = {x.dtype for x in (norm.weight, norm.bias, residual.scale, operator.subspace.weight) if x is not None}
    return held == {z.dtype} and kernel.serves(z, operator.form, compute_dtype(z))


def _usual(norm: nn.LayerNorm, operator: TokenStatistics, residual: Residual) -> bool:
    """The parts that a block is made with, no subclass with ideas of its own; and no silent heads to leave out."""
    mine = type(operator)
    own = mine.forward is not TokenStatistics.forward or mine.weights is not TokenStatistics.weights
    skips = operator.skip_silent and not torch.is_grad_enabled()
    whole = type(norm) is nn.LayerNorm and norm.bias is not None and norm.normalized_shape == (operator.dim,)
    return whole and type(residual) is Residual and not (own or skips)
