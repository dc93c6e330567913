"""`dmst analyze certify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
from dmst.terminal import say

if TYPE_CHECKING:
    from dmst.analysis.certificates import LayerCertificate

COLUMNS = {
    "rate": "cost of the tokens that the layer reads, in nats (1 nat = 1.44 bits)",
    "change": "change of the rate by the layer's step, in nats; below 0: it falls",
    "falls": "share of the images on which the rate falls",
    "bound": "certificate: the change is at most this",
    "proven": "share of the images with a bound below 0: the fall is guaranteed",
    "max t": "a step shorter than this surely lowers the rate; the network has t = 1",
    "updated": "change, with memberships and gates computed again after the step",
    "normed": "change, measured after the norm",
    "both": "change, measured after the norm, memberships and gates computed again",
}


def certify(
    weights: shared.Weights = "dmst_cifar10",
    data: shared.Data = None,
    data_dir: shared.DataDir = None,
    split: shared.Split = "",
    limit: shared.Limit = 1000,
    eps: shared.Eps = None,
    orthonormal: shared.Orthonormal = False,
    batch_size: shared.Batch = 64,
    as_json: shared.Json = False,
    device: shared.Device = None,
) -> None:
    """Check whether each layer lowers its rate: on how many images, and by which heads.

    dmst analyze certify

    dmst analyze certify runs/cifar --data cifar10 --data-dir DIR --eps 0.5

    The rate is the number of nats needed to encode the tokens of an image. docs/certificates.md explains the table.
    """
    from dmst.analysis.certificates import certify as certificate

    with (
        shared.opened([weights], data, split, data_dir, limit, batch_size, device) as [(model, images)],
        counted(images.name, images.count) as tick,
    ):
        found = certificate(model, images, eps=eps, basis="orthonormal" if orthonormal else "raw", tick=tick)
    layers = [layer for layer in found.layers if layer is not None]
    if as_json:
        say(json.dumps({"weights": weights, "data": images.name, **found.to_dict()}))
        return
    rows = []
    for layer in layers:
        mean = {name: numbers.mean for name, numbers in layer.total.items()}
        rows.append((
            layer.layer, f"{mean['rate']:.2f}", f"{mean['frozen']:+.2f}", f"{layer.descends:.0%}", f"{mean['bound']:+.2f}",
            f"{layer.guaranteed:.0%}", f"{mean['longest']:.2f}", f"{mean['anew']:+.2f}", f"{mean['normed']:+.2f}",
            f"{mean['reread']:+.2f}",
        ))  # fmt: skip
    if rows:
        shared.show(f"{weights} on {images.name}", ("layer", *COLUMNS), rows, COLUMNS)
    say(f"{found.convention}.")
    if layers:
        say("Heads that raise the rate, on average:", *(f"layer {layer.layer}: {_heads(layer)}" for layer in layers))
    if found.missing:
        say(found.missing)


def _heads(layer: LayerCertificate) -> str:
    return "all" if len(layer.raising) == len(layer.heads) else ", ".join(map(str, layer.raising)) or "none"
