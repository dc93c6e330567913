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

from dmst.data.formats import Asked, find_split
from dmst.data.sets import ImageSet, digest
from dmst.errors import BadFileError, BadImageError, need

DICT, STATE = "dataset_dict.json", "state.json"


class TableSet(ImageSet):
    """Rows of a table with a column of encoded images."""

    def __init__(self, asked: Asked, classes: list[str], labels: np.ndarray, table: Any, column: str, fingerprint: str) -> None:
        self._table, self._column = table, column
        super().__init__(asked.name, asked.split, classes, labels, fingerprint=fingerprint)

    def files(self) -> list[Path]:
        return [Path(each["filename"]) for each in self._table.cache_files]

    def source(self, index: int) -> bytes | Path:
        cell = self._table[int(self.places[index])][self._column]
        if not cell:
            raise BadImageError(self.where(index), "its row holds no image")
        return bytes(cell["bytes"]) if cell["bytes"] else Path(cell["path"])


def is_here(folder: Path) -> bool:
    return (folder / DICT).is_file() or (folder / STATE).is_file()


def read(place: Path, asked: Asked) -> TableSet:
    """The split of the dataset saved in the folder `place`."""

    def saved(folder: Path) -> Path | None:
        return folder if (folder / STATE).is_file() else None

    folder = find_split(place, asked.split, lambda name: saved(place / name), saved(place))
    datasets = need("datasets", "data")
    table = datasets.load_from_disk(str(folder))
    image = _column(folder, table.features, datasets.Image, ("image", "img"))
    label = _column(folder, table.features, datasets.ClassLabel, ("label", "labels", "fine_label"))
    classes, labels = table.features[label].names, table.with_format("numpy", columns=[label])[:][label]
    sizes = np.array([file.stat().st_size for file in sorted(folder.glob("*.arrow"))], np.int64)
    mark = digest(*classes, labels.astype(np.int64), sizes, (folder / STATE).read_bytes())
    rows = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    return TableSet(asked, classes, labels, rows, image, mark)


def _column(folder: Path, features: Any, kind: type, preferred: tuple[str, ...]) -> str:
    found = [name for name, feature in features.items() if isinstance(feature, kind)]
    chosen = found if len(found) == 1 else [name for name in preferred if name in found]
    if not chosen:
        raise BadFileError(
            f"{folder} has {len(found) or 'no'} columns of type {kind.__name__}; it must have one, or one called "
            f"{' or '.join(preferred)}. Its columns: {', '.join(features)}. Use rename_column or cast_column of datasets."
        )
    return chosen[0]
