"""Food-101 as its authors publish it.

meta/classes.txt                 a class a line, in label order
meta/train.txt, meta/test.txt    an image a line: CLASS/NUMBER
images/CLASS/NUMBER.jpg
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, Format, lines, listed
from dmst.data.sets import FileSet
from dmst.errors import BadFileError

PLACES = tuple(f"{folder}meta" for folder in ("food-101/", "food101/", ""))


def form() -> Format:
    return Format("official images/ and meta/", {"train": PLACES, "test": PLACES}, read)


def read(place: Path, asked: Asked) -> FileSet:
    """The split whose list is in the folder `place`, meta/."""
    told, classes = place / f"{asked.split}.txt", tuple(lines(place / "classes.txt"))
    label_of = {name: label for label, name in enumerate(classes)}
    names, labels = [], []
    for line in lines(told):
        name, _, number = line.partition("/")
        if name not in label_of or not number or "/" in number:
            raise BadFileError(f"{told}: {line[:80]!r} is not CLASS/NUMBER with a class of {place / 'classes.txt'}.")
        names.append(f"images/{line}.jpg")
        labels.append(label_of[name])
    root = place.parent
    return FileSet(asked.name, asked.split, classes, np.array(labels, np.int64), root, names, listed(root, names, told))
