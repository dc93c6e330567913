"""`dmst classify`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import typer

from dmst.terminal import say
from dmst.words import fitting, short

PHOTOS = typer.Argument(help="Image files, or folders of them.")


def classify(
    photos: list[str] = PHOTOS,
    weights: str = typer.Option(
        "dmst_cifar10", help="A shipped network (`dmst models --shipped`), a saved model, a finished run, or an .onnx file."
    ),
    top: int = typer.Option(5, min=1, help="Number of classes to print."),
    maps: str = typer.Option(
        None,
        metavar="DIR",
        help="Write one picture per photo: the map of every head laid over it, and last the gradient: yellow patches raise the "
        "score of the likeliest class, dark blue ones lower it.",
    ),
    layer: int = typer.Option(-1, help="The layer of --maps, from 0; -1 is the last."),
    unverified: bool = typer.Option(False, help="Accept weights without hashes, such as those of timm."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per photo."),
    device: str = typer.Option("cpu", help="cpu, cuda or cuda:N."),
) -> None:
    """Classify photos: print the most likely classes. Works offline.

    dmst classify photo.jpg

    dmst classify photo.jpg --weights dmst_cifar100 --maps maps --layer 3

    dmst classify holiday/ --weights runs/mine --maps maps --json

    If a file cannot be read, the error is printed, the other files are classified, and the exit status is 1.
    """
    from dmst.analysis.membership import gradient_map, png, sheet
    from dmst.atomic import write_bytes
    from dmst.engine.classify import classify as answers
    from dmst.engine.classify import photos_in
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_network, read_weights

    network = read_weights(weights, unverified=unverified) if maps is not None else None
    model = network or read_network(weights, unverified=unverified)
    paths, failed = photos_in(photos), 0
    pictures = _names(paths)
    with joined(device) as group:
        for answer in answers(model, paths, top=top, device=group.device, traced=maps is not None):
            told = {"photo": str(answer.path), "top": [{"class": name, "probability": round(p, 6)} for name, p in answer.top]}
            failed += bool(answer.problem)
            if answer.problem:
                told["problem"] = answer.problem
            elif network is not None:
                assert answer.trace is not None and answer.image is not None
                picture = png(sheet(answer.trace, answer.image, layer, gradients=gradient_map(network, answer.image)))
                told["maps"] = str(write_bytes(Path(maps) / pictures[answer.path], picture))
            say(json.dumps(told) if as_json else _line(told))
    if failed:
        raise typer.Exit(1)


def _names(paths: list[Path]) -> dict[Path, str]:
    """What each photo's picture is called: the photo's name, numbered where two have the same."""
    names = [fitting(path.name) for path in paths]
    count = Counter(names)
    return {
        path: f"{name}.png" if count[name] == 1 else f"{name}-{i + 1}.png"
        for i, (path, name) in enumerate(zip(paths, names, strict=True))
    }


def _line(told: dict) -> str:
    if "problem" in told:
        return told["problem"]
    share = "   ".join(f"{short(each['class'])} {each['probability']:.1%}" for each in told["top"])
    return f"{told['photo']}: {share}" + (f"   ({told['maps']})" if "maps" in told else "")
