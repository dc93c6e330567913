"""`dmst analyze scored`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
from dmst.terminal import Terminal, say

if TYPE_CHECKING:
    from dmst.analysis.foreground import Foreground
    from dmst.analysis.intervals import Interval
    from dmst.analysis.scored import Scores


TESTED = {
    "insertion": "patches are shown, most important first; a large area is good",
    "deletion": "patches are hidden, most important first; a small area is good",
    "road": "deletion, patches filled in from their neighbours; small is good",
}
ORDERS = {
    "membership": "memberships of the head with the largest gate",
    "gated": "memberships times gates, summed over the heads",
    "attention": "attention that a patch receives",
    "gradient": "gradient times input (no map of the layer)",
    "centre": "centre of the image first (no network)",
    "random": "random order (no network)",
}
AREA = "under the curve: probability of the predicted class by share of patches"


def scored(
    weights: str = typer.Argument("dmst_cifar10", help="A shipped network, a saved model, or a finished run."),
    data: str = typer.Option(None, help="A dataset (`dmst data list`) or a folder. Default: photos that ship with dmst."),
    split: str = typer.Option("", help="test or train; if not given test, or all images where there are no test images."),
    layer: int = typer.Option(-1, help="The layer whose map ranks the patches, from 0; -1 is the last."),
    test: list[str] = typer.Option(  # noqa: B008 (typer reads it)
        ["insertion", "deletion", "road"], "--test", help="insertion, deletion or road. Repeatable."
    ),
    steps: int = typer.Option(10, min=1, help="Steps of a curve."),
    draws: int = typer.Option(3, min=1, help="Random orders per image."),
    limit: int = typer.Option(200, min=1, help="Use at most this many images, always the same ones."),
    batch_size: int = typer.Option(64, min=1, help="Images per batch."),
    foreground: bool = typer.Option(True, help="With masks (--data pets): do the maps find the object?"),
    unverified: bool = typer.Option(False, help="Accept weights without hashes, such as those of timm."),
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    device: str = shared.DEVICE,
) -> None:
    """Score the maps: does the prediction depend on the patches that a map marks?

    dmst analyze scored

    dmst analyze scored runs/mine --data pets --data-dir DIR

    Patches are hidden or shown in the order of a map, and the probability of the predicted class is measured. A gain above 0
    means: better than a random order, or better than starting at the centre of the image.
    """
    from dmst.analysis.foreground import foreground as against_masks
    from dmst.analysis.scored import TESTS
    from dmst.analysis.scored import scored as curves
    from dmst.engine.distributed import joined
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
        if foreground and found.has_masks:
            with counted("masks", found.count) as tick:
                masks = against_masks(model, found.masked(), tick=tick)
    if as_json:
        say(json.dumps({"sample": found.name, "scored": scores.to_dict(), "foreground": masks and masks.to_dict()}))
        return
    say(f"{scores.model}, {found.name}")
    Terminal().print(_curves(scores))
    orders = {score.order for score in scores.scores}
    words = {name: word for name, word in TESTED.items() if name in tests}
    words |= {name: word for name, word in ORDERS.items() if name in orders} | {"area": AREA}
    say(*shared.legend(words), "", scores.verdict)
    if masks is not None:
        Terminal().print(_masks(masks))
        say(masks.verdict)


def _curves(scores: Scores) -> Table:
    table = Table("test", "ranked by", "area", "over random (95 %)", "over centre (95 %)")
    for score in scores.scores:
        table.add_row(score.test, score.order, f"{score.area.mean:.3f}", _signed(score.better), _signed(score.ahead))
    return table


def _signed(interval: Interval | None) -> str:
    return "" if interval is None else "{:+.3f} ({:+.2f} {:+.2f})".format(*interval)


def _masks(found: Foreground) -> Table:
    """Three measures of the best head of each layer, and of the head in the middle."""
    measures = ("iou_mean", "iou_area", "pointing")
    table = Table("layer", "IoU, threshold at mean", "IoU, area of the mask", "peak on object")
    for row in found.layers:
        table.add_row(str(row.layer), *(f"{_short(row.best[x])} {row.median[x]:.2f}" for x in measures))
    table.add_row("all", *(_short(found.best[x]) for x in measures))
    table.add_row("centre", *(_short(found.centre[x]) for x in measures))
    table.caption = (
        f"{found.what} of the best head (95 % interval), chosen on the other half of the images; then the median head. "
        f"centre: a map of the image centre, without a network. A random peak is on the object with probability "
        f"{found.share:.2f}."
    )
    return table


def _short(interval: Interval) -> str:
    low, high = (f"{end:.2f}".removeprefix("0") for end in (interval.low, interval.high))
    return f"{interval.mean:.2f} ({low}-{high})"
