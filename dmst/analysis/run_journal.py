"""A run as its journal tells it (the events of dmst/engine/journal.py), and what a page needs to say it in lines and words.

Run(events, recipe, model)     what was trained on what, the scores, the pace
numbers(events, "ema", "top1") one number an event        binned(steps, "loss", ...)    a line with few enough points
"""

from __future__ import annotations

import math
import signal
import tomllib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from statistics import mean, median
from typing import Any

from dmst.analysis.charts import Line
from dmst.models import VisionModel
from dmst.words import short

Event = dict[str, Any]
WIDE = 26  # letters of a name
MOST_POINTS = 40  # of a line, whose dots then stand apart
WEIGHTS = {"model": "the last weights", "ema": "the averaged weights"}


class Run:
    """A journal, sorted; what it lacks is empty."""

    def __init__(self, events: Sequence[Event], recipe: str, model: VisionModel) -> None:
        by_name: dict[str, list[Event]] = {}
        for event in events:
            by_name.setdefault(event.get("event", ""), []).append(event)
        self.events = events
        self.starts, self.steps, self.evaluations = (by_name.get(name, []) for name in ("start", "step", "evaluation"))
        self.checkpoints = len(by_name.get("checkpoint", []))
        self.facts: Event = self.starts[-1] if self.starts else {}
        self.end: Event = by_name.get("end", [{}])[-1]
        last = self.end or (self.evaluations[-1] if self.evaluations else {})
        self.scores: dict[str, Event] = {name: last[name] for name in WEIGHTS if isinstance(last.get(name), dict)}
        self.final: str = self.end.get("final") or next(reversed(self.scores), "model")
        self.best: Event = last.get("best") or {}
        self.classes: list[str] = self.facts.get("classes") or []
        self.operator, self.parameters = model.config.operator, sum(p.numel() for p in model.parameters())
        self.model = str(self.facts.get("model", model.config.name))
        self.evaluated: str = self.facts.get("evaluated", "")
        try:
            self.recipe: Event = tomllib.loads(recipe)
        except tomllib.TOMLDecodeError:
            self.recipe = {}

    @property
    def name(self) -> str:
        return str(self.facts.get("data", "unnamed images"))

    @property
    def data(self) -> str:
        """What was learnt from, with what must be said beside its name."""
        variant = self.facts.get("variant")
        return self.name + (f" ({variant})" if variant else "")

    @property
    def seen(self) -> str:
        """What was evaluated, as it stands beside every accuracy: "digits test", or "photos, 20 % held out"."""
        if self.evaluated == "holdout":  # the variant of what was learnt from says the share
            held = str(self.facts.get("variant") or "").replace("without the ", "")
            return f"{self.name}, {held if held.endswith('held out') else 'held out'}"
        return f"{self.name} {self.evaluated}{self.data.removeprefix(self.name)}"

    @property
    def pace(self) -> float:
        """Seconds a step: the median over the stretches of the journal that hold steps alone, so that pauses, evaluations and
        the first step, which may compile, are not in it. NaN where there was no step."""
        stretches = [list(some) for name, some in groupby(self.events, lambda event: event.get("event")) if name == "step"]
        told = [(s[-1]["time"] - s[0]["time"]) / (s[-1]["step"] - s[0]["step"]) for s in stretches if len(s) > 1]
        told = [seconds for seconds in told if seconds > 0] or [x for x in numbers(self.steps, "seconds") if x > 0]
        return median(told) if told else math.nan


# --- numbers ---------------------------------------------------------------------------------------------------------


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def numbers(events: Sequence[Event], *path: str) -> list[float]:
    """One number an event, NaN where it has none."""
    found = []
    for event in events:
        value: Any = event
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        found.append(number(value))
    return found


def percent(events: Sequence[Event], *path: str) -> list[float]:
    return [100 * value for value in numbers(events, *path)]


def binned(steps: Sequence[Event], name: str, word: str) -> Line:
    """A line through the steps, neighbours taken together where they are many: their mean, in a band of least and greatest."""
    told = [(x, y) for x, y in zip(numbers(steps, "epoch"), numbers(steps, name), strict=True) if math.isfinite(x + y)]
    size = max(1, math.ceil(len(told) / MOST_POINTS))
    bins = [list(zip(*told[i : i + size], strict=True)) for i in range(0, len(told), size)]
    line = Line(word, [mean(x) for x, _ in bins], [mean(y) for _, y in bins])
    return line if size == 1 else line._replace(low=[min(y) for _, y in bins], high=[max(y) for _, y in bins])


def spread(rows: Sequence[Any], most: int) -> list[Any]:
    """At most so many of `rows`, evenly, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


# --- words -----------------------------------------------------------------------------------------------------------


def named(classes: Sequence[str], label: int) -> str:
    """The class, no longer than a page has room for."""
    return short(classes[label], WIDE) if label < len(classes) else f"class {label}"


def in_time(seconds: float) -> str:
    """4.2 s, 42 s, 3 min 5 s, 7 h 12 min, 2 d 4 h."""
    whole = round(seconds)
    for size, name, smaller, its in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {its}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def when(seconds: Any) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if isinstance(seconds, int | float) else "?"


def side_by_side(parts: Iterable[str]) -> str:
    """Two across; one on a phone, which is narrower than the least width that report.css gives them."""
    columns = "grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr))"
    return f'<div class="charts" style="{columns}">{"".join(parts)}</div>'


def signal_name(value: Any) -> str:
    try:
        return signal.Signals(value).name
    except ValueError:
        return "a signal"
