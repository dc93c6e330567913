"""The install is what was reviewed: no call that runs foreign code, seven dependencies, builds that repeat, a bare environment.

The package is built twice from what git tracks, in two places; the wheel is installed, with nothing but its own dependencies,
into an environment made for it, and works there: every command, every family of networks, a training run killed and resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from soak.case import Case
from tests import test_supply
from tests.runs import pictures

TITLE = "supply chain"
JOBS = 1  # one environment, made once
REPOSITORY = test_supply.ROOT.parent
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
NEEDS = {  # commands that need an extra, and how they say it
    "demo": ["demo"],
}
SPEAKS = {
    "--version": "dmst ", "--help": "train", "models": "dmst_tiny_patch16_224", "operators": "dmsa", "recipes": "cifar10",
    "train --help": "--out", "evaluate --help": "--data", "data list": "cifar100", "doctor": "No problems found.",
}  # fmt: skip
FAMILIES = ("dmst_tiny", "gmst_tiny", "tost_tiny", "vit_tiny", "crate_tiny", "dmst_cifar", "vit_digits")
OPTIONAL = {
    "dmst.integrations.timm": "timm",
    "dmst.kernels.fused": "triton",
}  # rooms that may need an extra


def cases(place: Path) -> Iterator[Case]:
    for path in sorted(test_supply.ROOT.rglob("*.py")):
        name = str(path.relative_to(REPOSITORY))
        yield Case("calls that run foreign code: none, by syntax tree", name, partial(no_banned_call, path))
    for test in (
        test_supply.test_the_core_needs_seven_packages,
        test_supply.test_floors,
        test_supply.test_what_is_installed_is_what_is_pinned,
    ):
        yield Case("dependencies, floors, pins", test.__name__, lambda _, test=test: test())  # type: ignore[misc]
    for build, python in itertools.product(("cpu", "cuda"), test_supply.PYTHONS):
        name = f"pins for the {build} build of torch, Python {python}"
        check = partial(test_supply.test_the_pins_fit_each_other, build, python)
        yield Case("dependencies, floors, pins", name, lambda _, check=check: check())  # type: ignore[misc]
    building = Lazy(partial(build, place))
    for name, check in BUILDS.items():
        yield Case("wheel and sdist, built twice", name, lambda _, check=check: check(building()), 600)  # type: ignore[misc]
    installed = Lazy(lambda: install(place, building()["one"][0]))
    row = "installed alone into a bare environment"
    for name, alone in ALONE.items():
        yield Case(row, name, lambda folder, alone=alone: alone(installed(), folder), 600)  # type: ignore[misc]
    for words, part in SPEAKS.items():
        yield Case(row, f"dmst {words}", lambda folder, w=words, p=part: speaks(installed(), folder, w, p))  # type: ignore[misc]
    for name, words in NEEDS.items():
        yield Case(row, f"dmst {name} names its extra", lambda f, w=words: asks(installed(), f, w))  # type: ignore[misc]
    for family in FAMILIES:
        yield Case(row, f"{family} computes, saves, loads", lambda f, x=family: computes(installed(), f, x))  # type: ignore[misc]


class Lazy:
    """Made when first asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.made = make, None

    def __call__(self) -> Any:
        self.made = self.make() if self.made is None else self.made
        return self.made


def no_banned_call(path: Path, _: Path) -> None:
    found = test_supply.banned(path.read_text())
    assert not found, f"{path.name}: {found}"


# --- builds ----------------------------------------------------------------------------------------------------------


def build(place: Path) -> dict[str, list[Path]]:
    """{"one", "two": [wheel, sdist] of two places; "again": [wheel] from the first sdist}."""
    found = {}
    for name in ("one", "two"):
        tree = place / f"tree of {name}"
        tracked(tree)
        found[name] = built(tree, place / name)
        time.sleep(1.1)  # so that clocks differ
    with tarfile.open(found["one"][1]) as archive:
        archive.extractall(place / "unpacked", filter="data")
    found["again"] = built(next((place / "unpacked").iterdir()), place / "again", "--wheel")
    return found


