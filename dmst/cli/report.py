"""`dmst report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmst.cli.analyze import Data, DataDir, Device, Limit, Split, Weights, opened
from dmst.cli.progress import counted
from dmst.terminal import say
from dmst.words import fitting


def report(
    weights: Weights = "dmst_cifar10",
    out: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="The page to write. Default: NAME-report.html in this folder.")
    ] = None,
    data: Data = None,
    split: Split = "",
    data_dir: DataDir = None,
    limit: Limit = 1000,
    device: Device = None,
) -> None:
    """Write an HTML page about a network: how good it is, and what its layers do.

    It shows accuracy, confusion, calibration, rates, certificates, gates, and predictions with maps.

    dmst report

    dmst report runs/cifar --data-dir DIR

    The page is a single file. It works offline and runs no script.
    """
    from dmst.analysis.network_report import write_network_report
    from dmst.analysis.run_journal import Run
    from dmst.engine import journal
    from dmst.engine.prepare import RECIPE
    from dmst.models import shipped

    folder, run = Path(weights), None
    if (folder / journal.NAME).is_file():
        run = Run(list(journal.read(folder / journal.NAME)), (folder / RECIPE).read_text(encoding="utf-8"))
    with opened([weights], data, split, data_dir, limit, 64, device) as [(model, images)]:
        measured = shipped.measurement(weights) if weights in shipped.SHIPPED and not folder.is_dir() else None
        page = out or f"{fitting(folder.resolve().name)}-report.html"
        with counted(images.name, 2 * images.count) as tick:
            say(write_network_report(
                page, model, images, images.name, title=f"{folder.name or weights}: network report", titles=images.titles,
                measured=measured, run=run, tick=tick,
            ))  # fmt: skip
