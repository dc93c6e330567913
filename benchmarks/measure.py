"""Timing, parity and rows, shared by the scripts of this folder.

A step is a function of the number of an input set and returns tensors; the last timed call is of set 0. Timers, all medians:

    queued     calls one after the other, as a training loop makes them, after a second of calls; on a CPU by its clock
    recorded   queued, for torch.compile(mode="reduce-overhead"), which replays CUDA graphs
    graph      several calls in one CUDA graph, replayed back to back: no launch gaps

Parity: what the timed calls computed is compared with float64. A row that fails has no time.

Processes that name the same file by `--beside` compile beside each other, time one after the other, and then check beside
each other. With `--add` they fill the same `--json`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dmst import provenance
from dmst.kernels.attempt import anew

REGIONS = 16  # of a sample's tokens
SETS = 3  # of inputs, used in turn: a single one could stay in the cache
REPEATS, GROUPS, CALLS = 30, 8, 5
WARM_CALLS, WARM_SECONDS, SETTLED_SECONDS = 3, 0.05, 1.0  # the clock rises, then falls to what the power limit allows
PATIENCE = 1.0  # seconds of repetitions on a CPU
MIB = 2**20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BARS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (5e-3, 1e-2), torch.float16: (1e-3, 2e-3)}  # output, gradients
FEW = 64
PARITY = "parity failed"
FELL_BACK = "The fused kernel of .* does not work here"  # how dmst/kernels begins that warning

Results = tuple[Tensor, ...]
Step = Callable[[int], Results]
Call = Callable[[Tensor], Tensor]
Row = dict[str, Any]


# --- time -------------------------------------------------------------------------------------------------------------


class Timed(NamedTuple):
    times: list[float]  # milliseconds of one call
    last: Results  # of set 0

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def _turns(count: int) -> list[int]:
    """`count` numbers of input sets in turn, down to 0."""
    return [i % SETS for i in reversed(range(count))]


def _warm(step: Callable[[int], object], seconds: float | None = None) -> float:
    """Call until warm; returns the milliseconds of the last call."""
    seconds = WARM_SECONDS if seconds is None else seconds
    begun, calls, taken = time.perf_counter(), 0, 0.0
    while calls < WARM_CALLS or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        step(calls % SETS)
        torch.cuda.synchronize()
        taken, calls = time.perf_counter() - start, calls + 1
    return 1e3 * taken


def _events(count: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    return [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]


def queued(step: Step) -> Timed:
    _warm(step, SETTLED_SECONDS)
    pairs, turns = _events(GROUPS), iter(_turns(GROUPS * CALLS))
    last: Results = ()
    for start, end in pairs:
        start.record()
        for _ in range(CALLS):
            last = ()
            last = step(next(turns))
        end.record()
    torch.cuda.synchronize()
    return Timed([start.elapsed_time(end) / CALLS for start, end in pairs], last)


def recorded(step: Step) -> Timed:
    def marked(turn: int) -> Results:
        torch.compiler.cudagraph_mark_step_begin()
        return step(turn)

    timed = queued(marked)
    return Timed(timed.times, tuple(value.clone() for value in timed.last))  # the next call writes where these are


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
    pairs = _events(REPEATS)
    for start, end in pairs:
        start.record()
        captured.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) / calls for start, end in pairs]
    return Timed(times, tuple(value.clone() for value in last))  # the graph's own memory goes with it


def on_cpu(step: Step) -> Timed:
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


TIMERS = {"queued": queued, "recorded": recorded, "graph": graph, "cpu": on_cpu}


def timer(device: torch.device, name: str) -> Callable[[Step], Timed]:
    return TIMERS[name if device.type == "cuda" else "cpu"]


_shared: list[Any] = []  # two files: who holds the first works, who holds the second has yet to time


def share_device(path: Path) -> None:
    """From here on this process works only while no other one is `alone`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _shared.extend(each.open("a") for each in (path, path.with_suffix(".todo")))
    for file in _shared:
        fcntl.flock(file, fcntl.LOCK_SH)


