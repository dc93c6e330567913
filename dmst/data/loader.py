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
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dmst.data import chance
from dmst.data.augment import Augment
from dmst.data.batch import Batch, Shard, View
from dmst.data.batching import BatchMaker
from dmst.data.sets import ImageSet
from dmst.data.workers import Key, Samples, read
from dmst.errors import OptionError, choose

__all__ = ["Batch", "EvalStream", "Shard", "TrainStream", "View"]

ROUND = 256  # of repeated augmentation: timm's, after DeiT
RESIDENT = 4 << 30  # bytes copied to a device unasked; a fixed number, so that the path does not depend on what is in memory


class _Stream:
    """What both streams share: the set, and where its pixels are."""

    def __init__(
        self, image_set: ImageSet, view: View, shard: Shard, device: torch.device | str, path: str, workers: int
    ) -> None:
        choose("path", path, ("auto", "resident", "workers"))
        self.image_set, self.view, self.shard, self.workers = image_set, view, shard, workers
        self.device = torch.device(device)
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

    def _maker(self, augment: Augment, **options: object) -> BatchMaker:
        h, w = (self.view.size,) * 2 if self._pixels is None else self._pixels.shape[2:]
        if augment.crop_padding >= min(h, w):
            raise OptionError(f"crop_padding is {augment.crop_padding}: images of {h} x {w} pixels reflect less than that.")
        return BatchMaker(
            self.view,
            augment,
            self.image_set.labels,
            len(self.image_set.classes),
            device=self.device,
            resident=self._pixels is not None,
            **options,  # type: ignore[arg-type]
        )


class TrainStream(_Stream):
    """`batch_size` counts the samples of all processes, steps are counted over all epochs; `compiled` may name a backend."""

    def __init__(
        self,
        image_set: ImageSet,
        view: View,
        augment: Augment,
        *,
        batch_size: int,
        seed: int,
        shard: Shard = Shard(),  # noqa: B008 (a tuple)
        device: torch.device | str = "cpu",
        path: str = "auto",
        workers: int = 0,
        compiled: bool | str = False,
    ) -> None:
        super().__init__(image_set, view, shard, device, path, workers)
        pairs = augment.mixes and augment.mixup_mode == "pair"
        self.augment, self.batch_size, self.seed = augment, batch_size, seed
        self.micro_batch = micro_batch(len(image_set), batch_size, shard, augment.repeats, pairs)
        self.steps_per_epoch = epoch_length(len(image_set), augment.repeats) // batch_size
        self._order = lru_cache(3)(self._order_of)  # workers read ahead, into the next epoch
        self.notes: list[str] = []  # what a log should say
        if augment.mixes and not pairs:
            self.notes.append("mixup_mode=batch: which images are mixed depends on the number of processes and micro-steps.")
        self._samples = Samples(image_set, view, augment, seed)
        left = augment if self.path == "resident" else replace(augment, resized_crop=0.0)
        self._batches = self._maker(left, seed=seed, batch_size=batch_size, compiled=compiled)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def indices(self, step: int) -> Tensor:
        """The images of the global batch, int64 on the CPU."""
        start = step % self.steps_per_epoch * self.batch_size
        return self._order(self.epoch_of(step))[start : start + self.batch_size] % chance.COPY

    def batches(self, first_step: int, last_step: int) -> Iterator[Batch]:
        """This process's micro-batches of the steps first_step .. last_step - 1, in the order (step, micro-step)."""
        pixels: Iterator[Tensor] = iter(())
        if self._pixels is None:
            pixels = read(self._samples, self._keys(first_step, last_step), self.workers, self.device)
        position = torch.arange(self.steps_per_epoch * self.batch_size, device=self.device)
        weight = torch.ones(self.micro_batch, device=self.device)
        here, sample, epoch_here = -1, position, position
        for epoch, start in self._slices(first_step, last_step):
            part = slice(start, start + self.micro_batch)
            chosen = self._order(epoch)
            if epoch != here:  # one transfer per epoch
                here, sample = epoch, _sent(chosen, self.device)
                epoch_here = torch.full((), epoch, dtype=torch.int64, device=self.device)
            with torch.no_grad():
                made = self._batches.make(
                    next(pixels) if self._pixels is None else self._pixels, sample[part], position[part], epoch_here
                )
            yield Batch(*made, weight, chosen[part] % chance.COPY)

    def _slices(self, first_step: int, last_step: int) -> Iterator[tuple[int, int]]:
        """(epoch, place in its order) of each micro-batch of this process."""
        mine = self.shard.rank * self.micro_batch * self.shard.micro_steps
        for step in range(first_step, last_step):
            start = step % self.steps_per_epoch * self.batch_size + mine
            for micro in range(self.shard.micro_steps):
                yield self.epoch_of(step), start + micro * self.micro_batch

    def _keys(self, first_step: int, last_step: int) -> Iterator[list[Key]]:
        """All micro-batches from the first step to the last, so that workers never restart."""
        for epoch, start in self._slices(first_step, last_step):
            yield [(epoch, sample) for sample in self._order(epoch)[start : start + self.micro_batch].tolist()]

    def _order_of(self, epoch: int) -> Tensor:
        return epoch_order(len(self.image_set), self.seed, epoch, self.augment.repeats, self.batch_size)


