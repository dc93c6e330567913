"""`dmst analyze certify`."""

from __future__ import annotations

import json

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
from dmst.terminal import say

COLUMNS = {
    "rate": ("rate.mean", ".2f", "cost of the tokens that the layer reads, in nats (1 nat = 1.44 bits)"),
    "change": ("frozen.mean", "+.2f", "change of the rate by the layer's step, in nats; below 0: it falls"),
    "falls": ("frozen.below", ".0%", "share of the images on which the rate falls"),
    "bound": ("bound.mean", "+.2f", "certificate: the change is at most this"),
    "proven": ("bound.below", ".0%", "share of the images with a bound below 0: the fall is guaranteed"),
    "max t": ("longest.mean", ".2f", "a step shorter than this surely lowers the rate; the network has t = 1"),
    "updated": ("anew.mean", "+.2f", "change, with memberships and gates computed again after the step"),
    "normed": ("normed.mean", "+.2f", "change, measured after the norm"),
    "both": ("reread.mean", "+.2f", "change, measured after the norm, memberships and gates computed again"),
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
    if as_json:
        say(json.dumps({"weights": weights, "data": images.name, **found.to_dict()}))
        return
    layers = [layer for layer in found.layers if layer is not None]
    if not layers:
        say(found.missing)
        return
    shared.by_layer(f"{weights} on {images.name}", COLUMNS, [(layer.layer, layer.total) for layer in layers])
    say(f"{found.convention}.", "Heads that raise the rate, on average:")
    for layer in layers:
        every = len(layer.raising) == len(layer.heads)
        say(f"layer {layer.layer}: {'all' if every else ', '.join(map(str, layer.raising)) or 'none'}")
