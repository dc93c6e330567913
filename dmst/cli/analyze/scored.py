"""`dmst analyze scored`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from dmst.cli.analyze import shared
from dmst.cli.progress import counted

if TYPE_CHECKING:
    from dmst.analysis.foreground import Foreground
    from dmst.analysis.intervals import Interval
    from dmst.analysis.scored import Scores


def scored(
    weights: str = typer.Argument("dmst_cifar10", help="A network that ships, a saved model, or a finished run."),
    data: str = typer.Option(None, help="A dataset (`dmst data list`) or a folder; the photographs that ship if not given."),
    split: str = typer.Option("test", help="Of the dataset."),
    layer: int = typer.Option(-1, help="The layer whose memberships, gates or rows put the patches in order; -1 is the last."),
    test: list[str] = typer.Option(  # noqa: B008 (typer reads it)
        ["insertion", "deletion", "road"], "--test", help="insertion, deletion or road; may be given several times."
    ),
    steps: int = typer.Option(10, min=1, help="Points of a curve, less one."),
    draws: int = typer.Option(3, min=1, help="Random orders an image."),
    limit: int = typer.Option(200, min=1, help="How many images of a dataset, always the same ones."),
    batch_size: int = typer.Option(64, min=1, help="Images at a time."),
    foreground: bool = typer.Option(True, help="Where there are masks (--data pets): do the maps find the thing?"),
    unverified: bool = typer.Option(False, help="Take weights without hashes, such as timm writes."),
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="Where the datasets are."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
    device: str = shared.DEVICE,
) -> None:
    """Are the maps true? Patches taken away in their order, against random, gradient and attention; maps against masks.

    dmst analyze scored

    dmst analyze scored runs/mine --data pets --data-dir DIR

    Positive differences: better than a random order, or than taking the middle of the picture first.
    """
    from dmst.analysis.foreground import foreground as against_masks
    from dmst.analysis.scored import TESTS
    from dmst.analysis.scored import scored as curves
    from dmst.engine.distributed import joined
    from dmst.engine.masked import has_masks, masked
    from dmst.engine.prepare import read_weights
    from dmst.errors import choose

    tests = list(dict.fromkeys(choose("test", name, TESTS) for name in test))
    model = read_weights(weights, unverified=unverified)
    with joined(device) as group:
        model.to(group.device)
        found = shared.look(model, weights, data, split, data_dir, limit, batch_size)
        with counted("curves", found.count) as tick:
            scores = curves(model, found, layer=layer, tests=tests, steps=steps, draws=draws, tick=tick)
        masks = None
        if foreground and has_masks(found):
            with counted("masks", found.count) as tick:
                masks = against_masks(model, masked(found), tick=tick)
    if as_json:
        typer.echo(json.dumps({"sample": found.name, "scored": scores.to_dict(), "foreground": masks and masks.to_dict()}))
        return
    console = Console()
    console.print(f"{scores.model}, {found.name}", highlight=False, soft_wrap=True)
    console.print(_curves(scores))
    console.print(scores.verdict, highlight=False, soft_wrap=True)
    if masks is not None:
        console.print(_masks(masks))
        console.print(masks.verdict, highlight=False, soft_wrap=True)


def _curves(scores: Scores) -> Table:
    table = Table("test", "order", "area", "over random (95 %)", "over centre (95 %)")
    for score in scores.scores:
        table.add_row(score.test, score.order, f"{score.area.mean:.3f}", _signed(score.better), _signed(score.ahead))
    return table


def _signed(interval: Interval | None) -> str:
    return "" if interval is None else "{:+.3f} ({:+.2f} {:+.2f})".format(*interval)


def _masks(found: Foreground) -> Table:
    """Three measures of the best head of each layer, and of the head in the middle."""
    measures = ("iou_mean", "iou_area", "pointing")
    table = Table("layer", "IoU, own mean", "IoU, mask's area", "pointing")
    for row in found.layers:
        table.add_row(str(row.layer), *(f"{_short(row.best[x])} {row.median[x]:.2f}" for x in measures))
    table.add_row("all", *(_short(found.best[x]) for x in measures))
    table.add_row("centre", *(_short(found.centre[x]) for x in measures))
    table.caption = (
        f"{found.what} of the best head (95 %), chosen on the other half of the images, and of the median head; "
        f"centre: the middle of the picture, by no network; pointing at random finds the thing in {found.share:.2f}"
    )
    return table


def _short(interval: Interval) -> str:
    low, high = (f"{end:.2f}".removeprefix("0") for end in (interval.low, interval.high))
    return f"{interval.mean:.2f} ({low}-{high})"
