"""The images that an analysis looks at: always the same ones, and named.

a dataset or a folder    `limit` images of a split, chosen by hash; all if there are no more
photos                   files, in the order given
nothing                  the digits' test images for a network that takes those; else pictures drawn by a formula, which
                         show what the layers compute, but are no photos
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dmst.data import catalog, chance
from dmst.data.loader import EvalStream
from dmst.data.sets import ImageSet, subset
from dmst.engine import prepare
from dmst.engine.classify import Photo
from dmst.errors import OptionError
from dmst.models import VisionModel
from dmst.models.shipped import drawn

DRAWN = 32  # pictures


@dataclass(frozen=True)
class Sample:
    """Batches of images as the network takes them, with their labels; None where there are no labels of its classes."""

    name: str  # for titles: "cifar10 test, near-lossless JPEG train, 1,000 of 10,000 images by hash"
    count: int
    batches: Sequence[tuple[Tensor, Tensor | None]] | _Streamed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        return iter(self.batches)


@dataclass(frozen=True)
class _Streamed:
    """One batch in memory at a time, from the start again whenever asked."""

    stream: EvalStream
    labelled: bool

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for batch in self.stream:
            counted = batch.weight > 0
            yield batch.images[counted], batch.labels[counted] if self.labelled else None


def sample(
    model: VisionModel,
    data: str | None = None,
    *,
    split: str = "test",
    data_dir: str | Path | None = None,
    photos: Sequence[Path] = (),
    limit: int = 1000,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> Sample:
    """What to look at; for which network decides size, channels and normalisation."""
    if limit < 1 or batch_size < 1:
        raise OptionError(f"limit is {limit} and batch_size {batch_size}: both must be at least 1.")
    if data and photos:
        raise OptionError(f"{data} and photos: name a dataset, or photos, not both.")
    view, config = prepare.view_of(model), model.config
    if photos:
        given = [Photo(path, max(config.num_classes, 1), config.in_chans) for path in photos]
        batches = [next(iter(EvalStream(photo, view, batch_size=1, device=device))).images for photo in given]
        words = "1 photo" if len(given) == 1 else f"{len(given)} photos"
        return Sample(words, len(given), [(images, None) for images in batches])
    if not data and (config.in_chans, config.img_size) == (1, (8, 8)):
        data = "digits"
    if not data:
        images = drawn(config.in_chans, *config.img_size, count=min(limit, DRAWN)).to(device)  # type: ignore[misc]
        return Sample(f"{len(images)} drawn pictures", len(images), [(some, None) for some in images.split(batch_size)])
    image_set: ImageSet = catalog.open_set(data, split, data_dir=data_dir)
    name = f"{image_set}: "
    if limit < len(image_set):
        chosen = chance.permutation("sample", 0, 0, len(image_set))[:limit]
        name += f"{limit:,} of {len(image_set):,} images by hash"
        image_set = subset(image_set, np.sort(chosen.numpy()))
    else:
        name += f"{len(image_set):,} images"
    stream = EvalStream(image_set, view, batch_size=min(batch_size, len(image_set)), device=device)
    return Sample(name, len(image_set), _Streamed(stream, len(image_set.classes) == config.num_classes))
