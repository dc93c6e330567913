"""`dmst analyze certify`."""

from __future__ import annotations

import json

from dmst.cli.analyze import shared
from dmst.terminal import say

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
    weights: str = shared.WEIGHTS,
    data: str = shared.DATA,
    data_dir: str = shared.DATA_DIR,
    split: str = shared.SPLIT,
    limit: int = shared.LIMIT,
    eps: float = shared.EPS,
    orthonormal: bool = shared.ORTHONORMAL,
    batch_size: int = shared.BATCH,
    as_json: bool = shared.JSON,
    device: str = shared.DEVICE,
) -> None:
    """Check whether each layer lowers its rate: on how many images, and by which heads.

    dmst analyze certify

    dmst analyze certify runs/cifar --data cifar10 --data-dir DIR --eps 0.5

    The rate is the number of nats needed to encode the tokens of an image. docs/certificates.md explains the table.
    """
    from dmst.analysis.certificates import certify as certificate
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights

    with joined(device) as group:
        model = read_weights(weights).to(group.device)
        looked_at = shared.look(model, weights, data, split, data_dir, limit, batch_size)
        found = certificate(model, shared.shown(looked_at), eps=eps, basis="orthonormal" if orthonormal else "raw")
    if as_json:
        say(json.dumps({"weights": weights, "data": looked_at.name, **found.to_dict()}))
        return
    table = shared.columns(weights, looked_at, ("layer", *COLUMNS))
    for layer in found.layers:
        if layer is None:
            continue
        mean = {name: numbers.mean for name, numbers in layer.total.items()}
        table.add_row(
            str(layer.layer), f"{mean['rate']:.2f}", f"{mean['frozen']:+.2f}", f"{layer.descends:.0%}", f"{mean['bound']:+.2f}",
            f"{layer.guaranteed:.0%}", f"{mean['longest']:.2f}", f"{mean['anew']:+.2f}", f"{mean['normed']:+.2f}",
            f"{mean['reread']:+.2f}",
        )  # fmt: skip
    shared.tell(table if any(found.layers) else None, [f"{found.convention}.", *found.sentences()], COLUMNS)
