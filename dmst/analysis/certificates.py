"""Certificates: whether each layer's step, as the block really made it, lowers the rate that the layer stands for.

    x = norm z       what the operator read: here the rate is measured
    step = z' - z    what the block added (scale times output), taken from the trace: not a second formula
    R_var            of the layer's own subspaces U, memberships pi and gate g; c = 1 (the operator's own) or c = d/eps^2

    R_var(x + t step) <= R_var(x) + (t lin + t^2 quad/2)/n      for every t, pi and g frozen at x (f is concave)
    S = g x U,  E = g step U,  W = pi f'(g^2 T):                lin = sum W S E,   quad = sum W E^2

so lin < 0 guarantees descent for 0 < t < -2 lin/quad. The network steps with t = 1. Where heads have groups with means (GMSA),
the rate is R_mix, S = g (x U - mu) and W = pi f'(g^2 V) of each group, summed over groups too: the spread around the old means
is no less than that around the new ones. By image, by head and in all, in nats:

    rate         R(x), R_var or R_mix
    lin, quad    the two numbers above, over n
    longest      -2 lin/quad: shorter steps surely descend; 0 where the direction is not one of descent
    bound        lin + quad/2: the change at t = 1 is at most this; below 0, descent is guaranteed
    frozen       the change at t = 1, pi and g frozen
    anew         the same with pi and g computed anew of x + step
    normed       R(norm z') - R(x), frozen: what the network's tokens did. A norm undoes shrinking
    reread       the same with pi and g computed anew: what it costs when the layer reads its own result

A head's numbers are those of its own term of the rate; they add up, but for `longest`. Layers and heads count from 0.
Any operator with memberships and `subspaces()` has a certificate, also one that was derived from no rate (the gated channel);
others have none, and `missing` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmst.analysis.probes import AT_ONCE
from dmst.analysis.rates import lack, rate_for, rate_name
from dmst.analysis.running import Numbers, Running, Tick, finite, measure
from dmst.errors import OptionError, choose, shown
from dmst.models import VisionModel
from dmst.models.block import LayerTrace
from dmst.operators import Operator, Parts

QUANTITIES = ("rate", "lin", "quad", "longest", "bound", "frozen", "anew", "normed", "reread")
BASES = {"raw": "raw U", "orthonormal": "U orthonormal by QR, without bias"}
IN_A_ROW = 2  # evaluations at which a layer must climb before a run is ended for it


@dataclass(frozen=True)
class LayerCertificate:
    """What one layer's step did, in all and head by head: quantity -> numbers."""

    layer: int
    total: dict[str, Numbers]
    heads: list[dict[str, Numbers]]

    @property
    def descends(self) -> float:
        """The share of images on which the step lowers the rate, memberships and gate frozen."""
        return self.total["frozen"].below

    @property
    def guaranteed(self) -> float:
        """The share on which the bound alone says so."""
        return self.total["bound"].below

    @property
    def raising(self) -> list[int]:
        """Heads whose own term the step raises, on average."""
        return [i for i, head in enumerate(self.heads) if head["frozen"].mean > 0]


@dataclass(frozen=True)
class Certificate:
    """Every layer of a network; None where there is no rate to certify."""

    model: str
    images: int
    eps: float  # sqrt(d) where c = 1
    c: float
    basis: str
    layers: list[LayerCertificate | None]
    missing: str = ""  # why there is none, where there is none
    rate: str = "R_var"  # or R_mix: which rate is certified

    @property
    def convention(self) -> str:
        return (
            f"{self.rate} at the tokens that each operator read, c = d/eps² = {self.c:g} (eps = {self.eps:g}), "
            f"{BASES[self.basis]}, memberships and gates as computed; {self.images:,} images"
        )


def certify(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    *,
    eps: float | None = None,
    basis: str = "raw",
    tick: Tick = lambda images: None,
) -> Certificate:
    """The certificate of every layer over `images`: one tensor, or batches of any number, also a loader's pairs.

    eps=None is c = 1, the rate that the operators descend; basis="orthonormal" takes each head's U by QR, without its bias.
    """
    choose("basis", basis, BASES)
    c = code_scale(model.config.dim, eps)
    missing, named = "", dict[str, None]()

    def look(block: Any, layer: LayerTrace, grid: Any) -> Tensor | None:
        nonlocal missing
        named[rate_name(layer.parts)] = None
        if why := lack(block.operator, layer.parts):
            missing = f"{model.config.name}: no rate to certify, {why}."
            return None
        return _quantities(layer, block.operator, block.norm, grid, c, basis)

    count, found = measure(model, images, look, tick=tick)
    layers = [_layer(i, each) if each.count else None for i, each in enumerate(found)]
    return Certificate(model.config.name, count, math.sqrt(model.config.dim / c), c, basis, layers, missing, " or ".join(named))


def certificate_of(
    projected: Tensor, step: Tensor, membership: Tensor, gate: Tensor | None = None, *, c: float = 1.0
) -> dict[str, Tensor]:
    """rate, lin, quad, bound and frozen of each head (b, k) where projected (b, k, n, p) moves by `step`, whatever made it.

    A head without groups is one group with mean 0. Sums over groups are products with the memberships: nothing is (n, g, p).
    """
    s, e, pi = projected.double(), step.double(), membership.double()
    g = s.new_ones(s.shape[:2]) if gate is None else gate.double()
    before, after = (rate_by_head(x, pi, g, c=c) for x in (s, s + e))
    n, grouped = s.shape[-2], pi.ndim == 4
    if grouped:
        s = s - s.mean(-2, keepdim=True)  # a spread does not see where 0 is, and keeps its digits near it
    else:
        pi = pi.unsqueeze(2)
    mass = pi.sum(-1, keepdim=True)
    share = pi / torch.where(mass > 0, mass, 1)  # (b, k, g, n)
    mean = share @ s if grouped else s.new_zeros(())
    spread = (share @ s.square() - mean.square()).clamp(min=0)
    strength = c * g.square()[..., None, None]
    slope = strength / (1 + strength * spread)  # g^2 f'(g^2 V), (b, k, g, p)
    pull = pi.mT @ slope  # (b, k, n, p)
    lin = (e * (pull * s - pi.mT @ (slope * mean))).sum((-2, -1)) / n
    quad = (e.square() * pull).sum((-2, -1)) / n
    return {"rate": before, "lin": lin, "quad": quad, "bound": lin + quad / 2, "frozen": after - before}


