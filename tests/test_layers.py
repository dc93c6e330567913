"""The direction rule, read from the syntax tree: a room imports only rooms below it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import dmst

ROOT = Path(dmst.__file__).parent
# a row imports only rows below it; names on one row do not import each other; errors is open to all
ROWS = [
    ["words"],
    ["calibration", "errors", "photos", "provenance", "settings", "tracing", "atomic"],
    ["sparsemax", "rotary", "onednn", "terminal", "one_node"],
    ["cells"],
    ["objective", "kernels"],
    ["operators"],
    ["models", "data"],
    ["export"],
    ["engine", "analysis", "testing"],
    ["reproduce", "explorer", "integrations", "doctor", "demo"],
    ["cli"],
    ["__main__"],
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}


def room(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[str]:
    """Every module that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("relative")
    return found


def wrong_directions(root: Path) -> list[str]:
    wrong = []
    for path in sorted(root.rglob("*.py")):
        mine = room(path, root)
        if mine == "__init__":
            continue  # the front door, lazy: test_import says what it may load
        for module in imports(ast.parse(path.read_text())):
            if module == "relative":
                wrong.append(f"{path.name}: relative import")
            parts = module.split(".")
            if parts[0] != "dmst" or len(parts) < 2 or parts[1] in (mine, "errors", "__version__"):
                continue
            theirs = parts[1]
            if mine not in ROW or theirs not in ROW:
                wrong.append(f"{path.name}: {mine} or {theirs} has no row")
            elif ROW[theirs] >= ROW[mine]:
                wrong.append(f"{path.name}: {mine} imports {theirs}")
    return list(dict.fromkeys(wrong))


def test_imports_point_downwards() -> None:
    assert wrong_directions(ROOT) == []


def test_a_planted_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "bad.py").write_text("def f():\n    from dmst.operators import DMSA\n")
    (tmp_path / "rotary.py").write_text("from dmst import sparsemax\n")
    (tmp_path / "objective.py").write_text("from . import errors\nimport dmst.attic\n")
    assert wrong_directions(tmp_path) == [
        "bad.py: kernels imports operators",
        "objective.py: relative import",
        "objective.py: objective or attic has no row",
        "rotary.py: rotary imports sparsemax",
    ]


def test_other_libraries_only_where_named() -> None:
    """torch, numpy and einops everywhere; others in the rooms that need them; optional ones by `errors.need`, as text."""
    standard = set(sys.stdlib_module_names)
    extra = {
        "cli": {"typer", "rich"},
        "demo": {"rich"},
        "doctor": {"rich"},
        "terminal": {"rich"},
        "kernels": {"triton"},  # imported only where the fused kernels are used: test_import says so
        "models": {"safetensors"},
        "data": {"PIL"},
        "engine": {"rich", "safetensors", "PIL"},
        "analysis": {"PIL", "jinja2", "markupsafe"},
        "explorer": {"PIL", "starlette", "uvicorn"},  # `dmst explore` asks for them by `need` first
    }
    checking = {"jaxtyping"}  # shapes as text, behind TYPE_CHECKING
    for path in ROOT.rglob("*.py"):
        for module in imports(ast.parse(path.read_text())):
            top = module.split(".")[0]
            allowed = standard | {"dmst", "torch", "numpy", "einops"} | checking | extra.get(room(path, ROOT), set())
            assert top in allowed, f"{path.name} imports {module}"
