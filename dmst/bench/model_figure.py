"""Networks as images grow: images a second in inference and in training, and the memory of a training step, an image each.

Lines are the networks of the default comparison. A panel draws a size in one mode, the first of MODES that tells it there
(recorded rows tell no memory); in it the first row of a network counts. Equal rows give equal bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dmst.bench import figure
from dmst.bench.figure import Style
from dmst.bench.model_tables import NAMES
from dmst.bench.networks import EXCHANGED, OURS, SKELETON, TIMM_VIT, TIMM_XCIT
from dmst.bench.record import Row
from dmst.errors import OptionError, need

LINES = (
    Style(SKELETON, "", NAMES[SKELETON], "#D55E00", "s"),
    Style(EXCHANGED, "", NAMES[EXCHANGED], "#0072B2", "o"),
    Style(OURS, "", NAMES[OURS], "#009E73", "D"),
    Style(TIMM_VIT, "", NAMES[TIMM_VIT], "#555555", "^", "--"),
    Style(TIMM_XCIT, "", NAMES[TIMM_XCIT], "#CC79A7", "v", "--"),
)
MODES = ("recorded", "compiled", "graph", "eager")
PANELS = (
    ("inference", "images a second", "inference"),
    ("training", "images a second", "training"),
    ("memory", "peak of a training step, MiB an image", "peak_mb"),
)


def series(rows: list[Row], what: str, key: str) -> list[tuple[int, float]]:
    """(pixels, value); memory is that of one image."""
    found: dict[int, float] = {}
    for row in rows:
        if row["what"] == what and row[key] is not None:
            found.setdefault(row["pixels"], row[key] / (row["B"] if key == "peak_mb" else 1))
    return sorted(found.items())


def drawn(rows: list[Row], key: str) -> list[Row]:
    """The rows of the mode that is drawn at their size."""
    ranks: dict[int, int] = {}
    for row in rows:
        if row["failure"] is None and row[key] is not None:
            ranks[row["pixels"]] = min(MODES.index(row["mode"]), ranks.get(row["pixels"], len(MODES)))
    return [row for row in rows if ranks.get(row["pixels"]) == MODES.index(row["mode"])]


def draw(rows: list[Row], stem: Path, device: str = "") -> list[Path]:
    """Write STEM.svg and STEM.png; returns their paths."""
    matplotlib, figures = need("matplotlib", "bench"), need("matplotlib.figure", "bench")
    panels = [drawn(rows, key) for _, _, key in PANELS]
    if not any(series(shown, style.what, key) for style in LINES for shown, (_, _, key) in zip(panels, PANELS, strict=True)):
        raise OptionError("nothing to draw: no row of the networks in the figure holds a time.")
    with matplotlib.rc_context(figure.RULES):
        made: Any = figures.Figure(figsize=(11, 4.3))
        axes = made.subplots(1, 3)
        for axis, shown, panel in zip(axes, panels, PANELS, strict=True):
            _panel(axis, shown, *panel)
        handles, labels = axes[0].get_legend_handles_labels()
        made.legend(handles, labels, loc="lower left", ncols=5, bbox_to_anchor=(0.05, 0.055), columnspacing=1.4)
        made.text(0.06, 0.025, _caption(panels, device), fontsize=8.5, color="#444444")
        made.subplots_adjust(left=0.065, right=0.985, top=0.91, bottom=0.27, wspace=0.3)
        return figure.save(made, stem)


def _panel(axis: Any, rows: list[Row], title: str, label: str, key: str) -> None:
    axis.set(title=title)
    lines = [(style, points) for style in LINES if (points := series(rows, style.what, key))]
    if not lines:  # an empty frame would look like a result
        axis.set_axis_off()
        axis.text(0.5, 0.5, "not measured\nin this run", transform=axis.transAxes, ha="center", va="center", color="#444444")
        return
    for style, points in lines:
        look = {"color": style.colour, "marker": style.marker, "linestyle": style.dash, "label": style.label}
        axis.plot(*zip(*points, strict=True), markersize=5, linewidth=2 if style.what == EXCHANGED else 1.5, **look)
    axis.set(xscale="log", yscale="log", xlabel="side of an image, pixels")
    axis.set_ylabel(label)
    ticks = sorted({row["pixels"] for row in rows})
    axis.set_xticks(ticks, [str(size) for size in ticks], fontsize=8.5)
    axis.minorticks_off()


def _caption(panels: list[list[Row]], device: str) -> str:
    settings: dict[tuple[int, int], dict[str, None]] = {}
    for row in (row for shown in panels for row in shown):
        settings.setdefault((row["pixels"], row["B"]), {})[row["mode"]] = None
    said = "; ".join(
        f"{pixels} px: {_modes(list(modes))}, batch {batch}" for (pixels, batch), modes in sorted(settings.items())
    )
    one = next(row for shown in panels for row in shown)
    torch = (one["versions"] or {}).get("torch", "")
    return ", ".join(part for part in (said, one["dtype"], device, f"torch {torch}" if torch else "") if part)


def _modes(modes: list[str]) -> str:
    return modes[0] if len(modes) == 1 else f"{modes[0]} (memory: {modes[-1]})"
