"""Charts as text: SVG lines and HTML tables of cells. They follow the page's light or dark colours and need no script.

line_chart([Line("dmst", xs, ys, low, high)], x_label, y_label)     lines with bands; every point says its value when pointed at
cells(values, rows, columns)                                        a table whose cells are coloured by their number
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from dmst.words import html


class Line(NamedTuple):
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] | None = None  # a band around the line
    high: Sequence[float] | None = None
    colour: str = "c1"  # c1 to c4 of report.css: Okabe and Ito's colours, told apart by everyone
    dashed: bool = False


class Point(NamedTuple):
    x: float
    y: float
    low: float | None
    high: float | None


def runs_of(line: Line) -> list[list[Point]]:
    """The points of a line, broken where a value is missing. Where a band is missing, the point has none."""
    runs: list[list[Point]] = []
    open_run = False
    for i, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)):
        if not (math.isfinite(x) and math.isfinite(y)):
            open_run = False
            continue
        low, high = (None, None) if line.low is None or line.high is None else (line.low[i], line.high[i])
        point = Point(x, y, low, high)
        if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
            point = Point(x, y, None, None)
        if not open_run or (runs[-1][-1].low is None) != (point.low is None):
            runs.append([])
        runs[-1].append(point)
        open_run = True
    return runs


def span(values: Sequence[float]) -> tuple[float, float]:
    """Least and greatest, apart enough to divide by."""
    low, high = max(min(values), -1e300), min(max(values), 1e300)
    room = max(1e-9, 1e-9 * abs(low))
    return (low, high) if high - low >= room else (low, low + room)


def line_chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    width: int = 520,
    height: int = 300,
    y_range: tuple[float, float] | None = None,
    digits: int = 2,
    whole_x: bool = True,
) -> str:
    """One SVG. NaN points are left out."""
    left, right, top, bottom = 72, 16, 14, 44
    xs = [x for line in lines for x in line.xs if math.isfinite(x)]
    ys = [y for line in lines for row in (line.ys, line.low, line.high) if row is not None for y in row if math.isfinite(y)]
    if not xs or not ys:
        return '<p class="note">Nothing to draw: there are no finite values.</p>'
    x0, x1 = span(xs)
    y0, y1 = span([*ys, *(y_range or ())])  # what was asked for, and all that is drawn
    x_ticks, y_ticks = ticks(x0, x1, whole=whole_x), ticks(y0, y1)
    if y_range is None:
        y0, y1 = min(y0, y_ticks[0]), max(y1, y_ticks[-1])

    def place(x: float, y: float) -> str:
        across = left + (x - x0) / (x1 - x0) * (width - left - right)
        down = height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom)
        return f"{across:.1f},{down:.1f}"

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html(y_label)} against {html(x_label)}">']
    for y in (y for y in y_ticks if y0 <= y <= y1):
        a, b = place(x0, y).split(","), place(x1, y).split(",")
        parts.append(f'<line class="grid" x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}"/>')
        parts.append(f'<text x="{left - 8}" y="{float(a[1]) + 4:.1f}" text-anchor="end">{told(y)}</text>')
    for x in (x for x in x_ticks if x0 <= x <= x1):
        across = place(x, y0).split(",")[0]
        parts.append(f'<text x="{across}" y="{height - bottom + 18}" text-anchor="middle">{told(x)}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{height - 6}" text-anchor="middle">{html(x_label)}</text>')
    middle = (top + height - bottom) / 2
    parts.append(
        f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{html(y_label)}</text>'
    )
    for line in lines:
        dash = ' stroke-dasharray="6 5"' if line.dashed else ""
        for run in runs_of(line):  # a gap stays a gap
            if run[0].low is not None:
                around = [(p.x, p.high) for p in run] + [(p.x, p.low) for p in reversed(run)]
                parts.append(f'<polygon class="band {line.colour}" points="{" ".join(place(*p) for p in around)}"/>')  # type: ignore[arg-type]
            parts.append(f'<polyline class="line {line.colour}"{dash} points="{" ".join(place(p.x, p.y) for p in run)}"/>')
            for p in run:
                spread = "" if p.low is None else f" ({p.low:.{digits}f} to {p.high:.{digits}f})"
                across, down = place(p.x, p.y).split(",")
                said = f"{html(line.name)}, {html(x_label)} {told(p.x)}: {p.y:.{digits}f}{spread}"
                parts.append(
                    f'<circle class="dot {line.colour}" cx="{across}" cy="{down}" r="3.2"><title>{said}</title></circle>'
                )
    parts.append("</svg>")
    keys = "".join(
        f'<span class="key"><i class="{line.colour}{" dashed" if line.dashed else ""}"></i>{html(line.name)}</span>'
        for line in lines
    )
    return f'<div class="chart">{"".join(parts)}<div class="keys">{keys}</div></div>'


def cells(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    groups: Sequence[tuple[str, int]] = (),
    corner: str = "",
    high: float = 1.0,
) -> str:
    """A table of numbers from 0 to `high`, darker for more; exact zeros are drawn as empty. `groups` names runs of columns."""
    head = ""
    if groups:
        head += "<tr><th></th>" + "".join(f'<th colspan="{size}">{html(name)}</th>' for name, size in groups) + "</tr>"
    head += f"<tr><th>{html(corner)}</th>" + "".join(f"<th>{html(name)}</th>" for name in columns) + "</tr>"
    starts = set(itertools.accumulate((size for _, size in groups), initial=0)) if groups else set()
    body = ""
    for name, row in zip(rows, values, strict=True):
        body += f'<tr><th scope="row">{html(name)}</th>'
        for j, value in enumerate(row):
            edge = " first" if j in starts else ""
            if math.isnan(value) or value == 0:
                body += f'<td class="zero{edge}">{"" if math.isnan(value) else "0"}</td>'
            else:
                part = min(max(value / high, 0.0), 1.0)
                body += f'<td class="cell{" strong" if part > 0.72 else ""}{edge}" style="--v:{part:.3f}">{value:.2f}</td>'
        body += "</tr>"
    return f'<div class="scroll"><table class="cells"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About `count` round numbers that cover low..high."""
    low, high = span((low, high))
    rough = (high / 2 - low / 2) / count * 2
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def told(value: float) -> str:
    return f"{value:.10g}"
