"""ImageNet-1K, ILSVRC 2012. Labels are the places of the WordNet ids in sorted order, for every layout.

train/nXXXXXXXX/*.JPEG
val/nXXXXXXXX/*.JPEG                        sorted into class folders, or
val/ILSVRC2012_val_XXXXXXXX.JPEG            flat, with one of these beside it or in it:
    LOC_val_solution.csv                    ImageId,nXXXXXXXX and boxes
    ILSVRC2012_validation_ground_truth.txt  an id a line, in the order of the images, and meta.mat beside it:
                                            the ids of the development kit are not in the order of the WordNet ids
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, Format, folders, lines
from dmst.data.sets import FileSet
from dmst.errors import BadFileError, need

CHALLENGE = "ILSVRC/Data/CLS-LOC"  # as the challenge's archive unpacks; its solution lies beside ILSVRC
PLACES = ("imagenet", "ILSVRC2012", CHALLENGE, "")
KIT = "ILSVRC2012_devkit_t12/data"
SOLUTION, TRUTH = "LOC_val_solution.csv", "ILSVRC2012_validation_ground_truth.txt"
WORDNET_ID = re.compile(r"n\d{8}")


def imagenet() -> Format:
    below = {"train": "train", "test": "val"}
    return Format("train/ and val/", {s: tuple(f"{p}/{name}".lstrip("/") for p in PLACES) for s, name in below.items()}, read)


def read(place: Path, asked: Asked) -> FileSet:
    """The split in the folder `place`, train/ or val/."""
    train = place.parent / "train"
    classes = asked.classes or (_wordnet_ids(train) if train.is_dir() else ())
    if asked.split == "train" or _sorted_into_folders(place):
        return folders.file_set(place, asked._replace(classes=classes or _wordnet_ids(place)))
    found = folders.images_in(place)
    images = [name for name, _ in found]
    truth, ids = _truth(place, images)
    classes = classes or tuple(sorted(set(ids)))
    folders.same_classes(truth, ids, classes)
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_of[name] for name in ids], np.int64)
    return FileSet(asked.name, asked.split, classes, labels, place, images, [size for _, size in found])


def _wordnet_ids(folder: Path) -> tuple[str, ...]:
    names = tuple(folders.class_folders(folder))
    wrong = [name for name in names if not WORDNET_ID.fullmatch(name)]
    if wrong:
        raise BadFileError(f"{folder / wrong[0]} is not called like a WordNet id, n and eight digits: not ImageNet's layout.")
    return names


def _sorted_into_folders(place: Path) -> bool:
    return any(entry.is_dir() and WORDNET_ID.fullmatch(entry.name) for entry in place.iterdir())


def _truth(place: Path, images: list[str]) -> tuple[Path, list[str]]:
    """The file that tells, and the WordNet id of every image."""
    for folder in (place, place.parent, *(place.parents[3:4] if place.parent.match(CHALLENGE) else ())):
        if (folder / SOLUTION).is_file():
            return folder / SOLUTION, _from_solution(folder / SOLUTION, images)
        for truth in (folder / TRUTH, folder / KIT / TRUTH):
            if truth.is_file():
                return truth, _from_kit(truth, images)
    raise BadFileError(f"{place} is flat and nothing says which class its images are: put {SOLUTION} or {KIT} beside it.")


def _from_solution(truth: Path, images: list[str]) -> list[str]:
    told = {}
    for line in lines(truth)[1:]:
        name, _, boxes = line.partition(",")
        found = WORDNET_ID.match(boxes)
        if not found:
            raise BadFileError(f"{truth}: {line[:80]!r} is not ImageId,nXXXXXXXX and boxes.")
        told[name] = found[0]
    stems = [Path(image).stem for image in images]
    unknown, absent = [stem for stem in stems if stem not in told], sorted(told.keys() - stems)
    if unknown or absent:
        what = f"does not know the image {unknown[0]}" if unknown else f"lists {absent[0]}, which is not there"
        raise BadFileError(f"{truth} {what}: copy the validation set again.")
    return [told[stem] for stem in stems]


def _from_kit(truth: Path, images: list[str]) -> list[str]:
    numbers, meta = lines(truth), truth.with_name("meta.mat")
    if len(numbers) != len(images):
        raise BadFileError(f"{truth} has {len(numbers):,} lines for {len(images):,} images: copy the validation set again.")
    if not meta.is_file():
        raise BadFileError(f"{truth} needs meta.mat beside it: its numbers are not in the order of the WordNet ids. Copy both.")
    try:
        kinds = np.atleast_1d(need("scipy.io", "data").loadmat(str(meta), squeeze_me=True)["synsets"])
        leaves = {str(kind["ILSVRC2012_ID"]): str(kind["WNID"]) for kind in kinds if int(kind["num_children"]) == 0}
    except ImportError:
        raise
    except Exception as error:  # scipy raises almost anything
        raise BadFileError(f"{meta} is not that of the development kit ({type(error).__name__}: {error}).") from error
    wrong = [number for number in numbers if number not in leaves]
    if wrong:
        raise BadFileError(f"{truth} says {wrong[0]!r}, and {meta} has the classes 1 to {len(leaves)}.")
    return [leaves[number] for number in numbers]
