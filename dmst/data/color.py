"""What values become, on batches (b, c, h, w) of whole numbers 0..255: blends as Pillow's ImageEnhance makes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grey(images: Tensor) -> Tensor:
    """Luminance, (b, 1, h, w) float32, whole numbers, by Pillow's weights; of one channel: that channel."""
    if images.shape[1] == 1:
        return images.to(torch.float32)
    r, g, b = images.to(torch.int32).unbind(1)
    return ((19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16).unsqueeze(1).to(torch.float32)


def mean_grey(images: Tensor) -> Tensor:
    """Rounded mean luminance, (b, 1, 1, 1)."""
    return (grey(images).mean((1, 2, 3), keepdim=True) + 0.5).floor()


def smooth(images: Tensor) -> Tensor:
    """Mean over 3 x 3 pixels, the middle one five times; pixels at the edge stay."""
    x = images.to(torch.float32)
    if min(x.shape[-2:]) < 3:
        return x
    inner = ((F.avg_pool2d(x, 3, 1) * 9 + x[..., 1:-1, 1:-1] * 4) / 13 + 0.5).floor()
    out = x.clone()
    out[..., 1:-1, 1:-1] = inner
    return out


def blend(plain: Tensor | float, images: Tensor, factor: Tensor) -> Tensor:
    """plain + factor * (images - plain), cut off to 0..255 and to whole numbers; factor is (b, 1, 1, 1)."""
    return (plain + factor * (images.to(torch.float32) - plain)).clamp(0, 255).floor()


def color_jitter(images: Tensor, draws: Tensor, strength: float) -> Tensor:
    """Brightness, contrast, then colour, each by its own factor from 1 - strength to 1 + strength; draws (b, 3)."""
    factors = (1 + strength * (2 * draws - 1))[:, :, None, None, None]
    images = blend(0.0, images, factors[:, 0]).to(torch.uint8)
    images = blend(mean_grey(images), images, factors[:, 1]).to(torch.uint8)
    return blend(grey(images), images, factors[:, 2]).to(torch.uint8)
