"""Datasets of small images, read into one array.

CIFAR     cifar-10-batches-bin/  data_batch_1..5.bin, test_batch.bin    a record: label, 1024 red, 1024 green, 1024 blue
          cifar-100-binary/      train.bin, test.bin                    a record: coarse label, fine label, the same 3072 bytes
SVHN      train_32x32.mat, test_32x32.mat    MATLAB files of X uint8 (32, 32, 3, n) and y (n, 1), where digit 0 is written as 10
digits    scikit-learn's 1,797 grey images of 8 x 8. Every fifth is of the test split; 0..16 becomes 0..255.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, Format, contents
from dmst.data.sets import ArraySet
from dmst.errors import BadFileError, need

BATCHES = {  # by folder: bytes of a label, of which the last counts, and the files of each split
    "cifar-10-batches-bin": (1, {"train": [f"data_batch_{k}.bin" for k in range(1, 6)], "test": ["test_batch.bin"]}),
    "cifar-100-binary": (2, {"train": ["train.bin"], "test": ["test.bin"]}),
}


def cifar(folder: str) -> Format:
    return Format("official binary batches", {"train": (folder,), "test": (folder,)}, partial(read_cifar, kind=folder))


def read_cifar(folder: Path, asked: Asked, *, kind: str) -> ArraySet:
    label_bytes, files = BATCHES[kind]
    records = np.concatenate([_records(folder / name, label_bytes + 3072) for name in files[asked.split]])
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = records[:, label_bytes - 1].astype(np.int64)
    return ArraySet(asked.name, asked.split, asked.classes, labels, np.ascontiguousarray(images))


def _records(path: Path, size: int) -> np.ndarray:
    if not path.is_file():
        raise BadFileError(f"{path.parent} misses {path.name}: copy the official files again.")
    raw = contents(path)
    if not raw or len(raw) % size:
        raise BadFileError(f"{path} has {len(raw):,} bytes, not whole records of {size}: it is cut or foreign. Copy it again.")
    return np.frombuffer(raw, np.uint8).reshape(-1, size)


def svhn() -> Format:
    return Format("official .mat files", {s: (f"{s}_32x32.mat", f"svhn/{s}_32x32.mat") for s in ("train", "test")}, read_svhn)


def read_svhn(path: Path, asked: Asked) -> ArraySet:
    loadmat = need("scipy.io", "data").loadmat
    try:
        held = loadmat(str(path), variable_names=["X", "y"])
        pixels, digits = held["X"], held["y"].reshape(-1)
    except Exception as error:  # scipy raises almost anything
        raise BadFileError(
            f"{path} is not an SVHN file with X and y ({type(error).__name__}: {error}). Copy it again."
        ) from error
    if pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, len(digits)) or digits.dtype.kind not in "iu":
        raise BadFileError(
            f"{path}: X is {pixels.dtype} {pixels.shape} and y {digits.dtype} {digits.shape}; "
            "they must be uint8 (32, 32, 3, n) and whole numbers (n, 1)."
        )
    labels = digits.astype(np.int64)
    wrong = np.flatnonzero((labels < 1) | (labels > 10))
    if len(wrong):
        raise BadFileError(
            f"{path}, image {wrong[0]}: y is {labels[wrong[0]]}; the official files write 1 to 10, 10 for digit 0."
        )
    return ArraySet(asked.name, asked.split, asked.classes, labels % 10, np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)))


def read_digits(asked: Asked) -> ArraySet:
    bunch = need("sklearn.datasets", "demo").load_digits()
    held_out = np.arange(len(bunch.images)) % 5 == 4
    mine = held_out if asked.split == "test" else ~held_out
    images = np.rint(bunch.images[mine] * (255 / 16)).astype(np.uint8)[..., None]
    return ArraySet(asked.name, asked.split, asked.classes, bunch.target[mine], images)
