"""RandAugment on whole batches: timm's operations and levels, each image its own, no shape and no branch that depends on data.

    rand-m9-n2-p0.5-mstd0.5-inc1    n layers (2); in each one of 15 operations, with probability p (0.5), at a magnitude drawn
                                    from N(m, mstd), cut off to 0..10 (mstd over 100: evenly from 0 to m); inc1: operations that
                                    get stronger as the magnitude grows (timm's default is inc0)

Eight of the operations are tables of 256 values an image and channel; all moves are one affine map; so a layer is one lookup,
two blends and one map of the batch, of which `torch.where` takes what was drawn. Interpolation differs from Pillow's in that
grid_sample's cubic has the parameter -0.75 and Pillow's -0.5, and results are rounded, where Pillow cuts off.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.data.geometry import integers, sample
from dmst.errors import OptionError

OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast", "Brightness",
    "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY",
)  # fmt: skip
NUMBER = {name: i for i, name in enumerate(OPERATIONS)}
DRAWS = 5  # a layer: which, whether, two for the magnitude, sign
KEYS = {"m": (0, 10), "n": (1, 15), "p": (0, 1), "mstd": (0, math.inf), "inc": (0, 1)}


class Policy(NamedTuple):
    magnitude: float = 10
    layers: int = 2
    probability: float = 0.5
    spread: float = 0
    increasing: bool = False


def read_policy(text: str) -> Policy | None:
    """The policy that timm reads in such text; None for none."""
    if not text:
        return None
    first, *parts = text.split("-")
    matches = [re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part) for part in parts]
    found = {match[1]: float(match[2]) for match in matches if match}
    within = all(key in KEYS and KEYS[key][0] <= value <= KEYS[key][1] for key, value in found.items())
    if first != "rand" or len(found) < len(parts) or not within or any(found.get(key, 0) % 1 for key in ("m", "n", "inc")):
        raise OptionError(
            f"aa is {text!r}: it must read like rand-m9-mstd0.5-inc1, each part at most once: m 0..10, n 1..15, p 0..1, "
            "mstd >= 0, inc 0..1; m, n, inc whole."
        )
    m, n, p, mstd, inc = (found.get(key, default) for key, default in zip(KEYS, Policy(), strict=True))
    return Policy(m, int(n), p, mstd, bool(inc))


def rand_augment(images: Tensor, draws: Tensor, policy: Policy, fill: Tensor, interpolation: str) -> Tensor:
    """uint8 (b, c, h, w) augmented by `draws` (b, layers * DRAWS) from [0, 1); `fill` (1, c, 1, 1) comes into view."""
    for layer in draws.unflatten(1, (policy.layers, DRAWS)).unbind(1):
        which, whether, one, two, sign = layer.unbind(1)
        operation = integers(which, len(OPERATIONS))
        operation = torch.where(whether < policy.probability, operation, -1)
        normal = torch.sqrt(-2 * torch.log(1 - one)) * torch.cos(2 * math.pi * two)
        magnitude = (policy.magnitude + policy.spread * normal).clamp(0, 10)
        if policy.spread > 100:
            magnitude = one * policy.magnitude
        images = operate(images, operation, magnitude, sign < 0.5, policy.increasing, fill, interpolation)
    return images


def operate(
    images: Tensor, operation: Tensor, magnitude: Tensor, negative: Tensor, increasing: bool, fill: Tensor, interpolation: str
) -> Tensor:
    """One operation on each image; operation, magnitude 0..10 and negative are (b,). A number that is none leaves the image."""
    level = magnitude / 10
    signed = torch.where(negative, -level, level)
    factor = (1 + 0.9 * signed).clamp(min=0.1) if increasing else 0.1 + 1.8 * level
    factor = factor[:, None, None, None]

    def chosen(*names: str) -> Tensor:
        return torch.stack([operation == NUMBER[name] for name in names]).any(0)[:, None, None, None]

    out = _tables(images, operation, level, factor, increasing)
    out = out.gather(2, images.flatten(2).to(torch.int64)).unflatten(2, images.shape[2:])
    out = torch.where(chosen("Color"), blend(grey(images), images, factor).to(torch.uint8), out)
    out = torch.where(chosen("Sharpness"), blend(smooth(images), images, factor).to(torch.uint8), out)
    moved = _moved(images, operation, signed, fill, interpolation)
    return torch.where(chosen("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"), moved, out)


def _tables(images: Tensor, operation: Tensor, level: Tensor, factor: Tensor, increasing: bool) -> Tensor:
    """What each value becomes, (b, c, 256) uint8, by the operations that look at one pixel at a time; else the value itself."""
    value = torch.arange(256, device=images.device, dtype=torch.int32)[None, None, :]
    level, factor = level[:, None, None], factor[..., 0]
    low, high = images.flatten(2).amin(2, keepdim=True).to(torch.int32), images.flatten(2).amax(2, keepdim=True).to(torch.int32)
    bits = (level * 4).to(torch.int32)  # no magnitude is over 10
    bits = 4 - bits if increasing else bits
    step = 1 << (8 - bits)
    threshold = (level * 256).to(torch.int32)
    threshold = 256 - threshold if increasing else threshold
    add = (level * 110).to(torch.int32)
    mean = mean_grey(images)[..., 0]
    candidates = {
        "AutoContrast": torch.where(high > low, (value - low) * 255 // (high - low).clamp(min=1), value),
        "Equalize": _equalized(images, high, value),
        "Invert": 255 - value,
        "Posterize": value // step * step,
        "Solarize": torch.where(value < threshold, value, 255 - value),
        "SolarizeAdd": torch.where(value < 128, value + add, value),
        "Contrast": blend(mean, value, factor).to(torch.int32),
        "Brightness": blend(0.0, value, factor).to(torch.int32),
    }
    table = value.expand(len(images), images.shape[1], 256)
    for name, candidate in candidates.items():
        table = torch.where((operation == NUMBER[name])[:, None, None], candidate.clamp(0, 255), table)
    return table.to(torch.uint8)


def _equalized(images: Tensor, high: Tensor, value: Tensor) -> Tensor:
    """Pillow's table: pixels below a value, in steps of 1/255 of all but the brightest; a step of none leaves the image."""
    at = images.flatten(2).to(torch.int64)
    zeros = torch.zeros(*at.shape[:2], 256, dtype=torch.int32, device=images.device)
    histogram = zeros.scatter_add(2, at, torch.ones_like(at, dtype=torch.int32))
    total = histogram.sum(2, keepdim=True, dtype=torch.int32)
    step = (total - histogram.gather(2, high.to(torch.int64))) // 255
    below = histogram.cumsum(2, dtype=torch.int32) - histogram
    return torch.where(step > 0, (step // 2 + below) // step.clamp(min=1), value)


def _moved(images: Tensor, operation: Tensor, signed: Tensor, fill: Tensor, interpolation: str) -> Tensor:
    h, w = images.shape[-2:]

    def by(name: str, most: float) -> Tensor:
        return torch.where(operation == NUMBER[name], signed * most, 0.0)[:, None, None]

    angle = by("Rotate", math.radians(30))
    x, y = (torch.arange(n, device=images.device) + 0.5 for n in (w, h))
    x, y = x[None, None, :], y[None, :, None]
    cos, sin = torch.cos(angle), torch.sin(angle)
    across = cos * (x - w / 2) - sin * (y - h / 2) + w / 2 + by("ShearX", 0.3) * y + by("TranslateX", 0.45 * w)
    down = sin * (x - w / 2) + cos * (y - h / 2) + h / 2 + by("ShearY", 0.3) * x + by("TranslateY", 0.45 * h)
    return sample(images, across, down, interpolation, fill)


# --- what values become: blends as Pillow's ImageEnhance makes them ---------------------------------------------------


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
