"""`dmst bench models`: measure whole networks, show, check, draw. Each returns the status that the command ends with.

measure_all(...)    the rows, their tables, the targets, the figure; 1 where parity failed
check(file)         the targets from a file, nothing run; 1 where one that must be kept is missed
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.text import Text

from dmst import provenance
from dmst.bench import acceptance, layers, model_figure, model_tables, networks, operators, record
from dmst.bench.model_plan import DTYPES, Task, plan
from dmst.bench.model_row import KEYS, UNITS, Setting, measured
from dmst.bench.plan import DTYPE
from dmst.errors import DmstError, OptionError, choose
from dmst.terminal import Terminal

ABOUT = "whole networks, 224 pixels, bfloat16"


def measure_all(
    *,
    out: str | None = None,
    sizes: str | None = None,
    only: str | None = None,
    batch: str | None = None,
    modes: str | None = None,
    dtype: str | None = None,
    figure_stem: str | None = None,
    commit: str | None = None,
    limit: float | None = None,
    add: bool = False,
) -> int:
    """Measure what is asked for on the device at hand."""
    device, said = operators.device_here(), operators.console()
    named = choose("dtype", DTYPES.get(dtype or "", dtype) or DTYPE[device.type], layers.DTYPES)
    tasks, left = plan(device.type, sizes=sizes, only=only, batch=batch, modes=modes)
    if not tasks:
        raise OptionError("nothing is left to measure: " + "; ".join(f"{what}: {why}" for what, why in left.items()) + ".")
    setting = Setting(device, named, provenance.commit(commit), networks.versions(task.what for task in tasks))
    path = Path(out) if out else record.default_path(device, "models")
    earlier = read(str(path))[1] if add and path.exists() else []
    book = record.Book(path, record.facts(device, setting.commit, UNITS), earlier)
    name = provenance.device_name(device)
    said.print(Text.assemble(("dmst bench models", "bold"), f": {name}, {named}; {len(tasks)} rows to {path}"))
    for what, why in left.items():
        said.print(f"left out: {what}: {why}", soft_wrap=True)
    unmeasured = _run(setting, tasks, book, said, limit)
    for table in model_tables.summary(book.rows):
        said.print(table)
    for task in unmeasured:
        said.print(f"no time was left for {task}")
    if device.type == "cpu":
        said.print("Images a second of this machine count only as ratios within this run.")
    if acceptance.model_applies(book.rows):
        said.print(acceptance.table(acceptance.model_points(book.rows), ABOUT))
    stem = Path(figure_stem) if figure_stem else path.with_suffix("") if device.type == "cuda" else None
    if stem:
        try:
            said.print("figure: " + ", ".join(map(str, model_figure.draw(book.rows, stem, name))), soft_wrap=True)
        except DmstError as error:  # the rows are safe; `dmst bench figure` can draw them elsewhere
            said.print(f"no figure: {error}", soft_wrap=True)
    wrong = [row for row in book.rows if str(row["failure"]).startswith(record.PARITY)]
    for row in wrong:
        said.print(f"{row['what']} {row['mode']}, {row['pixels']} pixels: {row['failure']}", style="bold red")
    return 1 if wrong else 0


def holds(file: str) -> bool:
    """Whether a file is one of networks, as far as can be seen."""
    try:
        return "pixels" in json.loads(Path(file).read_text(encoding="utf-8"))["rows"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return False  # who reads it as a file of operators says what is wrong


def read(file: str) -> tuple[dict[str, object], list[record.Row]]:
    return record.read(Path(file), KEYS, "models")


def check(file: str, readme: str | None = None) -> int:
    """The targets, from a file of rows; and its figures into a README."""
    said, (_, rows) = operators.console(), read(file)
    found = acceptance.model_points(rows)
    said.print(acceptance.table(found, ABOUT))
    if readme and not model_tables.into(Path(readme), rows):
        said.print(f"{readme} has no marks ({model_tables.BEGIN}): it is as it was.", soft_wrap=True)
    return 0 if all(point.kept for point in found) else 1


def draw(file: str, stem: str) -> int:
    """The figure, from a file of rows."""
    facts, rows = read(file)
    for path in model_figure.draw(rows, Path(stem), str(facts.get("device", ""))):
        operators.console().print(str(path), soft_wrap=True)
    return 0


def _run(setting: Setting, tasks: list[Task], book: record.Book, said: Terminal, limit: float | None) -> list[Task]:
    """Measure the tasks, a line each; returns those for which the time did not last."""
    fallen: dict[str, str] = {}
    begun = time.monotonic()
    for done, task in enumerate(tasks):
        if limit is not None and time.monotonic() - begun > limit:
            return tasks[done:]
        row = measured(task, setting, fallen)
        book.add(row)
        rates = row["failure"] or f"{row['inference']:,.0f} / {row['training']:,.0f} images a second, {row['kernel']}"
        at = f"{time.monotonic() - begun:5.0f} s"
        said.print(f"{at}  {task!s:<52} {rates}", soft_wrap=True)
    return []