def _let_go() -> None:
    """Memory that is not in use goes back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, the others wait; afterwards this one waits until all have timed, since what follows are checks."""
    if not _shared:
        yield
        return
    work, todo = _shared
    _let_go()
    fcntl.flock(work, fcntl.LOCK_UN)  # else two that wait for each other's share would wait for ever
    fcntl.flock(work, fcntl.LOCK_EX)
    try:
        yield
    finally:
        _let_go()
        for file, how in ((work, fcntl.LOCK_UN), (todo, fcntl.LOCK_EX), (todo, fcntl.LOCK_UN), (work, fcntl.LOCK_SH)):
            fcntl.flock(file, how)


def compiled(call: Any, mode: str | None = None) -> Any:
    torch._dynamo.reset()  # a function is compiled for eight cases at most, and from then on not at all
    return torch.compile(call, dynamic=False, mode=mode)


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_mb(step: Step) -> float | None:
    """The most that a warm training step allocates on a CUDA device."""
    if not torch.cuda.is_available():
        return None
    for _ in range(2):
        step(0)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(0)
    return (torch.cuda.max_memory_allocated() - before) / MIB


def kept_mb(call: Call, own: Sequence[Tensor], z: Tensor) -> float:
    """What the backward pass waits for: distinct memory that autograd holds, and the output; weights and tokens left out."""
    mine = {value.untyped_storage().data_ptr() for value in (*own, z)}
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        pack(call(z))
    return sum(size for at, size in seen.items() if at not in mine) / MIB


# --- parity -----------------------------------------------------------------------------------------------------------


