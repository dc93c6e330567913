"""What will be trained, in one block of words, before the first step.

network      which one, how large             classes      how many, with their counts
starts from  which weights, or random         split        what is learned from, what is held out
images       their size, how they get there   device       where, in which precision
time         on a CPU: measured on a few images, and on a copy of the network
"""

from __future__ import annotations

import copy
import math
import time

import numpy as np
import torch

from dmst import provenance
from dmst.data.loader import TrainStream, View
from dmst.data.sets import ImageSet
from dmst.engine.prepare import Sets
from dmst.engine.recipe import Recipe
from dmst.models import VisionModel, shipped
from dmst.words import short, visible

SHOWN = 12  # classes that are named
TIMED = 8  # images of the step that is timed on a CPU


def summary(
    model: VisionModel, sets: Sets, stream: TrainStream, recipe: Recipe, *, steps: int, done: int, processes: int
) -> str:
    """The block; `done` of `steps` lie behind a run that goes on."""
    parameters = sum(p.numel() for p in model.parameters())
    rows = {
        "network": f"{visible(model.config.name)} ({model.config.operator}), {parameters:,} parameters",
        "starts from": _start(recipe),
        "images": _images(sets.good_train, stream.view, recipe),
        "classes": _classes(sets.train),
        "split": _split(sets, recipe),
        "device": _device(stream.device, recipe, processes),
        "time": _time(model, sets, stream, recipe, steps, done, processes),
    }
    lines = []
    for name, text in rows.items():
        first, *more = text.split("\n")
        lines += [f"{name:<12} {first}", *(f"{'':<12} {line}" for line in more)]
    return "\n".join(lines)


def _start(recipe: Recipe) -> str:
    where = recipe.model.init_from
    if not where:
        return "random weights"
    known = ""
    if where in shipped.SHIPPED:
        found = shipped.measurement(where)
        known = f", which ships with this package ({found.top1:.2%} right on {found.data.partition(' (')[0]})"
    return f"the weights of {visible(where)}{known}\nThe classifier is new, unless the classes are the same"


def _images(images: ImageSet, view: View, recipe: Recipe) -> str:
    few = [images.read(int(i)).shape[:2] for i in np.linspace(0, len(images) - 1, 9)]
    height, width = (int(np.median(side)) for side in zip(*few, strict=True))
    how = "as they are"
    if {height, width} != {view.size}:
        scaled = math.floor(view.size / view.crop_pct)
        how = f"from about {width} x {height}: the shorter side is scaled to {scaled}, the middle is kept"
    crop = "; in training a random part of each" if recipe.augment.resized_crop else ""
    return f"{view.size} x {view.size} pixels, {how}{crop}"


def _classes(images: ImageSet) -> str:
    counts = np.bincount(images.labels, minlength=len(images.classes))
    named = ", ".join(f"{short(name)} {count:,}" for name, count in list(zip(images.classes, counts, strict=True))[:SHOWN])
    more = f" and {len(images.classes) - SHOWN} more" if len(images.classes) > SHOWN else ""
    return f"{len(images.classes)}: {named}{more}"


def _split(sets: Sets, recipe: Recipe) -> str:
    learned = f"{len(sets.train) - len(sets.bad_train):,} images to learn from"
    if sets.eval is None:
        return f"{learned}, none to check with"
    count = len(sets.eval) - len(sets.bad_eval)
    how = f"{100 * recipe.data.holdout:.3g} % held out" if recipe.data.holdout else f"the {recipe.data.eval} images"
    unchecked = [name for k, name in enumerate(sets.eval.classes) if k not in sets.eval.labels]
    more = f"\nToo few images to check these classes: {', '.join(map(short, unchecked[:SHOWN]))}" if unchecked else ""
    return f"{learned}, {count:,} to check with ({how}){more}"


def _device(device: torch.device, recipe: Recipe, processes: int) -> str:
    words = {"none": "float32", "bf16": "bfloat16", "fp16": "float16"}[recipe.run.amp]
    return f"{provenance.device_name(device)}, {words}" + (f", {processes} processes" if processes > 1 else "")


def _time(model: VisionModel, sets: Sets, stream: TrainStream, recipe: Recipe, steps: int, done: int, processes: int) -> str:
    epochs, batch = recipe.schedule.epochs, recipe.run.batch_size
    told = f"{epochs} epoch{'s' * (epochs > 1)} of {steps // epochs:,} steps, {batch} images each"
    # what a GPU takes shows after some steps; of several processes one alone must not run a step: its batch norms would wait
    if stream.device.type != "cpu" or processes > 1:
        return f"{told}; how long that takes is told after the first steps"
    checked = 0 if sets.eval is None else len(sets.eval) * (epochs // recipe.run.eval_every)
    seconds = seconds_per_image(model, stream.view) * ((steps - done) * batch + checked / 3)
    return f"about {in_words(seconds)}: {told}"


def seconds_per_image(model: VisionModel, view: View) -> float:
    """Of one training step on the CPU, on a copy of the network: nothing of the run changes."""
    with torch.random.fork_rng(devices=[]):
        trial = copy.deepcopy(model).train()
        images = torch.randn(TIMED, view.channels, view.size, view.size, dtype=next(trial.parameters()).dtype)
        laps = []
        for _ in range(2):  # the first warms up
            start = time.perf_counter()
            trial(images).sum().backward()
            laps.append(time.perf_counter() - start)
    return min(laps) / TIMED


def in_words(seconds: float) -> str:
    """ "20 seconds", "14 minutes", "5 hours"."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(2, round(seconds))} seconds"
