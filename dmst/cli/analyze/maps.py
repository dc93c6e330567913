"""`dmst analyze maps`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dmst.cli.analyze import shared
from dmst.terminal import say
from dmst.words import fitting

READ = {
    "membership": "Colours: membership 0 is dark blue, 1 is yellow. A faint tile is a silent head (gate 0).",
    "attention received": "No memberships here. Colours: attention that a patch receives, 0 is dark blue, the largest of the "
    "layer is yellow.",
}
Photos = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PHOTO]...", help="Image files, or folders of them. Default: images of a dataset."),
]


def maps(
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder for the pictures, one per image.")],
    photos: Photos = None,
    weights: Annotated[str, typer.Option(help=shared.NETWORK)] = "dmst_cifar10",
    data: shared.Data = None,
    split: shared.Split = "",
    layer: Annotated[str, typer.Option(metavar="N|all", help="One layer, from 0 (-1 is the last), or all.")] = "all",
    limit: shared.Limit = 8,
    unverified: shared.Unverified = False,
    data_dir: shared.DataDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per picture: image, picture, gates, range of memberships.")
    ] = False,
    device: shared.Device = "cpu",
) -> None:
    """Draw the memberships of every head over the image, one picture per image.

    dmst analyze maps --out maps

    dmst analyze maps photo.jpg --weights runs/mine --layer -1 --out maps

    Rows are layers, columns are heads, the gate is printed under each map. Colours: 0 is dark blue, 1 is yellow. A silent head
    (gate 0) is faint. Networks with softmax attention have no memberships: their maps show the attention that a patch receives.
    """
    from dmst.analysis.membership import drawn, layer_of, layers_sheet, png
    from dmst.analysis.running import only_looking
    from dmst.atomic import write_bytes
    from dmst.engine.classify import photos_in
    from dmst.errors import OptionError

    if layer != "all" and not layer.removeprefix("-").isdecimal():
        raise OptionError(f"--layer is {layer!r}: it must be a whole number, or all.")
    paths = photos_in(photos) if photos else []
    options = {"photos": paths, "unverified": unverified}
    with (
        shared.opened([weights], data, split, data_dir, limit, 8, device, **options) as [(model, found)],  # type: ignore[arg-type]
        only_looking(model),
    ):
        layers = list(range(len(model.blocks))) if layer == "all" else [int(layer)]
        classes = model.class_names or tuple(f"class {i}" for i in range(model.config.num_classes))
        done = 0
        for images, _ in found:
            trace = model.trace(images)
            for i, image in enumerate(images):
                title = f"-{fitting(found.titles[done])}" if found.titles else ""
                picture = png(layers_sheet(trace, image, i, layers=layers))
                path = write_bytes(Path(out) / f"{done:03d}{title}.png", picture)
                done += 1
                if not as_json:
                    continue
                told = []
                for number in layers:
                    (shown, values), gate = drawn(trace, number), layer_of(trace, number).parts.gate
                    told.append({
                        "layer": number % len(trace.layers), "gate": None if gate is None else gate[i].tolist(), "shown": shown,
                        "lowest": values[i].amin((1, 2)).tolist(), "highest": values[i].amax((1, 2)).tolist(),
                    })  # fmt: skip
                answer = classes[int(trace.logits[i].argmax())] if classes else None
                say(json.dumps({"picture": str(path), "images": found.name, "answer": answer, "layers": told}))
        if not as_json:
            say(f"{found.name}: {done} pictures written to {out}. {READ[drawn(trace, layers[0])[0]]}")
