"""SIGKILL at every event of saving, pruning and sweeping: a whole checkpoint is always there, and nothing stray stays.

This file is also the program that does it: a process that has torch loaded and no threads, which forks a child for each event.
The child counts events without any hook in the product, by Python's audit hook for what touches names, and by stand-ins for
`os.fsync` and for files that are written: each write is cut into two halves, with an event before, between and after.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmst.engine.checkpoint import RunFolder, State
from dmst.errors import OptionError

NAMES = {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.chmod", "os.listdir", "os.scandir", "fcntl.flock"}
FILES = ["ema.safetensors", "manifest.json", "model.safetensors", "optim.safetensors", "state.json"]


def state(step: int, value: float = 0.0) -> State:
    def parts(n: int) -> dict[str, torch.Tensor]:
        return {f"{'abc'[i]}.weight": torch.arange(float(5 + i + n)) + step + value for i in range(2)}

    return State(step, {"model": parts(1), "ema": parts(2), "optim": parts(3)}, best={"value": value})


# --- the work that is cut off: what is there before, what is done, and the (step, value) that may be newest afterwards ------


def nothing(run: Path) -> None:
    with RunFolder(run):
        pass


def steps_3_and_6(run: Path) -> None:
    with RunFolder(run) as folder:
        folder.save(state(3))
        folder.save(state(6))


def step_3_alone(run: Path) -> None:
    with RunFolder(run) as folder:
        folder.save(state(3))


def cut_off_while_replacing(run: Path) -> None:
    """Killed between two renames, the second instant of a save over the only checkpoint; and an older prune was cut off too."""
    step_3_alone(run)
    inside = run / "checkpoints"
    shutil.copytree(inside / "step_00000003", inside / f".step_00000003.{'0' * 16}")
    shutil.copytree(inside / "step_00000003", inside / f".step_00000001.{'1' * 16}")
    (inside / f".step_00000001.{'1' * 16}" / "manifest.json").unlink()
    (inside / "step_00000003").rename(inside / f".step_00000003.old.{'2' * 16}")


def save_first(run: Path) -> None:
    with RunFolder(run) as folder:
        folder.save(state(3))


def save_9_and_prune(run: Path) -> None:
    with RunFolder(run) as folder:
        folder.save(state(9))
        folder.prune(keep=2)


def save_3_again(run: Path) -> None:
    with RunFolder(run) as folder:
        folder.save(state(3, value=0.5))


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], list[Any]]] = {
    "first": (nothing, save_first, [None, (3, 0.0)]),
    "save and prune": (steps_3_and_6, save_9_and_prune, [(6, 0.0), (9, 0.0)]),
    "same step": (step_3_alone, save_3_again, [(3, 0.0), (3, 0.5)]),
    "sweep": (cut_off_while_replacing, nothing, [(3, 0.0)]),
}


# --- the program -----------------------------------------------------------------------------------------------------


class Events:
    """Counts what happens in this process from now on, and ends it at event `last`."""

    def __init__(self, last: int) -> None:
        self.seen: list[str] = []
        self.last = last
        real_open = pathlib.Path.open

        def fsync(handle: int) -> None:
            name = Path(os.readlink(f"/proc/self/fd/{handle}"))
            self.happens("fsync", name)
            self.happens("synced", name)

        def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = real_open(path, mode, *args, **options)
            return Halves(file, path, self) if "x" in mode else file

        os.fsync, pathlib.Path.open = fsync, opened  # type: ignore[assignment]
        sys.addaudithook(lambda name, args: self.happens(name, *args[: 1 + (name == "os.rename")]) if name in NAMES else None)

    def happens(self, what: str, *paths: Any) -> None:
        shown = [f"{Path(str(path)).parent.name}/{Path(str(path)).name}" for path in paths]
        self.seen.append(re.sub(r"\.[0-9a-f]{16}", ".~", " ".join([what, *shown])))
        if len(self.seen) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class Halves:
    """A file that is written in halves."""

    def __init__(self, file: Any, path: Path, events: Events) -> None:
        self.file, self.path, self.events = file, path, events

    def write(self, data: Any) -> None:
        for part, told in ((data[: len(data) // 2], "half of"), (data[len(data) // 2 :], "all of")):
            self.file.write(part)
            self.file.flush()
            self.events.happens(told, self.path)

    def __enter__(self) -> Halves:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def cut_off(work: Callable[[Path], None], run: Path, last: int, told: Path) -> int:
    """Do `work` in a child that ends at event `last`; its exit status, and its events in `told` if it reached its end."""
    child = os.fork()
    if child == 0:
        try:
            events = Events(last)
            work(run)
            told.write_text(json.dumps(list(events.seen)))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1]


def left_in(run: Path) -> dict[str, Any]:
    """What the next run finds: the newest checkpoint, and every name. A warning is an error here."""
    with RunFolder(run) as folder:
        found = folder.newest()
        wanted = found and state(found.step, found.best["value"])
        same = wanted is None or all(
            torch.equal(x, found.tensors[stem][name]) for stem, xs in wanted.tensors.items() for name, x in xs.items()
        )
        names = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
        again = state(15)  # and it can go on from there
        folder.save(again)
        return {"newest": found and (found.step, found.best["value"]), "same": same, "names": names, "steps": folder.steps()}


def events_of(case: str, place: Path) -> tuple[list[str], dict[str, Any]]:
    """The events of a case, and what it leaves when nothing cuts it off."""
    before, work, _ = CASES[case]
    before(place / "before")
    work(shutil.copytree(place / "before", place / "warm"))  # what is imported on first use is imported now
    run = shutil.copytree(place / "before", place / "run")
    assert cut_off(work, run, 0, place / "events.json") == 0
    return json.loads((place / "events.json").read_text()), left_in(run)


def every_event(place: Path, most: int = 10**9) -> None:
    """Print for every event of every case what a kill there leaves; and first what is left without one.

    Or of `most` in each case, evenly spread, the first and the last among them.
    """
    for case, (_, work, _) in CASES.items():
        events, left = events_of(case, place / case)
        print(json.dumps({"case": case, "status": 0, "event": "none"} | left))
        count = min(most, len(events))
        chosen = {round(i * (len(events) - 1) / (count - 1)) + 1 for i in range(count)}
        for last, event in enumerate(events, start=1):
            if last not in chosen:
                continue
            shutil.rmtree(place / case / "run")
            run = shutil.copytree(place / case / "before", place / case / "run")
            status = cut_off(work, run, last, place / case / "events.json")
            print(json.dumps({"case": case, "status": status, "event": event} | left_in(run)))


def some_events(place: Path) -> None:
    every_event(place, 6)


def events_in_order(place: Path) -> None:
    print(json.dumps(events_of("save and prune", place)[0]))


def hold(place: Path) -> None:
    """Hold the lock, with a forked child such as a loader's worker, until standard input ends."""
    with RunFolder(place):
        if os.fork() == 0:  # the child speaks, so it has let go of the lock
            print(json.dumps({"worker": os.getpid()}), flush=True)
        sys.stdin.read()
        os._exit(0)


