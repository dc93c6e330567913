"""A stranger's first hour: the wheel in an empty environment, and every line of the front page typed as it is printed.

What needs something that such an environment has not (an extra, a data set, a GPU) must say so in one line; `ELSEWHERE` names
the few lines that are not run here, and why. Only training is made shorter, by --epochs.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import dmst
from dmst.models import shipped
from dmst.photos import PHOTOS, photo

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# lines of the README that are not typed here -> why
ELSEWHERE = {
    "make demo": "it is one half of a fresh clone's check; tests/test_demo.py runs what it does",
    "make test": "this is a part of it",
    "make soak": "half an hour",
    "pip install .": "the fixture installs the wheel of the same files",
    "dmst explore": "it is opened in a browser below",
    "dmst train cifar10 --set run.compile=true": "it needs CIFAR-10 and a GPU",
    "dmst train": "a verb, not a command",
    "dmst analyze": "a verb, not a command",
}


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def inline() -> list[str]:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    return list(dict.fromkeys(re.findall(r"`([^`\n]+)`", prose)))


def commands() -> list[str]:
    """Every command of the page that begins with dmst, make or pip, without its remark: blocks first, in their order."""
    printed = [line.removeprefix("$ ") for kind in ("sh", "console") for block in fenced(kind) for line in block.splitlines()]
    found = [re.sub(r"\s+#.*", "", line).strip() for line in (*printed, *inline())]
    return [line for line in dict.fromkeys(found) if re.match(r"(dmst|make) [a-z-]|pip install ", line)]


TYPED = [line for line in commands() if line not in ELSEWHERE and not line.startswith("pip install")]
EXPRESSIONS = [code for code in inline() if re.match(r"(dmst\.[\w.]+\(|import dmst|torch\.compile\()", code)]


def child(*words: Any, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """As a user's shell would, with one thread: two of them run at a time."""
    known = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    env = known | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONWARNINGS": "error::DeprecationWarning:dmst"}
    return subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


class Home:
    """An empty folder, and the programs of an environment that holds the wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "home", folder / "env/bin"
        self.folder.mkdir()

    def dmst(self, line: str | list[str]) -> subprocess.CompletedProcess[str]:
        return child(self.bin / "dmst", *(shlex.split(line) if isinstance(line, str) else line), cwd=self.folder)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return child(self.bin / "python", "-c", code, cwd=self.folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The wheel, as `pip install .` makes it, with what it needs and no extra; photos in class folders; one photo."""
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
    shutil.copy(photo("cat"), found.folder / "photo.jpg")
    for name in ("cat", "coffee"):
        whole = Image.open(photo(name))
        (found.folder / "PHOTOS" / name).mkdir(parents=True)
        for i in range(6):
            whole.crop((20 * i, 10 * i, 20 * i + 160, 10 * i + 160)).save(found.folder / f"PHOTOS/{name}/{i}.jpg")
    return found


