"""`dmst analyze scored`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
from dmst.terminal import say

if TYPE_CHECKING:
    from dmst.analysis.foreground import Foreground
    from dmst.analysis.scored import Interval

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
MEASURES = {"iou_mean": "IoU, threshold at mean", "iou_area": "IoU, area of the mask", "pointing": "peak on object"}


def scored(
    weights: shared.Weights = "dmst_cifar10",
    data: shared.Data = None,
    split: shared.Split = "",
    layer: Annotated[int, typer.Option(help="The layer whose map ranks the patches, from 0; -1 is the last.")] = -1,
    test: Annotated[list[str], typer.Option("--test", help="insertion, deletion or road. Repeatable.")] = [*TESTED],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Steps of a curve.")] = 10,
    draws: Annotated[int, typer.Option(min=1, help="Random orders per image.")] = 3,
    limit: shared.Limit = 200,
    batch_size: shared.Batch = 64,
    foreground: Annotated[bool, typer.Option(help="With masks (--data pets): do the maps find the object?")] = True,
    unverified: shared.Unverified = False,
    data_dir: shared.DataDir = None,
    as_json: shared.Json = False,
    device: shared.Device = None,
) -> None:
    """Score the maps: does the prediction depend on the patches that a map marks?

    dmst analyze scored

    dmst analyze scored runs/mine --data pets --data-dir DIR

    Patches are hidden or shown in the order of a map, and the probability of the predicted class is measured. A gain above 0
    means: better than a random order, or better than starting at the centre of the image.
    """
    from dmst.analysis.foreground import foreground as against_masks
    from dmst.analysis.scored import scored as curves
    from dmst.errors import choose

    tests = list(dict.fromkeys(choose("test", name, TESTED) for name in test))
    options = {"layer": layer, "tests": tests, "steps": steps, "draws": draws}
    with shared.opened([weights], data, split, data_dir, limit, batch_size, device, unverified=unverified) as [(model, images)]:
        with counted("curves", images.count) as tick:
            scores = curves(model, images, **options, tick=tick)  # type: ignore[arg-type]
        masks = None
        if foreground and images.has_masks:
            with counted("masks", images.count) as tick:
                masks = against_masks(model, images.masked(), tick=tick)
    if as_json:
        say(json.dumps({"sample": images.name, "scored": scores.to_dict(), "foreground": masks and masks.to_dict()}))
        return
    orders = {score.order for score in scores.scores}
    words = {name: word for name, word in (TESTED | ORDERS).items() if name in {*tests, *orders}} | {"area": AREA}
    rows = [
        (score.test, score.order, f"{score.area.mean:.3f}", _signed(score.better), _signed(score.ahead))
        for score in scores.scores
    ]
    columns = ("test", "ranked by", "area", "over random (95 %)", "over centre (95 %)")
    shared.show(f"{scores.model}, {images.name}", columns, rows, words)
    say(scores.verdict)
    if masks is not None:
        _show_masks(masks)


def _signed(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.mean:+.3f} ({interval.low:+.2f} {interval.high:+.2f})"


def _show_masks(found: Foreground) -> None:
    """Three measures of the best head of each layer, and of the head in the middle."""
    rows = [[row.layer, *(f"{_short(row.best[x])} {row.median[x]:.2f}" for x in MEASURES)] for row in found.layers]
    rows += [["all", *(_short(found.best[x]) for x in MEASURES)], ["centre", *(_short(found.centre[x]) for x in MEASURES)]]
    shared.show("Maps against masks", ("layer", *MEASURES.values()), rows)
    say(
        f"{found.what} of the best head (95 % interval), chosen on the other half of the images; then the median head. "
        f"centre: a map of the image centre, without a network. A random peak is on the object with probability "
        f"{found.share:.2f}.",
        found.verdict,
    )


def _short(interval: Interval) -> str:
    low, high = (f"{end:.2f}".removeprefix("0") for end in (interval.low, interval.high))
    return f"{interval.mean:.2f} ({low}-{high})"
