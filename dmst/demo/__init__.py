"""`dmst demo` (and `make demo`): a DMST learns to read digits on a CPU beside its twins, and a page shows what it computes.

    runs/demo/report.html     the page
    runs/demo/results.json    recipe, versions, and every run: loss and accuracy by epoch, seconds, parameters
    runs/demo/models/         the trained networks, for dmst.load_model

Runs are shared out to one process per core, each on one thread, so figures do not depend on how many cores there are. An
earlier demo in the same folder is kept beside it as runs/demo-1, -2, ...
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import platform
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import dmst
from dmst import whole
from dmst.data.digits import digits
from dmst.demo.training import Recipe, Run, train
from dmst.errors import DmstError, OptionError, SaveError
from dmst.models import load_model, save_model

TWINS = ("tost_digits", "vit_digits")
PATIENCE = 300.0  # seconds without a word from any run


class Job(NamedTuple):
    model: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.model}-seed{self.seed}"


class Results(NamedTuple):
    runs: list[Run]
    recipe: Recipe
    seconds: float

    def of(self, model: str) -> list[Run]:
        return sorted((run for run in self.runs if run.model == model), key=lambda run: run.seed)


def run_demo(out: str | Path = "runs/demo", *, seeds: int = 3, epochs: int = Recipe.epochs, workers: int | None = None) -> Path:
    """Train, print the table, write the report; returns its path."""
    for name, value, low in (("seeds", seeds, 1), ("epochs", epochs, 1), ("workers", 1 if workers is None else workers, 1)):
        if type(value) is not int or value < low:
            raise OptionError(f"{name} is {value!r}: it must be a whole number of at least {low}.")
    digits()  # a missing library is said before anything starts
    out, console, recipe = Path(out), Console(), Recipe(epochs=epochs)
    jobs = [Job("vit_digits", 0), *(Job("dmst_digits", seed) for seed in range(seeds)), Job("tost_digits", 0)]
    models = _fresh(out, console) / "models"
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    console.print(f"[bold]dmst demo[/]: {len(jobs)} small networks learn to read digits, {workers} at a time on the CPU.")
    begun = time.perf_counter()
    runs = _train_all(jobs, models, recipe, workers, console)
    results = Results(runs, recipe, time.perf_counter() - begun)
    whole.write_text(out / "results.json", json.dumps(_record(results), indent=1) + "\n")
    console.print(_table(results))
    from dmst.demo.page import write_page

    best = [load_model(models / Job(name, 0).folder) for name in ("dmst_digits", *TWINS)]
    report = write_page(out / "report.html", results, *best)
    console.print(f"[bold green]The report is {escape(str(report))}[/]", soft_wrap=True)
    console.print("Open it in a browser; it needs no network. Next: docs/tutorial.md; `dmst models` lists the networks.")
    trained = str(models / Job("dmst_digits", 0).folder)
    console.print(f"The network you just trained: dmst.load_model({trained!r})", soft_wrap=True, markup=False)
    return report


def _fresh(out: Path, console: Console) -> Path:
    """An empty folder `out`. An earlier demo there moves aside; anything else there is refused: nothing is lost."""
    try:
        if out.exists() and (not out.is_dir() or {x.name for x in out.iterdir()} - {"models", "results.json", "report.html"}):
            raise OptionError(f"{out} holds something else than a demo: choose another folder with --out.")
        if out.exists() and any(out.iterdir()):
            aside = next(x for x in (out.with_name(f"{out.name}-{n}") for n in itertools.count(1)) if not x.exists())
            out.rename(aside)
            console.print(f"The earlier demo is now {escape(str(aside))}.", soft_wrap=True)
        (out / "models").mkdir(parents=True)
    except OSError as error:
        raise SaveError(f"{out} cannot be written to ({error.strerror}): choose another folder with --out.") from error
    return out


def _train_all(jobs: Sequence[Job], folder: Path, recipe: Recipe, workers: int, console: Console) -> list[Run]:
    """Every job, shared out to `workers` processes; a bar for each job."""
    context = multiprocessing.get_context("spawn")
    todo: Any = context.Queue()
    news: Any = context.Queue()
    for index, job in enumerate(jobs):
        todo.put((index, job))
    for _ in range(workers):
        todo.put(None)
    processes = [context.Process(target=_work, args=(folder, recipe, todo, news), daemon=True) for _ in range(workers)]
    runs: dict[int, Run] = {}
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
    )
    try:
        for process in processes:
            process.start()
        with Progress(*columns, TextColumn("{task.fields[said]}"), console=console) as progress:
            bars = [progress.add_task(job.model, total=recipe.epochs, said="", start=False) for job in jobs]
            while len(runs) < len(jobs):
                index, kind, what = _next(news, processes)
                if kind == "failed":
                    raise DmstError(f"the demo stopped: {what}")
                if kind == "begun":
                    progress.start_task(bars[index])
                elif kind == "epoch":
                    progress.update(bars[index], advance=1, said=f"reads {what:.1%}")
                else:
                    runs[index] = Run(**what)
    finally:
        for process in (p for p in processes if p.pid is not None):
            if len(runs) < len(jobs):
                process.terminate()
            process.join()
    return [runs[index] for index in range(len(jobs))]


def _next(news: Any, processes: Sequence[Any]) -> tuple[int, str, Any]:
    """The next word from a run. A process that died without one is a failure, not a wait."""
    asked = time.monotonic()
    while True:
        try:
            return news.get(timeout=1)
        except queue.Empty:
            for process in processes:
                if process.exitcode:
                    hint = " (a script must call run_demo under `if __name__ == '__main__':`)" if process.exitcode == 1 else ""
                    return -1, "failed", f"a process ended with code {process.exitcode}{hint}"
            if time.monotonic() - asked > PATIENCE:
                return -1, "failed", f"no epoch ended in {PATIENCE:.0f} s"


def _work(folder: Path, recipe: Recipe, todo: Any, news: Any) -> None:
    """Runs, one after the other, in a process of their own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    torch.set_num_threads(1)
    try:
        split = digits()
        while (item := todo.get()) is not None:
            index, job = item
            news.put((index, "begun", None))
            model, run = train(job.model, job.seed, split, recipe, partial(_say, news, index))
            save_model(model, folder / job.folder, overwrite=True)
            news.put((index, "done", asdict(run)))
    except Exception as error:
        news.put((-1, "failed", f"{type(error).__name__}: {error}"))


def _say(news: Any, index: int, accuracy: float) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit(1)  # nobody is waiting for the rest
    news.put((index, "epoch", accuracy))


def _table(results: Results) -> Table:
    table = Table("network", "attention", "held-out digits read", "runs", "parameters", "training images/s")
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
        operator = dmst.models.model_config(name).operator
        rows.append(
            (name, operator, f"{read.mean() * 100:.1f} %{spread}", str(len(runs)), f"{runs[0].parameters:,}", f"{speed:,.0f}")
        )
    return rows


def versions() -> dict[str, str]:
    return {"dmst": dmst.__version__, "torch": torch.__version__, "Python": platform.python_version()}


def _record(results: Results) -> dict[str, Any]:
    return {
        "recipe": asdict(results.recipe),
        "versions": versions(),
        "seconds": round(results.seconds, 1),
        "runs": [asdict(run) for run in results.runs],
    }
