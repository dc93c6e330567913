"""Reports: HTML pages that hold everything they show. They work offline, ask nobody for anything and run no script.

    write(path, "network.html", title="...", ...)

templates/report.html is the layout of every page and parts.html its tables, charts and pictures; network.html and rates.html
are the words of a page. Names of classes and files come from outside: templates escape every value, and what is not
printable is shown as it is in a terminal (words.visible).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dmst import atomic
from dmst.analysis import charts
from dmst.analysis.membership import RAMP, Pixels, png
from dmst.words import short, visible

NUMBER = re.compile(r"[+-]?\d.*|-|")  # also an empty cell


def data_address(pixels: Pixels) -> str:
    """The picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def numeric(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns of a table hold numbers alone: these stand to the right."""
    return [all(NUMBER.fullmatch(str(cell)) for cell in column) for column in zip(*rows, strict=True)]


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else visible(value)


templates = Environment(
    loader=PackageLoader("dmst.analysis"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
)
templates.filters |= {"data_address": data_address, "short": short}
templates.globals |= {"axes": charts.axes, "chart_size": (charts.WIDTH, charts.HEIGHT), "numeric": numeric}
templates.globals["ramp_colours"] = [tuple(map(int, colour)) for colour in RAMP]


def render(template: str, **values: Any) -> str:
    return templates.get_template(template).render(contents=[], **values)


def write(path: str | Path, template: str, **values: Any) -> Path:
    """Fill a template and write the page; returns its path."""
    return atomic.write_text(Path(path), render(template, **values))
