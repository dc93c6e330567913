"""Layer-wise rates: how many nats the tokens of each layer cost, by the layer's own subspaces and memberships.

    variational   R_var as the lineage publishes its curves: every projected token scaled to length 1, c = p/eps^2, each token's
                  memberships made to sum to 1, silent heads left out
    raw           the same with the memberships as computed (sigmoids need not sum to 1; the rate grows with their mass)
    all_heads     the same as variational with every head counted, also the silent ones
    complete      R+, what lies outside a subspace paid for: c = d/eps^2, orthonormalised U, memberships sum to 1
    coding        R of all tokens as one Gaussian, c = d/eps^2: what grouping has to beat
    active        heads that are on, of k
    mass          memberships of a token summed over heads, mean over tokens

Two places: at="input", the tokens that the operator reads (normed), with the memberships it computed of them; at="output", the
tokens after its residual step, normed by the same layer, with memberships computed anew. Layers without memberships have
`coding` alone, the others NaN. One number per image, then mean and standard deviation over images; batches stream through,
so the number of images is not limited by memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmst import objective
from dmst.errors import OptionError, choose
from dmst.models import VisionModel
from dmst.operators import Operator, Parts

QUANTITIES = ("variational", "raw", "all_heads", "complete", "coding", "active", "mass")


@dataclass(frozen=True)
class LayerRates:
    """Quantity -> one number a layer."""

    model: str
    at: str
    eps: float
    images: int
    mean: dict[str, list[float]]
    std: dict[str, list[float]]

    @property
    def convention(self) -> str:
        return (
            f"R_var, unit-length projected tokens, c = p/eps², eps = {self.eps:g}, memberships sum to 1, raw U, "
            f"at the operator's {self.at}; mean over {self.images} images"
        )


def layer_rates(
    model: VisionModel, images: Tensor | Iterable[Any], *, at: str = "input", eps: float = 0.1, batch_size: int = 64
) -> LayerRates:
    """The rates of every layer of `model` over `images`: one tensor, or batches of any number, also a loader's pairs."""
    choose("at", at, ("input", "output"))
    batches = images.split(batch_size) if isinstance(images, Tensor) else images
    count, mean, spread = 0, torch.zeros(()), torch.zeros(())
    training = {module: module.training for module in model.modules()}  # a frozen stem stays frozen afterwards
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                values = _values(
                    model, batch[0] if isinstance(batch, tuple | list) else batch, at, eps
                )  # (layers, quantities, b)
                count, mean, spread = _merge(count, mean, spread, values)
    finally:
        for module, mode in training.items():
            module.training = mode
    if not count:
        raise OptionError("layer_rates was given no images.")
    std = (spread / max(count - 1, 1)).sqrt()
    return LayerRates(
        model=model.config.name,
        at=at,
        eps=eps,
        images=count,
        mean={name: mean[:, i].tolist() for i, name in enumerate(QUANTITIES)},
        std={name: std[:, i].tolist() for i, name in enumerate(QUANTITIES)},
    )


def rates_of(tokens: Tensor, parts: Parts, operator: Operator, *, eps: float = 0.1) -> dict[str, Tensor]:
    """Every quantity of one layer, (b,) each: of the tokens it reads and what it computed of them."""
    coding = objective.coding_rate(tokens, eps=eps)
    absent = torch.full_like(coding, math.nan)
    found = dict.fromkeys(QUANTITIES, absent) | {"coding": coding}
    subspaces = operator.subspaces()
    if parts.projected is None or parts.membership is None or subspaces is None:
        return found
    projected, membership, gate = parts.projected, parts.membership, parts.gate
    heads = membership.shape[1]
    total = membership.sum(1, keepdim=True)
    share = membership / torch.where(total > 0, total, 1)
    rate = {"eps": eps, "width": "head_dim", "unit_norm": True}
    found["variational"] = objective.variational_rate(projected, share, gate, **rate)  # type: ignore[arg-type]
    found["raw"] = objective.variational_rate(projected, membership, gate, **rate)  # type: ignore[arg-type]
    found["all_heads"] = objective.variational_rate(projected, share, **rate)  # type: ignore[arg-type]
    found["complete"] = objective.complete_rate(tokens, subspaces, share, eps=eps)
    found["active"] = torch.full_like(coding, heads) if gate is None else (gate != 0).sum(-1).to(coding.dtype)
    found["mass"] = total.mean((1, 2))
    return found


def _values(model: VisionModel, images: Tensor, at: str, eps: float) -> Tensor:
    """(layers, quantities, b), one layer in memory at a time."""
    z, grid = model.embed(images)
    rows = []
    for block in model.blocks:
        layer = block.trace(z, grid)  # type: ignore[operator]
        tokens, parts = layer.normed, layer.parts
        if at == "output":
            tokens = block.norm(layer.after_operator)  # type: ignore[operator]
            parts = block.operator.decompose(tokens, grid=grid)  # type: ignore[union-attr, operator]
        found = rates_of(tokens, parts, block.operator, eps=eps)  # type: ignore[arg-type]
        rows.append(torch.stack([found[name].cpu().double() for name in QUANTITIES]))
        z = layer.after_feedforward
    return torch.stack(rows)


def _merge(count: int, mean: Tensor, spread: Tensor, values: Tensor) -> tuple[int, Tensor, Tensor]:
    """Chan's update of count, mean and sum of squared deviations by one batch (last axis)."""
    new = values.shape[-1]
    if not new:
        return count, mean, spread
    batch_mean = values.mean(-1)
    batch_spread = (values - batch_mean.unsqueeze(-1)).square().sum(-1)
    total, step = count + new, batch_mean - mean
    return total, mean + step * (new / total), spread + batch_spread + step.square() * (count * new / total)
