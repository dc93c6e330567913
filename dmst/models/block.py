"""Block: two lines, whatever the operator.

z <- z + drop_path(scale * operator(norm z))
z <- feedforward(z)                              which owns its residual

Where `in_one.py` says so, the first line is one call of a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from dmst import tracing
from dmst.models import in_one
from dmst.models.config import ModelConfig
from dmst.models.feedforward import FEEDFORWARDS, LocalStep, MlpStep
from dmst.models.residual import Residual
from dmst.operators import Parts


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

    def forward(self, z: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        return self.feedforward(self.attend(z, grid), grid)

    def attend(self, z: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """The first line."""
        return self._attend(z, grid, None)

    def _attend(self, z: Tensor, grid: tuple[int, int] | None, normed: Tensor | None) -> Tensor:
        """The same, with norm z where that is at hand."""
        parts = (self.norm, self.operator, self.residual)
        if in_one.serves(*parts, z):
            return in_one.step(*parts, z, grid)
        return self.residual(z, self.operator(self.norm(z) if normed is None else normed, grid=grid))

    def carries(self, z: Tensor) -> bool:
        """Whether what the second line adds may wait for the next block, whose kernel adds it on the way in."""
        feedforward = self.feedforward
        if type(self) is not Block or not isinstance(feedforward, MlpStep) or type(feedforward) not in (MlpStep, LocalStep):
            return False
        missed = tracing.hooked(self) or tracing.hooked(feedforward) or "attend" in vars(self) or "trace" in vars(self)
        return not missed and feedforward.scales_weight(z) and in_one.serves(self.norm, self.operator, self.residual, z)

    def carry(self, z: Tensor, pending: Tensor | None, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """The same as `forward` of z + pending, as a sum that is yet to be added up; where it `carries`."""
        z = in_one.step(self.norm, self.operator, self.residual, z, grid, pending)
        return z, self.feedforward.update(z, grid)  # type: ignore[operator]

    def trace(self, z: Tensor, grid: tuple[int, int] | None = None) -> LayerTrace:
        """The same two lines, with what the operator computed beside them."""
        normed = self.norm(z)
        usual = type(self).attend is Block.attend and "attend" not in vars(self)
        after_operator = self._attend(z, grid, normed) if usual else self.attend(z, grid)
        parts = self.operator.decompose(normed, grid=grid)
        return LayerTrace(z, normed, parts, after_operator, self.feedforward(after_operator, grid))

    def trace_carried(
        self, z: Tensor, pending: Tensor | None, grid: tuple[int, int] | None, total: Tensor
    ) -> tuple[LayerTrace, Tensor, Tensor]:
        """`carry` with the trace of it; `total` is z + pending."""
        after_operator, update = self.carry(z, pending, grid)
        normed = self.norm(total)
        parts = self.operator.decompose(normed, grid=grid)
        return LayerTrace(total, normed, parts, after_operator, after_operator + update), after_operator, update
