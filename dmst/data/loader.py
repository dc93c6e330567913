"""Batches of a set, for training and for evaluation: two paths, one interface.

    resident    small images, decoded once into device memory; augmentation there, on whole batches
    workers     large images, cut to size by worker processes; the rest on the device, by the same code

Order and augmentation are functions of (seed, epoch, index) alone: each path gives the same bits for any number of workers, any
world size, any micro-steps and any first step. The paths share all draws; they differ in how a resized image is interpolated.

    steps of an epoch     batches of `batch_size` places; what is left over at the end of the order is not shown
    a batch               cut into `world` parts, each of these into `micro_steps` parts, all of them contiguous

Repeated augmentation: every image `repeats` times in a row, of which the first floor(n / 256) * 256 places are shown: timm.
Inside a batch the first copies come first, then the second ones, so that neighbours, which mixup pairs, are different images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmst.data import chance
from dmst.data.augment import Augment
from dmst.data.batching import Batch, BatchMaker, Shard, View
from dmst.data.sets import ImageSet
from dmst.data.workers import Samples, read
from dmst.errors import OptionError, choose

__all__ = ["Batch", "EvalStream", "Shard", "TrainStream", "View"]

ROUND = 256  # of repeated augmentation: timm's, after DeiT
RESIDENT = 4 << 30  # bytes copied to a device unasked; a fixed number, so that the path does not depend on what is in memory


class Part(NamedTuple):
    """One batch of this process, on the CPU: samples, image + copy * 2^40, and their places in the order of the epoch."""

    epoch: int
    sample: Tensor
    position: Tensor


class _Stream:
    """Batches of parts; `augment` None is evaluation. Places from `last` on weigh nothing."""

    def __init__(
        self,
        image_set: ImageSet,
        view: View,
        augment: Augment | None,
        *,
        batch_size: int,
        seed: int = 0,
        shard: Shard = Shard(),  # noqa: B008 (a tuple)
        device: torch.device | str = "cpu",
        path: str = "auto",
        workers: int = 0,
        compiled: bool | str = False,
    ) -> None:
        choose("path", path, ("auto", "resident", "workers"))
        self.image_set, self.view, self.batch_size, self.shard = image_set, view, batch_size, shard
        self.device, self.workers = torch.device(device), workers
        pixels = None if path == "workers" else _pixels(image_set, wanted=path == "resident")
        self.path = "workers" if pixels is None else "resident"
        channels = (image_set.read(0) if pixels is None else pixels).shape[-1]
        if channels > view.channels:
            raise OptionError(
                f"the images have {channels} channels and the model takes {view.channels}: choose a model with "
                f"in_chans={channels}. (Grey images for a model of 3 channels are repeated.)"
            )
        self._pixels = None  # (n, c, h, w); a copy in any case: the array may be read-only, or change
        if pixels is not None:
            self._pixels = torch.from_numpy(np.array(pixels.transpose(0, 3, 1, 2), order="C")).to(self.device)
        self._samples = Samples(image_set, view, augment, seed)
        left, crop_pct = augment or Augment(interpolation=view.interpolation), 1.0 if augment else view.crop_pct
        if self._pixels is None:  # workers have cut them
            left, crop_pct = replace(left, resized_crop=0.0), 1.0
        h, w = (view.size,) * 2 if self._pixels is None else self._pixels.shape[2:]
        if left.crop_padding >= min(h, w):
            raise OptionError(f"crop_padding is {left.crop_padding}: images of {h} x {w} pixels reflect less than that.")
        self._maker = BatchMaker(
            view,
            left,
            image_set.labels,
            len(image_set.classes),
            seed=seed,
            batch_size=batch_size,
            device=self.device,
            crop_pct=crop_pct,
            resident=self._pixels is not None,
            compiled=compiled,
        )

    def _batches(self, parts: Callable[[], Iterator[Part]]) -> Iterator[Batch]:
        """A batch for each part; workers read ahead, in one go, so that they never restart."""
        pixels: Iterator[Tensor] = repeat(self._pixels)  # type: ignore[arg-type]
        if self._pixels is None:
            keys = ([(part.epoch, sample) for sample in part.sample.tolist()] for part in parts())
            pixels = read(self._samples, keys, self.workers, self.device)
        for held, part in zip(pixels, parts(), strict=False):
            sent = torch.stack((part.sample, part.position, torch.full_like(part.sample, part.epoch)))
            if self.device.type == "cuda":
                sent = sent.pin_memory()
            sample, position, epoch = sent.to(self.device, non_blocking=True).unbind()
            with torch.no_grad():
                made = self._maker.make(held, sample, position, epoch[0])
            yield Batch(*made, part.sample % chance.COPY)


class TrainStream(_Stream):
    """`batch_size` counts the samples of all processes, steps are counted over all epochs; `compiled` may name a backend."""

    def __init__(
        self, image_set: ImageSet, view: View, augment: Augment, *, batch_size: int, seed: int, **options: Any
    ) -> None:
        super().__init__(image_set, view, augment, batch_size=batch_size, seed=seed, **options)
        pairs = augment.mixes and augment.mixup_mode == "pair"
        self.augment, self.seed = augment, seed
        self.micro_batch = micro_batch(len(image_set), batch_size, self.shard, augment.repeats, pairs)
        self.steps_per_epoch = epoch_length(len(image_set), augment.repeats) // batch_size
        self._order = lru_cache(3)(self._order_of)  # workers read ahead, into the next epoch
        self.notes: list[str] = []  # what a log should say
        if augment.mixes and not pairs:
            self.notes.append("mixup_mode=batch: which images are mixed depends on the number of processes and micro-steps.")

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batches(self, first_step: int, last_step: int) -> Iterator[Batch]:
        """This process's micro-batches of the steps first_step .. last_step - 1, in the order (step, micro-step)."""
        return self._batches(lambda: self._parts(first_step, last_step))

    def _parts(self, first_step: int, last_step: int) -> Iterator[Part]:
        mine = self.shard.rank * self.micro_batch * self.shard.micro_steps
        for step in range(first_step, last_step):
            start, epoch = step % self.steps_per_epoch * self.batch_size + mine, self.epoch_of(step)
            for micro in range(self.shard.micro_steps):
                position = torch.arange(self.micro_batch) + start + micro * self.micro_batch
                yield Part(epoch, self._order(epoch)[position], position)

    def _order_of(self, epoch: int) -> Tensor:
        """Samples, image + copy * 2^40, int64 on the CPU."""
        images, repeats = len(self.image_set), self.augment.repeats
        shuffled = chance.permutation("order", self.seed, epoch, images)
        if repeats == 1:
            return shuffled
        place = torch.arange(epoch_length(images, repeats))
        copy = place % repeats
        by_copy = torch.argsort(place // self.batch_size * repeats + copy, stable=True)
        return (shuffled[place // repeats] + copy * chance.COPY)[by_copy]


class EvalStream(_Stream):
    """Every image once over all processes, `batch_size` at a time on each; the last batch may be smaller."""

    def __init__(self, image_set: ImageSet, view: View, *, batch_size: int, **options: Any) -> None:
        super().__init__(image_set, view, None, batch_size=batch_size, **options)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self._parts)

    def _parts(self) -> Iterator[Part]:
        n, rank, world = len(self.image_set), self.shard.rank, self.shard.world
        first, last = (math.ceil(n * bound / world) for bound in (rank, rank + 1))
        for start in range(first, last, self.batch_size):
            position = torch.arange(start, min(start + self.batch_size, last))
            yield Part(0, position, position)


def epoch_length(images: int, repeats: int) -> int:
    return images if repeats == 1 else images // ROUND * ROUND


def micro_batch(images: int, batch_size: int, shard: Shard, repeats: int, pairs: bool) -> int:
    """How many samples this process takes at a time; or an error that says why it cannot."""
    parts = shard.world * shard.micro_steps
    if batch_size < 1 or batch_size % parts:
        raise OptionError(
            f"batch_size is {batch_size}: it must divide into {shard.world} processes x {shard.micro_steps} micro-steps; "
            f"try --batch {max(1, round(batch_size / parts)) * parts}."
        )
    length = epoch_length(images, repeats)
    if length < batch_size:
        rounded = f", of which repeated augmentation shows whole multiples of {ROUND}, here {length:,}," if repeats > 1 else ""
        least = f"--batch {length // parts * parts}" if length >= parts else "more images"
        raise OptionError(f"{images:,} images{rounded} are fewer than one batch of {batch_size:,}: try {least}.")
    if pairs and batch_size // parts % 2:
        raise OptionError(
            f"mixup and cutmix mix neighbours, and a micro-batch of {batch_size // parts} leaves one alone: it must be even; "
            f"try --batch {batch_size + parts}, or --set augment.mixup_mode=batch."
        )
    return batch_size // parts


def _pixels(image_set: ImageSet, wanted: bool) -> np.ndarray | None:
    """The set as one array: if it is one and not too large, or if it is `wanted`, read image by image."""
    pixels = image_set.pixels()
    if pixels is not None:
        return pixels if wanted or pixels.nbytes <= RESIDENT else None
    if not wanted:
        return None
    images = [image_set.read(i) for i in range(len(image_set))]
    other = next((i for i, image in enumerate(images) if image.shape != images[0].shape), None)
    if other is not None:
        raise OptionError(
            f"{image_set.where(other)} has shape {images[other].shape} and {image_set.where(0)} has {images[0].shape}: "
            "images in device memory must be of one size. Use path='workers'."
        )
    return np.stack(images)
