"""The pictures to begin with: the photographs that ship, and a drawn digit for networks that read digits."""

from __future__ import annotations

import io
from typing import NamedTuple

from PIL import Image, ImageDraw

from dmst.photos import PHOTOS, photo


class Example(NamedTuple):
    name: str
    credit: str
    raw: bytes  # of an image file
    digit: bool = False


def examples() -> list[Example]:
    """The cat first: it is what the page shows at the start."""
    photos = [Example(name, credit, photo(name).read_bytes()) for name, credit in PHOTOS.items()]
    return [*photos, Example("seven", "a drawn digit, for networks that read digits", _seven(), digit=True)]


def _seven() -> bytes:
    canvas, out = Image.new("L", (256, 256)), io.BytesIO()
    ImageDraw.Draw(canvas).line([(64, 32), (192, 32), (96, 240)], fill=255, width=42, joint="curve")
    canvas.save(out, "PNG")
    return out.getvalue()
