"""A dataset of Hugging Face's `datasets`, as `save_to_disk` writes it: Arrow tables, memory-mapped.

    FOLDER/dataset_dict.json, FOLDER/train/, FOLDER/test/      a DatasetDict (or val, valid, validation in place of test)
    FOLDER/state.json, FOLDER/data-*.arrow                     one Dataset, all of it the split train

The images are in the column of type Image, the labels in the one of type ClassLabel; where several are of that type, the one
called "label", "labels" or "fine_label" is taken. Images come as they were encoded and are decoded by our own door.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dmst.data.formats import SPLITS, Asked, contents
from dmst.data.sets import ImageSet, digest
from dmst.errors import BadFileError, BadImageError, MissingSplitError, need

DICT, STATE = "dataset_dict.json", "state.json"
LABELS = ("label", "labels", "fine_label")


class TableSet(ImageSet):
    """Rows of a table with a column of encoded images."""

    def __init__(self, asked: Asked, classes: list[str], labels: np.ndarray, table: Any, column: str, fingerprint: str) -> None:
        self._table, self._column = table, column
        super().__init__(asked.name, asked.split, classes, labels, fingerprint=fingerprint)

    def files(self) -> list[Path]:
        return [Path(each["filename"]) for each in self._table.cache_files]

    def source(self, index: int) -> bytes | Path:
        cell = self._table[int(index)][self._column] or {}
        if cell.get("bytes"):
            return bytes(cell["bytes"])
        if not cell.get("path"):
            raise BadImageError(self.where(index), "its row holds no image")
        return Path(cell["path"])


def is_here(folder: Path) -> bool:
    return (folder / DICT).is_file() or (folder / STATE).is_file()


def read(place: Path, asked: Asked) -> TableSet:
    """The split of the dataset saved in the folder `place`."""
    datasets = need("datasets", "data")
    try:
        saved = datasets.load_from_disk(str(place))
    except Exception as error:  # Arrow, JSON and the disk have a dozen types between them
        raise BadFileError(f"{place} is not a dataset saved with save_to_disk ({type(error).__name__}: {error}).") from error
    splits = saved if isinstance(saved, dict) else {"train": saved}
    name = next((name for name in SPLITS[asked.split] if name in splits), None)
    if name is None:
        raise MissingSplitError(f"{place} has no split {asked.split!r}: its splits are {', '.join(splits)}.")
    table, folder = splits[name], place / name if isinstance(saved, dict) else place
    features = table.features
    image = _column(folder, features, datasets.Image, ("image", "img"), 'cast_column("image", Image())')
    label = _column(folder, features, datasets.ClassLabel, LABELS, 'cast_column("label", ClassLabel(names=[...]))')
    labels = table.with_format("numpy", columns=[label])[:][label] if len(table) else np.empty(0, np.int64)
    if labels.dtype.kind not in "iu":  # a missing label makes the column one of floats
        raise BadFileError(f"{folder}: the column {label!r} is {labels.dtype}: some labels are missing.")
    sizes = np.array([file.stat().st_size for file in sorted(folder.glob("*.arrow"))], np.int64)
    mark = digest(*features[label].names, labels.astype(np.int64), sizes, contents(folder / STATE))
    rows = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    return TableSet(asked, features[label].names, labels, rows, image, mark)


def _column(folder: Path, features: Any, kind: type, preferred: tuple[str, ...], remedy: str) -> str:
    found = [name for name, feature in features.items() if isinstance(feature, kind)]
    chosen = found if len(found) == 1 else [name for name in preferred if name in found]
    if not chosen:
        told = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in features.items())
        raise BadFileError(
            f"{folder} has {len(found) or 'no'} columns of type {kind.__name__}; it must have one, or one called "
            f"{' or '.join(preferred)}. Its columns: {told}. Remedy: {remedy}, or rename_column."
        )
    return chosen[0]
