"""ImageNet-1K, ILSVRC 2012. Labels are the places of the WordNet ids in sorted order, for every layout.

train/nXXXXXXXX/*.JPEG
val/nXXXXXXXX/*.JPEG                   sorted into class folders, or
val/ILSVRC2012_val_XXXXXXXX.JPEG       flat, with LOC_val_solution.csv (ImageId,nXXXXXXXX and boxes) beside it or in it
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, Format, folders, lines
from dmst.data.sets import FileSet
from dmst.errors import BadFileError

CHALLENGE = "ILSVRC/Data/CLS-LOC"  # as the challenge's archive unpacks; its solution lies beside ILSVRC
PLACES = ("imagenet", "ILSVRC2012", CHALLENGE, "")
SOLUTION = "LOC_val_solution.csv"
WORDNET_ID = re.compile(r"n\d{8}")


def imagenet() -> Format:
    below = {"train": "train", "test": "val"}
    return Format("train/ and val/", {s: tuple(f"{p}/{name}".lstrip("/") for p in PLACES) for s, name in below.items()}, read)


def read(place: Path, asked: Asked) -> FileSet:
    """The split in the folder `place`, train/ or val/."""
    train = place.parent / "train"
    classes = _wordnet_ids(train) if train.is_dir() else ()
    if asked.split == "train" or any(entry.is_dir() and WORDNET_ID.fullmatch(entry.name) for entry in place.iterdir()):
        return folders.file_set(place, asked._replace(classes=classes or _wordnet_ids(place)))
    found = folders.images_in(place)
    images = [name for name, _ in found]
    solution, ids = _solution(place, images)
    classes = classes or tuple(sorted(set(ids)))
    folders.same_classes(solution, ids, classes)
    labels = np.array([classes.index(name) for name in ids], np.int64)
    return FileSet(asked.name, asked.split, classes, labels, place, images, [size for _, size in found])


def _wordnet_ids(folder: Path) -> tuple[str, ...]:
    names = tuple(folders.class_folders(folder))
    wrong = [name for name in names if not WORDNET_ID.fullmatch(name)]
    if wrong:
        raise BadFileError(f"{folder / wrong[0]} is not called like a WordNet id, n and eight digits: not ImageNet's layout.")
    return names


def _solution(place: Path, images: list[str]) -> tuple[Path, list[str]]:
    """The file that tells, and the WordNet id of every image."""
    beside = (place, place.parent, *(place.parents[3:4] if place.parent.match(CHALLENGE) else ()))
    path = next((folder / SOLUTION for folder in beside if (folder / SOLUTION).is_file()), None)
    if path is None:
        raise BadFileError(
            f"{place} is flat and nothing says which class its images are: put {SOLUTION} beside it, or sort them into class "
            "folders (torchvision.datasets.ImageNet does it from the development kit)."
        )
    told = {}
    for line in lines(path)[1:]:
        name, _, boxes = line.partition(",")
        found = WORDNET_ID.match(boxes)
        if not found:
            raise BadFileError(f"{path}: {line[:80]!r} is not ImageId,nXXXXXXXX and boxes.")
        told[name] = found[0]
    stems = [Path(image).stem for image in images]
    unknown, absent = [stem for stem in stems if stem not in told], sorted(told.keys() - stems)
    if unknown or absent:
        what = f"does not know the image {unknown[0]}" if unknown else f"lists {absent[0]}, which is not there"
        raise BadFileError(f"{path} {what}: copy the validation set again.")
    return path, [told[stem] for stem in stems]
