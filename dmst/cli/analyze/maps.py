"""`dmst analyze maps`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from dmst.terminal import say
from dmst.words import fitting

PHOTOS = typer.Argument(None, metavar="[PHOTO]...", help="Image files, or folders of them. Default: images of a dataset.")
READ = {
    "membership": "Colours: membership 0 is dark blue, 1 is yellow. A faint tile is a silent head (gate 0).",
    "attention received": "No memberships here. Colours: attention that a patch receives, 0 is dark blue, the largest of the "
    "layer is yellow.",
}


def maps(
    photos: list[str] = PHOTOS,
    weights: str = typer.Option("dmst_cifar10", help="A shipped network, a saved model, or a finished run."),
    out: str = typer.Option(..., metavar="DIR", help="The folder for the pictures, one per image."),
    data: str = typer.Option(None, help="A dataset (`dmst data list`) or a folder. Default: photos that ship with dmst."),
    split: str = typer.Option("", help="test or train; if not given test, or all images where there are no test images."),
    layer: str = typer.Option("all", metavar="N|all", help="One layer, from 0 (-1 is the last), or all."),
    limit: int = typer.Option(8, min=1, help="Use at most this many images of a dataset, always the same ones."),
    unverified: bool = typer.Option(False, help="Accept weights without hashes, such as those of timm."),
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets."),
    as_json: bool = typer.Option(
        False, "--json", help="Print one JSON object per picture: image, picture, gates, range of memberships."
    ),
    device: str = typer.Option("cpu", help="cpu, cuda or cuda:N."),
) -> None:
    """Draw the memberships of every head over the image, one picture per image.

    dmst analyze maps --out maps

    dmst analyze maps photo.jpg --weights runs/mine --layer -1 --out maps

    Rows are layers, columns are heads, the gate is printed under each map. Colours: 0 is dark blue, 1 is yellow. A silent head
    (gate 0) is faint. Networks with softmax attention have no memberships: their maps show the attention that a patch receives.
    """
    from dmst.analysis.membership import drawn, layer_of, layers_sheet, png
    from dmst.analysis.probes import only_looking
    from dmst.atomic import write_bytes
    from dmst.engine.classify import photos_in
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights
    from dmst.engine.samples import sample
    from dmst.errors import OptionError

    try:
        chosen = None if layer == "all" else int(layer)
    except ValueError:
        raise OptionError(f"--layer is {layer!r}: it must be a whole number, or all.") from None
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
        names = [f"{i:03d}-{fitting(title)}" for i, title in enumerate(found.titles)] or [
            f"{i:03d}" for i in range(found.count)
        ]
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
                        say(json.dumps(told))
        if not as_json:
            say(f"{found.name}: {done} pictures written to {out}. {READ[drawn(trace, layers[0])[0]]}")
