"""The journal of a run: one JSON line an event, which console, report, TensorBoard and later tables read alike.

    {"event": "start", "step": 0, ...}       what is trained on what, with which versions
    {"event": "step", "step": 40, "epoch": 1, "loss": ..., "accuracy": ..., "lr": ..., "norm": ..., "images_per_s": ...}
    {"event": "evaluation", "step": 66, "epoch": 3, "model": {"top1": ..., ...}, "ema": {...}, probes by name}
    {"event": "checkpoint", "step": 66}      {"event": "end", "step": 352, ...}

A resumed run takes back the lines after its checkpoint, for it will write them again. Numbers that are not finite are null.
With `keep_going` lines for which the disk has no room are dropped. `listeners` hear every event too, as
`log(values, step)`, the shape that trackers take: `train(..., listeners=[wandb_run.log])`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dmst import atomic
from dmst.engine.checkpoint import RunFolder
from dmst.errors import FullDiskError, SaveError, need

NAME = "journal.jsonl"
Listener = Callable[[dict[str, Any], int], None]


class Journal:
    def __init__(self, folder: RunFolder | None, listeners: Sequence[Listener] = (), keep_going: bool = False) -> None:
        self.folder = folder  # None: another process writes it
        self.path = None if folder is None else folder.path / NAME
        self.listeners, self.keep_going = listeners, keep_going

    def take_back(self, step: int, *, ended: bool = False) -> list[dict[str, Any]]:
        """Drop what came after `step`, a line that a kill cut off, and the "end" of a run that went on; returns the rest."""
        if self.folder is None or self.path is None or not os.path.lexists(self.path):
            return []
        raw = atomic.read(self.path)  # and no link
        kept = [event for event in _events(raw) if event["step"] <= step and (ended or event["event"] != "end")]
        text = "".join(map(_line, kept)).encode()
        if text != raw:
            self.folder.write_text(self.path, text.decode())
        return kept

    def write(self, event: str, step: int, **values: Any) -> None:
        if self.folder is None or self.path is None:
            return
        line = _line({"event": event, "step": step, "time": round(time.time(), 3), **values})
        self.folder.check_held(self.path, len(line))
        try:
            if self.path.is_symlink():
                raise OSError(errno.ELOOP, "it is a link, and links are not followed")
            with self.path.open("ab") as file:
                file.write(line.encode())
        except OSError as error:
            full = error.errno in atomic.NO_ROOM
            if not (full and self.keep_going):
                raise (FullDiskError if full else SaveError)(
                    f"{self.path} could not be written ({error.strerror}): the run stops; its checkpoints are safe."
                ) from error
        for listener in self.listeners:
            listener(values, step)

    def sync(self) -> None:
        """Have every line on the disk: a checkpoint that outlives a power cut needs the lines before it."""
        if self.path is not None and self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a journal, in order; a last line that was cut off is left out."""
    return _events(path.read_bytes())


def _events(raw: bytes) -> Iterator[dict[str, Any]]:
    for text in raw.decode(errors="replace").split("\n"):
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("step"), int) and "event" in event:
            yield event


def _line(event: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(event), parse_constant=lambda _: None)  # JSON knows no NaN and no infinity
    return json.dumps(plain) + "\n"


def tensorboard(folder: Path) -> Listener:
    """A listener that writes every number to `folder` for TensorBoard."""
    library = need("torch.utils.tensorboard", "track")
    writer: Any = None

    def listen(values: dict[str, Any], step: int) -> None:
        nonlocal writer
        if writer is None:  # not before the run holds its folder
            writer = library.SummaryWriter(str(folder))
        for name, value in _numbers(values, ""):
            writer.add_scalar(name, value, step)
        writer.flush()

    return listen


def _numbers(values: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _numbers(value, f"{name}/{key}" if name else str(key))
    elif isinstance(values, list):
        for i, value in enumerate(values):
            yield from _numbers(value, f"{name}/{i}")
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield name, float(values)
