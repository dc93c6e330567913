"""Masks in the frame of the images: the same middle square, nearest neighbour, so that no value is made up between two."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dmst.data import geometry
from dmst.data.batch import View


def in_view(mask: np.ndarray, view: View) -> Tensor:
    """A mask (h, w) as `view` would cut the image it belongs to: (size, size) uint8."""
    h, w = geometry.short_side(mask.shape[0], mask.shape[1], math.floor(view.size / view.crop_pct))
    image = Image.fromarray(mask)
    if (w, h) != image.size:
        image = image.resize((w, h), Image.Resampling.NEAREST)
    top, left = geometry.corner(h, w, view.size)
    return torch.from_numpy(np.array(image)[top : top + view.size, left : left + view.size])
