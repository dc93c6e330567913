"""Start a network from the weights of another: `take_over(model, source)`.

Everything that both have is copied. Other classes keep the new classifier; another image size resizes learned positions.
Networks that differ in anything else do not fit: `differing` says in what.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.errors import OptionError
from dmst.models.config import ModelConfig
from dmst.models.vision import VisionModel

FREE = ("name", "num_classes", "img_size", "drop_rate", "proj_drop_rate", "drop_path_rate")  # may differ from the weights'


def differing(wanted: ModelConfig, found: ModelConfig) -> str:
    """What keeps weights of `found` out of a network `wanted`, in words; empty where they fit."""
    mine, theirs = wanted.to_dict(), found.to_dict()
    return ", ".join(
        f"{name} {theirs[name]!r} (here {mine[name]!r})" for name in mine if name not in FREE and mine[name] != theirs[name]
    )


@torch.no_grad()
def take_over(model: VisionModel, source: VisionModel, where: str) -> None:
    """Copy the weights of `source`, which messages call `where`."""
    wanted, found = model.state_dict(), source.state_dict()
    same_classes = model.config.num_classes == source.config.num_classes and (
        not model.class_names or not source.class_names or model.class_names == source.class_names
    )
    for name, tensor in found.items():
        if name.startswith("head.") and not same_classes:
            continue
        if tensor.shape == wanted[name].shape:
            wanted[name].copy_(tensor)
        elif name == "position.table":
            wanted[name].copy_(_resized(tensor, source, model))
        else:
            raise OptionError(
                f"the weights of {where}: {name} has shape {tuple(tensor.shape)}, not {tuple(wanted[name].shape)}."
            )
    if same_classes:
        model.class_names = model.class_names or source.class_names


def _resized(table: Tensor, source: VisionModel, model: VisionModel) -> Tensor:
    prefix, (rows, columns) = source.config.prefix, source.config.grid
    places = table[prefix:].unflatten(0, (rows, columns)).permute(2, 0, 1).unsqueeze(0)
    places = F.interpolate(places, model.config.grid, mode="bicubic", antialias=True)
    return torch.cat((table[:prefix], places.squeeze(0).permute(1, 2, 0).flatten(0, 1)))
