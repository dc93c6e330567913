"""How datasets lie on disk: one function per layout reads a split, `read(place, asked)`.

    arrays.py         CIFAR, SVHN, digits: one array
    folders.py        class folders
    lists.py          Pets, Food-101, Tiny-ImageNet, ImageNet: files named by a list
    huggingface.py    Arrow tables                                shards.py    tar files

Whatever a reader stumbles over leaves `reading` as one BadFileError, which names the file and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dmst.data.sets import FileSet
from dmst.errors import BadFileError, DmstError, MissingSplitError
from dmst.words import short, visible

# the splits by the names that users write, and what files and folders call them: the first that is there is taken
SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val", "valid", "validation")}
Found = TypeVar("Found")


class Asked(NamedTuple):
    """What is wanted: name and split of the dataset, its class names (none where only the files know them)."""

    name: str
    split: str
    classes: tuple[str, ...] = ()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Any error as a BadFileError: the disk, numpy, scipy, tarfile and Arrow have a dozen types between them."""
    try:
        yield
    except DmstError:
        raise
    except Exception as error:
        file = visible(getattr(error, "filename", None) or path)
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise BadFileError(
            f"{file} cannot be read ({reason}): it is missing, damaged or of another format. Copy or make it again."
        ) from error


def lines(path: Path) -> list[str]:
    """The lines of a text file, without blank ones and their ends."""
    with reading(path):
        return [line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip()]


def find_split(place: Path, split: str, find: Callable[[str], Found | None], whole: Found | None) -> Found:
    """What `find` finds under a name of the split. Where there is no split at all, the whole is train."""
    for name in SPLITS[split]:
        if found := find(name):
            return found
    if split == "train" and whole and not any(find(name) for names in SPLITS.values() for name in names):
        return whole
    raise MissingSplitError(f"{place} has no split {split!r}: it would be called {' or '.join(SPLITS[split])}.")


def file_set(asked: Asked, root: Path, rows: Iterable[tuple[str, str]], told: Path, **more: Any) -> FileSet:
    """The images of `rows`, (file below `root`, class), as `told` lists them; masks and boxes as of FileSet."""
    label_of = {name: label for label, name in enumerate(asked.classes)}
    names, labels, sizes = [], [], []
    for name, kind in rows:
        if kind not in label_of:
            raise BadFileError(
                f"{told} has the unknown class {short(kind)}: train and test must have the same {len(label_of)} classes."
            )
        names.append(name)
        labels.append(label_of[kind])
        sizes.append(os.stat(f"{root}/{name}").st_size)
    return FileSet(asked.name, asked.split, asked.classes, np.array(labels, np.int64), root, names, sizes, **more)
