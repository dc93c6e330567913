"""Documents that cannot drift: snippets and commands are run, links lead somewhere, figures are those of the files."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from dmst.cli import USAGE, app
from dmst.models import create_model, model_config, shipped
from dmst.models.zoo import LAYERS, SIZES, SMALL
from dmst.operators import OPERATORS
from tests import forked
from tests.cases import VARIANTS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


FIRST = ("README.md", "tutorial.md")  # what a stranger meets first: run on an installed wheel, in test_first_hour
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{i}")
    for path in DOCUMENTS
    if path.name not in FIRST
    for i, code in enumerate(blocks(path, "python"))
]
COMMANDS = [
    pytest.param(line.removeprefix("$ "), id=f"{path.name}: {line.removeprefix('$ ')}")
    for path in DOCUMENTS
    if path.name not in FIRST  # the tutorial's commands: test_own_operators
    for block in blocks(path, "console")
    for line in block.splitlines()
    if line.startswith("$ ")
]


@pytest.mark.process
@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run(code: str) -> None:
    run = forked.python("-c", code, root=ROOT, strict=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.process
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "dmst"
    run = forked.python("-m", "dmst", *arguments, root=ROOT)
    assert run.returncode == 0, run.stderr


def typed(path: Path, prose: bool = True) -> list[list[str]]:
    """The words of every command of ours that a document prints, in a block or in a line of prose."""
    printed = [
        line for kind in ("sh", "bash", "console", "text") for block in blocks(path, kind) for line in block.splitlines()
    ]
    lines = [line.removeprefix("$ ").replace(" && ", " # ") for line in printed]
    if prose:
        lines += re.findall(r"`(dmst [^`]+)`", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE))
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("dmst ")]
    return [
        each[1:] for each in words if not re.search(r"\.\.\.|…|\||VERB|FILE$|^-", " ".join(each[1:]).removeprefix("--import"))
    ]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=lambda path: path.name)
def test_every_command_that_is_printed_is_one(path: Path) -> None:
    """Its verb and its options exist, and their values are of the right kind. Nothing is run."""
    for words in typed(path):
        command, rest = typer.main.get_command(app), words[2:] if words[0] == "--import" else list(words)
        try:
            while hasattr(command, "commands") and rest:
                command = command.commands[rest.pop(0)]
            if not hasattr(command, "commands"):  # prose may name a group of verbs
                command.make_context("dmst", rest)
        except typer.Exit:
            assert "--help" in words
        except (LookupError, USAGE) as error:
            if type(error).__name__ == "MissingParameter" and words not in typed(path, prose=False):
                continue  # prose may name a command without all of its words
            raise AssertionError(f"dmst {shlex.join(words)}: {error!r}") from error


def test_there_is_something_to_run() -> None:
    assert sum(len(typed(path)) for path in DOCUMENTS) > 60
    assert SNIPPETS
    assert COMMANDS


def test_the_ten_lines_are_about_ten() -> None:
    code = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(path: Path) -> None:
    """A claim that points to a test points to one that is there."""
    source = "\n".join(test.read_text() for test in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+?)(?:_?\*)?`", path.read_text()):
        assert re.search(rf"def {name}|tests/{name}", source) or any((ROOT / "tests").rglob(f"{name}.py")), name


def test_every_operator_and_family_is_in_a_table() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\|", (ROOT / "docs/operators.md").read_text(), re.MULTILINE)
    assert set(rows) == set(OPERATORS) | set(LAYERS)


def test_the_readme_is_short_and_paragraphs_are_narrow() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        wide = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("#", "|", "    "))]
        assert not wide, (path.name, wide[0])


def test_the_accuracies_in_the_readme_are_those_of_the_cards() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.]+) % \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(shipped.SHIPPED)
    for name, share in rows:
        assert f"top-1 {share}%" in shipped.card(name)


def test_the_sizes_in_the_documents_are_those_of_the_code() -> None:
    text = (ROOT / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| [^|]+ \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 21
    for name, dim, depth, heads, ten, thousand in rows:
        config = model_config(name)
        assert (config.dim, config.depth, config.num_heads) == (int(dim), int(depth), int(heads))
        for classes, told in ((10, ten), (1000, thousand)):
            model = create_model(name, num_classes=classes, device="meta")
            assert f"{sum(p.numel() for p in model.parameters()):,}" == told, name
    for family, told in re.findall(r"(\w+) ([\d,]{6,})(?: ·|\.$)", text, re.MULTILINE):
        counts = {f"{sum(p.numel() for p in create_model(f'{family}_{s}', device='meta').parameters()):,}" for s in SMALL}
        assert told in counts, (family, told)


def test_the_sizes_of_the_families_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+ M) \|$", (ROOT / "docs/operators.md").read_text(), re.MULTILINE)
    assert {family for family, _ in rows} == set(LAYERS)
    for family, sizes in rows:
        told = dict(re.findall(r"(\w+) ([\d.]+) M", sizes))
        assert set(told) == set(SIZES[family])
        for size, millions in told.items():
            model = create_model(f"{family}_{size}", num_classes=10, device="meta")
            assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}" == millions, (family, size)


def test_the_page_of_operators_counts_the_variants() -> None:
    assert f"{len(VARIANTS)} combinations of options" in " ".join((ROOT / "docs/operators.md").read_text().split())


def test_answers_without_heads_are_those_of_the_file() -> None:
    """All test images, never a sample: 1,000 of them had said the opposite."""
    found = json.loads((ROOT / "results/twins/heads-off.json").read_text())
    told = (ROOT / "docs/maps.md").read_text()
    for name, row in found.items():
        assert row["images"].endswith("10,000 images")
        p = f"{row['p']:.1g}" if row["p"] < 0.01 else f"{row['p']:.2f}"
        counts = [f"{row[key]:,}" for key in ("as it is", "all heads off", "lost", "won")]
        assert f"| `{name}` | {' | '.join(counts)} | {p if row['p'] >= 0.001 else '< 0.001'} |" in told
        assert row["as it is"] - row["lost"] + row["won"] == row["all heads off"]
    ours = found["dmst_cifar10"]
    for document, words in (
        ("README.md", "{1} of the 10,000"),
        ("docs/claims.md", "{0} of the 10,000"),
        ("docs/lab-notes.md", "{0} and {1} of"),
    ):
        assert words.format(f"{ours['as it is']:,}", f"{ours['all heads off']:,}") in " ".join(
            (ROOT / document).read_text().split()
        ), document


def test_nothing_of_one_machine_is_written_down() -> None:
    """No absolute path of a machine in any text file that a clone holds (this test spells the pattern, and is left out)."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout.split("\n")
    names = [name for name in listed if name and not name.endswith((".jpg", ".png", ".safetensors"))] or [
        "README.md"
    ]  # an sdist has no git
    for name in names:
        if name != "tests/test_docs.py" and (ROOT / name).is_file():
            found = re.search(r"(?<![\w.:])/(home|root|work|tmp|Users|opt)/\S*", (ROOT / name).read_text(encoding="utf-8"))
            assert not found, (name, found)
