"""`dmst demo`: a DMST learns to read digits on a CPU beside its twins ToST and ViT, and a page shows what it computes.

    runs/demo/report.html           the page
    runs/demo/results.json          recipe, versions, and every run: loss and accuracy by epoch, seconds, parameters
    runs/demo/dmst_digits-seed0/    a run, as `dmst train digits` leaves it; dmst.load_model reads its final/

Each run is a command `dmst train` on one thread, so results do not depend on the number of cores. A demo that was cut short
goes on by the same command. One that has ended is kept as runs/demo-1, -2, ...
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dmst import atomic
from dmst.analysis import pictures, report
from dmst.analysis.charts import Line
from dmst.analysis.membership import gate_by_class
from dmst.analysis.rate_page import rate_line
from dmst.analysis.rates import LayerRates, rates_at
from dmst.analysis.run_journal import Run
from dmst.engine import journal
from dmst.engine.prepare import RECIPE
from dmst.engine.recipe import Recipe, read_recipe
from dmst.engine.samples import sample
from dmst.engine.train_loop import FINAL, versions
from dmst.errors import DmstError, OptionError, SaveError, Stopped, need
from dmst.models import Trace, VisionModel, load_model, model_config
from dmst.terminal import Terminal

COLOURS = {"dmst_digits": "c1", "tost_digits": "c2", "vit_digits": "c3"}
MOST_MISTAKES = 24


class Job(NamedTuple):
    model: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.model}-seed{self.seed}"

    def changes(self, epochs: int) -> list[str]:
        """Of the recipe `digits`, for this network and seed; the warm-up keeps its share of the epochs."""
        usual = read_recipe("digits").schedule
        changes = {"model.name": self.model, "run.seed": self.seed, "schedule.epochs": epochs}
        changes["schedule.warmup_epochs"] = usual.warmup_epochs / usual.epochs * epochs
        return [f"{key}={value}" for key, value in changes.items()]

    def recipe(self, epochs: int) -> Recipe:
        return read_recipe("digits", self.changes(epochs))


def outcome(job: Job, folder: Path) -> dict[str, Any]:
    """What one run gave, by its journal. Losses and accuracies have one number per epoch; seconds are of training alone."""
    run = Run(list(journal.read(folder / journal.NAME)), (folder / RECIPE).read_text(encoding="utf-8"))
    return {
        "model": job.model,
        "seed": job.seed,
        "parameters": run.facts["parameters"],
        "losses": [event["train_loss"] for event in run.evaluations],
        "accuracies": [event["model"]["top1"] for event in run.evaluations],
        "seconds": run.pace * run.facts["steps"],
        "images": run.facts["steps"] * run.settings["run"]["batch_size"],
    }


def run_demo(out: str | Path = "runs/demo", *, seeds: int = 3, epochs: int = 16, workers: int | None = None) -> Path:
    """Train, print the table, write the report; returns its path."""
    need("sklearn.datasets", "demo")  # a missing library is said before anything starts
    out, console = Path(out), Terminal()
    jobs = [Job("vit_digits", 0), *(Job("dmst_digits", seed) for seed in range(seeds)), Job("tost_digits", 0)]
    make_ready(out, console)
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    words = f": {len(jobs)} small networks learn to read digits on the CPU, {workers} at a time."
    console.print(Text.assemble(("dmst demo", "bold"), words))
    try:
        train_all(jobs, epochs, out, workers, console)
    except KeyboardInterrupt:
        words = f"The demo was stopped. It is saved in {out}: run the same command again to continue."
        raise Stopped(words, signal.SIGINT) from None
    outcomes = [outcome(job, out / job.folder) for job in jobs]
    first = Job("dmst_digits", 0)
    recipe = first.recipe(epochs)
    record = {"recipe": recipe.tables(promise=False), "versions": versions(), "runs": outcomes}
    atomic.write_text(out / "results.json", json.dumps(record, indent=1) + "\n")
    table = Table("network", "attention", "held-out accuracy", "runs", "parameters", "training images/s")
    for row in summary(outcomes):
        table.add_row(*row, style="bold" if row[0] == "dmst_digits" else None)
    console.print(table)
    models = [load_model(out / Job(name, 0).folder / FINAL) for name in ("dmst_digits", "tost_digits")]
    page = write_page(out / "report.html", outcomes, recipe, *models)
    console.print(f"The report is {page}", style="bold green", soft_wrap=True)
    console.print("Open it in a browser; it works offline. Next: docs/tutorial.md, or `dmst models` for a list of networks.")
    console.print(f"Load the network you just trained: dmst.load_model({str(out / first.folder / FINAL)!r})", soft_wrap=True)
    return page


def make_ready(out: Path, console: Terminal) -> None:
    """The folder `out`. A demo that has ended moves aside; one that was cut short stays, and its runs go on."""
    ended = (out / "report.html").exists()
    if ended and not (out / "results.json").exists():
        raise OptionError(f"{out} contains the report of something else: choose another folder with --out.")
    try:
        if ended:
            aside = next(x for x in (out.with_name(f"{out.name}-{n}") for n in itertools.count(1)) if not x.exists())
            out.rename(aside)
            console.print(f"The earlier demo was moved to {aside}.", soft_wrap=True)
        elif out.exists():
            console.print(f"Continuing the demo in {out}.", soft_wrap=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"{out} cannot be written ({error.strerror}): choose another folder with --out.") from error


def train_all(jobs: list[Job], epochs: int, out: Path, workers: int, console: Terminal) -> None:
    """A command `dmst train` for every job, `workers` at a time, with a bar for each. Runs that had ended are not repeated."""
    waiting, running = list(jobs), dict[Job, subprocess.Popen[str]]()
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"), TimeElapsedColumn())
    with Progress(*bar, TextColumn("{task.fields[score]}"), console=console) as progress:
        bars = {job: progress.add_task(f"{job.model:<11} seed {job.seed}", total=epochs, score="", start=False) for job in jobs}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    job = waiting.pop(0)
                    progress.start_task(bars[job])
                    running[job] = _start(job, epochs, out / job.folder)
                time.sleep(0.3)
                for job, process in list(running.items()):
                    ended = process.poll() is not None
                    path = out / job.folder / journal.NAME
                    found = [e for e in journal.read(path) if e["event"] == "evaluation"] if path.is_file() else []
                    if found:
                        progress.update(bars[job], completed=len(found), score=f"accuracy {found[-1]['model']['top1']:.1%}")
                    if ended:
                        said = running.pop(job).communicate()[1]
                        if process.returncode:
                            raise DmstError(f"the demo stopped: {said.strip()}")
        finally:
            for process in running.values():
                process.terminate()  # it finishes its step and saves it
            for process in running.values():
                process.communicate()


def _start(job: Job, epochs: int, folder: Path) -> subprocess.Popen[str]:
    """In a session of its own: Ctrl-C is for the parent."""
    command = [
        sys.executable,
        "-m",
        "dmst",
        "train",
        "digits",
        "--out",
        str(folder),
        "--device",
        "cpu",
        "--quiet",
        "--no-report",
    ]
    command += [word for change in job.changes(epochs) for word in ("--set", change)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    null = subprocess.DEVNULL
    return subprocess.Popen(
        command, env=one_thread, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


# --- the page --------------------------------------------------------------------------------------------------------


def summary(outcomes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each network: name, operator, accuracy, runs, parameters, speed on one core."""
    rows: list[tuple[str, ...]] = []
    for name in COLOURS:
        runs = [run for run in outcomes if run["model"] == name]
        read = torch.tensor([run["accuracies"][-1] for run in runs], dtype=torch.float64)
        spread = f" ± {read.std() * 100:.1f}" if len(runs) > 1 else ""
        speed = sum(run["images"] for run in runs) / sum(run["seconds"] for run in runs)
        accuracy = f"{read.mean() * 100:.1f} %{spread}"
        rows.append(
            (name, model_config(name).operator, accuracy, str(len(runs)), f"{runs[0]['parameters']:,}", f"{speed:,.0f}")
        )
    return rows


