"""A bar for work on images, on standard error, where somebody sits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dmst.terminal import Terminal
from dmst.words import visible


@contextmanager
def counted(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Inside, call what is given with the number of images that were done."""
    words = TextColumn("{task.description}", markup=False)  # a path may hold brackets
    columns = words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True)
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(visible(what), total=total)
        yield lambda done: progress.advance(task, done)
