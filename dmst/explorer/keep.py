"""The present view as one static HTML file: the page's own style and scripts, with the answers inside in place of the server.

page(start, views, state)   answers of the server, each view {look, rates, picture: PNG, seen: PNG}, and the page's own state

The scripts are the page's, joined, with kept.js where net.js was. The file asks for nothing: its policy allows the one script
and the one style by their hashes, and no address at all. Everything that came from elsewhere is data, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

SCRIPTS = ("state.js", "draw.js", "charts.js", "kept.js", "paint.js", "panel.js", "app.js")
STYLE = '<link rel="stylesheet" href="/static/style.css">'
SCRIPT = '<script type="module" src="/static/app.js"></script>'


def page(start: Mapping[str, Any], views: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> str:
    shown = {view["look"]["model"] for view in views}
    told = {
        "version": start["version"],
        "models": [each for each in start["models"] if each["id"] in shown],
        "views": [{"look": view["look"], "rates": view["rates"]} for view in views],
        "picture": _letters(views[0]["picture"]),
        "seen": {view["look"]["model"]: _letters(view["seen"]) for view in views},
        "state": state,
    }
    style, script = _text("style.css"), joined()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    html = _text("index.html")
    for old, new in (
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n  <meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ("<title>dmst explore</title>", "<title>dmst explore: a saved view</title>"),
        (STYLE, f"<style>{style}</style>"),
        (f"  {SCRIPT}\n", ""),
        ("</body>", f'<script type="application/json" id="kept">{as_data(told)}</script>\n<script>{script}</script>\n</body>'),
    ):
        assert html.count(old) == 1, old
        html = html.replace(old, new)
    return html


def joined() -> str:
    """The modules as one script: their names are all different, so imports and exports can go."""
    whole = "\n".join(re.sub(r"^import .*;\n|^export (?=\w)", "", _text(name), flags=re.MULTILINE) for name in SCRIPTS)
    return f'"use strict";\n{{\n{whole}}}\n'


def as_data(value: Any) -> str:
    """JSON that can stand inside a script element: no tag, no comment, no line end of JavaScript."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(name: str) -> str:
    return (files("dmst.explorer") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _letters(data: bytes) -> str:
    return base64.b64encode(data).decode()
