"""`dmst bench training`: images a second of the training engine, and what their input costs, in one run.

    whole      steps as `dmst train` takes them: input, gradients, the look at them, optimizer, running mean
    fixed      the same steps on one batch over and over: what is left without input
    input      the batches alone

The share of the input is 1 - fixed / whole, and input / whole beside it (the second counts also what hides behind other work).
Several runs share the device from one process (dmst.engine.several).
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dmst import atomic, provenance
from dmst.bench import record
from dmst.data.loader import Batch
from dmst.engine import prepare, several
from dmst.engine.distributed import Group, joined
from dmst.engine.recipe import Recipe, read_recipe
from dmst.engine.several import Run
from dmst.errors import DmstError
from dmst.terminal import Terminal, say

WARM = 12  # steps before the clock runs: compilation and recording are among them


def measure(
    recipe: str,
    changes: Sequence[str],
    *,
    data_dir: str | None,
    device: str | None,
    runs: Sequence[Sequence[int]],
    seconds: float,
    out: str | None,
    commit: str | None,
) -> int:
    """Measure each number of runs, or number and batch; print the table, write the rows."""
    asked, rows = read_recipe(recipe, changes), list[dict[str, Any]]()
    with joined(device) as group:
        facts = record.facts(group.device, provenance.commit(commit)) | {"recipe": asked.to_toml(), "units": __doc__}
        sets = prepare.open_sets(asked, data_dir=data_dir)
        facts |= {"data": sets.train.name, "variant": sets.train.variant, "images": len(sets.train)}
        for count, *batch in runs:
            more = [*changes, *(f"run.batch_size={size}" for size in batch)]
            recipes = [read_recipe(recipe, [*more, f"run.seed={asked.run.seed + i}"]) for i in range(count)]
            rows.append(_row(recipes, sets, group, seconds))
            say(json.dumps(rows[-1]))
            if out:
                atomic.write_text(Path(out), json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    table = Table("runs", "batch", "images/s", "step, ms", "less input", "input", "share", "loss")
    for row in rows:
        share = f"{row['share']:.1%} ({row['input_ms'] / row['step_ms']:.1%})"
        numbers = (f"{row[name]:.3f}" for name in ("step_ms", "fixed_ms", "input_ms"))
        table.add_row(str(row["runs"]), str(row["batch"]), f"{row['images_per_s']:,.0f}", *numbers, share, f"{row['loss']:.3f}")
    run = asked.run
    console = Terminal()
    console.print(f"{asked.model.name} on {facts['data']} {facts['variant']}, amp {run.amp}, {facts['device']}")
    console.print(table)
    return 0


def _row(recipes: Sequence[Recipe], sets: prepare.Sets, group: Group, seconds: float) -> dict[str, Any]:
    runs, size = [several.start(recipe, sets, group) for recipe in recipes], recipes[0].run.batch_size
    streams = [each.stream.batches(0, 10**9) for each in runs]
    held = [next(each.stream.batches(0, 1)) for each in runs]
    _check(runs[0], sets, held[0])
    steps, losses = _steps(runs, group, seconds, streams)
    step_ms = _time(lambda n: losses.append(_run(runs, streams, n)), steps, group)
    fixed_ms = _time(lambda n: _run(runs, [itertools.repeat(batch) for batch in held], n), steps, group)
    input_ms = _time(lambda n: _draw(runs, streams, n), steps, group)
    return {
        "runs": len(runs),
        "batch": size,
        "steps": steps,
        "images_per_s": round(len(runs) * size / step_ms * 1e3, 1),
        "step_ms": round(step_ms, 4),
        "fixed_ms": round(fixed_ms, 4),
        "input_ms": round(input_ms, 4),
        "share": round(1 - fixed_ms / step_ms, 4),
        "loss": losses[-1],
    }


def _check(run: Run, sets: prepare.Sets, batch: Batch) -> None:
    """The first batch must be what a CPU makes of the same numbers, or nothing is timed."""
    exact = next(several.stream_of(run.work, sets, torch.device("cpu")).batches(0, 1))
    for name in ("images", "targets", "labels", "weight"):
        mine, theirs = getattr(batch, name).cpu(), getattr(exact, name)
        if not torch.allclose(mine, theirs, atol=1e-5):
            raise DmstError(f"{name} of the first batch are off by {(mine - theirs).abs().max():.1e}: no time is told.")


def _steps(runs: list[Run], group: Group, seconds: float, streams: list[Iterator[Batch]]) -> tuple[int, list[float]]:
    """How many steps take so long; everything is compiled and recorded afterwards."""
    losses = [_run(runs, streams, WARM)]
    took = _time(lambda n: losses.append(_run(runs, streams, n)), WARM, group) / 1e3
    return max(10, int(seconds / took)), losses


def _time(call: Callable[[int], object], steps: int, group: Group) -> float:
    """Milliseconds a step."""
    _wait(group)
    begun = time.perf_counter()
    call(steps)
    _wait(group)
    return (time.perf_counter() - begun) / steps * 1e3


def _run(runs: list[Run], streams: Sequence[Iterator[Batch]], steps: int) -> float:
    """So many steps of each; the last loss of the first."""
    losses = [several.step(runs, streams, step, 1.0)[0].loss for step in range(steps)]
    return losses[-1]


def _draw(runs: list[Run], streams: Sequence[Iterator[Batch]], steps: int) -> None:
    for _ in range(steps):
        for each, batches in zip(runs, streams, strict=True):
            with each.where:
                next(batches)


def _wait(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
