"""Line charts: lines, and axes from numbers to places in an SVG, which templates/parts.html draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 14, 44  # margins
Point = tuple[float, ...]


class Line(NamedTuple):
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] | None = None  # a band around the line
    high: Sequence[float] | None = None
    colour: str = "c1"  # c1 to c4 of report.css: Okabe and Ito's colours, which colour-blind people can tell apart
    dashed: bool = False

    def strokes(self) -> list[list[Point]]:
        """(x, y), in pieces: a missing value ends one."""
        return _unbroken(zip(self.xs, self.ys, strict=True))

    def bands(self) -> list[list[tuple[float, float]]]:
        """The outlines of the band."""
        if self.low is None or self.high is None:
            return []
        pieces = _unbroken(zip(self.xs, self.ys, self.low, self.high, strict=True))
        return [[(x, high) for x, _, _, high in some] + [(x, low) for x, _, low, _ in reversed(some)] for some in pieces]

    def dots(self, digits: int) -> Iterator[tuple[float, float, str]]:
        """(x, y, what it says when pointed at)"""
        nothing = [math.nan] * len(self.xs)
        for x, y, low, high in zip(self.xs, self.ys, self.low or nothing, self.high or nothing, strict=True):
            if math.isfinite(x) and math.isfinite(y):
                spread = f" ({low:.{digits}f} to {high:.{digits}f})" if math.isfinite(low + high) else ""
                yield x, y, f"{x:.10g}: {y:.{digits}f}{spread}"


class Axis:
    """A scale from numbers to pixels, `start` to `stop`, that holds all `values`; with `grow`, up to the next ticks."""

    def __init__(self, values: Sequence[float], start: int, stop: int, *, whole: bool = False, grow: bool = False) -> None:
        self.low, self.high = max(min(values), -1e300), min(max(values), 1e300)
        self.high = max(self.high, self.low + max(1e-9, 1e-9 * abs(self.low)))  # far enough apart to divide by
        self.start, self.stop = start, stop
        self.ticks = round_ticks(self.low, self.high, whole=whole)
        if grow:
            self.low, self.high = min(self.low, self.ticks[0]), max(self.high, self.ticks[-1])
        self.ticks = [tick for tick in self.ticks if self.low <= tick <= self.high]

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start), 1)


def axes(lines: Sequence[Line], y_range: tuple[float, float] | None = None, whole_x: bool = True) -> tuple[Axis, Axis] | None:
    """Of a chart; None where there are no finite values. A `y_range` widens to what is drawn."""
    xs = [x for line in lines for x in line.xs if math.isfinite(x)]
    ys = [y for line in lines for row in (line.ys, line.low, line.high) for y in row or () if math.isfinite(y)]
    if not xs or not ys:
        return None
    y = Axis([*ys, *(y_range or ())], HEIGHT - BOTTOM, TOP, grow=y_range is None)
    return Axis(xs, LEFT, WIDTH - RIGHT, whole=whole_x), y


def round_ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About `count` round numbers that cover low..high."""
    rough = (high / 2 - low / 2) / count * 2
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def evenly(rows: Sequence[Any], most: int) -> list[Any]:
    """At most so many of `rows`, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _unbroken(points: Iterator[Point]) -> list[list[Point]]:
    return [list(some) for finite, some in groupby(points, lambda point: all(map(math.isfinite, point))) if finite]
