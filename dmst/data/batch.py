"""What a stream gives, and what it must know: a batch, how a model looks at an image, a process among others."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dmst.errors import OptionError, choose


class Batch(NamedTuple):
    images: Tensor  # (b, c, size, size) float32, normalised, on the device
    targets: Tensor  # (b, classes) float32, the share of each class
    labels: Tensor  # (b,) int64, the image's own class
    weight: Tensor  # (b,) float32, 0 where a sample does not count
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


def check_view(view: View) -> None:
    if view.size < 1 or view.channels not in (1, 3):
        raise OptionError(f"a view of {view.size} pixels and {view.channels} channels: at least 1 pixel, 1 or 3 channels.")
    if len(view.mean) != view.channels or len(view.std) != view.channels or min(view.std) <= 0:
        raise OptionError(f"mean {view.mean} and std {view.std}: {view.channels} numbers each, std above 0.")
    if not 0 < view.crop_pct <= 1:
        raise OptionError(f"crop_pct is {view.crop_pct}: it must be above 0 and at most 1.")
    choose("interpolation", view.interpolation, ("bicubic", "bilinear"))


def check_shard(shard: Shard) -> None:
    if not (0 <= shard.rank < shard.world and shard.micro_steps >= 1):
        raise OptionError(f"{shard}: rank must be from 0 to world - 1, micro_steps at least 1.")
