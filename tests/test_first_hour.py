"""A stranger's first hour: every line of the front page typed as it is printed, on the wheel in an empty environment.

What needs something that such an environment has not (an extra, a data set, a GPU) must say so in one line; `ELSEWHERE` names
the few lines that are not run here, and why. Only training is made shorter, by --epochs. One quick pass runs by default.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import dmst
from dmst import cli
from dmst.photos import PHOTOS, photo

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPERATOR = "import dmst\n\n\nclass Mine(dmst.TSSA):\n    pass\n\n\ndmst.OPERATORS['mine'] = Mine\n"

# lines of the README that are not typed here -> why
ELSEWHERE = {
    "make demo": "tests/test_demo.py runs what it does",
    "make test": "this is a part of it",
    "make docs": "tests/test_site.py builds it",
    "dmst explore": "it is opened in a browser below",
    "dmst export runs/PHOTOS --out photos.onnx": "it needs an extra, and says so below; tests/export has it",
}


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def inline() -> list[str]:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    return list(dict.fromkeys(re.findall(r"`([^`\n]+)`", prose)))


def commands() -> list[str]:
    """Every command of the page that begins with dmst or make, without its remark: blocks first, in their order."""
    printed = [line.removeprefix("$ ") for kind in ("sh", "console") for block in fenced(kind) for line in block.splitlines()]
    found = [re.sub(r"\s+#.*", "", line).strip() for line in (*printed, *inline())]
    return [line for line in dict.fromkeys(found) if re.match(r"(dmst|make) [a-z-]", line)]


TYPED = [line for line in commands() if line not in ELSEWHERE]


def furnish(folder: Path) -> None:
    """What the lines of the page name: one photo, photos in class folders, an operator."""
    shutil.copy(photo("cat"), folder / "photo.jpg")
    (folder / "my_operator.py").write_text(OPERATOR)
    for name in ("cat", "coffee"):
        whole = Image.open(photo(name))
        (folder / "PHOTOS" / name).mkdir(parents=True)
        for i in range(6):
            whole.crop((20 * i, 10 * i, 20 * i + 160, 10 * i + 160)).save(folder / f"PHOTOS/{name}/{i}.jpg")


def test_the_quick_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: classify, an own operator; a wrong word gets one line."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    quick = [line for line in TYPED if re.match(r"dmst (classify|reproduce --help|--import)", line)]
    assert len(quick) >= 3 and len(TYPED) > 8 and ELSEWHERE.keys() <= {*commands(), "make test"}
    try:
        said = {line: CliRunner().invoke(cli.app, shlex.split(line)[1:]) for line in quick}
    finally:
        dmst.OPERATORS.pop("mine", None)
    for line, done in said.items():
        assert done.exit_code == 0, (line, done.exception, done.output)
    assert "cat 9" in said["dmst classify photo.jpg"].output
    wrong = CliRunner().invoke(cli.app, ["classify", "nowhere.jpg"]).exception
    assert "nowhere.jpg does not exist" in str(wrong) and "\n" not in str(wrong)


def child(*words: Any, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """As a user's shell would."""
    known = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    env = known | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONWARNINGS": "error::DeprecationWarning:dmst"}
    return subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


class Home:
    """A folder, and the programs of an environment that holds the wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "home", folder / "env/bin"
        self.folder.mkdir()

    def dmst(self, line: str, *more: str) -> subprocess.CompletedProcess[str]:
        return child(self.bin / "dmst", *shlex.split(line), *more, cwd=self.folder)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return child(self.bin / "python", "-c", code, cwd=self.folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The wheel, as `pip install .` makes it, with what it needs and no extra."""
    place = tmp_path_factory.mktemp("first hour")
    env = os.environ | {"PIP_CONSTRAINT": str(ROOT / "requirements/constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for words in (
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT],
        [sys.executable, "-m", "venv", place / "env"],
        [place / "env/bin/pip", "install", "--quiet", "--no-compile", f"{place}/dmst-{dmst.__version__}-py3-none-any.whl"],
    ):
        done = subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
    found = Home(place)
    furnish(found.folder)
    return found


@pytest.mark.process
@pytest.mark.timeout(300)
def test_every_command_of_the_readme_works(home: Home) -> None:
    """And says what a reader would look for: the cat, the block before training, the share that was held out."""
    said = {}
    for line in TYPED:
        shorter = ["--epochs", "2"] if line.startswith("dmst train") else []  # the last one counts
        done = home.dmst(line.removeprefix("dmst "), *shorter)
        assert done.returncode == 0, (line, done.stderr or done.stdout)
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, (line, done.stderr)
        said[line] = done.stdout
    assert "cat 9" in said["dmst classify photo.jpg"]
    block = said["dmst train --data PHOTOS"]
    assert "10 images to learn from, 2 to check with (20 % held out)" in block and "2: cat 5, coffee 5" in block
    assert re.search(r"^time +about \d+ (second|minute)", block, re.MULTILINE)
    assert "PHOTOS, 20 % held out: " in said["dmst evaluate runs/PHOTOS"]
    assert list((home.folder / "maps").glob("*photo*.png"))
    assert re.search(r"^ +8 .* 100% .* 100% ", said["dmst analyze certify"], re.MULTILINE)  # the rate falls, and that is proven


@pytest.mark.process
def test_code_of_the_readme_and_of_the_tutorial(home: Home) -> None:
    tutorial = "".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL | re.MULTILINE))
    for code in ("\n".join(f"exec({piece!r}, {{}})" for piece in fenced("python")), tutorial):
        done = home.python(code)
        assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("explore --no-open", "explore"),
        ("train digits", "demo"),
        ("demo", "demo"),
        ("export dmst_digits --out x.onnx", "export"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(line: str, extra: str, home: Home) -> None:
    done = home.dmst(line)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr or done.stdout
    assert f"dmst[{extra}]" in done.stderr


@pytest.fixture(scope="module")
def page(home: Home) -> Iterator[str]:
    """`pip install '.[explore]'`, then `dmst explore`; its address."""
    env = os.environ | {"PIP_CONSTRAINT": str(ROOT / "requirements/constraints.txt")}
    wanted = ["starlette", "uvicorn"]  # what the extra asks for: the wheel itself is there
    subprocess.run([home.bin / "pip", "install", "--quiet", *wanted], env=env, check=True, timeout=100, capture_output=True)
    server = subprocess.Popen(
        [str(home.bin / "dmst"), "explore", "--no-open"], cwd=home.folder, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        for _ in range(200):
            if all(each["state"] == "ready" for each in json.load(urllib.request.urlopen(f"{address}api/start"))["models"]):
                break
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.communicate(timeout=20)


@pytest.mark.browser
@pytest.mark.timeout(200)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
def test_the_page_in_a_browser(page: str) -> None:
    """The cat, its answer and its map at once; all heads off in one click, and what that shows, in words."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        shown = browser.new_page(viewport={"width": 1280, "height": 900})
        wrong: list[str] = []
        shown.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        shown.goto(page)
        shown.get_by_text("cat, 94").wait_for()
        assert all(shown.get_by_role("button", name=name).count() for name in PHOTOS)
        shown.get_by_role("button", name="Switch off all 72 heads").click()
        shown.get_by_text("With all 72 heads off").wait_for()
        assert not wrong
        browser.close()
