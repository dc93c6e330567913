"""What the layers do while a network learns: asked at every evaluation, kept in the journal as plain JSON.

    {"images": 64, "eps": 0.1,
     "heads":       [4, 4],              heads of each layer
     "coding":      [101.2, 93.7],       nats of the tokens that a layer reads, as one Gaussian
     "variational": [38.1, 35.0],        the same inside its subspaces, as the lineage publishes it (rates.py); R_mix of GMSA
     "zero_memberships": [0.0, 0.0],     share of the memberships that are exactly 0
     "idle_tokens": [0.0, 0.0],          share of the tokens that belong to no head, nor to a group of one
     "active":      [1.9, 2.2],          heads whose gate is not 0, mean over the images
     "zero_gates":  [0.52, 0.45],        share of the gates that are exactly 0
     "never":       [[3], []]}           heads, counted from 0, whose gate is 0 for every one of the images

Operators without memberships have the first four alone; those without a gate lack the last three. What is not finite is None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmst.analysis.rates import rates_of
from dmst.analysis.running import finite, measure
from dmst.models import VisionModel
from dmst.models.block import LayerTrace

EPS = 0.1
AT_ONCE = 16  # images: the attention of a ViT with small patches is large, and training wants the memory
MEMBERS = ("variational", "zero_memberships", "idle_tokens")


def layers(model: VisionModel, images: Tensor) -> dict[str, Any]:
    """What every layer of `model` makes of `images`, which are normalised, on its device and in its dtype. One pass."""
    has: set[str] = set()

    def look(block: Any, layer: LayerTrace, grid: Any) -> Tensor:
        """Rates and shares, then one row a head: whether it is on."""
        rates, membership, gate = rates_of(layer.normed, layer.parts, block.operator, eps=EPS), *layer.parts[1:3]
        rows = [rates["coding"], rates["variational"]]
        if membership is not None:
            zero = (membership == 0).double()
            rows += [zero.flatten(1).mean(-1), zero.flatten(1, -2).prod(1).mean(-1)]
            has.update(MEMBERS)
        if gate is not None:
            rows += (gate != 0).double().unbind(-1)
            has.add("gate")
        return torch.stack([row.double() for row in rows])

    count, found = measure(model, images.split(AT_ONCE), look)
    means = [layer.mean.tolist() for layer in found]
    heads: list[Any] = [block.operator.num_heads for block in model.blocks]  # type: ignore[union-attr]
    told: dict[str, Any] = {"images": count, "eps": EPS, "heads": heads, "coding": [row[0] for row in means]}
    told |= {name: [row[i] for row in means] for i, name in enumerate(MEMBERS, 1) if name in has}
    if "gate" in has:
        on = [row[-k:] for row, k in zip(means, heads, strict=True)]
        told["active"] = [sum(row) for row in on]
        told["zero_gates"] = [1 - sum(row) / len(row) for row in on]
        told["never"] = [[k for k, share in enumerate(row) if share == 0] for row in on]
    return finite(told)
