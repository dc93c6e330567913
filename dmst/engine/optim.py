"""How weights are stepped.

    groups      biases, norms, scales, temperatures, tokens and positions are not decayed (model.no_weight_decay); all else is
    adamw       every parameter
    muon        the matrices of the blocks by Muon, at matrix_lr; the rest by AdamW. With m the mean gradient and g this one:

                    m <- beta m + (1 - beta) g            u = g + beta (m - g)            (Nesterov)
                    W <- (1 - lr decay) W - lr sqrt(max(1, rows / columns)) orth(u)

                orth(u) = U V^T of u = U S V^T, roughly, by five Newton-Schulz steps (K. Jordan and others, 2024)
    lr          a line from warmup_lr to the peak, then half a cosine to min_lr, step by step
    ema         mean <- mean + (1 - min(decay, (1 + t) / (10 + t))) (weights - mean) after step t, running statistics likewise

State is kept by the parameters' names, never by their places.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dmst.engine.recipe import Recipe, Schedule
from dmst.models import VisionModel


def lr_factor(step: int, steps: int, steps_per_epoch: int, schedule: Schedule, peak: float) -> float:
    """The learning rate of a step (from 0), as a share of its peak."""
    warmup = schedule.warmup_epochs * steps_per_epoch
    if step < warmup:
        return (schedule.warmup_lr + (peak - schedule.warmup_lr) * step / warmup) / peak
    if schedule.sched == "constant":
        return 1.0
    done = (step - warmup) / max(steps - warmup, 1)
    return (schedule.min_lr + (peak - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * done))) / peak


class Optimizer:
    """AdamW, and Muon where it is asked for."""

    def __init__(self, model: VisionModel, recipe: Recipe) -> None:
        optim, kept = recipe.optim, model.no_weight_decay()
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        matrices: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for p, name in self.names.items():
            is_decayed = p.ndim > 1 and name not in kept
            (matrices if optim.opt == "muon" and is_matrix(name, p) else decayed if is_decayed else plain).append(p)
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        peak, matrix_peak = optim.lr * recipe.lr_scale, optim.matrix_lr * recipe.lr_scale
        adamw = torch.optim.AdamW(groups, lr=peak, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
        for p in decayed + plain:
            count = torch.zeros((), dtype=torch.float32, device=p.device)
            adamw.state[p] = {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [(adamw, peak)]
        if matrices:
            self.parts.append((Muon(matrices, matrix_peak, weight_decay=optim.weight_decay), matrix_peak))

    def set_lr(self, factor: float) -> None:
        """Every learning rate as `factor` of its peak."""
        for part, peak in self.parts:
            for group in part.param_groups:
                group["lr"] = peak * factor

    def step(self) -> None:
        for part, _ in self.parts:
            part.step()

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves, by parameter and kind: `blocks.0.norm.weight.exp_avg`."""
        found: dict[str, Tensor] = {}
        for p, name in self.names.items():
            for part, _ in self.parts:
                found |= {f"{name}.{kind}": tensor for kind, tensor in part.state.get(p, {}).items()}
        return found


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps it: a matrix of a block, and no thin one; never `assign.weight`, which has one row per head.

    Muon makes its scores large, and then sparsemax keeps only one of eight heads.
    """
    inside = name.startswith(("blocks.", "class_blocks.")) and not name.endswith(".assign.weight")
    return inside and parameter.ndim == 2 and min(parameter.shape) >= 8


class Muon(torch.optim.Optimizer):
    """Matrices of one shape go through the Newton-Schulz steps as one batch; torch.optim.Muon takes them one by one."""

    def __init__(self, params: Iterable[Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"mean": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, beta, decay = group["lr"], group["momentum"], group["weight_decay"]
            shapes: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault((parameter.shape, parameter.device), []).append(parameter)
            for ((rows, columns), _), matrices in shapes.items():
                means = [self.state[matrix]["mean"] for matrix in matrices]
                grads: list[Tensor] = [matrix.grad for matrix in matrices]  # type: ignore[misc]
                torch._foreach_lerp_(means, grads, 1 - beta)
                aims = torch._foreach_lerp(grads, means, beta)
                moves = list(orthogonal(torch.stack(aims)).to(matrices[0].dtype).unbind())
                if decay:
                    torch._foreach_mul_(matrices, 1 - lr * decay)
                torch._foreach_mul_(moves, -lr * math.sqrt(max(1, rows / columns)))
                torch._foreach_add_(matrices, moves)


def orthogonal(u: Tensor) -> Tensor:
    """orth(u) of each matrix of a batch (m, rows, columns). bfloat16 on a GPU, float32 on a CPU."""
    tall = u.shape[1] > u.shape[2]
    x = (u.mT if tall else u).to(torch.bfloat16 if u.is_cuda else torch.promote_types(u.dtype, torch.float32))
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        y = x @ x.mT
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
    return x.mT if tall else x


class Mean:
    """The running mean of a model's weights, as a model."""

    def __init__(self, model: VisionModel, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self._mine, self._theirs = ([x for x in m.state_dict().values() if x.is_floating_point()] for m in (self.model, model))
        self._counts = [
            (mine, theirs)
            for mine, theirs in zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
            if not mine.is_floating_point()
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        away = torch._foreach_sub(self._theirs, self._mine)
        torch._foreach_mul_(away, 1 - min(self.decay, (1 + step) / (10 + step)))
        torch._foreach_add_(self._mine, away)
        for mine, theirs in self._counts:
            mine.copy_(theirs)
