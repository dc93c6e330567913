"""Two processes train as one does; one that dies takes the other along, and torchrun starts both again to the same bits.

This file is also the program of the tests: a process that has torch loaded and has done one run, which forks those of a group.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dmst.engine import prepare, train_loop, train_step
from dmst.engine.recipe import Recipe
from dmst.models.files import to_bytes
from tests.runs import EVERYTHING, CutAfter, digests, on_pictures, pictures, tiny

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
TWENTY = ["data.limit=80", "schedule.epochs=4", "optim.opt=adamw", "run.eval_batch_size=50"]  # 359 test images: uneven
TWO: dict[str, tuple[list[str], list[str], torch.dtype]] = {  # changes to the recipe; with two processes also; dtype
    "batch norm, float32": ([], [], torch.float32),
    "micro-steps, float64": (["model.options.stem=patch"], ["run.accumulate=2"], torch.float64),
}

# --- the program -----------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def group(work: Callable[[int], Any], world: int = 2) -> list[int]:
    """Do `work(rank)` in processes that know of each other, as torchrun's do; returns their exit codes."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.environ |= shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def told(result: train_loop.Result) -> dict[str, Any]:
    score = result.score
    return {
        "counts": [*score[:3], *score.by_class],
        "loss": score.loss,
        "digest": hashlib.sha256(to_bytes(result.model.state_dict())).hexdigest(),
    }


def as_one(place: Path) -> None:
    """Each case with one process and with two: how far the weights are apart, relative to them."""
    for name, (changes, more, dtype) in TWO.items():
        alone, both = tiny(*TWENTY, *changes), tiny(*TWENTY, *changes, *more)
        one = train_loop.train(alone, place / name / "one", device="cpu", dtype=dtype)

        def rank(number: int, both: Recipe = both, where: Path = place / name, dtype: torch.dtype = dtype) -> None:
            found = train_loop.train(both, where / "two", device="cpu", dtype=dtype)
            (where / f"{number}.json").write_text(json.dumps(told(found)))

        codes = group(rank)
        mine, theirs = (load_file(place / name / each / "final/model.safetensors") for each in ("one", "two"))
        start = prepare.build_model(alone, "0123456789").state_dict()
        apart, moved, size = (
            math.sqrt(sum((x.double() - other.get(key, 0)).square().sum() for key, x in mine.items()))
            for other in (theirs, start, {})
        )
        ranks = [json.loads((place / name / f"{i}.json").read_text()) for i in range(2)]
        found = {"name": name, "codes": codes, "one": told(one), "two": ranks, "apart": apart / size, "moved": moved / size}
        print(json.dumps(found), flush=True)


