"""Numbers of every layer over many images, in bounded memory: one batch and one layer at a time.

count, layers = measure(model, images, look)     look(block, trace, grid) -> (..., b), or None where there is nothing
layers[3].mean, .std, .below, .above             (...): over all images; shares of the images below and above 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmst.errors import OptionError
from dmst.models import VisionModel
from dmst.models.block import LayerTrace

Look = Callable[[Any, LayerTrace, tuple[int, int]], Tensor | None]
Tick = Callable[[int], None]


@dataclass(frozen=True)
class Numbers:
    """One quantity over the images."""

    mean: float
    std: float
    below: float  # share of the images on which it is below 0
    above: float  # and above 0


class Running:
    """Mean, spread and signs of numbers (..., b) that come in batches."""

    def __init__(self) -> None:
        self.count, self.mean, self._spread = 0, torch.zeros(()), torch.zeros(())
        self._signs = torch.zeros(())

    def add(self, values: Tensor) -> None:
        """By Chan's update of count, mean and sum of squared deviations."""
        new = values.shape[-1]
        if not new:
            return
        mean = values.mean(-1)
        total, step = self.count + new, mean - self.mean
        spread = (values - mean.unsqueeze(-1)).square().sum(-1)
        self._spread = self._spread + spread + step.square() * (self.count * new / total)
        self.mean = self.mean + step * (new / total)
        self._signs = self._signs + torch.stack(((values < 0).sum(-1), (values > 0).sum(-1)))
        self.count = total

    @property
    def std(self) -> Tensor:
        """NaN for a single image, which has none."""
        return (self._spread / (self.count - 1 or math.nan)).sqrt()

    def numbers(self, *place: int) -> Numbers:
        below, above = (self._signs[(sign, *place)].item() / self.count for sign in (0, 1))
        return Numbers(self.mean[place].item(), self.std[place].item(), below, above)


def measure(
    model: VisionModel, images: Tensor | Iterable[Any], look: Look, *, tick: Tick = lambda images: None
) -> tuple[int, list[Running]]:
    """The number of images, and by layer what `look` sees; images are one tensor, or batches, also a loader's pairs."""
    found = [Running() for _ in model.blocks]
    count = 0
    with only_looking(model):
        for batch in batches_of(images):
            z, grid = model.embed(batch)
            for block, running in zip(model.blocks, found, strict=True):
                trace = block.trace(z, grid)  # type: ignore[operator]
                values = look(block, trace, grid)
                if values is not None:
                    running.add(values.double().cpu())
                z = trace.after_feedforward
            count += len(batch)
            tick(len(batch))
    return count, found


def batches_of(images: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    """Tensors of images, whatever holds them; an error where there are none."""
    count = 0
    for batch in images.split(64) if isinstance(images, Tensor) else images:
        some = batch[0] if isinstance(batch, tuple | list) else batch
        if len(some):
            count += len(some)
            yield some
    if not count:
        raise OptionError("no images were given.")


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


def plain(found: Any) -> dict[str, Any]:
    """The result of an analysis as plain JSON, with its own words; what is not finite is None."""
    words = {name: getattr(found, name) for name in ("convention", "verdict") if hasattr(found, name)}
    return finite(asdict(found)) | words


def finite(told: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(told, dict):
        return {key: finite(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [finite(value) for value in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told
