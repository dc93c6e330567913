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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dmst import objective
from dmst.analysis.certificates import BASES, code_scale, coordinates
from dmst.analysis.probes import only_looking
from dmst.analysis.running import Numbers, Running, batches_of, finite
from dmst.errors import OptionError, choose, number
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
    above: dict[str, float]  # quantity -> share of the images on which it is above 0
    identities: dict[str, float] | None

    @property
    def holds(self) -> float:
        """The share of images on which the claim holds as printed."""
        return self.above["gain"]

    def sentence(self) -> str:
        mean = {name: numbers.mean for name, numbers in self.quantities.items()}
        verdict = "true" if mean["gain"] > 0 else "false"
        return (
            f"Layer {self.layer}: the claim is {verdict} on average ({mean['gain']:+.2g} nats). It holds on {self.holds:.0%} "
            f"of the images. Parts of the gain: membership {mean['membership']:+.2g}, mass {mean['mass']:+.2g}, gate "
            f"{mean['gate']:+.2g}. The membership part is above 0 on {self.above['membership']:.0%} of the images."
        )


@dataclass(frozen=True)
class Theorem:
    """Every layer of a network; None where it has no memberships."""

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
        bases = "raw U" if self.basis == "raw" else "U orthonormal by QR, without bias"
        return (
            f"R_var at the tokens that each operator read, c = d/eps² = {self.c:g} (eps = {self.eps:g}), {bases}; coupled "
            f"membership by the {self.energy}, temperature {self.temperature:g}; {self.images:,} images"
        )

    def sentences(self) -> list[str]:
        if not any(self.layers):
            return [f"{self.model}: the theorem does not apply, because the operator has no memberships like those of DMSA."]
        told = enumerate(self.layers)
        return [f"Layer {i}: no memberships." if each is None else each.sentence() for i, each in told]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; what is not finite is None."""
        return finite(asdict(self))

    @staticmethod
    def from_dict(told: Mapping[str, Any]) -> Theorem:
        def read(layer: Mapping[str, Any]) -> LayerTheorem:
            quantities = {name: Numbers(**numbers) for name, numbers in layer["quantities"].items()}
            return LayerTheorem(**{**layer, "quantities": quantities})

        return Theorem(**{**told, "layers": [each and read(each) for each in told["layers"]]})


def theorem(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    *,
    eps: float | None = None,
    basis: str = "raw",
    temperature: float = 1.0,
    energy: str = "formula",
    batch_size: int = 64,
) -> Theorem:
    """Theorem 1 and the gate identities on every layer over `images`: one tensor, or batches, also a loader's pairs.

    eps=None is c = 1, the operators' own rate.
    """
    choose("basis", basis, BASES)
    choose("energy", energy, ENERGIES)
    number("temperature", temperature, 0, math.inf)
    c = code_scale(model.config.dim, eps)
    running, errors = [Running() for _ in model.blocks], [_Errors() for _ in model.blocks]
    positive: list[Tensor | int] = [0] * len(running)
    count = 0
    with only_looking(model):
        for batch in batches_of(images, batch_size):
            count += len(batch)
            for i, layer, operator, grid in _layers(model, batch) if len(batch) else ():
                found = split_of(layer, operator, c=c, basis=basis, temperature=temperature, energy=energy)
                values = torch.stack([found[name] for name in QUANTITIES]).cpu()
                running[i].add(values)
                positive[i] = positive[i] + (values > 0).sum(-1)
                for name, (one, other) in identities_of(layer, operator, grid).items():
                    errors[i].add(name, one, other)
    if not count:
        raise OptionError("theorem was given no images.")
    layers = [_told(i, *each) if each[0].count else None for i, each in enumerate(zip(running, positive, errors, strict=True))]
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
    found["E4"] = (torch.stack((once, outside)), torch.stack((twice, twice)))

    together, apart = out(-attenuation.unsqueeze(-2) * weighed), out(pi.unsqueeze(-1) * head)
    best = (together * apart).sum((1, 2), keepdim=True) / together.square().sum((1, 2), keepdim=True).clamp(min=1e-300)
    found["E7"] = (best * together, apart)
    return found


# --- pieces ----------------------------------------------------------------------------------------------------------


class _Errors:
    """Relative L2 errors over everything that was added."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, one: Tensor, other: Tensor) -> None:
        wrong, whole = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = wrong + (one - other).square().sum().item(), whole + other.square().sum().item()

    def told(self) -> dict[str, float] | None:
        return {name: math.sqrt(wrong / (whole or 1)) for name, (wrong, whole) in self.sums.items()} or None


def _layers(model: VisionModel, images: Tensor) -> Iterator[tuple[int, LayerTrace, TokenStatistics, Any]]:
    """The layers that have memberships, one in memory at a time."""
    z, grid = model.embed(images)
    for i, block in enumerate(model.blocks):
        layer = block.trace(z, grid)  # type: ignore[operator]
        if layer.parts.membership is not None and isinstance(block.operator, TokenStatistics):
            yield i, layer, block.operator, grid
        z = layer.after_feedforward


def _told(layer: int, running: Running, positive: Tensor | int, errors: _Errors) -> LayerTheorem:
    assert isinstance(positive, Tensor)
    quantities = {name: running.numbers(i) for i, name in enumerate(QUANTITIES)}
    above = {name: positive[i].item() / running.count for i, name in enumerate(QUANTITIES)}
    return LayerTheorem(layer, quantities, above, errors.told())


def _double(weights: Any) -> Any:
    return type(weights)(*(None if x is None else x.double() for x in weights))
