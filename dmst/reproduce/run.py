"""Run what a table lacks: the seeds of a cell at once on one device, a line in the ledger for each when it is done.

Before a compiled cell is trained, its first gradients are compared with those of the plain network: compilers err.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional as F

from dmst import provenance
from dmst.analysis import probes
from dmst.data.loader import EvalStream
from dmst.engine import prepare, several
from dmst.engine.console import Clock, Quiet
from dmst.engine.distributed import Group, joined
from dmst.engine.evaluate import evaluate
from dmst.engine.optim import lr_factor
from dmst.engine.sections import Recipe
from dmst.engine.train_step import without_cudnn_attention
from dmst.errors import DmstError
from dmst.models import VisionModel, save_model
from dmst.reproduce import ledger
from dmst.reproduce.tables import TABLES, Cell, Table

LOOKED_AT = 256  # test images whose layers are looked at
APART = 5e-2  # of bfloat16 gradients, compiled and plain; those that a compiler got wrong were off by 9 % and more


def missing(table: Table, lines: Sequence[ledger.Line]) -> list[tuple[Cell, list[int]]]:
    """The cells that lack runs, and the seeds that they lack."""
    found = []
    for cell in table.cells:
        done = ledger.runs_of(lines, ledger.config_of(table.recipe_of(cell, 0)))
        if lacking := [seed for seed in range(cell.seeds) if seed not in done]:
            found.append((cell, lacking))
    return found


def run_table(
    name: str,
    folder: Path,
    *,
    data_dir: str | None,
    device: str | None,
    at_once: int,
    commit: str | None,
    weights: Path | None = None,
    cells: Sequence[str] = (),
    watch: Quiet | None = None,
) -> None:
    """Every missing run of a table (or of some of its cells) into its file of the ledger, but for those that another process
    is at: several with at_once=1 share the seeds of a cell.

    The networks are saved in `weights`, if given, each in a folder named by its config and seed. A cell that fails is told of
    when the others are done: it costs them nothing.
    """
    table, watch = TABLES[name], watch or Quiet()
    failed = []
    with joined(device) as group:
        for cell in (each for each in table.cells if not cells or each.name in cells):
            while lacking := dict(missing(table, ledger.read(folder))).get(cell, []):
                with _claimed(folder, ledger.config_of(table.recipe_of(cell, 0)), lacking, at_once) as mine:
                    still = dict(missing(table, ledger.read(folder))).get(cell, [])
                    if not mine:
                        watch.say(f"{name}: {cell.name}: another process is at it")
                        break
                    try:
                        if some := [seed for seed in mine if seed in still]:  # or done since it was seen to be missing
                            _run(name, cell, some, folder, data_dir, group, provenance.commit(commit), weights, watch)
                    except Exception as error:  # compilers and devices fail in many ways
                        kind = "" if isinstance(error, DmstError) else f"{type(error).__name__}: "
                        failed.append(f"{cell.name}: {kind}{error}")
                        watch.say(f"{name}: {failed[-1]}")
                        break
    if failed:
        raise DmstError(f"{len(failed)} of {len(table.cells)} cells of {name} failed: " + " | ".join(failed))


@contextmanager
def _claimed(folder: Path, config: str, seeds: Sequence[int], most: int) -> Iterator[list[int]]:
    """Of these seeds the first few that nobody is at, for this process alone as long as the block lasts."""
    with ExitStack() as held:
        mine: list[int] = []
        for seed in seeds:
            if len(mine) < most and held.enter_context(ledger.claimed(folder, f"{config}-{seed}")):
                mine.append(seed)
        yield mine


def _run(
    name: str, cell: Cell, seeds: Sequence[int], folder: Path, data_dir: str | None, group: Group, commit: str,
    weights: Path | None, watch: Quiet,
) -> None:  # fmt: skip
    """Some seeds of a cell at once, and their lines."""
    table = TABLES[name]
    recipes = [table.recipe_of(cell, seed) for seed in seeds]
    starts = [started(recipe, cell, weights) for recipe in recipes]
    began = time.monotonic()
    sets = prepare.open_sets(recipes[0], data_dir=data_dir)
    watch.say(f"{name}: {cell.name}, {len(seeds)} runs at once")
    results = train_several(starts, sets, group, watch=watch)
    seconds = (time.monotonic() - began) / len(seeds)
    for seed, recipe, (result, model) in zip(seeds, recipes, results, strict=True):
        if weights is not None:
            save_model(model, weights_of(recipe, weights), overwrite=True)
        line = {
            "table": name, "cell": cell.name, "seed": seed, "config": ledger.config_of(recipe),
            "recipe": cell.recipe or table.recipe, "changes": table.changes_of(cell, seed), "data": data_of(sets),
            "commit": commit, "device": provenance.device_name(group.device),
            "versions": provenance.versions(), "date": datetime.date.today().isoformat(),
            "seconds": round(seconds, 1), **result,
        }  # fmt: skip
        ledger.add(folder / f"{name}.jsonl", line)
        told = result["metrics"]
        score, loss = f"{100 * told['top1']:.2f} %", f"loss {told['train_loss']:.4f}"
        watch.say(f"{name}: {cell.name}, seed {seed}: {score}, {loss}, {seconds:.1f} s")


def weights_of(recipe: Recipe, weights: Path) -> Path:
    return weights / f"{ledger.config_of(recipe)}-{recipe.run.seed}"


def started(recipe: Recipe, cell: Cell, weights: Path | None) -> Recipe:
    """The recipe, with the folder of the weights that it starts from."""
    if not cell.start:
        return recipe
    best = TABLES["best"]
    source = next(each for each in best.cells if each.name == cell.start)
    folder = None if weights is None else weights_of(best.recipe_of(source, recipe.run.seed), weights)
    if folder is None or not folder.is_dir():
        raise DmstError(f"it starts from {cell.start} of the table best: run that first, with the same --weights DIR.")
    return replace(recipe, model=replace(recipe.model, init_from=str(folder)))


def data_of(sets: prepare.Sets) -> dict[str, Any]:
    images = [len(each) for each in (sets.train, sets.eval) if each is not None]
    return {"name": sets.train.name, "variant": sets.train.variant, "images": images, "fingerprint": sets.fingerprint}


def train_several(
    recipes: Sequence[Recipe], sets: prepare.Sets, group: Group, *, watch: Quiet | None = None
) -> list[tuple[dict[str, Any], VisionModel]]:
    """Recipes that differ in their seed alone, from first step to last; each then evaluated once: what is told, its model."""
    torch.compiler.reset()  # after a few networks of one shape the compiler would give up, and run the next ones plainly
    runs = [several.start(recipe, sets, group) for recipe in recipes]
    recipe, stream = recipes[0], runs[0].stream
    if recipe.run.compile:
        check_compiled(runs[0])
        several.wait(runs)  # for the statistics that it put back
    steps = recipe.schedule.epochs * stream.steps_per_epoch
    peak = recipe.optim.lr * recipe.lr_scale
    batches = [run.stream.batches(0, steps) for run in runs]
    losses, clock, watch = [0.0] * len(runs), Clock(), watch or Quiet()
    watch.begin(0, steps)
    try:
        for number in range(steps):
            factor = lr_factor(number, steps, stream.steps_per_epoch, recipe.schedule, peak)
            told = several.step(runs, batches, number, factor)
            if number >= steps - stream.steps_per_epoch:  # the last epoch
                losses = [sum_ + each.loss / stream.steps_per_epoch for sum_, each in zip(losses, told, strict=True)]
            lap = clock.lap()
            watch.step(number + 1, steps, {
                "epoch": round((number + 1) / stream.steps_per_epoch, 2), "seconds": lap,
                "loss": fmean(each.loss for each in told),
                "accuracy": fmean(each.accuracy for each in told), "images_per_s": len(runs) * recipe.run.batch_size / lap,
            })  # fmt: skip
    finally:
        watch.end()
    several.join(runs)
    results = [(judged(run, sets, group, loss), run.work.final) for run, loss in zip(runs, losses, strict=True)]
    for run in runs:
        run.work.leave()
    return results


def judged(run: several.Run, sets: prepare.Sets, group: Group, train_loss: float) -> dict[str, Any]:
    assert sets.eval is not None
    model, recipe = run.work.final, run.work.recipe
    size = min(1000, len(sets.eval))
    stream = EvalStream(sets.eval, prepare.view_of(model, recipe.data.crop_pct), batch_size=size, device=group.device)
    score = evaluate(model, stream, group, amp=recipe.run.amp)
    images = next(iter(stream)).images[:LOOKED_AT]
    metrics = score.told() | {"train_loss": train_loss, "layers": probes.layers(model, images) | zeros(model, images)}
    return {"parameters": sum(p.numel() for p in model.parameters()), "metrics": metrics}


@torch.no_grad()
def zeros(model: Any, images: torch.Tensor) -> dict[str, list[float]]:
    """By layer: the share of memberships that are exactly 0, of tokens that belong nowhere, and of gates that are 0."""
    out: dict[str, list[float]] = {"zero_memberships": [], "idle_tokens": [], "zero_gates": []}
    with probes.only_looking(model):
        parts = [layer.parts for layer in model.trace(images).layers]
    for part in parts:
        if part.membership is not None:
            out["zero_memberships"].append(round((part.membership == 0).double().mean().item(), 4))
            out["idle_tokens"].append(round((part.membership == 0).all(1).double().mean().item(), 4))
        if part.gate is not None:
            out["zero_gates"].append(round((part.gate == 0).double().mean().item(), 4))
    return {name: values for name, values in out.items() if values}


@without_cudnn_attention()
def check_compiled(run: several.Run) -> None:
    """Gradients of the first batch, compiled against plain."""
    work = run.work
    batch = next(run.stream.batches(0, 1))
    found = []
    for net in (work.model, work.net):
        net.train()
        work._seed(0, 0)  # both leave out the same samples' steps
        loss = F.cross_entropy(work.logits(net, batch.images), batch.targets)
        grads = torch.autograd.grad(loss, work.parameters)
        found.append(torch.cat([grad.flatten().double() for grad in grads]))
    apart = ((found[0] - found[1]).norm() / found[0].norm()).item()
    for now, before in work._statistics:  # which the two passes moved
        torch._foreach_copy_(now, before)
    if not apart <= APART:
        raise DmstError(f"compiled gradients are {apart:.1%} off the plain ones: set run.compile=false for this cell.")