def failures(place: Path) -> None:
    """What goes wrong on one process, in mid-step: how it ends on each, and when."""
    recipe = on_pictures(pictures(place / "data"), *EVERYTHING, "run.accumulate=1")

    def fails(kind: str, number: int, where: Path) -> None:
        calls, real = [0], train_step.F.cross_entropy

        def broken(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if number == 1 and calls[0] == 5:
                if kind == "death":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("broken")
            return real(*args, **options)

        if kind == "scan":  # the main process takes longer than processes wait in a step; the other one fails
            real_open = prepare.open_sets

            def slow(*args: Any, look: bool, **options: Any) -> Any:
                if look:
                    threading.Event().wait(2.5)
                return real_open(*args, look=look, **options)

            prepare.open_sets = slow  # type: ignore[assignment]
            train_loop.train(recipe, where, device="cpu", timeout=1.0)
        elif kind == "weights":  # of one process, changed behind its back
            real_step = train_step.TrainStep.step

            def step_(self: train_step.TrainStep, step: int, *args: Any) -> Any:
                found = real_step(self, step, *args)
                with torch.no_grad():
                    self.model.head.bias += 1e-3 * number * (step == 1)
                return found

            train_step.TrainStep.step = step_  # type: ignore[method-assign]
            train_loop.train(recipe, where, device="cpu")
        else:
            train_step.F.cross_entropy = broken
            train_loop.train(recipe, where, device="cpu")

    train_loop.train(recipe, place / "alone", device="cpu")  # what is imported on first use is imported now
    for kind in ("error", "death", "scan", "weights"):
        began = time.monotonic()
        codes = group(lambda number, kind=kind: fails(kind, number, place / kind))  # type: ignore[misc]
        steps = train_loop.RunFolder(place / kind).steps()
        print(json.dumps({"kind": kind, "codes": codes, "seconds": time.monotonic() - began, "steps": steps}), flush=True)


def cut_off(place: Path) -> None:
    """Three processes: a run that is cut off after its fifth step, and goes on."""
    recipe = on_pictures(pictures(place / "data"), *EVERYTHING, "run.batch_size=24", "run.accumulate=1")

    def run(name: str, step: int) -> list[int]:
        return group(lambda number: train_loop.train(recipe, place / name, device="cpu", watch=CutAfter(step)), 3)

    codes = [run("whole", 99), run("cut", 5), run("cut", 99)]
    last = "checkpoints/step_00000008"
    same = digests(place / "whole", last) == digests(place / "cut", last)
    print(json.dumps({"codes": [sorted(set(each)) for each in codes], "same": same}), flush=True)


def lines(*arguments: str) -> list[Any]:
    """What this file as a program prints."""
    command = [sys.executable, "-m", "tests.engine.test_distributed", *arguments]
    program = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert program.returncode == 0, program.stderr
    return [json.loads(line) for line in program.stdout.splitlines() if line.startswith("{")]


# --- the tests -------------------------------------------------------------------------------------------------------


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    found = lines("as_one", str(tmp_path))
    assert [each["name"] for each in found] == list(TWO)
    for each in found:
        (first, second), one = each["two"], each["one"]
        assert each["codes"] == [0, 0] and first == second, each
        assert first["counts"] == one["counts"] and one["counts"][0] == 359, each
        assert math.isclose(first["loss"], one["loss"], rel_tol=1e-5), each
        assert 0 < each["apart"] <= (1e-6 if "32" in each["name"] else 1e-14) and each["moved"] > 0.05, each


def test_what_fails_on_one_process_ends_all(tmp_path: Path) -> None:
    """At once, though they would wait a minute for each other; and nothing is saved that not all have."""
    found = lines("failures", str(tmp_path))
    wanted = {
        "error": ([1, 1], [3]),
        "death": ([1, -9], [3]),
        "scan": ([0, 0], [9, 12]),
        "weights": ([1, 1], []),
    }
    assert {each["kind"]: (each["codes"], each["steps"]) for each in found} == wanted
    assert all(each["seconds"] < 30 for each in found), found


def test_three_processes_go_on_to_the_same_bits(tmp_path: Path) -> None:
    """Sums of three depend on their order, which must not depend on how many steps a process has done."""
    assert lines("cut_off", str(tmp_path)) == [{"codes": [[0], [1], [0]], "same": True}]


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from dmst.engine.console import Lines
from dmst.engine.optim import Muon
from dmst.engine.recipe import read_recipe
from dmst.engine.train_loop import train

torch.set_num_threads(1)
place, first = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
recipe = read_recipe(place / "recipe.toml")
train(recipe, place / "whole", device="cpu")
real, steps = Muon.step, [0]

def step(self):
    steps[0] += 1
    if os.environ["RANK"] == "1" and steps[0] == (8 if first else 1):
        (place / ("died" if first else "again")).write_text(str(time.time()))
        if first:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(self)

Muon.step = step
train(recipe, place / "killed", device="cpu", watch=Lines())
"""


def test_torchrun_starts_a_group_again_and_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    """One run, whole; then another, of which a process is killed in its eighth step. torchrun starts both processes again."""
    recipe = on_pictures(pictures(tmp_path / "data", tests=5), *EVERYTHING)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "script.py"), str(tmp_path)]
    program = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=110, check=False
    )
    assert program.returncode == 0, program.stderr
    assert program.stdout.count(f"The run in {tmp_path / 'killed'} is going on from step 6.") == 1
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    died, again = (float((tmp_path / name).read_text()) for name in ("died", "again"))
    assert again - died <= 20 and program.stderr.count("closing signal") == 1  # one restart of three


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda _: None
    globals()[sys.argv[1]](Path(sys.argv[2]))
