"""What a person sees of a run: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from dmst.terminal import Terminal

EVERY = 10.0  # seconds between lines where nobody sits


class Quiet:
    """Prints nothing; the base class of the other."""

    def say(self, text: str) -> None:
        """A line."""

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        """After a step: epoch, loss, accuracy, images_per_s, seconds."""

    def end(self) -> None:
        """The last step is done, or none follows."""


class Lines(Quiet):
    def __init__(self) -> None:
        self.console = Terminal()
        words = TextColumn("{task.description}", markup=False)
        self._bar = Progress(BarColumn(20), words, console=self.console, transient=True)
        self._task = self._bar.add_task("")
        self._said = 0.0

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        left = timedelta(seconds=int((steps - done) * values["seconds"]))
        told = (
            f"step {done:,}/{steps:,} epoch {values['epoch']:g} loss {values['loss']:.4f} "
            f"{values['images_per_s']:,.0f} images/s {left} left"
        )
        if self.console.is_terminal:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=steps, description=told)
        elif time.monotonic() - self._said >= EVERY or done == steps:
            self._said = time.monotonic()
            self.say(told)

    def end(self) -> None:
        if self.console.is_terminal:
            self._bar.stop()


def watcher(quiet: bool = False) -> Quiet:
    return Quiet() if quiet else Lines()


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
