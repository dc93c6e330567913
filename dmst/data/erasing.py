"""Rectangles taken out of normalised images (b, c, h, w): random erasing by noise, cutout by the mean colour, which is 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dmst.data import chance
from dmst.data.geometry import TRIES, first_fitting, integers

AREAS, RATIOS = (0.02, 1 / 3), (0.3, 1 / 0.3)  # timm's
ERASE_DRAWS = 2 * TRIES + 3


def inside(h: int, w: int, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Which pixels lie in the rectangle of each image, (b, 1, h, w); bottom and right are the first outside."""
    y, x = torch.arange(h, device=top.device), torch.arange(w, device=top.device)
    rows = (y >= top[:, None]) & (y < bottom[:, None])
    columns = (x >= left[:, None]) & (x < right[:, None])
    return (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)


def erase(images: Tensor, draws: Tensor, noise: Tensor, probability: float) -> Tensor:
    """Noise in a rectangle of a random area, ratio and place; draws (b, ERASE_DRAWS), noise as `normal_noise` gives it.

    Of TRIES rectangles the first that leaves a row and a column, as timm asks; where none does, the image stays.
    """
    h, w = images.shape[-2:]
    height, width, found = first_fitting(draws[:, : 2 * TRIES], h * w, (h - 1, w - 1), AREAS, RATIOS)
    top = integers(draws[:, -3], h - height + 1)
    left = integers(draws[:, -2], w - width + 1)
    hit = inside(h, w, top, top + height, left, left + width) & (found & (draws[:, -1] < probability))[:, None, None, None]
    return torch.where(hit, noise, images)


def normal_noise(key: Tensor, epoch: Tensor, sample: Tensor, steps: Tensor, c: int, h: int, w: int) -> Tensor:
    """N(0, 1) for each channel and pixel, (b, c, h, w); `steps` counts from 0, at least to a third of c * h * w, or to h * w.

    One word gives three draws of 21 bits each, for words are the costly part.
    """
    word = chance.words(key, epoch, sample, steps[: -(-c // 3) * h * w]).unflatten(1, (-1, h, w))
    draws = torch.stack([(word >> shift) & (2**21 - 1) for shift in (0, 21, 42)], 2).flatten(1, 2)[:, :c]
    return torch.erfinv((draws.to(torch.float32) + 0.5) * 2.0**-20 - 1) * math.sqrt(2)


def cutout(images: Tensor, draws: Tensor, side: int) -> Tensor:
    """A square of `side` pixels set to 0, its middle at any pixel, so that a part may lie outside; draws (b, 2)."""
    h, w = images.shape[-2:]
    top, left = integers(draws[:, 0], h) - side // 2, integers(draws[:, 1], w) - side // 2
    return torch.where(inside(h, w, top, top + side, left, left + side), 0.0, images)
