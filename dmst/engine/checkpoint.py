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
import stat
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from dmst import atomic
from dmst.errors import BadFileError, OptionError, SaveError
from dmst.models.tensors import LONGEST_HEADER, from_bytes, not_finite, to_bytes

SCHEMA = 2
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", ".safetensors"
LARGEST_MANIFEST = 2**20  # bytes
LISTED = re.compile(r"[a-z][a-z0-9_]*\.(safetensors|json|toml)")
STEP = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
CUT_OFF = re.compile(r"\.step_\d+\.[0-9a-f]{16}|\.tmp-\w+-\d+|dead\.step_\d+")  # the last two by 0.1.0
ASIDE = re.compile(r"\.(step_\d+)\.old\.[0-9a-f]{16}")
LOCK = re.compile(r"(\d+( \S+)?\n)?")  # the process that holds it


@dataclass(frozen=True)
class State:
    """All that a run needs to go on from after `step` optimizer steps."""

    step: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)  # "model", "ema", "optim" -> by name
    best: dict[str, Any] = field(default_factory=dict)  # the best evaluation so far: step, epoch, top1, of
    epoch_sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # loss, right, images of the epoch so far
    scaler: list[Any] = field(default_factory=list)  # of fp16: scale, good steps, skipped steps
    processes: int = 1
    # what the bits depend on beside the recipe
    data: str = ""  # fingerprint of the images: names, sizes, labels
    content: str = ""  # sha256 of what is in the files, where they were scanned
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


