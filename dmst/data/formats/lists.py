"""Datasets whose images are named by text files.

Oxford-IIIT Pets    annotations/trainval.txt, test.txt     NAME CLASS-ID SPECIES BREED-ID; class ids from 1
                    annotations/trimaps/NAME.png           masks: 1 pet, 2 background, 3 border
                    images/NAME.jpg
Food-101            meta/classes.txt                       a class a line, in label order
                    meta/train.txt, meta/test.txt          CLASS/NUMBER
                    images/CLASS/NUMBER.jpg
Tiny-ImageNet-200   wnids.txt, words.txt                   the 200 WordNet ids; the name of every WordNet id
                    train/ID/ID_boxes.txt                  NAME x0 y0 x1 y1, of train/ID/images/NAME
                    val/val_annotations.txt                NAME ID x0 y0 x1 y1, of val/images/NAME
ImageNet-1K         train/ID/*.JPEG, val/ID/*.JPEG         class folders, or
                    val/NAME.JPEG                          flat, with LOC_val_solution.csv (NAME,ID and boxes) beside val/

Labels of the last two are the places of the WordNet ids in sorted order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, file_set, folders, lines, reading
from dmst.data.sets import FileSet
from dmst.errors import BadFileError

CHALLENGE = "ILSVRC/Data/CLS-LOC"  # as the archive of ImageNet's challenge unpacks; its solution lies beside ILSVRC
SOLUTION = "LOC_val_solution.csv"


def read_pets(place: Path, asked: Asked) -> FileSet:
    told = place / {"train": "trainval.txt", "test": "test.txt"}[asked.split]
    class_of = {str(number): name for number, name in enumerate(asked.classes, 1)}
    with reading(told):
        rows = [(name, class_of[number]) for name, number, _, _ in _table(told)]
    images = [(f"images/{name}.jpg", kind) for name, kind in rows]
    masks = [f"{place.name}/trimaps/{name}.png" for name, _ in rows]
    return file_set(asked, place.parent, images, told, masks=masks)


def read_food(place: Path, asked: Asked) -> FileSet:
    told, classes = place / f"{asked.split}.txt", tuple(lines(place / "classes.txt"))
    rows = [(f"images/{line}.jpg", line.partition("/")[0]) for line in lines(told)]
    return file_set(asked._replace(classes=classes), place.parent, rows, told)


def read_tiny_imagenet(root: Path, asked: Asked) -> FileSet:
    """A class is called by the first of its words."""
    ids = sorted(lines(root / "wnids.txt"))
    words = dict(line.partition("\t")[::2] for line in lines(root / "words.txt"))
    first = [words.get(name, name).split(",")[0].strip() for name in ids]
    classes = [f"{word} ({name})" if first.count(word) > 1 else word for word, name in zip(first, ids, strict=True)]
    class_of = dict(zip(ids, classes, strict=True))
    if asked.split == "train":
        told = root / "wnids.txt"
        tables = {name: _table(root / f"train/{name}/{name}_boxes.txt") for name in ids}
        rows = [(f"train/{name}/images/{file}", name, box) for name in ids for file, *box in tables[name]]
    else:
        told = root / "val/val_annotations.txt"
        rows = [(f"val/images/{file}", name, box) for file, name, *box in _table(told)]
    boxes = np.array([box for _, _, box in rows], np.int64).reshape(len(rows), 4)
    images = [(file, class_of.get(name, name)) for file, name, _ in rows]
    return file_set(asked._replace(classes=tuple(classes)), root, images, told, boxes=boxes)


def read_imagenet(place: Path, asked: Asked) -> FileSet:
    """The split in the folder `place`, train/ or val/."""
    train = place.parent / "train"
    classes = folders.class_folders(train) if train.is_dir() else ()
    if folders.is_split(place):
        return folders.read_classes(place, asked._replace(classes=classes or folders.class_folders(place)))
    beside = (place.parent, *(place.parents[3:4] if place.parent.match(CHALLENGE) else ()))
    told = next((folder / SOLUTION for folder in beside if (folder / SOLUTION).is_file()), None)
    if told is None:
        raise BadFileError(
            f"{place} is flat and nothing says which class its images are: put {SOLUTION} beside it, or sort them into class "
            "folders (torchvision.datasets.ImageNet does it from the development kit)."
        )
    with reading(told):
        rows = [(f"{name}.JPEG", boxes.split()[0]) for name, boxes in (line.split(",") for line in sorted(lines(told)[1:]))]
    return file_set(asked._replace(classes=classes or tuple(sorted({kind for _, kind in rows}))), place, rows, told)


def _table(path: Path) -> list[list[str]]:
    """The words of every line that is no comment."""
    return [line.split() for line in lines(path) if not line.startswith("#")]
