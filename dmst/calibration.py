"""What a network gets right on labelled images, and whether it is as sure as it is right.

confusion         (classes, classes): row is, column said
expected error    sum over bins of (share of the images) x |accuracy - mean probability|; bins of equal width by the
                  probability of the answer
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

BINS = 15


class Bin(NamedTuple):
    share: float  # of the images
    sure: float  # mean probability of the answers
    right: float  # share of them that is right


def calibration(sure: Tensor, right: Tensor) -> tuple[float, list[Bin]]:
    """The expected error, and the bins that hold images, from unsure to sure; sure (n) and right (n) of each answer."""
    place = (sure.double() * BINS).ceil().long().clamp(1, BINS) - 1
    bins = []
    for inside in (place == i for i in range(BINS)):
        if inside.any():
            share, accuracy = inside.double().mean().item(), right[inside].double().mean().item()
            bins.append(Bin(share, sure[inside].double().mean().item(), accuracy))
    return sum(each.share * abs(each.right - each.sure) for each in bins), bins


class Measured(NamedTuple):
    """The answers to labelled images, counted."""

    data: str  # which images
    confusion: Tensor  # (classes, classes)
    right5: int  # images whose label is among the five likeliest
    error: float  # expected calibration error
    bins: list[Bin]

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        return int(self.confusion.diagonal().sum()) / max(self.images, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return self._asdict() | {"confusion": self.confusion.tolist(), "bins": [list(each) for each in self.bins]}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Measured:
        return cls(**told | {"confusion": torch.tensor(told["confusion"]), "bins": [Bin(*each) for each in told["bins"]]})


def measured(data: str, classes: int, says: Tensor, sure: Tensor, labels: Tensor, in_top5: Tensor) -> Measured:
    """Count answers (n): the class that each says, how sure, its label, whether that is among the five likeliest."""
    confusion = torch.bincount(labels * classes + says, minlength=classes * classes).view(classes, classes)
    return Measured(data, confusion, int(in_top5.sum()), *calibration(sure, says == labels))
