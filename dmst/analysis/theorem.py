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
holds; `premise` is the share of images where that is so. Numbers are by image, in nats.

The gate identities, in relative L2 errors over all tokens of all images, with the layer's own weights; Y_k = -g_k s_k a_k:

    E1   gating both bases squares the gate; `E1 single` is how far the paper's single gate is from it
    E2   the listing is membership times Y: a gate per token and head (G1); in mode "listing" against the layer's real output
    E3   with membership 1 it is g times channel attention of gated energy; `E3 ungated` is how far ungated attention is
    E4   for gates of 0 and 1 (here: the heads that are on) once, twice and outside are the same
    E7   no single number per image in front of the sum replaces gates inside it: how far the best one is
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dmst import objective
from dmst.analysis.certificates import BASES, code_scale, coordinates
from dmst.analysis.running import Numbers, Running, Tick, finite, measure
from dmst.errors import choose, number
from dmst.kernels import Form, reference
from dmst.models import VisionModel
from dmst.models.block import LayerTrace
from dmst.operators.family import TokenStatistics

QUANTITIES = ("coupled", "decoupled", "gain", "membership", "mass", "gate", "premise")
IDENTITIES = ("E1", "E1 single", "E2", "E3", "E3 ungated", "E4", "E7")
ENERGIES = ("formula", "code")


@dataclass(frozen=True)
class LayerTheorem:
    """One layer: quantity -> numbers over the images; identity -> relative error, None where there is no gate."""

    layer: int
    quantities: dict[str, Numbers]
    identities: dict[str, float] | None

    @property
    def holds(self) -> float:
        """The share of images on which the claim holds as printed."""
        return self.quantities["gain"].above


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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; what is not finite is None."""
        return finite(asdict(self))


def theorem(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    *,
    eps: float | None = None,
    basis: str = "raw",
    temperature: float = 1.0,
    energy: str = "formula",
    batch_size: int = 64,
    tick: Tick = lambda images: None,
) -> Theorem:
    """Theorem 1 and the gate identities on every layer over `images`: one tensor, or batches, also a loader's pairs.

    eps=None is c = 1, the operators' own rate.
    """
    choose("basis", basis, BASES)
    choose("energy", energy, ENERGIES)
    number("temperature", temperature, 0, math.inf)
    c = code_scale(model.config.dim, eps)

    def look(block: Any, layer: LayerTrace, grid: Any) -> Tensor | None:
        """The quantities, then of each identity the squared error and the squared size."""
        operator = block.operator
        if layer.parts.membership is None or not isinstance(operator, TokenStatistics):
            return None
        split = split_of(layer, operator, c=c, basis=basis, temperature=temperature, energy=energy)
        sides = identities_of(layer, operator, grid).values()
        errors = [x.square().flatten(1).sum(-1) for one, other in sides for x in (one - other, other)]
        return torch.stack([*(split[name] for name in QUANTITIES), *errors])

    count, found = measure(model, images, look, batch_size=batch_size, tick=tick)
    layers = [_layer(i, each) if each.count else None for i, each in enumerate(found)]
    eps = math.sqrt(model.config.dim / c)
    return Theorem(model.config.name, count, eps, c, basis, float(temperature), energy, layers)


def _layer(layer: int, running: Running) -> LayerTheorem:
    quantities = {name: running.numbers(i) for i, name in enumerate(QUANTITIES)}
    sums = running.mean[len(QUANTITIES) :].unflatten(0, (-1, 2)).tolist() if len(running.mean) > len(QUANTITIES) else []
    errors = {name: math.sqrt(wrong / (size or 1)) for name, (wrong, size) in zip(IDENTITIES, sums, strict=False)}
    return LayerTheorem(layer, quantities, errors or None)


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


def identities_of(layer: LayerTrace, operator: TokenStatistics, grid: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> the two sides, in float64 but for E2's left one, which is what the layer computed. Nothing without a gate."""
    parts, weights, subspaces = layer.parts, operator.weights(), operator.subspaces().double()
    if parts.gate is None:
        return {}
    assert parts.projected is not None and parts.membership is not None
    s, pi, gate = parts.projected.double(), parts.membership.double(), parts.gate.double()
    listing = replace(operator.form, mode="listing", sign=-1.0, delta=0.0)
    equation = replace(listing, mode="equation")
    g = gate.unsqueeze(-1)
    mass = pi.sum(-1, keepdim=True)
    moment = torch.einsum("bkn,bknp->bkp", pi, s.square()) / torch.where(mass > 0, mass, 1)
    attenuation = 1 / (1 + g.square() * moment)  # (b, k, p)
    gated_bases = gate[..., None, None] * subspaces  # (b, k, d, p)
    weighed = pi.unsqueeze(-1) * s

    def out(heads: Tensor) -> Tensor:
        return torch.einsum("bknp,kdp->bnd", heads, subspaces)

    head = -(g * attenuation).unsqueeze(-2) * s  # Y
    in_bases = torch.einsum("bkdp,bkp,bknp->bnd", gated_bases, -attenuation, g.unsqueeze(-1) * weighed)
    twice = out(reference.token_statistics(s, pi, gate, form=equation))
    found = {"E1": (twice, in_bases), "E1 single": (out(pi.unsqueeze(-1) * head), in_bases)}

    scores = reference.score(layer.normed.double(), _double(weights), operator.form, grid)
    token_gate = pi if scores is None or operator.form.membership != "sigmoid" else scores.sigmoid()
    heads = token_gate.unsqueeze(-1) * head
    if operator.form.mode == "listing":
        written = reference.project_out(heads, _double(weights), torch.float64)
        found["E2"] = (operator(layer.normed, grid=grid).double(), written)
    else:
        found["E2"] = (reference.token_statistics(s, pi, gate, form=listing), heads)

    def channel(t: Tensor) -> Tensor:
        return -s / (1 + t * s.square().mean(-2)).unsqueeze(-2)

    alone = reference.token_statistics(s, torch.ones_like(pi), gate, form=listing)
    found["E3"] = (alone, g.unsqueeze(-1) * channel(g.square()))
    found["E3 ungated"] = (g.unsqueeze(-1) * channel(torch.ones_like(g)), alone)

    hard = (gate != 0).double()
    once, twice = (reference.token_statistics(s, pi, hard, form=form) for form in (listing, equation))
    outside = hard[..., None, None] * reference.token_statistics(s, pi, form=listing)
    found["E4"] = (torch.cat((once, outside), 1), torch.cat((twice, twice), 1))

    together, apart = out(-attenuation.unsqueeze(-2) * weighed), out(pi.unsqueeze(-1) * head)
    best = (together * apart).sum((1, 2), keepdim=True) / together.square().sum((1, 2), keepdim=True).clamp(min=1e-300)
    found["E7"] = (best * together, apart)
    return found


def _double(weights: Any) -> Any:
    return type(weights)(*(None if x is None else x.double() for x in weights))
