"""Batches of a set, for training and for evaluation: two paths, one interface.

    resident    small images, decoded once into device memory; augmentation there, on whole batches
    workers     large images, cut and mirrored by worker processes, RandAugment by timm; the rest on the device, same code

Order and augmentation are functions of (seed, epoch, index) alone: each path gives the same bits for any number of workers, any
world size, any micro-steps and any first step. The paths share order, indices, crops and mirrors; they differ in interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dmst.data import chance, order, resident
from dmst.data.augment import Augment
from dmst.data.batch import Batch, Shard, View, check_shard, check_view
from dmst.data.batching import BatchMaker, check_channels
from dmst.data.sets import ImageSet
from dmst.data.transforms import timm_transform
from dmst.data.workers import Key, Samples, read
from dmst.errors import MissingExtraError, OptionError, choose

__all__ = ["Batch", "EvalStream", "Shard", "TrainStream", "View"]


class _Stream:
    """What both streams share: the set, where its pixels are, and notes: what a log should say."""

    def __init__(
        self,
        image_set: ImageSet,
        view: View,
        shard: Shard,
        device: torch.device | str,
        path: str,
        workers: int,
        bad: frozenset[int],
    ) -> None:
        check_view(view)
        check_shard(shard)
        choose("path", path, ("auto", "resident", "workers"))
        if type(workers) is not int or workers < 0:
            raise OptionError(f"workers is {workers!r}: it must be a whole number of at least 0.")
        self.image_set, self.view, self.shard, self.workers, self.bad = image_set, view, shard, workers, frozenset(bad)
        self.device = torch.device(device)
        self.notes: list[str] = []
        self._pixels: Tensor | None = None
        found = None if path == "workers" else resident.array_of(image_set)
        if path == "resident" and found is None:
            found = resident.read_all(image_set, self.bad)
        self.path = "workers" if found is None else "resident"
        if found is not None:
            self._pixels = resident.on_device(found, self.device)
        else:
            first = next((i for i in range(len(image_set)) if i not in self.bad), None)
            if first is not None:
                check_channels(image_set.read(first).shape[2], view.channels)

    def _maker(self, augment: Augment, **options: object) -> BatchMaker:
        maker = BatchMaker(
            self.view,
            augment,
            self.image_set.labels,
            len(self.image_set.classes),
            device=self.device,
            bad=self.bad,
            resident=self._pixels is not None,
            **options,  # type: ignore[arg-type]
        )
        if self._pixels is not None:
            maker.check(self._pixels)
        return maker


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
        bad: frozenset[int] = frozenset(),
        compiled: bool | str = False,
    ) -> None:
        super().__init__(image_set, view, shard, device, path, workers, bad)
        pairs = augment.mixes and augment.mixup_mode == "pair"
        self.augment, self.batch_size, self.seed = augment, batch_size, seed
        self.micro_batch = order.micro_batch(len(image_set), batch_size, shard, augment.repeats, pairs)
        self.steps_per_epoch = order.epoch_length(len(image_set), augment.repeats) // batch_size
        self._order = lru_cache(3)(self._order_of)  # workers read ahead, into the next epoch
        if augment.mixes and not pairs:
            self.notes.append("mixup_mode=batch: which images are mixed depends on the number of processes and micro-steps.")
        on_device = augment
        if self.path == "workers":
            on_device = self._start_samples()
        self._batches = self._maker(on_device, seed=seed, batch_size=batch_size, compiled=compiled)

    def _start_samples(self) -> Augment:
        """Prepare what workers do; returns what is left for the device."""
        left, transform = replace(self.augment, resized_crop=0.0, flip=0.0), None
        if self.augment.aa and self.view.channels == 3:
            try:
                transform = timm_transform(self.view, self.augment)
                left = replace(left, aa="", color_jitter=0.0)
            except MissingExtraError as error:
                self.notes.append(f"RandAugment runs on the device, by our own operations instead of timm's: {error}")
        self._samples = Samples(self.image_set, self.view, self.bad, self.augment, transform, self.seed)
        return left

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def count(self, step: int) -> float:
        """How many samples of the global batch count; the same on all processes."""
        if not self.bad:
            return float(self.batch_size)
        return float(self.batch_size - np.isin(self.indices(step).numpy(), sorted(self.bad)).sum())

    def indices(self, step: int) -> Tensor:
        """The images of the global batch, int64 on the CPU."""
        start = step % self.steps_per_epoch * self.batch_size
        return self._order(self.epoch_of(step))[start : start + self.batch_size] % chance.COPY

    def batches(self, first_step: int, last_step: int) -> Iterator[Batch]:
        """This process's micro-batches of the steps first_step .. last_step - 1, in the order (step, micro-step)."""
        if not 0 <= first_step <= last_step:
            raise OptionError(f"steps {first_step} to {last_step}: they must not be negative, nor go backwards.")
        return self._run(first_step, last_step)

    def _run(self, first_step: int, last_step: int) -> Iterator[Batch]:
        pixels = iter(()) if self._pixels is not None else self._read(first_step, last_step)
        position = torch.arange(self.steps_per_epoch * self.batch_size, device=self.device)
        here, sample, epoch_here = -1, position, position
        for epoch, start in self._slices(first_step, last_step):
            part = slice(start, start + self.micro_batch)
            chosen = self._order(epoch)
            if epoch != here:  # one transfer an epoch
                here, sample = epoch, _sent(chosen, self.device)
                epoch_here = torch.full((), epoch, dtype=torch.int64, device=self.device)
            with torch.no_grad():
                made = self._batches.make(
                    next(pixels) if self._pixels is None else self._pixels, sample[part], position[part], epoch_here
                )
            yield Batch(*made, chosen[part] % chance.COPY)

    def _slices(self, first_step: int, last_step: int) -> Iterator[tuple[int, int]]:
        """(epoch, place in its order) of each micro-batch of this process."""
        mine = self.shard.rank * self.micro_batch * self.shard.micro_steps
        for step in range(first_step, last_step):
            start = step % self.steps_per_epoch * self.batch_size + mine
            for micro in range(self.shard.micro_steps):
                yield self.epoch_of(step), start + micro * self.micro_batch

    def _read(self, first_step: int, last_step: int) -> Iterator[Tensor]:
        keys = _Keys(self, first_step, last_step)
        return read(self._samples, keys, self.workers, self.device)

    def _order_of(self, epoch: int) -> Tensor:
        return order.epoch_order(len(self.image_set), self.seed, epoch, self.augment.repeats, self.batch_size)


