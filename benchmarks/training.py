"""Images per second of the training engine, and what their input costs.

    python benchmarks/training.py cifar10 [--set run.compile=true] [--data-dir DIR] [--batch 512 2048] [--json FILE]

    step     steps as `dmst train` takes them: input, gradients, optimizer, running mean
    fixed    the same steps on one batch over and over: what is left without input
    input    the batches alone

`share` of the input is 1 - fixed / step. Before anything is timed, the first batch must be what a CPU makes of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import measure
import torch

from dmst.data.loader import Batch, Shard, TrainStream
from dmst.engine import prepare
from dmst.engine.distributed import Group, joined
from dmst.engine.recipe import Recipe, read_recipe
from dmst.engine.train_step import TrainStep
from dmst.models import VisionModel

WARM = 12  # steps before the clock runs: compilation and recording are among them


def fill_row(row: measure.Row, recipe: Recipe, sets: prepare.Sets, group: Group, seconds: float) -> None:
    model = prepare.build_model(recipe, sets.train.classes, sets.channels).to(group.device)
    run, stream = TrainStep(model, recipe, group), stream_of(model, recipe, sets, group.device)
    batches, held = stream.batches(0, 10**9), next(stream.batches(0, 1))
    exact = next(stream_of(model, recipe, sets, torch.device("cpu")).batches(0, 1))
    for name in ("images", "targets", "labels"):
        mine, theirs = getattr(held, name).cpu(), getattr(exact, name)
        if not torch.allclose(mine, theirs, atol=1e-5):
            row["failure"] = f"{measure.PARITY}: {name} of the first batch are off by {(mine - theirs).abs().max():.1e}"
            return
    losses = [take(run, batches, WARM)]
    steps = max(10, int(1e3 * seconds / per_step(lambda n: take(run, batches, n), WARM, group)))
    step = per_step(lambda n: losses.append(take(run, batches, n)), steps, group)
    fixed = per_step(lambda n: take(run, itertools.repeat(held), n), steps, group)
    alone = per_step(lambda n: list(itertools.islice(batches, n)), steps, group)
    row |= {"steps": steps, "images_per_s": 1e3 * row["batch"] / step, "step_ms": step}
    row |= {"fixed_ms": fixed, "input_ms": alone, "share": 1 - fixed / step, "loss": losses[-1]}


def stream_of(model: VisionModel, recipe: Recipe, sets: prepare.Sets, device: torch.device) -> TrainStream:
    """The batches of one process, as the training loop makes them."""
    run, view = recipe.run, prepare.view_of(model, recipe.data.crop_pct)
    compiled = run.compile or (run.graph and device.type == "cuda")
    return TrainStream(
        sets.good_train, view, recipe.augment, batch_size=run.batch_size, seed=run.seed, device=device, path=recipe.data.path,
        shard=Shard(micro_steps=run.accumulate), compiled=compiled,
    )  # fmt: skip


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


def take(run: TrainStep, batches: Iterator[Batch], steps: int) -> float:
    """So many steps; the last loss."""
    return [run.step(step, batches, 1.0).loss for step in range(steps)][-1]


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("recipe", nargs="?", default="cifar10", help="a recipe of `dmst recipes`, or a .toml file")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data-dir")
    parser.add_argument("--device")
    parser.add_argument("--batch", nargs="+", type=int, help="one row each; the recipe's if not given")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each of the three measurements of a row")
    ask = parser.parse_args()
    rows = measure.Rows("training", ask, ("batch",))
    asked = read_recipe(ask.recipe, ask.changes)
    rows.facts["recipe"] = asked.to_toml()
    with joined(ask.device) as group:
        sets = prepare.open_sets(asked, data_dir=ask.data_dir)
        for size in ask.batch or [asked.run.batch_size]:
            row: measure.Row = {"batch": size}
            with measure.attempting(row):
                fill_row(row, replace(asked, run=replace(asked.run, batch_size=size)), sets, group, ask.seconds)
            rows.add(row)
    rows.finish()


if __name__ == "__main__":
    main()
