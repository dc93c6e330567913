"""The handwritten digits of scikit-learn: 1,797 grey images of 8 x 8 pixels, ten classes, no download.

Every fifth image is held out: 1,438 to learn from, 359 to be asked about. Pixels 0..16 become -1..1.
Origin: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, CC BY 4.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmst.errors import need


class Split(NamedTuple):
    train_images: Tensor  # (1438, 1, 8, 8)
    train_labels: Tensor
    test_images: Tensor  # (359, 1, 8, 8)
    test_labels: Tensor


def digits() -> Split:
    bunch = need("sklearn.datasets", "demo").load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(bunch.target).long()
    held_out = torch.arange(len(images)) % 5 == 4
    return Split(images[~held_out], labels[~held_out], images[held_out], labels[held_out])
