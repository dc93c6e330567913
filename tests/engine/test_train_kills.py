"""A run that is killed, told to stop, or left without room, at one event of each kind, ends in the same bits when it goes on.

This file is also the program that is killed: a process that has torch loaded and has done one run, which forks a child for each
case. The child ends itself in the middle of the event, without any hook in the product.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dmst import atomic, cli
from dmst.engine import evaluate, train_loop, train_step
from dmst.engine.checkpoint import RunFolder
from dmst.engine.optim import Muon
from dmst.engine.recipe import Recipe
from dmst.errors import FullDiskError, SaveError
from tests.runs import EVERYTHING, CutAfter, digests, on_pictures, pictures, told

ROOT = Path(__file__).parents[2]

# --- events: what a child does to itself ------------------------------------------------------------------------------


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_audit(event: str, *parts: str) -> None:
    """Die before `event` touches a path with each of `parts` in it."""

    def hook(name: str, args: tuple[Any, ...]) -> None:
        if name == event and all(part in " ".join(map(str, args[:2])) for part in parts):
            die()

    sys.addaudithook(hook)


def at_half(name: str, part: str, count: int = 1) -> None:
    """Die in the middle of writing the file `name` in a folder with `part` in its path, the `count`th time."""
    real, left = pathlib.Path.open, [count]

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if path.name == name and part in str(path) and mode[0] in "ax":
            left[0] -= 1
            if not left[0]:
                size = path.stat().st_size if path.exists() else -1
                with real(path, mode, *args, **options) as file:
                    file.write(b'{"event": "st')
                die()
                path.unlink() if size < 0 else os.truncate(path, size)  # where `die` is something milder
        return real(path, mode, *args, **options)

    pathlib.Path.open = opened  # type: ignore[assignment]


def at_call(owner: Any, name: str, count: int, act: Callable[[], Any] = die) -> None:
    """Do `act` before the `count`th call of a function."""
    real, left = getattr(owner, name), [count]

    def called(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            act()
        return real(*args, **options)

    setattr(owner, name, called)


KINDS: dict[str, Callable[[], None]] = {
    "in a file of a checkpoint": lambda: at_half("optim.safetensors", ".step_00000006."),
    "before its rename": lambda: at_audit("os.rename", "/.step_00000006."),
    "after its rename": lambda: at_call(atomic, "sync", 9),  # three files of the run; then by step: folder, parent, that again
    "while the oldest is removed": lambda: at_audit("os.remove", "model.safetensors"),
    "before the last one is removed": lambda: at_audit("os.rename", "/step_00000006 "),  # no other save follows
    "in a step, between two optimizers": lambda: at_call(Muon, "step", 8),
    "in an evaluation": lambda: at_call(evaluate, "precision", 2),
    "while the model is written": lambda: at_half("model.safetensors", ".final."),
    "in a line of the journal": lambda: at_half("journal.jsonl", "", 12),
    "before the first checkpoint": lambda: at_call(Muon, "step", 2),
}


def both_signals() -> None:
    """The first asks to stop; the second, before the step is over, does not wait for it."""
    os.kill(os.getpid(), signal.SIGINT)
    at_call(train_step.F, "cross_entropy", 1, lambda: os.kill(os.getpid(), signal.SIGINT))


def by_slurm() -> None:
    """To torchrun and to each of its processes; torchrun passes it on, so it comes twice."""
    os.environ["TORCHELASTIC_RUN_ID"] = "job"
    os.kill(os.getpid(), signal.SIGTERM)
    at_call(train_step.F, "cross_entropy", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))


SIGNALS: dict[str, Callable[[], None]] = {
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGINT twice": both_signals,
    "SIGTERM twice, under torchrun": by_slurm,
}

# --- the program -----------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], Any], group: bool = False) -> int:
    """Start `work` in a child, its own process group if asked for; returns its process."""
    child = os.fork()
    if child == 0:
        try:
            if group:
                os.setpgid(0, 0)
            work()
            os._exit(0)
        except SystemExit as leave:
            os._exit(int(leave.code or 0))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    if group:
        with suppress(OSError):  # whoever of the two comes first
            os.setpgid(child, child)
    return child


def names(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


def compared(run: Path, whole_run: Path) -> dict[str, Any]:
    """What differs between two runs."""
    mine, theirs = digests(run), digests(whole_run)
    journals = [told(list(train_loop.journal.read(each / "journal.jsonl"))) for each in (run, whole_run)]
    for event in [event for each in journals for event in each]:
        event.pop("layers", None)  # a probe of the command's
    journals = [[event for event in each if event["event"] != "stopped"] for each in journals]
    return {
        "bits": [name for name in theirs if mine.get(name) != theirs[name]],
        "files": sorted(set(names(run)) ^ set(names(whole_run))),
        "lines": [event for event in journals[0] if event not in journals[1]],
        "count": len(journals[0]) - len(journals[1]),
    }


def warm(place: Path, *more: str) -> tuple[Recipe, Path]:
    """A recipe, and an undisturbed run of it: what is imported on first use is imported then."""
    recipe = on_pictures(pictures(place / "data"), *EVERYTHING, *more)
    train_loop.train(recipe, place / "whole", device="cpu")
    return recipe, place / "whole"


def kills(place: Path) -> None:
    recipe, whole_run = warm(place)
    for kind, arm in KINDS.items():
        run = place / kind

        def killed(arm: Callable[[], None] = arm, run: Path = run) -> None:
            arm()
            train_loop.train(recipe, run, device="cpu")

        _, status = os.waitpid(in_child(killed), 0)
        newest = RunFolder(run).newest()
        train_loop.train(recipe, run, device="cpu")
        found = {"kind": kind, "status": status, "from": newest.step if newest else 0}
        print(json.dumps(found | compared(run, whole_run)), flush=True)


def signals(place: Path) -> None:
    """By the command itself, as a person types it."""
    recipe, whole_run = warm(place)
    (place / "recipe.toml").write_text(recipe.to_toml())
    for kind, act in SIGNALS.items():
        run = place / kind
        sys.argv = ["dmst", "train", str(place / "recipe.toml"), "--out", str(run), "--device", "cpu", "--no-report"]

        def stopped(act: Callable[[], None] = act) -> None:
            at_call(train_step.F, "cross_entropy", 9, act)  # the first of two micro-steps of the fifth step
            cli.main()

        began = time.monotonic()
        _, status = os.waitpid(in_child(stopped), 0)
        found = {"kind": kind, "status": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}
        newest = RunFolder(run).newest()
        print(flush=True)
        again = os.waitpid(in_child(cli.main), 0)[1]
        found |= {"from": newest.step if newest else 0, "again": again}
        print(json.dumps(found | compared(run, whole_run)), flush=True)


def lines(*arguments: str) -> list[Any]:
    """What this file as a program prints, warnings as errors."""
    strict = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]  # the second: loaders fork where threads are
    command = [sys.executable, *strict, "-m", "tests.engine.test_train_kills", *arguments]
    program = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=110, check=True)
    return [json.loads(line) for line in program.stdout.splitlines() if line.startswith("{")]


# --- the tests -------------------------------------------------------------------------------------------------------

SAME = {"bits": [], "files": [], "lines": [], "count": 0}
FROM = [3, 3, 6, 9, 12, 6, 3, 12, 6, 0]  # steps that are not lost


@pytest.mark.process
def test_a_run_killed_at_any_kind_of_event_ends_in_the_same_bits(tmp_path: Path) -> None:
    found = lines("kills", str(tmp_path))
    for kind, step, each in zip(KINDS, FROM, found, strict=True):
        assert each == {"kind": kind, "status": signal.SIGKILL, "from": step, **SAME}


@pytest.mark.process
def test_a_run_that_is_told_to_stop_saves_and_goes_on(tmp_path: Path) -> None:
    found = lines("signals", str(tmp_path))
    for kind, code, step, each in zip(SIGNALS, (143, 130, 130, 143), (5, 5, 3, 5), found, strict=True):
        assert each.pop("seconds") < 10, each
        each["lines"] = [event for event in each["lines"] if (event["event"], event["step"]) != ("checkpoint", 5)]
        each["count"] -= step == 5  # the checkpoint of the stop
        assert each == {"kind": kind, "status": code, "from": step, "again": 0, **SAME}


# --- no room ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return pictures(tmp_path / "data")


def fails(patch: pytest.MonkeyPatch, number: int, when: Callable[[Path], bool]) -> None:
    """Opening a file to write fails where `when` says so."""
    real = pathlib.Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode[0] in "ax" and when(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, mode, *args, **options)

    patch.setattr(pathlib.Path, "open", opened)


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(errno.ENOSPC, FullDiskError, 75), (errno.EIO, SaveError, 1)],
)
def test_a_disk_that_fails_keeps_the_old_checkpoint(
    number: int, kind: type[SaveError], code: int, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = on_pictures(data, *EVERYTHING)
    train_loop.train(recipe, tmp_path / "whole", device="cpu")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, number, lambda path: ".step_00000006." in str(path) and path.name == "ema.safetensors")
        places = [str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]
        patch.setattr(sys, "argv", ["dmst", "train", *places, "--device", "cpu", "--no-report", "--quiet"])
        with pytest.raises(SystemExit) as leaves:
            cli.main()
    assert leaves.value.code == code == kind.exit_code
    said = capsys.readouterr().err
    assert f"{tmp_path}/run/checkpoints/step_00000006 could not be written ({os.strerror(number)}): it needs " in said
    assert "are free there" in said and said.count("\n") == 1
    assert RunFolder(tmp_path / "run").newest().step == 3 and RunFolder(tmp_path / "run").steps() == [3]
    train_loop.train(recipe, tmp_path / "run", device="cpu")
    assert compared(tmp_path / "run", tmp_path / "whole") == SAME


def test_a_run_may_go_on_without_room(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither checkpoints nor lines of the journal find room for some steps: what comes after is as if they had."""
    recipe = on_pictures(data, *EVERYTHING)
    train_loop.train(recipe, tmp_path / "whole", device="cpu")
    full = [False]

    class Fills(CutAfter):
        said = ""

        def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
            full[0] = 4 <= done < 8

        def say(self, text: str) -> None:
            self.said += text

    fails(monkeypatch, errno.ENOSPC, lambda path: full[0])
    watch = Fills(99)
    result = train_loop.train(recipe, tmp_path / "run", device="cpu", watch=watch, keep_going_on_full_disk=True)
    assert [event["step"] for event in result.journal if event["event"] == "checkpoint"] == [3, 9, 12]
    found = compared(tmp_path / "run", tmp_path / "whole")
    assert found["bits"] == [] and found["files"] == [] and found["lines"] == []
    missing = [(event["event"], event["step"]) for event in result.journal]
    assert ("checkpoint", 6) not in missing and ("step", 4) in missing and ("step", 6) not in missing and ("step", 9) in missing
    assert "step_00000006 could not be written" in watch.said and "Training goes on, as asked." in watch.said
    full[0] = False
    with pytest.raises(FullDiskError, match=r"journal\.jsonl could not be written \(No space left on device\)"):
        train_loop.train(recipe, tmp_path / "other", device="cpu", watch=Fills(99))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_vanishes(replaced: bool, data: Path, tmp_path: Path) -> None:
    """It is not made anew, and what took its place is left alone: what a run writes belongs together."""
    recipe = on_pictures(data, *EVERYTHING)
    run, away = tmp_path / "run", tmp_path / "away"

    class Moves(CutAfter):
        def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
            if done == self.last:
                run.rename(away)
                run.mkdir() if replaced else None

        def end(self) -> None:  # after the last checkpoint, before the model
            if self.last == 13:
                self.step(13, 12, {})

    for step, newest, message in ((4, 3, r"journal\.jsonl could not be written"), (9, 6, "was moved away or replaced"),
                                  (13, 12, "checkpoints could not be written .the folder of the run was moved")):  # fmt: skip
        with pytest.raises(SaveError, match=message):
            train_loop.train(recipe, run, device="cpu", watch=Moves(step))
        assert os.listdir(run) == [] if replaced else not run.exists()
        assert RunFolder(away).newest().step == newest
        shutil.rmtree(away)
        run.rmdir() if replaced else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # it counts in a power cut, not in a kill; and it waits for everybody's disk
    globals()[sys.argv[1]](Path(sys.argv[2]))
