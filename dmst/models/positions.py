"""Positions, added to the tokens once, after the stem. Tokens may be led by a class token; patches lie on `grid`.

fourier   row r = 1..h and column c = 1..w as angles 2 pi r/h, 2 pi c/w, each at 16 frequencies 10000^(-2j/32), sine and
          cosine: 64 numbers, one linear map to d. Nothing depends on the resolution; a class token gets none.
learned   one vector per place of the training grid, resized (bicubic) to any other; a class token has its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import rotary, tracing
from dmst.kernels.casting import wide
from dmst.one_node import OneNode

if TYPE_CHECKING:
    from dmst.models.config import ModelConfig


FEATURES = 32  # of row, and again of column


class FourierPosition(OneNode):
    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.projection = nn.Conv2d(2 * FEATURES, config.dim, 1, **factory)

    def forward(self, z: Tensor, grid: tuple[int, int]) -> Tensor:
        rows, columns = grid
        weight = self.projection.weight
        features = rotary.cached(_features, rows, columns, weight.device, weight.dtype)
        position = rearrange(self.projection(features), "1 d h w -> 1 (h w) d")
        prefix = z.shape[1] - rows * columns
        return z + (F.pad(position, (0, 0, prefix, 0)) if prefix else position)


def _features(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(1, 64, h, w)"""
    along_rows, along_columns = (waves(size, device, dtype) for size in (rows, columns))
    features = torch.cat((along_rows.unsqueeze(1).expand(-1, columns, -1), along_columns.unsqueeze(0).expand(rows, -1, -1)), -1)
    return rearrange(features, "h w f -> 1 f h w")


def waves(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(size, 32): sine on even, cosine on odd features of the place 1..size. Angles in float64, then cast."""
    exact = torch.float32 if device.type == "mps" else torch.float64
    place = torch.arange(1, size + 1, device=device, dtype=exact) / (size + 1e-6) * (2 * math.pi)
    pair = torch.arange(FEATURES // 2, device=device, dtype=exact)
    angle = place.unsqueeze(-1) * 10000 ** (-2 * pair / FEATURES)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(dtype)


class LearnedPosition(OneNode):
    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.grid, self.std = config.grid, config.token_std
        rows, columns = config.grid
        self.table = nn.Parameter(torch.empty(config.prefix + rows * columns, config.dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def forward(self, z: Tensor, grid: tuple[int, int]) -> Tensor:
        if tracing.surely(grid[0] == self.grid[0]) and tracing.surely(grid[1] == self.grid[1]):
            return z + self.table
        return z + self.resized(grid)

    def resized(self, grid: tuple[int, int]) -> Tensor:
        """The table for patches on another grid."""
        rows, columns = self.grid
        prefix = self.table.shape[0] - rows * columns
        places = rearrange(self.table[prefix:], "(h w) d -> 1 d h w", h=rows)
        places = F.interpolate(wide(places), grid, mode="bicubic", antialias=True).to(self.table.dtype)
        return torch.cat((self.table[:prefix], rearrange(places, "1 d h w -> (h w) d")))


POSITIONS: dict[str, type[FourierPosition | LearnedPosition]] = {"fourier": FourierPosition, "learned": LearnedPosition}
