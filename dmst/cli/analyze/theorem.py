"""`dmst analyze theorem`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
from dmst.terminal import say

COLUMNS = {
    "coupled": ("coupled.mean", ".2f", "rate in nats with coupled memberships (softmax over heads)"),
    "decoupled": ("decoupled.mean", ".2f", "rate with the layer's own memberships and gates"),
    "gain": ("gain.mean", "+.2f", "coupled less decoupled; above 0: the claim of Theorem 1 holds"),
    "holds": ("gain.above", ".0%", "share of the images on which the claim holds"),
    "membership": ("membership.mean", "+.2f", "part of the gain: the memberships fit better"),
    "mass": ("mass.mean", "+.2f", "part of the gain: the memberships of a token sum to less"),
    "gate": ("gate.mean", "+.2f", "part of the gain: gates are below 1"),
    "premise": ("premise.mean", ".0%", "share of the images that meet the conditions of the proof"),
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
    """Test Theorem 1 of the paper on every layer.

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
    if as_json:
        say(json.dumps({"weights": weights, "data": images.name, **found.to_dict()}))
        return
    layers = [(layer.layer, layer.quantities) for layer in found.layers if layer is not None]
    if not layers:
        say(f"{found.model}: the theorem does not apply, because the operator has no memberships like those of DMSA.")
        return
    shared.by_layer(f"{weights} on {images.name}", COLUMNS, layers)
    say(f"{found.convention}.")
