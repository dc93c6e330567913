"""From stored pixels to a batch, on one device: everything of [augment] that is done to whole batches, as one pure function.

    make(pixels, sample, position, epoch) -> (images, targets, labels)

pixels uint8 (n, c, h, w): the whole set on the resident path, or this batch as workers cut it. sample (b,): image + copy *
2^40. position (b,): places in the order of the epoch. epoch: one number, as a tensor. Draws depend on these and the seed alone,
no shape depends on data, and nothing waits for the device: `compiled` makes it a few kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmst.data import chance, geometry, mixing
from dmst.data.augment import Augment
from dmst.data.rand_augment import DRAWS, color_jitter, rand_augment, read_policy

PURPOSES = ("crop", "flip", "resized crop", "turn", "rand augment", "color jitter", "erase", "noise", "cutout", "mix")
MOST_DRAWS = 128  # of one purpose, but for noise

Made = tuple[Tensor, Tensor, Tensor]
Draw = Callable[[str, int], Tensor]  # purpose, how many: (b, draws)


class Batch(NamedTuple):
    images: Tensor  # (b, c, size, size) float32, normalised, on the device
    targets: Tensor  # (b, classes) float32, the share of each class
    labels: Tensor  # (b,) int64, the image's own class
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


class BatchMaker:
    def __init__(
        self,
        view: View,
        augment: Augment,
        labels: np.ndarray,
        classes: int,
        *,
        seed: int,
        batch_size: int,
        device: torch.device,
        crop_pct: float = 1.0,
        resident: bool = True,
        compiled: bool | str = False,
    ) -> None:
        self.view, self.augment, self.classes, self.batch_size = view, augment, classes, batch_size
        self.crop_pct, self.resident, self.policy = crop_pct, resident, read_policy(augment.aa)
        self.labels = torch.from_numpy(np.array(labels, np.int64)).to(device)
        self.mean, self.std = (
            torch.tensor(x, dtype=torch.float32, device=device)[None, :, None, None] for x in (view.mean, view.std)
        )
        self.fill = (self.mean * 255).round().clamp(0, 255)
        self.keys = {purpose: torch.tensor(chance.key(purpose, seed), device=device) for purpose in PURPOSES}
        self.steps = torch.arange(max(MOST_DRAWS, math.ceil(view.channels / 3) * view.size**2), device=device)
        self.mixup = mixing.beta_quantiles(augment.mixup).to(device) if augment.mixup else None
        self.cutmix = mixing.beta_quantiles(augment.cutmix).to(device) if augment.cutmix else None
        self.make: Callable[[Tensor, Tensor, Tensor, Tensor], Made] = self._make
        if compiled:
            backend = compiled if isinstance(compiled, str) else "inductor"
            self.make = torch.compile(self._make, fullgraph=True, dynamic=False, backend=backend)

    def _make(self, pixels: Tensor, sample: Tensor, position: Tensor, epoch: Tensor) -> Made:
        index = sample & (chance.COPY - 1)
        rows = index if self.resident else torch.arange(len(sample), device=sample.device)

        def draw(purpose: str, draws: int) -> Tensor:
            return chance.draw(self.keys[purpose], epoch, sample, self.steps[:draws])

        images = self._values(self._places(pixels, rows, draw), draw)
        images = (images.to(torch.float32) / 255 - self.mean) / self.std
        if self.augment.reprob:
            noise = mixing.normal_noise(self.keys["noise"], epoch, sample, self.steps, *images.shape[1:])
            images = mixing.erase(images, draw("erase", mixing.ERASE_DRAWS), noise, self.augment.reprob)
        if self.augment.cutout:
            images = mixing.cutout(images, draw("cutout", 2), self.augment.cutout)

        labels = self.labels[index]
        targets = (labels[:, None] == torch.arange(self.classes, device=labels.device)).to(torch.float32)
        if self.augment.mixes:
            images, targets = self._mixed(images, targets, position, epoch)
        return images, targets, labels

    def _places(self, pixels: Tensor, rows: Tensor, draw: Draw) -> Tensor:
        """Crops, mirrors and moves: (b, channels, size, size) uint8."""
        augment, view = self.augment, self.view
        mirrored = draw("flip", 1)[:, 0] < augment.flip if augment.flip else torch.zeros_like(rows, dtype=torch.bool)
        if augment.crop_padding or augment.flip:
            down = right = torch.zeros_like(rows)
            if augment.crop_padding:
                down, right = (geometry.integers(draw("crop", 2), 2 * augment.crop_padding + 1) - augment.crop_padding).unbind(
                    1
                )
            images = geometry.take(pixels, rows, down, right, mirrored)
        else:
            images = pixels[rows] if self.resident else pixels
        if images.shape[1] < view.channels:
            images = images.expand(-1, view.channels, -1, -1)
        if not augment.moves:
            return geometry.resize(images, view.size, self.crop_pct, augment.interpolation)

        h, w = images.shape[-2:]
        box: Tensor | tuple[float, float, float, float] = geometry.middle_box(h, w)
        if augment.resized_crop:
            box = geometry.resized_boxes(draw("resized crop", geometry.BOX_DRAWS), h, w, augment.resized_crop)
            left = torch.where(mirrored, w - box[:, 1] - box[:, 3], box[:, 1])  # of the image as it was before the mirror
            box = torch.stack((box[:, 0], left, box[:, 2], box[:, 3]), 1)
        turn = 2 * draw("turn", 4) - 1
        return geometry.warp(
            images,
            box,
            angle=turn[:, 0] * math.radians(augment.rotate),
            scale=torch.exp(turn[:, 1] * math.log1p(augment.zoom)),
            move=turn[:, 2:] * augment.shift,
            size=view.size,
            interpolation=augment.interpolation,
        )

    def _values(self, images: Tensor, draw: Draw) -> Tensor:
        """RandAugment, or else colour jitter."""
        if self.policy is not None:
            draws = draw("rand augment", DRAWS * self.policy.layers)
            return rand_augment(images, draws, self.policy, self.fill, self.augment.interpolation)
        if self.augment.color_jitter:
            return color_jitter(images, draw("color jitter", 3), self.augment.color_jitter)
        return images

    def _mixed(self, images: Tensor, targets: Tensor, position: Tensor, epoch: Tensor) -> tuple[Tensor, Tensor]:
        augment = self.augment
        unit = position[::2] // 2 if augment.mixup_mode == "pair" else position[:1] // self.batch_size
        draws = chance.draw(self.keys["mix"], epoch, unit, self.steps[: mixing.DRAWS])
        share, mean = mixing.shares(
            draws, self.mixup, self.cutmix, augment.mixup_prob, augment.mixup_switch_prob, *images.shape[-2:]
        )
        return mixing.mix(images, targets, share, mean, augment.mixup_mode)
