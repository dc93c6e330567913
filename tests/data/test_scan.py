"""The scan before a run: every bad image by name, the same answer with and without workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmst.data import scan as scanning
from dmst.data.scan import scan_all
from dmst.data.sets import ArraySet, FileSet, ImageSet, subset
from dmst.errors import BadImageError, OptionError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # from Python 3.12 on


def scan(image_set: ImageSet, *, cache: Path | None = None, **options: Any) -> frozenset[int]:
    """The indices of the bad images of one set."""
    return frozenset(scan_all({"": image_set}, caches={"": cache}, **options)[""].bad)


def folder_of(root: Path, count: int, bad: dict[int, bytes] | None = None) -> FileSet:
    """Pictures 000.png, ..., those of `bad` with these bytes."""
    root.mkdir()
    picture = root / "good"
    Image.new("RGB", (3, 2), (7, 8, 9)).save(picture, "PNG")
    good = picture.read_bytes()
    picture.unlink()
    names = [f"{i:03d}.png" for i in range(count)]
    for i, name in enumerate(names):
        (root / name).write_bytes((bad or {}).get(i, good))
    sizes = [(root / name).stat().st_size for name in names]
    return FileSet("birds", "train", ("one",), np.zeros(count, np.int64), root, names, sizes)


class Counting(ImageSet):
    """Tells how often an image was read."""

    def __init__(self, base: ImageSet) -> None:
        super().__init__(base.name, base.split, base.classes, base.labels, fingerprint=base.fingerprint)
        self.base, self.reads = base, 0

    def read(self, index: int) -> np.ndarray:
        self.reads += 1
        return self.base.read(index)

    def source(self, index: int) -> bytes | Path:
        return self.base.source(index)

    def files(self) -> Sequence[Path]:
        return self.base.files()

    def where(self, index: int) -> str:
        return self.base.where(index) if hasattr(self, "base") else ""


@pytest.mark.parametrize("workers", [0, 2])
def test_all_bad_files_in_one_error(tmp_path: Path, workers: int) -> None:
    images = folder_of(tmp_path / "set", 150, {3: b"", 70: b"GIF89a", 149: b"<html>"})
    with pytest.raises(BadImageError) as error:
        scan(images, workers=workers)
    told = str(error.value).splitlines()
    assert told[0] == "birds train: 3 of 150 images cannot be used:"
    assert told[1] == f"  {tmp_path / 'set' / '003.png'}: it is empty"
    assert [line.split(":")[0].strip()[-7:] for line in told[1:4]] == ["003.png", "070.png", "149.png"]
    assert "--on-bad-image skip" not in told[4] and len(told) == 5


def test_two_hundred_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    images = folder_of(tmp_path / "set", 231, dict.fromkeys(range(205), b"no"))
    with pytest.raises(BadImageError) as error:
        scan(images)
    told = str(error.value).splitlines()
    assert told[0].endswith("205 of 231 images cannot be used:") and told[201] == "  and 5 more"
    assert "199.png" in told[200] and "200.png" not in str(error.value)


def test_skipping_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scanning.SHARE == 1000
    monkeypatch.setattr(scanning, "SHARE", 50)  # pictures that a test need not write
    images = folder_of(tmp_path / "set", 150, {3: b"", 70: b"", 149: b""})
    assert scan(images, on_bad="skip") == {3, 70, 149}
    assert scan(subset(images, range(60, 80)), on_bad="skip") == {10}  # of a small set, one
    with pytest.raises(BadImageError, match="2 of 99 images cannot be used; 1 may be left out"):
        scan(subset(images, range(99)), on_bad="skip")
    with pytest.raises(BadImageError, match="1 of 1 images"):  # nothing would be left
        scan(subset(images, [3]), on_bad="skip")
    with pytest.raises(OptionError, match="on_bad"):
        scan(images, on_bad="ignore")


def test_a_resume_does_not_look_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = Counting(folder_of(tmp_path / "set", 20, {5: b""}))
    cache = tmp_path / "run" / "scan.json"
    assert scan(images, on_bad="skip", cache=cache) == {5} and images.reads == 20
    assert scan(images, on_bad="skip", cache=cache) == {5} and images.reads == 20
    with pytest.raises(BadImageError, match="it is empty"):  # what may be left out may not be used
        scan(images, cache=cache)
    assert images.reads == 20
    monkeypatch.setattr("PIL.__version__", "99.0")  # which may judge otherwise
    assert scan(images, on_bad="skip", cache=cache) == {5} and images.reads == 40
    path = images.source(3)
    os.utime(path, (1e9, 1e9))  # something was done to it
    assert scan(images, on_bad="skip", cache=cache) == {5} and images.reads == 60


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: text.replace('"5"', '"five"'),
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_cache_is_not_believed(tmp_path: Path, damage: Any) -> None:
    images, cache = Counting(folder_of(tmp_path / "set", 9, {5: b""})), tmp_path / "scan.json"
    scan(images, on_bad="skip", cache=cache)
    whole = cache.read_text()
    assert damage(whole) != whole
    cache.write_text(damage(whole))
    assert scan(images, on_bad="skip", cache=cache) == {5} and images.reads == 18
    assert cache.read_text() == whole


def test_what_is_decoded_already_is_not_looked_at() -> None:
    images = ArraySet("a", "train", ("x",), np.zeros(5, np.int64), np.zeros((5, 2, 3, 3), np.uint8))
    images.read = pytest.fail  # type: ignore[assignment, method-assign]
    assert scan(images, workers=2) == frozenset()


def test_another_error_counts_as_bad(tmp_path: Path) -> None:
    images = folder_of(tmp_path / "set", 4)
    images.read = lambda index: [][index]  # type: ignore[assignment, method-assign]
    with pytest.raises(BadImageError, match=r"4 of 4 images.*\n.*000\.png: IndexError: list index out of range"):
        scan(images)
