"""`dmst report`."""

from __future__ import annotations

from pathlib import Path

import typer

from dmst.terminal import say
from dmst.words import fitting


def report(
    weights: str = typer.Argument(
        "dmst_cifar10", help="A shipped network (`dmst models --shipped`), a saved model, or a finished run."
    ),
    out: str = typer.Option(None, metavar="FILE.html", help="The page to write. Default: NAME-report.html in this folder."),
    data: str = typer.Option(
        None, help="A dataset or a folder. Default: the images a run was evaluated on, else photos that ship with dmst."
    ),
    split: str = typer.Option("", help="test or train; if not given test, or all images where there are no test images."),
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets."),
    limit: int = typer.Option(1000, min=1, help="Use at most this many images, always the same ones."),
    device: str = typer.Option(None, help="cpu, cuda or cuda:N. Default: a GPU if there is one."),
) -> None:
    """Write an HTML page about a network: how good it is, and what its layers do.

    It shows accuracy, confusion, calibration, rates, certificates, gates, and predictions with maps.

    dmst report

    dmst report runs/cifar --data-dir DIR

    The page is a single file. It works offline and runs no script.
    """
    from dmst.analysis.network_report import write_network_report
    from dmst.analysis.run_journal import Run
    from dmst.cli.progress import counted
    from dmst.engine import journal
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import RECIPE, read_weights
    from dmst.engine.samples import sample
    from dmst.models import shipped

    folder, run = Path(weights), None
    if (folder / journal.NAME).is_file():
        run = Run(list(journal.read(folder / journal.NAME)), (folder / RECIPE).read_text(encoding="utf-8"))
    with joined(device) as group:
        model = read_weights(weights).to(group.device)
        looked = sample(model, data, run=folder, split=split, data_dir=data_dir, limit=limit, device=group.device)
        measured = shipped.measurement(weights) if weights in shipped.SHIPPED and not folder.is_dir() else None
        page = out or f"{fitting(folder.resolve().name)}-report.html"
        with counted(looked.name, 2 * looked.count) as tick:
            say(write_network_report(
                page, model, looked, looked.name, title=f"{folder.name or weights}: network report", titles=looked.titles,
                measured=measured, run=run, tick=tick,
            ))  # fmt: skip
