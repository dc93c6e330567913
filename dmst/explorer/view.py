"""What a network computed, as the JSON that the page draws: every number is a tensor of `trace`, or of `analysis` on it.

look(model, trace)            prediction, and for every layer its maps (heads x patches) and gates, of GMSA its groups
pulls(model, trace)           how far each head moves each patch, of GMSA
rates(model, trace, found)    nats by layer, and the certificates in words
gradient(found)               how much each patch moves the score of the answer

Numbers have six digits; what is not finite is None, but a prediction that is not is an error. Layers and heads count from 0.
One image: number 0 of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dmst.analysis.certificates import Certificate, LayerCertificate
from dmst.analysis.groups import mass, nearest, pull
from dmst.analysis.membership import attention_received, ends, groups, maps
from dmst.analysis.rates import LayerRates, rate_name, rates_of
from dmst.errors import bad_answer
from dmst.models import Trace, VisionModel
from dmst.words import short

TOP = 5
EPS = 0.1
RATES = ("variational", "complete", "coding", "active")
MEANS = {
    "membership": "Membership, from 0 to 1: how much each patch belongs to the subspace of this head.",
    "rescaled": "Membership times the number of patches: how much each belongs to the subspace of this head. 1 is the mean.",
    "groups": "Groups: each colour is one group of this head, and a patch has the colour of the group that it belongs to most. "
    "The stronger the colour, the larger its membership there. The grey picture shows through. "
    "Move the slider at the top to the right, and it shows less.",
    "class token": "Attention received: how much the class token attends to each patch, in this head. It is not a membership.",
    "attention": "Attention received: how much all patches attend to each in this head, on average. It is not a membership.",
    "channels": "This layer attends between channels, not between patches, so it has no map of the picture.",
}


def look(model: VisionModel, trace: Trace, forced: Collection[int], pulled: Sequence[Tensor | None]) -> dict[str, Any]:
    """`forced`: layers in which a gate was forced, and whose own gates are computed again. Outside of `forced_gates`; `pulled`,
    of `pulls`, was taken inside."""
    if not torch.isfinite(trace.logits).all():
        raise bad_answer(model.config.name, "this picture")
    probabilities = trace.logits[0].double().softmax(-1)
    ranked = probabilities.sort(descending=True, stable=True).indices[:TOP].tolist()
    names = model.class_names or tuple(f"class {i}" for i in range(model.config.num_classes))
    said = plain(probabilities)
    two = [*probabilities[ranked[:2]].tolist(), 0.0]
    return {
        "top": [{"class": short(names[i]), "index": i, "probability": said[i]} for i in ranked],
        "margin": _number(two[0] - two[1]),
        "probabilities": said,
        "grid": list(trace.grid),
        "prefix": trace.prefix,
        "layers": [_layer(model, trace, i, i in forced) | _groups(trace, i, each) for i, each in enumerate(pulled)],
    }


def pulls(model: VisionModel, trace: Trace) -> list[Tensor | None]:
    """(b, k, rows, columns) of every layer, None where heads have no groups."""
    return [None if groups(trace, i) is None else pull(model, trace, i) for i in range(len(trace.layers))]


def _groups(trace: Trace, number: int, pulled: Tensor | None) -> dict[str, Any]:
    """Of every head: the group of each patch, the mass and nearest patches of each group, and the pull of each patch."""
    group = groups(trace, number)
    if group is None or pulled is None:
        return {}
    return {
        "groups": group[0].flatten(1).tolist(),
        "mass": plain(mass(trace, number)[0]),
        "nearest": nearest(trace, number)[0].tolist(),
        "pull": plain(pulled[0].flatten(1)),
    }


def _layer(model: VisionModel, trace: Trace, number: int, forced: bool) -> dict[str, Any]:
    layer = trace.layers[number]
    parts, own = layer.parts, layer.parts.gate
    if forced and own is not None:
        own = model.blocks[number].operator.decompose(layer.normed, grid=trace.grid).gate  # type: ignore[union-attr, operator]
    kind, values = "membership", None
    if parts.membership is not None:
        values = maps(trace, number)[0].flatten(1)
        means = "groups" if parts.means is not None else "rescaled" if values.max() > 1 else "membership"
    else:
        received = attention_received(trace, number)
        kind = "attention"
        means = "channels" if received is None else "class token" if trace.prefix else "attention"
        values = None if received is None else received[0]
    low, high = ends(torch.zeros(0) if values is None else values, kind)
    return {
        "kind": kind,
        "means": MEANS[means],
        "maps": [] if values is None else plain(values),
        "low": _number(low),
        "high": _number(high),
        "gate": None if parts.gate is None else plain(parts.gate[0]),
        "computed_gate": None if own is None else plain(own[0]),
    }


def rates(model: VisionModel, trace: Trace, certificate: Certificate) -> dict[str, Any]:
    pairs = zip(trace.layers, model.blocks, strict=True)
    found = [rates_of(layer.normed, layer.parts, block.operator, eps=EPS) for layer, block in pairs]  # type: ignore[arg-type]
    mean = {name: [each[name][0].item() for each in found] for name in RATES}
    named = " or ".join(dict.fromkeys(rate_name(layer.parts) for layer in trace.layers))
    told = LayerRates(model.config.name, "input", EPS, 1, mean, {}, rate=named)
    return {
        "convention": told.convention,
        "certified": certificate.convention,
        "rates": {name: plain(torch.tensor(row, dtype=torch.float64)) for name, row in mean.items()},
        "certificates": [_sentence(each) for each in certificate.layers if each is not None] or [certificate.missing],
        "change": [None if each is None else _number(each.total["frozen"].mean) for each in certificate.layers],
    }


def gradient(found: Tensor) -> dict[str, Any]:
    low, high = ends(found, "gradient")
    return {"gradient": {"map": plain(found.flatten()), "low": _number(low), "high": _number(high)}}


def _sentence(layer: LayerCertificate) -> str:
    """The certificate's own sentence is of many images; this one of the one that is looked at."""
    change = layer.total["frozen"].mean
    how = f"lowers its own rate by {-change:.2g} nats" if change < 0 else f"raises its own rate by {change:.2g} nats"
    sure = ", and the bound guarantees it" if layer.guaranteed else ""
    raising = f"These heads raise their own part: {', '.join(map(str, layer.raising))}." if layer.raising else ""
    return f"Layer {layer.layer} {how if change else 'does not change its own rate'} for this picture{sure}. {raising}".strip()


def plain(values: Tensor) -> Any:
    """Nested lists of numbers with six digits."""
    return _rounded(values.detach().double().tolist())


def _rounded(values: Any) -> Any:
    return [_rounded(each) if isinstance(each, list) else _number(each) for each in values]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
