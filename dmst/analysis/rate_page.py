"""The page of layer-wise rates: curves of several networks on the same images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dmst.analysis import report
from dmst.analysis.charts import Line
from dmst.analysis.rates import PLACES, QUANTITIES, LayerRates

WHERE = PLACES | {"input": "before the operator"}


def rate_line(
    name: str, rates: LayerRates, quantity: str, colour: str = "c1", *, band: bool = True, dashed: bool = False
) -> Line:
    """One quantity by layer: the mean over images, in a band of one standard deviation."""
    mean, std = rates.mean[quantity], rates.std[quantity]
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    return Line(name, range(len(mean)), mean, low if band else None, high if band else None, colour, dashed)


def write_page(path: str | Path, found: Mapping[str, Mapping[str, LayerRates]], images: str) -> Path:
    """`found`: network -> place -> rates; `images`: those that all of them looked at."""
    lines = {
        quantity: {
            at: [
                rate_line(name, rates[at], quantity, f"c{i % 4 + 1}", dashed=i > 3)
                for i, (name, rates) in enumerate(found.items())
            ]
            for at in WHERE
        }
        for quantity in QUANTITIES
    }
    first = next(iter(found.values()))["input"]
    return report.write(
        path,
        "rates.html",
        title="Rates of the layers",
        networks=list(found),
        images=images,
        lines=lines,
        places=WHERE,
        convention=first.convention.rpartition(", ")[0],
    )
