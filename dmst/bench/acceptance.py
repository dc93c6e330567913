"""What was promised, beside what was reached: the targets as tables of points; ratios within the file.

points(rows)          of the operator: graph replay, bfloat16, width 384, the fused DMSA. Kept and peak memory are measured in
                      eager mode, and the worst of the shapes counts
model_points(rows)    of whole networks: 224 pixels, bfloat16, equal batches; compiled, and speed again recorded by the compiler
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from dmst.bench.record import Row, find

SHAPES = ((256, 197), (64, 1024), (16, 4096), (4, 16384), (1, 65536))
SETTING = {"dim": 384, "dtype": "bfloat16"}
NETWORKS = {"pixels": 224, "dtype": "bfloat16"}
COMPILED = ("compiled", "recorded")  # modes of networks
TIMES = {"forward": "forward_ms", "forward+backward": "train_ms"}
KEEPS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda value, target: value <= target,
    ">=": lambda value, target: value >= target,
    ">": lambda value, target: value > target,
}


class Point(NamedTuple):
    """One promise and what came of it."""

    name: str
    value: float | None  # None: not measured
    rule: str
    must: float
    goal: float | None = None

    @property
    def kept(self) -> bool:
        return self.value is not None and KEEPS[self.rule](self.value, self.must)

    @property
    def reached(self) -> bool | None:
        """The goal; None where there is none."""
        if self.goal is None:
            return None
        return self.value is not None and KEEPS[self.goal_rule](self.value, self.goal)

    @property
    def goal_rule(self) -> str:
        return ">=" if self.rule == ">" else self.rule


def _value(rows: list[Row], what: str, key: str, mode: str, shape: tuple[int, int]) -> float | None:
    backend = "fused" if what == "dmsa" else "torch"
    row = find(rows, what=what, backend=backend, mode=mode, B=shape[0], N=shape[1], **SETTING)
    return None if row is None or row.get("failure") else row[key]


def _ratio(rows: list[Row], top: str, bottom: str, key: str, mode: str, shape: tuple[int, int]) -> float | None:
    above, below = (_value(rows, what, key, mode, shape) for what in (top, bottom))
    return above / below if above is not None and below else None


def _worst(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else max(value for value in found if value is not None)


def points(rows: list[Row]) -> list[Point]:
    """Every promise."""
    found = []
    for said, key in TIMES.items():
        for shape in SHAPES:
            ratio = _ratio(rows, "dmsa", "floor", key, "graph", shape)
            found.append(Point(f"{said}, x floor, {shape[0]} x {shape[1]}", ratio, "<=", 1.6, 1.25))
    for shape, key, must, goal in (
        ((256, 197), "forward", 2.0, 2.6), ((256, 197), "forward+backward", 3.0, 4.0),
        ((4, 16384), "forward", 28.0, 36.0), ((4, 16384), "forward+backward", 28.0, 36.0),
    ):  # fmt: skip
        ratio = _ratio(rows, "sdpa_p64", "dmsa", TIMES[key], "graph", shape)
        found.append(Point(f"{key}, times faster than sdpa_p64, {shape[0]} x {shape[1]}", ratio, ">=", must, goal))
    for said, key, must in (("kept memory", "kept_mb", 1.05), ("peak of a training step", "peak_mb", 0.85)):
        ratio = _worst(_ratio(rows, "dmsa", "floor", key, "eager", shape) for shape in SHAPES)
        found.append(Point(f"{said}, x floor, worst of five shapes", ratio, "<=", must))
    for what in ("sdpa_p64", "sdpa_p48"):
        for said, key in TIMES.items():
            ratio = _ratio(rows, what, "dmsa", key, "eager", (256, 197))
            found.append(Point(f"{said} in eager mode, times faster than {what}, 256 x 197", ratio, ">", 1.0, 1.5))
    return found


def applies(rows: list[Row]) -> bool:
    """Whether anything here is of the setting that the targets are about."""
    return any(row["mode"] == "graph" and all(row[key] == value for key, value in SETTING.items()) for row in rows)


def _network(rows: list[Row], mode: str, pair: tuple[str, str], key: str) -> float | None:
    above, below = (find(rows, what=what, mode=mode, failure=None, **NETWORKS) for what in pair)
    if above is None or below is None or above["B"] != below["B"] or above[key] is None or not below[key]:
        return None
    return above[key] / below[key]


def model_points(rows: list[Row]) -> list[Point]:
    """Every promise about whole networks, mode by mode; recorded steps tell no memory."""
    pair, against_timm = ("vit_small:dmsa", "vit_small"), ("dmst_small", "timm:vit_small_patch16_224")
    said = (
        ("inference, times the ViT-S skeleton with softmax attention", pair, "inference", ">=", 1.2, 1.3),
        ("training, times the same", pair, "training", ">=", 1.25, 1.45),
        ("peak of a training step, x the same", pair, "peak_mb", "<=", 0.85, None),
        ("inference of DMST-S, times timm's ViT-S", against_timm, "inference", ">=", 1.0, 1.15),
        ("training of DMST-S, times timm's ViT-S", against_timm, "training", ">=", 1.1, 1.3),
    )
    return [
        Point(f"{mode}: {name}", _network(rows, mode, networks, key), rule, must, goal)
        for mode in COMPILED
        for name, networks, key, rule, must, goal in said
        if (mode, key) != ("recorded", "peak_mb")
    ]


def model_applies(rows: list[Row]) -> bool:
    return any(row["mode"] in COMPILED and all(row[key] == value for key, value in NETWORKS.items()) for row in rows)


def table(found: list[Point], about: str = "fused DMSA, graph replay, bfloat16, width 384") -> Table:
    shown = Table("target", "reached", "must", "", "goal", "", title=f"targets: {about}")
    marks = {True: Text("yes", "green"), False: Text("no", "red"), None: Text()}
    for point in found:
        value = "not measured" if point.value is None else f"{point.value:.3g}"
        goal = "" if point.goal is None else f"{point.goal_rule} {point.goal:g}"
        shown.add_row(point.name, value, f"{point.rule} {point.must:g}", marks[point.kept], goal, marks[point.reached])
    return shown
