"""Oxford-IIIT Pets as its authors publish it.

images/NAME.jpg
annotations/trainval.txt, test.txt     a line: NAME CLASS-ID SPECIES BREED-ID; class ids from 1
annotations/trimaps/NAME.png           1 pet, 2 background, 3 border
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, Format, lines, listed
from dmst.data.sets import FileSet
from dmst.errors import BadFileError

PLACES = tuple(f"{folder}annotations" for folder in ("oxford-iiit-pet/", "pets/", ""))
LISTS = {"train": "trainval.txt", "test": "test.txt"}


def form() -> Format:
    return Format("official images/ and annotations/", {"train": PLACES, "test": PLACES}, read)


def read(place: Path, asked: Asked) -> FileSet:
    """The split whose list is in the folder `place`, annotations/."""
    told = place / LISTS[asked.split]
    names, labels = [], []
    for row in (line.split() for line in lines(told) if not line.startswith("#")):
        if len(row) != 4 or not row[1].isdecimal() or not 1 <= int(row[1]) <= len(asked.classes) or "/" in row[0]:
            raise BadFileError(
                f"{told}: {' '.join(row)[:80]!r} is not NAME CLASS-ID SPECIES BREED-ID, class ids 1 to {len(asked.classes)}."
            )
        names.append(row[0])
        labels.append(int(row[1]) - 1)
    root = place.parent
    images, masks = [f"images/{name}.jpg" for name in names], [f"{place.name}/trimaps/{name}.png" for name in names]
    sizes = listed(root, images, told)
    listed(root, masks, told)
    return FileSet(asked.name, asked.split, asked.classes, np.array(labels, np.int64), root, images, sizes, masks=masks)