def tracked(tree: Path) -> None:
    """What git tracks, as it is now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tree / name)


def built(tree: Path, out: Path, *kind: str) -> list[Path]:
    command = [sys.executable, "-m", "build", "--outdir", str(out), *kind, str(tree)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | pinned())
    return sorted(out.iterdir(), key=lambda path: path.suffix != ".whl")


def pinned() -> dict[str, str]:
    return {"PIP_CONSTRAINT": str(test_supply.CONSTRAINTS), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same(what: int, one: str, two: str, found: dict[str, list[Path]]) -> dict[str, Any]:
    a, b = found[one][what], found[two][what]
    assert a.name == b.name and digest(a) == digest(b), f"{a.name} of {one} and of {two} differ"
    return {"sha256": digest(a)[:16], "bytes": a.stat().st_size}


def wheel_holds_the_package_alone(found: dict[str, list[Path]]) -> None:
    with zipfile.ZipFile(found["one"][0]) as archive:
        names = archive.namelist()
        inside = {name for name in names if name.startswith("dmst/")}
        rest = {name.split("/", 1)[1] for name in names if name not in inside}
        assert rest == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}, rest
        wanted = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("dmst/**/*") if path.is_file()}
        wanted = {name for name in wanted if "__pycache__" not in name}
        assert inside == wanted, inside ^ wanted
        text = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    needed = [line.removeprefix("Requires-Dist: ") for line in text.splitlines() if line.startswith("Requires-Dist")]
    core = test_supply.requirements([line for line in needed if "extra ==" not in line])
    assert set(core) == test_supply.CORE


def sdist_holds_what_is_tracked(found: dict[str, list[Path]]) -> None:
    with tarfile.open(found["one"][1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tree = next(path for path in found["one"][1].parent.parent.iterdir() if path.name == "tree of one")
    wanted = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert wanted <= names, sorted(wanted - names)[:9]
    assert names - wanted <= {"PKG-INFO"}, sorted(names - wanted)[:9]


BUILDS: dict[str, Callable[[dict[str, list[Path]]], dict[str, Any] | None]] = {
    "two wheels are equal": partial(same, 0, "one", "two"),
    "two sdists are equal": partial(same, 1, "one", "two"),
    "the wheel of the sdist is equal": partial(same, 0, "one", "again"),
    "the wheel holds the package alone": wheel_holds_the_package_alone,
    "the sdist holds what is tracked": sdist_holds_what_is_tracked,
}

# --- a bare environment ----------------------------------------------------------------------------------------------


def install(place: Path, wheel: Path) -> Path:
    """The folder of programs of an environment that holds the wheel and what it needs."""
    home = place / "bare"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    command = [str(home / "bin/pip"), "install", "--quiet", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, env=CLEAN | pinned())
    return home / "bin"


def run(programs: Path, folder: Path, *words: str, code: int = 0) -> str:
    """What a program of the environment prints, far from the repository; warnings are errors."""
    command = [str(programs / words[0]), *words[1:]]
    told = subprocess.run(command, cwd=folder, env=CLEAN | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=300)
    assert told.returncode == code, f"{' '.join(words)[:80]}: status {told.returncode}: {(told.stdout + told.stderr)[-300:]}"
    return told.stdout + told.stderr


def speaks(programs: Path, folder: Path, words: str, part: str) -> None:
    told = run(programs, folder, "dmst", *words.split())
    assert part in told and "Traceback" not in told, told[:300]


def asks(programs: Path, folder: Path, words: list[str]) -> None:
    """One line that says what to install."""
    (folder / "rows.json").write_text('{"facts": {}, "rows": []}')
    told = run(programs, folder, "dmst", *words, code=1)
    assert "pip install" in told and "dmst[" in told and "Traceback" not in told, told[:300]


def computes(programs: Path, folder: Path, name: str) -> None:
    told = run(programs, folder, "python", "-W", "error", "-c", COMPUTE, name)
    assert told.split() == ["equal"], told[-300:]


COMPUTE = """
import sys, torch, dmst
model = dmst.create_model(sys.argv[1], num_classes=3).eval()
side, channels = model.config.img_size[0], model.config.in_chans
images = torch.randn(2, channels, side, side)
logits = model(images)
assert torch.equal(model.trace(images).logits, logits) and logits.shape == (2, 3)
dmst.save_model(model, "saved")
print("equal" if torch.equal(dmst.load_model("saved").eval()(images), logits) else "not equal")
"""


def holds_nothing_else(programs: Path, folder: Path) -> dict[str, Any]:
    """Of all that the extras name, nothing; of CUDA, nothing with a CPU torch."""
    listed = json.loads(run(programs, folder, "pip", "list", "--format", "json"))
    names = set(test_supply.requirements([each["name"] for each in listed]))
    assert names >= test_supply.CORE | {"dmst"}
    extra = names & {
        "timm",
        "torchvision",
        "scikit-learn",
        "scipy",
        "matplotlib",
        "triton",
        "starlette",
        "onnx",
        "datasets",
        "pytest",
    }
    assert not extra and not any(name.startswith("nvidia") for name in names), names
    run(programs, folder, "pip", "check")
    return {"packages": len(names)}


def imports_in_silence(programs: Path, folder: Path) -> None:
    assert run(programs, folder, "python", "-W", "error", "-c", "import dmst; dmst.DMSA") == ""


def imports_every_module(programs: Path, folder: Path) -> dict[str, Any]:
    """A module that needs an extra says which; all others need none."""
    told = json.loads(run(programs, folder, "python", "-W", "error", "-c", WALK))
    odd = {name: why for name, why in told.items() if why and not name.startswith(tuple(OPTIONAL))}
    assert not odd, odd
    for name, why in told.items():
        extra = next((extra for room, extra in OPTIONAL.items() if name.startswith(room)), None)
        assert not why or (extra and extra in why), f"{name}: {why}"
    return {"modules": len(told)}


WALK = """
import importlib, json, pkgutil, dmst
found = {}
for each in pkgutil.walk_packages(dmst.__path__, "dmst."):
    if each.name == "dmst.__main__":
        continue
    try:
        importlib.import_module(each.name)
        found[each.name] = ""
    except ImportError as error:
        found[each.name] = str(error)
