"""Coverage's tracer only where it has something to count: other people's Python takes two to three times as long under it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from _pytest.assertion import rewrite

# What the tests import in any case.
OTHERS = ("torch._dynamo.testing", "triton.runtime.interpreter", "fastapi", "uvicorn", "hypothesis",
          "playwright.sync_api", "jaxtyping", "beartype", "rich", "typer", "PIL.Image", "entmax")  # fmt: skip


def counts(tracer: Any) -> bool:
    return type(tracer).__module__.partition(".")[0] == "coverage"


@contextmanager
def untraced() -> Iterator[None]:
    """Not `no_cover` of pytest-cov: in a process of xdist it stops one of two tracers."""
    tracer = sys.gettrace()
    if not counts(tracer):
        yield
        return
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)


def load_others() -> None:
    if not counts(sys.gettrace()):
        return
    with untraced():
        for name in OTHERS:
            with suppress(ImportError):
                importlib.import_module(name)
    if (own := getattr(rewrite, "_rewrite_test", None)) is not None:  # pytest's way with assertions, in Python
        rewrite._rewrite_test = untraced()(own)


def count_once(patch: pytest.MonkeyPatch) -> None:
    """The lines of a kernel follow from its constants and the types of its arguments: a launch is traced the first time."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    launch, seen = GridExecutor.__call__, set()

    def call(self: Any, *args: Any, **constants: Any) -> Any:
        if not counts(sys.gettrace()):
            return launch(self, *args, **constants)
        kind = self.fn, *(str(getattr(x, "dtype", x is None)) for x in args), *sorted(map(str, constants.items()))
        if kind not in seen:
            seen.add(kind)
            return launch(self, *args, **constants)
        with untraced():
            return launch(self, *args, **constants)

    patch.setattr(GridExecutor, "__call__", call)


with untraced():
    import torch  # noqa: F401
