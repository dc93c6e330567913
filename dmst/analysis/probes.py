"""What the layers do while a network learns: asked at every evaluation, kept in the journal as plain JSON.

    {"images": 64, "eps": 0.1,
     "heads":       [4, 4],          heads of each layer
     "coding":      [101.2, 93.7],   nats of the tokens that a layer reads, as one Gaussian
     "variational": [38.1, 35.0],    the same inside its subspaces, as the lineage publishes it (rates.py)
     "active":      [1.9, 2.2],      heads whose gate is not 0, mean over the images
     "never":       [[3], []]}       heads, counted from 0, whose gate is 0 for every one of the images

Operators without memberships have the first four alone; those without a gate lack the last two. What is not finite is None.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dmst.analysis.rates import rates_of
from dmst.analysis.running import only_looking
from dmst.errors import OptionError
from dmst.models import VisionModel

EPS = 0.1
AT_ONCE = 16  # images: the attention of a ViT with small patches is large, and training wants the memory


def layers(model: VisionModel, images: Tensor) -> dict[str, Any]:
    """What every layer of `model` makes of `images`, which are normalised, on its device and in its dtype. One pass."""
    if not len(images):
        raise OptionError("the layers were asked about no images.")
    with only_looking(model):
        batches = [_look(model, some) for some in images.split(AT_ONCE)]
    found = [
        {name: torch.cat([batch[i][name] for batch in batches]) for name in batches[0][i]} for i in range(len(model.blocks))
    ]
    told: dict[str, Any] = {"images": len(images), "eps": EPS}
    told["heads"] = [block.operator.num_heads for block in model.blocks]  # type: ignore[union-attr]
    for name in ("coding", "variational"):
        if all(name in layer for layer in found):
            told[name] = [_number(layer[name]) for layer in found]
    if all("on" in layer for layer in found):
        told["active"] = [_number(layer["on"].sum(-1)) for layer in found]
        told["never"] = [(~layer["on"].any(0)).nonzero().flatten().tolist() for layer in found]
    return told


def _look(model: VisionModel, images: Tensor) -> list[dict[str, Tensor]]:
    """For each layer its rates (b,) and which heads are on (b, k), as far as it has them; one layer in memory at a time."""
    z, grid = model.embed(images)
    found = []
    for block in model.blocks:
        layer = block.trace(z, grid)  # type: ignore[operator]
        rates, gate = rates_of(layer.normed, layer.parts, block.operator, eps=EPS), layer.parts.gate  # type: ignore[arg-type]
        found.append({"coding": rates["coding"]})
        found[-1] |= {} if layer.parts.membership is None else {"variational": rates["variational"]}
        found[-1] |= {} if gate is None else {"on": gate != 0}
        z = layer.after_feedforward
    return found


def _number(values: Tensor) -> float | None:
    mean = values.double().mean().item()
    return mean if math.isfinite(mean) else None
