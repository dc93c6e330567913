"""A mean over images and its 95 % interval by the bootstrap: images drawn again with replacement, always the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS, SEED = 2000, 0


class Interval(NamedTuple):
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def bootstrap(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """The mean of one number an image, with the 2.5 % and 97.5 % quantiles of the means of `DRAWS` samples."""
    found = np.asarray(values, np.float64)
    chance = np.random.default_rng(SEED)
    means = [found[chance.integers(0, len(found), len(found))].mean() for _ in range(DRAWS)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(found.mean()), float(low), float(high))
