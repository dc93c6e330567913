"""The page of layer-wise rates: curves of several networks on the same images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from dmst.analysis import report
from dmst.analysis.charts import Line
from dmst.analysis.rates import PLACES, LayerRates

WHERE = PLACES | {"input": "before the operator"}
BESIDE = {"all_heads": "R_var", "complete": "complete", "coding": "coding"}  # what can be compared between networks
CURVES = ("variational", "all_heads", "raw", "complete", "coding", "gap", "active", "mass")


def rate_line(
    name: str, rates: LayerRates, quantity: str, colour: str = "c1", *, band: bool = True, dashed: bool = False
) -> Line:
    """One quantity by layer: the mean over images, in a band of one standard deviation."""
    mean, std = rates.mean[quantity], rates.std[quantity]
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    return Line(name, range(len(mean)), mean, low if band else None, high if band else None, colour, dashed)


def write_page(path: str | Path, found: Mapping[str, Mapping[str, LayerRates]], images: str) -> Path:
    """`found`: network -> place -> rates; `images`: those that all of them looked at."""
    before = {name: rates["input"] for name, rates in found.items()}
    lines = {
        quantity: {
            at: [
                rate_line(name, rates[at], quantity, f"c{i % 4 + 1}", dashed=i > 3)
                for i, (name, rates) in enumerate(found.items())
            ]
            for at in WHERE
        }
        for quantity in CURVES
    }
    rows = [
        [str(i), *(_cell(each, quantity, i) for each in before.values() for quantity in BESIDE)]
        for i in range(max(len(each.mean["coding"]) for each in before.values()))
    ]
    return report.write(
        path,
        "rates.html",
        title="Rates of the layers",
        networks=list(found),
        images=images,
        lines=lines,
        places=WHERE,
        compared="all_heads" if any(math.isfinite(x) for each in before.values() for x in each.mean["all_heads"]) else "coding",
        columns=["layer", *(f"{name}: {word}" for name in found for word in BESIDE.values())],
        rows=rows,
        convention=next(iter(before.values())).convention.rpartition(", ")[0],
    )


def _cell(rates: LayerRates, quantity: str, layer: int) -> str:
    values = rates.mean[quantity]
    return f"{values[layer]:.1f}" if layer < len(values) and math.isfinite(values[layer]) else "-"
