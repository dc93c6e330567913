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

from dmst.data.formats import SPLITS, Asked, folders, lines
from dmst.data.sets import ImageSet, digest
from dmst.errors import BadFileError, MissingSplitError

IMAGES = tuple(ending[1:] for ending in folders.ENDINGS)


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
    """Tar files, and no folders: beside those a tar is what they were unpacked from."""
    return any(folder.glob("*.tar")) and not any(x.is_dir() and not x.name.startswith(".") for x in folder.iterdir())


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
    tars = sorted(folder.glob("*.tar"))
    found = ([x for x in tars if name in re.split("[-_.]", x.stem)] for name in SPLITS[split])
    return next(filter(None, found), [])


def _indexed(shards: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    keys: list[bytes] = []
    numbers: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(shards):
        try:
            images, labels = _members(shard)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise BadFileError(f"{shard} is not a sound tar file ({error}): make or copy it again.") from error
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
            key = f"{path.parent / stem}"
            if not member.isreg() or member.issparse() or not stem:
                continue
            if ending.lower() in IMAGES:
                if key in images:
                    raise BadFileError(f"{shard}: {key} has two images. Make the shard again.")
                images[key] = member.offset_data, member.size
            elif ending == "cls":
                raw = tar.extractfile(member).read(20).strip()  # type: ignore[union-attr]
                if not raw.isdigit() or len(raw) > 9:
                    raise BadFileError(f"{shard}: {member.name} is not a label, a whole number.")
                labels[key] = int(raw)
        end = tar.offset
    with shard.open("rb") as file:  # tarfile takes a damaged header for the end
        file.seek(end)
        if file.read(512) != bytes(512):
            raise BadFileError(f"{shard} is cut or damaged at byte {end:,}: what follows is no tar. Make or copy it again.")
    return images, labels
