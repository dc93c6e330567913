"""What is installed is what was reviewed: calls that must not exist, eight dependencies, floors, a pin for everything.

`make soak AREA=supply` goes on from here: two builds, a bare environment, the package at work in it.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import dmst
from dmst.kernels import choice
from tests.test_layers import imports

ROOT = Path(dmst.__file__).parent
PROJECT = ROOT.parent / "pyproject.toml"
CONSTRAINTS = ROOT.parent / "requirements/constraints.txt"
TORCH = ROOT.parent / "requirements/torch.toml"
CORE = {"torch", "numpy", "pillow", "safetensors", "einops", "jinja2", "rich", "typer"}
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


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = {path.relative_to(ROOT).as_posix(): banned(path.read_text()) for path in ROOT.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {}


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
    "def f():\n    import pickle as p": ["pickle"],
    "import torch as t\nt.load('x')": ["torch.load"],
    "from os import system as s": ["os.system"],
    "import importlib\nimportlib.import_module('pickle')": ["pickle"],
    "import subprocess\nsubprocess.run('x', shell=yes)": ["shell"],
    "model.eval()\nexport.save(x)\nrun('x', shell=False)\nimportlib.import_module('timm')": [],
}


def test_the_gate_finds_what_it_should() -> None:
    assert {source: banned(source) for source in GATE} == GATE


def requirements(lines: list[str]) -> dict[str, str]:
    """{name: what follows it}, names in one spelling."""
    parts = [re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)", line) for line in lines]
    return {re.sub(r"[-_.]+", "-", found[1]).lower(): found[2].strip() for found in parts if found}


def test_the_core_needs_eight_packages() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert set(requirements(project["dependencies"])) == CORE


def test_floors() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    every = [line for lines in (project["dependencies"], *project["optional-dependencies"].values()) for line in lines]
    asked = requirements(every)
    for name, floor in FLOORS.items():
        found = re.fullmatch(r">=([\d.]+)", asked[name])
        assert found and number(found[1]) >= number(floor), f"{name} {asked[name]}"


def test_triton_is_bounded_by_what_was_tested() -> None:
    (line,) = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["kernels"]
    (low, old), (high, new) = choice.OLDEST_TRITON, choice.NEWEST_TRITON
    assert Requirement(line).specifier == SpecifierSet(f">={low}.{old},<{high}.{new + 1}")


def number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]


ENVIRONMENT = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix"}
PYTHONS = ("3.11", "3.13")
CUDA = re.compile("(cuda|nvidia)-.*")  # torch itself says which versions; another CUDA has others


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    found = requirements([line for line in lines if line])
    assert all(pin.startswith("==") for pin in found.values())
    return {name: pin.removeprefix("==") for name, pin in found.items()}


@functools.cache
def installed(name: str) -> metadata.Distribution | None:
    places = [place for place in sys.path if "_vendor" not in place]  # setuptools brings some of its own
    return next(iter(metadata.distributions(name=name, path=places)), None)


def in_force(lines: Iterable[str], python: str, extras: Iterable[str] = ("",)) -> Iterator[Requirement]:
    """The requirements that hold on Linux with this Python."""
    here = ENVIRONMENT | {"python_version": python, "python_full_version": f"{python}.9"}
    for asked in map(Requirement, lines):
        if asked.marker is None or any(asked.marker.evaluate({**here, "extra": extra}) for extra in extras):
            yield asked


def wanted(build: str, python: str) -> Iterator[tuple[str, Requirement]]:
    """(who asks, for what): all that the development set and the other extras come to, however far down.

    torch asks for what its build asks for, by the record; all others for what is installed of them asks for.
    """
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines if not line.startswith("dmst[")]
    todo, seen = [("dmst", asked) for asked in in_force(project["dependencies"] + extras, python)], set[tuple[str, str]]()
    while todo:
        who, asked = todo.pop()
        yield who, asked
        name, package = canonicalize_name(asked.name), installed(asked.name)
        if package is None or (key := (name, str(sorted(asked.extras)))) in seen:  # it is for another Python, or in no test
            continue
        seen.add(key)
        lines = tomllib.loads(TORCH.read_text())[build] if name == "torch" else package.requires or []
        todo += [(name, each) for each in in_force(lines, python, {"", *asked.extras})]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_the_pins_fit_each_other(build: str, python: str) -> None:
    """As pip finds them on Linux: with the CPU build of torch, and with PyPI's, which is the CUDA build."""
    pinned = pins()
    asked = [(who, what) for who, what in wanted(build, python) if not CUDA.fullmatch(what.name)]
    assert len({what.name for _, what in asked}) > 60
    for who, what in asked:
        pin = pinned.get(canonicalize_name(what.name), "no pin")
        assert pin != "no pin" and what.specifier.contains(pin), f"{who} asks for {what}, and {pin} is pinned"
    for name in {what.name for _, what in asked}:
        package = installed(name)
        pythons = SpecifierSet((package and package.metadata.get("Requires-Python")) or "")
        assert pythons.contains(f"{python}.9"), f"{name} is for Python {pythons}"


def test_the_record_is_of_the_torch_that_is_pinned() -> None:
    record, here = tomllib.loads(TORCH.read_text()), metadata.distribution("torch")
    assert record["version"] == pins()["torch"]
    if here.version.split("+")[0] == record["version"]:
        plain = [line for line in here.requires or [] if "extra ==" not in line]
        assert plain == record["cuda" if any(CUDA.match(line) for line in plain) else "cpu"]


def test_what_is_installed_is_what_is_pinned() -> None:
    pinned, python = pins(), ".".join(map(str, sys.version_info[:2]))
    for name in {canonicalize_name(what.name) for _, what in wanted("cpu", python)}:
        package = installed(name)
        found = package.version.split("+")[0] if package else pinned[name]
        assert found == pinned[name], f"{name} {found} is installed and {pinned[name]} is pinned"
