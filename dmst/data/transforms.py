"""One image, cut to the size that a model takes, by Pillow: array in, uint8 (c, size, size) out.

training      random resized crop, with the draws of the resident path; or shorter side to size, and the middle
evaluation    shorter side to size / crop_pct, and the middle
masks         the same middle square, nearest neighbour, so that no value is made up between two
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dmst.data import chance, geometry
from dmst.data.augment import Augment
from dmst.data.batch import View

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def train_image(array: np.ndarray, view: View, augment: Augment, seed: int, epoch: int, sample: int) -> Tensor:
    image, filter = _image(array, view.channels), FILTERS[augment.interpolation]
    if not augment.resized_crop:
        return _tensor(_middle(image, view.size, 1.0, filter))
    draws = chance.uniform("resized crop", seed, epoch, torch.tensor([sample]), geometry.BOX_DRAWS)
    boxes = geometry.resized_boxes(draws, image.height, image.width, augment.resized_crop)
    top, left, height, width = boxes[0].to(torch.int64).tolist()
    return _tensor(image.crop((left, top, left + width, top + height)).resize((view.size, view.size), filter))


def eval_image(array: np.ndarray, view: View) -> Tensor:
    return _tensor(_middle(_image(array, view.channels), view.size, view.crop_pct, FILTERS[view.interpolation]))


def mask_in_view(mask: np.ndarray, view: View) -> Tensor:
    """A mask (h, w) as `view` would cut the image it belongs to: (size, size) uint8."""
    return _tensor(_middle(Image.fromarray(mask), view.size, view.crop_pct, Image.Resampling.NEAREST))[0]


def _image(array: np.ndarray, channels: int) -> Image.Image:
    image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    return image.convert("RGB") if channels == 3 else image


def _middle(image: Image.Image, size: int, crop_pct: float, filter: Image.Resampling) -> Image.Image:
    h, w = geometry.short_side(image.height, image.width, math.floor(size / crop_pct))
    if (w, h) != image.size:
        image = image.resize((w, h), filter)
    top, left = geometry.corner(h, w, size)
    return image.crop((left, top, left + size, top + size))


def _tensor(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1)))
