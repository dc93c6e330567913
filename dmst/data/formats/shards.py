"""WebDataset shards: tar files in which members with one key are one sample. Read in place, at random, without unpacking.

    FOLDER/train-000000.tar, FOLDER/birds-test-0.tar, ...      the split is a word of the name (or val, valid, validation), or
    FOLDER/*.tar                                               all of it is the split train
        KEY.jpg (.png, .webp, ...)  and  KEY.cls, a whole number
    FOLDER/classes.txt                                         optional: a class a line, in label order

Every shard is gone through once, for where its images begin and end.
"""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path, PurePosixPath

import numpy as np

from dmst.data.formats import Asked, find_split, folders, lines, reading
from dmst.data.sets import ImageSet, digest
from dmst.errors import BadFileError


class ShardSet(ImageSet):
    """Pieces of tar files. Where they are is kept in arrays: a million Python objects would be copied by every worker."""

    def __init__(
        self, asked: Asked, classes: tuple[str, ...], shards: list[Path], keys: np.ndarray, numbers: np.ndarray
    ) -> None:
        self._shards, self._keys, self._numbers = shards, keys, numbers  # bytes; (n, 4): shard, offset, size, label
        mark = digest(*classes, *(shard.name for shard in shards), keys, numbers)
        super().__init__(asked.name, asked.split, classes, numbers[:, 3], fingerprint=mark)

    def where(self, index: int) -> str:
        place = self.places[index]
        return f"{self._shards[self._numbers[place, 0]]}, {os.fsdecode(bytes(self._keys[place]))}"

    def files(self) -> list[Path]:
        return self._shards

    def source(self, index: int) -> bytes:
        shard, offset, size, _ = self._numbers[self.places[index]].tolist()
        with self._shards[shard].open("rb") as file:  # opened anew: workers must not share a place in a file
            file.seek(offset)
            return file.read(size)


def is_here(folder: Path) -> bool:
    """Tar files, and no folders: beside those a tar is what they were unpacked from."""
    return any(folder.glob("*.tar")) and not any(x.is_dir() and not x.name.startswith(".") for x in folder.iterdir())


def read(place: Path, asked: Asked) -> ShardSet:
    """The split of the shards in the folder `place`."""

    tars = sorted(place.glob("*.tar"))

    def named(name: str) -> list[Path]:
        return [tar for tar in tars if name in re.split("[-_.]", tar.stem)]

    shards = find_split(place, asked.split, named, tars)
    keys, numbers = _index(shards)
    if (place / "classes.txt").is_file():
        classes = tuple(lines(place / "classes.txt"))
    else:  # the numbers themselves; those of train, for every split
        train = named("train") if asked.split != "train" else []
        labels = (_index(train)[1] if train else numbers)[:, 3]
        classes = tuple(str(label) for label in range(len(np.unique(labels))))
    return ShardSet(asked, classes, shards, keys, numbers)


def _index(shards: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    keys: list[bytes] = []
    numbers: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(shards):
        with reading(shard):
            images, labels = _members(shard)
            if odd := sorted(images.keys() ^ labels.keys()):
                what = "label (.cls)" if odd[0] in images else "image"
                raise BadFileError(f"{shard}: {odd[0]} has no {what} beside it. Make the shard again.")
            keys += map(os.fsencode, images)
            numbers += [(number, *place, labels[key]) for key, place in images.items()]
    return np.array(keys, dtype=np.bytes_), np.array(numbers, np.int64).reshape(-1, 4)


def _members(shard: Path) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """By key, where its image begins and how long it is; and its label."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(shard, "r:") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            stem, _, ending = path.name.partition(".")
            if not stem or not member.isreg():
                continue
            key = str(path.with_name(stem))
            if f".{ending.lower()}" in folders.ENDINGS:
                images[key] = member.offset_data, member.size
            elif ending == "cls":
                labels[key] = int(tar.extractfile(member).read())  # type: ignore[union-attr]
        end = tar.offset
    with shard.open("rb") as file:  # tarfile takes a damaged header for the end
        file.seek(end)
        if file.read(512) != bytes(512):
            raise BadFileError(f"{shard} is cut or damaged at byte {end:,}: what follows is no tar. Make or copy it again.")
    return images, labels
