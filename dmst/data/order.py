"""Which samples an epoch shows, in which order: a function of (seed, epoch, repeats, batch size), the same on every process.

    steps of an epoch     batches of `batch_size` places; what is left over at the end of the order is not shown
    a batch               cut into `world` parts, each of these into `micro_steps` parts, all of them contiguous

Repeated augmentation: every image `repeats` times in a row, of which the first floor(n / 256) * 256 places are shown: timm.
Inside a batch the first copies come first, then the second ones, so that neighbours, which mixup pairs, are different images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmst.data import chance
from dmst.data.batch import Shard
from dmst.errors import OptionError

ROUND = 256  # timm's, after DeiT


def epoch_length(images: int, repeats: int) -> int:
    return images if repeats == 1 else images // ROUND * ROUND


def epoch_order(images: int, seed: int, epoch: int, repeats: int, batch_size: int) -> Tensor:
    """Samples, image + copy * 2^40, int64 on the CPU."""
    order = chance.permutation("order", seed, epoch, images)
    if repeats == 1:
        return order
    place = torch.arange(epoch_length(images, repeats))
    copy = place % repeats
    return (order[place // repeats] + copy * chance.COPY)[torch.argsort(place // batch_size * repeats + copy, stable=True)]


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
