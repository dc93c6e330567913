"""Where pixels go: crops, mirrors, resizing, affine maps, on uint8 batches (b, c, h, w). Pure functions, no randomness inside.

Coordinates are those of pixel edges: an image reaches from 0 to w, the first pixel's centre is at 0.5. Crops and mirrors are
exact; what is interpolated is rounded to whole values, as a worker process would deliver it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

TRIES = 10  # at a rectangle that fits: torchvision's and timm's number
RATIO = (3 / 4, 4 / 3)
BOX_DRAWS = 2 * TRIES + 2


def to_bytes(images: Tensor) -> Tensor:
    return images.clamp(0, 255).round().to(torch.uint8)


def take(pixels: Tensor, rows: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """pixels[rows] seen from (down, right) on, beyond the edges reflected, then mirrored; all but pixels are (b,)."""
    c, h, w = pixels.shape[1:]
    y = torch.arange(h, device=pixels.device) + down[:, None]
    x = torch.arange(w, device=pixels.device)
    x = torch.where(mirrored[:, None], w - 1 - x, x) + right[:, None]
    channels = torch.arange(c, device=pixels.device)[None, :, None, None]
    return pixels[rows[:, None, None, None], channels, _reflected(y, h)[:, None, :, None], _reflected(x, w)[:, None, None, :]]


def _reflected(i: Tensor, n: int) -> Tensor:
    return (n - 1) - ((n - 1) - i.abs()).abs()


def integers(draws: Tensor, count: int | Tensor) -> Tensor:
    """Draws from [0, 1) as whole numbers 0..count-1; the minimum is for a product that float32 rounds up to count."""
    limit = count - 1 if isinstance(count, Tensor) else torch.full((), count - 1, device=draws.device)
    return torch.minimum((draws * count).to(torch.int64), limit.to(torch.int64))


def first_fitting(
    draws: Tensor, pixels: int, most: tuple[int, int], areas: tuple[float, float], ratios: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of TRIES rectangles the first with sides up to `most`: (height, width, found), (b,) each. `draws` is (b, 2 * TRIES).

    Areas are shares of `pixels`, drawn evenly; ratios, of width to height, evenly by their logarithm. Where none fits, found is
    False and the sides say nothing.
    """
    area, ratio = draws.unflatten(1, (TRIES, 2)).unbind(-1)
    area = (areas[0] + (areas[1] - areas[0]) * area) * pixels
    low, high = math.log(ratios[0]), math.log(ratios[1])
    ratio = torch.exp(low + (high - low) * ratio)
    height, width = torch.sqrt(area / ratio).round(), torch.sqrt(area * ratio).round()
    fits = (height >= 1) & (width >= 1) & (height <= most[0]) & (width <= most[1])
    first = fits.to(torch.int64).argmax(1, keepdim=True)
    found = torch.stack((height, width, fits.to(height.dtype)), -1).take_along_dim(first[..., None], 1).squeeze(1)
    return found[:, 0], found[:, 1], found[:, 2] > 0


def resized_boxes(draws: Tensor, h: int, w: int, least: float) -> Tensor:
    """Boxes (top, left, height, width) of random resized crops, (b, 4), whole numbers in float32; `draws` is (b, BOX_DRAWS).

    Where no try fits: the largest box in the middle with a ratio allowed.
    """
    height, width, found = first_fitting(draws[:, : 2 * TRIES], h * w, (h, w), (least, 1.0), RATIO)
    height = torch.where(found, height, float(min(h, round(w / RATIO[0]))))
    width = torch.where(found, width, float(min(w, round(h * RATIO[1]))))
    place = integers(draws[:, 2 * TRIES :], torch.stack((h - height + 1, w - width + 1), 1))
    middle = torch.stack(((h - height) / 2, (w - width) / 2), 1).floor()
    place = torch.where(found[:, None], place.to(height.dtype), middle)
    return torch.cat((place, height[:, None], width[:, None]), 1)


def middle_box(h: int, w: int) -> tuple[float, float, float, float]:
    """The square in the middle, (top, left, height, width)."""
    side = min(h, w)
    return (h - side) / 2, (w - side) / 2, side, side


def warp(
    images: Tensor,
    box: Tensor | tuple[float, float, float, float],
    angle: Tensor,
    scale: Tensor,
    move: Tensor,
    size: int,
    interpolation: str,
) -> Tensor:
    """The box of each image, (b, 4), or one for all, as (size, size); turned by `angle` (b,) radians, enlarged by `scale` (b,),
    moved by `move` (b, 2) pixels right and down, all about the middle. Outside of the image is 0, the darkest value."""
    at = (torch.arange(size, device=images.device) + 0.5) / size - 0.5
    x, y = at[None, None, :] - move[:, 0, None, None] / size, at[None, :, None] - move[:, 1, None, None] / size
    cos, sin = (torch.cos(angle) / scale)[:, None, None], (torch.sin(angle) / scale)[:, None, None]
    x, y = cos * x + sin * y + 0.5, cos * y - sin * x + 0.5
    top, left, height, width = box[:, :, None, None].unbind(1) if isinstance(box, Tensor) else box
    return sample(images, left + x * width, top + y * height, interpolation, 0.0)


def sample(images: Tensor, x: Tensor, y: Tensor, interpolation: str, fill: float | Tensor) -> Tensor:
    """The values at (x, y), (b, h', w') each; `fill` outside of the image. Pillow's rule: pixels beyond an edge repeat it."""
    h, w = images.shape[-2:]
    grid = torch.stack((x * (2 / w) - 1, y * (2 / h) - 1), -1)
    found = F.grid_sample(images.to(torch.float32), grid, mode=interpolation, padding_mode="border", align_corners=False)
    inside = (x >= 0) & (x < w) & (y >= 0) & (y < h)
    return to_bytes(torch.where(inside[:, None], found, fill))


def short_side(h: int, w: int, short: int) -> tuple[int, int]:
    """The size of an (h, w) image once its shorter side is `short`."""
    return (short, int(short * w / h)) if h <= w else (int(short * h / w), short)


def corner(h: int, w: int, size: int) -> tuple[int, int]:
    """Top and left of the (size, size) square in the middle, as torchvision rounds them."""
    return round((h - size) / 2), round((w - size) / 2)


def resize(images: Tensor, size: int, crop_pct: float, interpolation: str) -> Tensor:
    """The shorter side to size / crop_pct, with antialiasing, then the (size, size) square in the middle.

    Across, then down, with whole values in between, as Pillow does: the two differ by 1 at most.
    """
    h, w = images.shape[-2:]
    new = short_side(h, w, math.floor(size / crop_pct))
    for step in ((h, new[1]), new):
        if step != images.shape[-2:]:
            images = to_bytes(F.interpolate(images.to(torch.float32), step, mode=interpolation, antialias=True))
    top, left = corner(*new, size)
    return images[..., top : top + size, left : left + size]
