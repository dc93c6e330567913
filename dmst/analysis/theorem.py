"""Theorem 1 of the paper, asked of real layers: does decoupling lower the rate, and what part of that is more than shrinkage?

    claim       R(P_dec, g U) < R(P_coup, U)            R = R_var at the tokens that the operator read, the layer's own U
    P_coup      softmax_k(temperature |U_k^T z_n|^2)    the paper's coupled membership, temperature = 1/(2 eta); energy="code"
                                                        divides each channel by its energy first, as ToST's code does
    P_dec, g    the layer's own memberships and gate

    gain = R(P_coup, U) - R(P_dec, g U) = membership + mass + gate                  above 0: the claim holds
        membership   R(P_coup, U) - R(P_hat, U)         P_hat: P_dec with each token's memberships made to sum to 1
        mass         R(P_hat, U) - R(P_dec, U)          sigmoids sum to what they like; less mass is less rate, for free
        gate         R(P_dec, U) - R(P_dec, g U)        so is a smaller gate

Only `membership` is an effect of modelling. What is true (Theorem 1'): with P_dec <= P_coup entry by entry and g <= 1 the claim
holds; `premise` is the share of images where that is so. Numbers are by image, in nats. Layers without
memberships in heads (softmax attention; GMSA, whose memberships are in groups) have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmst import objective
from dmst.analysis.certificates import BASES, code_scale, coordinates
from dmst.analysis.running import Numbers, Tick, measure
from dmst.errors import choose, number
from dmst.kernels import Form, reference
from dmst.models import VisionModel
from dmst.models.block import LayerTrace
from dmst.operators.family import TokenStatistics

QUANTITIES = ("coupled", "decoupled", "gain", "membership", "mass", "gate", "premise")
ENERGIES = ("formula", "code")


@dataclass(frozen=True)
class LayerTheorem:
    """One layer: quantity -> numbers over the images."""

    layer: int
    quantities: dict[str, Numbers]


@dataclass(frozen=True)
class Theorem:
    """Every layer of a network; None where it has no memberships like those of DMSA."""

    model: str
    images: int
    eps: float
    c: float
    basis: str
    temperature: float
    energy: str
    layers: list[LayerTheorem | None]

    @property
    def convention(self) -> str:
        return (
            f"R_var at the tokens that each operator read, c = d/eps² = {self.c:g} (eps = {self.eps:g}), {BASES[self.basis]}; "
            f"coupled membership by the {self.energy}, temperature {self.temperature:g}; {self.images:,} images"
        )


def theorem(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    *,
    eps: float | None = None,
    basis: str = "raw",
    temperature: float = 1.0,
    energy: str = "formula",
    tick: Tick = lambda images: None,
) -> Theorem:
    """Theorem 1 on every layer over `images`: one tensor, or batches, also a loader's pairs.

    eps=None is c = 1, the operators' own rate.
    """
    choose("basis", basis, BASES)
    choose("energy", energy, ENERGIES)
    number("temperature", temperature, 0, math.inf)
    c = code_scale(model.config.dim, eps)

    def look(block: Any, layer: LayerTrace, grid: Any) -> Tensor | None:
        if layer.parts.membership is None or not isinstance(block.operator, TokenStatistics):
            return None
        split = split_of(layer, block.operator, c=c, basis=basis, temperature=temperature, energy=energy)
        return torch.stack([split[name] for name in QUANTITIES])

    count, found = measure(model, images, look, tick=tick)
    layers = [
        LayerTheorem(i, {name: each.numbers(row) for row, name in enumerate(QUANTITIES)}) if each.count else None
        for i, each in enumerate(found)
    ]
    eps = math.sqrt(model.config.dim / c)
    return Theorem(model.config.name, count, eps, c, basis, float(temperature), energy, layers)


def split_of(
    layer: LayerTrace, operator: TokenStatistics, *, c: float, basis: str, temperature: float, energy: str
) -> dict[str, Tensor]:
    """Every quantity of one layer, (b,) each."""
    s, _ = coordinates(layer.normed, layer.parts, operator, basis)
    assert layer.parts.membership is not None
    decoupled, gate = layer.parts.membership.double(), layer.parts.gate
    g = torch.ones_like(decoupled[..., 0]) if gate is None else gate.double()
    form = Form(num_heads=operator.num_heads, normalize_tokens=energy == "code")
    coupled = (temperature * reference.token_energy(s, form)).softmax(1)

    def rate(membership: Tensor, gate: Tensor | None = None, **options: Any) -> Tensor:
        k, p = s.shape[1], s.shape[3]
        return objective.variational_rate(s, membership, gate, eps=math.sqrt(k * p / c), **options)

    first, last = rate(coupled), rate(decoupled, g)
    normalized, ungated = rate(decoupled, normalize_membership=True), rate(decoupled)
    smaller = (decoupled <= coupled).all(-1).all(-1) & (g <= 1).all(-1)
    return {
        "coupled": first,
        "decoupled": last,
        "gain": first - last,
        "membership": first - normalized,
        "mass": normalized - ungated,
        "gate": ungated - last,
        "premise": smaller.double(),
    }
