"""A table as a picture: every run a dot, the mean a bar, against the means of the cells that the others are measured by.

Plain SVG from the ledger alone: the same runs give the same bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dmst.reproduce import ledger
from dmst.reproduce.render import runs_of
from dmst.reproduce.tables import TABLES, Cell
from dmst.words import html

LEFT, WIDTH, ROW, TOP, BOTTOM = 290, 840, 22, 34, 48
MARKS = ("#0072B2", "#D55E00")  # of the two cells whose means are drawn through all rows
STYLE = (
    "text{font:13px sans-serif;fill:#222}.small{font-size:12px;fill:#555}.grid{stroke:#e4e4e4}.mean{stroke:#222;stroke-width:2}"
)


def svg(name: str, lines: Sequence[ledger.Line]) -> str:
    """Cells from best to worst, one row each."""
    table = TABLES[name]
    found: list[tuple[Cell, list[float]]] = []
    for cell in table.cells:
        runs = runs_of(table, cell, lines)
        if runs:
            found.append((cell, [100 * runs[seed]["metrics"]["top1"] for seed in sorted(runs)]))
    found.sort(key=lambda each: -statistics.fmean(each[1]))
    scores = [score for _, each in found for score in each]
    low = math.floor(min(scores, default=0))
    high = max(math.ceil(max(scores, default=100)), low + 1)
    height = TOP + ROW * len(found) + BOTTOM

    def across(score: float) -> str:
        return f"{LEFT + (score - low) / (high - low) * (WIDTH - LEFT - 20):.1f}"

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"><style>{STYLE}</style>']
    out += [
        f"<title>{html(table.title)}: top-1 of every run</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    floor = TOP + ROW * len(found)
    for tick in range(low, high + 1):
        out.append(f'<line class="grid" x1="{across(tick)}" x2="{across(tick)}" y1="{TOP}" y2="{floor}"/>')
        out.append(f'<text class="small" x="{across(tick)}" y="{floor + 18}" text-anchor="middle">{tick}</text>')
    out.append(f'<text class="small" x="{(LEFT + WIDTH) / 2:.0f}" y="{floor + 38}" text-anchor="middle">top-1, %</text>')
    means = {cell.name: statistics.fmean(each) for cell, each in found}
    for mark, colour in zip(table.marks, MARKS, strict=True):
        if mark in means:
            x = across(means[mark])
            out.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{floor}" stroke="{colour}" stroke-dasharray="5 4"/>')
            out.append(
                f'<text class="small" x="{x}" y="{TOP - 10}" text-anchor="middle" style="fill:{colour}">{html(mark)}</text>'
            )
    for i, (cell, each) in enumerate(found):
        middle = TOP + ROW * i + ROW / 2
        out.append(f'<text x="{LEFT - 12}" y="{middle + 4:.1f}" text-anchor="end">{html(cell.name)}</text>')
        out += [f'<circle cx="{across(score)}" cy="{middle:.1f}" r="4" fill="#777" fill-opacity=".55"/>' for score in each]
        x = across(means[cell.name])
        out.append(f'<line class="mean" x1="{x}" x2="{x}" y1="{middle - 8:.1f}" y2="{middle + 8:.1f}"/>')
    return "\n".join([*out, "</svg>", ""])
