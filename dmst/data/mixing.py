"""Parts of normalised images (b, c, h, w) taken out or exchanged.

Erasing puts noise in a rectangle, cutout the mean colour, which is 0. By mixup and cutmix each image becomes part of another
one, and so does its label:

    image_i  <- image_i + share_i * (image_j - image_i)          mixup: share = 1 - lambda, lambda ~ Beta(alpha, alpha)
    target_i <- target_i + mean(share_i) * (target_j - target_i)  cutmix: share = 1 in a rectangle of area 1 - lambda, else 0

pair     j is the neighbour of i (places 2k and 2k + 1 of the epoch), each pair has its own lambda: the same for any world size
batch    j is the mirrored place in the batch that is here, one lambda for the global batch, as timm mixes
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dmst.data import chance
from dmst.data.geometry import TRIES, first_fitting, integers

CELLS = 4096  # of the table of quantiles
POINTS = 1 << 17  # of the integral behind it
DRAWS = 5  # whether, which, lambda, place down, place across
AREAS, RATIOS = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of random erasing: timm's
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


def beta_quantiles(alpha: float) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at 0, 1/CELLS, ..., 1; float32 (CELLS + 1,).

    With x = t^(1/c), c = min(alpha, 1), (x (1 - x))^(alpha - 1) dx becomes t^(alpha/c - 1) (1 - x)^(alpha - 1) dt / c:
    bounded up to x = 1/2; the other half is its mirror image.
    """
    c = min(alpha, 1.0)
    t = np.linspace(0, 0.5**c, POINTS)
    x = t ** (1 / c)
    density = t ** (alpha / c - 1) * (1 - x) ** (alpha - 1)
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    half = np.interp(np.linspace(0, 0.5, CELLS // 2 + 1), mass / (2 * mass[-1]), x)
    return torch.from_numpy(np.concatenate((half, 1 - half[-2::-1]))).to(torch.float32)


def quantile(table: Tensor, draws: Tensor) -> Tensor:
    """The table at draws from [0, 1), interpolated."""
    place = draws * CELLS
    cell = place.to(torch.int64)
    low, high = table[cell], table[cell + 1]
    return low + (place - cell) * (high - low)


def partner(x: Tensor, mode: str) -> Tensor:
    """What stands at the partners' places of the first axis."""
    return x.flip(0) if mode == "batch" else x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def shares(
    draws: Tensor, mixup: Tensor | None, cutmix: Tensor | None, probability: float, switch: float, h: int, w: int
) -> tuple[Tensor, Tensor]:
    """How much of the partner each pixel gets, (n, 1, h, w), and its mean (n,), from draws (n, DRAWS); two tables or None."""
    whether, which, at, down, across = draws.unbind(1)
    mixed = whether < probability
    everywhere = torch.zeros_like(at) if mixup is None else 1 - quantile(mixup, at)
    if cutmix is None:
        mean = torch.where(mixed, everywhere, 0.0)
        return mean[:, None, None, None].expand(-1, 1, h, w), mean
    cut = mixed if mixup is None else mixed & (which < switch)
    side = torch.sqrt(1 - quantile(cutmix, at))
    y, height = integers(down, h), (h * side).to(torch.int64)
    x, width = integers(across, w), (w * side).to(torch.int64)
    top, bottom = (y - height // 2).clamp(min=0), (y + (height + 1) // 2).clamp(max=h)
    left, right = (x - width // 2).clamp(min=0), (x + (width + 1) // 2).clamp(max=w)
    box = inside(h, w, top, bottom, left, right)
    area = ((bottom - top) * (right - left)).to(torch.float32) / (h * w)
    mean = torch.where(mixed, torch.where(cut, area, everywhere), 0.0)
    return torch.where(cut[:, None, None, None], box.to(torch.float32), mean[:, None, None, None]), mean


def mix(images: Tensor, targets: Tensor, share: Tensor, mean: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Images and targets mixed; `share` and `mean` are of pairs, or of the batch."""
    if mode == "pair":
        share, mean = share.repeat_interleave(2, 0), mean.repeat_interleave(2, 0)
    return torch.lerp(images, partner(images, mode), share), torch.lerp(targets, partner(targets, mode), mean[:, None])
