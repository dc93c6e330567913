"""What is installed is what was reviewed: calls that must not exist, seven dependencies, floors, a pin for everything.

`make soak AREA=supply` goes on from here: two builds, a bare environment, the package at work in it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dmst
from tests.test_layers import imports

ROOT = Path(dmst.__file__).parent
PROJECT = ROOT.parent / "pyproject.toml"
CONSTRAINTS = ROOT.parent / "requirements/constraints.txt"
CORE = {"torch", "numpy", "pillow", "safetensors", "einops", "rich", "typer"}
FLOORS = {
    "torch": "2.10",
    "safetensors": "0.8",
    "onnx": "1.21",
}  # at least: what older ones lack is told in docs/reliability.md
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "torch.distributed.checkpoint"}
BANNED_CALLS = {
    "torch.load",
    "torch.save",
    "eval",
    "exec",
    "__import__",
    "os.system",
    "os.popen",
    "builtins.eval",
    "builtins.exec",
}
BANNED_KEYWORDS = {"shell", "trust_remote_code"}


# Python that the package writes itself, of names and numbers (test_tape: test_what_is_written_is_names_and_numbers)
WRITERS = {"kernels/fused/writer.py": ["exec"]}


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = {path.relative_to(ROOT).as_posix(): banned(path.read_text()) for path in ROOT.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == WRITERS


def banned(source: str) -> list[str]:
    """Imports, calls and keywords that must not be there, under whatever name they were imported."""
    tree = ast.parse(source)
    found = [name for name in imports(tree) for bad in BANNED_MODULES if name == bad or name.startswith(bad + ".")]
    found += [name for name in imports(tree) if name in BANNED_CALLS]
    known = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            first, dot, rest = called.partition(".")
            found += [name for name in (f"{known.get(first, first)}{dot}{rest}",) if name in BANNED_CALLS]
            if called.endswith("import_module") or called == "need":
                named = node.args[0] if node.args else None
                found += [named.value for _ in "x" if isinstance(named, ast.Constant) and named.value in BANNED_MODULES]
            found += [
                keyword.arg
                for keyword in node.keywords
                if keyword.arg in BANNED_KEYWORDS
                and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            ]
    return found


def aliases(tree: ast.AST) -> dict[str, str]:
    """What a name of the file stands for: {"t": "torch"} after `import torch as t`."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {alias.asname: alias.name for node in nodes for alias in node.names if alias.asname}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


GATE = {
    "import pickle": ["pickle"],
    "def f():\n    import pickle as p": ["pickle"],
    "from torch.distributed import checkpoint": ["torch.distributed.checkpoint"],
    "import torch\ntorch.load('x')": ["torch.load"],
    "import torch as t\nt.load('x')": ["torch.load"],
    "from torch import load\nload('x')": ["torch.load"],
    "from os import system as s": ["os.system"],
    "import importlib\nimportlib.import_module('pickle')": ["pickle"],
    "need('yaml', 'x')": ["yaml"],
    "eval('1')": ["eval"],
    "__import__('x')": ["__import__"],
    "import subprocess\nsubprocess.run('x', shell=True)": ["shell"],
    "import subprocess\nsubprocess.run('x', shell=yes)": ["shell"],
    "model.eval()\nexport.save(x)\nrun('x', shell=False)\nimportlib.import_module('timm')": [],
}


@pytest.mark.parametrize("source", GATE)
def test_the_gate_finds_what_it_should(source: str) -> None:
    assert banned(source) == GATE[source]


def requirements(lines: list[str]) -> dict[str, str]:
    """{name: what follows it}, names in one spelling."""
    parts = [re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)", line) for line in lines]
    return {re.sub(r"[-_.]+", "-", found[1]).lower(): found[2].strip() for found in parts if found}


def test_the_core_needs_seven_packages() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert set(requirements(project["dependencies"])) == CORE


def test_floors() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    every = [line for lines in (project["dependencies"], *project["optional-dependencies"].values()) for line in lines]
    asked = requirements(every)
    for name, floor in FLOORS.items():
        found = re.fullmatch(r">=([\d.]+)", asked[name])
        assert found and number(found[1]) >= number(floor), f"{name} {asked[name]}"


def number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]


def test_everything_is_pinned_and_what_is_installed_is_what_is_pinned() -> None:
    """Every package that the development set pulls in, however far down."""
    text = [line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    pins = requirements([line for line in text if line])
    assert all(pin.startswith("==") for pin in pins.values())
    seen, todo = set[str](), ["dmst[dev]"]
    places = [place for place in sys.path if "_vendor" not in place]  # setuptools brings some of its own
    while todo:
        name, _, extras = todo.pop().partition("[")
        asked = set(extras.rstrip("]").split(",")) - {""}
        key = f"{re.sub(r'[-_.]+', '-', name).lower()}{sorted(asked)}"
        package = next(iter(metadata.distributions(name=name, path=places)), None)
        if package is None:  # for another system or Python
            continue
        if key in seen:
            continue
        seen.add(key)
        installed = package.version
        if name != "dmst":
            pin = pins.get(re.sub(r"[-_.]+", "-", name).lower(), "no pin")
            assert installed.split("+")[0] == pin.removeprefix("=="), f"{name} {installed} is installed and {pin} is pinned"
        for wanted in map(Requirement, package.requires or []):  # but not those for another Python or system
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in asked | {""}):
                todo.append(f"{wanted.name}[{','.join(sorted(wanted.extras))}]")
    assert len(seen) > 30
