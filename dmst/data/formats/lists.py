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
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, Format, lines, sizes_of
from dmst.data.sets import FileSet
from dmst.errors import BadFileError


def pets() -> Format:
    places = tuple(f"{folder}annotations" for folder in ("oxford-iiit-pet/", "pets/", ""))
    return Format("official images/ and annotations/", {"train": places, "test": places}, read_pets)


def read_pets(place: Path, asked: Asked) -> FileSet:
    told = place / {"train": "trainval.txt", "test": "test.txt"}[asked.split]
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
    sizes = sizes_of(root, images, told)
    sizes_of(root, masks, told)
    return FileSet(asked.name, asked.split, asked.classes, np.array(labels, np.int64), root, images, sizes, masks=masks)


def food() -> Format:
    places = tuple(f"{folder}meta" for folder in ("food-101/", "food101/", ""))
    return Format("official images/ and meta/", {"train": places, "test": places}, read_food)


def read_food(place: Path, asked: Asked) -> FileSet:
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
    return FileSet(asked.name, asked.split, classes, np.array(labels, np.int64), root, names, sizes_of(root, names, told))


def tiny_imagenet() -> Format:
    places = ("tiny-imagenet-200",)
    return Format("official train/ and val/", {"train": places, "test": places}, read_tiny_imagenet)


def read_tiny_imagenet(root: Path, asked: Asked) -> FileSet:
    """Labels are the places of the WordNet ids in sorted order; a class is called by the first of its words."""
    ids = sorted(lines(root / "wnids.txt"))
    words = dict(line.partition("\t")[::2] for line in lines(root / "words.txt"))
    first = [words.get(name, name).split(",")[0].strip() for name in ids]
    classes = [f"{word} ({name})" if first.count(word) > 1 else word for word, name in zip(first, ids, strict=True)]
    label_of = {name: label for label, name in enumerate(ids)}
    names, labels, boxes = [], [], []
    if asked.split == "train":
        rows = [(f"train/{name}/images/", name, row) for name in ids for row in _boxes(root / f"train/{name}/{name}_boxes.txt")]
    else:
        told = root / "val/val_annotations.txt"
        rows = [("val/images/", row.pop(1), row) for row in _boxes(told, 6)]
        if unknown := {name for _, name, _ in rows} - set(ids):
            raise BadFileError(f"{told} names {sorted(unknown)[0]!r}, which is not in wnids.txt: copy the dataset again.")
    for folder, name, (file, *box) in rows:
        names.append(folder + file)
        labels.append(label_of[name])
        boxes.append(box)
    sizes = sizes_of(root, names, root / "wnids.txt" if asked.split == "train" else told)
    arrays = np.array(labels, np.int64), np.array(boxes, np.int64).reshape(-1, 4)
    return FileSet(asked.name, asked.split, classes, arrays[0], root, names, sizes, boxes=arrays[1])


def _boxes(path: Path, columns: int = 5) -> Iterator[list[str]]:
    for line in lines(path):
        row = line.split()
        if len(row) != columns or not all(x.isdecimal() for x in row[-4:]) or "/" in row[0]:
            raise BadFileError(f"{path}: {line[:80]!r} is not a name and a box x0 y0 x1 y1.")
        yield row
