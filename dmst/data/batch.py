"""What a stream gives and what it must know: a batch, how a model looks at an image, one process among others."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    images: Tensor  # (b, c, size, size) float32, normalised, on the device
    targets: Tensor  # (b, classes) float32, the share of each class
    labels: Tensor  # (b,) int64, the image's own class
    weight: Tensor  # (b,) float32, 0 for what fills up the last batch of an evaluation
    index: Tensor  # type: ignore[assignment]  # (b,) int64, on the CPU, into the set


class View(NamedTuple):
    """How a model looks at an image; the last two are for evaluation."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float = 1.0
    interpolation: str = "bicubic"


class Shard(NamedTuple):
    """One process among `world`, taking its part of a batch in `micro_steps` parts."""

    rank: int = 0
    world: int = 1
    micro_steps: int = 1