@pytest.fixture(scope="module")
def readme(home: Home) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every command of the page, in its order: those about the run of the reader one after another, the others beside them."""

    def type_all(lines: list[str]) -> dict[str, subprocess.CompletedProcess[str]]:
        done = {}
        for line in lines:
            shorter = ["--epochs", "2"] if line.startswith("dmst train") else []  # the last one counts
            done[line] = home.dmst([*shlex.split(line)[1:], *shorter])
        return done

    mine = [line for line in TYPED if "PHOTOS" in line]
    done: dict[str, subprocess.CompletedProcess[str]] = {}
    with ThreadPoolExecutor(2) as pool:
        for some in pool.map(type_all, (mine, *([line] for line in TYPED if line not in mine))):
            done |= some
    return done


@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", TYPED)
def test_every_command_of_the_readme_works(line: str, readme: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = readme[line]
    assert done.returncode == 0, done.stderr or done.stdout
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr


def test_all_that_is_printed_is_known() -> None:
    assert len(TYPED) > 15 and len(EXPRESSIONS) > 3
    assert ELSEWHERE.keys() <= {*commands(), "make soak", "dmst train", "dmst analyze", "dmst explore"}


def test_what_the_commands_said(home: Home, readme: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """What a reader would look for: the cat, the block before training, the share that was held out, real pictures."""
    assert "cat 9" in readme["dmst classify photo.jpg"].stdout
    block = readme["dmst train --data PHOTOS"].stdout
    assert "which ships with this package (78.93% right on cifar100 test" in block and "--size 64" in block
    assert "from about 160 x 160: the shorter side is scaled to 32" in block and "2: cat 5, coffee 5" in block
    assert "10 images to learn from, 2 to check with (20 % held out)" in block and "top-5" not in block
    assert re.search(r"^time +about \d+ (second|minute)", block, re.MULTILINE)
    assert "PHOTOS, 20 % held out: " in readme["dmst evaluate runs/PHOTOS"].stdout
    page = (home.folder / "dmst_cifar10-report.html").read_text()
    assert "accuracy (top-1) on 10,000 images" in page and "Confusion" in page and "astronaut" in page
    assert "PHOTOS, 20 % held out" in (home.folder / "PHOTOS-report.html").read_text()
    assert list((home.folder / "maps").glob("*photo*.png"))
    beside = readme["dmst analyze rates dmst_cifar10 tost_cifar10"].stdout
    assert beside.count("layer ") == 1 and "dmst_cifar10" in beside and "tost_cifar10" in beside
    assert "guaranteed on 100%" in readme["dmst analyze certify"].stdout


def test_code_of_the_readme_and_of_the_tutorial(home: Home) -> None:
    """Blocks and inline code of the README, and the tutorial as one session, all on what was installed."""
    pieces = [*fenced("python"), *(f"import torch, dmst\n{code}" for code in EXPRESSIONS if "timm" not in code)]
    tutorial = "".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL | re.MULTILINE))
    programs = ["\n".join(f"exec({piece!r}, {{}})" for piece in pieces), tutorial]
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(home.python, programs):
            assert done.returncode == 0, done.stderr


EXTRAS = {
    "dmst explore --no-open": "explore",
    "dmst report dmst_digits": "demo",
    "dmst train digits": "demo",
    "dmst demo": "demo",
}


@pytest.mark.parametrize("line", EXTRAS)
def test_what_needs_an_extra_names_it_in_one_line(line: str, home: Home) -> None:
    done = home.dmst(line.removeprefix("dmst "))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr or done.stdout
    assert f"dmst[{EXTRAS[line]}]" in done.stderr


def test_timm_is_asked_for_in_one_line(home: Home) -> None:
    done = home.python("import dmst.integrations.timm")
    assert "dmst[timm]" in done.stderr.splitlines()[-1]


def test_a_wrong_word_gets_one_line(home: Home) -> None:
    """A name that does not fit the weights, one class, an unknown verb: what is wrong, and what would be right."""
    (home.folder / "one").mkdir()
    shutil.copytree(home.folder / "PHOTOS/cat", home.folder / "one/cat")
    for line, words in (
        ("train --data PHOTOS --model tost_cifar10 --init-from dmst_cifar100 --out runs/x", ["dmst_cifar10 or dmst_cifar100"]),
        ("train --data one", ["one class", "at least two"]),
        ("classify nowhere.jpg", ["nowhere.jpg does not exist"]),
    ):
        done = home.dmst(line)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert all(word in done.stderr for word in words), done.stderr
    assert not (home.folder / "runs/x").exists()


def test_help_is_in_groups_and_names_what_ships(home: Home) -> None:
    told = home.dmst("--help").stdout
    places = [told.index(f" {group} ") for group in ("Use", "Train", "Look inside", "Research", "Machine")]
    assert places == sorted(places)
    train = home.dmst("train --help").stdout
    assert all(name in train for name in (*shipped.SHIPPED, "--epochs", "--batch", "--size", "--lr"))


@pytest.fixture(scope="module")
def page(home: Home) -> Iterator[str]:
    """`pip install '.[explore]'`, then `dmst explore`; its address."""
    env = os.environ | {"PIP_CONSTRAINT": str(ROOT / "requirements/constraints.txt")}
    wanted = ["starlette", "uvicorn"]  # what the extra asks for: the wheel itself is there
    subprocess.run(
        [str(home.bin / "pip"), "install", "--quiet", *wanted], env=env, check=True, timeout=100, capture_output=True
    )
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
