"""The runs of the demo: each an engine run on one CPU thread, shared out to processes, with a bar for each.

    <out>/dmst_digits-seed0/    the folder of such a run, as `dmst train digits` leaves it; final/ holds the network

A run that was cut short goes on, one that had ended is not repeated: its journal tells what it came to.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dmst.engine.recipe import Recipe, read_recipe
from dmst.engine.train_loop import train
from dmst.errors import DmstError
from dmst.terminal import Terminal

PATIENCE = 300.0  # seconds without a word from any run
GRACE = 10.0  # seconds to finish a step and save it


class Job(NamedTuple):
    model: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.model}-seed{self.seed}"

    def recipe(self, epochs: int) -> Recipe:
        """`digits`, for this network and seed; the warm-up keeps its share of the epochs."""
        usual = read_recipe("digits").schedule
        warmup = usual.warmup_epochs / usual.epochs * epochs
        changes = {"model.name": self.model, "run.seed": self.seed}
        changes |= {"schedule.epochs": epochs, "schedule.warmup_epochs": warmup}
        return read_recipe("digits", [f"{key}={value}" for key, value in changes.items()])


@dataclass
class Run:
    """What one run gave."""

    model: str
    seed: int
    parameters: int
    losses: list[float]  # mean training loss, one an epoch
    accuracies: list[float]  # on the held-out images, one an epoch
    seconds: float  # of training alone
    images: int


def told(job: Job, recipe: Recipe, journal: Sequence[Mapping[str, Any]]) -> Run:
    """A run by its journal. What lies between two steps is training; evaluations, saving and the time between two commands
    are not."""
    start = next(event for event in journal if event["event"] == "start")
    evaluations = [event for event in journal if event["event"] == "evaluation"]
    between = [(a, b) for a, b in pairwise(journal) if a["event"] == b["event"] == "step"]
    pace = sum(b["time"] - a["time"] for a, b in between) / sum(b["step"] - a["step"] for a, b in between)
    return Run(
        job.model,
        job.seed,
        start["parameters"],
        [event["train_loss"] for event in evaluations],
        [event["model"]["top1"] for event in evaluations],
        pace * start["steps"],
        start["steps"] * recipe.run.batch_size,
    )


def train_all(recipes: Mapping[Job, Recipe], out: Path, workers: int, console: Terminal) -> list[Run]:
    """Every job in its folder below `out`, `workers` at a time."""
    context = multiprocessing.get_context("spawn")
    todo: Any = context.Queue()
    news: Any = context.Queue()
    for item in (*enumerate(recipes.items()), *[None] * workers):
        todo.put(item)
    processes = [context.Process(target=_work, args=(out, todo, news), daemon=True) for _ in range(workers)]
    runs: dict[int, Run] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
    )
    try:
        for process in processes:
            process.start()
        with Progress(*columns, TextColumn("{task.fields[said]}"), console=console) as progress:
            bars = [
                progress.add_task(f"{job.model:<11} seed {job.seed}", total=recipe.schedule.epochs, said="", start=False)
                for job, recipe in recipes.items()
            ]
            while len(runs) < len(recipes):
                index, kind, what = _next(news, processes)
                if kind == "failed":
                    raise DmstError(f"the demo stopped: {what}")
                if kind == "begun":
                    progress.start_task(bars[index])
                    continue
                if kind == "done":
                    runs[index] = Run(**what)
                    what = len(runs[index].accuracies), runs[index].accuracies[-1]
                progress.update(bars[index], completed=what[0], said=f"accuracy {what[1]:.1%}")
    finally:
        _end([process for process in processes if process.pid is not None], len(runs) == len(recipes))
    return [runs[index] for index in range(len(recipes))]


def _end(processes: Sequence[Any], finished: bool) -> None:
    """All at once; asked to end early, a run finishes its step and saves it."""
    for process in processes:
        if not finished:
            process.terminate()
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()


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
                return -1, "failed", f"no run finished an epoch in {PATIENCE:.0f} s"


def _work(out: Path, todo: Any, news: Any) -> None:
    """Runs, one after the other, in a process of their own."""
    os.setpgrp()  # out of Ctrl-C's reach: the parent answers it, with SIGTERM
    torch.set_num_threads(1)
    try:
        while (item := todo.get()) is not None:
            index, (job, recipe) = item
            news.put((index, "begun", None))
            result = train(recipe, out / job.folder, device="cpu", listeners=[partial(_hear, news, index)])
            news.put((index, "done", asdict(told(job, recipe, result.journal))))
    except Exception as error:
        news.put((-1, "failed", f"{type(error).__name__}: {error}"))


def _hear(news: Any, index: int, values: Mapping[str, Any], step: int) -> None:
    """An event of a run: evaluations are passed on."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit(1)  # nobody is waiting for the rest
    if "train_loss" in values:
        news.put((index, "epoch", (values["epoch"], values["model"]["top1"])))