class _Keys:
    """A batch sampler of every micro-batch from the first step to the last, so that workers never restart."""

    def __init__(self, stream: TrainStream, first_step: int, last_step: int) -> None:
        self.stream, self.steps = stream, (first_step, last_step)

    def __iter__(self) -> Iterator[list[Key]]:
        for epoch, start in self.stream._slices(*self.steps):
            for_batch = self.stream._order(epoch)[start : start + self.stream.micro_batch]
            yield [(epoch, sample) for sample in for_batch.tolist()]


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
        bad: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(image_set, view, shard, device, path, workers, bad)
        if batch_size < 1:
            raise OptionError(f"batch_size is {batch_size}: it must be at least 1.")
        self.batch_size = batch_size
        n, rank, world = len(image_set), shard.rank, shard.world
        self.first, self.last = n * rank // world, n * (rank + 1) // world
        self._count = math.ceil(math.ceil(n / world) / batch_size)
        self._samples = Samples(image_set, view, self.bad)
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
                images, targets, labels, weight = self._batches.make(
                    next(pixels) if self._pixels is None else self._pixels, sample, sample, zero
                )
            if place[-1] >= self.last:
                weight = weight * _sent((place < self.last).to(torch.float32), self.device)
            yield Batch(images, targets, labels, weight, index)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
