"""Processes that train together, by gloo on a CPU: killed, stopped, broken or hung, alone, in threes, in changing numbers.

    a kill             torchrun starts the group again within 20 s, and the run ends in the bits of one that nobody disturbed
    an error           on one process ends the job on all, within 90 s; each says why; the same command goes on to the same bits
    a hang             ends the job too, after the time that processes wait for each other
    more processes     train as one does: 1e-6 relative in float32, 1e-14 in float64, and count the same
    another number     of processes goes on where the first were: the same images in the same order, the same augmentation
    two jobs           do not disturb each other, nor does one that is refused; nothing of theirs is left on the machine
    SIGTERM            to torchrun, or to torchrun and all its processes as Slurm does: the step is finished and saved

torchrun starts this file as a program. What is to befall a process in one of its starts is armed there, without any hook in the
product; once, `dmst train` itself is killed from outside. Rows that need no torchrun fork their processes from this one.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.data import get_worker_info

from dmst.data.sets import FileSet
from dmst.engine import evaluate, prepare, train_loop, train_step
from dmst.engine.checkpoint import RunFolder
from dmst.engine.console import Quiet
from dmst.engine.distributed import Group
from dmst.engine.optim import Muon
from dmst.engine.recipe import Recipe, read_recipe
from soak.case import Case
from tests.engine import test_train_kills as kills
from tests.engine.test_distributed import group, told
from tests.runs import EVERYTHING, CutAfter, digests, on_pictures, pictures, tiny

TITLE = "Several processes"
JOBS = 1  # a case is several processes, and some are timed

ROOT = Path(__file__).resolve().parents[2]
RECOVERED, ENDED = (
    20.0,
    90.0,
)  # seconds: from a kill to the first step after it; from the start of a job that must fail to its end
Act = Callable[[], Any]

# --- what befalls a process ------------------------------------------------------------------------------------------


def call(owner: Any, name: str, count: int) -> Callable[[Act], None]:
    return lambda act: kills.at_call(owner, name, count, act)


def event(arm: Act) -> Callable[[Act], None]:
    """One of the tests' events that end in `die`."""

    def armed(act: Act) -> None:
        kills.die = act
        arm()

    return armed


EVENTS: dict[str, Callable[[Act], None]] = {
    "in a step": call(Muon, "step", 5),
    "in the first step": call(Muon, "step", 1),
    "before gradients meet": call(train_step.F, "cross_entropy", 4),
    "in an evaluation": call(evaluate, "precision", 2),
    "in the middle of a save": event(lambda: kills.at_half("optim.safetensors", "/.step_")),
    "before a save's rename": event(lambda: kills.at_audit("os.rename", "/.step_", "/step_")),
    "while an old checkpoint goes": event(lambda: kills.at_audit("os.remove", "model.safetensors")),
    "while the checkpoint is read": call(train_loop, "fit", 2),
    "while the checkpoint is spread": call(Group, "broadcast", 3),
    "while the processes meet": call(dist, "init_process_group", 1),
    "while the model is written": event(lambda: kills.at_half("model.safetensors", "/.final.")),
    "before the model's rename": event(lambda: kills.at_audit("os.rename", "/.final.")),
}


def to_all_of_torchrun() -> None:
    """SIGTERM as Slurm sends it, to every process of the job; torchrun passes it on as well."""
    for process in (*children(os.getppid()), os.getppid()):
        os.kill(process, signal.SIGTERM)
    time.sleep(1)  # in the middle of the event until it has come


def to_torchrun() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1)


ACTS: dict[str, Act] = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ends torchrun": to_torchrun,
    "ends all": to_all_of_torchrun,
    "waits": lambda: wait_for(lambda: Path(os.environ["SOAK_GO"]).exists(), 60, "nobody said go"),
}


