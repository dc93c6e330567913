"""A run that is cut off at any instant and started again ends in the same bits as one that never was, and leaves nothing stray.

Every case is the command `dmst train`, as a person types it, in a child forked from a process that has torch loaded and has
done one run: 24 steps of a tiny DMST with dropout, stochastic depth, AdamW, Muon and EMA, a checkpoint every third. The child
does the harm to itself, without any hook in the product: Python's audit hook tells of what touches names, stand-ins of each
write, cut into halves, of each fsync and of each step of the optimizers. Then the same command again, and every file of the
run (weights, moments, means, state, manifests, final model, caches) must have the sha256 that it has in the undisturbed run,
the journal the same lines but for what a clock said, and no file may be there that is not there too.

`os.fsync` does nothing: it counts in a power cut, not in a kill.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dmst import atomic, cli
from dmst.engine import evaluate, journal
from dmst.engine.checkpoint import RunFolder
from dmst.engine.optim import Mean, Muon
from dmst.engine.train_step import TrainStep
from soak.case import Case
from tests.engine.test_checkpoint_kills import FILES, Halves
from tests.engine.test_train_kills import SIGNALS, at_call, die, in_child
from tests.runs import EVERYTHING, on_pictures, pictures, told

TITLE = "Kills, signals, full disks"
STEPS, EVERY = 24, 3
RECIPES: dict[str, list[str]] = {
    "plain": [],
    "workers": ["data.path=workers", "data.scan=none", "augment.flip=0.5", "augment.resized_crop=0.35"],
}
Act = Callable[[str], None]

# --- events ----------------------------------------------------------------------------------------------------------

# each audit event with the places of its paths and of the folders that these are relative to
CHANGES = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.chmod": ((0, 2),),
    "os.truncate": ((0, None),),
    "fcntl.flock": ((0, None),),
    "open": ((0, None),),
}
CALLS = ((Muon, "step", "second optimizer"), (Mean, "update", "mean"), (evaluate, "precision", "evaluation"))
BY_CHANCE = re.compile(r"(?<=\.)[0-9a-f]{16}")  # the end of a temporary name


class Events:
    """In this process, from now on: tells `act` the name of everything that changes `run`, before it comes."""

    def __init__(self, run: Path, act: Act) -> None:
        self.run, self.act = run, act
        real_open = pathlib.Path.open

        def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = real_open(path, mode, *args, **options)
            return Halves(file, path, self) if mode[0] in "ax" and path.is_relative_to(run) else file  # type: ignore[arg-type]

        pathlib.Path.open = opened  # type: ignore[assignment]
        os.fsync = lambda handle: self.happens("fsync", handle)  # type: ignore[assignment]
        for owner, name, called in CALLS:
            setattr(owner, name, self._told(getattr(owner, name), called))
        sys.addaudithook(self._hook)

    def happens(self, what: str, *paths: Any) -> None:
        found = [Path(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)) for path in paths]
        if all(path.is_relative_to(self.run) for path in found):
            self.act(BY_CHANCE.sub("~", " ".join([what, *(str(path.relative_to(self.run)) for path in found)])))

    def _told(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self.happens(name)
            return real(*args, **options)

        return called

    def _hook(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in CHANGES or (name == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        if name == "open" and isinstance(args[0], int):  # a handle that is open already
            return
        self.happens(name, *(_absolute(args, *places) for places in CHANGES[name]))


def _absolute(args: tuple[Any, ...], path: int, folder: int | None) -> Any:
    if folder is None or args[folder] == -1 or isinstance(args[path], int):
        return args[path]
    return os.path.join(os.readlink(f"/proc/self/fd/{args[folder]}"), os.fsdecode(args[path]))


def at(n: int, of: str = "", do: Callable[[], Any] = die) -> Act:
    """`do` at the nth event whose name has `of` in it."""
    left = [n]

    def act(name: str) -> None:
        if re.search(of, name):
            left[0] -= 1
            if not left[0]:
                do()

    return act


def fail(number: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


# --- runs ------------------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    status: int  # 128 + n for signal n, as shells say it
    said: str
    seconds: float


def begin(run: Path, arm: Callable[[], Any] = lambda: None, recipe: str = "plain") -> int:
    """Start the command in a child, armed against itself; returns its process. What it says is in said_by(it)."""
    sys.argv = ["dmst", "train", str(PLACE / f"{recipe}.toml"), "--out", str(run), "--device", "cpu", "--no-report", "--quiet"]
    sys.argv += ["--workers", "2"] if recipe == "workers" else []

    def work() -> None:
        said = os.open(said_by(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1), os.dup2(said, 2)
        arm()
        cli.main()

    return in_child(work)


def end(child: int, began: float) -> Ended:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(code if code >= 0 else 128 - code, said_by(child).read_text(), time.monotonic() - began)


def command(run: Path, act: Act | None = None, *, arm: Callable[[], Any] = lambda: None, recipe: str = "plain") -> Ended:
    """The command from its start to its end."""
    began = time.monotonic()
    return end(begin(run, arm if act is None else lambda: Events(run, act), recipe), began)


def said_by(child: int) -> Path:
    return SAID / f"{child}.txt"


def files_of(run: Path) -> dict[str, str]:
    """Every name in a folder, with the sha256 of what is a file."""
    found = sorted(run.rglob("*"))
    return {str(x.relative_to(run)): hashlib.sha256(x.read_bytes()).hexdigest() if x.is_file() else "" for x in found}


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The journal without what a clock said, and without what stopping adds to it."""
    lines = told(list(journal.read(run / journal.NAME)))
    return [x for x in lines if x["event"] != "stopped" and (x["event"] != "checkpoint" or x["step"] % EVERY == 0)]


