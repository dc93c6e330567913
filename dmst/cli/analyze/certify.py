"""`dmst analyze certify`."""

from __future__ import annotations

import json

import typer

from dmst.cli.analyze import shared


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
    """Say of every layer whether its step lowers the rate it stands for, on how many images, and which heads raise it.

    dmst analyze certify

    dmst analyze certify runs/cifar --data cifar10 --data-dir DIR --eps 0.5

    The step is the one that the block makes. docs/certificates.md says how to read the table.
    """
    from dmst.analysis.certificates import certify as certificate
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights

    with joined(device) as group:
        model = read_weights(weights).to(group.device)
        looked_at = shared.look(model, weights, data, split, data_dir, limit, batch_size)
        found = certificate(model, shared.shown(looked_at), eps=eps, basis="orthonormal" if orthonormal else "raw")
    if as_json:
        typer.echo(json.dumps({"weights": weights, "data": looked_at.name, **found.to_dict()}))
        return
    table = shared.columns(
        weights, looked_at, ("layer", "rate", "bound", "frozen", "falls", "assured", "t <", "anew", "normed", "reread")
    )
    for layer in found.layers:
        if layer is None:
            continue
        mean = {name: numbers.mean for name, numbers in layer.total.items()}
        table.add_row(
            str(layer.layer), f"{mean['rate']:.2f}", f"{mean['bound']:+.2f}", f"{mean['frozen']:+.2f}", f"{layer.descends:.0%}",
            f"{layer.guaranteed:.0%}", f"{mean['longest']:.2f}", f"{mean['anew']:+.2f}", f"{mean['normed']:+.2f}",
            f"{mean['reread']:+.2f}",
        )  # fmt: skip
    shared.tell(table if any(found.layers) else None, [f"{found.convention}.", *found.sentences()])
