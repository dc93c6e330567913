"""Feed-forwards: tokens to tokens, each with its own norm and residual, because CRATE's step has none.

mlp     z + scale * W2 gelu(W1 norm(z))
local   z + scale * W2 gelu(h + 3x3(h)),   h = W1 norm(z): each hidden channel also sees its eight neighbours on the patch grid,
        a depthwise convolution that starts at 0, so a fresh one is the mlp. A class token has no neighbours.
ista    relu(x + eta (D^T x - D^T D x) - eta lambda),   x = norm(z): one proximal gradient step of sparse coding in D
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import onednn, tracing
from dmst.errors import OptionError
from dmst.models.gelu import gelu, hidden
from dmst.models.norm import normed
from dmst.models.residual import Residual
from dmst.operators.base import linear, scaled

if TYPE_CHECKING:
    from dmst.models.config import ModelConfig

Grid = tuple[int, int] | None


class Mlp(nn.Module):
    """The map alone; `MlpStep` puts norm and residual around it."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        width = max(int(config.dim * config.mlp_ratio + 1e-6), 1)  # 1408 * (1480 / 1408) is below 1480
        self.fc1 = linear(config.dim, width, **factory)
        self.fc2 = linear(width, config.dim, **factory)
        self.drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, z: Tensor, grid: Grid = None, scale: Tensor | None = None) -> Tensor:
        """With `scale` its last map is scaled (`Residual`)."""
        inner = self.drop(self.activate(z, grid))
        if scale is None:
            return self.drop(self.finish(inner))
        return self.drop(F.linear(inner, *scaled(self.fc2.weight, self.fc2.bias, scale)))

    def finish(self, inner: Tensor) -> Tensor:
        plain = isinstance(inner, Tensor) and isinstance(self.fc2, nn.Linear) and tracing.is_plain(self.fc2)
        return onednn.linear(inner, self.fc2.weight, self.fc2.bias) if plain else self.fc2(inner)

    def activate(self, z: Tensor, grid: Grid) -> Tensor:
        """The hidden channels, (b, n, hidden)."""
        if isinstance(z, Tensor) and isinstance(self.fc1, nn.Linear) and tracing.is_plain(self.fc1):  # no proxy of torch.fx
            return hidden(z, self.fc1.weight, self.fc1.bias)
        return F.gelu(self.fc1(z))


class LocalMlp(Mlp):
    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__(config, **factory)
        width = self.fc1.out_features
        self.prefix = config.prefix
        self.local = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.local.weight)

    def activate(self, z: Tensor, grid: Grid) -> Tensor:
        if grid is None:
            raise OptionError("feedforward 'local' looks at neighbours: call the block with grid=(rows, columns).")
        h = self.fc1(z)  # (b, prefix + n, hidden)
        patches = h[:, self.prefix :]
        image = patches.unflatten(1, grid).permute(0, 3, 1, 2)
        if tracing.exported():  # channels last in memory, one image is laid out as no batch is: the graph would be for one
            image = image.contiguous()
        active = gelu(patches + self.local(image).permute(0, 2, 3, 1).flatten(1, 2))
        return torch.cat((gelu(h[:, : self.prefix]), active), 1) if self.prefix else active


class MlpStep(nn.Module):
    map: type[Mlp] = Mlp

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps, **factory)
        self.mlp = self.map(config, **factory)
        self.residual = Residual(config.dim, config.layer_scale, config.drop_path_rate, **factory)

    def forward(self, z: Tensor, grid: Grid = None) -> Tensor:
        tokens, z = normed(self.norm, z)
        if self.residual.folds(tokens, self.mlp, self.mlp.fc2):
            return self.residual(z, self.mlp(tokens, grid, self.residual.scale), scaled=True)
        return self.residual(z, self.mlp(tokens, grid))


class LocalStep(MlpStep):
    map = LocalMlp


class Ista(nn.Module):
    step_size = 0.1
    sparsity = 0.1

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps, **factory)
        self.dictionary = nn.Parameter(torch.empty(config.dim, config.dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.dictionary)

    def forward(self, z: Tensor, grid: Grid = None) -> Tensor:
        x = self.norm(z)
        misfit = x - F.linear(x, self.dictionary)  # x - D x
        return F.relu(x + self.step_size * (F.linear(misfit, self.dictionary.transpose(-2, -1)) - self.sparsity))


FEEDFORWARDS: dict[str, type[MlpStep | Ista]] = {"mlp": MlpStep, "local": LocalStep, "ista": Ista}
