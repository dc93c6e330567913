"""Layer-wise rates: how many nats the tokens of each layer cost, by the layer's own subspaces and memberships.

    variational   R_var as the lineage publishes its curves: every projected token scaled to length 1, c = p/eps^2, each token's
                  memberships made to sum to 1, silent heads left out. Where heads have groups with means (GMSA): R_mix, the
                  same way, a token's memberships made to sum to 1 over heads and groups
    raw           the same with the memberships as computed (sigmoids need not sum to 1; the rate grows with their mass)
    all_heads     the same as variational with every head counted, also the silent ones
    projected     the same as all_heads with the whole covariance of each head, or group, 1/2 logdet, in place of its diagonal
    gap           all_heads less projected, the decorrelation gap: 0 where channels are uncorrelated
    complete      R+, what lies outside a subspace paid for: c = d/eps^2, orthonormalised U, memberships sum to 1. NaN of groups
                  with means: R+ is a bound for groups around 0, and would charge nothing for the means
    coding        R of all tokens as one Gaussian, c = d/eps^2: what grouping has to beat
    active        heads that are on, of k
    mass          memberships of a token summed over heads and their groups, mean over tokens

Three places: at="input", the tokens that the operator reads (normed), with the memberships it computed of them; "output", the
tokens after its residual step, and "block", those after the feed-forward too, both normed by the same layer, in its subspaces,
with memberships computed anew. What an operator does not show leaves NaN, and `missing` says what and why: without memberships
there is `coding` alone, without `subspaces()` no `complete`. One number per image, then mean and standard deviation over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmst import objective
from dmst.analysis.running import Tick, measure
from dmst.errors import choose
from dmst.models import VisionModel
from dmst.models.block import LayerTrace
from dmst.operators import Operator, Parts

QUANTITIES = ("variational", "raw", "all_heads", "projected", "gap", "complete", "coding", "active", "mass")
NO_COMPLETE = "R+ is not defined for groups with means"
PLACES = {"input": "the tokens that the operator reads", "output": "after the operator", "block": "after the block"}


@dataclass(frozen=True)
class LayerRates:
    """Quantity -> one number a layer."""

    model: str
    at: str
    eps: float
    images: int
    mean: dict[str, list[float]]
    std: dict[str, list[float]]
    missing: str = ""  # which rates there are not, and why: a sentence
    rate: str = "R_var"  # or R_mix: what `variational`, `raw` and `all_heads` are

    @property
    def convention(self) -> str:
        return (
            f"{self.rate}, unit-length projected tokens, c = p/eps², eps = {self.eps:g}, memberships sum to 1, raw U, "
            f"{PLACES[self.at]}; mean over {self.images} images"
        )


def layer_rates(model: VisionModel, images: Tensor | Iterable[Any], *, at: str = "input", eps: float = 0.1) -> LayerRates:
    """The rates of every layer of `model` over `images`: one tensor, or batches of any number, also a loader's pairs."""
    return rates_at(model, images, (at,), eps=eps)[at]


def rates_at(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    places: Sequence[str] = tuple(PLACES),
    *,
    eps: float = 0.1,
    tick: Tick = lambda images: None,
) -> dict[str, LayerRates]:
    """The same at several places, in one pass; `tick` is told of every batch."""
    for at in places:
        choose("at", at, PLACES)
    missing, named = dict[str, None](), dict[str, None]()

    def look(block: Any, layer: LayerTrace, grid: tuple[int, int]) -> Tensor:
        named[rate_name(layer.parts)] = None
        missing[lack(block.operator, layer.parts) or (NO_COMPLETE if rate_name(layer.parts) == "R_mix" else "")] = None
        rows = []
        for at in places:
            tokens, parts = layer.normed, layer.parts
            if at != "input":
                tokens = block.norm(layer.after_operator if at == "output" else layer.after_feedforward)
                parts = block.operator.decompose(tokens, grid=grid)
            found = rates_of(tokens, parts, block.operator, eps=eps)
            rows.append(torch.stack([found[name].double() for name in QUANTITIES]))
        return torch.stack(rows)

    count, layers = measure(model, images, look, tick=tick)
    why = next(filter(None, missing), "")
    known = "there is no `complete`" if "subspaces()" in why or why == NO_COMPLETE else "`coding` is the only rate"
    words = f"{model.config.name}: {why}, so {known}." if why else ""
    return {
        at: LayerRates(
            model=model.config.name,
            at=at,
            eps=eps,
            images=count,
            mean={name: [layer.mean[place, i].item() for layer in layers] for i, name in enumerate(QUANTITIES)},
            std={name: [layer.std[place, i].item() for layer in layers] for i, name in enumerate(QUANTITIES)},
            missing=words,
            rate=" or ".join(named),
        )
        for place, at in enumerate(places)
    }