class Told(Quiet):
    """Notes when the first step of a start was done."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        if not self.file.exists():
            self.file.touch()


def program(folder: str, run: str, options: str, plan: str) -> None:
    """One process of torchrun's: what `plan` has for this start, as [["01", "dies", "in a step"], ...], then training."""
    place, start = Path(folder), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ranks, act, what = (*json.loads(plan), *[("", "", "")] * 99)[start]
    if os.environ["RANK"] in ranks:

        def acts() -> None:
            (place / f"befell-{start}").touch()
            ACTS[act]()

        EVENTS[what](acts)
    train_loop.train(
        read_recipe(place / "recipe.toml"), run, device="cpu", watch=Told(place / f"first-{start}"), **json.loads(options)
    )


# --- jobs ------------------------------------------------------------------------------------------------------------


def wait_for(ready: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `ready` gives, once it gives something."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def children(of: int) -> list[int]:
    return [int(x) for task in Path(f"/proc/{of}/task").iterdir() for x in (task / "children").read_text().split()]


def shared_memory() -> set[str]:
    """Names there, but for those that say which living process they are of: others may be at work on this machine."""
    found = {name: re.search(r"\d+", name) for name in os.listdir("/dev/shm")}  # torch_PID_..., sem.loky-PID-...
    others = {name for name, process in found.items() if process and Path(f"/proc/{process[0]}").exists()}
    return set(found) - {name for name in others if str(os.getpid()) not in name}


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process that was started inside is there afterwards, and no shared memory: orphans come to us (see `cases`)."""
    before, names, me = set(children(os.getpid())), shared_memory(), os.getpid()

    def left(number: int = 0) -> bool:
        """Whether a process is; each gets the signal, if there is one, and the dead are buried."""
        found = set(children(me)) - before
        for process in found:
            os.kill(process, number)
            os.waitpid(process, os.WNOHANG)
        return bool(found)

    try:
        yield
        wait_for(lambda: not left(), 15, f"processes were left behind: {children(me)}")
    finally:
        wait_for(lambda: not left(signal.SIGKILL), 15, "processes outlive SIGKILL")  # the next case must not suffer
    assert shared_memory() <= names, f"shared memory was left behind: {shared_memory() - names}"


class Job:
    """torchrun, as the README says it; what it prints goes into a file."""

    def __init__(self, folder: Path, *words: Any, world: int = 2, restarts: int = 0, more: tuple[str, ...] = ()) -> None:
        self.file = folder / f"said-{time.monotonic_ns()}"
        head = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--max-restarts={restarts}", *more]
        with self.file.open("w") as said:
            command = [sys.executable, *head, "--monitor-interval=0.1", "-m", *map(str, words)]
            environment = os.environ | {"PYTHONPATH": str(ROOT), "SOAK_GO": str(folder / "go"), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)

    def end(self, seconds: float = 100.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun did not end in {seconds} s: {self.said[-300:]}") from None

    @property
    def said(self) -> str:
        return self.file.read_text(errors="replace")


def planned(folder: Path, recipe: Recipe, plan: list[list[str]], run: str = "run", **options: Any) -> Job:
    """torchrun with `program`. It may start the group again once for each kill, and no more."""
    (folder / "recipe.toml").write_text(recipe.to_toml())
    train_options = json.dumps(options.pop("options", {}))
    options.setdefault("restarts", len(plan))
    return Job(folder, "soak.areas.distributed", folder, folder / run, train_options, json.dumps(plan), **options)


def forked(work: Callable[[int], Any], world: int, notes: Path) -> tuple[list[int], list[str]]:
    """A group forked from this process, which is warm: a second where torchrun takes ten. Exit codes, and what each said."""
    files = [notes.with_name(f"{notes.name}-said-{number}") for number in range(world)]

    def rank(number: int) -> None:
        os.dup2(os.open(files[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        work(number)

    return group(rank, world), [file.read_text(errors="replace") for file in files]


def trained(recipe: Recipe, run: Path, world: int) -> None:
    codes, said = forked(lambda number: train_loop.train(recipe, run, device="cpu"), world, run)
    assert codes == [0] * world, f"a run of {world} processes failed: {said[0][-300:]}"


def ends(run: Path) -> dict[str, str]:
    """sha256 of what a run came to."""
    return digests(run, f"checkpoints/{max(os.listdir(run / 'checkpoints'))}")


class Runs:
    """Recipes on one folder of images, and undisturbed runs of them, each made when it is first asked for."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.data, self.whole, self.alone, self.one = map(cache, (self._data, self._whole, self._alone, self._one))

    def _data(self) -> Path:
        """Also one run in this process: what is imported on first use need not be by every child."""
        data = pictures(self.place / "data")
        train_loop.train(on_pictures(data, *EVERYTHING), self.place / "warm", device="cpu")
        return data

    def recipe(self, *more: str) -> Recipe:
        return on_pictures(self.data(), *EVERYTHING, *more)

    def _whole(self, world: int, *more: str) -> dict[str, str]:
        run = self.place / "-".join(("whole", str(world), *more))
        trained(self.recipe(*more), run, world)
        return ends(run)

    def _alone(self, path: str) -> tuple[Path, Shown]:
        run = self.place / f"alone-{path}"
        return run, shown(on_pictures(self.data(), *SAME, PATHS[path][0]), run, 1)

    def _one(self, name: str, dtype: str) -> tuple[Path, Any]:
        run = self.place / f"one-{name}-{dtype}"
        return run, told(train_loop.train(tiny(*TWENTY, *AS_ONE[name][0]), run, device="cpu", dtype=getattr(torch, dtype)))


# --- 1. kills --------------------------------------------------------------------------------------------------------

READ = ("data.path=workers", "data.scan=none", "augment.flip=0.5", "augment.resized_crop=0.35")  # by worker processes
KILLS: list[tuple[int, tuple[str, ...], list[str]]] = [  # processes, changes to the recipe, what befalls whom in each start
    (2, (), ["0 in a step", "1 in a step", "01 in a step"]),
    (2, (), ["1 before gradients meet", "01 in the first step", "0 before gradients meet"]),
    (2, (), ["0 in a step", "0 while the checkpoint is read", "0 in the middle of a save", "0 before a save's rename"]),
    (2, (), ["0 in an evaluation", "1 in an evaluation", "01 in an evaluation"]),
    (2, (), ["1 in a step", "1 while the checkpoint is spread", "1 while the processes meet"]),
    (2, (), ["0 while the processes meet", "0 while an old checkpoint goes", "0 while the model is written"]),
    (2, READ, ["1 in a step", "01 in a step"]),
    (4, (), ["3 in a step", "0123 in an evaluation"]),
]


def recovered(folder: Path, count: int) -> float:
    """The longest time from a kill to the first step of the start after it, where that start came to one."""
    befell, first = (
        {int(file.name.rpartition("-")[2]): file.stat().st_mtime for file in folder.glob(f"{name}-*")}
        for name in ("befell", "first")
    )
    assert sorted(befell) == list(range(count)), f"killed in starts {sorted(befell)}, not in each of {count}"
    took = [first[start + 1] - befell[start] for start in befell if start + 1 in first]
    assert took and max(took) <= RECOVERED, f"a step came {took} s after a kill"
    return round(max(took), 2)


def killed(runs: Runs, world: int, more: tuple[str, ...], what: list[str], folder: Path) -> dict[str, Any]:
    plan = [[ranks, "dies", words] for ranks, _, words in (each.partition(" ") for each in what)]
    with nothing_left():
        options = {"workers": 2} if more else {}
        job = planned(folder, runs.recipe(*more), plan, world=world, options=options)
        assert job.end() == 0, job.said[-600:]
    assert ends(folder / "run") == runs.whole(world, *more), "other bits than without kills"
    return {"kills": sum(len(ranks) for ranks, *_ in plan), "recovered_s": recovered(folder, len(plan))}


LONG = ("schedule.epochs=25", "run.save_every=10", "run.eval_every=5")  # 150 steps: time to be killed from outside
OUTSIDE = ((15, (0,)), (50, (1,)), (90, (0, 1)))  # after which step of the journal, which processes


def steps(run: Path) -> list[tuple[int, float]]:
    """(step, when it was done) of each line of a journal."""
    file = run / train_loop.journal.NAME
    events = list(train_loop.journal.read(file)) if file.exists() else []
    return [(event["step"], event["time"]) for event in events if event["event"] == "step"]


def killed_outside(runs: Runs, folder: Path) -> dict[str, Any]:
    """`dmst train` itself, as a person types it."""
    run, recipe, took = folder / "run", folder / "recipe.toml", []
    recipe.write_text(runs.recipe(*LONG).to_toml())

    def reached(step: int) -> bool:
        return any(done >= step for done, _ in steps(run))

    def after(died: float) -> float:
        return next((when for _, when in steps(run) if when > died), 0.0)

    with nothing_left():
        job = Job(folder, "dmst", "train", recipe, "--out", run, "--device", "cpu", "--no-report", restarts=len(OUTSIDE))
        for step, ranks in OUTSIDE:
            wait_for(partial(reached, step), 60, f"step {step} never came: {job.said[-300:]}")
            found = {rank_of(process): process for process in children(job.process.pid)}
            for rank in ranks:
                os.kill(found[rank], signal.SIGKILL)
            died = time.time()
            took.append(wait_for(partial(after, died), RECOVERED, f"no step {RECOVERED} s after a kill") - died)
        assert job.end() == 0, job.said[-600:]
    assert ends(run) == runs.whole(2, *LONG), "other bits than without kills"
    return {"kills": sum(len(ranks) for _, ranks in OUTSIDE), "recovered_s": round(max(took), 2)}


def rank_of(process: int) -> int:
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), -1)


