"""One row: a network in one mode at one size, judged on what its timed calls computed (model_parity.py).

what, mode               a name of networks.py; compiled, recorded, graph (inference alone: training is eager), eager
B, pixels, dtype         images a step, their side, the dtype of autocast (float32: none)
parameters, kernel       how many; what served the operators, inference / training where they differ
inference, training      images a second, medians; training is forward, cross entropy and backward, without an optimizer
peak_mb                  MiB: the most allocated during a training step less what was before it (weights, images); None on a CPU
                         and of recorded steps, which allocate nothing when they are replayed
error, gradient_error    distance of logits and of all gradients from the plain steps in a wider type; None for timm's
versions, commit         of what was measured
failure, note, spread    why there is no time; the first warning; distance of the quartiles over the median, the worse of both
draw                     MHz and W of inference, and of training (draw.py); None where they are not timed in a row

Whatever goes wrong is part of the row: an error, parity that failed, a fused kernel that fell back to the plain steps.
"""

from __future__ import annotations

import functools
import gc
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dmst import provenance
from dmst.bench import layers, measure, model_parity, networks, record, timing
from dmst.bench.model_plan import COMPILER, MODES, Task
from dmst.bench.parity import SETS, Judged
from dmst.bench.record import Row
from dmst.kernels import use_kernels
from dmst.kernels.attempt import anew

KEYS = (
    "what", "mode", "B", "pixels", "dtype", "parameters", "kernel", "inference", "training", "peak_mb", "error",
    "gradient_error", "versions", "commit", "failure", "note", "spread", "draw",
)  # fmt: skip
FIGURES = ("inference", "training", "peak_mb", "spread", "draw")  # what a row that failed does not tell
UNITS = {
    "inference, training": "images a second, from the median; training is forward, cross entropy and backward, no optimizer",
    "peak_mb": "MiB (2**20 bytes) of a training step, weights and images not counted; not told of recorded steps",
    "error, gradient_error": "relative L2 against the plain steps in float32 (of 16-bit autocast) or float64",
    "compiled": "torch.compile(dynamic=False); calls one after the other for a second, then CUDA events around each five",
    "recorded": 'torch.compile(mode="reduce-overhead", dynamic=False): CUDA graphs by the compiler; timed as compiled',
    "draw": "MHz of the multiprocessors and W, of inference and of training, while it runs",
    "graph": "inference by CUDA-graph replay; training eager, timed as compiled",
    "eager": "each call between CUDA events, waited for; on a CPU by its clock",
}


@dataclass(frozen=True)
class Setting:
    """What is the same for every row of a run."""

    device: torch.device
    dtype: str
    commit: str = "unknown"
    versions: dict[str, Any] = field(default_factory=provenance.versions)

    @property
    def numbers(self) -> torch.dtype:
        return layers.DTYPES[self.dtype]


def measured(task: Task, setting: Setting, fallen: dict[str, str]) -> Row:
    """The row of a task. `fallen` remembers networks whose kernel fell back: that is said once a process."""
    row: Row = dict.fromkeys(KEYS)
    row |= {"what": task.what, "mode": task.mode, "B": task.batch, "pixels": task.pixels, "dtype": setting.dtype}
    row |= {"versions": setting.versions, "commit": setting.commit}
    with warnings.catch_warnings(record=True) as said, use_kernels("auto"):
        warnings.simplefilter("always")
        try:
            if task.what not in fallen:
                anew()  # what failed for another network, which may have the same layers
                _measure(task, setting, row)
        except Exception as error:  # a network may fail in any way; the others are still to be measured
            row["failure"] = measure.first_line(f"{type(error).__name__}: {error}")
    gc.collect()  # what it held goes before the next one comes
    measure.recover(setting.device)
    lines = [measure.first_line(str(heard.message)) for heard in said if not issubclass(heard.category, measure.OF_NO_INTEREST)]
    for line in lines:
        if line.startswith(measure.FELL_BACK):
            fallen.setdefault(task.what, line)
    if task.what in fallen:
        row["failure"] = fallen[task.what]
    if row["failure"]:
        row |= dict.fromkeys(FIGURES)
    row["note"] = "; ".join(part for part in (row["note"], *lines[:1]) if part) or None
    return row


def _measure(task: Task, setting: Setting, row: Row) -> None:
    """Fill in the row as far as it goes."""
    device, dtype, ours = setting.device, setting.numbers, not networks.parse(task.what).theirs
    model = networks.build(task.what, task.pixels, device)
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    compiled = task.mode in COMPILER
    row["kernel"] = networks.kernel(model, device, dtype, compiled) if ours else "timm"
    images = _images(task.batch, networks.channels(task.what), task.pixels, device)
    call, stops = measure.compile_layer(model, COMPILER[task.mode]) if compiled else (model, str)
    at = [timing.TIMERS[device.type, mode] for mode in MODES[task.mode]]

    model.eval()
    inference = at[0](lambda turn: model_parity.infer(call, images[turn], dtype))
    judged = model_parity.judge_logits(model, inference.last, images[0], dtype) if ours else None
    if _refused(row, "error", judged):
        return
    labels = _labels(task.batch, inference.last[0].shape[1], device)
    parameters = list(model.parameters())
    model.train()
    if ours:
        labels[0] = model_parity.clear(model, images[0], labels[0], dtype)  # the first set is judged

    def step(turn: int) -> timing.Results:
        return model_parity.train(call, parameters, images[turn], labels[turn], dtype)

    training = at[1](step)
    row["note"] = stops() or None
    peak = timing.peak(step) if device.type == "cuda" and task.mode != "recorded" else None
    judged = model_parity.judge_gradients(model, training.last, images[0], labels[0], dtype) if ours else None
    if _refused(row, "gradient_error", judged):
        return
    row |= {"inference": _rate(task, inference), "training": _rate(task, training), "peak_mb": record.number(peak)}
    row["spread"] = record.number(max(inference.spread, training.spread), 2)
    row["draw"] = [inference.draw, training.draw]


def _refused(row: Row, key: str, judged: Judged | None) -> bool:
    if judged is None:
        return False
    row[key] = record.number(judged.error, 3)
    row["failure"] = f"{record.PARITY}: {judged.problem}" if judged.problem else None
    return bool(judged.problem)


def _rate(task: Task, timed: timing.Timed) -> float | None:
    return record.number(1e3 * task.batch / timed.median, 5)


@functools.lru_cache(maxsize=1)  # one size after the other
def _images(b: int, c: int, pixels: int, device: torch.device) -> list[Tensor]:
    """By a generator of our own: a failed graph capture can spoil torch's."""
    chance = torch.Generator(device).manual_seed(pixels)
    return [torch.randn(b, c, pixels, pixels, device=device, generator=chance) for _ in range(SETS)]


def _labels(b: int, classes: int, device: torch.device) -> list[Tensor]:
    chance = torch.Generator(device).manual_seed(classes)
    return [torch.randint(classes, (b,), device=device, generator=chance) for _ in range(SETS)]
