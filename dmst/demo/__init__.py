"""`dmst demo` (and `make demo`): a DMST learns to read digits on a CPU beside its twins, and a page shows what it computes.

    runs/demo/report.html           the page
    runs/demo/results.json          recipe, versions, and every run: loss and accuracy by epoch, seconds, parameters
    runs/demo/dmst_digits-seed0/    a run, and so on (runs.py); dmst.load_model reads its final/

Runs are shared out to one process per core, each on one thread, so figures do not depend on how many cores there are. A demo
that was cut short goes on by the same command. One that has ended is kept beside the new one as runs/demo-1, -2, ...
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text

from dmst import atomic
from dmst.demo.runs import Job, Run, train_all
from dmst.engine.folder import RunFolder
from dmst.engine.prepare import RECIPE
from dmst.engine.recipe import Recipe
from dmst.engine.train_loop import FINAL, versions
from dmst.errors import OptionError, SaveError, Stopped, need
from dmst.models import load_model, model_config
from dmst.terminal import Terminal

TWINS = ("tost_digits", "vit_digits")
RUN = re.compile(r"(dmst|tost|vit)_digits-seed\d+")
FILES = re.compile(r"\.?(results\.json|report\.html)(\.\d+)?")  # also half-written ones, which a kill leaves
EARLIER = "models"  # where demos used to keep their networks


class Results(NamedTuple):
    runs: list[Run]
    recipe: Recipe  # of the first run of DMST; the others differ in network and seed

    def of(self, model: str) -> list[Run]:
        return sorted((run for run in self.runs if run.model == model), key=lambda run: run.seed)


def run_demo(out: str | Path = "runs/demo", *, seeds: int = 3, epochs: int = 16, workers: int | None = None) -> Path:
    """Train, print the table, write the report; returns its path."""
    for name, value, low in (("seeds", seeds, 1), ("epochs", epochs, 1), ("workers", 1 if workers is None else workers, 1)):
        if type(value) is not int or value < low:
            raise OptionError(f"{name} is {value!r}: it must be a whole number, at least {low}.")
    need("sklearn.datasets", "demo")  # a missing library is said before anything starts
    out, console = Path(out), Terminal()
    jobs = [Job("vit_digits", 0), *(Job("dmst_digits", seed) for seed in range(seeds)), Job("tost_digits", 0)]
    recipes = {job: job.recipe(epochs) for job in jobs}
    _make_ready(out, {job.folder: recipe for job, recipe in recipes.items()}, console)
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    told = f": {len(jobs)} small networks learn to read digits on the CPU, {workers} at a time."
    console.print(Text.assemble(("dmst demo", "bold"), told))
    try:
        runs = train_all(recipes, out, workers, console)
    except KeyboardInterrupt:
        told = f"The demo was stopped. It is saved in {out}: run the same command again to continue."
        raise Stopped(told, signal.SIGINT) from None
    first = Job("dmst_digits", 0)
    results = Results(runs, recipes[first])
    atomic.write_text(out / "results.json", json.dumps(_record(results), indent=1) + "\n")
    console.print(_table(results))
    from dmst.demo.page import write_page

    shown = [load_model(out / Job(name, 0).folder / FINAL) for name in ("dmst_digits", *TWINS)]
    report = write_page(out / "report.html", results, *shown)
    console.print(f"The report is {report}", style="bold green", soft_wrap=True)
    console.print("Open it in a browser; it works offline. Next: docs/tutorial.md, or `dmst models` for a list of networks.")
    trained = str(out / first.folder / FINAL)
    console.print(f"Load the network you just trained: dmst.load_model({trained!r})", soft_wrap=True)
    return report


def _make_ready(out: Path, recipes: Mapping[str, Recipe], console: Terminal) -> None:
    """The folder `out`, for runs of these names. A demo that was cut short stays, to be gone on with; one that has ended, or
    is of other runs, moves aside; anything else there is refused: nothing is lost."""
    try:
        there = sorted(out.iterdir()) if out.is_dir() else []
        if out.exists() and (not out.is_dir() or not all(_is_ours(x.name) for x in there)):
            raise OptionError(f"{out} contains files that are not of a demo: choose another folder with --out.")
        runs = [x for x in there if RUN.fullmatch(x.name)]
        for run in runs:
            with RunFolder(run):  # or an error: another process is in it
                pass
        ended = any(x.name in ("report.html", EARLIER) for x in there)
        if there and (ended or not all(_is_one_of(run, recipes) for run in runs)):
            aside = next(x for x in (out.with_name(f"{out.name}-{n}") for n in itertools.count(1)) if not x.exists())
            out.rename(aside)
            console.print(f"The earlier demo was moved to {aside}.", soft_wrap=True)
        elif runs:
            console.print(f"Continuing the demo in {out}.", soft_wrap=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"{out} cannot be written ({error.strerror}): choose another folder with --out.") from error


def _is_ours(name: str) -> bool:
    return bool(RUN.fullmatch(name) or FILES.fullmatch(name)) or name == EARLIER


def _is_one_of(run: Path, recipes: Mapping[str, Recipe]) -> bool:
    """Whether a run began as the one of this name would; one that was killed before it said how, has not begun."""
    said = run / RECIPE
    return run.name in recipes and (not said.exists() or said.read_text(encoding="utf-8") == recipes[run.name].to_toml())


def _table(results: Results) -> Table:
    table = Table("network", "attention", "held-out accuracy", "runs", "parameters", "training images/s")
    for name, *rest in summary(results):
        table.add_row(name, *rest, style="bold" if name == "dmst_digits" else None)
    return table


def summary(results: Results) -> list[tuple[str, ...]]:
    """One row a network, as text: name, operator, accuracy, runs, parameters, speed on one core."""
    rows: list[tuple[str, ...]] = []
    for name in ("dmst_digits", *TWINS):
        runs = results.of(name)
        read = torch.tensor([run.accuracies[-1] for run in runs], dtype=torch.float64)
        spread = f" ± {read.std() * 100:.1f}" if len(runs) > 1 else ""
        speed = sum(run.images for run in runs) / sum(run.seconds for run in runs)
        operator = model_config(name).operator
        rows.append(
            (name, operator, f"{read.mean() * 100:.1f} %{spread}", str(len(runs)), f"{runs[0].parameters:,}", f"{speed:,.0f}")
        )
    return rows


def _record(results: Results) -> dict[str, Any]:
    return {
        "recipe": results.recipe.tables(promise=False),
        "versions": versions(),
        "runs": [asdict(run) for run in results.runs],
    }
