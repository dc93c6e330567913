"""Images per second of the training engine, and what their input costs.

    python benchmarks/training.py cifar10 [--set run.compile=true] [--data-dir DIR] [--runs 1 2 1x2048] [--json FILE]

    step     steps as `dmst train` takes them: input, gradients, optimizer, running mean
    fixed    the same steps on one batch over and over: what is left without input
    input    the batches alone

`share` of the input is 1 - fixed / step. `--runs 2x512`: two runs with a batch of 512 share the device from one process
(dmst.engine.several). Before anything is timed, the first batch must be what a CPU makes of the same numbers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import measure
import torch

from dmst.data.loader import Batch
from dmst.engine import prepare, several
from dmst.engine.distributed import Group, joined
from dmst.engine.recipe import read_recipe
from dmst.engine.several import Run

WARM = 12  # steps before the clock runs: compilation and recording are among them


def fill_row(row: measure.Row, runs: list[Run], sets: prepare.Sets, group: Group, seconds: float) -> None:
    streams = [run.stream.batches(0, 10**9) for run in runs]
    held = [next(run.stream.batches(0, 1)) for run in runs]
    problem = first_batch_problem(runs[0], sets, held[0])
    if problem:
        row["failure"] = f"{measure.PARITY}: {problem}"
        return
    losses = [take(runs, streams, WARM)]
    steps = max(10, int(1e3 * seconds / per_step(lambda n: take(runs, streams, n), WARM, group)))
    step = per_step(lambda n: losses.append(take(runs, streams, n)), steps, group)
    fixed = per_step(lambda n: take(runs, [itertools.repeat(batch) for batch in held], n), steps, group)
    alone = per_step(lambda n: draw(runs, streams, n), steps, group)
    row |= {"steps": steps, "images_per_s": 1e3 * len(runs) * row["batch"] / step, "step_ms": step}
    row |= {"fixed_ms": fixed, "input_ms": alone, "share": 1 - fixed / step, "loss": losses[-1]}


def first_batch_problem(run: Run, sets: prepare.Sets, batch: Batch) -> str:
    exact = next(several.stream_of(run.work, sets, torch.device("cpu")).batches(0, 1))
    for name in ("images", "targets", "labels", "weight"):
        mine, theirs = getattr(batch, name).cpu(), getattr(exact, name)
        if not torch.allclose(mine, theirs, atol=1e-5):
            return f"{name} of the first batch are off by {(mine - theirs).abs().max():.1e}"
    return ""


def per_step(call: Callable[[int], object], steps: int, group: Group) -> float:
    """Milliseconds."""
    wait(group)
    begun = time.perf_counter()
    call(steps)
    wait(group)
    return (time.perf_counter() - begun) / steps * 1e3


def wait(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def take(runs: list[Run], streams: Sequence[Iterator[Batch]], steps: int) -> float:
    """So many steps of each run; the last loss of the first."""
    return [several.step(runs, streams, step, 1.0)[0].loss for step in range(steps)][-1]


def draw(runs: list[Run], streams: Sequence[Iterator[Batch]], steps: int) -> None:
    for _ in range(steps):
        for run, batches in zip(runs, streams, strict=True):
            with run.where:
                next(batches)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("recipe", nargs="?", default="cifar10", help="a recipe of `dmst recipes`, or a .toml file")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data-dir")
    parser.add_argument("--device")
    parser.add_argument("--runs", nargs="+", default=["1"], metavar="RUNS[xBATCH]")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each of the three measurements of a row")
    ask = parser.parse_args()
    rows = measure.Rows("training", ask, ("runs", "batch"))
    asked = read_recipe(ask.recipe, ask.changes)
    rows.facts["recipe"] = asked.to_toml()
    with joined(ask.device) as group:
        sets = prepare.open_sets(asked, data_dir=ask.data_dir)
        for text in ask.runs:
            count, _, batch = text.partition("x")
            size = int(batch or asked.run.batch_size)
            changes = [*ask.changes, f"run.batch_size={size}"]
            recipes = [read_recipe(ask.recipe, [*changes, f"run.seed={asked.run.seed + i}"]) for i in range(int(count))]
            row: measure.Row = {"runs": int(count), "batch": size}
            with measure.attempting(row):
                fill_row(row, [several.start(recipe, sets, group) for recipe in recipes], sets, group, ask.seconds)
            rows.add(row)
    rows.finish()


if __name__ == "__main__":
    main()