# --- 2. errors and hangs ---------------------------------------------------------------------------------------------


def raises(error: Exception) -> Act:
    def act() -> None:
        raise error

    return act


def in_a_worker() -> None:
    if get_worker_info() is not None:
        kills.die()


def moved_weights() -> None:
    real = train_step.TrainStep.step

    def step_(self: train_step.TrainStep, step: int, *args: Any) -> Any:
        found = real(self, step, *args)
        with torch.no_grad():
            self.model.head.bias += 1e-6 * (step == 4)
        return found

    train_step.TrainStep.step = step_  # type: ignore[method-assign]


def spoiled(step: int) -> None:
    """NaN in the images of one step."""
    real = train_step.TrainStep._gradients

    def gradients(self: train_step.TrainStep, now: int, batches: Any) -> None:
        real(self, now, (x._replace(images=x.images * math.nan) for x in batches) if now == step else batches)

    train_step.TrainStep._gradients = gradients  # type: ignore[method-assign]


def other_images() -> None:
    prepare.Sets.fingerprint = property(lambda self: "0" * 64)  # type: ignore[assignment, method-assign]


def no_room(*parts: str) -> Act:
    return lambda: kills.fails(pytest.MonkeyPatch(), errno.ENOSPC, lambda path: all(part in str(path) for part in parts))


