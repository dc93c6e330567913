"""Packed sheets: a split in one zip or two, as contact sheets of small images or as one blob of larger ones.

    info.json                  dataset, split, classes, count N, size S, cols C, layout
    labels.npy                 (N,)
    images/000.jpg, ...        layout "sheets": C cells across, each S x S; left to right, top to bottom, on to the next sheet
    images.bin, offsets.npy    layout "one image per blob": N encoded images end to end; offsets (N + 1,)
    masks/000.png, ...         sheets of masks, Pets alone

The sha256 of each zip is compared first, so what is decoded is what was packed; sizes are bounded all the same.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmst.data import images as door
from dmst.data.formats import Asked, Format, contents
from dmst.data.sets import ArraySet, digest, trimap
from dmst.errors import BadFileError

MOST_BYTES = 1 << 28  # of a zip, and of one member of it
MOST_PIXELS = 1 << 31  # of a whole split, all channels
THREADS = 4  # Pillow decodes without Python's lock


class Pack(NamedTuple):
    """The zips of one split, in order, by sha256; and what a result must say beside its name."""

    files: Mapping[str, str]
    variant: str = ""


class _Zip(NamedTuple):
    """One zip, decoded as far as its small members go."""

    path: Path
    archive: zipfile.ZipFile
    classes: tuple[str, ...]
    total: int
    size: int
    columns: int
    labels: np.ndarray


def form(packs: Mapping[str, Pack]) -> Format:
    return Format("packed sheets", {split: tuple(pack.files) for split, pack in packs.items()}, partial(read, packs=packs))


def read(place: Path, asked: Asked, *, packs: Mapping[str, Pack]) -> ArraySet:
    """The split whose zips lie beside `place`, one of them."""
    pack = packs[asked.split]
    missing = [name for name in pack.files if not (place.parent / name).is_file()]
    if missing:
        raise BadFileError(f"{place.name} is in {place.parent} without {', '.join(missing)}: {asked.split} needs both.")
    zips = [_opened(place.parent / name, sha256, asked) for name, sha256 in pack.files.items()]
    first, total = zips[0], sum(z.total for z in zips)
    if any((z.size, z.classes) != (first.size, first.classes) for z in zips):
        raise BadFileError(f"{first.path} and {zips[-1].path} differ in size or classes: they are not halves of one split.")
    if total * first.size**2 * 3 > MOST_PIXELS:
        raise BadFileError(f"{first.path} is said to hold {total:,} images of {first.size} x {first.size}: more than fits.")
    images = np.empty((total, first.size, first.size, 3), np.uint8)
    masks = np.empty(images.shape[:3], np.uint8) if any(_named(z, "masks/") for z in zips) else None
    start = 0
    for z in zips:
        stop = start + z.total
        if _named(z, "images/"):
            _from_sheets(z, "images/", images[start:stop])
        else:
            _from_blob(z, images[start:stop])
        if masks is not None:
            _from_sheets(z, "masks/", masks[start:stop])
        start = stop
    return ArraySet(
        asked.name,
        asked.split,
        asked.classes or first.classes,
        np.concatenate([z.labels for z in zips]),
        images,
        masks=masks,
        fingerprint=digest(*pack.files.values()),
        variant=pack.variant,
    )


def _opened(path: Path, sha256: str, asked: Asked) -> _Zip:
    raw = contents(path, MOST_BYTES)
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise BadFileError(f"{path} is damaged or another file: its sha256 is {found}, not {sha256}. Copy it again.")
    return _reading(path, lambda: _described(path, zipfile.ZipFile(io.BytesIO(raw)), asked))


def _described(path: Path, archive: zipfile.ZipFile, asked: Asked) -> _Zip:
    info = json.loads(_member(archive, "info.json"))
    count, size, columns = (info[key] for key in ("count", "size", "cols"))
    if not all(type(x) is int and 0 < x < 1 << 24 for x in (count, size, columns)):
        raise ValueError(f"count, size and cols are {count!r}, {size!r}, {columns!r}: whole numbers above 0")
    classes = info["classes"]
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("classes is not a list of names")
    if asked.classes and tuple(classes) != asked.classes:
        raise ValueError(f"its classes are not those of {asked.name}")
    labels = _array(archive, "labels.npy")
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ValueError(f"labels.npy is {labels.dtype} {labels.shape}, and info.json says {count} images")
    return _Zip(path, archive, tuple(classes), count, size, columns, labels.astype(np.int64))


def _from_sheets(z: _Zip, prefix: str, out: np.ndarray) -> None:
    """Fill `out`, (n, s, s) or (n, s, s, 3), from the sheets under `prefix`."""
    grey, size, filled = out.ndim == 3, z.size, 0

    def cells(name: str) -> np.ndarray:
        where = f"{z.path}, {name}"
        sheet = door.decode(_reading(z.path, lambda: _member(z.archive, name)), where, grey=grey)
        height, width, channels = sheet.shape
        if width != z.columns * size or height % size:
            raise BadFileError(f"{where} is {width} x {height}: not {z.columns} cells of {size} across, or cut through one.")
        cut = sheet.reshape(height // size, size, z.columns, size, channels).swapaxes(1, 2).reshape(-1, size, size, channels)
        return cut[..., 0] if grey else cut

    for part in _side_by_side(cells, _named(z, prefix)):
        part = part[: z.total - filled]
        out[filled : filled + len(part)] = part
        filled += len(part)
    if filled < z.total:
        raise BadFileError(f"{z.path}: {prefix} holds {filled:,} cells, and info.json says {z.total:,} images.")
    if grey:
        trimap(out, f"{z.path}, {prefix}")


def _from_blob(z: _Zip, out: np.ndarray) -> None:
    blob, offsets = _reading(
        z.path, lambda: (_member(z.archive, "images.bin"), _array(z.archive, "offsets.npy").astype(np.int64))
    )
    right = offsets.shape == (z.total + 1,) and offsets[0] == 0 and offsets[-1] == len(blob)
    if not right or (np.diff(offsets) <= 0).any():
        raise BadFileError(f"{z.path}: offsets.npy does not cut images.bin ({len(blob):,} bytes) into {z.total:,} images.")

    def put(index: int) -> None:
        where = f"{z.path}, image {index}"
        image = door.decode(blob[offsets[index] : offsets[index + 1]], where)
        if image.shape != out.shape[1:]:
            raise BadFileError(f"{where} is {image.shape[1]} x {image.shape[0]}: info.json says {z.size} x {z.size}.")
        out[index] = image

    for _ in _side_by_side(put, range(z.total)):
        pass


def _named(z: _Zip, prefix: str) -> list[str]:
    return sorted(name for name in z.archive.namelist() if name.startswith(prefix) and not name.endswith("/"))


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """One member in memory; a zip cannot give more than the size it states, which is bounded here."""
    stated = archive.getinfo(name).file_size
    if stated > MOST_BYTES:
        raise ValueError(f"{name} is said to have {stated:,} bytes")
    return archive.read(name)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    return np.lib.format.read_array(io.BytesIO(_member(archive, name)), allow_pickle=False)


def _reading(path: Path, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except BadFileError:
        raise
    except Exception as error:  # zipfile, zlib, json and numpy have a dozen types between them
        reason = f"no {error}" if isinstance(error, KeyError) else error or type(error).__name__
        raise BadFileError(f"{path} is not a packed split: {reason}.") from error


def _side_by_side(act: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(act, items)
