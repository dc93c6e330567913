"""The folder of a run and its checkpoints: a kill at any instant leaves a whole one, and what is damaged is never loaded.

    <run>/lock                           held with flock; the kernel frees it when the process dies
    <run>/checkpoints/step_00000012/     8 digits, so that names sort as steps do
              model.safetensors          and optim, ema: one file for each entry of `State.tensors`
              state.json                 the other fields of `State`
              manifest.json              written last: schema, size and sha256 of each file above, and its own sha256
    <run>/checkpoints/.step_00000012.*   being written or removed, or stepped aside (atomic.py); the next run sweeps it

Reading follows the manifest: a file that it does not list is never opened, one that it lists is read once, and those bytes are
hashed and then parsed. Links are not followed. Reading needs no lock: `RunFolder(path).newest()` serves those who only look.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from dmst import atomic
from dmst.errors import BadFileError, OptionError, SaveError
from dmst.models.files import from_bytes, not_finite, to_bytes

SCHEMA = 2
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", ".safetensors"
LARGEST_MANIFEST = 2**20  # bytes
LISTED = re.compile(r"[a-z][a-z0-9_]*\.(safetensors|json|toml)")
STEP = re.compile(r"step_(\d{8,})")
CUT_OFF = re.compile(r"\.(?P<step>step_\d+)\.(?P<old>old\.)?[0-9a-f]{16}")


@dataclass(frozen=True)
class State:
    """All that a run needs to go on from after `step` optimizer steps."""

    step: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)  # "model", "ema", "optim" -> by name
    best: dict[str, Any] = field(default_factory=dict)  # the best evaluation so far: step, epoch, top1, of
    epoch_sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # loss, right, images since the last evaluation
    scaler: list[Any] = field(default_factory=list)  # of fp16: scale, good steps, skipped steps
    processes: int = 1
    # what the bits depend on beside the recipe
    data: str = ""  # fingerprint of the images: names, sizes, labels
    content: str = ""  # sha256 of what is in the files, where they were scanned
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


def migrate(schema: Any, told: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """What state.json says, as schema 2 has it.

    1 (dmst 0.1.0): step and context were in the manifest; epoch, tick, seed and recipe were said twice.
    """
    if schema == 1:
        told = {"step": manifest["step"], **told, **manifest["context"]}
        return {key: value for key, value in told.items() if key not in ("epoch", "tick", "seed", "recipe")}
    return told


# --- one checkpoint ---------------------------------------------------------------------------------------------------


def _files(tensors: dict[str, dict[str, Tensor]], text: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file, made when its turn comes: one at a time in memory."""
    listed = {}
    for name in [STATE, *(f"{stem}{TENSORS}" for stem in tensors)]:
        raw = text if name == STATE else to_bytes(tensors[name.removesuffix(TENSORS)])
        listed[name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        yield name, raw
    yield MANIFEST, atomic.sealed({"schema": SCHEMA, "files": listed})


def load(folder: Path, step: int) -> State:
    """The checkpoint of `step` in `folder`, verified to the last byte; else BadFileError, which says what is wrong with it."""
    if folder.is_symlink():
        raise BadFileError(f"{folder} is a link: links are not followed.")
    manifest = atomic.read_sealed(folder / MANIFEST, most=LARGEST_MANIFEST)
    schema = manifest.get("schema")
    if schema not in (1, SCHEMA):
        raise BadFileError(f"{folder} is of another dmst: its schema is {schema!r}, and this one reads {SCHEMA}. Update dmst.")
    try:
        tensors, told = {}, dict[str, Any]()
        for name, stated in dict(manifest["files"]).items():
            if not LISTED.fullmatch(name):
                raise ValueError(f"{name!r} is no file of a checkpoint")
            raw = atomic.read(folder / name, stated["size"], sha256=stated["sha256"])
            if name == STATE:
                told = atomic.json_object(folder / name, raw)
            elif name.endswith(TENSORS):
                tensors[name.removesuffix(TENSORS)] = from_bytes(folder / name, raw)
        found = State(**migrate(schema, told, manifest), tensors=tensors)
        for each in fields(State):
            if type(value := getattr(found, each.name)) is not type(getattr(BLANK, each.name)):
                raise TypeError(f"{each.name} is {value!r}")
    except BadFileError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise BadFileError(f"{folder} is not the checkpoint of a run ({error}).") from error
    if found.step != step:
        raise BadFileError(f"{folder} was renamed: it holds step {found.step}.")
    return found


BLANK = State(0)

# --- all of a run -----------------------------------------------------------------------------------------------------


class RunFolder:
    """`with RunFolder(path) as run:` makes the folder, takes its lock and sweeps it; only then can it save and prune."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        posix()  # or an error, before anything is made
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path / "lock")
            # in a forked child: a loader's worker that outlives a killed run must not keep its lock
            os.register_at_fork(after_in_child=self.__exit__)
            if self.checkpoints.is_symlink():
                raise OSError(errno.ELOOP, "links are not followed", str(self.checkpoints))
            self.checkpoints.mkdir(exist_ok=True)
            self._sweep()
            atomic.sync(self.path)
        except BlockingIOError as error:
            raise OptionError(f"{self.path} is in use by another run: choose another folder, or end that run.") from error
        except OSError as error:
            self.__exit__()
            if error.errno in atomic.NO_ROOM:
                raise atomic.failed(self.path, error, 80) from error
            raise OptionError(
                f"{self.path} cannot be the folder of a run ({error.filename}: {error.strerror}): choose another one."
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, whole or not, oldest first."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        return sorted(int(found[1]) for found in map(STEP.fullmatch, names) if found)

    def load(self, step: int) -> State:
        """The checkpoint of `step`, verified; BadFileError if it is damaged, or if there is none."""
        return load(self._folder(step), step)

    def newest(self) -> State | None:
        """The newest checkpoint that verifies, with a warning for each newer one that does not; None if there never was one.

        Some that do not verify and none that does is an error: a run never starts again from step 0 in silence.
        """
        skipped: dict[int, BadFileError] = {}
        for step in reversed(self.steps()):
            try:
                found = self.load(step)
            except BadFileError as error:
                skipped[step] = error
                continue
            for lost, why in skipped.items():
                warnings.warn(
                    f"{self._folder(lost).name} is skipped: {why} The run goes on from step {step}: {lost - step} steps are "
                    "lost.",
                    stacklevel=2,
                )
            return found
        if skipped:
            told = "\n".join(f"  {self._folder(step).name}: {why}" for step, why in skipped.items())
            raise BadFileError(
                f"no checkpoint in {self.checkpoints} can be used. To start again from step 0, move them away.\n{told}"
            )
        return None

    def save(self, state: State) -> Path:
        """Write a checkpoint, whole or not at all; returns its folder. Another one of the same step is replaced.

        What is not finite is refused before a byte is written.
        """
        folder = self._folder(state.step)
        self.check_held(folder)
        for stem, tensors in state.tensors.items():
            if bad := not_finite(tensors):
                raise SaveError(f"step {state.step} is not saved: {bad} of {stem} holds NaN or infinity.")
        told = {each.name: getattr(state, each.name) for each in fields(State) if each.name != "tensors"}
        text = json.dumps(told, indent=2, allow_nan=False).encode()
        size = sum(x.nbytes + 256 for tensors in state.tensors.values() for x in tensors.values()) + 2 * len(text)
        return atomic.write_folder(folder, _files(state.tensors, text), size)

    def prune(self, keep: int = 2, protect: Iterable[int] = ()) -> list[int]:
        """Remove all but the newest `keep` checkpoints, at least 2, and `protect`; returns the steps removed."""
        self.check_held(self.checkpoints)
        gone = [step for step in self.steps()[: -max(keep, 2)] if step not in set(protect)]
        try:
            atomic.sync(self.checkpoints)  # the newer ones are in their place also after a power cut
            for step in gone:
                folder = self._folder(step)
                atomic.remove(folder.rename(atomic.temporary(folder)))
        except OSError as error:
            raise SaveError(f"old checkpoints in {self.checkpoints} could not be removed ({error.strerror}).") from error
        return gone

    def write_text(self, path: Path, text: str) -> None:
        """Write a file of this folder, which must be held."""
        self.check_held(path, len(text))
        atomic.write_text(path, text)

    def check_held(self, path: Path, size: int = 0) -> None:
        """Before `path` is written: our lock must still be the one that another run would find."""
        if self._lock is None:
            raise OptionError(f"{self.path} is not held: use it inside `with RunFolder(...) as run:`.")
        lock = self.path / "lock"
        if not lock.exists() or not os.path.samestat(os.fstat(self._lock), os.lstat(lock)):
            raise atomic.failed(path, OSError(errno.ENOENT, "the folder of the run was moved away or replaced"), size)

    def _folder(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def _sweep(self) -> None:
        """Put back a checkpoint that was renamed to make room for a new one that never came; then remove what was cut off."""
        for path in sorted(self.checkpoints.iterdir()):
            if found := CUT_OFF.fullmatch(path.name):
                place = path.with_name(found["step"])
                path.rename(place) if found["old"] and not os.path.lexists(place) else atomic.remove(path)


# --- the lock ---------------------------------------------------------------------------------------------------------


def posix() -> ModuleType:
    """fcntl; Windows has none. Asked for by those who lock, so that all else works there."""
    try:
        return importlib.import_module("fcntl")
    except ImportError as error:
        raise OptionError(
            "training needs a POSIX system: a run's folder is locked with flock. Use Linux, macOS or WSL."
        ) from error


def take_lock(path: Path) -> int:
    """A handle that holds the lock `path` until it is closed; BlockingIOError if another process does. Nothing is written."""
    fcntl = posix()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
