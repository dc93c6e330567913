"""results/moves.md and results/moves.svg from the runs in results/moves. The same runs give the same bytes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from moves_plans import BASE, DATA, FINALS, PLANS, Run, finals, first

from dmst.atomic import write_text
from dmst.reproduce.render import difference, spread

OUT = Path(__file__).resolve().parent.parent / "results"
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "tinyimagenet": "Tiny-ImageNet"}
COLOURS = dict(zip(BASE, ("#555555", "#D55E00", "#E69F00", "#0072B2", "#009E73"), strict=True))
Lines = list[dict[str, Any]]
Found = dict[str, dict[int, dict[str, Any]]]  # cell -> seed -> line


def render(lines: Lines) -> None:
    print(write_text(OUT / "moves.md", markdown(lines)))
    print(write_text(OUT / "moves.svg", svg(lines)))


def places() -> dict[tuple[str, int, int, float], int]:
    """Data, rows, epochs and mixup of each final, in order, and how many seeds it asks for."""
    found: dict[tuple[str, int, int, float], int] = {}
    for data, rows, epochs, mixup, seeds in FINALS:
        found[data, rows, epochs, mixup] = found.get((data, rows, epochs, mixup), 0) + len(seeds)
    return found


def runs_of(lines: Lines, data: str, rows: int) -> Found:
    cells = {run.key: run.cell for run in (*finals(), *first()) if (run.data, run.rows) == (data, rows)}
    found: Found = {cell: {} for cell in cells.values()}
    for line in lines:
        if line["run"] in cells:
            found[cells[line["run"]]][line["seed"]] = line
    return found


def markdown(lines: Lines) -> str:
    out = [
        "# What moves: GMSA, softmax attention, DMSA and TSSA in one skeleton",
        "",
        "Written by `python benchmarks/moves.py render` from `results/moves`. Top-1 % on the test images, read once, after the "
        "last step; mean ± deviation over the seeds. Differences are of the same seeds, with their 95 % interval. *off*: every "
        "operator's output set to zero. *certified*: the smallest share, over the layers and runs, of 1,000 test images on "
        "which the step is guaranteed to lower R_mix. A cell with fewer runs than its data set asks for says so.",
    ]
    for (data, rows, epochs, mixup), seeds in places().items():
        runs = runs_of(lines, data, rows)
        mixed = f", mixup {mixup:g}" if mixup else ""
        out += ["", f"## {TITLES[data]}, {rows**2} tokens, {epochs} epochs{mixed}, {seeds} seeds", ""]
        out += ["| operator | top-1 | runs | minus softmax | minus DMSA | train loss | off | certified | parameters |"]
        out += ["|---" * 9 + "|", *(row(cell, runs, seeds) for cell in runs)]
    for plan in ("search", "search256", "rates"):
        out += searched(plan, lines)
    return "\n".join([*out, "", *origin(lines), ""])


def row(cell: str, runs: Found, seeds: int) -> str:
    mine = runs[cell]
    if not mine:
        return f"| {cell} | not run | 0 of {seeds} | | | | | | |"
    each = [mine[seed] for seed in sorted(mine)]
    gaps = ["" if cell == other else difference(*map(told, (mine, runs[other]))) for other in ("softmax attention", "DMSA")]
    certified = [line["certified"]["guaranteed"] for line in each if "certified" in line]
    cells = [
        cell,
        spread([100 * line["top1"] for line in each]),
        f"{len(mine)}" if len(mine) >= seeds else f"{len(mine)} of {seeds}",
        *gaps,
        f"{statistics.fmean(line['train_loss'] for line in each):.3f}",
        f"{100 * statistics.fmean(line['off'] for line in each):.1f}",
        f"{100 * min(certified):.1f} %" if certified else "",
        f"{each[0]['parameters']:,}",
    ]
    return f"| {' | '.join(cells)} |"


def told(mine: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """As the ledger's renderer reads runs."""
    return {seed: {"metrics": line} for seed, line in mine.items()}


