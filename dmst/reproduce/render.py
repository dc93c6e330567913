"""Tables from the ledger alone; the same runs give the same bytes.

markdown    mean and spread over seeds, and differences seed by seed with their 95 % interval
svg         a picture: every run a dot, the mean a bar, against the means of the cells that the others are measured by
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dmst.analysis import report
from dmst.reproduce import ledger
from dmst.reproduce.tables import LAYERS, TABLES, Cell

# Student's t at 97.5 %, for 1 to 9 degrees of freedom
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
COLOURS = ("#0072B2", "#D55E00")  # of the two cells whose means are drawn through all rows


def markdown(name: str, lines: Sequence[ledger.Line]) -> str:
    """A table with its title, its cells, its gaps, what its layers do, and where the runs come from."""
    table = TABLES[name]
    runs = {cell.name: table.runs_of(cell, lines) for cell in table.cells}
    out = [f"# {table.title}", "", *([table.note, ""] if table.note else [])]
    what = f"difference to {table.against}, 95 % interval" if table.against else "difference, 95 % interval"
    out += [f"| | paper | published baseline | ours, top-1 % (mean ± std) | runs | {what} | train loss | parameters |"]
    out += ["|---|---|---|---|---|---|---|---|"]
    out += [row(cell, runs[cell.name], runs.get(cell.against or table.against, {})) for cell in table.cells]
    if table.pairs:
        out += ["", "## Pairs, seed by seed", "", "| first | second | first less second, 95 % interval |", "|---|---|---|"]
        out += [f"| {a} | {b} | {difference(runs[a], runs[b]) or 'not run'} |" for a, b in table.pairs]
    for layer in table.layers:
        out += by_layer(layer, {cell.name: list(runs[cell.name].values()) for cell in table.cells})
    return "\n".join([*out, "", *origin([line for each in runs.values() for line in each.values()], bool(table.layers)), ""])


def svg(name: str, lines: Sequence[ledger.Line]) -> str:
    """Cells from best to worst, one row each."""
    table = TABLES[name]
    found = {cell.name: table.runs_of(cell, lines) for cell in table.cells}
    scores = {cell: [100 * runs[seed]["metrics"]["top1"] for seed in sorted(runs)] for cell, runs in found.items() if runs}
    means = {cell: statistics.fmean(each) for cell, each in scores.items()}
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


def row(cell: Cell, mine: dict[int, ledger.Line], against: dict[int, ledger.Line]) -> str:
    told = ["-" if x is None else f"{x:.2f}" for x in (cell.paper, cell.published)]
    if not mine:
        return f"| {' | '.join((cell.name, *told))} | not run | 0 of {cell.seeds} | | | |"
    scores = [100 * mine[seed]["metrics"]["top1"] for seed in sorted(mine)]
    loss = statistics.fmean(mine[seed]["metrics"]["train_loss"] for seed in sorted(mine))
    count = f"{len(mine)}" if len(mine) >= cell.seeds else f"{len(mine)} of {cell.seeds}"
    gap = "" if mine is against else difference(mine, against)
    parameters = f"{next(iter(mine.values()))['parameters']:,}"
    return f"| {' | '.join((cell.name, *told, spread(scores), count, gap, f'{loss:.4f}', parameters))} |"


def by_layer(name: str, runs: dict[str, list[ledger.Line]]) -> list[str]:
    """Means over the runs of each cell that has it, one column a layer."""
    rows = {}
    for cell, lines in runs.items():
        found = [line["metrics"].get("layers", {}).get(name) for line in lines]
        if found and all(found):
            columns = zip(*([len(x) if isinstance(x, list) else x for x in each] for each in found), strict=True)
            rows[cell] = [math.nan if None in column else statistics.fmean(column) for column in columns]
    if not rows:
        return []
    depth = max(map(len, rows.values()))
    scale = 100 if LAYERS[name].endswith("%") else 1
    out = ["", f"## {LAYERS[name]}, by layer", "", "| | " + " | ".join(str(i) for i in range(depth)) + " |"]
    out += ["|---" * (depth + 1) + "|"]
    return out + [
        f"| {cell} | {' | '.join('-' if math.isnan(x) else f'{scale * x:.1f}' for x in values)} |"
        for cell, values in rows.items()
    ]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def difference(mine: dict[int, ledger.Line], theirs: dict[int, ledger.Line]) -> str:
    """Mean over the seeds that both have, and its interval by Student's t."""
    both = sorted(set(mine) & set(theirs))
    gaps = [100 * (mine[seed]["metrics"]["top1"] - theirs[seed]["metrics"]["top1"]) for seed in both]
    if len(gaps) < 2:
        return f"{gaps[0]:+.2f}" if gaps else ""
    half = T[min(len(gaps) - 2, len(T) - 1)] * statistics.stdev(gaps) / math.sqrt(len(gaps))
    mean = statistics.fmean(gaps)
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}, n = {len(gaps)})"


def origin(lines: Sequence[ledger.Line], by_layer: bool = False) -> list[str]:
    """One sentence for each way in which the runs were made."""
    ways = dict.fromkeys(
        f"{line['data']['name']}{', ' + line['data']['variant'] if line['data']['variant'] else ''}; {line['device']}, "
        f"torch {line['versions']['torch']}, commit {line['commit'][:7]}, {line['date']}"
        for line in lines
    )
    if not lines:
        return []
    minutes = sum(line["seconds"] for line in lines) / 60
    images = next((line["metrics"]["layers"]["images"] for line in lines if "layers" in line["metrics"]), None)
    looked = [f"- By layer: the first {images} of the images that were judged, mean over the runs."]
    shared = f"- {len(lines)} runs, {minutes:.1f} minutes of wall time summed over processes that shared the device."
    return [f"- {way}." for way in ways] + (looked if images and by_layer else []) + [shared]
