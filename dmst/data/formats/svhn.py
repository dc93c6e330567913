"""SVHN, cropped digits: train_32x32.mat and test_32x32.mat, MATLAB files of X uint8 (32, 32, 3, n) and y (n, 1).

The files write the digit 0 as 10; here it is 0, so label and digit agree.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dmst.data.formats import Asked, Format
from dmst.data.sets import ArraySet
from dmst.errors import BadFileError, need


def form() -> Format:
    return Format("official .mat files", {s: (f"{s}_32x32.mat", f"svhn/{s}_32x32.mat") for s in ("train", "test")}, read)


def read(place: Path, asked: Asked) -> ArraySet:
    loadmat = need("scipy.io", "data").loadmat
    try:
        held = loadmat(str(place), variable_names=["X", "y"])
        pixels, digits = held["X"], held["y"].reshape(-1)
    except Exception as error:  # scipy raises almost anything
        raise BadFileError(
            f"{place} is not an SVHN file with X and y ({type(error).__name__}: {error}). Copy it again."
        ) from error
    if pixels.dtype != np.uint8 or pixels.shape != (32, 32, 3, len(digits)) or digits.dtype.kind not in "iu":
        raise BadFileError(
            f"{place}: X is {pixels.dtype} {pixels.shape} and y {digits.dtype} {digits.shape}; "
            "they must be uint8 (32, 32, 3, n) and whole numbers (n, 1)."
        )
    labels = digits.astype(np.int64)
    wrong = np.flatnonzero((labels < 1) | (labels > 10))
    if len(wrong):
        raise BadFileError(
            f"{place}, image {wrong[0]}: y is {labels[wrong[0]]}; the official files write 1 to 10, 10 for digit 0."
        )
    return ArraySet(asked.name, asked.split, asked.classes, labels % 10, np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)))