def searched(plan: str, lines: Lines) -> list[str]:
    """One row a network, one column a learning rate; on held-out training images, one seed."""
    done = {(line["run"], line["seed"]): line for line in lines}
    out: list[str] = []
    asked: dict[tuple[str, int, int], dict[str, dict[float, Run]]] = {}
    for run in PLANS[plan]():
        asked.setdefault((run.data, run.rows, run.epochs), {}).setdefault(run.cell, {})[run.lr] = run
    for (data, rows, epochs), cells in asked.items():
        rates = sorted({lr for each in cells.values() for lr in each})
        out += [
            "",
            f"## Search: {TITLES[data]}, {rows**2} tokens, {epochs} epochs, held-out training images, seed 0",
            "",
        ]
        out += [
            "| network | " + " | ".join(f"top-1 at lr {lr:g} | off" for lr in rates) + " |",
            "|---" * (1 + 2 * len(rates)) + "|",
        ]
        for cell, each in cells.items():
            values = []
            for lr in rates:
                line = done.get((each[lr].key, 0)) if lr in each else None
                values += (
                    [f"{100 * line['top1']:.2f}", f"{100 * line['off']:.1f}"] if line else ["not run" if lr in each else "", ""]
                )
            if any(value not in ("", "not run") for value in values):
                out.append(f"| {cell} | {' | '.join(values)} |")
        if out[-1].startswith("|---"):
            out.append(f"| none of {len(cells)} networks was run |" + " |" * 2 * len(rates))
    return out


def origin(lines: Lines) -> list[str]:
    ways = {}
    for line in lines:
        torch, triton = (line["versions"][name] for name in ("torch", "triton"))
        ways[f"- {line['device']}, torch {torch}, triton {triton}, commit {line['commit'][:7]}, {line['date']}."] = None
    seconds = sum(line["seconds"]["all"] for line in lines)
    return [
        *ways,
        f"- {len(lines)} runs, {seconds / 60:.0f} minutes of processes, up to twenty of which shared the device.",
    ]


def svg(lines: Lines) -> str:
    """Every run with its operators (full) and with all of them off (empty), and between the means what they are worth."""
    body, y = [], 20.0
    for data, rows, *_ in places():
        runs = runs_of(lines, data, rows)
        if not any(runs.values()):
            continue
        body.append(f'<text class="head" x="10" y="{y + 8:g}">{TITLES[data]}, {rows**2} tokens</text>')
        for cell, mine in runs.items():
            y += 20
            colour = COLOURS[cell.removesuffix(" at 2e-3")]
            body.append(f'<text x="198" y="{y + 8:g}" text-anchor="end">{cell if mine else f"{cell}: not run"}</text>')
            on, off = ([across(line[what]) for line in mine.values()] for what in ("top1", "off"))
            if mine:
                ends = (statistics.fmean(off), statistics.fmean(on))
                body.append(f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y + 4:g}" y2="{y + 4:g}" stroke="{colour}"/>')
            body += [f'<circle cx="{x:.1f}" cy="{y + 4:g}" r="4" fill="{colour}" fill-opacity=".6"/>' for x in on]
            body += [f'<circle cx="{x:.1f}" cy="{y + 4:g}" r="4" fill="#fff" stroke="{colour}"/>' for x in off]
        y += 32
    ticks = range(0, 101, 20)
    grid = [f'<line class="grid" x1="{across(t / 100):g}" x2="{across(t / 100):g}" y1="14" y2="{y:g}"/>' for t in ticks]
    words = [f'<text class="small" x="{across(t / 100):g}" y="{y + 14:g}" text-anchor="middle">{t} %</text>' for t in ticks]
    note = "top-1 on test images: full dots with the operators, empty dots with every operator's output set to zero"
    style = "text{font:13px sans-serif;fill:#222}.small{font-size:12px;fill:#555}.head{font-weight:bold}.grid{stroke:#e4e4e4}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 {y + 44:g}" role="img"><style>{style}</style>\n'
        f"<title>What the operator is worth: {note}</title>\n"
        f'<rect width="840" height="{y + 44:g}" fill="#fff"/>\n'
        + "\n".join([*grid, *words, *body, f'<text class="small" x="520" y="{y + 36:g}" text-anchor="middle">{note}</text>'])
        + "\n</svg>\n"
    )


def across(share: float) -> float:
    return 210 + 610 * share


assert set(TITLES) == set(DATA)
