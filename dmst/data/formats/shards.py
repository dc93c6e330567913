"""WebDataset shards: tar files in which members with one key are one sample. Read in place, at random, without unpacking.

    FOLDER/train-000000.tar, FOLDER/birds-test-0.tar, ...      the split is a word of the name (or val, valid, validation), or
    FOLDER/train/*.tar, FOLDER/test/*.tar                      of the folder, or
    FOLDER/*.tar                                               all of it is the split train
        KEY.jpg (.png, .webp, ...)  and  KEY.cls, a whole number, or KEY.json with "label"
    FOLDER/classes.txt                                         optional: a class a line, in label order

Every shard is gone through once, for where its images begin and end.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from pathlib import Path, PurePosixPath

import numpy as np

from dmst.data.formats import SPLITS, Asked, folders, lines
from dmst.data.sets import ImageSet, digest
from dmst.errors import BadFileError, MissingSplitError

IMAGES = tuple(ending[1:] for ending in folders.ENDINGS)
MOST_LABEL = 1 << 20


class ShardSet(ImageSet):
    """Pieces of tar files. Where they are is kept in arrays: a million Python objects would be copied by every worker."""

    def __init__(
        self, asked: Asked, classes: tuple[str, ...], shards: list[Path], keys: np.ndarray, numbers: np.ndarray
    ) -> None:
        self._shards, self._keys, self._numbers = shards, keys, numbers  # bytes; (n, 4): shard, offset, size, label
        mark = digest(*classes, *(shard.name for shard in shards), keys, numbers)
        super().__init__(asked.name, asked.split, classes, numbers[:, 3], fingerprint=mark)

    def where(self, index: int) -> str:
        return f"{self._shards[self._numbers[index, 0]]}, {os.fsdecode(bytes(self._keys[index]))}"

    def files(self) -> list[Path]:
        return self._shards

    def source(self, index: int) -> bytes:
        shard, offset, size, _ = self._numbers[index].tolist()
        with self._shards[shard].open("rb") as file:  # opened anew: workers must not share a place in a file
            file.seek(offset)
            return file.read(size)


def is_here(folder: Path) -> bool:
    """Tar files, and no class folders: beside those a tar is what they were unpacked from."""
    inside = [x for x in folder.iterdir() if x.is_dir() and not x.name.startswith(".")]
    names = {name for names in SPLITS.values() for name in names}
    if any(x.name not in names or folders.is_split(x) for x in inside):
        return False
    return any(folder.glob("*.tar")) or any(_shards(folder, split) for split in SPLITS)


def read(place: Path, asked: Asked) -> ShardSet:
    """The split of the shards in the folder `place`."""
    shards = _shards(place, asked.split)
    if not shards and asked.split == "train" and not _shards(place, "test"):
        shards = sorted(place.glob("*.tar"))
    if not shards:
        told = " or ".join(f"{name}-*.tar" for name in SPLITS[asked.split])
        raise MissingSplitError(f"{place} has no shards of the split {asked.split!r}: they would be called {told}.")
    keys, numbers = _indexed(shards)
    if (place / "classes.txt").is_file():
        classes = tuple(lines(place / "classes.txt"))
    else:  # the numbers themselves; those of train, for every split
        train = _shards(place, "train") if asked.split != "train" else []
        labels = (_indexed(train)[1] if train else numbers)[:, 3]
        most = int(labels.max(initial=-1))
        if most >= max(len(labels), 1):
            raise BadFileError(f"{place}: a label is {most}, and {len(labels):,} images cannot be of that many classes.")
        classes = tuple(str(label) for label in range(most + 1))
    return ShardSet(asked, classes, shards, keys, numbers)


def _shards(folder: Path, split: str) -> list[Path]:
    for name in SPLITS[split]:
        found = [x for x in folder.glob("*.tar") if name in re.split("[-_.]", x.stem)]
        found = sorted([*found, *folder.glob(f"{name}/*.tar")])
        if found:
            return found
    return []


def _indexed(shards: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    keys: list[bytes] = []
    numbers: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(shards):
        try:
            for key, (image, label) in _samples(shard).items():
                if image is None or label is None:
                    what = "image" if image is None else 'label (.cls, or .json with "label")'
                    raise BadFileError(f"{shard}: {key} has no {what} beside it. Make the shard again.")
                keys.append(os.fsencode(key))
                numbers.append((number, *image, label))
        except (tarfile.TarError, OSError, EOFError) as error:
            raise BadFileError(f"{shard} is not a sound tar file ({error}): make or copy it again.") from error
    return np.array(keys, dtype=np.bytes_), np.array(numbers, np.int64).reshape(-1, 4)


def _samples(shard: Path) -> dict[str, tuple[tuple[int, int] | None, int | None]]:
    """By key, where its image begins and how long it is, and its label."""
    found: dict[str, tuple[tuple[int, int] | None, int | None]] = {}
    with tarfile.open(shard, "r:") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            stem, _, ending = path.name.partition(".")
            if not member.isreg() or member.issparse() or not stem:
                continue
            key = str(path.with_name(stem))
            image, label = found.get(key, (None, None))
            if ending.lower() in IMAGES:
                if image is not None:
                    raise BadFileError(f"{shard}: {key} has two images. Make the shard again.")
                image = member.offset_data, member.size
            elif ending == "cls" or (ending == "json" and label is None):
                file = tar.extractfile(member)
                label = _label(shard, member.name, file.read(MOST_LABEL) if file else b"")
            found[key] = image, label
        end = tar.offset
    with shard.open("rb") as file:  # tarfile takes a damaged header for the end
        file.seek(end)
        if file.read(512) != bytes(512):
            raise BadFileError(f"{shard} is cut or damaged at byte {end:,}: what follows is no tar. Make or copy it again.")
    return found


def _label(shard: Path, name: str, raw: bytes) -> int | None:
    try:
        told = int(raw) if name.endswith(".cls") else json.loads(raw).get("label")
        if told is None or (type(told) is int and abs(told) < 1 << 31):
            return told
    except (ValueError, AttributeError, RecursionError):
        pass
    raise BadFileError(f"{shard}: {name} is not a label, a whole number.")
