"""Operators from outside the package, as their authors use them: the tutorial's, by `--import` and as an installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dmst
from dmst import cli
from dmst.engine.recipe import read_recipe
from dmst.errors import OptionError
from dmst.operators import MHSA, OPERATORS
from tests import forked
from tests.test_docs import ROOT, blocks

(OWN,) = (code for code in blocks(ROOT / "docs/tutorial.md", "python") if "class MeanPull" in code)
BARE = OWN.replace("def subspaces(", "def bases(").replace("self.subspaces()", "self.bases()")


def command(*arguments: str, folder: Path) -> forked.Done:
    return forked.python("-m", "dmst", *arguments, root=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mean_pull.py").write_text(OWN)
    return tmp_path


# --- dmst --import ---------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_commands_of_the_tutorial_run(folder: Path) -> None:
    """Listed, trained and certified; without --import the same run says what is missing."""
    lines = [line.removeprefix("$ ") for block in blocks(ROOT / "docs/tutorial.md", "console") for line in block.splitlines()]
    listed, trained, certified = (line.split() for line in lines if line.startswith("dmst --import mean_pull.py"))
    run = command(*listed[1:], folder=folder)
    assert run.returncode == 0, run.stderr
    assert "mean_pull" in run.stdout and "pull=0.5" in run.stdout
    quick = ["--set", "data.limit=64", "--set", "schedule.epochs=2", "--no-report"]
    run = command(*trained[1:], *quick, folder=folder)
    assert run.returncode == 0, run.stderr
    run = command(*certified[1:], "--limit", "20", folder=folder)
    assert run.returncode == 0, run.stderr
    assert "Heads that raise the rate" in run.stdout
    run = command("evaluate", "runs/pull", "--data", "digits", folder=folder)
    assert run.returncode == 1
    assert run.stderr.startswith("runs/pull/final/config.json: the model was saved with operator 'mean_pull'")
    assert "`dmst --import MODULE ...`" in run.stderr and len(run.stderr.splitlines()) == 1
    with pytest.raises(OptionError, match=r"unknown operator 'mean_pull'.*`dmst --import MODULE \.\.\.`"):
        read_recipe(str(folder / "runs/pull/recipe.toml"))


@pytest.mark.process
def test_an_operator_without_subspaces_is_told_so(folder: Path) -> None:
    (folder / "bare.py").write_text(
        f"{BARE}\nimport dmst\ndmst.save_model(dmst.create_model('dmst_digits', operator='mean_pull'), 'net')\n"
    )
    run = command("--import", "bare.py", "analyze", "certify", "net", "--limit", "4", folder=folder)
    assert run.returncode == 0, run.stderr
    assert "no rate to certify, MeanPull has no subspaces(), the method that gives the bases U_k (k, d, p)" in run.stdout
    (folder / "bare.py").write_text(BARE)
    run = command("--import", "bare", "analyze", "rates", "net", "--limit", "4", folder=folder)
    assert run.returncode == 0, run.stderr
    assert "MeanPull has no subspaces()" in run.stdout and "so there is no `complete`." in run.stdout


MODULES = {
    "raises.py": (
        "1 / 0",
        "--import {}: the module could not be imported (ZeroDivisionError: division by zero (raises.py, line 1))",
    ),
    "lacks.py": ("import a_library_that_is_not_there", "No module named 'a_library_that_is_not_there' (lacks.py, line 1)"),
    "takes.py": (
        "from dmst.operators import *\nOPERATORS['dmsa'] = MHSA",
        "('dmsa' is an operator of dmst itself: give yours another name)",
    ),
}


@pytest.mark.parametrize("name", [*MODULES, "missing.py", "nowhere", "json.missing"])
def test_a_module_that_cannot_be_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # to be put back as it was
    told = "FileNotFoundError" if name == "missing.py" else "ModuleNotFoundError: No module named"
    if name in MODULES:
        code, told = MODULES[name]
        (tmp_path / name).write_text(code)
    error = CliRunner().invoke(cli.app, ["--import", name, "operators"]).exception
    assert isinstance(error, OptionError) and error.exit_code == 1
    assert str(error).startswith(f"--import {name}: ") and told.format(name) in str(error)
    assert "\n" not in str(error)


# --- installed packages ----------------------------------------------------------------------------------------------

ENTRIES = """[dmst.operators]
mean_pull = my_ops:MeanPull
broken = my_ops.broken:Broken
number = my_ops:NUMBER
dmsa = my_ops:MeanPull
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages, one of which brings operators: one that works, and others."""
    site = tmp_path / "site"
    package, info = site / "my_ops", site / "my_ops-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(OWN.replace('OPERATORS["mean_pull"] = MeanPull', "NUMBER = 5"))
    (package / "broken.py").write_text("raise RuntimeError('no licence\\nfor this')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-ops\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return site


@pytest.mark.process
def test_operators_of_an_installed_package(installed: Path) -> None:
    """Known to Python and to every verb. What is broken is told and harms nobody; a name of ours stays ours."""
    code = """
import json, sys
import torch
import dmst
from dmst import doctor
from dmst.cli import app

assert dmst.OPERATORS["dmsa"] is dmst.DMSA
dmst.create_model("dmst_digits")
assert not [name for name in sys.modules if name.startswith("my_ops")]  # only what is asked for is imported
assert "mean_pull" in dmst.OPERATORS and list(dmst.OPERATORS)[-3:] == ["mean_pull", "broken", "number"]
model = dmst.create_model("dmst_digits", operator="mean_pull", pull=0.25)
assert type(model.blocks[0].operator) is dmst.OPERATORS["mean_pull"] and model.blocks[0].operator.pull == 0.25
assert "my_ops.broken" not in sys.modules
for name in ("broken", "number"):
    try:
        dmst.create_model("dmst_digits", operator=name)
    except dmst.errors.OptionError as error:
        print(error)
print(json.dumps(doctor.machine()["operator_problems"]))
print(json.dumps([row["operator"] for row in doctor.operator_table(torch.device("cpu"))]))
app(["operators"], standalone_mode=False)
"""
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    broken, number, problems, rows, *table = run.stdout.splitlines()
    assert broken == (
        "operator 'broken' of my-ops 1.0 cannot be used (RuntimeError: no licence (broken.py, line 1)). "
        "Mend or uninstall my-ops 1.0."
    )
    assert number.startswith("operator 'number' of my-ops 1.0 cannot be used (something of type int is no operator")
    assert json.loads(problems) == [broken, number]
    assert json.loads(rows) == [*OPERATORS, "mean_pull"]
    assert run.stderr.splitlines() == [broken, number]
    assert any(" mean_pull " in line for line in table) and not any(" broken " in line for line in table)


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_a_mapping_that_keeps_its_own_names() -> None:
    assert "mhsa" in OPERATORS and "nothing" not in OPERATORS and OPERATORS.get("nothing") is None
    assert len(OPERATORS) == len(list(OPERATORS)) == len(OPERATORS.items())
    with pytest.raises(KeyError):
        OPERATORS["nothing"]
    for change in (lambda: OPERATORS.update(dmsa=MHSA), lambda: OPERATORS.update(mine=str)):
        with pytest.raises(OptionError, match=r"of dmst itself|str is no operator"):
            change()
    OPERATORS["mine"] = MHSA
    assert type(dmst.create_model("dmst_digits", operator="mine").blocks[0].operator) is MHSA
    assert OPERATORS.pop("mine") is MHSA and "mine" not in OPERATORS
