"""The images that an analysis looks at: always the same ones, and named.

a dataset or a folder    `limit` images of a split, chosen by hash; all if there are no more
a run                    the images that it was evaluated on, held-out ones too: never a test set that it did not look at
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
from dmst.engine.recipe import from_toml
from dmst.errors import OptionError
from dmst.models import VisionModel
from dmst.models.shipped import drawn

DRAWN = 32  # pictures
RECIPE = "recipe.toml"  # of a run


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
    split: str = "test",
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
    if photos:
        given = [Photo(Path(path), max(config.num_classes, 1), config.in_chans) for path in photos]
        view = prepare.view_of(model)
        batches = [next(iter(EvalStream(photo, view, batch_size=1, device=device))).images.to(dtype) for photo in given]
        words = "1 photo" if len(given) == 1 else f"{len(given)} photos"
        return Sample(words, len(given), [(images, None) for images in batches])
    held = None if data else _evaluated(run, data_dir)
    if not data and held is None and (config.in_chans, config.img_size) == (1, (8, 8)):
        data = "digits"
    if not data and held is None:
        images = drawn(config.in_chans, *config.img_size, count=min(limit, DRAWN)).to(device, dtype)  # type: ignore[misc]
        return Sample(f"{len(images)} drawn pictures", len(images), [(some, None) for some in images.split(batch_size)])
    image_set: ImageSet = catalog.open_set(data or "", split, data_dir=data_dir) if held is None else held
    name = f"{image_set}: "
    if limit < len(image_set):
        chosen = chance.permutation("sample", 0, 0, len(image_set))[:limit]
        name += f"{limit:,} of {len(image_set):,} images by hash"
        image_set = subset(image_set, np.sort(chosen.numpy()))
    else:
        name += f"{len(image_set):,} images"
    stream = EvalStream(image_set, prepare.view_of(model), batch_size=min(batch_size, len(image_set)), device=device)
    same = tuple(image_set.classes) == tuple(model.class_names or image_set.classes)
    return Sample(name, len(image_set), _Streamed(stream, same and len(image_set.classes) == config.num_classes, dtype))


def _evaluated(run: str | Path | None, data_dir: str | Path | None) -> ImageSet | None:
    """What a run was evaluated on; None where `run` is no run, or one that evaluated nothing."""
    path = Path(run or "") / RECIPE
    if not run or not path.is_file():
        return None
    recipe = from_toml(path.read_text(encoding="utf-8"), str(path))
    return prepare.open_sets(recipe, data_dir=data_dir, look=False).eval
