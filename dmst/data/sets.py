"""One split of a dataset, in a fixed order: what every format becomes and everything else reads.

    ArraySet    images of one size, in one array        CIFAR, SVHN, digits
    FileSet     one file per image, of any size         class folders, Pets, Food-101, ImageNet
    subset      some of the images of a set, a view     split_off holds out a share of every class

A set is checked when it is made: it holds images, and every label names a class.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dmst.data import images as door
from dmst.errors import BadFileError, BadImageError, OptionError, ShapeError, number
from dmst.words import short, visible


class ImageSet:
    """One split. `variant` is what a result must say beside the name. `fingerprint` changes with classes, labels, names and
    sizes; with every pixel where all are in memory. Of files, dmst.data.scan hashes the content. What a reader keeps of image
    `index` is at `places[index]`: a subset shares it with the whole set."""

    def __init__(
        self, name: str, split: str, classes: Sequence[str], labels: np.ndarray, *, fingerprint: str, variant: str = ""
    ) -> None:
        self.name, self.split, self.variant = name, split, variant
        self.classes = tuple(classes)
        self.labels = np.asarray(labels)
        self.fingerprint = fingerprint
        self.places = np.arange(len(self.labels))
        if self.labels.ndim != 1 or self.labels.dtype.kind not in "iu":
            raise ShapeError(f"{self}: labels are {self.labels.dtype} of shape {self.labels.shape}; whole numbers in one row.")
        if not len(self.labels):
            raise BadFileError(f"{self} is empty: a split needs at least one image.")
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.classes)))
        if len(wrong):
            raise BadFileError(
                f"{self.where(int(wrong[0]))}: its label is {self.labels[wrong[0]]}, and the labels of {name} go from 0 to "
                f"{len(self.classes) - 1} ({len(wrong):,} of {len(self.labels):,} labels are outside)."
            )
        self.labels = self.labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __str__(self) -> str:
        if not self.split:  # a held-out share: "photos, 20 % held out"
            return f"{self.name}, {self.variant}"
        return f"{self.name} {self.split}" + (f" ({self.variant})" if self.variant else "")

    def where(self, index: int) -> str:
        """How a message calls this image."""
        return f"{self.name} {self.split}".rstrip() + f", image {self.places[index]}"

    def source(self, index: int) -> bytes | Path:
        """The encoded image, or the file that holds nothing else."""
        raise NotImplementedError

    def files(self) -> Sequence[Path]:
        """The files that hold the images."""
        return ()

    def stamp(self) -> str:
        """Changes when a file does, or when another takes its place: its size, times and number on the disk."""
        found = [os.stat(path) for path in self.files()]
        return digest(np.array([(x.st_size, x.st_mtime_ns, x.st_ctime_ns, x.st_ino) for x in found], np.uint64))

    def read(self, index: int) -> np.ndarray:
        """One image, uint8 (h, w, 1 or 3)."""
        return door.decode(self.source(index), self.where(index))

    def pixels(self) -> np.ndarray | None:
        """All images, uint8 (n, h, w, c), where they are of one size and in one array anyway."""
        return None

    def masks(self, index: int) -> np.ndarray | None:
        """The mask of one image, uint8 (h, w), where the dataset has masks."""
        return None

    def box(self, index: int) -> tuple[int, int, int, int] | None:
        """Where the object of one image is, x0 y0 x1 y1 in pixels, where the dataset has boxes."""
        return None


class ArraySet(ImageSet):
    """Images uint8 (n, h, w, 1 or 3)."""

    def __init__(
        self, name: str, split: str, classes: Sequence[str], labels: np.ndarray, images: np.ndarray, *, variant: str = ""
    ) -> None:
        shape = images.shape
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels) or shape[3] not in (1, 3):
            raise ShapeError(
                f"{name} {split}: images are {images.dtype} {shape}; they must be uint8 ({len(labels)}, h, w, 1 or 3)."
            )
        mark = digest(*classes, str(shape), np.asarray(labels, np.int64), images)
        super().__init__(name, split, classes, labels, fingerprint=mark, variant=variant)
        self._images = images

    def read(self, index: int) -> np.ndarray:
        return self._images[self.places[index]]

    def pixels(self) -> np.ndarray:
        """Of a subset a copy, made anew by every call."""
        whole = np.array_equal(self.places, np.arange(len(self._images)))
        return self._images if whole else self._images[self.places]


class FileSet(ImageSet):
    """Files `names` below `root`; `sizes` in bytes. Masks, where there are any, are files below `root` as well; boxes (n, 4).

    Names are kept as one array of bytes: a million Python strings would be copied by every worker that counts references.
    """

    def __init__(
        self,
        name: str,
        split: str,
        classes: Sequence[str],
        labels: np.ndarray,
        root: Path,
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        masks: Sequence[str] = (),
        boxes: np.ndarray | None = None,
    ) -> None:
        self.root, self._names, self._masks, self._boxes = root, _packed(names), _packed(masks), boxes
        numbers = np.asarray(sizes, np.int64), np.asarray(labels, np.int64)
        mark = digest(*classes, *names, *numbers, *masks, *([] if boxes is None else [boxes]))
        super().__init__(name, split, classes, labels, fingerprint=mark)

    def source(self, index: int) -> Path:
        return self.root / os.fsdecode(bytes(self._names[self.places[index]]))

    def files(self) -> Sequence[Path]:
        return [self.source(index) for index in range(len(self))]

    def where(self, index: int) -> str:
        return visible(self.source(index))

    def masks(self, index: int) -> np.ndarray | None:
        if not len(self._masks):
            return None
        path = self.root / os.fsdecode(bytes(self._masks[self.places[index]]))
        mask = door.decode(path, visible(path), grey=True)[..., 0]
        if mask.min() < 1 or mask.max() > 3:
            values = f"{mask.min()}..{mask.max()}"
            raise BadImageError(visible(path), f"a mask with values {values}; 1 pet, 2 background, 3 border")
        return mask

    def box(self, index: int) -> tuple[int, int, int, int] | None:
        return None if self._boxes is None else tuple(self._boxes[self.places[index]].tolist())


def subset(
    image_set: ImageSet, indices: Sequence[int] | np.ndarray, variant: str | None = None, split: str | None = None
) -> ImageSet:
    """These images of `image_set`, in this order; variant and split stay unless others are given."""
    found, indices = copy.copy(image_set), np.asarray(indices, np.int64)
    found.places, found.labels = image_set.places[indices], image_set.labels[indices]
    found.fingerprint = digest(image_set.fingerprint, indices)
    found.variant = image_set.variant if variant is None else variant
    found.split = image_set.split if split is None else split
    return found


def with_classes(image_set: ImageSet, classes: Sequence[str]) -> ImageSet:
    """The same images, their classes numbered as in `classes`, which must name all of them."""
    if tuple(classes) == image_set.classes:
        return image_set
    unknown = [name for name in image_set.classes if name not in classes]
    if unknown:
        raise OptionError(
            f"{image_set} has classes that the network does not know: {', '.join(map(short, unknown[:5]))}. It knows "
            f"{', '.join(map(short, classes[:12]))}{' and others' * (len(classes) > 12)}."
        )
    found = subset(image_set, np.arange(len(image_set)))
    places = np.array([list(classes).index(name) for name in image_set.classes])
    found.classes, found.labels = tuple(classes), places[found.labels]
    return found


def split_off(image_set: ImageSet, share: float, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """(rest, held out): of every class the share of images whose index has the lowest hash, both in the order of the set.

    The hash is of (seed, index) alone, so the choice is the same on every machine. Shares of a class are rounded such that they
    add up to the share of the whole; the rest keeps at least one image of every class.
    """
    number("the share that is held out", share, 0, 1)
    hashes = np.array([_hash(seed, index) for index in range(len(image_set))], np.uint64)
    by_class = np.lexsort((hashes, image_set.labels))
    counts = np.bincount(image_set.labels, minlength=len(image_set.classes))
    exact = share * counts
    quota = np.floor(exact + 1e-9).astype(np.int64)
    left = round(share * len(image_set)) - int(quota.sum())
    quota[np.argsort(quota - exact, kind="stable")[: max(left, 0)]] += 1
    quota = np.minimum(quota, np.maximum(counts - 1, 0))
    rank = np.empty(len(image_set), np.int64)
    rank[by_class] = np.arange(len(image_set)) - np.repeat(np.cumsum(counts) - counts, counts)
    out = rank < quota[image_set.labels]
    if not out.any():
        raise OptionError(
            f"a share of {share:g} holds out none of the {len(out):,} images of {image_set}: choose a larger one."
        )
    said = f"{image_set.variant}, " if image_set.variant else ""
    percent = f"{100 * share:.3g} %"
    rest = subset(image_set, np.flatnonzero(~out), f"{said}without the {percent} held out")
    return rest, subset(image_set, np.flatnonzero(out), f"{said}{percent} held out", split="")


def digest(*parts: str | bytes | np.ndarray) -> str:
    """sha256 of the parts, each behind its length, so that no two lists of parts read alike."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            raw: bytes | memoryview = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        else:
            raw = os.fsencode(part)
        total.update(f"{len(raw)}:".encode())
        total.update(raw)
    return total.hexdigest()


def _packed(names: Sequence[str]) -> np.ndarray:
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def _hash(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8, person=b"split_off").digest(), "little")
