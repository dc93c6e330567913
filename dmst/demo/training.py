"""One training run of the demo: small enough to read, the same for every model.

Order and distortion of the images are functions of (seed, epoch) alone, so runs with one seed see the same batches whatever
the model. Muon steps the matrices of the blocks, AdamW the rest; one warm-up, then a cosine to zero. The recipe was chosen for
DMST by cross-validation on other splits; the held-out digits were not used for choosing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.data.digits import Split
from dmst.models import VisionModel, create_model


@dataclass(frozen=True)
class Recipe:
    epochs: int = 16
    batch_size: int = 64
    lr: float = 0.01  # AdamW: stem, positions, norms, scales, scores, classifier
    matrix_lr: float = 0.05  # Muon: the other matrices of the blocks
    weight_decay: float = 0.05
    smoothing: float = 0.1
    warmup: float = 0.1  # share of the steps
    turn: float = 12.0  # degrees
    zoom: float = 0.12
    shift: float = 1.0  # pixels
    mix: float = 0.3  # at most this share of another image, and of its label


@dataclass
class Run:
    """What one run gave."""

    model: str
    seed: int
    parameters: int
    losses: list[float] = field(default_factory=list)  # mean training loss, one an epoch
    accuracies: list[float] = field(default_factory=list)  # on the held-out images, one an epoch
    seconds: float = 0.0  # of training alone
    images: int = 0


def train(
    name: str, seed: int, split: Split, recipe: Recipe, tick: Callable[[float], None] = lambda accuracy: None
) -> tuple[VisionModel, Run]:
    """Train `name` from scratch; `tick` is told the accuracy after every epoch."""
    torch.manual_seed(seed)
    model = create_model(name)
    run = Run(name, seed, sum(p.numel() for p in model.parameters()))
    optimizers = _optimizers(model, recipe)
    steps = recipe.epochs * (len(split.train_images) // recipe.batch_size)
    step = 0
    for epoch in range(recipe.epochs):
        model.train()
        begun, total = time.perf_counter(), 0.0
        for images, labels in batches(split, seed, epoch, recipe):  # labels as shares (b, 10)
            for optimizer, lr in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * schedule(step / steps, recipe.warmup)
            loss = F.cross_entropy(model(images), labels, label_smoothing=recipe.smoothing)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, _ in optimizers:
                optimizer.step()
            total += loss.item() * len(images)
            run.images += len(images)
            step += 1
        run.seconds += time.perf_counter() - begun
        run.losses.append(total / (run.images / (epoch + 1)))
        run.accuracies.append(accuracy(model, split))
        tick(run.accuracies[-1])
    return model.eval(), run


def batches(split: Split, seed: int, epoch: int, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches of one epoch, shuffled, distorted and mixed: a function of (seed, epoch)."""
    chance = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(len(split.train_images), generator=chance)
    size = recipe.batch_size
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        images = distort(split.train_images[chosen], chance, recipe)
        yield mix(images, F.one_hot(split.train_labels[chosen], 10).float(), chance, recipe.mix)


def distort(images: Tensor, chance: torch.Generator, recipe: Recipe) -> Tensor:
    """Each image turned, zoomed and shifted a little, by its own draw. The background, -1, fills what comes in."""
    turn, zoom, down, right = torch.rand(4, len(images), generator=chance) * 2 - 1
    angle, scale = turn * math.radians(recipe.turn), 1 + zoom * recipe.zoom
    cos, sin = scale * angle.cos(), scale * angle.sin()
    pixel = 2 * recipe.shift / images.shape[-1]  # affine_grid measures an image as -1..1
    rows = (torch.stack((cos, -sin, right * pixel), -1), torch.stack((sin, cos, down * pixel), -1))
    where = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images + 1, where, align_corners=False) - 1


def mix(images: Tensor, labels: Tensor, chance: torch.Generator, most: float) -> tuple[Tensor, Tensor]:
    """Each image with a share of its partner, the one as far from the batch's other end, and its label likewise (mixup)."""
    kept = 1 - most * torch.rand(len(images), 1, generator=chance)
    across = kept[..., None, None]
    return across * images + (1 - across) * images.flip(0), kept * labels + (1 - kept) * labels.flip(0)


def schedule(done: float, warmup: float) -> float:
    """The learning rate's factor when a share `done` of the steps is over."""
    return done / warmup if done < warmup else 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


@torch.no_grad()
def accuracy(model: VisionModel, split: Split) -> float:
    model.eval()
    return (model(split.test_images).argmax(-1) == split.test_labels).float().mean().item()


def _optimizers(model: VisionModel, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = name.startswith("blocks.") and parameter.ndim == 2 and min(parameter.shape) >= 8
        (matrices if matrix else rest).append(parameter)
    return [
        (torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay), recipe.matrix_lr),
        (torch.optim.AdamW(rest, lr=recipe.lr, weight_decay=recipe.weight_decay, betas=(0.9, 0.99), fused=True), recipe.lr),
    ]
