"""How long a step takes and what it keeps. A step is a function of the number of an input set; the last call is of set 0.

    eager      each repetition between two events, waited for: launch gaps count, as in a plain call
    graph      several calls in one CUDA graph, over all input sets in turn; replays queued back to back, so that launches hide
    compiled   torch.compile, then as eager
    queued     calls one after the other, as a training loop makes them: the host is ahead where it can be; events around a few;
               after a second of them, when the clock has come down to what the power limit allows (draw.py)
    recorded   torch.compile with CUDA graphs of its own, then queued; each call says first that older results may go
    host       on a CPU: a clock

    kept       allocated after the forward pass less before it: what backward waits for and the output, not the tokens
    peak       the most allocated during one training step less what was before it

All medians, after a warm-up. Each timer also hands back what the last timed call computed, for parity.py to judge.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dmst.bench.draw import Draw, drawn
from dmst.bench.parity import SETS, Layer

REPEATS = 30  # timed
REPEATS_SLOW = 21  # of calls that take 20 ms and more
GROUPS, CALLS = 8, 5  # queued: events around each group of calls
WARM = 3  # calls at least, and
WARM_SECONDS = 0.05  # for the clocks to rise
SETTLED_SECONDS = 1.0  # for them to fall again
PATIENCE = 1.0  # seconds of repetitions on a CPU, where a call can be slow; three at least
MIB = 2**20

Results = tuple[Tensor, ...]
Step = Callable[[int], Results]


class Timed(NamedTuple):
    times: list[float]  # milliseconds of one call
    last: Results  # of set 0
    draw: Draw | None = None  # where it was asked for

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """The distance between the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.times, n=4)
        return (high - low) / self.median


def _turns(count: int) -> list[int]:
    """`count` numbers of input sets in turn, down to 0."""
    return [i % SETS for i in reversed(range(count))]


def _warm(step: Callable[[int], object], least: float = 0.0) -> float:
    """Call until warm, for `least` seconds; returns the milliseconds of the last call."""
    begun, calls, taken = time.perf_counter(), 0, 0.0
    while calls < WARM or time.perf_counter() - begun < max(least, WARM_SECONDS):
        start = time.perf_counter()
        step(calls % SETS)
        torch.cuda.synchronize()
        taken, calls = time.perf_counter() - start, calls + 1
    return 1e3 * taken


def _repeats(once: float) -> int:
    return REPEATS if once < 20 else REPEATS_SLOW


def _between(start: torch.cuda.Event, end: torch.cuda.Event, calls: int = 1) -> float:
    return start.elapsed_time(end) / calls


def _events(count: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    return [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]


def eager(step: Step) -> Timed:
    repeats = _repeats(_warm(step))
    times: list[float] = []
    last: Results = ()
    for (start, end), turn in zip(_events(repeats), _turns(repeats), strict=True):
        last = ()  # its memory is free again before the next call, as in training
        start.record()
        last = step(turn)
        end.record()
        end.synchronize()
        times.append(_between(start, end))
    return Timed(times, last)


def queued(step: Step) -> Timed:
    _warm(step, SETTLED_SECONDS)
    draw = drawn(lambda: _warm(step))
    pairs = _events(GROUPS)
    last: Results = ()
    turns = iter(_turns(GROUPS * CALLS))
    for start, end in pairs:
        start.record()
        for _ in range(CALLS):
            last = ()
            last = step(next(turns))
        end.record()
    torch.cuda.synchronize()
    return Timed([_between(start, end, CALLS) for start, end in pairs], last, draw)


@functools.cache
def _side() -> torch.cuda.Stream:
    """One stream for every capture: the libraries set up a workspace for each stream they meet."""
    return torch.cuda.Stream()


def graph(step: Step) -> Timed:
    side = _side()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is set up at a first call must not be recorded
        once = _warm(step)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    calls = 4 * SETS if once < 5 else SETS if once < 20 else 1
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=side):
        last: Results = ()
        for turn in _turns(calls):
            last = ()  # the next call takes its place
            last = step(turn)
    for value in last:
        value.fill_(float("nan"))  # only a replay that writes everything passes
    _warm(lambda _: captured.replay())
    pairs = _events(_repeats(once))
    for start, end in pairs:
        start.record()
        captured.replay()
        end.record()
    torch.cuda.synchronize()
    times = [_between(start, end, calls) for start, end in pairs]
    return Timed(times, tuple(value.clone() for value in last))  # the graph's own memory goes with it


def recorded(step: Step) -> Timed:
    def marked(turn: int) -> Results:
        torch.compiler.cudagraph_mark_step_begin()
        return step(turn)

    timed = queued(marked)
    return timed._replace(last=tuple(value.clone() for value in timed.last))  # the next call writes where these are


def host(step: Step) -> Timed:
    step(0)
    begun = time.perf_counter()
    times: list[float] = []
    last: Results = ()
    for turn in _turns(REPEATS):
        late = len(times) >= 2 and time.perf_counter() - begun > PATIENCE
        last = ()
        start = time.perf_counter()
        last = step(0 if late else turn)
        times.append(1e3 * (time.perf_counter() - start))
        if late:
            break
    return Timed(times, last)


TIMERS: dict[tuple[str, str], Callable[[Step], Timed]] = {
    ("cuda", "eager"): eager,
    ("cuda", "graph"): graph,
    ("cuda", "compiled"): eager,
    ("cuda", "queued"): queued,
    ("cuda", "recorded"): recorded,
    ("cpu", "eager"): host,
}


def memory(layer: Layer, step: Step, z: Tensor) -> tuple[float, float]:
    """Kept and peak on a CUDA device, MiB. `step` is a training step."""
    for _ in range(2):
        step(0)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = layer(z)
    kept = torch.cuda.memory_allocated() - before
    del out
    return kept / MIB, peak(step)


def peak(step: Step) -> float:
    """The most that a warm step allocates on a CUDA device, MiB; of a replayed one that says nothing."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(0)
    return (torch.cuda.max_memory_allocated() - before) / MIB


def saved(layer: Layer, own: list[Tensor], z: Tensor) -> float:
    """Kept on a CPU, MiB: the distinct memory that autograd holds and the output, parameters and tokens left out."""
    mine = {value.untyped_storage().data_ptr() for value in (*own, z)}
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = layer(z)
    pack(out)
    return sum(size for at, size in seen.items() if at not in mine) / MIB
