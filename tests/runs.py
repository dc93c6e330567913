"""The runs that several tests start: a DMST of one block, twelve steps, everything on that a checkpoint must bring back.

`pictures` makes a folder of images that a program can learn without scikit-learn, which takes longer to import than they take.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from dmst.engine.console import Quiet
from dmst.engine.recipe import Recipe, read_recipe

SMALL = ["model.options.dim=16", "model.options.depth=1", "model.options.num_heads=2"]
TWELVE = ["schedule.epochs=2", "schedule.warmup_epochs=0.5", "data.limit=96", "run.batch_size=16", "run.eval_batch_size=359"]
RANDOM = [
    "model.options.mode=proximal",  # an orthonormal matrix, which every step must bring back to its manifold
    "model.options.drop_path_rate=0.2",
    "model.options.proj_drop_rate=0.1",
    "model.options.drop_rate=0.1",
    "optim.model_ema=0.9",
]
SAVED = ["run.accumulate=2", "run.save_every=3"]
EVERYTHING = [*RANDOM, *SAVED]
LAST = "checkpoints/step_00000012"
NOT_REPEATED = ("time", "seconds", "images_per_s")  # of a journal: what a clock said


def tiny(*more: str) -> Recipe:
    """Twelve steps, six an epoch."""
    return read_recipe("digits", [*SMALL, *TWELVE, *more])


def on_pictures(folder: Path, *more: str) -> Recipe:
    """The same on a folder of `pictures`."""
    colour = ["model.name=dmst_cifar", "model.options.patch_size=2", "data.image_size=8"]
    return tiny(f"data.name={json.dumps(str(folder))}", "data.limit=0", "run.eval_batch_size=12", *colour, *more)


def pictures(folder: Path, each: int = 32, size: int = 8, tests: int = 4) -> Path:
    """Three classes of images: a bar across, one down, a block, of any colour, over noise. `each` of a class to learn."""
    chance = np.random.default_rng(0)
    for split, count in (("train", each), ("test", tests)):
        for name, high, wide in (("across", 2, size), ("down", size, 2), ("block", size // 2, size // 2)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                image = chance.integers(0, 90, (size, size, 3), np.uint8)
                top, left = chance.integers(0, size - high + 1), chance.integers(0, size - wide + 1)
                image[top : top + high, left : left + wide] += chance.integers(50, 160, 3, np.uint8)
                Image.fromarray(image).save(folder / split / name / f"{i:03}.png")
    return folder


def digests(run: Path, last: str = LAST) -> dict[str, str]:
    """sha256 of the final weights, and of all that the last checkpoint holds of the training."""
    files = [run / "final/model.safetensors", *sorted((run / last).glob("*.safetensors")), run / last / "state.json"]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a journal says, without what a clock said."""
    return [{key: value for key, value in event.items() if key not in NOT_REPEATED} for event in events]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds."""
    files = sorted((run / f"checkpoints/step_{step:08d}").glob("*.safetensors"))
    return {f"{file.stem}.{name}": x for file in files for name, x in load_file(file).items()}


class Cut(Exception):
    """A run is cut off here."""


class CutAfter(Quiet):
    """Raises `Cut` after a step, before anything of it is evaluated or saved."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        if done == self.last:
            raise Cut