LOST, BROKEN = "lost another one", RuntimeError("broken here")
ANY, MAIN = ((2, 0), (2, 1), (4, 3)), ((2, 0), (4, 0))  # processes, which of them
FAILURES: dict[str, tuple[Any, Act, str, str]] = {  # where, what, what it says, what the others say
    "an error in a step": (ANY, lambda: kills.at_call(train_step.F, "cross_entropy", 5, raises(BROKEN)), "broken here", LOST),
    "no memory in a step": (
        ANY,
        lambda: kills.at_call(train_step.F, "cross_entropy", 5, raises(torch.OutOfMemoryError("no memory"))),
        "step 4 does not fit on cpu",
        LOST,
    ),
    "an error in the optimizer": (ANY, lambda: EVENTS["in a step"](raises(BROKEN)), "broken here", LOST),
    "an error in an evaluation": (ANY, lambda: EVENTS["in an evaluation"](raises(BROKEN)), "broken here", LOST),
    "an image that cannot be read": (
        ANY,
        lambda: kills.at_call(FileSet, "read", 20, raises(OSError(errno.EIO, "the disk is gone"))),
        "the disk is gone",
        LOST,
    ),
    "a loader's worker is killed": (
        ANY,
        lambda: kills.at_call(FileSet, "read", 12, in_a_worker),
        "a worker process that reads images has died",
        LOST,
    ),
    "NaN in images": (ANY, lambda: spoiled(4), "step 4: ", "step 4: "),
    "weights that differ": (ANY, moved_weights, "have different weights", "have different weights"),
    "images that differ": (ANY, other_images, "find different images", "find different images"),
    "an error while the network is built": (
        ANY,
        lambda: kills.at_call(prepare, "build_model", 1, raises(BROKEN)),
        "broken here",
        "building the network failed in another process",
    ),
    "death in a step": (ANY, lambda: EVENTS["in a step"](ACTS["dies"]), "", LOST),
    "death in an evaluation": (ANY, lambda: EVENTS["in an evaluation"](ACTS["dies"]), "", LOST),
    "death in a save": (MAIN, lambda: EVENTS["in the middle of a save"](ACTS["dies"]), "", LOST),
    "no room for a checkpoint": (
        MAIN,
        no_room(".step_00000006.", "ema"),
        "step_00000006 could not be written (No space left on device)",
        "saving failed in another process",
    ),
    "no room for the model": (
        MAIN,
        no_room("/.final."),
        "final could not be written (No space left on device)",
        "saving the model failed in another process",
    ),
    "no room for the journal": (MAIN, no_room("journal"), "journal.jsonl could not be written", LOST),
}


