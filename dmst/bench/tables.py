"""Rows as tables: one a shape for the terminal, two for the README.

summary(rows)     rich tables: milliseconds in each mode, multiples of the floor, memory, error
markdown(rows)    the same figures as text, equal for equal rows: a test holds the README to its file
into(readme, rows)    put it between the marks
between(...)          any text between any marks
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from dmst.atomic import write_text
from dmst.bench.layers import BACKENDS, CONTENDERS
from dmst.bench.record import PARITY, Row, find

MODES = ("eager", "graph", "compiled")
BEGIN, END = "<!-- begin results/h200/operators.json -->", "<!-- end results/h200/operators.json -->"
ENTRIES = [(what, backend) for what, contender in CONTENDERS.items() for backend in contender.backends]
ALL = tuple(CONTENDERS)
README = {  # mode -> which layers are shown
    "graph": ALL,
    "compiled": ("floor", "sdpa_p64", "tssa_published", "listing", "dmsa"),
    "eager": ("floor", "sdpa_p48", "sdpa_p64", "listing", "dmsa"),
}
NAMES = {
    "floor": "floor: the two projections alone",
    "sdpa_p48": "SDPA, heads of 48",
    "sdpa_p64": "SDPA, heads of 64",
    "xca": "XCA",
    "mssa": "MSSA",
    "tssa_published": "TSSA as published",
    "tssa": "TSSA",
    "listing": "DMSA as printed",
    "dmsa": "DMSA",
}
KIND = {"torch": "", "reference": ", plain", "fused": ", **fused**"}


def shapes_of(rows: list[Row]) -> list[tuple[int, int]]:
    """By length, in whatever order they were measured."""
    return sorted({(row["B"], row["N"]) for row in rows}, key=lambda shape: (shape[1], shape[0]))


def _pair(row: Row | None, keys: tuple[str, str] = ("forward_ms", "train_ms"), by: Row | None = None) -> str:
    """Two figures of a row, or their multiples of another row's; why not, where there are none."""
    if row is None:
        return ""
    if row.get("failure"):
        return PARITY if row["failure"].startswith(PARITY) else "failed"
    values = [row[key] for key in keys]
    if by is not None:
        values = [value / by[key] if value and by[key] else None for value, key in zip(values, keys, strict=True)]
    return " / ".join("-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in values)


def summary(rows: list[Row]) -> list[Table]:
    """One table a shape."""
    tables = []
    for b, n in shapes_of(rows):
        here = [row for row in rows if (row["B"], row["N"]) == (b, n)]
        modes = [mode for mode in MODES if find(here, mode=mode)]
        base = "graph" if "graph" in modes else "eager"
        title = f"{b} x {n}, width {here[0]['dim']}, {here[0]['dtype']}: forward / forward+backward"
        table = Table("layer", *(f"{mode}, ms" for mode in modes), f"x floor, {base}", "kept / peak, MiB", "error", title=title)
        floor = find(here, what="floor", mode=base, failure=None)
        for what, backend in ENTRIES:
            mine = {mode: find(here, what=what, backend=backend, mode=mode) for mode in modes}
            if not any(mine.values()):
                continue
            memory = _pair(mine.get("eager") or mine.get("compiled"), ("kept_mb", "peak_mb"))
            errors = [row["error"] for row in mine.values() if row and row["error"] is not None]
            ratio = _pair(mine.get(base), by=floor) if floor else ""
            name = what if backend == "torch" else f"{what} {backend}"
            style = "bold" if (what, backend) == ("dmsa", "fused") else None
            error = f"{max(errors):.1e}" if errors else ""
            table.add_row(name, *(_pair(row) for row in mine.values()), ratio, memory, error, style=style)
        tables.append(table)
    return tables


def markdown(rows: list[Row]) -> str:
    """Milliseconds with multiples of the floor of the same mode, then memory with the same."""
    shapes = shapes_of(rows)
    head = [f"| batch x tokens | {' | '.join(f'{b} x {n}' for b, n in shapes)} |", "|---" * (len(shapes) + 1) + "|"]
    lines = [
        "Forward / forward + backward, milliseconds (and multiples of the floor in the same mode); graph replay unless said.",
        "",
    ]
    lines += head
    for mode, shown in README.items():
        lines += _lines(rows, shapes, mode, shown, ("forward_ms", "train_ms"), f", {mode}" if mode != "graph" else "")
    memory = _lines(rows, shapes, "eager", ALL, ("kept_mb", "peak_mb"), "")
    if memory:  # eager rows only
        lines += [
            "",
            "Kept for the backward pass / peak of a training step, MiB (and multiples of the floor).",
            "",
            *head,
            *memory,
        ]
    return "\n".join(lines) + "\n"


def _lines(
    rows: list[Row], shapes: list[tuple[int, int]], mode: str, shown: tuple[str, ...], keys: tuple[str, str], suffix: str
) -> list[str]:
    lines = []
    for what, backend in ((what, backend) for what, backend in ENTRIES if what in shown and backend in BACKENDS):
        cells = []
        for b, n in shapes:
            row = find(rows, what=what, backend=backend, mode=mode, B=b, N=n)
            floor = find(rows, what="floor", mode=mode, B=b, N=n, failure=None)
            ratio = f" ({_pair(row, keys, floor)})" if row and floor and not row.get("failure") else ""
            cells.append(_pair(row, keys) + ratio)
        if any(cells):
            lines.append(f"| {NAMES[what]}{KIND[backend]}{suffix} | {' | '.join(cells)} |")
    return lines


def into(readme: Path, rows: list[Row]) -> bool:
    """Rewrite the README's table; False where it has no marks."""
    return between(readme, BEGIN, END, markdown(rows))


def between(readme: Path, begin: str, end: str, new: str) -> bool:
    """Rewrite what stands between two marks; False where there are none."""
    text = readme.read_text(encoding="utf-8")
    if begin not in text or end not in text.partition(begin)[2]:
        return False
    before, _, after = text.partition(begin)
    write_text(readme, before + begin + "\n" + new + end + after.partition(end)[2])
    return True
