"""Class folders: a folder of images per class, labels in the sorted order of the names.

    FOLDER/train/CLASS/*.jpg  and  FOLDER/test/CLASS/*.jpg      (or val, valid, validation in place of test)
    FOLDER/CLASS/*.jpg                                          all of it is the split train

Hidden files and files that do not end like an image are passed over; folders inside a class folder are not looked into.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dmst.data.formats import SPLITS, Asked
from dmst.data.sets import FileSet
from dmst.errors import BadFileError, MissingSplitError
from dmst.words import short

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def read(place: Path, asked: Asked) -> FileSet:
    """The split of the folder `place`. Its classes are those of train, where there is a train."""
    train, folder = place / "train", _split_folder(place, asked.split)
    return file_set(folder, asked._replace(classes=tuple(class_folders(train if is_split(train) else folder))))


def file_set(folder: Path, asked: Asked) -> FileSet:
    """The images of the class folders in `folder`, which must be those of `asked.classes`, no fewer and no more."""
    same_classes(folder, class_folders(folder), asked.classes)
    names: list[str] = []
    sizes: list[int] = []
    labels: list[int] = []
    for label, name in enumerate(asked.classes):
        found = images_in(folder / name)
        if not found:
            raise BadFileError(
                f"{folder / name} has no images: remove this class folder, or put files in it that end in {' '.join(ENDINGS)} "
                "(folders inside it are not searched)."
            )
        names += [f"{name}/{file}" for file, _ in found]
        sizes += [size for _, size in found]
        labels += [label] * len(found)
    return FileSet(asked.name, asked.split, asked.classes, np.array(labels, np.int64), folder, names, sizes)


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in it, sorted."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except (OSError, ValueError) as error:
        raise BadFileError(f"{folder} cannot be read ({getattr(error, 'strerror', None) or error}): check the path.") from error
    if not names:
        raise BadFileError(
            f"{folder} holds no class folders: put the images of each class in a folder of its own, FOLDER/CLASS/*.jpg, or "
            "FOLDER/train/CLASS/*.jpg and FOLDER/test/CLASS/*.jpg."
        )
    return names


def images_in(folder: Path) -> list[tuple[str, int]]:
    """(name, bytes) of the images in a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry.name, entry.stat().st_size)
                for entry in entries
                if entry.name.lower().endswith(ENDINGS) and not entry.name.startswith(".") and not entry.is_dir()
            )
    except OSError as error:  # such as a link to a file that is gone: no image is dropped in silence
        raise BadFileError(
            f"{error.filename or folder} cannot be read ({error.strerror or error}): check or remove it."
        ) from error


def same_classes(where: Path, found: Iterable[str], wanted: Sequence[str]) -> None:
    """Refuse classes that are missing or unknown, by name."""
    found = set(found)
    for word, names in (("misses the class", set(wanted) - found), ("has the unknown class", found - set(wanted))):
        if names:
            told = ", ".join(map(short, sorted(names)[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise BadFileError(f"{where} {word} {told}: train and test must have the same {len(wanted)} classes.")


def _split_folder(place: Path, split: str) -> Path:
    found = [place / name for name in SPLITS[split] if is_split(place / name)]
    if found:
        return found[0]
    if split == "train" and not any(is_split(place / name) for names in SPLITS.values() for name in names):
        return place
    told = " or ".join(f"{name}/" for name in SPLITS[split])
    raise MissingSplitError(f"{place} has no split {split!r}: it needs a folder {told} with the class folders inside.")


def is_split(folder: Path) -> bool:
    """A split holds class folders; a class called train (CIFAR-100 has one) holds images."""
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)