class EvalStream(_Stream):
    """Every image once over all processes, `batch_size` at a time on each. All have equally many batches; what the last
    ones lack is filled up by the last image, with weight 0, so that shapes never change."""

    def __init__(
        self,
        image_set: ImageSet,
        view: View,
        *,
        batch_size: int,
        shard: Shard = Shard(),  # noqa: B008 (a tuple)
        device: torch.device | str = "cpu",
        path: str = "auto",
        workers: int = 0,
    ) -> None:
        super().__init__(image_set, view, shard, device, path, workers)
        self.batch_size = batch_size
        n, rank, world = len(image_set), shard.rank, shard.world
        self.first, self.last = n * rank // world, n * (rank + 1) // world
        self._count = math.ceil(math.ceil(n / world) / batch_size)
        self._samples = Samples(image_set, view)
        augment = Augment(interpolation=view.interpolation)
        crop_pct = view.crop_pct if self.path == "resident" else 1.0
        self._batches = self._maker(augment, seed=0, batch_size=batch_size, crop_pct=crop_pct)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        places = torch.arange(self.first, self.first + self._count * self.batch_size).split(self.batch_size)
        chosen = [place.clamp(max=max(self.last - 1, 0)) for place in places]
        pixels: Iterator[Tensor] = iter(())
        if self._pixels is None:
            keys = [[(0, index) for index in batch.tolist()] for batch in chosen]
            pixels = read(self._samples, keys, self.workers, self.device)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        for place, index in zip(places, chosen, strict=True):
            sample = _sent(index, self.device)
            with torch.no_grad():
                made = self._batches.make(next(pixels) if self._pixels is None else self._pixels, sample, sample, zero)
            yield Batch(*made, _sent((place < self.last).to(torch.float32), self.device), index)


def epoch_length(images: int, repeats: int) -> int:
    return images if repeats == 1 else images // ROUND * ROUND


def epoch_order(images: int, seed: int, epoch: int, repeats: int, batch_size: int) -> Tensor:
    """Samples, image + copy * 2^40, int64 on the CPU."""
    shuffled = chance.permutation("order", seed, epoch, images)
    if repeats == 1:
        return shuffled
    place = torch.arange(epoch_length(images, repeats))
    copy = place % repeats
    return (shuffled[place // repeats] + copy * chance.COPY)[torch.argsort(place // batch_size * repeats + copy, stable=True)]


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
    shape = image_set.read(0).shape
    out = np.empty((len(image_set), *shape), np.uint8)
    for i in range(len(image_set)):
        image = image_set.read(i)
        if image.shape != shape:
            raise OptionError(
                f"{image_set.where(i)} has shape {image.shape} and {image_set.where(0)} has {shape}: "
                "images in device memory must be of one size. Use path='workers'."
            )
        out[i] = image
    return out


def _sent(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
