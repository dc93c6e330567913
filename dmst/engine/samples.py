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
from dmst.data.workers import mask_in_view
from dmst.engine import prepare
from dmst.engine.classify import Photos
from dmst.errors import OptionError
from dmst.models import VisionModel
from dmst.photos import PHOTOS, photo


@dataclass(frozen=True)
class Sample:
    """Batches of images as the network takes them, one in memory at a time, from the start again whenever asked."""

    name: str  # for titles: "cifar10 test, 1,000 of 10,000 images by hash"
    stream: EvalStream
    dtype: torch.dtype
    labelled: bool = False  # whether the labels are those of the network's classes
    titles: tuple[str, ...] = ()  # of photos: what each is called

    @property
    def count(self) -> int:
        return len(self.stream.image_set)

    @property
    def fingerprint(self) -> str:
        """Of the images themselves, before the network's size and normalisation."""
        return self.stream.image_set.fingerprint

    @property
    def has_masks(self) -> bool:
        return self.stream.image_set.masks(0) is not None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(images, labels); None where there are no labels of the network's classes."""
        for batch in self.stream:
            yield batch.images.to(self.dtype), batch.labels if self.labelled else None

    def _mask(self, index: int) -> Tensor:
        mask = self.stream.image_set.masks(index)
        assert mask is not None  # a dataset has masks of all images, or of none
        return mask_in_view(mask, self.stream.view)

    def masked(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(images (b, c, size, size), masks (b, size, size) uint8)."""
        if not self.has_masks:
            raise OptionError(f"{self.name}: there are no masks. Oxford-IIIT Pets has some: --data pets.")
        for batch in self.stream:
            masks = [self._mask(i) for i in batch.index.tolist()]
            yield batch.images.to(self.dtype), torch.stack(masks)


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
    size: int | None = None,
) -> Sample:
    """What to look at; the network decides size (unless one is given), channels and normalisation. `run`: the folder of a run,
    if it is one."""
    if limit < 1 or batch_size < 1:
        raise OptionError(f"limit is {limit} and batch_size {batch_size}: both must be at least 1.")
    if data and photos:
        raise OptionError(f"{data} and photos: name a dataset, or photos, not both.")
    config, dtype = model.config, next(model.parameters()).dtype
    if size is not None and (size < 1 or size % config.patch_size):
        raise OptionError(f"size is {size}: it must be a multiple of {config.patch_size}, the patch of {config.name}.")
    held, crop_pct = prepare.evaluated_by(None if data or photos else run, data_dir)

    def stream(images: ImageSet) -> EvalStream:
        view = prepare.view_of(model, crop_pct)
        return EvalStream(images, view._replace(size=size or view.size), batch_size=batch_size, device=device)

    if photos:
        name = "1 photo" if len(photos) == 1 else f"{len(photos)} photos"
    elif not data and held is None and (config.in_chans, config.img_size) != (1, (8, 8)):
        names = list(PHOTOS)[:limit]
        name, photos = f"the photographs that ship ({', '.join(names)})", [photo(each) for each in names]
    if photos:
        given = Photos.open([Path(path) for path in photos], config.in_chans)
        return Sample(name, stream(given), dtype, titles=tuple(Path(path).stem for path in photos))
    images = prepare.images_of(data or "digits", split, data_dir) if held is None else held
    name = f"{images}: {len(images):,} images"
    if limit < len(images):
        places = chance.permutation("sample", 0, 0, len(images))[:limit]
        name = f"{images}: {limit:,} of {len(images):,} images by hash"
        images = subset(images, np.sort(places.numpy()))
    same = tuple(images.classes) == tuple(model.class_names or images.classes)
    return Sample(name, stream(images), dtype, same and len(images.classes) == config.num_classes)
