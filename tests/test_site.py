"""The documentation as a site: built without a warning, whole, of nothing from outside; and its search finds things."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import dmst

ROOT = Path(dmst.__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=100)
    assert said.returncode == 0 and "WARNING" not in said.stderr, said.stderr
    return folder


@pytest.mark.process
def test_every_document_is_a_page(site: Path) -> None:
    pages = {path.stem for path in site.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "contributing", "changelog"} <= pages
    assert not list(site.glob("*.py"))
    menu = (site / "index.html").read_text()
    assert all(f'href="{page}.html"' in menu for page in pages - {"404", "index"}), "a page that the menu does not name"
    notebooks = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
    assert len(notebooks) == 2 and all(f'href="notebooks/{path.stem}.html"' in menu for path in notebooks)
    assert "data:image/png;base64," in (site / "notebooks/look_inside.html").read_text()
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', text), path.name
        assert 'href="../../' not in text and ('href="../' not in text or path.parent != site), path.name
        assert "None" not in re.findall(r"<title>(.*?)</title>", text)[0], path.name


@pytest.mark.process
def test_the_page_of_the_interface_has_signatures_and_words(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in re.findall(r"^::: (\S+)", (ROOT / "docs/api.md").read_text(), re.MULTILINE):
        assert f'id="{name}' in text, name
    assert "A network by name, with fresh weights" in text


@pytest.mark.process
@pytest.mark.parametrize("path", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_makes(path: Path) -> None:
    """Each cell still makes the kinds of output that are in the file; `jupyter execute --inplace FILE` writes them anew."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    fresh = nbclient.execute(nbformat.from_dict(kept), cwd=str(path.parent), timeout=100)

    def kinds(notebook: dict) -> list[set[str]]:
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [{kind for output in cell["outputs"] for kind in output.get("data", [output.get("name")])} for cell in cells]

    assert all(mine <= made for mine, made in zip(kinds(kept), kinds(fresh), strict=True)) and any(kinds(kept))


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
def test_the_search_finds_pages_and_asks_nobody_else(address: str) -> None:
    playwright, asked = pytest.importorskip("playwright.sync_api", reason="needs playwright"), list[str]()
    with playwright.sync_playwright() as driver:
        page = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/index.html")
        page.fill(".md-search__input", "sparsemax")
        page.wait_for_selector(".md-search-result__item")
        assert all(url.startswith((address, "data:", "blob:")) for url in asked)
