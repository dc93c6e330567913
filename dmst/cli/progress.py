"""Bars for work on images and for downloads, on standard error, where somebody sits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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


@contextmanager
def downloads() -> Iterator[Callable[[str, int, int], None]]:
    """Inside, call what is given with what is being done, the bytes done and all bytes: a bar for each."""
    console, tasks = Terminal(stderr=True), dict[str, Any]()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def tick(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(visible(what), total=total)
            progress.update(tasks[what], completed=done)

        yield tick
