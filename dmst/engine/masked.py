"""A sample of images together with their masks, where the dataset has masks (Oxford-IIIT Pets)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dmst.data.masks import in_view
from dmst.engine.samples import Sample
from dmst.errors import OptionError


def has_masks(sample: Sample) -> bool:
    stream = getattr(sample.batches, "stream", None)
    return stream is not None and stream.image_set.masks(0) is not None


def masked(sample: Sample) -> Iterator[tuple[Tensor, Tensor]]:
    """(images (b, c, size, size), masks (b, size, size) uint8), one batch in memory at a time."""
    if not has_masks(sample):
        raise OptionError(f"{sample.name}: there are no masks. Oxford-IIIT Pets has some: --data pets.")
    stream = sample.batches.stream  # type: ignore[union-attr]
    for batch in stream:
        counted = batch.weight > 0
        masks = [stream.image_set.masks(i) for i in batch.index[counted.cpu()].tolist()]
        yield batch.images[counted], torch.stack([in_view(mask, stream.view) for mask in masks if mask is not None])