def write_page(path: Path, outcomes: list[dict[str, Any]], recipe: Recipe, dmst: VisionModel, tost: VisionModel) -> Path:
    """Maps, gates, rates and mistakes are those of the first runs, on the held-out digits."""
    ((images, truth),) = sample(dmst, "digits", batch_size=1000)
    assert truth is not None
    labels, digits = truth.tolist(), [str(digit) for digit in range(10)]
    with torch.no_grad():
        mine, other = dmst.trace(images), tost.trace(images)
    gates: list[Tensor] = [layer.parts.gate for layer in mine.layers]  # type: ignore[misc]
    rates = {name: rates_at(model, images, ("input", "output")) for name, model in (("dmst", dmst), ("tost", tost))}
    examples = [labels.index(digit) for digit in range(10)]
    views = [_view(f"layer {i}", dmst, mine, i, images, examples) for i in range(len(gates))]
    last = len(other.layers) - 1
    views.append(_view(f"ToST, layer {last}", tost, other, last, images, examples))
    sure, says = mine.logits.softmax(-1).max(-1)
    wrong = (says != truth).nonzero().flatten()
    surest = wrong[sure[wrong].argsort(descending=True)][:MOST_MISTAKES].tolist()
    return report.write(
        path,
        "demo.html",
        title="DMST reads digits: a transformer you can look into",
        outcomes=outcomes,
        runs=[run for run in outcomes if run["model"] == "dmst_digits"],
        summary=summary(outcomes),
        losses=_curves(outcomes, "losses"),
        accuracies=_curves(outcomes, "accuracies", 100),
        views=views,
        chosen=len(gates) - 1,
        gates=torch.cat([gate_by_class(gate, truth, 10) for gate in gates], 1).tolist(),
        heads=gates[0].shape[1],
        on=[(gate != 0).double().sum(-1).mean().item() for gate in gates],
        rates=rates,
        rate_lines={quantity: _rate_lines(rates, quantity) for quantity in ("variational", "complete")},
        count=len(labels),
        wrong=len(wrong),
        mistakes=pictures.photos(dmst, images[surest], [labels[i] for i in surest], digits) if surest else [],
        recipe=recipe,
        usual=read_recipe("digits").schedule.epochs,
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
    )


