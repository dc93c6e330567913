"""Class folders: a folder of images per class, labels in the sorted order of the names.

    FOLDER/train/CLASS/*.jpg  and  FOLDER/test/CLASS/*.jpg      (or val, valid, validation in place of test)
    FOLDER/CLASS/*.jpg                                          all of it is the split train

Hidden files and files that do not end like an image are passed over; folders inside a class folder are not looked into.
"""

from __future__ import annotations

import os
from pathlib import Path

from dmst.data.formats import Asked, file_set, find_split
from dmst.data.sets import FileSet
from dmst.errors import BadFileError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def read(place: Path, asked: Asked) -> FileSet:
    """The split of the folder `place`. Its classes are those of train, where there is a train."""
    folder = find_split(place, asked.split, lambda name: place / name if is_split(place / name) else None, place)
    train = place / "train" if is_split(place / "train") else folder
    return read_classes(folder, asked._replace(classes=class_folders(train)))


def read_classes(folder: Path, asked: Asked) -> FileSet:
    """The images of the class folders in `folder`."""
    rows = [(f"{kind}/{name}", kind) for kind in class_folders(folder) for name in _images(folder / kind)]
    return file_set(asked, folder, rows, folder)


def class_folders(folder: Path) -> tuple[str, ...]:
    """The names of the folders in it, sorted."""
    with os.scandir(folder) as entries:
        names = tuple(sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()))
    if not names:
        raise BadFileError(
            f"{folder} holds no class folders: put the images of each class in a folder of its own, FOLDER/CLASS/*.jpg, or "
            "FOLDER/train/CLASS/*.jpg and FOLDER/test/CLASS/*.jpg."
        )
    return names


def is_split(folder: Path) -> bool:
    """A split holds class folders; a class called train (CIFAR-100 has one) holds images."""
    return folder.is_dir() and any(x.is_dir() and not x.name.startswith(".") for x in folder.iterdir())


def _images(folder: Path) -> list[str]:
    """The names of the images in a folder, sorted."""
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".") and not entry.is_dir()]
    names = sorted(entry.name for entry in shown if entry.name.lower().endswith(ENDINGS))
    if not names:
        raise BadFileError(
            f"{folder} has no images: remove this class folder, or put files in it that end in {' '.join(ENDINGS)} "
            "(folders inside it are not searched)."
        )
    return names
