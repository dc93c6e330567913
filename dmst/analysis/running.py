"""Numbers of many images, in bounded memory: batches come, count, mean and spread stay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmst.errors import OptionError


@dataclass(frozen=True)
class Numbers:
    """One quantity over the images."""

    mean: float
    std: float
    below: float  # share of the images on which it is below 0


class Running:
    """Mean, spread and share below 0 of numbers (..., b) that come in batches."""

    def __init__(self) -> None:
        self.count, self.mean, self.spread = 0, torch.zeros(()), torch.zeros(())
        self.negative: Tensor | int = 0

    def add(self, values: Tensor) -> None:
        self.negative = self.negative + (values < 0).sum(-1)
        self.count, self.mean, self.spread = _merge(self.count, self.mean, self.spread, values)

    @property
    def std(self) -> Tensor:
        """NaN for a single image, which has none."""
        return (self.spread / (self.count - 1 or math.nan)).sqrt()

    def numbers(self, *place: int) -> Numbers:
        assert isinstance(self.negative, Tensor)
        return Numbers(self.mean[place].item(), self.std[place].item(), self.negative[place].item() / self.count)


def batches_of(images: Tensor | Iterable[Any], batch_size: int) -> Iterator[Tensor]:
    """Tensors of images, whatever holds them."""
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}: it must be at least 1.")
    for batch in images.split(batch_size) if isinstance(images, Tensor) else images:
        yield batch[0] if isinstance(batch, tuple | list) else batch


def finite(told: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(told, dict):
        return {key: finite(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [finite(value) for value in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told


def _merge(count: int, mean: Tensor, spread: Tensor, values: Tensor) -> tuple[int, Tensor, Tensor]:
    """Chan's update of count, mean and sum of squared deviations by one batch (last axis)."""
    new = values.shape[-1]
    if not new:
        return count, mean, spread
    batch_mean = values.mean(-1)
    batch_spread = (values - batch_mean.unsqueeze(-1)).square().sum(-1)
    total, step = count + new, batch_mean - mean
    return total, mean + step * (new / total), spread + batch_spread + step.square() * (count * new / total)


@contextmanager
def only_looking(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
