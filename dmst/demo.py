"""`dmst demo`: a DMST learns to read digits on a CPU beside its twins ToST and ViT, and a page shows what it computes.

    runs/demo/report.html           the page: that of `dmst report` for the first run of DMST, with all networks compared
    runs/demo/results.json          recipe, versions, and every run: loss and accuracy by epoch, seconds, parameters
    runs/demo/dmst_digits-seed0/    a run, as `dmst train digits` leaves it; dmst.load_model reads its final/

Each run is a command `dmst train` on one thread, so results do not depend on the number of cores. A demo that was cut short
goes on by the same command, and runs that have ended are not repeated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from dmst import atomic
from dmst.analysis.network_report import write_network_report
from dmst.analysis.run_journal import Run
from dmst.engine import journal
from dmst.engine.prepare import RECIPE
from dmst.engine.recipe import read_recipe
from dmst.engine.samples import sample
from dmst.engine.train_loop import FINAL, versions
from dmst.errors import DmstError, Stopped, need
from dmst.models import load_model, model_config
from dmst.terminal import Terminal

NETWORKS = ("dmst_digits", "tost_digits", "vit_digits")
COLUMNS = ("network", "attention", "held-out accuracy", "runs", "parameters", "training images/s")


def run_demo(out: str | Path = "runs/demo", *, seeds: int = 3, epochs: int = 16, workers: int | None = None) -> Path:
    """Train, print the table, write the report; returns its path."""
    need("sklearn.datasets", "demo")  # a missing library is said before anything starts
    out, console = Path(out), Terminal()
    jobs = [("vit_digits", 0), *(("dmst_digits", seed) for seed in range(seeds)), ("tost_digits", 0)]
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    words = f": {len(jobs)} small networks learn to read digits on the CPU, {workers} at a time."
    console.print(Text.assemble(("dmst demo", "bold"), words))
    outcomes = []
    try:
        with ThreadPoolExecutor(workers) as pool:
            for each in pool.map(lambda job: train_one(out, job[0], job[1], epochs), jobs):
                console.print(f"{each['model']}, seed {each['seed']}: accuracy {each['accuracies'][-1]:.1%}")
                outcomes.append(each)
    except KeyboardInterrupt:  # the runs have heard it too, and have saved their last step
        words = f"The demo was stopped. It is saved in {out}: run the same command again to continue."
        raise Stopped(words, signal.SIGINT) from None
    first = out / "dmst_digits-seed0"
    run = read_run(first)
    record = {"recipe": run.settings, "versions": versions(), "runs": outcomes}
    atomic.write_text(out / "results.json", json.dumps(record, indent=1) + "\n")
    rows = summary(outcomes)
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "dmst_digits" else None)
    console.print(table)
    model = load_model(first / FINAL)
    images = sample(model, "digits")
    compared = {"columns": COLUMNS, "rows": rows, "seeds": seeds}
    title = "DMST reads digits: a transformer you can look into"
    page = write_network_report(out / "report.html", model, images, images.name, title=title, run=run, compared=compared)
    console.print(f"The report is {page}", style="bold green", soft_wrap=True)
    console.print("Open it in a browser; it works offline. Next: docs/tutorial.md, or `dmst models` for a list of networks.")
    console.print(f"Load the network you just trained: dmst.load_model({str(first / FINAL)!r})", soft_wrap=True)
    return page


def read_run(folder: Path) -> Run:
    return Run(list(journal.read(folder / journal.NAME)), (folder / RECIPE).read_text(encoding="utf-8"))


def train_one(out: Path, model: str, seed: int, epochs: int) -> dict[str, Any]:
    """One run by `dmst train digits`, and what its journal says. Numbers are by epoch; seconds are of training alone."""
    folder, usual = out / f"{model}-seed{seed}", read_recipe("digits").schedule
    warmup = usual.warmup_epochs / usual.epochs * epochs  # its usual share of the epochs
    command = [sys.executable, "-m", "dmst", "train", "digits", "--out", str(folder)]
    command += ["--device", "cpu", "--quiet", "--no-report"]
    changes = {"model.name": model, "run.seed": seed, "schedule.epochs": epochs, "schedule.warmup_epochs": warmup}
    command += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=one_thread, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise DmstError(f"the demo stopped: {done.stderr.strip()}\nWith other options, choose another folder: --out DIR.")
    run = read_run(folder)
    return {
        "model": model,
        "seed": seed,
        "parameters": run.facts["parameters"],
        "losses": [event["train_loss"] for event in run.evaluations],
        "accuracies": [event["model"]["top1"] for event in run.evaluations],
        "seconds": run.pace * run.facts["steps"],
        "images": run.facts["steps"] * run.settings["run"]["batch_size"],
    }


def summary(outcomes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each network: name, operator, accuracy, runs, parameters, speed on one core."""
    rows: list[tuple[str, ...]] = []
    for name in NETWORKS:
        runs = [run for run in outcomes if run["model"] == name]
        read = [100 * run["accuracies"][-1] for run in runs]
        accuracy = f"{fmean(read):.1f} %" + (f" ± {stdev(read):.1f}" if len(runs) > 1 else "")
        speed = sum(run["images"] for run in runs) / sum(run["seconds"] for run in runs)
        operator, parameters = model_config(name).operator, f"{runs[0]['parameters']:,}"
        rows.append((name, operator, accuracy, str(len(runs)), parameters, f"{speed:,.0f}"))
    return rows
