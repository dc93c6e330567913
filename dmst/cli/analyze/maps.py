"""`dmst analyze maps`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

PHOTOS = typer.Argument(
    None, metavar="[PHOTO]...", help="Image files, or folders of them; images of a dataset if none is given."
)
READ = {
    "membership": "Memberships: 0 dark blue, 1 yellow; a faint tile is a silent head.",
    "attention received": "No memberships: how much each patch is looked at, 0 dark blue, the layer's largest yellow.",
}


def maps(
    photos: list[str] = PHOTOS,
    weights: str = typer.Option("dmst_cifar10", help="A network that ships, a saved model, or a finished run."),
    out: str = typer.Option(..., metavar="DIR", help="Where the pictures go, one an image."),
    data: str = typer.Option(None, help="A dataset (`dmst data list`) or a folder; the photographs that ship if not given."),
    split: str = typer.Option("test", help="Of the dataset."),
    layer: str = typer.Option("all", metavar="N|all", help="One layer, from 0 (-1 is the last), or all of them."),
    limit: int = typer.Option(8, min=1, help="How many images of a dataset, always the same ones."),
    unverified: bool = typer.Option(False, help="Take weights without hashes, such as timm writes."),
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="Where the datasets are."),
    as_json: bool = typer.Option(
        False, "--json", help="One JSON object a picture: image, picture, gates, range of memberships."
    ),
    device: str = typer.Option("cpu", help="cpu, cuda or cuda:N."),
) -> None:
    """Draw the memberships of every head, laid over the image, its gate under it: layers down, heads across.

    dmst analyze maps --out maps

    dmst analyze maps photo.jpg --weights runs/mine --layer -1 --out maps

    Nothing is drawn that the network did not compute. Colours: 0 dark blue, 1 yellow; a silent head (gate 0) is left faint.
    Softmax attention has no memberships: there, how much each patch is looked at, and said so.
    """
    from dmst.analysis.membership import drawn, layer_of, layers_sheet, png
    from dmst.analysis.probes import only_looking
    from dmst.engine.classify import photos_in
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights
    from dmst.engine.samples import sample
    from dmst.errors import OptionError
    from dmst.whole import write_bytes

    try:
        chosen = None if layer == "all" else int(layer)
    except ValueError:
        raise OptionError(f"--layer is {layer!r}: a whole number, or all.") from None
    paths = photos_in(photos) if photos else []
    model = read_weights(weights, unverified=unverified)
    with joined(device) as group:
        model.to(group.device)
        found = sample(
            model,
            data,
            run=None if paths else weights,
            split=split,
            photos=paths,
            data_dir=data_dir,
            limit=limit,
            batch_size=8,
            device=group.device,
        )
        names = [f"{i:03d}-{path.stem}" for i, path in enumerate(paths)] or [f"{i:03d}" for i in range(found.count)]
        done, classes = 0, model.class_names or tuple(f"class {i}" for i in range(model.config.num_classes))
        with only_looking(model):
            for images, _ in found:
                trace = model.trace(images)
                layers = list(range(len(trace.layers))) if chosen is None else [chosen]
                for i, image in enumerate(images):
                    path = write_bytes(Path(out) / f"{names[done]}.png", png(layers_sheet(trace, image, i, layers=layers)))
                    done += 1
                    if as_json:
                        told: dict[str, Any] = {"picture": str(path), "images": found.name}
                        told["answer"] = classes[int(trace.logits[i].argmax())] if classes else None
                        told["layers"] = [
                            {
                                "layer": number % len(trace.layers),
                                "gate": None if (gate := layer_of(trace, number).parts.gate) is None else gate[i].tolist(),
                                "shown": drawn(trace, number)[0],
                                "lowest": drawn(trace, number)[1][i].amin((1, 2)).tolist(),
                                "highest": drawn(trace, number)[1][i].amax((1, 2)).tolist(),
                            }
                            for number in layers
                        ]
                        typer.echo(json.dumps(told, ensure_ascii=False))
        if not as_json:
            typer.echo(f"{found.name}: {done} pictures in {out}. {READ[drawn(trace, layers[0])[0]]}")
