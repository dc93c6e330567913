"""Pictures to begin with, drawn by formulas: no image of any data set is in the package.

draw(name)      (256, 256, 3) uint8, x to the right and y down, both from -1 to 1
paint           canvas <- colour where a distance is below 0, with an edge of one pixel
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SIZE = 256
Field = NDArray[np.float64]  # (h, w), or (h, w, 3) of colours
Y, X = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]


def draw(name: str) -> NDArray[np.uint8]:
    return np.round(255 * EXAMPLES[name]().clip(0, 1)).astype(np.uint8)


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.round(pixels @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)[..., None]


def _ring() -> Field:
    return _paint(_plain(0.93, 0.93, 0.9), abs(_disc(0, 0, 0.55)) - 0.16, (0.85, 0.12, 0.1))


def _ship() -> Field:
    picture = _fade((0.55, 0.75, 0.95), (0.85, 0.92, 1.0))
    picture = _paint(picture, 0.3 - Y + 0.01 * np.sin(40 * X), (0.1, 0.3, 0.5))
    hull = np.maximum.reduce([0.12 - Y, Y - 0.42, abs(X) - 0.75 + 0.5 * (Y - 0.12)])
    for part, colour in (
        (hull, (0.25, 0.1, 0.1)),
        (_box(0.05, -0.02, 0.35, 0.14), (0.95, 0.95, 0.95)),
        (_box(0.1, -0.3, 0.09, 0.15), (0.8, 0.15, 0.1)),
    ):
        picture = _paint(picture, part, colour)
    return picture


def _car() -> Field:
    picture = _paint(_fade((0.7, 0.8, 0.9), (0.9, 0.92, 0.95)), 0.35 - Y, (0.45, 0.45, 0.47))
    roof = np.maximum.reduce([-0.35 - Y, Y - 0.05, abs(X) - 0.45 - 0.4 * (Y + 0.05)])
    parts = [(roof, (0.75, 0.1, 0.1)), (_box(0, 0.2, 0.8, 0.2), (0.8, 0.12, 0.12)), (roof + 0.07, (0.7, 0.85, 0.95))]
    for at in (-0.45, 0.45):
        parts += [(_disc(at, 0.42, 0.2), (0.08, 0.08, 0.08)), (_disc(at, 0.42, 0.09), (0.75, 0.75, 0.75))]
    for part, colour in parts:
        picture = _paint(picture, part, colour)
    return picture


def _plane() -> Field:
    picture = _fade((0.35, 0.6, 0.95), (0.8, 0.9, 1.0))
    along, across = X * np.cos(0.3) - Y * np.sin(0.3), X * np.sin(0.3) + Y * np.cos(0.3)
    body = np.hypot(along / 0.85, across / 0.12) - 1
    wing = np.maximum(abs(across) - 0.6, abs(along + 0.45 * abs(across)) - 0.14)
    tail = np.maximum(abs(across) - 0.25, abs(along + 0.72 + 0.4 * abs(across)) - 0.07)
    for part, colour in ((wing, (0.8, 0.82, 0.85)), (tail, (0.75, 0.2, 0.2)), (0.2 * body, (0.97, 0.97, 0.97))):
        picture = _paint(picture, part, colour)
    return picture


def _seven() -> Field:
    stroke = np.minimum(_box(0, -0.6, 0.45, 0.09), _line((0.38, -0.6), (-0.1, 0.75)) - 0.1)
    return _paint(_plain(0, 0, 0), stroke, (1, 1, 1))


def _stripes() -> Field:
    wave = np.sin(14 * (X * np.cos(0.6) + Y * np.sin(0.6)))
    return _paint(_plain(0.95, 0.8, 0.2), -wave / 14, (0.1, 0.1, 0.3))


EXAMPLES: dict[str, Callable[[], Field]] = {
    "ship": _ship,
    "car": _car,
    "airplane": _plane,
    "red ring": _ring,
    "stripes": _stripes,
    "seven": _seven,
}


# --- pieces: distances are below 0 inside ------------------------------------------------------------------------------


def _plain(*colour: float) -> Field:
    return np.broadcast_to(np.array(colour), (SIZE, SIZE, 3))


def _fade(top: tuple[float, ...], bottom: tuple[float, ...]) -> Field:
    down = (Y[..., None] + 1) / 2
    return (1 - down) * np.array(top) + down * np.array(bottom)


def _paint(canvas: Field, distance: Field, colour: tuple[float, ...]) -> Field:
    inside = (0.5 - distance * SIZE / 2).clip(0, 1)[..., None]
    return (1 - inside) * canvas + inside * np.array(colour)


def _disc(x: float, y: float, radius: float) -> Field:
    return np.hypot(X - x, Y - y) - radius


def _box(x: float, y: float, wide: float, tall: float) -> Field:
    return np.maximum(abs(X - x) - wide, abs(Y - y) - tall)


def _line(start: tuple[float, float], end: tuple[float, float]) -> Field:
    """Distance from a segment."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    along = (((X - start[0]) * dx + (Y - start[1]) * dy) / (dx * dx + dy * dy)).clip(0, 1)
    return np.hypot(X - start[0] - along * dx, Y - start[1] - along * dy)
