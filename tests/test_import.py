"""`import dmst`: quick, silent, and free of what a library user did not ask for. The command and `python -m dmst` are one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dmst
from tests import forked

HEAVY = ["typer", "rich", "timm", "torchvision", "sklearn", "scipy", "starlette", "triton", "onnx", "jaxtyping", "PIL"]


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100, check=True)


@pytest.mark.process
def test_import_is_silent_quick_and_light() -> None:
    code = f"""
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import dmst
from tests import forked
import dmst.operators
seconds = time.perf_counter() - start
import json
print(json.dumps({{"seconds": seconds, "heavy": [m for m in {HEAVY} if m in set(sys.modules) - before],
                  "device": torch.cuda.is_initialized(), "dir": dir(dmst)}}))
"""
    run = python(code)
    told = json.loads(run.stdout)
    assert run.stderr == ""
    assert told["seconds"] < 2
    assert told["heavy"] == []
    assert told["device"] is False
    assert "DMSA" in told["dir"]


def test_the_bare_import_does_not_even_load_torch() -> None:
    run = python("import sys, dmst; print('torch' in sys.modules, dmst.__version__)")
    assert run.stdout.split() == ["False", dmst.__version__]


def test_every_public_name_resolves() -> None:
    for name in dmst.__all__:
        assert getattr(dmst, name) is not None
    assert (Path(dmst.__file__).parent / "py.typed").exists()


@pytest.mark.process
def test_module_and_script_are_the_same_command() -> None:
    script = Path(sys.executable).parent / "dmst"
    commands = [[sys.executable, "-m", "dmst"]] + ([[str(script)]] if script.exists() else [])
    outputs = [
        subprocess.run([*c, "--version"], capture_output=True, text=True, timeout=100, check=True).stdout for c in commands
    ]
    assert len(set(outputs)) == 1
    assert outputs[0].startswith(f"dmst {dmst.__version__}  torch ")


WITHOUT_FCNTL = """
import importlib, json, pkgutil, sys
sys.modules["fcntl"] = None  # as on Windows
import dmst
from tests import forked
from dmst.cli import main

elsewhere = ("dmst.__main__", "dmst.integrations.", "dmst.kernels.")  # the command itself; what needs other libraries
for module in pkgutil.walk_packages(dmst.__path__, "dmst."):
    if not module.name.startswith(elsewhere):
        importlib.import_module(module.name)
photo, out = sys.argv[1:]
for arguments in ["--help"], ["models", "dmst_digits"], ["classify", photo, "--json"], ["train", "digits", "--out", out]:
    sys.argv = ["dmst", *arguments]
    try:
        main()
    except SystemExit as done:
        print(json.dumps([arguments[0], done.code or 0]))
"""


@pytest.mark.process
def test_without_fcntl_all_but_training_works(tmp_path: Path) -> None:
    """Windows has none. The one line is told before anything is made."""
    photo = Path(dmst.__file__).parent / "photos/cat.jpg"
    done = forked.python("-c", WITHOUT_FCNTL, str(photo), str(tmp_path / "run"), root=tmp_path)
    assert done.returncode == 0, done.stderr
    statuses = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert statuses == [["--help", 0], ["models", 0], ["classify", 0], ["train", 1]]
    assert done.stderr == "training needs a POSIX system: a run's folder is locked with flock. Use Linux, macOS or WSL.\n"
    assert not list(tmp_path.iterdir())
