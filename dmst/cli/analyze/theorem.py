"""`dmst analyze theorem`."""

from __future__ import annotations

import json

import typer

from dmst.cli.analyze import shared


def theorem(
    weights: str = shared.WEIGHTS,
    data: str = shared.DATA,
    data_dir: str = shared.DATA_DIR,
    split: str = shared.SPLIT,
    limit: int = shared.LIMIT,
    eps: float = shared.EPS,
    orthonormal: bool = shared.ORTHONORMAL,
    temperature: float = typer.Option(1.0, min=0, help="1/(2 eta) of the coupled membership."),
    energy: str = typer.Option(
        "formula", help="Of the coupled membership: formula, the paper's text; code, ToST's, each channel normalised."
    ),
    batch_size: int = shared.BATCH,
    as_json: bool = shared.JSON,
    device: str = shared.DEVICE,
) -> None:
    """Ask the paper's Theorem 1 of every layer, split into membership, mass and gate; and the gate identities.

    dmst analyze theorem

    dmst analyze theorem runs/cifar --data cifar10 --data-dir DIR --eps 0.1 --orthonormal

    Only the membership part is an effect of modelling: less mass and a smaller gate lower the rate for free.
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
        typer.echo(json.dumps({"weights": weights, "data": looked_at.name, **found.to_dict()}))
        return
    table = shared.columns(
        weights, looked_at, ("layer", "coupled", "decoupled", "gain", "holds", "membership", "mass", "gate", "premise")
    )
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
        sentences.append(f"{name + ':':<12} {told}")
    if gated:
        sentences.insert(-len(IDENTITIES), "Gate identities, relative errors by layer:")
    shared.tell(table if any(found.layers) else None, sentences)