def rates_of(tokens: Tensor, parts: Parts, operator: Operator, *, eps: float = 0.1) -> dict[str, Tensor]:
    """Every quantity of one layer, (b,) each: of the tokens it reads and what it computed of them."""
    coding = objective.coding_rate(tokens, eps=eps)
    absent = torch.full_like(coding, math.nan)
    found = dict.fromkeys(QUANTITIES, absent) | {"coding": coding}
    if parts.projected is None or parts.membership is None:
        return found
    projected, membership, gate = parts.projected, parts.membership, parts.gate
    heads = membership.shape[1]
    total = membership.flatten(1, -2).sum(1)  # (b, n)
    share = membership / torch.where(total > 0, total, 1).view(len(total), *[1] * (membership.ndim - 2), -1)
    rate, options = rate_for(membership), {"eps": eps, "width": "head_dim", "unit_norm": True}
    found["variational"] = rate(projected, share, gate, **options)
    found["raw"] = rate(projected, membership, gate, **options)
    found["all_heads"] = rate(projected, share, **options)
    length = projected.norm(dim=-1, keepdim=True)
    unit = projected / torch.where(length > 0, length, 1)
    found["projected"] = _whole_covariances(unit, share, eps)
    found["gap"] = found["all_heads"] - found["projected"]
    if (subspaces := operator.subspaces()) is not None and membership.ndim == 3:
        found["complete"] = objective.complete_rate(tokens, subspaces, share, eps=eps)
    found["active"] = torch.full_like(coding, heads) if gate is None else (gate != 0).sum(-1).to(coding.dtype)
    found["mass"] = total.mean(1)
    return found


def rate_for(membership: Tensor) -> Callable[..., Tensor]:
    """The objective of these memberships: R_var of (b, k, n), R_mix of (b, k, g, n)."""
    return objective.mixture_rate if membership.ndim == 4 else objective.variational_rate


def rate_name(parts: Parts) -> str:
    return "R_mix" if parts.membership is not None and parts.membership.ndim == 4 else "R_var"


def _whole_covariances(unit: Tensor, share: Tensor, eps: float) -> Tensor:
    """1/2 logdet of each head; with groups, of each group around its mean, one at a time: no tensor of size n g p."""
    if share.ndim == 3:
        return objective.projected_rate(unit, share, eps=eps, width="head_dim")
    mass = share.sum(-1, keepdim=True)
    means = share @ unit / torch.where(mass > 0, mass, 1)  # (b, k, g, p)
    pairs = zip(means.unbind(2), share.unbind(2), strict=True)
    rates = [objective.projected_rate(unit - mean.unsqueeze(2), each, eps=eps, width="head_dim") for mean, each in pairs]
    return torch.stack(rates).sum(0)


def lack(operator: Operator, parts: Parts) -> str:
    """What an operator would have to show for every rate and a certificate; "" where nothing is missing."""
    name = type(operator).__name__
    if parts.membership is None:
        return "its operator has no memberships"
    if parts.projected is None:
        return f"{name}.decompose shows no `projected`, the tokens in each subspace (b, k, n, p)"
    if operator.subspaces() is None:
        return f"{name} has no subspaces(), the method that gives the bases U_k (k, d, p) that its tokens are projected on"
    return ""