def relative(value: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    error = ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()
    return math.inf if math.isnan(error) else error


def passed(
    row: Row,
    names: Sequence[str],
    timed: Sequence[Results],
    exact: Sequence[Tensor],
    bars: tuple[float, float],
    key: str = "error",
) -> bool:
    """Write the worst error of all timed results into the row, and what is beyond its bar as its failure.

    `bars` are those of the output (first) and of gradients. The gradient of few numbers may cancel: no bar.
    """
    for results in timed:
        for name, value, right in zip(names, results, exact, strict=False):  # a forward pass gives the output alone
            if value.numel() >= FEW:
                fail(row, name, relative(value, right), bars[name != names[0]], key)
    return not row.get("failure")


def fail(row: Row, name: str, error: float, bar: float, key: str = "error") -> None:
    row[key] = max(row.get(key, 0.0), error)
    if not error <= bar and not row.get("failure"):
        row["failure"] = f"{PARITY}: {name} is off by {error:.1e}, and {bar:.0e} is allowed"


def tokens(b: int, n: int, dim: int, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """SETS pairs: tokens that want gradients, and output gradients. Tokens differ by region, as those of an image do: the
    groups of noise are all alike, and what they differ by is lost in 16 bits."""
    chance = torch.Generator(device).manual_seed(n)  # our own: a failed graph capture can spoil torch's
    region = torch.arange(n, device=device) * REGIONS // n

    def normal(count: int) -> Tensor:
        return torch.randn(b, count, dim, device=device, generator=chance)

    return [((normal(n) + normal(REGIONS)[:, region]).to(dtype).requires_grad_(), normal(n).to(dtype)) for _ in range(SETS)]


def forward(call: Call, z: Tensor) -> Results:
    with torch.no_grad():
        return (call(z),)


def train(call: Call, parameters: Sequence[Tensor], z: Tensor, grad: Tensor) -> Results:
    """The output, then the gradients of the tokens and of every parameter."""
    out = call(z)
    return out.detach(), *torch.autograd.grad(out, (z, *parameters), grad.to(out.dtype))


# --- rows -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attempting(row: Row) -> Iterator[None]:
    """Whatever goes wrong inside is the row's `failure`; so is a fused kernel that fell back to plain torch."""
    anew()
    for file in _shared[1:]:
        fcntl.flock(file, fcntl.LOCK_SH)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("error", FELL_BACK)
            yield
    except Exception as error:  # a layer may fail in any way; the others are still to be measured
        row["failure"] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:400]
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()  # until then graphs that the compiler recorded hold their memory
        torch.cuda.empty_cache()


def _digits(x: float) -> float | None:
    return float(f"{x:.5g}") if math.isfinite(x) else None  # JSON has no infinity


class Rows:
    """The rows so far. The file {"facts": {...}, "rows": [...]} is rewritten after every row."""

    def __init__(self, script: str, ask: argparse.Namespace, names: Sequence[str]) -> None:
        self.path, self.names, self.limit, self.begun = ask.json, names, ask.limit, time.monotonic()
        device = device_here()
        self.facts = {"script": script, "device": provenance.device_name(device), **provenance.versions()}
        self.facts["commit"] = provenance.commit()
        self.rows: list[Row] = []
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not ask.add:
                self.path.unlink(missing_ok=True)
        if ask.beside:
            share_device(ask.beside)

    def add(self, row: Row) -> None:
        """Take a row in the place of an older one of the same name, write the file, print a line."""
        row = {"failure": None, **row, "commit": self.facts["commit"]}
        row = {key: _digits(x) if isinstance(x, float) else x for key, x in row.items()}
        name = [row[key] for key in self.names]
        if self.path:
            with self.path.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another process may add to it
                file.seek(0)
                text = file.read()
                self.rows = json.loads(text)["rows"] if text else []
                self._take(name, row)
                lines = ",\n".join("  " + json.dumps(each) for each in self.rows)
                file.truncate(0)
                file.write(f'{{\n "facts": {json.dumps(self.facts)},\n "rows": [\n{lines}\n ]\n}}\n')
        else:
            self._take(name, row)
        values = {key: x for key, x in row.items() if key not in (*self.names, "failure", "commit", "error") and x is not None}
        told = row["failure"] or "  ".join(f"{key} {x}" for key, x in values.items())
        print(f"{time.monotonic() - self.begun:5.0f} s  {' '.join(map(str, name)):<44} {told}", flush=True)

    def _take(self, name: list[Any], row: Row) -> None:
        self.rows = [old for old in self.rows if [old.get(key) for key in self.names] != name] + [row]

    def late(self) -> bool:
        return self.limit is not None and time.monotonic() - self.begun > self.limit

    def finish(self) -> None:
        """Say what failed parity; the exit status is 1 if any did."""
        wrong = [row for row in self.rows if str(row["failure"]).startswith(PARITY)]
        print(f"{len(self.rows)} rows, {len(wrong)} failed parity; {self.facts['device']}, torch {self.facts['torch']}")
        raise SystemExit(1 if wrong else 0)


def show(rows: Sequence[Row], at: Sequence[str], names: Sequence[str], values: Sequence[str], base: str) -> None:
    """A table for each setting `at`: the values, and their multiples of the row whose first name is `base`."""
    for setting in dict.fromkeys(tuple(row[key] for key in at) for row in rows):
        here = [row for row in rows if tuple(row[key] for key in at) == setting and not row["failure"]]
        floor = next((row for row in here if row[names[0]] == base), {})
        title = ", ".join(f"{key} {value}" for key, value in zip(at, setting, strict=True))
        table = Table(*names, *(head for key in values for head in (key, f"x {base}")), title=title)
        for row in here:
            cells = [str(row[name]) for name in names]
            for key in values:
                value, other = row.get(key), floor.get(key)
                cells += [f"{value:,.4g}" if value else "", f"{value / other:.2f}" if value and other else ""]
            table.add_row(*cells)
        Console(width=120).print(table)


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Options of every script."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--add", action="store_true", help="keep rows of an earlier run that are not measured again")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="the device is shared with processes that name this file")
    parser.add_argument("--limit", type=float, help="start no new row after this many seconds")
    return parser


def fill(module: nn.Module) -> nn.Module:
    """Weights of nn.Linear's size, so that every head is on; small biases; norms and scales that differ by channel."""
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "temp" in name:
                parameter.fill_(1)
            elif "norm" in name or "scale" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=chance)).add_(0.01)
            else:
                bound = (0.1 if name.endswith("bias") else 1.0) * parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=chance)
    return module
