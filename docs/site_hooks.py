"""What mkdocs does to the documents: files of the repository become pages, and links that leave the documents become names.

README.md is the front page; CONTRIBUTING.md, CHANGELOG.md and the notebooks, with their outputs, are pages too. A link to code,
results or weights has nowhere to lead on a site that stands alone: its text stays, and the path beside it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(lambda found: _from_root(found), text)))
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_notebook(path)))
    return files


def _notebook(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            found = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in found:
                parts.append(f"![output](data:image/png;base64,{''.join(found['image/png'].split())})")
            else:
                parts.append(f"```text\n{''.join(found['text/plain']).rstrip()}\n```")
    return "\n\n".join([*parts, f"*This page is a notebook: [{path.name}]({path.name}).*\n"])


def _from_root(found: re.Match[str]) -> str:
    """A link of a file at the root, as seen from docs/."""
    target = found[3]
    if target.startswith(("http", "#", "mailto:")):
        return found[0]
    target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
    return f"{found[1]}[{found[2]}]({target})"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if page.file.src_uri.startswith("notebooks/") else LINK.sub(_inside, markdown)


def _inside(found: re.Match[str]) -> str:
    target = found[3]
    if not target.startswith("../"):
        return found[0]
    path, _, anchor = target.removeprefix("../").partition("#")
    if path in PAGES:
        return f"[{found[2]}]({PAGES[path]}{'#' + anchor if anchor else ''})"
    return found[2] if Path(path).name in found[2] else f"{found[2]} (`{path}`)"
