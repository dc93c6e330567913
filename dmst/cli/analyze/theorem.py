"""`dmst analyze theorem`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
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
    weights: shared.Weights = "dmst_cifar10",
    data: shared.Data = None,
    data_dir: shared.DataDir = None,
    split: shared.Split = "",
    limit: shared.Limit = 1000,
    eps: shared.Eps = None,
    orthonormal: shared.Orthonormal = False,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature 1/(2 eta) of the coupled memberships.")] = 1.0,
    energy: Annotated[
        str,
        typer.Option(help="Energy in the coupled memberships: formula (the paper), or code (ToST, channels normalised)."),
    ] = "formula",
    batch_size: shared.Batch = 64,
    as_json: shared.Json = False,
    device: shared.Device = None,
) -> None:
    """Test Theorem 1 of the paper on every layer, and the gate identities.

    dmst analyze theorem

    dmst analyze theorem runs/cifar --data cifar10 --data-dir DIR --eps 0.1 --orthonormal

    The gain has three parts. Only the membership part is a real gain: less mass and smaller gates always lower the rate.
    """
    from dmst.analysis.theorem import theorem as verdict

    options = {"eps": eps, "basis": "orthonormal" if orthonormal else "raw", "temperature": temperature, "energy": energy}
    with (
        shared.opened([weights], data, split, data_dir, limit, batch_size, device) as [(model, images)],
        counted(images.name, images.count) as tick,
    ):
        found = verdict(model, images, **options, tick=tick)  # type: ignore[arg-type]
    layers = [layer for layer in found.layers if layer is not None]
    if as_json:
        say(json.dumps({"weights": weights, "data": images.name, **found.to_dict()}))
        return
    rows = []
    for layer in layers:
        mean = {name: numbers.mean for name, numbers in layer.quantities.items()}
        rows.append((
            layer.layer, f"{mean['coupled']:.2f}", f"{mean['decoupled']:.2f}", f"{mean['gain']:+.2f}", f"{layer.holds:.0%}",
            f"{mean['membership']:+.2f}", f"{mean['mass']:+.2f}", f"{mean['gate']:+.2f}", f"{mean['premise']:.0%}",
        ))  # fmt: skip
    if not rows:
        say(f"{found.model}: the theorem does not apply, because the operator has no memberships like those of DMSA.")
        return
    shared.show(f"{weights} on {images.name}", ("layer", *COLUMNS), rows, COLUMNS)
    say(f"{found.convention}.")
    gated = [layer.identities for layer in layers if layer.identities is not None]
    if gated:
        say("Gate identities, relative error of each layer:")
        say(*(f"{name + ':':<12} {' '.join(f'{each[name]:.2g}' for each in gated)}  ({GATES[name]})" for name in GATES))
