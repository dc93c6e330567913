"""One row: a layer in one mode at one shape, inside its backend's `use_kernels`, judged on what the timed calls computed.

Whatever goes wrong is part of the row. Parity that failed leaves no time; so does an error; so does a fused layer that fell
back to the plain steps, for its time would be another's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dmst.bench import layers, parity, record, timing
from dmst.bench.plan import Setting, Task
from dmst.bench.record import Row
from dmst.kernels import use_kernels

FELL_BACK = "The fused kernel does not work here"  # how kernels/registered.py begins to say it
OF_NO_INTEREST = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)


@dataclass
class Known:
    """What a run remembers from row to row."""

    judged: dict[tuple[str, str], parity.Judged] = field(default_factory=dict)  # (what, backend), at small shapes
    refused: dict[tuple[str, str], str] = field(default_factory=dict)  # (what, backend) -> why it is not measured any more
    notes: dict[tuple[str, str, str], str] = field(default_factory=dict)  # some warnings are said once a process


def measure(task: Task, setting: Setting, known: Known) -> Row:
    """The row of a task."""
    row: Row = dict.fromkeys(record.KEYS)
    row |= {"what": task.what, "backend": task.backend, "mode": task.mode, "B": task.shape[0], "N": task.shape[1]}
    row |= {"dim": setting.dim, "heads": layers.heads_of(task.what, setting.dim, setting.heads), "dtype": setting.dtype}
    row |= {"versions": setting.versions, "commit": setting.commit}
    entry, named = (task.what, task.backend), (task.what, task.backend, task.mode)
    with warnings.catch_warnings(record=True) as said, use_kernels(layers.KERNELS[task.backend]):
        warnings.simplefilter("always")
        try:
            if entry not in known.refused:
                row |= _measured(task, setting, known)
        except Exception as error:  # a layer may fail in any way; the others are still to be measured
            row["failure"] = first_line(f"{type(error).__name__}: {error}")
            if entry not in known.judged:
                known.refused[entry] = row["failure"]
            recover(setting.device)
    lines = [first_line(str(heard.message)) for heard in said if not issubclass(heard.category, OF_NO_INTEREST)]
    fallen = [line for line in lines if line.startswith(FELL_BACK)]
    if fallen and task.backend == "fused":
        known.refused[entry] = fallen[0]
    if entry in known.refused:
        row |= dict.fromkeys(("forward_ms", "train_ms", "kept_mb", "peak_mb", "spread"))
        row["failure"] = known.refused[entry]
    if lines:
        known.notes.setdefault(named, lines[0])
    row["note"] = "; ".join(part for part in (row["note"], known.notes.get(named)) if part) or None
    return row


def _measured(task: Task, setting: Setting, known: Known) -> Row:
    (b, n), what, device, dtype = task.shape, task.what, setting.device, setting.numbers
    entry, heads = (what, task.backend), layers.heads_of(what, setting.dim, setting.heads)
    if entry not in known.judged:
        known.judged[entry] = parity.small(what, setting.dim, heads, device, dtype)
    judged = known.judged[entry]
    inputs = _inputs(b, n, setting.dim, device, dtype)
    layer = layers.made(what, setting.dim, heads, n, device, dtype)
    twin = layers.exact(what, layer, setting.dim, heads)
    row: Row = {"active": layers.active_heads(twin, inputs[0][0].double(), heads)}
    if not judged.problem:
        call, stops = compile_layer(layer) if task.mode == "compiled" else (layer, str)
        parameters = list(layer.parameters())

        def step(turn: int) -> timing.Results:
            return parity.train(call, parameters, *inputs[turn])

        timer = timing.TIMERS[device.type, task.mode]
        forward, both = timer(lambda turn: parity.forward(call, inputs[turn][0])), timer(step)
        row["note"] = stops() or None
        judged = judged.and_then(_judge(task, layer, twin, (forward, both), inputs[0], dtype))
        if not judged.problem:
            row |= {"forward_ms": record.number(forward.median), "train_ms": record.number(both.median)}
            row |= {"spread": record.number(max(forward.spread, both.spread), 2)}
            if task.mode != "graph":
                row |= _memory(call, step, [*layer.parameters(), *layer.buffers()], inputs[0][0])
    row["error"] = record.number(judged.error, 3)
    if judged.problem:
        row["failure"] = f"{record.PARITY}: {judged.problem}"
    return row


@functools.lru_cache(maxsize=1)  # one shape after the other
def _inputs(b: int, n: int, dim: int, device: torch.device, dtype: torch.dtype) -> parity.Inputs:
    return parity.draw(b, n, dim, device, dtype)


def _judge(
    task: Task,
    layer: nn.Module,
    twin: nn.Module,
    timed: tuple[timing.Timed, timing.Timed],
    inputs: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> parity.Judged:
    """What the timed calls computed, at their own shape."""
    linear = layers.CONTENDERS[task.what].linear
    if not linear and task.mode == "eager":
        return parity.Judged()  # the plain call was judged at small shapes; float64 has no room for n^2
    exact: Mapping[str, Tensor]
    bars = parity.bars(task.what, dtype)
    if linear:
        exact = parity.truth(twin, *inputs)
    else:
        exact = parity.named(task.what, layer, parity.train(layer, list(layer.parameters()), *inputs))
        bars = (2 * bars[0], 2 * bars[1])
    judged = parity.Judged()
    for each in timed:
        judged = judged.and_then(parity.judge(parity.named(task.what, layer, each.last), exact, bars))
    return judged if linear else judged._replace(error=0.0)  # a difference of two rounded results is not against float64


def _memory(call: parity.Layer, step: timing.Step, own: list[Tensor], z: Tensor) -> Row:
    if z.device.type == "cpu":
        return {"kept_mb": record.number(timing.saved(call, own, z))}
    kept, peak = timing.memory(call, step, z)
    return {"kept_mb": record.number(kept), "peak_mb": record.number(peak)}


def compile_layer(layer: nn.Module, mode: str | None = None) -> tuple[parity.Layer, Callable[[], str]]:
    """The layer compiled in a mode of torch.compile, and a function that says afterwards what the compiler could not do."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # a function is compiled for eight cases at most, and from then on not at all
    counters.clear()

    def stops() -> str:
        told = {"graph breaks": sum(counters["graph_break"].values()), "not recorded": counters["inductor"]["cudagraph_skips"]}
        return ", ".join(f"{count} {what}" for what, count in told.items() if count)

    compiled: Any = torch.compile(layer, dynamic=False, mode=mode)
    return compiled, stops


def recover(device: torch.device) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.compiler.reset()  # until then graphs that the compiler recorded hold their memory
        torch.cuda.empty_cache()
    except Exception:  # the device is lost; the next rows will say so
        return


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:400]
