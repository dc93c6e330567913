"""A page of ours is well formed, holds everything it shows, and runs no script."""

from __future__ import annotations

import base64
import html.parser
import io
from pathlib import Path

from PIL import Image


class Reader(html.parser.HTMLParser):
    """Tags that close, ids, and every address that the page names."""

    VOID = frozenset({"meta", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.without_alt = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action") and value]
        self.ids += [said["id"]] if said.get("id") else []
        self.without_alt += tag == "img" and not said.get("alt")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag


def check_page(path: Path) -> Reader:
    text = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in reader.addresses)
    assert all(address[1:] in reader.ids for address in reader.addresses if address.startswith("#"))
    assert len(set(reader.ids)) == len(reader.ids)
    assert not reader.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert reader.without_alt == 0
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert "Content-Security-Policy" in text and "Undefined" not in text
    for address in (a for a in reader.addresses if a.startswith("data:")):
        Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).verify()
    return reader
