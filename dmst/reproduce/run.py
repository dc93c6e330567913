"""Run what a table lacks: `dmst train` for every missing cell and seed, and a line in the ledger when it is done.

    <ledger>/.runs/<config>-<seed>/         the folder of a run while it trains: the same command goes on where it was killed,
                                            and its lock keeps other processes off, so that several share a table
    <weights>/<config>-<seed>/              the network, where --weights asks for it

A small network leaves a large GPU idle most of the time, so `at_once` runs share the device, each in a process of its own.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dmst import atomic, provenance
from dmst.analysis import probes
from dmst.engine import prepare
from dmst.engine.console import watcher
from dmst.engine.recipe import Recipe
from dmst.engine.train_loop import Result, train
from dmst.errors import DmstError, Stopped
from dmst.models import save_model
from dmst.reproduce import ledger
from dmst.reproduce.tables import TABLES, Cell, Table


@dataclass(frozen=True)
class Job:
    """One run: a cell and a seed of a table, and where things are."""

    name: str
    table: Table
    cell: Cell
    seed: int
    folder: Path  # of the ledger
    data_dir: str | None = None
    device: str | None = None
    commit: str | None = None
    weights: Path | None = None
    quiet: bool = False


def missing(table: Table, lines: Sequence[ledger.Line]) -> list[tuple[Cell, int]]:
    """The cells and seeds that no line is of."""
    found = []
    for cell in table.cells:
        done = table.runs_of(cell, lines)
        found += [(cell, seed) for seed in range(cell.seeds) if seed not in done]
    return found


def run_table(
    name: str, folder: Path, *, at_once: int = 1, cells: Sequence[str] = (), say: Callable[[str], None] = print, **places: Any
) -> None:
    """Every missing run of a table (or of some of its cells). A run that fails costs the others nothing: it is told at the end.

    `places` are the other fields of Job: data_dir, device, commit, weights, quiet.
    """
    table = TABLES[name]
    wanted = [each for each in missing(table, ledger.read(folder)) if not cells or each[0].name in cells]
    jobs = [Job(name, table, cell, seed, folder, **places) for cell, seed in wanted]
    if jobs:
        say(f"{name}: {len(jobs)} runs, {min(at_once, len(jobs))} at a time")
    failed = []
    for job, (fine, words) in zip(jobs, _outcomes(jobs, at_once), strict=True):
        say(f"{name}: {job.cell.name}, seed {job.seed}: {words}")
        failed += [] if fine else [f"{job.cell.name}, seed {job.seed}: {words}"]
    if failed:
        raise DmstError(f"{len(failed)} of {len(jobs)} runs of {name} failed: " + " | ".join(failed))


def _outcomes(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[bool, str]]:
    if at_once == 1 or len(jobs) < 2:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(min(at_once, len(jobs)), get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from pool.map(run, [replace(job, quiet=True) for job in jobs])


def run(job: Job) -> tuple[bool, str]:
    """Train, and add the line to the ledger. Whether all is well, and what came out, or why nothing did, in words."""
    config = job.table.config_of(job.cell)
    folder = job.folder / ".runs" / f"{config}-{job.seed}"
    if job.seed in job.table.runs_of(job.cell, ledger.read(job.folder)):
        return True, "done by another process"
    try:
        return True, _trained(job, folder)
    except Stopped:
        raise
    except Exception as error:  # compilers and devices fail in many ways
        if isinstance(error.__cause__, BlockingIOError):  # the lock of the run's folder
            return True, "another process is at it"
        return False, f"{'' if isinstance(error, DmstError) else type(error).__name__ + ': '}{error}"


def _trained(job: Job, folder: Path) -> str:
    recipe, began = job.table.recipe_of(job.cell, job.seed), time.monotonic()
    started = _started(recipe, job.cell, job.weights)
    every_epoch = replace(started, run=replace(started.run, eval_every=1))  # the training loss is that of the last epoch
    torch.compiler.reset()  # after a few networks of one shape the compiler would give up, and run the next ones plainly
    result = train(every_epoch, folder, data_dir=job.data_dir, device=job.device, watch=watcher(job.quiet))
    if job.weights is not None:
        save_model(result.model, weights_of(recipe, job.weights), overwrite=True)
    found = metrics(result)
    line = {
        "table": job.name, "cell": job.cell.name, "seed": job.seed, "config": ledger.config_of(recipe),
        "recipe": job.cell.recipe or job.table.recipe, "changes": job.table.changes_of(job.cell, job.seed),
        "data": _data(recipe, job.data_dir), "commit": provenance.commit(job.commit),
        "device": provenance.device_name(next(result.model.parameters()).device), "versions": provenance.versions(),
        "date": datetime.date.today().isoformat(), "seconds": round(time.monotonic() - began, 1),
        "parameters": sum(p.numel() for p in result.model.parameters()), "metrics": found,
    }  # fmt: skip
    ledger.add(job.folder / f"{job.name}.jsonl", line)
    atomic.remove(folder)
    return f"{100 * found['top1']:.2f} %, loss {found['train_loss']:.4f}, {line['seconds']} s"


def weights_of(recipe: Recipe, weights: Path) -> Path:
    return weights / f"{ledger.config_of(recipe)}-{recipe.run.seed}"


def _started(recipe: Recipe, cell: Cell, weights: Path | None) -> Recipe:
    """The recipe, with the folder of the weights that it starts from."""
    if not cell.start:
        return recipe
    best = TABLES["best"]
    source = next(each for each in best.cells if each.name == cell.start)
    folder = None if weights is None else weights_of(best.recipe_of(source, recipe.run.seed), weights)
    if folder is None or not folder.is_dir():
        raise DmstError(f"it starts from {cell.start} of the table best: run that first, with the same --weights DIR.")
    return replace(recipe, model=replace(recipe.model, init_from=str(folder)))


def _data(recipe: Recipe, data_dir: str | None) -> dict[str, Any]:
    sets = prepare.open_sets(recipe, data_dir=data_dir, look=False)
    images = [len(each) for each in (sets.train, sets.eval) if each is not None]
    return {"name": sets.train.name, "variant": sets.train.variant, "images": images, "fingerprint": sets.fingerprint}


def metrics(result: Result) -> dict[str, Any]:
    """The score of the last weights, the training loss of the last epoch, and what the layers do with the first test images."""
    assert result.score is not None and result.sample is not None
    last = [event for event in result.journal if event["event"] == "evaluation"][-1]
    layers = probes.layers(result.model, result.sample[0])
    return result.score.to_dict() | {"train_loss": last["train_loss"], "layers": layers}