def failed(runs: Runs, kind: str, world: int, which: int, folder: Path) -> dict[str, Any]:
    """It ends on every process, and each says what it was or that another one failed; then the same goes on, mended."""
    _, arm, mine, theirs = FAILURES[kind]
    more = ("run.accumulate=1", "data.scan=none")  # micro-batches even for four; images are first read in training
    recipe, options = runs.recipe(*more), {"workers": 2} if "worker" in kind else {}

    def rank(number: int) -> None:
        if number == which:
            arm()
        train_loop.train(recipe, folder / "run", device="cpu", **options)

    began = time.monotonic()
    with nothing_left():
        codes, said = forked(rank, world, folder / "rank")
    took = time.monotonic() - began
    assert took <= ENDED, f"it took {took:.0f} s"
    for number, code in enumerate(codes):
        words = mine if number == which else theirs
        assert code == (1 if words else -signal.SIGKILL), f"process {number} ended with {code}"
        assert words in said[number], f"process {number} did not say {words!r}: {said[number][-200:]}"
    trained(recipe, folder / "run", world)
    assert ends(folder / "run") == runs.whole(world, *more), "other bits than without the failure"
    return {"ended_s": round(took, 2)}


HANGS: list[tuple[str, int, tuple[str, ...]]] = [  # who and where, restarts, options of torchrun
    ("1 in a step", 0, ()),  # which waits 30 s after a SIGTERM
    ("0 in an evaluation", 0, ("--shutdown-timeout=3",)),
    ("1 before gradients meet", 1, ("--shutdown-timeout=3",)),
]


