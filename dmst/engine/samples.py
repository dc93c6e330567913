"""The images that an analysis looks at: always the same ones, and named.

a dataset or a folder    `limit` images of a split, chosen by hash; all if there are no more
a run                    the images that it was evaluated on, held-out ones too: never a test set that it did not look at
photos                   files, in the order given
nothing                  the digits' test images for a network that takes those; else the six photographs that ship
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dmst.data import chance
from dmst.data.loader import EvalStream
from dmst.data.sets import ImageSet, subset
from dmst.engine import prepare
from dmst.engine.classify import Photo
from dmst.errors import OptionError
from dmst.models import VisionModel
from dmst.photos import PHOTOS, photo


@dataclass(frozen=True)
class Sample:
    """Batches of images as the network takes them, with their labels; None where there are no labels of its classes."""

    name: str  # for titles: "cifar10 test, near-lossless JPEG train, 1,000 of 10,000 images by hash"
    count: int
    batches: Sequence[tuple[Tensor, Tensor | None]] | _Streamed
    titles: tuple[str, ...] = ()  # of photos: what each is called
    fingerprint: str = ""  # of the images themselves, before the network's size and normalisation

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        return iter(self.batches)


@dataclass(frozen=True)
class _Streamed:
    """One batch in memory at a time, from the start again whenever asked."""

    stream: EvalStream
    labelled: bool
    dtype: torch.dtype

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for batch in self.stream:
            counted = batch.weight > 0
            yield batch.images[counted].to(self.dtype), batch.labels[counted] if self.labelled else None


def sample(
    model: VisionModel,
    data: str | None = None,
    *,
    run: str | Path | None = None,
    split: str = "",
    data_dir: str | Path | None = None,
    photos: Sequence[str | Path] = (),
    limit: int = 1000,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> Sample:
    """What to look at; the network decides size, channels and normalisation. `run`: the folder of a run, if it is one."""
    if limit < 1 or batch_size < 1:
        raise OptionError(f"limit is {limit} and batch_size {batch_size}: both must be at least 1.")
    if data and photos:
        raise OptionError(f"{data} and photos: name a dataset, or photos, not both.")
    config, dtype = model.config, next(model.parameters()).dtype
    held, crop_pct = (None if data or photos else prepare.evaluated_by(run, data_dir)) or (None, 0.0)
    if photos:
        words = "1 photo" if len(photos) == 1 else f"{len(photos)} photos"
        return _photos(model, [Path(path) for path in photos], words, batch_size, device)
    if not data and held is None:
        if (config.in_chans, config.img_size) != (1, (8, 8)):
            names = list(PHOTOS)[:limit]
            words = f"the photographs that ship ({', '.join(names)})"
            return _photos(model, [photo(name) for name in names], words, batch_size, device)
        data = "digits"
    image_set: ImageSet = prepare.images_of(data or "", split, data_dir) if held is None else held
    name = f"{image_set}: "
    if limit < len(image_set):
        places = chance.permutation("sample", 0, 0, len(image_set))[:limit]
        name += f"{limit:,} of {len(image_set):,} images by hash"
        image_set = subset(image_set, np.sort(places.numpy()))
    else:
        name += f"{len(image_set):,} images"
    stream = EvalStream(image_set, prepare.view_of(model, crop_pct), batch_size=min(batch_size, len(image_set)), device=device)
    same = tuple(image_set.classes) == tuple(model.class_names or image_set.classes)
    batches = _Streamed(stream, same and len(image_set.classes) == config.num_classes, dtype)
    return Sample(name, len(image_set), batches, fingerprint=image_set.fingerprint)


def _photos(model: VisionModel, paths: Sequence[Path], name: str, batch_size: int, device: torch.device | str) -> Sample:
    """Each as the network sees it; they have no labels."""
    config, dtype, view = model.config, next(model.parameters()).dtype, prepare.view_of(model)
    given = [Photo(path, max(config.num_classes, 1), config.in_chans) for path in paths]
    images = torch.cat([next(iter(EvalStream(each, view, batch_size=1, device=device))).images.to(dtype) for each in given])
    return Sample(name, len(given), [(some, None) for some in images.split(batch_size)], tuple(path.stem for path in paths))
