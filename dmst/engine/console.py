"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dmst.terminal import Terminal

EVERY = 10.0  # seconds between plain lines


class Quiet:
    """Prints nothing; the base class of the others."""

    def say(self, text: str) -> None:
        """A line."""

    def begin(self, done: int, steps: int) -> None:
        """Training begins, after `done` of `steps`."""

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        """After a step: epoch, loss, accuracy, images_per_s."""

    def pause(self, what: str) -> None:
        """Something else than steps takes its time."""

    def end(self) -> None:
        """The bar goes."""


class Lines(Quiet):
    """For files and pipes."""

    def __init__(self) -> None:
        self.console = Terminal(soft_wrap=True)
        self._said = 0.0

    def say(self, text: str) -> None:
        self.console.print(text)

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        if time.monotonic() - self._said >= EVERY or done == steps:
            self._said = time.monotonic()
            left = timedelta(seconds=int((steps - done) * values["seconds"]))
            self.say(f"step {done:,} of {steps:,}  {in_words(values)}  {left} left")


class Bar(Quiet):
    """For terminals."""

    def __init__(self, console: Terminal) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        self._progress = Progress(*columns, TextColumn("{task.fields[values]}"), console=console, transient=True)
        self._task = self._progress.add_task("training", total=None, values="")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def begin(self, done: int, steps: int) -> None:
        self._progress.reset(self._task, total=steps, completed=done, values="")
        self._progress.start()

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=done, description="training", values=in_words(values))

    def pause(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def end(self) -> None:
        self._progress.stop()


def watcher(quiet: bool = False) -> Quiet:
    """A bar where somebody sits, lines where nobody does."""
    console = Terminal()
    return Quiet() if quiet else Bar(console) if console.is_terminal else Lines()


def in_words(values: dict[str, Any]) -> str:
    return (
        f"epoch {values['epoch']:g}  loss {values['loss']:.4f}  accuracy {values['accuracy']:.1%}  "
        f"{values['images_per_s']:,.0f} images/s"
    )


class Clock:
    """Seconds a step, a running mean over about twenty; what is not training is left out."""

    def __init__(self) -> None:
        self._laps, self._mean, self._then = 0, 0.0, time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        took, self._then = now - self._then, now
        self._laps += 1
        if self._laps <= 2:  # the first step warms everything up: it says nothing about the others
            self._mean = took
        self._mean += 0.05 * (took - self._mean)
        return self._mean

    def skip(self) -> None:
        self._then = time.perf_counter()
