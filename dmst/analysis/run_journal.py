"""A training run as its journal tells it (the events of dmst/engine/journal.py).

Run(events, recipe, model)         what was trained on what, the scores, the pace
numbers(events, "ema", "top1")     one number per event        binned(steps, "loss", ...)    a line with few enough points
"""

from __future__ import annotations

import math
import signal
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import mean
from typing import Any

from dmst.analysis.charts import Line
from dmst.analysis.pictures import evenly

Event = dict[str, Any]
MOST_POINTS = 40  # of a line, whose dots then stand apart
WEIGHTS = {"model": "the last weights", "ema": "the averaged weights"}
SIGNALS = {each.value: each.name for each in signal.Signals}
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
        try:
            self.settings: Event = tomllib.loads(recipe)
        except tomllib.TOMLDecodeError:
            self.settings = {}

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

    def layers(self) -> list[Event]:
        """Evaluations that tell about the layers (probes.py), all in the way of the last one."""
        found = [event for event in self.evaluations if (event.get("layers") or {}).get("coding")]
        return [event for event in found if event["layers"].keys() == found[-1]["layers"].keys()]

    def interruptions(self) -> Iterator[tuple[str, list[str]]]:
        """Stops, and changes of the recipe. A kill leaves no line: the journal takes back what came after a checkpoint."""
        for event, after in pairwise([*self.events, {}]):
            at = f"{when(event.get('time'))}, step {event.get('step', 0):,}"
            if event.get("event") == "stopped":
                reason = str(event.get("reason") or "").rstrip(".")  # of a run that was ended by what its layers did
                by = f"ended: {reason}" if reason else f"stopped by {SIGNALS.get(event.get('signal', 0), 'a signal')}"
                went_on = f"; continued, next entry at {when(after.get('time'))}" if after else ""
                yield f"{at}: {by}{went_on}.", []
            if event.get("event") == "start" and event is not self.starts[0]:
                yield f"{at}: continued with a changed recipe.", event.get("changed") or []


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


def layer_curves(found: Sequence[Event]) -> dict[str, list[Line]]:
    """What the layers did, by layer, at a few evaluations."""
    curves: dict[str, list[Line]] = {}
    for i, event in enumerate(evenly(found, 4), 1):
        for name in event["layers"].keys() & {"variational", "coding", "active"}:
            values = list(map(number, event["layers"][name]))
            curves.setdefault(name, []).append(Line(f"epoch {event['epoch']}", range(len(values)), values, colour=f"c{i}"))
    return curves


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


def in_time(seconds: float) -> str:
    """4.2 s, 42 s, 3 min 5 s, 7 h 12 min, 2 d 4 h."""
    whole = round(seconds)
    for size, name, smaller, its in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {its}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def when(seconds: Any) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if isinstance(seconds, int | float) else "?"
