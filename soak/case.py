"""What an area gives: cases, each of which tries one thing and fails by raising.

row      the line of the summary that it counts in: one promise, tried in one way
name     its own, unique in the area and the same every time, so that a run that was cut off goes on where it was
check    gets an empty folder; raises if the promise is broken; may return facts for the record, as {"error": 3e-7}
limit    seconds after which it counts as a hang, and its process is killed
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

AREAS = ("crash", "checkpoints", "images", "configs", "kernels", "distributed", "supply")


class Case(NamedTuple):
    row: str
    name: str
    check: Callable[[Path], dict[str, Any] | None]
    limit: float = 120.0


def module_of(area: str) -> ModuleType:
    """The file of an area; a name with a dot is a module of its own, as a test plants."""
    return importlib.import_module(area if "." in area else f"soak.areas.{area}")
