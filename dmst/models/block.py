"""Block: two lines, whatever the operator.

z <- residual(z, operator(norm z))     z + drop_path(scale * update)
z <- feedforward(z)                    which owns its residual
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from dmst.models.config import ModelConfig
from dmst.models.feedforward import FEEDFORWARDS
from dmst.models.norm import normed
from dmst.models.residual import Residual
from dmst.operators import Parts
from dmst.operators.unrolled import Unrolled

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
        tokens, z = normed(self.norm, z)
        if isinstance(self.operator, Unrolled) and self.residual.folds(tokens, self.operator, self.operator.out):
            return self.residual(z, self.operator(tokens, grid=grid, scale=self.residual.scale), scaled=True)
        return self.residual(z, self.operator(tokens, grid=grid))

    def trace(self, z: Tensor, grid: Grid = None) -> LayerTrace:
        """The same two lines, with what the operator computed beside them."""
        normed = self.norm(z)
        parts = self.operator.decompose(normed, grid=grid)
        after_operator = self.attend(z, grid)
        return LayerTrace(z, normed, parts, after_operator, self.feedforward(after_operator, grid))
