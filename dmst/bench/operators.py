"""`dmst bench operators` and its sisters: measure, show, check, draw. Each returns the status that the command ends with.

measure_all(...)    the rows, their tables, the targets, the figure; 1 where parity failed
check(file)         the targets from a file, nothing run; 1 where one that must be kept is missed
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dmst import provenance
from dmst.bench import acceptance, figure, layers, record, tables
from dmst.bench.measure import Known, measure
from dmst.bench.plan import DTYPE, MODES, SHAPES, Setting, Task, parse_names, parse_shapes, plan
from dmst.errors import DmstError, OptionError, choose
from dmst.terminal import Terminal

WIDTH = 120  # of what is printed where there is no terminal


def console() -> Terminal:
    plain = Terminal()
    return plain if plain.is_terminal else Terminal(width=WIDTH)


def measure_all(
    *,
    out: str | None = None,
    shapes: str | None = None,
    only: str | None = None,
    modes: str | None = None,
    dtype: str | None = None,
    dim: int = 384,
    heads: int = 8,
    compiled: str = "some",
    figure_stem: str | None = None,
    commit: str | None = None,
    limit: float | None = None,
    add: bool = False,
) -> int:
    """Measure what is asked for on the device at hand."""
    device, said = device_here(), console()
    dtype = choose("dtype", dtype or DTYPE[device.type], layers.DTYPES)
    setting = Setting(device, dtype, dim, heads, provenance.commit(commit))
    layers.DMSA(dim, heads, device="meta")  # a width that cannot be is said before anything starts
    asked = parse_names("layer", only, tuple(layers.CONTENDERS))
    tasks, left = plan(setting, parse_shapes(shapes or SHAPES[device.type]), asked, parse_names("mode", modes, MODES), compiled)
    if not tasks:
        raise OptionError("nothing is left to measure: " + "; ".join(f"{what}: {why}" for what, why in left.items()) + ".")
    path = Path(out) if out else record.default_path(device)
    earlier = record.read(path)[1] if add and path.exists() else []
    if any((row["dim"], row["dtype"]) != (dim, dtype) for row in earlier):
        raise OptionError(f"{path} holds rows of another width or dtype: give this run a file of its own (--out).")
    book = record.Book(path, record.facts(device, setting.commit), earlier or None)
    name = provenance.device_name(device)
    told = f": {name}, {setting.dtype}, width {dim}; {len(tasks)} rows to {path}"
    said.print(Text.assemble(("dmst bench operators", "bold"), told))
    for what, why in left.items():
        said.print(f"left out: {what}: {why}", soft_wrap=True)
    unmeasured = _run(setting, tasks, book, said, limit)
    for table in tables.summary(book.rows):
        said.print(table)
    for task in unmeasured:
        said.print(f"no time was left for {task}")
    if device.type == "cpu":
        said.print("Milliseconds of this machine count only as ratios within this run.")
    if acceptance.applies(book.rows):
        said.print(acceptance.table(acceptance.points(book.rows)))
    stem = Path(figure_stem) if figure_stem else path.with_suffix("") if device.type == "cuda" else None
    if stem:
        _figure(book.rows, stem, name, said)
    wrong = [row for row in book.rows if str(row.get("failure")).startswith(record.PARITY)]
    for row in wrong:
        where = f"{row['what']} {row['backend']} {row['mode']}, {row['B']} x {row['N']}"
        said.print(f"{where}: {row['failure']}", style="bold red")
    return 1 if wrong else 0


def check(file: str, readme: str | None = None) -> int:
    """The targets, from a file of rows; and its figures into a README."""
    said, (_, rows) = console(), record.read(Path(file))
    found = acceptance.points(rows)
    said.print(acceptance.table(found))
    if readme and not tables.into(Path(readme), rows):
        said.print(f"{readme} has no marks ({tables.BEGIN}): it is as it was.", soft_wrap=True)
    return 0 if all(point.kept for point in found) else 1


def draw(file: str, stem: str) -> int:
    """The figure, from a file of rows."""
    facts, rows = record.read(Path(file))
    for path in figure.draw(rows, Path(stem), str(facts.get("device", ""))):
        console().print(str(path), soft_wrap=True)
    return 0


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _figure(rows: list[record.Row], stem: Path, device: str, said: Terminal) -> None:
    try:
        paths: list[Any] = figure.draw(rows, stem, device)
        said.print("figure: " + ", ".join(map(str, paths)), soft_wrap=True)
    except DmstError as error:  # the rows are safe; `dmst bench figure` can draw them elsewhere
        said.print(f"no figure: {error}", soft_wrap=True)


def _run(setting: Setting, tasks: list[Task], book: record.Book, said: Terminal, limit: float | None) -> list[Task]:
    """Measure the tasks, a line each; returns those for which the time did not last."""
    known, begun = Known(), time.monotonic()
    columns = (TextColumn("{task.description:<40}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=said, transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for done, task in enumerate(tasks):
            if limit is not None and time.monotonic() - begun > limit:
                return tasks[done:]
            progress.update(bar, description=str(task))
            row = measure(task, setting, known)
            book.add(row)
            times = row["failure"] or f"{row['forward_ms']:.4g} / {row['train_ms']:.4g} ms, error {row['error']:.1e}"
            at = f"{time.monotonic() - begun:5.0f} s"
            progress.console.print(f"{at}  {task!s:<40} {times}", soft_wrap=True)
            progress.update(bar, advance=1)
    return []
