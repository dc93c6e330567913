"""Names from outside: twenty of them, as classes, files and folders, over every command that shows names.

Nothing that is not printable may reach a terminal or a page, no name may be read as markup, and JSON gives every name back.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.table import Table
from rich.text import Text
from starlette.responses import JSONResponse
from typer.main import get_command

import dmst
from dmst import cli, create_model
from dmst.explorer.session import Session
from dmst.models import load_model, save_model
from dmst.terminal import Terminal

NAMES = [
    # what a terminal obeys
    "osc8 \x1b]8;;http:evil.example\x07click\x1b]8;;\x07", "csi \x1b[2J\x1b[H", "back\x08\x08\x08\x08gone", "over\rwritten",
    "new\nline: all is well", "c1 \x9b2J",
    # what turns lines around, or is not seen; bytes that are not UTF-8
    "bidi \u202egpj.exe", "zero\u200bwidth\u200d", "lines\u2028and\u2029", "byte \udcff", "half \udcc3(",
    # markup of rich, of pages and templates
    "[bold]", "[link=http:evil.example]here", ":smile:", "<script>alert(1)<script>", '"><img src=x onerror=alert(1)>',
    "&amp;&#x27;",
    # honest names
    "-rf", "\u732b\u3068\u72ac", "n" * 251,
]  # fmt: skip
PLAIN = [name for name in NAMES if name.isprintable()]
NO_FILES = [
    "[/]",
    "zero\x00byte",
    "a/../b",
    "\ud800 alone",
    "</script><script>",
    "--><!--",
]  # only a saved model can hold these
CPU = ("--device", "cpu")
SMALL = {"model.options.depth": 1, "model.options.dim": 16, "model.options.num_heads": 2, "model.options.patch_size": 2}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not have such file names")


@pytest.fixture(scope="module", autouse=True)
def dmst_command() -> Iterator[None]:
    """The command, made once; wide enough for every name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "app", get_command(cli.app))
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        patch.setenv("COLUMNS", "9000")
        patch.delenv("DMST_DATA", raising=False)
        yield


