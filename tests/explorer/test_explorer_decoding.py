"""Pictures that nobody vouches for: the child has no torch, keeps to its limits, and the next picture finds another child."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from dmst.data import images
from dmst.errors import BadImageError
from dmst.explorer import decoding
from dmst.explorer.decoding import Decoder


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    made = Decoder()
    yield made
    made.close()


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_the_child_has_no_torch() -> None:
    code = "import sys, dmst.explorer.decoding; print(*sorted({'torch', 'starlette', 'typer', 'PIL'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["PIL"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_pixels_are_those_of_the_one_door(decoder: Decoder, kind: str) -> None:
    raw = encoded(noise(31, 47), kind)
    for grey in (False, True):
        found = decoder.decode(raw, grey=grey)
        assert found.dtype == np.uint8 and np.array_equal(found, images.decode(raw, grey=grey))


def test_a_refusal_says_why_and_costs_nothing_else(decoder: Decoder) -> None:
    child = decoder._child
    with pytest.raises(BadImageError, match="it is empty"):
        decoder.decode(b"")
    with pytest.raises(BadImageError, match="it is not a JPEG"):
        decoder.decode(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    assert decoder.decode(encoded(noise(3, 5))).shape == (3, 5, 3) and decoder._child is child


def test_a_picture_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child reads a picture of so many bytes, and they never come."""
    monkeypatch.setattr(decoding, "ASKED", type("Late", (), {"pack": staticmethod(lambda grey, n: b"\0\0\0\1\0")}))
    slow = Decoder(seconds=0.4)
    try:
        start = time.monotonic()
        with pytest.raises(BadImageError, match=r"more than 0.4 s or too much memory"):
            slow.decode(b"x")
        assert 0.3 < time.monotonic() - start < 5 and slow._child.poll() is not None
        monkeypatch.undo()
        slow.seconds = 20
        assert slow.decode(encoded(noise(3, 5))).shape == (3, 5, 3)
    finally:
        slow.close()


def test_memory_is_limited() -> None:
    """5000 x 5000 needs 75 MB a copy, which a child of 250 MiB in all has not; with the real limit it is read."""
    raw = encoded(np.zeros((5000, 5000, 3), np.uint8))
    small = Decoder(memory=250 * 2**20)
    try:
        with pytest.raises(BadImageError):
            small.decode(raw)
    finally:
        small.close()
    real = Decoder(seconds=60)
    try:
        assert real.decode(raw).shape == (5000, 5000, 3)
    finally:
        real.close()


def test_the_child_can_write_no_file_and_ends_with_its_parent() -> None:
    child = Decoder()
    limits = _limits(child._child.pid)
    assert limits["Max file size"] == "0" and limits["Max address space"] == str(decoding.MEMORY)
    assert child._child.stdin is not None
    child._child.stdin.close()
    assert child._child.wait(20) == 0
    child.close()


def _limits(pid: int) -> dict[str, str]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/limits") as file:
            found = {line[:26].strip(): line[26:].split()[0] for line in file}
        if found["Max file size"] == "0":
            return found
        time.sleep(0.05)
    return found
