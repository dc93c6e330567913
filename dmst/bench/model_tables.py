"""Rows of networks as tables: one a size and mode for the terminal, one for the README.

summary(rows)         rich tables: images a second, times the skeleton with softmax attention and times timm's ViT-S, memory
markdown(rows)        the same figures as text, equal for equal rows
into(readme, rows)    put it between the marks
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from dmst.bench import tables
from dmst.bench.networks import DEFAULT, EXCHANGED, OURS, SKELETON, TIMM_VIT, TIMM_XCIT
from dmst.bench.record import PARITY, Row, find

BEGIN, END = "<!-- begin results/h200/models.json -->", "<!-- end results/h200/models.json -->"
NAMES = {
    SKELETON: "ViT-S, softmax attention",
    EXCHANGED: "ViT-S, DMSA in its place",
    OURS: "DMST-S",
    TIMM_VIT: "timm's ViT-S",
    TIMM_XCIT: "timm's XCiT-S12",
}
MODES = {
    "compiled": "compiled",
    "recorded": "compiled, replayed as CUDA graphs",
    "graph": "inference by graph replay, training eager",
    "eager": "eager",
}
RATES = ("inference", "training")

Setting = tuple[int, int, str]  # pixels, batch, mode


def settings_of(rows: list[Row]) -> list[Setting]:
    """By size; the order of rows is that of measuring."""
    return sorted({(row["pixels"], row["B"], row["mode"]) for row in rows})


def _at(rows: list[Row], setting: Setting) -> list[Row]:
    """The rows of one setting, the known networks first."""
    here = [row for row in rows if (row["pixels"], row["B"], row["mode"]) == setting]
    return sorted(here, key=lambda row: DEFAULT.index(row["what"]) if row["what"] in DEFAULT else len(DEFAULT))


def _why(row: Row) -> str:
    return PARITY if row["failure"].startswith(PARITY) else "failed"


def _ratio(row: Row, base: Row | None, key: str) -> str:
    """The multiple of another network's figure; nothing where one of them is missing, or both are one."""
    if base is None or base["what"] == row["what"] or row[key] is None or not base[key]:
        return ""
    return f"{row[key] / base[key]:.2f}"


def summary(rows: list[Row]) -> list[Table]:
    """One table a setting."""
    found = []
    for pixels, batch, mode in settings_of(rows):
        here = _at(rows, (pixels, batch, mode))
        bases = [find(here, what=what, failure=None) for what in (SKELETON, TIMM_VIT)]
        table = Table(title=f"{pixels} pixels, {batch} images a step, {here[0]['dtype']}, {MODES[mode]}; images a second")
        table.add_column("network", no_wrap=True)
        for name in ("inference", "x softmax, timm", "training", "x softmax, timm", "peak, MiB", "x"):
            table.add_column(name, justify="right")
        for name in ("kernel", "error"):
            table.add_column(name)
        for row in here:
            told = _why(row) if row["failure"] else ""
            rates = [cell for key in RATES for cell in (_figure(row, key) or told, _ratios(row, bases, key))]
            memory = [_figure(row, "peak_mb"), _ratio(row, bases[0], "peak_mb")]
            style = "bold" if row["kernel"] == "fused" else None
            table.add_row(row["what"], *rates, *memory, row["kernel"], _error(row), style=style)
        found.append(table)
    return found


def _figure(row: Row, key: str) -> str:
    value = row[key]
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratios(row: Row, bases: list[Row | None], key: str) -> str:
    found = [_ratio(row, base, key) for base in bases]
    return ", ".join(ratio or "-" for ratio in found) if any(found) else ""


def _error(row: Row) -> str:
    """The worse of logits and gradients."""
    errors = [row[key] for key in ("error", "gradient_error") if row[key] is not None]
    return f"{max(errors):.1e}" if errors else ""


def markdown(rows: list[Row]) -> str:
    """Images a second and memory with multiples of the skeleton's, one column a setting."""
    settings = settings_of(rows)
    names = list(dict.fromkeys(row["what"] for setting in settings for row in _at(rows, setting)))
    heads = [f"{pixels} px, batch {batch}, {mode}" for pixels, batch, mode in settings]
    lines = [
        "Images a second, inference / training, then the peak of a training step in MiB (and multiples of ViT-S with softmax",
        "attention in the same column). Compiled: `torch.compile`. Recorded: its mode `reduce-overhead`, CUDA graphs that hold",
        "their memory, so that no peak is told. Graph: inference by CUDA-graph replay, training eager.",
        "",
        f"| network | {' | '.join(heads)} |",
        "|---" * (len(settings) + 1) + "|",
    ]
    for what in names:
        cells = [_cell(_at(rows, setting), what) for setting in settings]
        lines.append(f"| {NAMES.get(what, f'`{what}`')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(here: list[Row], what: str) -> str:
    row, base = find(here, what=what), find(here, what=SKELETON, failure=None)
    if row is None:
        return ""
    if row["failure"]:
        return _why(row)
    keys = [key for key in (*RATES, "peak_mb") if row[key] is not None]
    ratios = [ratio for key in keys if (ratio := _ratio(row, base, key))]
    return " / ".join(_figure(row, key) for key in keys) + (f" ({' / '.join(ratios)})" if ratios else "")


def into(readme: Path, rows: list[Row]) -> bool:
    """Rewrite the README's table; False where it has no marks."""
    return tables.between(readme, BEGIN, END, markdown(rows))
