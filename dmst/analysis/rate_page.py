"""The page of layer-wise rates: curves of several networks on the same images, the convention on the axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from dmst.analysis.charts import Line, line_chart
from dmst.analysis.rates import PLACES, LayerRates
from dmst.analysis.report import Section, table, write_report
from dmst.words import html

CURVES = {
    "variational": (
        "R_var",
        "The variational rate: the cost of the tokens in the subspaces of the heads. Memberships are scaled to sum to 1. A "
        "silent head (gate exactly 0) costs nothing.",
    ),
    "all_heads": (
        "R_var, all heads",
        "The same, but silent heads count too. Use it to compare networks with and without a gate.",
    ),
    "raw": (
        "R_var, raw memberships",
        "The same as R_var, with the memberships as the network computes them. It grows with their sum: see the mass below.",
    ),
    "complete": ("complete rate", "Also counts the part of the tokens that lies outside the subspaces."),
    "coding": ("coding rate", "The cost of all tokens as one Gaussian, without groups."),
    "gap": ("decorrelation gap", "0 if the channels of every head are uncorrelated."),
    "active": ("heads on", "The number of heads whose gate is above 0."),
    "mass": ("mass", "The memberships of a token, summed over the heads."),
}


WHERE = PLACES | {"input": "before the operator"}
BESIDE = {"all_heads": "R_var", "complete": "complete", "coding": "coding"}  # what can be compared between networks


def write_page(path: str | Path, found: Mapping[str, Mapping[str, LayerRates]], images: str) -> Path:
    """`found`: network -> place -> rates; `images`: those that all of them looked at."""
    first = next(iter(next(iter(found.values())).values()))
    drawn = [*([_side_by_side(found)] if len(found) > 1 else []), *sections(found)]
    lead = (
        "<p>A <b>rate</b> is the number of nats needed to encode the tokens of an image (1 nat = 1.44 bits). This page shows "
        f"it for every layer of {html(', '.join(found))}, measured on {html(images)}. Lines: mean over images. Bands: one "
        "standard deviation.</p>"
    )
    footer = (
        f"<p>How rates are measured: {html(first.convention.rpartition(', ')[0])}. After the operator and after the block: "
        "with the norm and the subspaces of the same layer, and memberships computed again.</p>"
    )
    return write_report(path, "Rates of the layers", lead, drawn, footer)


def _side_by_side(found: Mapping[str, Mapping[str, LayerRates]]) -> Section:
    """One chart and one table of all networks, at the operator's input."""
    before = {where: rates["input"] for where, rates in found.items()}
    name = "all_heads" if any(math.isfinite(x) for each in before.values() for x in each.mean["all_heads"]) else "coding"
    chart = line_chart(_lines(before, name), "layer", f"{CURVES[name][0]} (nats)")
    columns = ["layer", *(f"{where}: {word}" for where in before for word in BESIDE.values())]
    depth = max(len(each.mean["coding"]) for each in before.values())
    rows = [
        [str(i), *(_number(each.mean[each_name], i) for each in before.values() for each_name in BESIDE)] for i in range(depth)
    ]
    told = "In nats, on the same images, before each operator. R_var counts all heads, also the silent ones."
    return Section("Side by side", f"<p>{told}</p>{chart}{table(columns, rows)}")


def _number(values: Sequence[float], layer: int) -> str:
    return f"{values[layer]:.1f}" if layer < len(values) and math.isfinite(values[layer]) else "-"


def _lines(rates: Mapping[str, LayerRates], name: str) -> list[Line]:
    lines = []
    for i, (where, each) in enumerate(rates.items()):
        mean, std = each.mean[name], each.std[name]
        low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
        lines.append(Line(where, range(len(mean)), mean, low, high, f"c{i % 4 + 1}", dashed=i > 3))
    return lines


def sections(found: Mapping[str, Mapping[str, LayerRates]], which: Sequence[str] = tuple(CURVES)) -> list[Section]:
    return [_section(name, *CURVES[name], found) for name in which]


def _section(name: str, title: str, words: str, found: Mapping[str, Mapping[str, LayerRates]]) -> Section:
    charts = ""
    for at, place in WHERE.items():
        lines = _lines({where: rates[at] for where, rates in found.items() if at in rates}, name)
        unit = "" if name in ("active", "mass") else " (nats)"
        charts += f"<div><h3>{html(place)}</h3>{line_chart(lines, 'layer', title + unit)}</div>"
    return Section(title[0].upper() + title[1:], f'<p>{html(words)}</p><div class="charts three">{charts}</div>')
