"""A training run as its journal tells it (the events of dmst/engine/journal.py).

Run(events, recipe)                what was trained on what, the scores, the pace
numbers(events, "ema", "top1")     one number per event        binned(steps, "loss", ...)    a line with few enough points
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import mean
from typing import Any

from dmst.analysis.charts import Line, evenly

Event = dict[str, Any]
MOST_POINTS = 40  # of a line, whose dots then stand apart
WEIGHTS = {"model": "the last weights", "ema": "the averaged weights"}
COLOURS = {"model": "c2", "ema": "c3"}


class Run:
    """A journal, sorted; what it lacks is empty. `recipe`: the text of recipe.toml."""

    def __init__(self, events: Sequence[Event], recipe: str) -> None:
        by_name: dict[str, list[Event]] = {}
        for event in events:
            by_name.setdefault(event.get("event", ""), []).append(event)
        self.events, self.recipe = events, recipe
        self.starts, self.steps, self.evaluations = (by_name.get(name, []) for name in ("start", "step", "evaluation"))
        self.checkpoints = len(by_name.get("checkpoint", []))
        self.facts: Event = self.starts[-1] if self.starts else {}
        self.end: Event = by_name.get("end", [{}])[-1]
        last = self.end or (self.evaluations[-1] if self.evaluations else {})
        self.scores: dict[str, Event] = {name: last[name] for name in WEIGHTS if isinstance(last.get(name), dict)}
        self.final: str = self.end.get("final") or next(reversed(self.scores), "model")
        self.best: Event = last.get("best") or {}
        self.classes: list[str] = self.facts.get("classes") or []
        self.evaluated: str = self.facts.get("evaluated", "")
        self.name = str(self.facts.get("data", "unnamed images"))
        variant = self.facts.get("variant")
        self.data = self.name + (f" ({variant})" if variant else "")  # what was learnt from
        self.settings: Event = tomllib.loads(recipe)

    @property
    def seen(self) -> str:
        """What was evaluated: "digits test", or "photos, 20 % held out"."""
        if self.evaluated == "holdout":  # the variant of what was learnt from says the share
            held = str(self.facts.get("variant") or "").replace("without the ", "")
            return f"{self.name}, {held if held.endswith('held out') else 'held out'}"
        return f"{self.name} {self.evaluated}{self.data.removeprefix(self.name)}"

    @property
    def pace(self) -> float:
        """Seconds per step, between entries of steps that follow each other: evaluations, pauses and the first step, which may
        compile, do not count. NaN where there are none."""
        pairs = [(a, b) for a, b in pairwise(self.events) if a.get("event") == b.get("event") == "step"]
        seconds = sum(b["time"] - a["time"] for a, b in pairs)
        return seconds / sum(b["step"] - a["step"] for a, b in pairs) if seconds > 0 else math.nan


def learning_curves(run: Run) -> dict[str, list[Line]]:
    shown = evenly(run.evaluations, MOST_POINTS)
    epochs = numbers(shown, "epoch")
    losses = [binned(run.steps, "loss", "training (augmented)")]
    accuracies = [Line("training (augmented)", epochs, [100 * x for x in numbers(shown, "train_accuracy")], dashed=True)]
    for name in run.scores:
        word = f"evaluation, {WEIGHTS[name]}"
        losses.append(Line(word, epochs, numbers(shown, name, "loss"), colour=COLOURS[name]))
        accuracies.append(Line(word, epochs, [100 * x for x in numbers(shown, name, "top1")], colour=COLOURS[name]))
    rates = binned(run.steps, "lr", "schedule")
    rates = rates._replace(ys=[1000 * y for y in rates.ys], low=None, high=None)
    return {"loss": losses, "accuracy": accuracies, "rate": [rates], "norm": [binned(run.steps, "norm", "all parameters")]}


# --- numbers and words -----------------------------------------------------------------------------------------------


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def numbers(events: Sequence[Event], *path: str) -> list[float]:
    """One number per event, NaN where it has none."""
    found = []
    for event in events:
        value: Any = event
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        found.append(number(value))
    return found


def binned(steps: Sequence[Event], name: str, word: str) -> Line:
    """A line through the steps. Where they are many, a point is the mean of several, in a band from least to greatest."""
    found = [(x, y) for x, y in zip(numbers(steps, "epoch"), numbers(steps, name), strict=True) if math.isfinite(x + y)]
    size = max(1, math.ceil(len(found) / MOST_POINTS))
    bins = [list(zip(*found[i : i + size], strict=True)) for i in range(0, len(found), size)]
    line = Line(word, [mean(x) for x, _ in bins], [mean(y) for _, y in bins])
    return line if size == 1 else line._replace(low=[min(y) for _, y in bins], high=[max(y) for _, y in bins])


def when(seconds: Any) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if isinstance(seconds, int | float) else "?"
