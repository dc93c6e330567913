"""What is asked of a run, and in which order it is done: what decides most comes first, what costs most (compiling) last.

what the targets compare, in every mode but compiled > the rest likewise > compiled
within these: graph, eager > shapes as asked > floor, dmsa, sdpa, then the rest; fused before plain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dmst import provenance
from dmst.bench import layers, timing
from dmst.errors import OptionError, choose

Shape = tuple[int, int]  # batch, tokens
SHAPES = {"cuda": "256x197,64x1024,16x4096,4x16384,1x65536", "cpu": "8x197,1x1024"}
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
MODES = ("graph", "eager", "compiled")
COMPILED = ("some", "all", "none")
COMPILED_SOME: tuple[Shape, ...] = ((256, 197), (4, 16384))  # each compilation costs seconds
FIRST = ("floor", "dmsa", "sdpa_p64", "sdpa_p48")  # what the targets compare


@dataclass(frozen=True)
class Setting:
    """What is the same for every row of a run."""

    device: torch.device
    dtype: str
    dim: int = 384
    heads: int = 8
    commit: str = "unknown"
    versions: dict[str, Any] = field(default_factory=provenance.versions)

    @property
    def numbers(self) -> torch.dtype:
        return layers.DTYPES[self.dtype]


class Task(NamedTuple):
    """One row to be."""

    mode: str
    shape: Shape
    what: str
    backend: str

    def __str__(self) -> str:
        return f"{self.mode:<8} {self.shape[0]:>3} x {self.shape[1]:<5} {self.what} {self.backend}"


def parse_shapes(text: str) -> list[Shape]:
    """The shapes in "256x197,64x1024"."""
    found = []
    for part in text.split(","):
        sides = part.strip().lower().split("x")
        if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
            raise OptionError(f"shape {part.strip()!r}: it must be BATCHxTOKENS, as in 256x197,64x1024.")
        found.append((int(sides[0]), int(sides[1])))
    return list(dict.fromkeys(found))


def parse_names(what: str, text: str | None, known: Sequence[str]) -> list[str]:
    """The names in "dmsa,floor"; all that are known where nothing is asked."""
    names = list(known) if not text else [choose(what, part.strip(), known) for part in text.split(",")]
    return list(dict.fromkeys(names))


def plan(
    setting: Setting, shapes: list[Shape], only: list[str], modes: list[str], compiled: str = "some"
) -> tuple[list[Task], dict[str, str]]:
    """The tasks in order, and what is left out with the reason."""
    choose("compiled", compiled, COMPILED)
    where = {"all": shapes, "none": [], "some": [shape for shape in shapes if shape in COMPILED_SOME]}[compiled]
    left: dict[str, str] = {}
    entries = []
    for what in sorted(only, key=lambda what: FIRST.index(what) if what in FIRST else len(FIRST)):
        for backend in layers.CONTENDERS[what].backends[::-1]:
            why = layers.left_out(what, backend, setting.dim, setting.heads, setting.device, setting.numbers)
            if why:
                left[f"{what} {backend}"] = why
            else:
                entries.append((what, backend))
    tasks: list[Task] = []
    for mode in (mode for mode in MODES if mode in modes):
        if (setting.device.type, mode) not in timing.TIMERS:
            left[f"mode {mode}"] = "it needs a CUDA device"
            continue
        tasks += [Task(mode, at, *entry) for at in (where if mode == "compiled" else shapes) for entry in entries]
    return sorted(tasks, key=_turn), left  # stable: the order above holds within each turn


def _turn(task: Task) -> int:
    if task.mode == "compiled":
        return 2
    return 0 if task.what in FIRST and task.backend != "reference" else 1
