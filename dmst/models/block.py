"""Block: two lines, whatever the operator.

z <- residual(z, operator(norm z))     z + drop_path(scale * update)
z <- feedforward(z)                    which owns its residual

Where `_serves`, the first line is one call of a kernel (`kernels.step`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from dmst import tracing
from dmst.kernels import compute_dtype, step
from dmst.models.config import ModelConfig
from dmst.models.feedforward import FEEDFORWARDS
from dmst.models.residual import Residual
from dmst.operators import Operator, Parts
from dmst.operators.family import TokenStatistics

Grid = tuple[int, int] | None


class LayerTrace(NamedTuple):
    """What one block did to some tokens."""

    z: Tensor  # (b, n, d)                 what came in
    normed: Tensor  # (b, n, d)            what the operator read
    parts: Parts  #                        what it computed of that
    after_operator: Tensor  # (b, n, d)    after the first line
    after_feedforward: Tensor  # (b, n, d) after the second


class Block(nn.Module):
    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps, **factory)
        self.operator = config.create_operator(**factory)
        scalar = self.operator.wants_scalar_scale
        self.residual = Residual(config.dim, config.layer_scale, config.drop_path_rate, scalar=scalar, **factory)
        self.feedforward = FEEDFORWARDS[config.feedforward](config, **factory)

    def forward(self, z: Tensor, grid: Grid = None) -> Tensor:
        z = self.attend(z, grid)
        return self.feedforward(z, grid)

    def attend(self, z: Tensor, grid: Grid = None) -> Tensor:
        """The first line: operator and residual."""
        if _serves(self.norm, self.operator, self.residual, z):
            return _fused(self.norm, self.operator, self.residual, z, grid)
        return self.residual(z, self.operator(self.norm(z), grid=grid))

    def trace(self, z: Tensor, grid: Grid = None) -> LayerTrace:
        """The same two lines, with what the operator computed beside them."""
        normed = self.norm(z)
        parts = self.operator.decompose(normed, grid=grid)
        after_operator = self.attend(z, grid)
        return LayerTrace(z, normed, parts, after_operator, self.feedforward(after_operator, grid))


def _serves(norm: nn.LayerNorm, operator: Operator, residual: Residual, z: Tensor) -> bool:
    """Whether one kernel may stand for the first line. It calls none of the modules. So their own weights must be all that they
    are, without dropout, and everything in the dtype of z; whether the kernels can is for `kernels.step` to say.
    """
    if not (isinstance(z, Tensor) and isinstance(operator, TokenStatistics)):  # torch.fx passes a proxy
        return False
    if not step.serves(z, operator.form, compute_dtype(z)):
        return False
    if not (isinstance(norm, nn.LayerNorm) and norm.normalized_shape == (operator.dim,) and norm.bias is not None):
        return False
    drop = operator.proj_drop
    if (drop.p and drop.training) or not (operator.is_plain() and tracing.is_plain(norm, operator, drop, residual)):
        return False
    held = (norm.weight, norm.bias, residual.scale, operator.subspace.weight)
    return all(x is None or x.dtype == z.dtype for x in held)


def _fused(norm: nn.LayerNorm, operator: Operator, residual: Residual, z: Tensor, grid: tuple[int, int] | None) -> Tensor:
    assert isinstance(operator, TokenStatistics)
    operator.check(z)
    scale = residual.scale
    if scale is not None and operator.wants_scalar_scale:
        scale = scale.reshape(())  # type: ignore[assignment]
    weights, keep = operator.weights(), residual.draw(z)
    return step.residual_step(z, norm.weight, norm.bias, norm.eps, weights, operator.form, scale=scale, keep=keep, grid=grid)
