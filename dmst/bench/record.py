"""The file of measurements: {"facts": {...}, "rows": [...]}, one row a line, rewritten whole after every row.

Of a layer (`dmst bench operators`; a network's row is told in model_row.py):

what, backend, mode      floor, sdpa_p48, ... dmsa; torch, reference, fused; eager, graph, compiled
B, N, dim, heads         the shape; `active`: heads whose gate is not zero, the mean over samples
dtype                    of weights and tokens
forward_ms, train_ms     medians; train is forward and backward. None where nothing was measured, or parity failed
kept_mb, peak_mb         MiB; None in graph mode
error                    the worst relative error against float64 (parity.py)
versions, commit         of what was measured
failure, note, spread    why there is no time; the first warning; distance of the quartiles over the median, the worse of both
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dmst.atomic import write_text
from dmst.errors import BadFileError
from dmst.provenance import device_name, versions

Row = dict[str, Any]
KEYS = (
    "what", "backend", "mode", "B", "N", "dim", "heads", "active", "dtype", "forward_ms", "train_ms", "kept_mb", "peak_mb",
    "error", "versions", "commit", "failure", "note", "spread",
)  # fmt: skip
NAMES = ("what", "backend", "mode", "B", "N", "dim", "dtype", "pixels")  # which measurement it is; a network's has some of them
PARITY = "parity failed"  # how such a failure begins
UNITS = {
    "forward_ms, train_ms": "milliseconds, median; train is forward and backward",
    "kept_mb, peak_mb": "MiB (2**20 bytes), tokens and output gradient not counted",
    "error": "relative L2 against float64, the worst of output and gradients",
    "eager": "each call between CUDA events, waited for; on a CPU by its clock",
    "graph": "CUDA-graph replay, a call's share",
    "compiled": "torch.compile(dynamic=False), timed as eager",
}


class Book:
    """The rows so far and the file that holds them."""

    def __init__(self, path: Path, facts: dict[str, Any], kept: list[Row] | None = None) -> None:
        self.path, self.facts, self.rows = path, facts, list(kept or [])

    def add(self, row: Row) -> None:
        """Take a row in the place of an older one of the same name, and write the file."""
        self.rows = [old for old in self.rows if key(old) != key(row)] + [row]
        write_text(self.path, text(self.facts, self.rows))


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in NAMES)


def text(facts: dict[str, Any], rows: list[Row]) -> str:
    lines = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in rows)
    return f'{{\n "facts": {json.dumps(facts, allow_nan=False)},\n "rows": [\n{lines}\n ]\n}}\n'


def read(path: Path, keys: Sequence[str] = KEYS[:-3], command: str = "operators") -> tuple[dict[str, Any], list[Row]]:
    """Facts and rows, or an error that says what is wrong with the file; each row must have these keys."""
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        facts, rows = told["facts"], told["rows"]
        missing = [name for row in rows for name in keys if name not in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFileError(f"{path} is not a file of `dmst bench {command}` ({type(error).__name__}: {error}).") from error
    if missing:
        raise BadFileError(f"{path}: a row has no {missing[0]!r}. Measure again with `dmst bench {command}`.")
    return facts, rows


def find(rows: list[Row], **named: Any) -> Row | None:
    """The row with these values."""
    return next((row for row in rows if all(row.get(name) == value for name, value in named.items())), None)


def number(value: float | None, digits: int = 4) -> float | None:
    """With so many digits; None for what JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def default_path(device: torch.device, stem: str = "operators") -> Path:
    """results/h200/operators.json for "NVIDIA H200"; a CPU's goes where nothing is kept."""
    if device.type != "cuda":
        return Path("runs/bench") / f"{stem}.json"
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().removeprefix("nvidia ")).strip("-")
    return Path("results") / name / f"{stem}.json"


def facts(device: torch.device, commit: str, units: Mapping[str, str] = UNITS) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"device": device_name(device), **versions(), "commit": commit, "date": now, "units": dict(units)}
