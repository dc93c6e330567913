"""The pictures of pages in these documents.

dmst report && python docs/pictures.py dmst_cifar10-report.html main docs/report.png 1290
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(page: str, selector: str, out: str, height: str = "") -> None:
    """The element that `selector` names, or so many pixels of it from the top."""
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport={"width": 1100, "height": 800})
        tab.goto(Path(page).resolve().as_uri())
        box = tab.locator(selector).bounding_box()
        assert box is not None, f"{selector} is not on the page"
        tab.screenshot(path=out, full_page=True, clip=box | ({"height": float(height)} if height else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
