"""Images at the door: how to prepare them for a network, in timm's words (`pretrained_cfg`), and what is refused."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dmst.errors import ShapeError
from dmst.kernels.casting import autocast_is_on
from dmst.models.config import ModelConfig
from dmst.models.stems import STEMS

# mean and standard deviation of the pixels (0 to 1), by channel, by the last word of a network's name: for a new network, and
# for a file that states none. A trained network has those of its dataset, and a saved one states them.
DEFAULTS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "digits": ((0.5,), (0.5,)),
}
DEFAULTS |= dict.fromkeys(("cifar10", "cifar100"), DEFAULTS["cifar"])


def pretrained_cfg(config: ModelConfig) -> dict[str, Any]:
    """Input size, mean, std, interpolation, crop; and the names of the first and last layers."""
    told = {
        "num_classes": config.num_classes,
        "input_size": [config.in_chans, *config.img_size],  # type: ignore[misc]
        "pool_size": None,
        "fixed_input_size": False,
        "interpolation": "bicubic",
        "crop_pct": 0.875 if config.img_size == (224, 224) else 1.0,
        "mean": [0.5] * config.in_chans,
        "std": [0.5] * config.in_chans,
        "first_conv": f"stem.{STEMS[config.stem].first}",
        "classifier": "head",
        "license": "apache-2.0",
    }
    set_mean_std(told, *DEFAULTS.get(config.name.rpartition("_")[2], DEFAULTS["imagenet"]))
    return told


def set_mean_std(told: dict[str, Any], mean: Any, std: Any) -> None:
    """Set mean and std of a `pretrained_cfg`, in place, if there is one number per channel, or one for all of them."""
    channels = len(told["mean"])
    mean, std = (
        [float(x) for x in each] if isinstance(each, list | tuple) and all(type(x) in (int, float) for x in each) else []
        for each in (mean, std)
    )
    mean, std = (each * channels if len(each) == 1 else each for each in (mean, std))
    if len(mean) == len(std) == channels and all(map(math.isfinite, mean + std)) and min(std) > 0:
        told.update(mean=mean, std=std)


def patch_grid(images: Tensor, dtype: torch.dtype, *, name: str, in_chans: int, patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches. Refuse what the network `name` with weights of `dtype` cannot read, and say what to do."""
    if not isinstance(images, Tensor):
        raise ShapeError(f"{name} takes a torch tensor of images (batch, {in_chans}, height, width), not {type(images)}.")
    if images.ndim != 4 or images.shape[1] != in_chans:
        raise ShapeError(
            f"{name} takes images of shape (batch, {in_chans}, height, width), not {tuple(images.shape)}: images[None] makes a "
            "batch of one, images.permute moves channels, and in_chans= builds a network for other channels."
        )
    for what, side in zip(("height", "width"), images.shape[2:], strict=True):
        if side % patch_size or not side:
            remedy = "resize or pad it to a multiple"
            raise ShapeError(f"{name} cuts patches of {patch_size} pixels, and the {what} is {side}: {remedy}.")
    if not images.is_floating_point():
        raise ShapeError(f"{name} was given {images.dtype} images: scale and normalise them, (images / 255 - mean) / std.")
    doubles = torch.float64 in (images.dtype, dtype)  # which autocast leaves alone
    if images.dtype != dtype and (doubles or not autocast_is_on(images)):
        way = f"images.to({dtype})" if doubles else f"images.to({dtype}), or torch.autocast"
        raise ShapeError(f"{name} holds {dtype} weights and was given {images.dtype} images: {way}.")
    return images.shape[2] // patch_size, images.shape[3] // patch_size
