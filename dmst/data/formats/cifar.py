"""CIFAR-10 and CIFAR-100 as their authors publish them: a folder, or the archive it came in, unopened.

cifar-10-batches-bin/  data_batch_1..5.bin, test_batch.bin    a record: label, 1024 red, 1024 green, 1024 blue
cifar-100-binary/      train.bin, test.bin                    a record: coarse label, fine label, the same 3072 bytes

The python batches of the same authors (cifar-10-batches-py, cifar-100-python) are pickles, and refused unread.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from dmst.data.formats import Asked, Format, contents
from dmst.data.sets import ArraySet
from dmst.errors import BadFileError

SIDE = 32
PLANES = 3 * SIDE * SIDE
MOST = 1 << 28  # bytes of one batch; the largest official one, CIFAR-100 train, has 155 million
TEN = {"train": tuple(f"data_batch_{k}.bin" for k in range(1, 6)), "test": ("test_batch.bin",)}
HUNDRED = {"train": ("train.bin",), "test": ("test.bin",)}


class _Kind(NamedTuple):
    files: Mapping[str, tuple[str, ...]]
    label_bytes: int  # of a record; the last one counts


KINDS = {"cifar-10-batches-bin": _Kind(TEN, 1), "cifar-100-binary": _Kind(HUNDRED, 2)}


def form(folder: str, archive: str) -> Format:
    """The form whose files are those of `folder`, or of its archive."""
    return Format("official binary batches", _everywhere(folder, archive), partial(read, kind=folder))


def python_form(folder: str, archive: str, binary: str) -> Format:
    """The form that is known and not read."""
    return Format("python batches, which are refused", _everywhere(folder, archive), partial(_refuse, binary=binary))


def _everywhere(*places: str) -> dict[str, tuple[str, ...]]:
    return {"train": places, "test": places}


def _refuse(place: Path, asked: Asked, *, binary: str) -> ArraySet:
    raise BadFileError(
        f"{place} holds python batches, which are pickles: refused, for reading a pickle can run code. "
        f"Get the binary ones, {binary}, with `dmst data fetch {asked.name}`."
    )


def _parse(raw: bytes, name: str, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    record = label_bytes + PLANES
    if not raw or len(raw) % record:
        raise BadFileError(
            f"{name} has {len(raw):,} bytes, not whole records of {record}: it is cut or foreign. Copy it again."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return records[:, label_bytes - 1], records[:, label_bytes:]


def read(place: Path, asked: Asked, *, kind: str) -> ArraySet:
    """The batches of a split, one after the other, from a folder or an archive."""
    files, label_bytes = KINDS[kind]
    names = files[asked.split]
    batches = _from_folder(place, names) if place.is_dir() else _from_archive(place, names)
    parts = [_parse(batches[name], f"{place}, {name}" if place.is_file() else str(place / name), label_bytes) for name in names]
    labels = np.concatenate([labels for labels, _ in parts]).astype(np.int64)
    images = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
    start = 0
    for _, planes in parts:
        images[start : start + len(planes)] = planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        start += len(planes)
    return ArraySet(asked.name, asked.split, asked.classes, labels, images)


def _from_folder(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    _nothing_missing(folder, [name for name in names if not (folder / name).is_file()])
    return {name: contents(folder / name, MOST) for name in names}


def _from_archive(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read in memory: nothing is unpacked onto the disk, so no name in the archive matters but the last part of it."""
    found: dict[str, bytes] = {}
    try:
        with gzip.open(archive) as plain:
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    file = tar.extractfile(member) if name in names and member.isreg() else None
                    if file is not None and member.size > MOST:
                        raise BadFileError(f"{archive}: {member.name} is said to have {member.size:,} bytes: not a batch.")
                    if file is not None:
                        found[name] = file.read()
            while plain.read(1 << 20):  # to the end, where gzip compares its checksum
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BadFileError(f"{archive} cannot be read ({error}): it is cut or damaged. Copy it again.") from error
    _nothing_missing(archive, [name for name in names if name not in found])
    return found


def _nothing_missing(place: Path, missing: list[str]) -> None:
    if missing:
        raise BadFileError(f"{place} misses {', '.join(missing)}: copy the official files again.")