def newest(run: Path) -> int:
    """The step of the newest checkpoint; a kill must never leave a damaged one, so a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = RunFolder(run).newest()
    return found.step if found else 0


def again(run: Path, recipe: str = "plain") -> None:
    """The same command once more, in silence, and then nothing may differ from the run that was not disturbed."""
    ended = command(run, recipe=recipe)
    assert ended.status == 0, f"the same command again ended with {ended.status}: {ended.said}"
    assert not ended.said, f"the same command again said: {ended.said}"
    mine, theirs = files_of(run), files_of(PLACE / recipe)
    clocked = {"lock", journal.NAME}
    differ = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    assert not set(differ) - clocked, f"not as in the undisturbed run: {[name for name in differ if name not in clocked]}"
    lines, wanted = lines_of(run), lines_of(PLACE / recipe)
    assert lines == wanted, f"journal: {[x for x in lines if x not in wanted]} for {[x for x in wanted if x not in lines]}"


def killed(ended: Ended) -> None:
    assert ended.status == 128 + signal.SIGKILL, f"the kill did not come: status {ended.status}, {ended.said}"


def refused(ended: Ended, code: int, *words: str) -> None:
    """One line for a person, with each of `words`, and the exit code."""
    assert ended.status == code, f"exit status {ended.status} instead of {code}: {ended.said}"
    assert ended.said.count("\n") == 1 and "Traceback" not in ended.said, f"not one line: {ended.said}"
    missing = [word for word in words if not re.search(word, ended.said)]
    assert not missing, f"{missing} is not in: {ended.said}"


PLACE = SAID = Path()


def prepare(place: Path) -> tuple[list[str], float]:
    """An undisturbed run of each recipe: the events of the first, and the seconds of the one with workers."""
    global PLACE, SAID
    os.fsync = lambda handle: None  # type: ignore[assignment]
    PLACE, SAID = place, place / "said"
    SAID.mkdir()
    pictures(place / "data")
    for name, more in RECIPES.items():
        recipe = on_pictures(place / "data", *EVERYTHING, f"schedule.epochs={STEPS // 6}", *more)
        (place / f"{name}.toml").write_text(recipe.to_toml())
    sys.argv = ["dmst", "train", str(place / "plain.toml"), "--out", str(place / "plain"), "--device", "cpu", "--no-report"]
    with suppress(SystemExit):  # in this process: what is imported on first use is imported now
        cli.main()
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot be forked safely"

    def listed() -> None:
        names: list[str] = []
        Events(place / "listed", names.append)
        with suppress(SystemExit):
            cli.main()
        (place / "events.json").write_text(json.dumps(names))

    assert command(place / "listed", arm=listed).status == 0
    shutil.rmtree(place / "listed")
    took = command(place / "workers", recipe="workers")
    assert took.status == 0, took.said
    return json.loads((place / "events.json").read_text()), took.seconds


# --- kills -----------------------------------------------------------------------------------------------------------


def saved_before(events: list[str], i: int) -> int:
    """The step that a kill at event i must not lose."""
    found = [re.match(r"os.rename checkpoints/\.step_(\d+)\.~ ", name) for name in events[:i]]
    return max((int(each[1]) for each in found if each), default=0)


def at_event(events: list[str], i: int, folder: Path) -> dict[str, Any]:
    run = folder / "run"
    killed(command(run, at(i + 1)))
    step, wanted = newest(run), saved_before(events, i)
    assert step == wanted, f"goes on from step {step} instead of {wanted}"
    again(run)
    return {"from": step}


def every_event(events: list[str]) -> Iterator[Case]:
    row = "killed at every rename, removal, line, step, and before, in and after every write of a run"
    for i in range(len(events)):
        name = re.sub(r"(os.remove .*)/.*", r"\1", events[i])  # the order in which a folder is emptied is the disk's
        yield Case(row, f"{i:04d} {name}", functools.partial(at_event, events, i))


def children_of(process: int) -> list[int]:
    with suppress(OSError):
        return sorted(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    return []


def alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def at_random_times(took: float, number: int, folder: Path) -> dict[str, Any]:
    """Four kills of one run: once its main process alone, else at one moment the workers that read images too."""
    chance, run, kills, tries, orphans, steps = random.Random(number), folder / "run", 0, 0, set[int](), []
    while kills < 4:
        tries += 1
        assert tries < 30, f"{kills} kills in {tries} tries"
        began, child = time.monotonic(), begin(run, recipe="workers")
        handle = os.pidfd_open(child)
        select.select([handle], [], [], chance.uniform(0.05, 0.5) * took)
        os.close(handle)
        everyone = children_of(child)
        for process in [child] if kills == number % 4 else [child, *everyone]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        orphans |= set(everyone)
        if end(child, began).status == 0:  # it was faster: from the beginning
            shutil.rmtree(run)
            continue
        kills += 1
        steps.append(newest(run))
    again(run, "workers")
    until = time.monotonic() + 30
    while left := [process for process in orphans if alive(process)]:
        assert time.monotonic() < until, f"workers of a killed run live on: {left}"
        time.sleep(0.2)
    return {"from": steps}


def random_times(took: float) -> Iterator[Case]:
    for number in range(50):
        check = functools.partial(at_random_times, took, number)
        yield Case("killed 4 times at random moments, with 2 processes that read images", f"random {number:02d}", check, 240)


def twice(first: Act, second: Act, folder: Path) -> dict[str, Any]:
    run, steps = folder / "run", []
    for act in (first, second):
        killed(command(run, act))
        steps.append(newest(run))
    again(run)
    return {"from": steps}


def of_save(step: int) -> str:
    return rf"^(half of|all of|fsync|open|os.mkdir|os.rename) checkpoints/\.step_{step:08d}\.~(/| |$)"


def kills_of_kills(events: list[str]) -> Iterator[Case]:
    chance = random.Random(0)
    early = [i for i in range(len(events)) if saved_before(events, i) < STEPS - 2 * EVERY]
    for number in range(20):
        first, second = chance.choice(early) + 1, chance.randint(1, 60)
        name = f"{number:02d} event {first}, then event {second} of the recovery"
        yield Case("killed, and killed again while it recovers", name, lambda to, a=first, b=second: twice(at(a), at(b), to))
    for number in range(20):
        step = EVERY * (1 + number % (STEPS // EVERY))
        save = [name for name in events if re.search(of_save(step), name)]
        first, second = chance.sample(range(1, len(save) + 1), 2)
        name, of = f"{number:02d} save of step {step}, its events {first} and {second} of {len(save)}", of_save(step)
        check = lambda to, of=of, a=first, b=second: twice(at(a, of), at(b, of), to)  # noqa: E731
        yield Case("killed twice in one save", name, check)
    removal = r"os\.rename checkpoints/step_|os\.remove checkpoints/\.step_\d+\.~/"
    dead = [i for i, name in enumerate(events) if re.match(removal, name)]
    last = dead.index(next(i for i in dead if saved_before(events, i) == STEPS - EVERY))  # another prune must follow
    for number in range(20):
        first, second = 1 + number * last // 20, 1 + number % 6
        name = f"{number:02d} event {first} of all removals, then event {second} of the next"
        check = lambda to, a=first, b=second: twice(at(a, removal), at(b, removal), to)  # noqa: E731
        yield Case("killed while old checkpoints are removed, and again in the next removal", name, check)


# --- signals ---------------------------------------------------------------------------------------------------------

CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGINT twice": 130}


def told_to_stop(kind: str, step: int, folder: Path) -> dict[str, Any]:
    run = folder / "run"
    ended = command(run, arm=lambda: at_call(TrainStep, "step", step, SIGNALS[kind]))
    assert ended.status == CODES[kind], f"exit status {ended.status} instead of {CODES[kind]}: {ended.said}"
    assert ended.seconds < 10, f"it took {ended.seconds:.1f} s"
    wanted = (step - 1) // EVERY * EVERY if kind == "SIGINT twice" else step
    assert newest(run) == wanted, f"saved is step {newest(run)} instead of {wanted}"
    again(run)
    return {"seconds": round(ended.seconds, 1)}


def signals() -> Iterator[Case]:
    for kind in CODES:
        for step in (1, 2, 3, 5, 6, 10, 16, 20):
            row = "SIGTERM, SIGINT, SIGINT twice: exit 143, 130, 130 in 10 s"
            yield Case(row, f"{kind} in step {step}", functools.partial(told_to_stop, kind, step))


# --- no room ---------------------------------------------------------------------------------------------------------


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def apart(check: Callable[[Path], Any], folder: Path) -> dict[str, Any] | None:
    """Do `check` in a child whose mounts nobody else sees, and which go when it ends, however it ends."""

    def work() -> None:
        libc, new_mounts = ctypes.CDLL(None, use_errno=True), 0x00020000
        try:
            if libc.unshare(new_mounts):
                raise OSError(ctypes.get_errno(), "unshare")
            mount("--make-rprivate", "/")
            found = {"facts": check(folder)}
        except BaseException as error:
            found = {"wrong": f"{type(error).__name__}: {error}"}
        (SAID / "apart.json").write_text(json.dumps(found))

    (SAID / "apart.json").unlink(missing_ok=True)
    os.waitpid(in_child(work), 0)
    found = json.loads((SAID / "apart.json").read_text())
    assert "wrong" not in found, found["wrong"]
    return found["facts"]


def on_a_disk(folder: Path) -> Path:
    """A disk of 24 MiB of its own; only inside `apart`."""
    disk = folder / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=24m", "none", str(disk))
    return disk


def may_mount(place: Path) -> bool:
    try:
        apart(lambda folder: on_a_disk(folder) and None, place)
    except AssertionError:
        return False
    finally:
        with suppress(OSError):
            (place / "disk").rmdir()
    return True


NUMBERS = r": it needs [\d,]+ bytes, and [\d,]+ are free there"


def full_disk(kib: int, folder: Path) -> dict[str, Any]:
    """All but so much of a disk is taken, until somebody makes room."""
    disk = on_a_disk(folder)
    run, taken = disk / "run", disk / "taken"
    with taken.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 1024 * kib)
    ended = command(run)
    return goes_on_with_room(run, ended, taken.unlink)


def as_if_full(n: int, folder: Path) -> dict[str, Any]:
    """From the nth write on none finds room, where mounts are not allowed."""
    run, left = folder / "run", [n]

    def act(name: str) -> None:
        left[0] -= name.startswith("half of ")
        if left[0] <= 0 and name.startswith("half of "):
            fail(errno.ENOSPC)()

    return goes_on_with_room(run, command(run, act), lambda: None)


def goes_on_with_room(run: Path, ended: Ended, make_room: Callable[[], Any]) -> dict[str, Any]:
    refused(ended, 75, re.escape(str(run)), r"could not be written \(No space left on device\)")
    if journal.NAME not in ended.said:
        refused(ended, 75, NUMBERS)
    step = newest(run)
    make_room()
    again(run)
    return {"from": step}


def no_room(step: int, number: int, event: str, folder: Path) -> None:
    """One event of a save fails; what was saved before is untouched, and nothing of the new one is left."""
    run, place = folder / "run", f"checkpoints/step_{step:08d}"
    ended = command(run, at(1, event, fail(number)))
    why = re.escape(f"{run}/{place} could not be written ({os.strerror(number)})")
    refused(ended, 1 if number == errno.EIO else 75, why + NUMBERS)
    assert newest(run) == step - EVERY, f"the newest checkpoint is of step {newest(run)}"
    left = [name for name in os.listdir(run / "checkpoints") if not re.fullmatch(r"step_\d{8}", name)]
    assert not left and not (run / place).exists(), f"left: {left}"
    again(run)


def rooms(events: list[str], mounts: bool) -> Iterator[Case]:
    writes = sum(name.startswith("half of ") for name in events)
    for i, kib in enumerate((0, 4, 8, 12, 20, 60, 100, 120, 160, 200, 240, 280)):
        if mounts:
            check = functools.partial(apart, functools.partial(full_disk, kib))
            yield Case("a real full disk: exit 75", f"{kib} KiB are free", check)
        else:
            n = 1 + i * writes // 12
            yield Case(
                "a full disk (injected: no mounts here): exit 75", f"from write {n} on", functools.partial(as_if_full, n)
            )
    save = {f"{what} of {name}": rf"{event} checkpoints/\.step_STEP\.~/{re.escape(name)}"
            for name in FILES for what, event in (("write", "half of"), ("fsync", "fsync"))}  # fmt: skip
    save |= {
        "making the folder": r"os.mkdir checkpoints/\.step_STEP\.~",
        "fsync of the folder": r"fsync checkpoints/\.step_STEP\.~$",
        "its rename": r"os.rename checkpoints/\.step_STEP\.~",
    }
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        for i, (what, event) in enumerate(save.items()):
            step, code = EVERY * (1 + i % (STEPS // EVERY)), errno.errorcode[number]
            check = functools.partial(no_room, step, number, event.replace("STEP", f"{step:08d}"))
            yield Case("no room, no quota or a failing disk in each write and fsync of a save (injected)",
                       f"{code} at {what}, step {step}", check)  # fmt: skip


# --- a folder that changes under a run ----------------------------------------------------------------------------------


def read_only(number: int, inside: str, step: int, folder: Path) -> dict[str, Any]:
    """From a step on nothing can be written; 0: from the start of a run that was killed before."""
    run, reached = folder / "run", [0]

    def act(name: str) -> None:
        reached[0] += name == "second optimizer"
        if reached[0] >= step and name not in [called for _, _, called in CALLS] and inside in name:
            fail(number)()

    if not step:
        killed(command(run, at(8, "second optimizer")))
    before = files_of(run)
    ended = command(run, act)
    refused(ended, 1, re.escape(str(run)), re.escape(os.strerror(number)))
    assert step or files_of(run) == before, "something was written"
    found = newest(run)
    again(run)
    return {"from": found}


def read_only_disk(i: int, folder: Path) -> None:
    """A run that was killed is started on a disk that is mounted read-only."""
    disk = on_a_disk(folder)
    killed(command(disk / "run", at(i)))
    before = files_of(disk)
    mount("-o", "remount,ro", str(disk))
    refused(command(disk / "run"), 1, re.escape(str(disk / "run")), "Read-only file system")
    mount("-o", "remount,rw", str(disk))
    assert files_of(disk) == before, "something was written"
    again(disk / "run")


def read_only_checkpoints(step: int, folder: Path) -> dict[str, Any]:
    """The folder of the checkpoints becomes read-only while the run is in it."""
    run = folder / "run"
    place = run / "checkpoints"
    place.mkdir(parents=True)
    mount("--bind", str(place), str(place))
    lock = at(step, "second optimizer", lambda: mount("-o", "remount,bind,ro", str(place)))
    refused(command(run, lock), 1, re.escape(str(place)), "Read-only file system")
    mount("-o", "remount,bind,rw", str(place))
    found = newest(run)
    again(run)
    return {"from": found}


def link(place: Path) -> None:
    elsewhere = place.with_name("elsewhere")
    elsewhere.mkdir()
    place.symlink_to(elsewhere)


PUT: dict[str, Callable[[Path], Any]] = {  # in the place of what was moved away
    "moved away": lambda place: None,
    "replaced by an empty folder": lambda place: place.mkdir(),
    "replaced by a file": lambda place: place.write_bytes(b"another"),
    "replaced by a link": link,
}


def vanishes(put: str, event: str, n: int, folder: Path) -> dict[str, Any]:
    """It is not made anew, nothing is written in what took its place, and what was moved away stays as it was."""
    run, away = folder / "run", folder / "away"

    def act() -> None:
        run.rename(away)
        PUT[put](run)
        (SAID / "then.json").write_text(json.dumps(files_of(folder)))

    refused(command(run, at(n, event, act)), 1, re.escape(str(run)), "could not be written")
    then, now = json.loads((SAID / "then.json").read_text()), files_of(folder)
    differ = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    assert not differ, f"written after it was {put}: {differ}"
    for left in (run, run.with_name("elsewhere")):
        atomic.remove(left)
    away.rename(run)
    found = newest(run)
    again(run)
    return {"from": found}


def removed(event: str, n: int, folder: Path) -> None:
    """It is not made anew; the same command begins anew, and ends in the same bits."""
    run = folder / "run"
    ended = command(run, at(n, event, lambda: shutil.rmtree(run)))
    refused(ended, 1, re.escape(str(run)), "could not be written")
    assert not run.exists(), "it was made anew"
    again(run)


def folders(events: list[str], mounts: bool) -> Iterator[Case]:
    row, steps = "read-only from a step on: a typed error, nothing lost", (0, 2, 7, 18)
    for number in (errno.EACCES, errno.EROFS):
        for inside in ("", "checkpoints"):
            for step in steps if not inside else steps[1:]:
                name = f"injected {errno.errorcode[number]} in {inside or 'all'} from step {step} on"
                yield Case(row, name, functools.partial(read_only, number, inside, step))
    if mounts:
        for share in (1, 3, 6, 9):
            check = functools.partial(read_only_disk, len(events) * share // 10)
            yield Case(row, f"a disk mounted read-only after {share} tenths", functools.partial(apart, check))
        for step in (1, 5, 12, 20):
            check = functools.partial(apart, functools.partial(read_only_checkpoints, step))
            yield Case(row, f"checkpoints mounted read-only from step {step} on", check)
    row = "the folder vanishes or is replaced: a typed error, nothing lost"
    moments = {f"in step {n}": ("second optimizer", n) for n in (1, 4, 9, 18)}
    moments["after the last checkpoint"] = "all of journal", sum("all of journal" in name for name in events) - 1
    for when, (event, n) in moments.items():
        for put in PUT:
            yield Case(row, f"{when}: {put}", functools.partial(vanishes, put, event, n))
        yield Case(row, f"{when}: removed", functools.partial(removed, event, n))


# --- other processes ---------------------------------------------------------------------------------------------------


def two_runs(event: str, n: int, folder: Path) -> None:
    """The first waits in the middle of an event while the second is started."""
    run, began = folder / "run", time.monotonic()
    (hears, says), (waits, lets) = os.pipe(), os.pipe()

    def pause() -> None:
        os.write(says, b".")
        os.read(waits, 1)

    first = begin(run, lambda: (os.close(lets), Events(run, at(n, event, pause))))
    os.close(says), os.close(waits)
    try:
        assert os.read(hears, 1), f"the first run did not come to {event}: {said_by(first).read_text()}"
        before = files_of(run)
        refused(command(run), 1, f"{re.escape(str(run))} is in use by another run")
        assert files_of(run) == before, "the second run changed something"
        os.write(lets, b".")
    finally:
        os.close(hears), os.close(lets)
        ended = end(first, began)
    assert ended.status == 0, f"the first run ended with {ended.status}: {ended.said}"
    again(run)


def dead_worker(which: int, step: int, folder: Path) -> dict[str, Any]:
    run = folder / "run"

    def kill_one() -> None:
        os.kill(children_of(os.getpid())[which], signal.SIGKILL)

    ended = command(run, arm=lambda: at_call(TrainStep, "step", step, kill_one), recipe="workers")
    refused(ended, 1, "a worker process that reads images has died")
    assert ended.seconds < 30, f"it took {ended.seconds:.1f} s"
    found = newest(run)
    assert found >= (step - 1) // EVERY * EVERY, f"goes on from step {found}"
    again(run, "workers")
    return {"from": found, "seconds": round(ended.seconds, 1)}


def others() -> Iterator[Case]:
    moments = {f"before step {n}": ("second optimizer", n) for n in (1, 4, 13, 24)} | {
        "in a file of a checkpoint": (r"half of checkpoints/\.step_00000006\.~/optim", 1),
        "before its rename": (r"os.rename checkpoints/\.step_00000009\.~", 1),
        "while an old one is removed": (r"os.remove checkpoints/\.step_\d+\.~/", 2),
        "in an evaluation": ("evaluation", 3),
        "in a line of the journal": ("half of journal", 9),
        "while the model is written": (r"half of \.final\.~/model", 1),
    }
    for name, (event, n) in moments.items():
        check = functools.partial(two_runs, event, n)
        yield Case("a second run in the folder is refused, the first unharmed", f"the first is {name}", check)
    for which in (0, 1):
        for step in (2, 3, 5, 7, 12, 18):
            row = "a process that reads images is killed: an error in 30 s"
            yield Case(row, f"process {which} in step {step}", functools.partial(dead_worker, which, step))


def cases(place: Path) -> Iterator[Case]:
    events, took = prepare(place)
    mounts = may_mount(place)
    yield from every_event(events)
    yield from random_times(took)
    yield from kills_of_kills(events)
    yield from signals()
    yield from rooms(events, mounts)
    yield from folders(events, mounts)
    yield from others()
