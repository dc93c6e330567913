"""Small images, decoded once into the memory of the device: uint8 (n, c, h, w)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dmst.data.sets import ImageSet
from dmst.errors import OptionError

LIMIT = 4 << 30  # bytes; a fixed number, so that the path does not depend on what else is in memory


def array_of(image_set: ImageSet) -> np.ndarray | None:
    """The set as one array, if it is one and not too large to be copied to a device unasked."""
    pixels = image_set.pixels()
    return pixels if pixels is not None and pixels.nbytes <= LIMIT else None


def read_all(image_set: ImageSet, bad: frozenset[int]) -> np.ndarray:
    """The set as one array, read image by image where it is none: all must be of one size. Bad ones are black."""
    pixels = image_set.pixels()
    if pixels is not None:
        return pixels
    first = next((i for i in range(len(image_set)) if i not in bad), None)
    if first is None:
        raise OptionError(f"{image_set} has no good image.")
    shape = image_set.read(first).shape
    out = np.zeros((len(image_set), *shape), np.uint8)
    for i in range(first, len(image_set)):
        if i in bad:
            continue
        image = image_set.read(i)
        if image.shape != shape:
            raise OptionError(
                f"{image_set.where(i)} has shape {image.shape} and {image_set.where(first)} has {shape}: "
                "images in device memory must be of one size. Use path='workers'."
            )
        out[i] = image
    return out


def on_device(pixels: np.ndarray, device: torch.device) -> Tensor:
    """(n, h, w, c) to (n, c, h, w). A copy in any case: the array may be read-only, or change."""
    return torch.from_numpy(np.array(pixels.transpose(0, 3, 1, 2), order="C")).to(device)
