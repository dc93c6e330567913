"""Markdown from the ledger alone: mean and spread over seeds, and differences seed by seed with their 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dmst.reproduce import ledger
from dmst.reproduce.tables import TABLES, Cell, Table

# Student's t at 97.5 %, for 1 to 9 degrees of freedom
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def markdown(name: str, lines: Sequence[ledger.Line]) -> str:
    """A table with its title, its cells, its gaps, and where the runs come from."""
    table = TABLES[name]
    runs = {cell.name: runs_of(table, cell, lines) for cell in table.cells}
    against = runs[table.against]
    out = [f"# {table.title}", "", *table.notes, *([""] if table.notes else [])]
    out += [
        f"| | paper | top-1, % (mean ± std) | runs | difference to {table.against}, 95 % interval | train loss | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in table.cells:
        mine = runs[cell.name]
        paper = "" if cell.paper is None else f"{cell.paper:.2f}"
        if not mine:
            out.append(f"| {cell.name} | {paper} | not run | 0 of {cell.seeds} | | | |")
            continue
        scores = [100 * mine[seed]["metrics"]["top1"] for seed in sorted(mine)]
        losses = [mine[seed]["metrics"]["train_loss"] for seed in sorted(mine)]
        count = f"{len(mine)}" if len(mine) >= cell.seeds else f"{len(mine)} of {cell.seeds}"
        parameters = next(iter(mine.values()))["parameters"]
        gap = "" if cell.name == table.against else difference(mine, against)
        out.append(
            f"| {cell.name} | {paper} | {spread(scores)} | {count} | {gap} | {statistics.fmean(losses):.4f} | {parameters:,} |"
        )
    return "\n".join([*out, "", *origin([line for each in runs.values() for line in each.values()]), ""])


def runs_of(table: Table, cell: Cell, lines: Sequence[ledger.Line]) -> dict[int, ledger.Line]:
    found = ledger.runs_of(lines, ledger.config_of(table.recipe_of(cell, 0)))
    return {seed: line for seed, line in found.items() if seed < cell.seeds}


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


def origin(lines: Sequence[ledger.Line]) -> list[str]:
    """One sentence for each way in which the runs were made."""
    ways = dict.fromkeys(
        f"{line['data']['name']}{', ' + line['data']['variant'] if line['data']['variant'] else ''}; {line['device']}, "
        f"torch {line['versions']['torch']}, commit {line['commit'][:7]}, {line['date']}"
        for line in lines
    )
    seconds = sum(line["seconds"] for line in lines)
    return [f"- {way}." for way in ways] + ([f"- {len(lines)} runs, {seconds / 60:.1f} device minutes."] if lines else [])