def migrate(schema: int, told: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """What state.json says, as schema 2 has it.

    1 (dmst 0.1.0): step and context were in the manifest; epoch, tick, seed and recipe were said twice.
    """
    if schema == 1:
        told = {"step": manifest["step"], **told, **manifest["context"]}
        return {key: value for key, value in told.items() if key not in ("epoch", "tick", "seed", "recipe")}
    return told


# --- one checkpoint ---------------------------------------------------------------------------------------------------


def write(folder: Path, state: State) -> Path:
    """Write a checkpoint, whole or not at all; returns its folder. What is not finite is refused before a byte is written."""
    for stem, tensors in state.tensors.items():
        if bad := not_finite(tensors):
            raise SaveError(f"step {state.step} is not saved: {bad} of {stem} holds NaN or infinity.")
    told = {each.name: getattr(state, each.name) for each in fields(State) if each.name != "tensors"}
    try:
        text = json.dumps(told, indent=2, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise SaveError(f"step {state.step} is not saved: {error}.") from error
    size = sum(x.nbytes + 256 for tensors in state.tensors.values() for x in tensors.values()) + 2 * len(text)
    return atomic.write_folder(folder, _files(state.tensors, text), size)


def _files(tensors: dict[str, dict[str, Tensor]], text: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file, made when its turn comes: one at a time in memory."""
    listed = {}
    for name in [STATE, *(f"{stem}{TENSORS}" for stem in tensors)]:
        raw = text if name == STATE else to_bytes(tensors[name.removesuffix(TENSORS)])
        listed[name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        yield name, raw
    yield MANIFEST, atomic.sealed({"schema": SCHEMA, "files": listed})


def load(folder: Path, step: int, most: int | None = None) -> State:
    """The checkpoint of `step` in `folder`, verified to the last byte; else BadFileError, which says what is wrong with it.

    One that states more than `most` bytes, and a header for each file, is refused before it is read.
    """
    if folder.is_symlink():
        raise BadFileError(f"{folder} is a link: links are not followed.")
    manifest = _manifest(folder / MANIFEST, most)
    tensors, told = {}, dict[str, Any]()
    for name, stated in manifest["files"].items():
        raw = atomic.read(folder / name, stated["size"])
        if hashlib.sha256(raw).hexdigest() != stated["sha256"]:
            raise BadFileError(f"{folder / name} is damaged: its sha256 is not the one in {MANIFEST}.")
        if name == STATE:
            told = atomic.json_object(folder / name, raw)
        elif name.endswith(TENSORS):
            tensors[name.removesuffix(TENSORS)] = from_bytes(folder / name, raw)
    try:
        found = State(**migrate(manifest["schema"], told, manifest), tensors=tensors)
        for each in fields(State):
            if type(value := getattr(found, each.name)) is not type(getattr(BLANK, each.name)):
                raise TypeError(f"{each.name} is {value!r}")
    except (KeyError, TypeError) as error:
        raise BadFileError(f"{folder / STATE} is not the state of a run ({error}).") from error
    if found.step != step:
        raise BadFileError(f"{folder} was renamed: it holds step {found.step}.")
    return found


def _manifest(path: Path, most: int | None) -> dict[str, Any]:
    """What manifest.json says, if this version can read it and it lists nothing but files beside it."""
    raw = atomic.read(path, most=LARGEST_MANIFEST)
    told = atomic.json_object(path, raw)
    atomic.check_seal(path, told, raw)
    schema: Any = told.get("schema")
    files: Any = told.get("files")
    if type(schema) is int and schema > SCHEMA:
        raise BadFileError(f"{path} is of a newer dmst: its schema is {schema}, and this one reads {SCHEMA}. Update dmst.")
    try:
        total = sum(stated["size"] for stated in files.values())
        known = all(LISTED.fullmatch(name) and "sha256" in stated for name, stated in files.items())
        if type(schema) is not int or schema < 1 or not known:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFileError(f"{path} is not the manifest of a checkpoint: nothing was read.") from error
    if most is not None and total > most + LONGEST_HEADER * len(files):
        raise BadFileError(f"{path} states {total:,} bytes, and those of this run are at most {most:,}: nothing was read.")
    return told


BLANK = State(0)

# --- all of a run -----------------------------------------------------------------------------------------------------


class RunFolder:
    """`with RunFolder(path) as run:` makes the folder, takes its lock and sweeps it; only then can it save and prune."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None
        self._most: int | None = None  # bytes that a checkpoint may state
        self._good: set[int] = set()  # steps that were written or verified here

    def __enter__(self) -> RunFolder:
        if self._lock is not None:
            raise OptionError(f"{self.path} is open already.")
        posix()  # or an error, before anything is made
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path / "lock")
            HELD.add(self)
            if self.checkpoints.is_symlink():
                raise OptionError(f"{self.checkpoints} is a link, and links are not followed: move what it leads to here.")
            self.checkpoints.mkdir(exist_ok=True)
            self._sweep()
            atomic.sync(self.path)
        except BlockingIOError as error:
            told = f"{self.path} is in use: another run, process {error.strerror}, is in it."
            raise OptionError(f"{told} Choose another folder, or end that run.") from error
        except OSError as error:
            self.__exit__()
            if error.errno in atomic.NO_ROOM:
                raise atomic.failed(self.path, error, 80) from error
            raise OptionError(f"{self.path} cannot be the folder of a run ({error.strerror}): choose another one.") from error
        except BaseException:
            self.__exit__()
            raise
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
        found = load(self._folder(step), step, self._most)
        self._good.add(step)
        return found

    def newest(self, most: int | None = None) -> State | None:
        """The newest checkpoint that verifies, with a warning for each newer one that does not; None if there never was one.

        From now on none that states more than `most` bytes is read. Some that do not verify and none that does is an error: a
        run never starts again from step 0 in silence.
        """
        self._most = most
        skipped: dict[str, BadFileError] = {}
        for step in reversed(self.steps()):
            try:
                found = self.load(step)
            except BadFileError as error:
                skipped[self._folder(step).name] = error
                continue
            for name, why in skipped.items():
                lost = int(name.removeprefix("step_")) - step
                warnings.warn(
                    f"{name} is skipped: {why} The run goes on from step {step}: {lost} steps are lost.", stacklevel=2
                )
            return found
        if skipped:
            told = "\n".join(f"  {name}: {why}" for name, why in skipped.items())
            raise BadFileError(
                f"no checkpoint in {self.checkpoints} can be used. To start again from step 0, move them away.\n{told}"
            )
        return None

    def save(self, state: State) -> Path:
        """Write a checkpoint, whole or not at all; returns its folder. Another one of the same step is replaced."""
        folder = self._folder(state.step)
        self.check_held(folder)
        write(folder, state)
        self._good.add(state.step)
        return folder

    def prune(self, keep: int = 2, protect: Iterable[int] = ()) -> list[int]:
        """Remove what is older than the newest `keep` checkpoints that verify, but for `protect`; returns the steps removed.

        At least 2 are kept. Damaged ones do not count: each that this run has not written or read is read once.
        """
        self.check_held(self.checkpoints)
        keep, spared = max(keep, 2), set(protect)
        kept = list(islice((step for step in reversed(self.steps()) if self._verifies(step)), keep))
        gone = [step for step in self.steps() if step < kept[-1] and step not in spared] if len(kept) == keep else []
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

    def _verifies(self, step: int) -> bool:
        try:
            return step in self._good or self.load(step).step == step
        except BadFileError:
            return False

    def _sweep(self) -> None:
        """Put back what only stepped aside; then remove what was cut off."""
        for path in sorted(self.checkpoints.iterdir()):
            if found := ASIDE.fullmatch(path.name):
                place = path.with_name(found[1])
                atomic.remove(path) if os.path.lexists(place) else path.rename(place)
            elif CUT_OFF.fullmatch(path.name):
                atomic.remove(path)


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
    """A handle that holds the lock `path` until it is closed. BlockingIOError, with the process, if another one does.

    OptionError if the file is no lock of ours: it stays as it is.
    """
    fcntl = posix()
    if path.is_symlink():
        raise OptionError(f"{path} is a link, and links are not followed: remove it, or choose another folder.")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        text = os.read(handle, 80).decode(errors="replace") if stat.S_ISREG(os.fstat(handle).st_mode) else "a pipe or device"
        if not LOCK.fullmatch(text):
            raise OptionError(f"{path} is not the lock of a run: move it away, or choose another folder.")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(handle), os.lstat(path)):
            raise BlockingIOError(errno.EAGAIN, "it was replaced since it was opened")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        return handle
    except BaseException as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise BlockingIOError(error.errno, (text.split() or ["?"])[0]) from error
        raise


HELD: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child: a loader's worker that outlives a killed run must not keep its lock."""
    for folder in HELD:
        folder.__exit__()


os.register_at_fork(after_in_child=_let_go)