print(json.dumps(found))
"""


def trains(programs: Path, folder: Path) -> None:
    """By the command: a run, one that is killed and resumed, equal weights, an evaluation, a report."""
    pictures(folder / "data")
    small = [
        "model.options.dim=16",
        "model.options.depth=1",
        "model.options.num_heads=2",
        "schedule.epochs=3",
        "run.batch_size=16",
    ]
    small += ["schedule.warmup_epochs=1", "run.save_every=1", "model.options.patch_size=2", "data.image_size=8"]
    words = ["train", "--data", "data", "--model", "dmst_cifar", "--device", "cpu"]
    words += [word for change in small for word in ("--set", change)]
    run(programs, folder, "dmst", *words, "--out", "whole")
    killed = subprocess.Popen(
        [str(programs / "dmst"), *words, "--out", "cut"], cwd=folder, env=CLEAN, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while not list(folder.glob("cut/checkpoints/step_*3")) and time.monotonic() < until and killed.poll() is None:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    run(programs, folder, "dmst", *words, "--out", "cut")
    assert digest(folder / "cut/final/model.safetensors") == digest(folder / "whole/final/model.safetensors")
    assert (folder / "whole/report.html").stat().st_size > 10_000
    assert "top-1" in run(programs, folder, "dmst", "evaluate", "whole", "--data", "data", "--device", "cpu")


ALONE: dict[str, Callable[[Path, Path], dict[str, Any] | None]] = {
    "nothing else is installed": holds_nothing_else,
    "import is silent": imports_in_silence,
    "every module can be imported, or names its extra": imports_every_module,
    "dmst train, killed, resumed, evaluated": trains,
}