def _curves(outcomes: list[dict[str, Any]], what: str, scale: float = 1) -> list[Line]:
    """A line for each network: the mean of its runs, in a band from the lowest to the highest."""
    lines = []
    for name, colour in COLOURS.items():
        rows = [run[what] for run in outcomes if run["model"] == name]
        epochs = [[scale * value for value in epoch] for epoch in zip(*rows, strict=True)]
        mean, low, high = ([each(epoch) for epoch in epochs] for each in (fmean, min, max))
        line = Line(name.removesuffix("_digits"), range(1, len(mean) + 1), mean, colour=colour)
        lines.append(line._replace(low=low, high=high) if len(rows) > 1 else line)
    return lines


def _rate_lines(rates: Mapping[str, Mapping[str, LayerRates]], quantity: str) -> list[Line]:
    lines = []
    for name, found in rates.items():
        colour = COLOURS[f"{name}_digits"]
        lines.append(rate_line(f"{name}, before the step", found["input"], quantity, colour))
        lines.append(rate_line(f"{name}, after the step", found["output"], quantity, colour, band=False, dashed=True))
    return lines


def _view(label: str, model: VisionModel, trace: Trace, layer: int, images: Tensor, chosen: list[int]) -> dict[str, Any]:
    """The maps of one layer: the chosen digits across, heads down."""
    low, high = pictures.colour_range(trace, [layer])
    every = pictures.tiles(trace, layer, low, high)
    heads = [(f"head {k}", [every[i][k] for i in chosen]) for k in range(len(every[0]))]
    shown = pictures.photos(model, images[chosen], range(10), [str(digit) for digit in range(10)])
    return {"label": label, "photos": shown, "rows": heads, "low": low, "high": high}
