"""`dmst analyze theorem`."""

from __future__ import annotations

import json

import typer

from dmst.cli.analyze import shared
from dmst.terminal import say

COLUMNS = {
    "coupled": "rate in nats with coupled memberships (softmax over heads)",
    "decoupled": "rate with the layer's own memberships and gates",
    "gain": "coupled less decoupled; above 0: the claim of Theorem 1 holds",
    "holds": "share of the images on which the claim holds",
    "membership": "part of the gain: the memberships fit better",
    "mass": "part of the gain: the memberships of a token sum to less",
    "gate": "part of the gain: gates are below 1",
    "premise": "share of the images that meet the conditions of the proof",
}
GATES = {
    "E1": "gating both bases squares the gate",
    "E1 single": "distance of the paper's single gate from it",
    "E2": "the listing is a gate per token and head",
    "E3": "with membership 1: g times channel attention",
    "E3 ungated": "distance of ungated attention from it",
    "E4": "gates of 0 and 1: inside and outside are the same",
    "E7": "distance of one gate outside the sum",
}


def theorem(
    weights: str = shared.WEIGHTS,
    data: str = shared.DATA,
    data_dir: str = shared.DATA_DIR,
    split: str = shared.SPLIT,
    limit: int = shared.LIMIT,
    eps: float = shared.EPS,
    orthonormal: bool = shared.ORTHONORMAL,
    temperature: float = typer.Option(1.0, min=0, help="Temperature 1/(2 eta) of the coupled memberships."),
    energy: str = typer.Option(
        "formula", help="Energy in the coupled memberships: formula (the paper) or code (ToST, each channel normalised)."
    ),
    batch_size: int = shared.BATCH,
    as_json: bool = shared.JSON,
    device: str = shared.DEVICE,
) -> None:
    """Test Theorem 1 of the paper on every layer, and the gate identities.

    dmst analyze theorem

    dmst analyze theorem runs/cifar --data cifar10 --data-dir DIR --eps 0.1 --orthonormal

    The gain has three parts. Only the membership part is a real gain: less mass and smaller gates always lower the rate.
    """
    from dmst.analysis.theorem import IDENTITIES
    from dmst.analysis.theorem import theorem as verdict
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights

    with joined(device) as group:
        model = read_weights(weights).to(group.device)
        looked_at = shared.look(model, weights, data, split, data_dir, limit, batch_size)
        basis = "orthonormal" if orthonormal else "raw"
        found = verdict(model, shared.shown(looked_at), eps=eps, basis=basis, temperature=temperature, energy=energy)
    if as_json:
        say(json.dumps({"weights": weights, "data": looked_at.name, **found.to_dict()}))
        return
    table = shared.columns(weights, looked_at, ("layer", *COLUMNS))
    for layer in found.layers:
        if layer is None:
            continue
        mean = {name: numbers.mean for name, numbers in layer.quantities.items()}
        table.add_row(
            str(layer.layer), f"{mean['coupled']:.2f}", f"{mean['decoupled']:.2f}", f"{mean['gain']:+.2f}",
            f"{layer.holds:.0%}", f"{mean['membership']:+.2f}", f"{mean['mass']:+.2f}", f"{mean['gate']:+.2f}",
            f"{mean['premise']:.0%}",
        )  # fmt: skip
    sentences = [f"{found.convention}.", *found.sentences()]
    gated = [layer for layer in found.layers if layer is not None and layer.identities is not None]
    for name in IDENTITIES if gated else ():
        errors = [layer.identities[name] for layer in gated if layer.identities is not None]
        told = " ".join(f"{error:.2g}" for error in errors)
        sentences.append(f"{name + ':':<12} {told}  ({GATES[name]})")
    if gated:
        sentences.insert(-len(IDENTITIES), "Gate identities, relative error of each layer:")
    shared.tell(table if any(found.layers) else None, sentences, COLUMNS)
