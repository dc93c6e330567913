"""What is asked of a run over networks, and in which order it is done: what the targets compare first, compiling the rest last.

    compiled    inference and training by torch.compile (its default mode); 224 pixels, if nothing is said
    recorded    both by torch.compile(mode="reduce-overhead"), which replays CUDA graphs; 224 pixels too, each after compiled
    graph       inference by CUDA-graph replay, training eager; every other size
    eager       both eager; on a CPU always

A batch is BATCH at 224 pixels and shrinks as images grow, so that a step has about as many tokens; it never grows.
"""

from __future__ import annotations

from typing import NamedTuple

from dmst.bench import networks, timing
from dmst.errors import OptionError, choose

MODES = {  # inference, training
    "compiled": ("queued", "queued"),
    "recorded": ("recorded", "recorded"),
    "graph": ("graph", "queued"),
    "eager": ("eager", "eager"),
}
COMPILER = {"compiled": None, "recorded": "reduce-overhead"}  # its mode, where a network is compiled
SIZES = {"cuda": "224,512,1024", "cpu": "224"}
BATCH = {"cuda": 256, "cpu": 4}
USUAL = 224  # pixels: the size that is compiled and that the targets are about
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # short for
FIRST = (networks.SKELETON, networks.EXCHANGED, networks.OURS, networks.TIMM_VIT)  # what the targets compare


class Task(NamedTuple):
    """One row to be."""

    mode: str
    pixels: int
    batch: int
    what: str

    def __str__(self) -> str:
        return f"{self.mode:<8} {self.pixels:>4} px x {self.batch:<4} {self.what}"


def numbers(name: str, text: str) -> list[int]:
    """The whole numbers in "224,512"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(f"{name} is {text!r}: it must be whole numbers with commas between, as 224,512.")
    return [int(part) for part in parts]


def batches(sizes: list[int], text: str | None, device: str) -> list[int]:
    """A batch for each size: as asked, one for all or one each, else by the rule above."""
    if text:
        asked = numbers("batch", text)
        if len(asked) not in (1, len(sizes)):
            raise OptionError(f"batch is {text!r}: it must be one number, or one for each of the {len(sizes)} sizes.")
        return asked * len(sizes) if len(asked) == 1 else asked
    found = [min(BATCH[device], int(BATCH[device] * (USUAL / pixels) ** 2)) for pixels in sizes]
    return [count - count % 4 if count >= 8 else max(count, 1) for count in found]


def plan(
    device: str, *, sizes: str | None = None, only: str | None = None, batch: str | None = None, modes: str | None = None
) -> tuple[list[Task], dict[str, str]]:
    """The tasks in order, and what is left out with the reason."""
    wanted, pixels = networks.parse_all(only), list(dict.fromkeys(numbers("sizes", sizes or SIZES[device])))
    asked = [choose("mode", part.strip(), MODES) for part in modes.split(",")] if modes else []
    tasks: list[Task] = []
    left: dict[str, str] = {}
    for size, count in zip(pixels, batches(pixels, batch, device), strict=True):
        usual = ["eager"] if device == "cpu" else [*COMPILER] if size == USUAL else ["graph"]
        here = [mode for mode in MODES if mode in (asked or usual)]
        for mode in [mode for mode in here if any((device, each) not in timing.TIMERS for each in MODES[mode])]:
            left[f"mode {mode}"] = "it needs a CUDA device"
            here.remove(mode)
        for what in wanted if here else []:
            why = networks.left_out(what, size)
            if why:
                left[what if networks.parse(what).theirs else f"{what} at {size} pixels"] = why
            else:
                tasks += [Task(mode, size, count, what) for mode in here]
    return sorted(tasks, key=_turn), left  # stable: the order above holds within each turn


def _turn(task: Task) -> int:
    if task.mode not in COMPILER:
        return 1
    return 0 if task.what in FIRST and task.pixels == USUAL else 2