def hung(runs: Runs, what: str, restarts: int, more: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """SIGSTOP. The others give up after `timeout`; torchrun then ends what is left, and starts all again if it may."""
    ranks, _, words = what.partition(" ")
    with nothing_left():
        job = planned(folder, runs.recipe(), [[ranks, "hangs", words]], restarts=restarts, options={"timeout": 4}, more=more)
        code = job.end()
    took = time.time() - (folder / "befell-0").stat().st_mtime
    assert took <= ENDED and code == (0 if restarts else 1), f"it ended with {code} after {took:.0f} s: {job.said[-300:]}"
    assert "did not answer for 4 seconds" in job.said, job.said[-600:]
    if not restarts:
        trained(runs.recipe(), folder / "run", 2)
    assert ends(folder / "run") == runs.whole(2), "other bits than without the hang"
    return {"ended_s": round(took, 2)}


# --- 3. as one -------------------------------------------------------------------------------------------------------

TWENTY = ("data.limit=96", "run.batch_size=48", "schedule.epochs=10", "optim.opt=adamw", "run.eval_batch_size=50")
TWENTY += ("run.eval_every=5",)
AS_ONE: dict[str, tuple[list[str], list[str]]] = {  # changes to the recipe; with several processes also
    "batch norms": ([], []),
    "micro-steps": (["model.options.stem=patch"], ["run.accumulate=2"]),
    "a running mean": (["model.options.stem=patch", "optim.model_ema=0.9"], []),
    "the plain operator": (["model.options.operator=mhsa"], []),
}
BARS = {"float32": 1e-6, "float64": 1e-14}


def apart(run: Path, other: Path) -> float:
    """How far two finished networks are apart, relative to the first."""
    a, b = (load_file(each / "final/model.safetensors") for each in (run, other))
    assert a.keys() == b.keys()
    pairs = [(a[key].double(), b[key].double()) for key in a]
    return math.sqrt(sum(float((x - y).square().sum()) for x, y in pairs) / sum(float(x.square().sum()) for x, _ in pairs))


def scored(recipe: Recipe, run: Path, world: int, dtype: str) -> list[Any]:
    """Train; returns what each process has in the end: counts, and a hash of the weights."""
    files = [run.with_name(f"{run.name}-{number}.json") for number in range(world)]

    def rank(number: int) -> None:
        found = train_loop.train(recipe, run, device="cpu", dtype=getattr(torch, dtype))
        files[number].write_text(json.dumps(told(found)))

    codes, said = forked(rank, world, run)
    assert codes == [0] * world, f"a run of {world} processes failed: {said[0][-300:]}"
    return [json.loads(file.read_text()) for file in files]


def as_one(runs: Runs, name: str, world: int, dtype: str, folder: Path) -> dict[str, Any]:
    both, more = AS_ONE[name]
    run, one = runs.one(name, dtype)
    several = scored(tiny(*TWENTY, *both, *more), folder / "run", world, dtype)
    assert all(each == several[0] for each in several), "the processes differ"
    assert several[0]["counts"] == json.loads(json.dumps(one["counts"])) and one["counts"][0] == 359, "they count differently"
    error = apart(run, folder / "run")
    assert 0 < error <= BARS[dtype], f"the weights are {error:.1e} apart"
    return {"error": error}


# --- 4. another number of processes ----------------------------------------------------------------------------------

CHANGES = ((2, 1), (1, 2), (2, 4), (4, 2), (1, 3), (3, 1), (1, 2, 4, 3, 1))
SAME = ("model.options.mode=proximal", "optim.model_ema=0.9", "run.save_every=3", "run.batch_size=24", "schedule.epochs=3")
SAME += ("optim.opt=adamw", "augment.flip=0.5", "augment.resized_crop=0.35", "augment.cutmix=1.0", "augment.reprob=0.3")
PATHS: dict[str, tuple[str, list[tuple[int, ...]]]] = {  # after which steps it is cut off; checkpoints are of every third
    "on the device": ("data.path=resident", [(4,), (7,), (11,)]),
    "in the loader": ("data.path=workers", [(7,)]),
}
Shown = dict[int, list[list[Any]]]  # by step, of each sample of the global batch: its image, and a hash of what became of it


def shown(recipe: Recipe, run: Path, world: int, cut: int = 99) -> Shown:
    """Train until a step after which the main process fails, and so the others; returns what the network was shown."""
    files = [run.with_name(f"{run.name}-{number}.json") for number in range(world)]

    def rank(number: int) -> None:
        real, found = train_step.TrainStep._add, []

        def add(self: train_step.TrainStep, batch: Any) -> None:
            parts = zip(batch.images, batch.targets, strict=True)
            hashes = [hashlib.sha256(b"".join(x.numpy().tobytes() for x in sample)).hexdigest()[:16] for sample in parts]
            found.append(list(zip(batch.index.tolist(), hashes, strict=True)))
            files[number].write_text(json.dumps(found))
            real(self, batch)

        train_step.TrainStep._add = add  # type: ignore[method-assign]
        train_loop.train(recipe, run, device="cpu", watch=CutAfter(cut))

    newest = RunFolder(run).newest()
    codes, said = forked(rank, world, run)
    assert codes == [int(cut < 99)] * world, f"{world} processes ended with {codes}: {said[0][-300:]}"
    parts = [json.loads(file.read_text()) for file in files]
    first, done = newest.step if newest else 0, min(map(len, parts))  # others may have begun a step more
    return {first + i: [sample for part in parts for sample in part[i]] for i in range(done)}


def another_number(runs: Runs, path: str, worlds: tuple[int, ...], cuts: tuple[int, ...], folder: Path) -> dict[str, Any]:
    whole, wanted = runs.alone(path)
    recipe, seen = on_pictures(runs.data(), *SAME, PATHS[path][0]), set()
    for world, cut in zip(worlds, (*cuts, 99), strict=True):
        for step, samples in shown(recipe, folder / "run", world, cut).items():
            assert samples == wanted[step], f"step {step} with {world} processes shows other images"
            seen.add(step)
    assert seen == set(wanted) == set(range(12)), f"steps {sorted(seen)} were shown"
    error = apart(whole, folder / "run")
    assert error <= 1e-6, f"the weights are {error:.1e} apart"
    return {"error": error}


# --- 5. two jobs -----------------------------------------------------------------------------------------------------


def beside(runs: Runs, command: bool, folder: Path) -> None:
    """Two at once, each in its own folder, by torchrun's own choice of a port."""
    (folder / "recipe.toml").write_text(runs.recipe().to_toml())
    with nothing_left():
        jobs = []
        for name in "ab":
            words = ["dmst", "train", folder / "recipe.toml", "--out", folder / name, "--device", "cpu", "--no-report"]
            (folder / f"told-{name}").mkdir()
            jobs.append(Job(folder, *words) if command else planned(folder / f"told-{name}", runs.recipe(), [], f"../{name}"))
        for job in jobs:
            assert job.end() == 0, job.said[-600:]
    for name in "ab":
        assert ends(folder / name) == runs.whole(2), f"job {name} ends in other bits"


def refused(runs: Runs, by_torchrun: bool, what: str, folder: Path) -> None:
    """The second job in a folder, while the first waits in the middle of something."""
    recipe, second = runs.recipe(), folder / "second"
    second.mkdir()
    with nothing_left():
        first = planned(folder, recipe, [["0", "waits", what]], restarts=0)
        wait_for((folder / "befell-0").exists, 60, "the first job never came so far")
        if by_torchrun:
            job = planned(second, recipe, [], "../run")
            codes, said = [job.end()], job.said
        else:
            codes, each = forked(lambda number: train_loop.train(recipe, folder / "run", device="cpu"), 2, second / "rank")
            said = "".join(each)
        (folder / "go").touch()
        assert first.end() == 0, first.said[-600:]
    assert all(code == 1 for code in codes), f"the second job ended with {codes}"
    for words in ("run is in use by another run", "opening the folder failed in another process"):
        assert words in said, f"nobody said {words!r}: {said[-300:]}"
    assert ends(folder / "run") == runs.whole(2), "the first job was harmed"


# --- 6. SIGTERM ------------------------------------------------------------------------------------------------------

STOPS = (("0", "in a step", 5), ("1", "in an evaluation", 6), ("0", "before a save's rename", 3))  # and where it ends


def stopped(runs: Runs, act: str, what: str, rank: str, step: int, folder: Path) -> dict[str, Any]:
    with nothing_left():
        job = planned(folder, runs.recipe(), [[rank, act, what]], restarts=3)
        code = job.end()
    took = time.time() - (folder / "befell-0").stat().st_mtime
    newest = RunFolder(folder / "run").newest()
    assert code and not (folder / "first-1").exists(), f"torchrun ended with {code}"
    assert newest is not None and newest.step == step, f"{newest and newest.step} is saved, not {step}: {job.said[-300:]}"
    assert f"Stopped after step {step} of 12, which is saved" in job.said, job.said[-300:]
    assert took <= 15, f"it took {took:.0f} s"
    trained(runs.recipe(), folder / "run", 2)
    assert ends(folder / "run") == runs.whole(2), "other bits than without the signal"
    return {"ended_s": round(took, 2)}


# --- all of it -------------------------------------------------------------------------------------------------------


def cases(place: Path) -> Iterator[Case]:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what torchrun leaves behind becomes our child
    os.fsync = lambda _: None  # type: ignore[assignment]  # in what is forked: it counts in a power cut, and waits for the disk
    runs = Runs(place)

    row = "a process is killed, and torchrun starts the group again"
    for world, more, what in KILLS:
        name = f"{world} processes{', workers' * bool(more)}: {', '.join(what)}"
        yield Case(row, name, partial(killed, runs, world, more, what), 150)
    yield Case(row, "dmst train, from outside", partial(killed_outside, runs), 200)

    row = "something fails on one process, and the job ends on all"
    for kind, (where, *_) in FAILURES.items():
        for world, which in where:
            yield Case(row, f"{kind}, process {which} of {world}", partial(failed, runs, kind, world, which), 120)
    row = "a process hangs, and the job ends"
    for what, restarts, options in HANGS:
        yield Case(row, f"{what}, {restarts} restarts", partial(hung, runs, what, restarts, options), 150)

    row = "3 and 4 processes train as one"
    for name in AS_ONE:
        for world in (3, 4):
            for dtype in BARS:
                yield Case(row, f"{name}, {world} processes, {dtype}", partial(as_one, runs, name, world, dtype))

    row = "a run goes on with another number of processes"
    for path, (_, cuts) in PATHS.items():
        for worlds in CHANGES:
            for cut in cuts if len(worlds) == 2 else [(2, 5, 8, 10)]:
                name = f"{path}: {' -> '.join(map(str, worlds))} after step {', '.join(map(str, cut))}"
                yield Case(row, name, partial(another_number, runs, path, worlds, cut))

    row = "two jobs at once on one machine"
    for command in (True, False):
        yield Case(row, "dmst train" if command else "a program", partial(beside, runs, command))
    row = "a second job in the folder of another is refused"
    for what in ("in a step", "in an evaluation", "before a save's rename", "before the model's rename"):
        for by_torchrun in (True, False) if what == "in a step" else (False,):
            name = f"{what}, {'torchrun' if by_torchrun else 'forked'}"
            yield Case(row, name, partial(refused, runs, by_torchrun, what))

    row = "SIGTERM to torchrun: the run saves, and goes on"
    for act, to in (("ends torchrun", "to torchrun"), ("ends all", "to all, as Slurm does")):
        for rank, what, step in STOPS:
            yield Case(row, f"{to}, {rank} {what}", partial(stopped, runs, act, what, rank, step), 90)


if __name__ == "__main__":
    torch.set_num_threads(1)
    program(*sys.argv[1:])