def rate_by_head(projected: Tensor, membership: Tensor, gate: Tensor | None, *, c: float) -> Tensor:
    """Each head's term of R_var, or R_mix, (b, k): the objective of one head at a time."""
    b, k, _, p = projected.shape
    alone = None if gate is None else gate.double().flatten(0, 1).unsqueeze(-1)
    heads = projected.double().flatten(0, 1).unsqueeze(1)
    members = membership.double().flatten(0, 1).unsqueeze(1)
    rate = rate_for(membership)(heads, members, alone, eps=math.sqrt(p / c), width="head_dim")
    return rate.unflatten(0, (b, k))


# --- during training -------------------------------------------------------------------------------------------------


def descent(model: VisionModel, images: Tensor) -> dict[str, Any]:
    """A probe for `dmst.engine.train_loop`: one number a layer, None where there is no rate.

    {"images": 64, "c": 1.0, "change": [-0.21, 0.04],   mean change of the rate, frozen
     "descends": [1.0, 0.3], "guaranteed": [0.9, 0.0]}  shares of the images
    """
    found = certify(model, images.split(AT_ONCE))
    numbers = {
        "change": [each and each.total["frozen"].mean for each in found.layers],
        "descends": [each and each.descends for each in found.layers],
        "guaranteed": [each and each.guaranteed for each in found.layers],
    }
    return finite({"images": found.images, "c": found.c, **numbers})


def ascending(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Why a run should end: layers whose mean change is above 0 at each of the last two evaluations. "" where there is none."""
    last = [event["certificate"]["change"] for event in evaluations[-IN_A_ROW:] if "certificate" in event]
    if len(last) < IN_A_ROW:
        return ""
    told = []
    for layer, changes in enumerate(zip(*last, strict=True)):
        if all(change is not None and change > 0 for change in changes):
            told.append(f"layer {layer} ({' and '.join(f'{change:+.3g}' for change in changes)} nats)")
    if not told:
        return ""
    what = f"{', '.join(told)} {'raise their own rates' if len(told) > 1 else 'raises its own rate'}"
    return f"At {IN_A_ROW} evaluations in a row, {what}."


# --- shared with theorem.py ------------------------------------------------------------------------------------------


def code_scale(dim: int, eps: float | None) -> float:
    """c = d/eps^2; 1 where no eps is given."""
    if eps is not None and not (0 < eps < math.inf and eps * eps > 0):
        raise OptionError(f"eps is {shown(eps)}: it must be a number above 0 (it is squared inside), or None for c = 1.")
    return 1.0 if eps is None else dim / eps**2


def coordinates(tokens: Tensor, parts: Parts, operator: Operator, basis: str) -> tuple[Tensor, Tensor]:
    """Tokens in each subspace (b, k, n, p), as computed or on orthonormal bases, and the bases U (k, d, p). float64."""
    subspaces = operator.subspaces()
    assert subspaces is not None and parts.projected is not None
    if basis == "raw":
        return parts.projected.double(), subspaces.double()
    bases = torch.linalg.qr(subspaces.double()).Q
    return torch.einsum("bnd,kdp->bknp", tokens.double(), bases), bases


# --- pieces ----------------------------------------------------------------------------------------------------------


def _quantities(layer: LayerTrace, operator: Operator, norm: torch.nn.Module, grid: Any, c: float, basis: str) -> Tensor:
    """(quantities, k + 1, b), all heads together last."""
    parts, delta = layer.parts, layer.after_operator.double() - layer.z.double()
    assert parts.membership is not None
    projected, bases = coordinates(layer.normed, parts, operator, basis)
    step = torch.einsum("bnd,kdp->bknp", delta, bases)
    found = certificate_of(projected, step, parts.membership, parts.gate, c=c)

    def change(tokens: Tensor, frozen: bool) -> Tensor:
        there = operator.decompose(tokens, grid=grid)
        s, _ = coordinates(tokens, there, operator, basis)
        held = parts if frozen else there
        assert held.membership is not None
        return rate_by_head(s, held.membership, held.gate, c=c) - found["rate"]

    after = norm(layer.after_operator)
    found["anew"] = change((layer.normed.double() + delta).to(layer.normed.dtype), frozen=False)
    found["normed"], found["reread"] = change(after, frozen=True), change(after, frozen=False)
    found = {name: torch.cat((x, x.sum(-1, keepdim=True)), -1) for name, x in found.items()}
    falls = (found["lin"] < 0) & (found["quad"] > 0)
    found["longest"] = torch.where(falls, -2 * found["lin"] / torch.where(falls, found["quad"], 1), 0)
    return torch.stack([found[name].mT for name in QUANTITIES])


def _layer(layer: int, running: Running) -> LayerCertificate:
    heads = running.mean.shape[1] - 1
    rows = [{name: running.numbers(i, row) for i, name in enumerate(QUANTITIES)} for row in range(heads + 1)]
    return LayerCertificate(layer, rows[-1], rows[:-1])
