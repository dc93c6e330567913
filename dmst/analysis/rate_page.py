"""The page of layer-wise rates: curves of several networks on the same images, the convention on the axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from dmst.analysis.charts import Line, line_chart
from dmst.analysis.rates import PLACES, LayerRates
from dmst.analysis.report import Section, table, write_report

CURVES = {
    "variational": ("R_var", "in each layer's subspaces, memberships sum to 1, silent heads cost nothing"),
    "all_heads": ("R_var, every head", "the same with silent heads counted: networks with and without a gate can be compared"),
    "raw": ("R_var, raw memberships", "as computed: grows with their mass, so compare with `mass` below"),
    "complete": ("complete rate", "what lies outside a subspace is paid for too"),
    "coding": ("coding rate", "all tokens as one Gaussian"),
    "gap": ("decorrelation gap", "0 where the channels of every head are uncorrelated"),
    "active": ("heads on", "whose gate is not 0"),
    "mass": ("mass", "memberships of a token summed over heads"),
}


def write_page(path: str | Path, found: Mapping[str, Mapping[str, LayerRates]], names: Mapping[str, str]) -> Path:
    """`found`: network -> place -> rates; `names`: network -> the images looked at."""
    drawn = sections(found)
    first = next(iter(next(iter(found.values())).values()))
    lead = f"<p>{escape('; '.join(sorted(set(names.values()))))}. Line: mean over images; band: one standard deviation.</p>"
    footer = (
        f"<p>{escape(first.convention.rpartition(', ')[0])}. After the operator and after the block: the same layer's norm "
    )
    footer += "and subspaces, memberships computed anew.</p>"
    rows = [(where, names[where], str(len(next(iter(each.values())).mean["coding"]))) for where, each in found.items()]
    drawn.append(Section("Looked at", table(("network", "images", "layers"), rows)))
    return write_report(path, "What the layers do to the rate", lead, drawn, footer)


def sections(found: Mapping[str, Mapping[str, LayerRates]], which: Sequence[str] = tuple(CURVES)) -> list[Section]:
    return [_section(name, *CURVES[name], found) for name in which]


def _section(name: str, title: str, words: str, found: Mapping[str, Mapping[str, LayerRates]]) -> Section:
    charts = ""
    for at, place in PLACES.items():
        lines = []
        for i, (where, rates) in enumerate(found.items()):
            if at in rates:
                mean, std = rates[at].mean[name], rates[at].std[name]
                low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
                lines.append(Line(where, range(len(mean)), mean, low, high, f"c{i % 4 + 1}", dashed=i > 3))
        unit = "" if name in ("active", "mass") else ", nats"
        charts += f"<div><h3>{escape(place)}</h3>{line_chart(lines, 'layer', title + unit)}</div>"
    return Section(title, f'<p>{escape(words)}</p><div class="charts three">{charts}</div>')
