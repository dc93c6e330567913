"""One image in a worker process: array in, uint8 (c, size, size) out. Pillow does it; the draws are those of the resident path.

training      random resized crop, or shorter side to size and the middle; mirror; RandAugment by timm, where it is given
evaluation    shorter side to size / crop_pct, the middle
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dmst.data import chance, geometry
from dmst.data.augment import Augment
from dmst.data.batch import View
from dmst.errors import need

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def timm_transform(view: View, augment: Augment) -> Callable[[Any], Any]:
    """timm's RandAugment as timm's own pipeline sets it up; raises MissingExtraError where timm does not import.

    Its magnitude 10 keeps 0 bits of a colour, which Pillow took for black and refuses now (13.0): of rand-m9-mstd0.5-inc1 one
    image in 660 would end the run. Here it is black, as before.
    """
    mean = tuple(min(255, round(255 * x)) for x in view.mean)
    options = {"translate_const": int(view.size * 0.45), "img_mean": mean, "interpolation": FILTERS[augment.interpolation]}
    transform = need("timm.data.auto_augment", "timm").rand_augment_transform(augment.aa, options)
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return transform


def train_image(
    array: np.ndarray, view: View, augment: Augment, transform: Callable[[Any], Any] | None, seed: int, epoch: int, sample: int
) -> Tensor:
    image = _image(array, view.channels)
    one = torch.tensor([sample])
    if augment.resized_crop:
        draws = chance.uniform("resized crop", seed, epoch, one, geometry.BOX_DRAWS)
        (box,) = geometry.resized_boxes(draws, image.height, image.width, augment.resized_crop).to(torch.int64).tolist()
        top, left, height, width = box
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((view.size, view.size), FILTERS[augment.interpolation])
    else:
        image = _middle(image, view.size, 1.0, augment.interpolation)
    if chance.uniform("flip", seed, epoch, one, 1).item() < augment.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if transform is not None:
        with seeded(chance.small_seed("timm", seed, epoch, sample)):
            image = transform(image)
    return _tensor(image)


def eval_image(array: np.ndarray, view: View) -> Tensor:
    return _tensor(_middle(_image(array, view.channels), view.size, view.crop_pct, view.interpolation))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's global generators from `seed`, for code that draws from them; afterwards as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (timm draws from the second)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    return image.point([value & -(1 << (8 - bits)) for value in range(256)] * len(image.getbands()))


def _image(array: np.ndarray, channels: int) -> Image.Image:
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    return image.convert("RGB") if channels == 3 else image


def _middle(image: Image.Image, size: int, crop_pct: float, interpolation: str) -> Image.Image:
    h, w = geometry.short_side(image.height, image.width, math.floor(size / crop_pct))
    if (w, h) != image.size:
        image = image.resize((w, h), FILTERS[interpolation])
    top, left = geometry.corner(h, w, size)
    return image.crop((left, top, left + size, top + size))


def _tensor(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1)))
