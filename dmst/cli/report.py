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
    from dmst.analysis.run_report import run_sections
    from dmst.analysis.weights_report import write_weights_report
    from dmst.cli.progress import counted
    from dmst.engine import journal
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import RECIPE, read_weights
    from dmst.engine.samples import sample
    from dmst.models import shipped

    run = Path(weights)
    events = list(journal.read(run / "journal.jsonl")) if (run / "journal.jsonl").is_file() else []
    with joined(device) as group:
        model = read_weights(weights).to(group.device)
        before, after = run_sections(events, (run / RECIPE).read_text(encoding="utf-8"), model) if events else ((), ())
        looked = sample(model, data, run=run, split=split, data_dir=data_dir, limit=limit, device=group.device)
        page = out or f"{fitting(run.resolve().name)}-report.html"
        with counted(looked.name, 2 * looked.count) as tick:
            written = write_weights_report(
                page, model, looked, looked.name, weights=run.name or weights, titles=looked.titles,
                measured=shipped.measurement(weights) if weights in shipped.SHIPPED and not run.is_dir() else None,
                before=before, after=after, tick=tick,
            )  # fmt: skip
    say(written)
