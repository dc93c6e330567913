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
        self.negative = torch.zeros(())

    def add(self, values: Tensor) -> None:
        """Chan's update of count, mean and sum of squared deviations by one batch."""
        if not (new := values.shape[-1]):
            return
        total, mean = self.count + new, values.mean(-1)
        step = mean - self.mean
        self.spread = self.spread + (values - mean.unsqueeze(-1)).square().sum(-1) + step.square() * (self.count * new / total)
        self.mean = self.mean + step * (new / total)
        self.negative = self.negative + (values < 0).sum(-1)
        self.count = total

    @property
    def std(self) -> Tensor:
        """NaN for a single image, which has none."""
        return (self.spread / (self.count - 1 or math.nan)).sqrt()

    def numbers(self, *place: int) -> Numbers:
        return Numbers(self.mean[place].item(), self.std[place].item(), self.negative[place].item() / self.count)


def batches_of(images: Tensor | Iterable[Any], batch_size: int) -> Iterator[Tensor]:
    """Tensors of images, whatever holds them."""
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}: it must be at least 1.")
    for batch in images.split(batch_size) if isinstance(images, Tensor) else images:
        yield batch[0] if isinstance(batch, tuple | list) else batch


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
