"""Muon: a matrix moves along the nearest orthogonal matrix to its mean gradient.

    m <- beta m + (1 - beta) g            u = g + beta (m - g)            (Nesterov)
    W <- (1 - lr decay) W - lr sqrt(max(1, rows / columns)) orth(u)

orth(u) = U V^T of u = U S V^T, roughly, by five Newton-Schulz steps x <- a x + (b y + c y^2) x, y = x x^T. Matrices of one
shape go through them as one batch: a network has a few shapes and many matrices. bfloat16 on a GPU, float32 on a CPU.
After K. Jordan and others, "Muon: an optimizer for hidden layers", 2024; torch.optim.Muon takes the matrices one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5


class Muon(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Tensor], lr: float | Tensor, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, beta, decay = group["lr"], group["momentum"], group["weight_decay"]
            shapes: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault((parameter.shape, parameter.device), []).append(parameter)
            for ((rows, columns), _), matrices in shapes.items():
                means = [self._mean(matrix) for matrix in matrices]
                grads: list[Tensor] = [matrix.grad for matrix in matrices]  # type: ignore[misc]
                torch._foreach_lerp_(means, grads, 1 - beta)
                aims = torch._foreach_lerp(grads, means, beta)
                moves = list(orthogonal(torch.stack(aims)).to(matrices[0].dtype).unbind())
                if decay:
                    torch._foreach_mul_(matrices, 1 - lr * decay)
                torch._foreach_mul_(moves, -lr * math.sqrt(max(1, rows / columns)))
                torch._foreach_add_(matrices, moves)

    def _mean(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(matrix)
        return state["mean"]


def orthogonal(u: Tensor) -> Tensor:
    """orth(u) of each matrix of a batch (m, rows, columns)."""
    tall = u.shape[1] > u.shape[2]
    x = (u.mT if tall else u).to(torch.bfloat16 if u.is_cuda else torch.promote_types(u.dtype, torch.float32))
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(STEPS):
        y = x @ x.mT
        x = A * x + (B * y + C * y @ y) @ x
    return x.mT if tall else x
