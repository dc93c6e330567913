"""The paper's figure, from our measurements: time and memory of one layer against tokens, and the accuracies it prints beside.

The paper plots activation memory against the length of the input, for MHSA, TSSA and DMSA, and bars of ImageNet accuracy. Here
every value is that of one sequence: a row's, divided by its batch. The accuracies are quoted, not measured. Equal rows give
equal bytes: no date, no random identifiers; text stays text.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

from dmst.atomic import write_bytes, write_text
from dmst.bench.record import Row
from dmst.errors import OptionError, need


class Style(NamedTuple):
    """How a layer is drawn: colours of Okabe and Ito, told apart by everyone."""

    what: str
    backend: str
    label: str
    colour: str
    marker: str
    dash: str = "-"


LINES = (
    Style("sdpa_p64", "torch", "softmax attention (SDPA)", "#D55E00", "s"),
    Style("listing", "torch", "DMSA as printed", "#CC79A7", "D"),
    Style("tssa_published", "torch", "TSSA as published", "#E69F00", "^"),
    Style("dmsa", "fused", "DMSA, ours (fused)", "#0072B2", "o"),
    Style("floor", "torch", "the two projections alone", "#555555", "", "--"),
)
ACCURACY = {"TSSA": ("#E69F00", (65.42, 77.90)), "DMST": ("#0072B2", (66.87, 78.98))}  # the paper's table, ImageNet-1K, T and S
SIZES = ("tiny, 5.6 M", "small, 22 M")
RULES = {
    "svg.fonttype": "none", "svg.hashsalt": "dmst", "font.family": "sans-serif", "font.size": 10, "axes.titlesize": 10.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True,
    "grid.color": "#e4e4e4", "grid.linewidth": 0.8, "axes.axisbelow": True, "legend.frameon": False, "path.simplify": False,
    "figure.facecolor": "white", "axes.facecolor": "white",
}  # fmt: skip


def series(rows: list[Row], style: Style, key: str, modes: tuple[str, ...]) -> list[tuple[int, float]]:
    """(tokens, value of one sequence), from the first of `modes` in which the layer was measured."""
    for mode in modes:
        found = {
            row["N"]: row[key] / row["B"]
            for row in rows
            if (row["what"], row["backend"], row["mode"]) == (style.what, style.backend, mode) and row[key] is not None
        }
        if found:
            return sorted(found.items())
    return []


def draw(rows: list[Row], stem: Path, device: str = "") -> list[Path]:
    """Write STEM.svg and STEM.png; returns their paths."""
    matplotlib, figures = need("matplotlib", "bench"), need("matplotlib.figure", "bench")
    panels = (
        ("time", "forward + backward, ms a sequence", "train_ms", ("graph", "eager")),
        ("memory", "kept for backward, MiB a sequence", "kept_mb", ("eager",)),
    )
    if not any(series(rows, style, key, modes) for style in LINES for _, _, key, modes in panels):
        raise OptionError("nothing to draw: no row of the layers in the figure holds a time or a memory.")
    with matplotlib.rc_context(RULES):
        figure: Any = figures.Figure(figsize=(11, 4.3))
        axes = figure.subplots(1, 3, width_ratios=(1.25, 1.25, 0.9))
        for axis, (title, label, key, modes) in zip(axes, panels, strict=False):
            _panel(axis, rows, title, label, key, modes)
        _accuracies(axes[2])
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", ncols=3, bbox_to_anchor=(0.05, 0.055), columnspacing=1.4)
        figure.text(0.06, 0.025, _caption(rows, device), fontsize=8.5, color="#444444")
        figure.subplots_adjust(left=0.065, right=0.985, top=0.91, bottom=0.315, wspace=0.3)
        return save(figure, stem)


def save(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as STEM.svg and STEM.png, inside the `rc_context` of RULES; returns their paths."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=110, metadata={"Software": None})
    named = [stem.with_name(stem.name + ending) for ending in (".svg", ".png")]
    write_text(named[0], svg.getvalue().decode())
    write_bytes(named[1], png.getvalue())
    return named


def _panel(axis: Any, rows: list[Row], title: str, label: str, key: str, modes: tuple[str, ...]) -> None:
    lines = [(style, points) for style in LINES if (points := series(rows, style, key, modes))]
    if not lines:  # an empty frame would look like a result
        axis.set(title=title)
        axis.set_axis_off()
        axis.text(0.5, 0.5, "not measured\nin this run", transform=axis.transAxes, ha="center", va="center", color="#444444")
        return
    for style, points in lines:
        look = {"color": style.colour, "marker": style.marker, "linestyle": style.dash, "label": style.label}
        axis.plot(*zip(*points, strict=True), markersize=5, linewidth=2 if style.what == "dmsa" else 1.5, **look)
    axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
    axis.set_ylabel(label)
    ticks = sorted({row["N"] for row in rows})
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8.5)
    axis.minorticks_off()


def _accuracies(axis: Any) -> None:
    for i, (name, (colour, values)) in enumerate(ACCURACY.items()):
        places = [size + (i - 0.5) * 0.38 for size in range(len(SIZES))]
        axis.bar(places, values, width=0.36, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            axis.text(place, value + 1.2, f"{value:.2f}", ha="center", fontsize=8.5)
            axis.text(place, 3, name, ha="center", rotation=90, color="white" if i else "#222222", fontsize=9, weight="bold")
    axis.set(ylim=(0, 100), title="ImageNet top-1, %")
    axis.set_xticks(range(len(SIZES)), SIZES)
    axis.grid(visible=False, axis="x")
    note = "as published by the paper,\nnot measured here"
    axis.text(0.5, -0.17, note, transform=axis.transAxes, ha="center", va="top", fontsize=9, style="italic", color="#444444")


def _caption(rows: list[Row], device: str) -> str:
    row = next(row for row in rows if row["what"] in {style.what for style in LINES})
    torch = (row["versions"] or {}).get("torch", "")
    timed = "times by CUDA-graph replay" if any(row["mode"] == "graph" for row in rows) else "times of plain calls"
    parts = ("one layer", f"width {row['dim']}", row["dtype"], timed, "each row's figure divided by its batch", device)
    return ", ".join(part for part in (*parts, f"torch {torch}" if torch else "") if part)
