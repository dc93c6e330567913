"""The folder of a run: one process at a time, and checkpoints of which a kill at any instant leaves a whole one.

    <run>/lock                         held with flock while a run is in it; the kernel frees it when the process dies
    <run>/checkpoints/step_00000012/   a checkpoint (dmst.engine.checkpoint); 8 digits, so the order of names is that of steps
                      .tmp-e27a..-12/  one that is being written
                      old.step_00..    one that steps aside for a new one of the same step: put back if the new one never came
                      dead.step_00..   one that is being removed

What a kill leaves of the last three is swept by the next run, under the lock. Links are not followed. Reading needs no lock:
`RunFolder(path).newest()` serves those who only look.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import warnings
import weakref
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from dmst import atomic
from dmst.engine import checkpoint, lock
from dmst.engine.checkpoint import Snapshot
from dmst.errors import BadFileError, OptionError, SaveError

STEP = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
LEFT = re.compile(r"\.tmp-\w+-\d+|dead\.step_\d+|old\.(step_\d+)")


class RunFolder:
    """`with RunFolder(path) as run:` makes the folder, takes its lock and sweeps it; only then can it save and prune."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None
        self._was: os.stat_result | None = None  # the folder of the checkpoints, as it was found
        self._most: int | None = None  # bytes of tensors that a checkpoint may state
        self._verified: dict[int, list[tuple[str, int, int, int]]] = {}  # by step, what its files were then

    def __enter__(self) -> RunFolder:
        if self._lock is not None:
            raise OptionError(f"{self.path} is open already.")
        lock.posix()  # or an error, before anything is made
        try:
            if self.path.is_file():
                with self.path.open("rb") as file:
                    atomic.refuse_pickle(self.path, file.read(8))
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take()
            HELD.add(self)
            if self.checkpoints.is_symlink():
                raise OptionError(f"{self.checkpoints} is a link, and links are not followed: move what it leads to here.")
            self.checkpoints.mkdir(exist_ok=True)
            self._was = os.lstat(self.checkpoints)
            self._sweep()
            atomic.sync(self.path)
        except OSError as error:
            self.__exit__()
            if error.errno in atomic.NO_ROOM:
                raise atomic.failed(self.path, error, lock.SIZE) from error
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

    def load(self, step: int) -> Snapshot:
        """The checkpoint of `step`, verified; BadFileError if it is damaged, or if there is none."""
        return checkpoint.load(self._folder(step), step, self._most)

    def newest(self, most: int | None = None) -> Snapshot | None:
        """The newest checkpoint that verifies, with a warning for each newer one that does not; None if there never was one.

        From now on none that states more than `most` bytes of tensors is read.

        Some that do not verify and none that does is an error: a run never starts again from step 0 in silence.
        """
        self._most = most
        skipped: dict[int, BadFileError] = {}
        for step in reversed(self.steps()):
            try:
                found = self.load(step)
            except BadFileError as error:
                skipped[step] = error
                continue
            for bad, why in skipped.items():
                told = (
                    f"{self._folder(bad).name} is skipped: {why} The run goes on from step {step}: {bad - step} steps are lost."
                )
                warnings.warn(told, stacklevel=2)
            return found
        if skipped:
            told = "\n".join(f"  {self._folder(step).name}: {why}" for step, why in skipped.items())
            raise BadFileError(
                f"no checkpoint in {self.checkpoints} can be used. To start again from step 0, move them away.\n{told}"
            )
        return None

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, whole or not at all; returns its folder. Another one of the same step is replaced."""
        size, files = checkpoint.contents(snapshot)
        folder = self._folder(snapshot.step)
        self.check_held(folder, size)
        if os.path.lexists(folder) and checkpoint.holds(folder, snapshot):
            return folder
        staging = self.checkpoints / f".tmp-{secrets.token_hex(8)}-{snapshot.step}"
        return atomic.write_folder(folder, files, size=size, staging=staging, aside=self.checkpoints / f"old.{folder.name}")

    def prune(self, keep: int = 2, protect: Iterable[int] = ()) -> list[int]:
        """Remove what is older than the newest `keep` checkpoints that verify, but for `protect`; returns the steps removed.

        At least 2 are kept. Damaged ones do not count: each is read and hashed, and again only when its files have changed.
        """
        self.check_held(self.checkpoints)
        kept = list(islice((step for step in reversed(self.steps()) if self._verifies(step)), max(keep, 2)))
        spared = set(protect)
        gone = [step for step in self.steps() if step < kept[-1] and step not in spared] if len(kept) >= max(keep, 2) else []
        try:
            atomic.sync(self.checkpoints)  # the newer ones are in their place also after a power cut
            for step in gone:
                folder = self._folder(step)
                dead = folder.with_name(f"dead.{folder.name}")
                atomic.remove(dead)
                atomic.remove(folder.rename(dead))
        except OSError as error:
            raise SaveError(f"old checkpoints in {self.checkpoints} could not be removed ({error.strerror}).") from error
        return gone

    def write_text(self, path: Path, text: str) -> None:
        """Write a file of this folder, which must be held."""
        self.check_held(path, len(text))
        atomic.write_text(path, text)

    def check_held(self, path: Path, size: int = 0) -> None:
        """Before `path` is written: our lock must still be the one that another run would find, and the checkpoints ours."""
        if self._lock is None or self._was is None:
            raise OptionError(f"{self.path} is not held: use it inside `with RunFolder(...) as run:`.")
        for was, where, what in (
            (os.fstat(self._lock), self.path / "lock", "the folder of the run"),
            (self._was, self.checkpoints, "the folder of its checkpoints"),
        ):
            try:
                same = os.path.samestat(was, os.lstat(where))
            except OSError:
                same = False
            if not same:
                raise atomic.failed(path, OSError(errno.ENOENT, f"{what} was moved away or replaced"), size)

    def _take(self) -> int:
        try:
            return lock.take(self.path / "lock")
        except BlockingIOError as error:
            by = f", process {error.strerror}," if error.strerror else ""
            raise OptionError(
                f"{self.path} is in use: another run{by} is in it. Choose another folder, or end that run."
            ) from error

    def _folder(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def _verifies(self, step: int) -> bool:
        folder = self._folder(step)
        try:
            files = sorted((x.name, x.stat().st_size, x.stat().st_mtime_ns, x.stat().st_ino) for x in os.scandir(folder))
            if self._verified.get(step) != files:
                checkpoint.verify(folder, step, self._most)
        except (BadFileError, OSError):
            return False
        self._verified[step] = files
        return True

    def _sweep(self) -> None:
        """Put back what only stepped aside, first of all; then remove what was cut off."""
        left = [(entry, found) for entry in self.checkpoints.iterdir() if (found := LEFT.fullmatch(entry.name))]
        for entry, found in left:
            if found[1] and not os.path.lexists(entry.with_name(found[1])):
                entry.rename(entry.with_name(found[1]))
        for entry, _ in left:
            atomic.remove(entry)


HELD: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child: a loader's worker that outlives a killed run must not keep its lock."""
    for folder in HELD:
        folder.__exit__()


os.register_at_fork(after_in_child=_let_go)
