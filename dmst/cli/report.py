"""`dmst report`."""

from __future__ import annotations

from pathlib import Path

import typer


def report(
    weights: str = typer.Argument("dmst_cifar10", help="A run, a saved model, or the name of one that ships."),
    out: str = typer.Option(None, metavar="FILE.html", help="Where the page goes; NAME-report.html here if not given."),
    data: str = typer.Option(
        None, help="A dataset or a folder; if not given, what a run was evaluated on, or the photographs that ship."
    ),
    split: str = typer.Option("test", help="test or train."),
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="Where the datasets are."),
    limit: int = typer.Option(1000, min=1, help="At most so many images, chosen by hash."),
    device: str = typer.Option(None, help="cpu, cuda or cuda:N; the best there is if not given."),
) -> None:
    """Write one page about a network: how good it is, and what its layers do.

    Accuracy, confusion, calibration, rates, certificates, gates, and answers with maps.

    dmst report

    dmst report runs/cifar --data-dir DIR

    A single file, which needs no network and runs no script.
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
        page = out or f"{run.resolve().name}-report.html"
        with counted(looked.name, 2 * looked.count) as tick:
            written = write_weights_report(
                page, model, looked, looked.name, weights=run.name or weights, titles=looked.titles,
                measured=shipped.measurement(weights) if weights in shipped.SHIPPED and not run.is_dir() else None,
                before=before, after=after, tick=tick,
            )  # fmt: skip
    typer.echo(f"{written}")
