"""A table as a picture: every run a dot, the mean a bar, against the means of the cells that the others are measured by.

Plain SVG from the ledger alone: the same runs give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from dmst.analysis import report
from dmst.reproduce import ledger
from dmst.reproduce.render import runs_of
from dmst.reproduce.tables import TABLES

COLOURS = ("#0072B2", "#D55E00")  # of the two cells whose means are drawn through all rows


def svg(name: str, lines: Sequence[ledger.Line]) -> str:
    """Cells from best to worst, one row each."""
    table = TABLES[name]
    found = {cell.name: runs_of(table, cell, lines) for cell in table.cells}
    scores = {cell: [100 * runs[seed]["metrics"]["top1"] for seed in sorted(runs)] for cell, runs in found.items() if runs}
    means = {cell: fmean(each) for cell, each in scores.items()}
    every = [score for each in scores.values() for score in each]
    low = math.floor(min(every, default=0))
    high = max(math.ceil(max(every, default=100)), low + 1)
    return report.render(
        "dots.svg",
        title=table.title,
        low=low,
        high=high,
        across=lambda score: f"{290 + (score - low) / (high - low) * 530:.1f}",
        marks=[(mark, means[mark], colour) for mark, colour in zip(table.marks, COLOURS, strict=True) if mark in means],
        rows=[(cell, means[cell], scores[cell]) for cell in sorted(scores, key=lambda cell: -means[cell])],
    )
