"""The report: one HTML file with everything inside. Opens offline, asks nobody for anything, runs no script.

    write_report(path, title, lead, [Section("Learning", "<p>...</p>"), ...], footer)

Helpers turn what was measured into HTML: `table`, `image`, `tabs` (one of several views, switched by radio buttons), `tiles`,
`ramp` (the colour scale of the maps). Text is escaped by them (words.html); a section's own body is HTML and is taken as it is.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from dmst import atomic
from dmst.analysis.membership import RAMP, Pixels, png
from dmst.errors import OptionError
from dmst.words import html

MOST_TABS = 64
SHOWN = (
    ",".join(f".tabs>input:nth-of-type({i}):checked~.view:nth-of-type({i})" for i in range(1, MOST_TABS + 1))
    + "{display:block}"
)


class Section(NamedTuple):
    title: str
    body: str  # HTML


def write_report(path: str | Path, title: str, lead: str, sections: Sequence[Section], footer: str = "") -> Path:
    """Write the page; returns its path. `lead` and `footer` are HTML."""
    path = Path(path)
    style = resources.files("dmst.analysis").joinpath("report.css").read_text(encoding="utf-8")
    ids = [f"s{i}" for i in range(1, len(sections) + 1)]
    contents = "".join(f'<a href="#{at}">{html(section.title)}</a>' for at, section in zip(ids, sections, strict=True))
    body = "".join(
        f'<section id="{at}"><h2>{html(section.title)}</h2>{section.body}</section>'
        for at, section in zip(ids, sections, strict=True)
    )
    heading = html(title).replace("_", "_<wbr>")  # where a phone may break it
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{html(title)}</title><style>{style}{SHOWN}</style></head><body><main>"
        f'<header><h1>{heading}</h1><div class="lead">{lead}</div></header><nav aria-label="Contents">{contents}</nav>'
        f"{body}<footer>{footer}</footer></main></body></html>\n"
    )
    return atomic.write_text(path, page)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tiles(pairs: Sequence[tuple[str, str]]) -> str:
    """Large figures with a word under each."""
    inside = "".join(f'<div class="tile"><b>{html(figure)}</b><span>{html(word)}</span></div>' for figure, word in pairs)
    return f'<div class="tiles">{inside}</div>'


def source(pixels: Pixels) -> str:
    """The picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def image(pixels: Pixels, alt: str, size: int | None = None) -> str:
    """A picture whose pixels stay squares when it is enlarged."""
    wide = f' width="{size}" height="{round(size * pixels.shape[0] / pixels.shape[1])}"' if size else ""
    return f'<img src="{source(pixels)}" alt="{html(alt)}"{wide}>'


def tabs(name: str, views: Sequence[tuple[str, str]], chosen: int = 0) -> str:
    """One of several views at a time, chosen by radio buttons: arrow keys and screen readers know them."""
    if not 1 <= len(views) <= MOST_TABS or not 0 <= chosen < len(views):
        raise OptionError(f"{len(views)} views, the {chosen}th chosen: from 1 to {MOST_TABS}, and one of them.")
    out = [f'<div class="tabs" style="--count:{len(views)}">']
    for i, (label, _) in enumerate(views):
        checked = " checked" if i == chosen else ""
        out.append(f'<input type="radio" name="{html(name)}" id="{html(name)}{i}"{checked}>')
        out.append(f'<label for="{html(name)}{i}">{html(label)}</label>')
    out += [f'<div class="view">{body}</div>' for _, body in views]
    return "".join(out) + "</div>"


def ramp(low: float, high: float, name: str, digits: int = 2) -> str:
    """The colour scale of the maps, with the numbers at its ends."""
    stops = ", ".join(f"rgb({int(r)} {int(g)} {int(b)})" for r, g, b in RAMP)
    return (
        f'<div class="ramp">{html(name)} <span>{low:.{digits}f}</span>'
        f'<i style="background:linear-gradient(90deg, {stops})"></i><span>{high:.{digits}f}</span></div>'
    )
