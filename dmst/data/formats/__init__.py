"""How datasets lie on disk: one reader per layout.

    Asked     what is wanted: name and split of the dataset, its class names (none where only the files know them)
    Format    where below a data folder the layout would lie, and the function that reads it

What is there and damaged is an error: it is never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dmst.data.sets import ImageSet
from dmst.errors import BadFileError

# the splits by the names that users write, and what files and folders call them: the first that is there is taken
SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val", "valid", "validation")}


class Asked(NamedTuple):
    name: str
    split: str
    classes: tuple[str, ...] = ()


class Format(NamedTuple):
    what: str  # in a message: "official binary batches"
    places: Mapping[str, tuple[str, ...]]  # by split, below the data folder: the first that exists is handed to `read`
    read: Callable[[Path, Asked], ImageSet]


def contents(path: Path, most: int = 1 << 28) -> bytes:
    """The bytes of a file of at most `most` bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise BadFileError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if len(raw) > most:
        raise BadFileError(f"{path} is larger than {most:,} bytes: not a file of this format.")
    return raw


def lines(path: Path) -> list[str]:
    """The lines of a text file, without blank ones and their ends."""
    try:
        return [line.strip() for line in contents(path).decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise BadFileError(f"{path} is not text: {error}.") from error


def sizes_of(root: Path, names: Sequence[str], told: Path) -> list[int]:
    """The sizes in bytes of the files that the list `told` names; a file that is not there is refused."""
    sizes = []
    for name in names:
        try:
            sizes.append((root / name).stat().st_size)
        except (OSError, ValueError) as error:
            raise BadFileError(f"{root / name} is not there, and {told} lists it: copy the dataset again.") from error
    return sizes
