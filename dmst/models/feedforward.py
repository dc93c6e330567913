"""Feed-forwards: tokens to tokens, each with its own norm and residual, because CRATE's step has none.

mlp     z + scale * W2 gelu(W1 norm(z))
ista    relu(x + eta (D^T x - D^T D x) - eta lambda),   x = norm(z): one proximal gradient step of sparse coding in D
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmst.models.linear import Linear
from dmst.models.residual import Residual

if TYPE_CHECKING:
    from dmst.models.config import ModelConfig


class Mlp(nn.Module):
    """The map alone; `MlpStep` puts norm and residual around it."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        hidden = max(int(config.dim * config.mlp_ratio), 1)
        self.fc1 = Linear(config.dim, hidden, **factory)
        self.fc2 = Linear(hidden, config.dim, **factory)
        self.drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, z: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(z)))))


class MlpStep(nn.Module):
    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, eps=1e-6, **factory)
        self.mlp = Mlp(config, **factory)
        self.residual = Residual(config.dim, config.layer_scale, config.drop_path_rate, **factory)

    def forward(self, z: Tensor) -> Tensor:
        return self.residual(z, self.mlp(self.norm(z)))


class Ista(nn.Module):
    step_size = 0.1
    sparsity = 0.1

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, eps=1e-6, **factory)
        self.dictionary = nn.Parameter(torch.empty(config.dim, config.dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.dictionary)

    def forward(self, z: Tensor) -> Tensor:
        x = self.norm(z)
        misfit = x - F.linear(x, self.dictionary)  # x - D x
        return F.relu(x + self.step_size * (F.linear(misfit, self.dictionary.mT) - self.sparsity))


FEEDFORWARDS: dict[str, type[MlpStep | Ista]] = {"mlp": MlpStep, "ista": Ista}
