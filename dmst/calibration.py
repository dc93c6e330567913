"""Is a network as sure as it is right? Images in bins of equal width by the probability of its answer.

expected error = sum over bins of (share of the images) x |accuracy - mean probability|
"""

from __future__ import annotations

from typing import NamedTuple

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
