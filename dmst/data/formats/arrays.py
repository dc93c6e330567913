"""Datasets of small images, read into one array.

CIFAR     cifar-10-batches-bin/  data_batch_1..5.bin, test_batch.bin    a record: label, 1024 red, 1024 green, 1024 blue
          cifar-100-binary/      train.bin, test.bin                    a record: coarse label, fine label, the same 3072 bytes
SVHN      train_32x32.mat, test_32x32.mat    MATLAB files of X uint8 (32, 32, 3, n) and y (n, 1), where digit 0 is written as 10
digits    scikit-learn's 1,797 grey images of 8 x 8. Every fifth is of the test split; 0..16 becomes 0..255.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, reading
from dmst.data.sets import ArraySet
from dmst.errors import need

BATCHES = {  # bytes of a label, of which the last counts, and the files of each split
    "cifar10": (1, {"train": [f"data_batch_{k}.bin" for k in range(1, 6)], "test": ["test_batch.bin"]}),
    "cifar100": (2, {"train": ["train.bin"], "test": ["test.bin"]}),
}


def read_cifar(folder: Path, asked: Asked) -> ArraySet:
    label_bytes, files = BATCHES[asked.name]
    batches = []
    for path in (folder / name for name in files[asked.split]):
        with reading(path):
            batches.append(np.fromfile(path, np.uint8).reshape(-1, label_bytes + 3072))
    records = np.concatenate(batches)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = records[:, label_bytes - 1].astype(np.int64)
    return ArraySet(asked.name, asked.split, asked.classes, labels, np.ascontiguousarray(images))


def read_svhn(path: Path, asked: Asked) -> ArraySet:
    held = need("scipy.io", "data").loadmat(str(path), variable_names=["X", "y"])
    labels, images = held["y"].reshape(-1), np.ascontiguousarray(held["X"].transpose(3, 0, 1, 2))
    return ArraySet(asked.name, asked.split, asked.classes, np.where(labels == 10, 0, labels), images)


def read_digits(_: Path, asked: Asked) -> ArraySet:
    bunch = need("sklearn.datasets", "demo").load_digits()
    held_out = np.arange(len(bunch.images)) % 5 == 4
    mine = held_out if asked.split == "test" else ~held_out
    images = np.rint(bunch.images[mine] * (255 / 16)).astype(np.uint8)[..., None]
    return ArraySet(asked.name, asked.split, asked.classes, bunch.target[mine], images)