def typed(*words: Any, encoding: str = "utf-8") -> tuple[int, str, str]:
    """Type a command: its exit status, stdout and stderr, in which nothing can be that is not printable."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors="strict", write_through=True) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmst", *map(str, words)])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as leave:
            cli.main()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)  # type: ignore[attr-defined]
    for text in (out, err):
        assert not (raw := {c for c in text if not c.isprintable() and c != "\n"}), (words, raw)
    return int(leave.value.code or 0), out, err


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every name is a class, and the file of its images."""
    folder, chance = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in NAMES:
        for split in ("train", "test"):
            (folder / split / name).mkdir(parents=True)
            Image.fromarray(chance.integers(0, 255, (8, 8, 3), np.uint8)).save(folder / split / name / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on them, and what `dmst train` said; its folder has an odd name too."""
    out = tmp_path_factory.mktemp("runs") / NAMES[0]
    settings = SMALL | {"schedule.epochs": 1, "schedule.warmup_epochs": 0.5, "run.batch_size": 10, "data.image_size": 8}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    status, said, err = typed("train", "digits", "--data", data, "--model", "dmst_cifar", "--out", out, *changes, *CPU)
    assert status == 0, err
    return out, said


class Page(HTMLParser):
    """The elements, attributes and words of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        text = path.read_text(encoding="utf-8")
        assert not {c for c in text if not c.isprintable() and c not in "\n"}
        self.feed(text)
        for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
            ElementTree.fromstring(drawing)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def unharmed(path: Path, plain: Path) -> str:
    """The words of a page; it has no other elements and attributes than one about plain names."""
    page, other = Page(path), Page(plain)
    assert page.tags <= other.tags | {"b"} and page.attributes <= other.attributes and "script" not in page.tags
    return "\n".join(page.words)


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a page of ours is made of, about a network that ships; a run's adds a few words to it."""
    from dmst.analysis.network_report import write_network_report
    from dmst.engine.samples import sample

    model = create_model("dmst_digits", pretrained=True)
    path = tmp_path_factory.mktemp("page") / "page.html"
    page = write_network_report(path, model, sample(model, limit=40), "digits", title="dmst_digits")
    more = "<details><summary></summary><code></code><pre></pre><ul><li></li></ul></details><h3></h3><circle/>"
    page.write_text(page.read_text(encoding="utf-8") + more, encoding="utf-8")
    return page


def test_train(run: tuple[Path, str], plain_page: Path) -> None:
    folder, said = run
    assert "20: " in said and all(name in said for name in sorted(NAMES)[:12] if name.isprintable())
    assert len(said.splitlines()) < 20  # no name begins a line of its own
    told = unharmed(folder / "report.html", plain_page)
    assert "[bold]" in told and "<script>alert(1)<script>" in told and r"byte \xff" in told
    assert load_model(folder).class_names == tuple(sorted(NAMES))


def test_evaluate(run: tuple[Path, str]) -> None:
    status, out, _ = typed("evaluate", run[0], *CPU)
    assert status == 0 and [name for name in PLAIN if name not in out] == []
    assert r"back\x08\x08\x08\x08gone" in out and r"csi \x1b[2J" in out and r"byte \xff" in out
    assert r"new\nline: all is well" in out and r"bidi \u202egpj.exe" in out and r"half \xc3(" in out
    status, out, _ = typed("evaluate", run[0], *CPU, "--json")
    assert status == 0 and list(json.loads(out)["by_class"]) == sorted(NAMES) and json.loads(out)["weights"] == str(run[0])


def test_classify(run: tuple[Path, str], data: Path, tmp_path: Path) -> None:
    photos = [data / "test" / name / f"{name}.png" for name in NAMES]
    asked = ["classify", *photos, "--weights", run[0]]
    status, out, _ = typed(*asked, "--top", 20)
    assert status == 0 and len(out.splitlines()) == 20
    assert all(out.splitlines()[0].count(f"{name} ") for name in PLAIN)
    assert all(f"{name}.png: " in line for name, line in zip(NAMES, out.splitlines(), strict=True) if name in PLAIN)
    status, out, _ = typed(*asked, "--top", 20, "--json", "--maps", tmp_path / "maps")
    told = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [Path(each["photo"]) for each in told] == photos
    assert all({row["class"] for row in each["top"]} == set(NAMES) for each in told)
    assert len({each["maps"] for each in told}) == 20 and all(Path(each["maps"]).is_file() for each in told)
    assert Path(told[9]["maps"]).name == f"{NAMES[9]}.png.png"  # as it is named, where there is room
    status, out, err = typed("classify", "-rf.png", "--weights", run[0])
    assert status == 2 and "No such option" in err


def test_report(run: tuple[Path, str], plain_page: Path, tmp_path: Path) -> None:
    status, out, _ = typed("report", run[0], "--out", tmp_path / "page.html", *CPU)
    told = unharmed(tmp_path / "page.html", plain_page)
    assert status == 0 and out.strip() == str(tmp_path / "page.html")
    assert [name for name in PLAIN if len(name) <= 26 and name not in told] == [] and r"byte \xff" in told


@pytest.mark.slow
def test_analyze(run: tuple[Path, str], data: Path, plain_page: Path, tmp_path: Path) -> None:
    few = ["--limit", "4", *CPU]
    for verb in ("certify", "rates"):
        status, out, _ = typed("analyze", verb, run[0], *few)
        assert status == 0 and out
    status, _, _ = typed("analyze", "rates", run[0], *few, "--page", tmp_path / "rates.html")
    assert status == 0 and r"osc8 \x1b]8;;" in unharmed(tmp_path / "rates.html", plain_page)
    photos = [data / "test" / name / f"{name}.png" for name in NAMES]
    status, out, _ = typed("analyze", "maps", *photos, "--weights", run[0], "--out", tmp_path / "maps", "--json")
    told = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(told) == 20 and {each["answer"] for each in told} <= set(NAMES)


def test_data_info(data: Path, tmp_path: Path) -> None:
    for name in NAMES[:10]:
        (tmp_path / name).symlink_to(data)
        status, out, _ = typed("data", "info", tmp_path / name)
        assert status == 0 and "20 images" in out


@pytest.mark.parametrize("name", [NAMES[0], NAMES[4], NAMES[9], NAMES[12]], ids=["escape", "line", "byte", "markup"])
def test_a_name_that_is_not_there(name: str, tmp_path: Path) -> None:
    """Every command that takes a name refuses it, and quotes it as it is where it is plain."""
    digits = ["--weights", "dmst_digits"]
    for words in (
        ["classify", name, *digits], ["classify", "--device", name, tmp_path, *digits],
        ["classify", tmp_path, "--weights", name],
        ["explore", "--no-open", "--model", name], ["models", name], ["train", name], ["train", "digits", "--set", name],
        ["evaluate", name], ["recipes", name], ["data", "info", name], ["report", name], ["analyze", "certify", name],
        ["reproduce", name], ["doctor", name], ["--import", name, "operators"], [name],
    ):  # fmt: skip
        status, out, err = typed(*words)
        assert status in (1, 2) and not out and err, words


def test_a_terminal_that_knows_less(run: tuple[Path, str]) -> None:
    """ASCII or Latin-1: what it cannot write is escaped."""
    status, out, _ = typed("evaluate", run[0], *CPU, encoding="ascii")
    assert status == 0 and r"\u732b\u3068\u72ac" in out and "[bold]" in out


def test_on_a_terminal() -> None:
    """The colours are ours alone, whatever way a name came in: as a string, as Text, in a table."""
    screen = io.StringIO()
    console = Terminal(file=screen, force_terminal=True, width=900, color_system="standard")
    for name in [*NAMES, *NO_FILES]:
        table = Table(name, title=name, caption=name)
        table.add_row(name, style="red")
        console.print(name, Text(name, "bold"), table, style="green")
    text = re.sub(r"\x1b\[[0-9;]+m", "", screen.getvalue())
    assert not {c for c in text if not c.isprintable() and c != "\n"} and r"csi \x1b[2J" in text
    assert all(text.count(name) >= 6 for name in PLAIN) and text.count(r"back\x08\x08\x08\x08gone") == 5


def test_a_warning() -> None:
    """Warnings quote names too; they go to stderr without passing through a command."""
    typed("--version")
    told = warnings.formatwarning(f"a save to {NAMES[0]} was interrupted", UserWarning, "files.py", 1, "")
    assert r"\x1b]8;;http:evil" in told and {c for c in told if not c.isprintable()} == {"\n"}


def test_explorer(tmp_path: Path) -> None:
    """Class names that no file can have, and a folder's: the server answers, in names that can be shown."""
    names = [*NAMES, *NO_FILES]
    model = create_model("dmst_digits", dim=16, depth=1, num_heads=2, num_classes=len(names))
    model.class_names = tuple(names)
    folder = save_model(model, tmp_path / NAMES[9])
    (broken := tmp_path / NAMES[0]).mkdir()
    session = Session([str(folder), str(broken)])
    for id in ("m0", "m1"):
        session.networks[id].load()
    network = session.network("m0")
    assert network.state == "ready"
    look = network.look(session.picture("e6"), {})
    answers = [bytes(JSONResponse(each).body).decode() for each in (session.start(), look)]
    assert all(c.isprintable() for text in answers for c in text)
    start, look = map(json.loads, answers)
    assert [each["name"] for each in start["models"]] == [r"byte \xff", r"osc8 \x1b]8;;http:evil.example\x07click\x1b]8;;\x07"]
    assert start["models"][1]["state"] == "failed"
    shown = [text for each in look["top"] for text in (each["class"],)] + [each["words"] for each in start["models"]]
    assert all(text.isprintable() for text in shown)


def test_there_is_one_way() -> None:
    """Only dmst.terminal prints or opens a console; pages escape by Jinja2."""
    root = Path(dmst.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ImportFrom(module="html" | "rich.markup" | "rich.console") | ast.Call(func=ast.Name("print")):
                    found.add(path.name)
                case ast.Attribute(attr="echo" | "secho"):
                    found.add(path.name)
    assert found == {"terminal.py"}