def started(what: str, place: Path) -> subprocess.Popen[str]:
    """This file as a program of one thread, warnings as errors: from Python 3.12 on a fork of more than one is warned of."""
    command = [sys.executable, "-W", "error", __file__, what, str(place)]
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | one)


def lines(what: str, place: Path) -> list[Any]:
    program = started(what, place)
    out, _ = program.communicate(timeout=100)
    assert program.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


# --- the tests -------------------------------------------------------------------------------------------------------


def holding(*steps: int) -> list[str]:
    folders = [f"checkpoints/step_{step:08d}" for step in steps]
    return sorted(["checkpoints", "lock", *folders, *(f"{folder}/{name}" for folder in folders for name in FILES)])


@pytest.mark.parametrize(
    ("which", "least"), [pytest.param("some_events", 24, id="24"), pytest.param("every_event", 170, marks=pytest.mark.process)]
)
def test_a_kill_at_any_event_leaves_a_whole_checkpoint_and_nothing_else(which: str, least: int, tmp_path: Path) -> None:
    records = lines(which, tmp_path)
    assert len(records) >= least + len(CASES)
    for case, (_, _, wanted) in CASES.items():
        allowed = [x and list(x) for x in wanted]
        finished, *kills = [record for record in records if record["case"] == case]
        assert finished["newest"] == allowed[-1]
        for kill in kills:
            assert kill["status"] == signal.SIGKILL, kill
            assert kill["same"] and kill["newest"] in allowed, kill
            steps = [step for step in kill["steps"] if step != 15]
            assert kill["names"] == holding(*steps) and 15 in kill["steps"], kill
            assert steps[-1:] == ([kill["newest"][0]] if kill["newest"] else []), kill
        reached = [kill["newest"] for kill in kills]
        assert [x for i, x in enumerate(reached) if x != reached[i - 1] or i == 0] == allowed  # first the old, then the new


def test_the_events_are_all_there_and_in_an_order_that_a_power_cut_respects(tmp_path: Path) -> None:
    """Every file synced before the manifest is begun, the folder before its rename, the rename before anything is removed."""
    (events,) = lines("events_in_order", tmp_path)
    new, place = ".step_00000009.~", "checkpoints/step_00000009"
    at = {event: i for i, event in reversed(list(enumerate(events)))}
    for name in FILES:
        assert at[f"half of {new}/{name}"] < at[f"all of {new}/{name}"] < at[f"synced {new}/{name}"]
        assert name == "manifest.json" or at[f"synced {new}/{name}"] < at[f"half of {new}/manifest.json"]
    last_write = max(i for i, event in enumerate(events) if event.startswith("all of"))
    order = [
        at[f"os.mkdir checkpoints/{new}"],
        last_write,
        at[f"synced {new}/manifest.json"],
        at[f"synced checkpoints/{new}"],
        at[f"os.rename checkpoints/{new} {place}"],
        at["synced run/checkpoints"],
        at["os.rename checkpoints/step_00000003 checkpoints/.step_00000003.~"],
        next(i for i, event in enumerate(events) if event.startswith("os.remove") and event.endswith(tuple(FILES))),
        next(i for i, event in enumerate(events) if event.startswith("os.rmdir")),
    ]
    assert order == sorted(order) and len(events) > 50, events
    assert events.count("synced run/checkpoints") == 2  # by the save, and by the prune before it removes anything


def test_two_runs_do_not_share_a_folder_and_a_kill_frees_it(tmp_path: Path) -> None:
    """The lock goes with the process that took it, though a child of it lives on."""
    program = started("hold", tmp_path)
    try:
        assert program.stdout is not None
        worker = json.loads(program.stdout.readline())["worker"]
        with pytest.raises(OptionError, match=f"{tmp_path} is in use by another run"):
            RunFolder(tmp_path).__enter__()
        assert RunFolder(tmp_path).newest() is None  # looking is free
        program.kill()
        program.wait()
        os.kill(worker, 0)  # it is alive
        with RunFolder(tmp_path) as folder:
            folder.save(state(3))
    finally:
        program.kill()
        program.communicate()


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1
    os.fsync = lambda _: None  # it counts in a power cut, not in a kill; and it waits for everybody's disk
    globals()[sys.argv[1]](Path(sys.argv[2]))
