"""Several runs that share a device from one process: each on a stream of its own, all begun before any is looked at.

A small network leaves a large GPU idle most of the time; a few at once fill it. Each run is the one that it would be alone.
Runs that draw (stochastic depth, dropout) take turns on one stream: torch writes the seed of all its graphs to one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from dmst.data.loader import Batch, Shard, TrainStream
from dmst.engine import prepare
from dmst.engine.distributed import Group
from dmst.engine.recipe import Recipe
from dmst.engine.train_step import StepMetrics, TrainStep


class Run(NamedTuple):
    work: TrainStep
    stream: TrainStream
    where: Any  # its stream on the device


def start(recipe: Recipe, sets: prepare.Sets, group: Group) -> Run:
    """A run at its first step."""
    model = prepare.build_model(recipe, sets.train.classes, sets.channels).to(group.device)
    work = TrainStep(model, recipe, group)
    stream = stream_of(work, sets, group.device, compiled=recipe.run.compile or work.recorded)
    if group.device.type != "cuda" or work.random:
        return Run(work, stream, nullcontext())
    run = Run(work, stream, torch.cuda.stream(torch.cuda.Stream(group.device)))
    wait([run])  # the current stream may still be writing the first weights
    return run


def wait(runs: Sequence[Run]) -> None:
    """From here on the runs' streams see what the current one has done."""
    for run in runs:
        if isinstance(run.where, torch.cuda.StreamContext) and run.where.stream is not None:
            run.where.stream.wait_stream(torch.cuda.current_stream(run.work.group.device))


def join(runs: Sequence[Run]) -> None:
    """From here on the current stream sees what the runs' streams have done: the last step's weights."""
    for run in runs:
        if isinstance(run.where, torch.cuda.StreamContext) and run.where.stream is not None:
            torch.cuda.current_stream(run.work.group.device).wait_stream(run.where.stream)


def stream_of(work: TrainStep, sets: prepare.Sets, device: torch.device, *, compiled: bool = False) -> TrainStream:
    run, data = work.recipe.run, work.recipe.data
    view = prepare.view_of(work.model, data.crop_pct)
    shard = Shard(micro_steps=run.accumulate)
    return TrainStream(
        sets.train, view, work.recipe.augment, batch_size=run.batch_size, seed=run.seed, shard=shard, device=device,
        path=data.path, bad=sets.bad_train, compiled=compiled,
    )  # fmt: skip


def step(runs: Sequence[Run], batches: Sequence[Iterator[Batch]], number: int, factor: float) -> list[StepMetrics]:
    """Step `number` of each, learning rates at `factor` of their peaks."""
    told = []
    for run, its_batches in zip(runs, batches, strict=True):
        with run.where:
            told.append(run.work.step(number, its_batches, float(run.work.recipe.run.batch_size), factor, list))
    return told
