"""Is a map true? Take away the patches that it names and see what the network's answer loses.

    deletion     most important patches first, each replaced by the image's own mean colour      low area: a true map
    insertion    the other way round: from the mean colour alone, most important first           high area: a true map
    road         deletion, each removed pixel the mean of its neighbours, solved as one linear   low area: a true map
                 system, plus a little noise (ROAD, Rong et al. 2022): the holes' shape gives nothing away

    area = of the curve: probability of the class that the network chose, against the share of patches taken, 0 to 1

What puts the patches in order: numbers that the network itself computed, and two that it did not, for comparison:

    membership   pi of the head with the largest gate, by image (no gate: of the largest mass)      layer `layer`
    gated        sum_k g_k pi_nk                                                                    layer `layer`, with gates
    attention    what a patch receives: the row of the class token, or the mean of all rows         MHSA and MSSA
    gradient     gradient of the chosen class's logit times the input, summed over the patch
    centre       the middle of the picture first: by no network
    random       the mean area of several random orders, by no network: what the others have to beat

Of each area the mean, and the paired differences to random and to centre with their bootstrap 95 % intervals, positive where
the order is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dmst.analysis.membership import attention_received, gradient_map, layer_of
from dmst.analysis.running import Tick, batches_of, only_looking
from dmst.errors import OptionError, choose
from dmst.models import VisionModel

TESTS = ("insertion", "deletion", "road")
NOISE = 0.01  # of the pixels as the network takes them, road
COARSEST = 8  # pixels: the size at which road's linear system is solved from nothing
LEAST = 0.001  # of an area: a smaller difference is none, however sure
STEPS = 10
Answer = Callable[[Tensor], Tensor]  # images (b, c, h, w) -> logits (b, classes)


def orders_of(model: VisionModel, images: Tensor, layer: int = -1) -> dict[str, Tensor]:
    """How important each patch is, (b, n), by everything that this network computes of it in one layer; without random."""
    with torch.no_grad():
        trace = model.trace(images)
    parts, found = layer_of(trace, layer).parts, dict[str, Tensor]()
    if parts.membership is not None:
        membership = parts.membership[..., trace.prefix :]  # (b, k, n)
        used = membership.sum(-1) if parts.gate is None else parts.gate
        found["membership"] = membership[torch.arange(len(membership)), used.argmax(-1)]
        if parts.gate is not None:
            found["gated"] = (parts.gate.unsqueeze(-1) * membership).sum(1)
    if (received := attention_received(trace, layer)) is not None:
        found["attention"] = received.mean(1)
    return found | {"gradient": gradient_map(model, images).flatten(1)}


def areas(
    answer: Answer,
    images: Tensor,
    importance: Tensor,
    patch_size: int,
    test: str = "deletion",
    *,
    steps: int = STEPS,
    first: int = 0,
) -> Tensor:
    """(b,): the area under the curve of one test, patches in the order of `importance` (b, n), row by row, largest first.

    `first` numbers the images, so that the noise of `road` belongs to an image and not to its batch.
    """
    b, _, h, w = images.shape
    grid = (h // patch_size, w // patch_size)
    # ties go to the patch that comes first
    rank = importance.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    mean = images.mean((-2, -1), keepdim=True).expand_as(images)
    noise = _noise(images, first) if test == "road" else None
    said = []
    for share in np.linspace(0, 1, steps + 1):
        named = rank < round(share * rank.shape[1])
        removed = ~named if test == "insertion" else named
        hidden = removed.view(b, 1, *grid).repeat_interleave(patch_size, 2).repeat_interleave(patch_size, 3)
        fill = mean if noise is None else interpolated(images, hidden) + noise
        said.append(answer(torch.where(hidden, fill, images)).float().softmax(-1))
    chosen = said[-1 if test == "insertion" else 0].argmax(-1, keepdim=True)  # of the whole image
    curve = torch.stack([each.gather(1, chosen)[:, 0] for each in said]).double()
    return torch.trapezoid(curve, dx=1 / steps, dim=0).cpu()


def interpolated(images: Tensor, hidden: Tensor) -> Tensor:
    """Hidden pixels (b, 1, h, w) as means of their eight neighbours, straight ones weighing twice; others as they are.

    sum_j w_ij (x_i - x_j) = 0 at every hidden i: symmetric, and positive once one pixel is known, so conjugate gradients solve
    it, from the solution at half the size, which has the slow part of the answer. With no pixel known: the mean colour.
    """
    mean = images.mean((-2, -1), keepdim=True)
    known = torch.where(hidden, 0, images - mean)  # around the mean: where nothing is known, 0 is the answer
    return torch.where(hidden, _solved(known, hidden) + mean, images)


def _solved(known: Tensor, hidden: Tensor, most: int = 200) -> Tensor:
    x = torch.zeros_like(known)
    if min(known.shape[-2:]) > COARSEST:
        share = F.avg_pool2d((~hidden).to(known), 2, ceil_mode=True)
        half = F.avg_pool2d(known, 2, ceil_mode=True) / torch.where(share > 0, share, 1)
        x = F.interpolate(half + _solved(half, share == 0), known.shape[-2:], mode="bilinear", align_corners=False)
        x = torch.where(hidden, x, 0)
    degree = _around(torch.ones_like(known[:1, :1]))
    wanted = torch.where(hidden, _around(known), 0)
    rest = wanted - torch.where(hidden, degree * x - _around(x), 0)
    step, size = rest, _square(rest)
    enough = 1e-6 * _square(wanted)
    for _ in range(most):
        if not (size > enough).any():
            break
        slope = torch.where(hidden, degree * step - _around(step), 0)
        by = torch.where(size > enough, size / _square(step, slope).clamp(min=1e-30), 0)
        x, rest = x + by * step, rest - by * slope
        before, size = size, _square(rest)
        step = rest + size / before.clamp(min=1e-30) * step
    return x


def _around(x: Tensor) -> Tensor:
    """The eight neighbours summed, straight ones twice: (1 2 1) down times (1 2 1) across, without the middle."""
    wide = F.pad(x, (1, 1, 1, 1))
    wide = wide[..., :-2, :] + 2 * wide[..., 1:-1, :] + wide[..., 2:, :]
    return wide[..., :-2] + 2 * wide[..., 1:-1] + wide[..., 2:] - 4 * x


def _square(x: Tensor, y: Tensor | None = None) -> Tensor:
    return (x * (x if y is None else y)).sum((1, 2, 3), keepdim=True)


def _noise(images: Tensor, first: int) -> Tensor:
    draws = [torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(first + i)) for i in range(len(images))]
    return NOISE * torch.stack(draws).to(images)


@dataclass(frozen=True)
class Interval:
    """A mean over images, and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: NDArray[np.float64], draws: int = 2000) -> Interval:
    """The 2.5 % and 97.5 % quantiles of the means of images drawn again with replacement, always the same draws."""
    chance = np.random.default_rng(0)
    means = [values[chance.integers(0, len(values), len(values))].mean() for _ in range(draws)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


@dataclass(frozen=True)
class Score:
    """One order in one test."""

    test: str
    order: str
    area: Interval
    better: Interval | None  # than random, paired by image; None of random itself
    ahead: Interval | None = None  # of centre, likewise; None of centre and random


@dataclass(frozen=True)
class Scores:
    """What `scored` found; the probability is that of the class which the network chose for the whole image."""

    model: str
    layer: int
    images: int
    patches: int
    steps: int
    draws: int
    scores: tuple[Score, ...]

    @property
    def verdict(self) -> str:
        orders = dict.fromkeys(score.order for score in self.scores if score.ahead is not None)

        def winners(name: str) -> str:
            """Orders that are surely better than chance, or than the centre, in every test."""
            gains = {order: [getattr(score, name) for score in self.scores if score.order == order] for order in orders}
            won = [order for order, each in gains.items() if all(gain.low > 0 and gain.high >= LEAST for gain in each)]
            return " and ".join(won) or "none of them"

        return (
            f"Layer {self.layer}, {self.images:,} images. Better than a random order, in every test: {winners('better')}. "
            f"Better than starting at the centre of the image, in every test: {winners('ahead')}."
        )


def scored(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    *,
    layer: int = -1,
    tests: Sequence[str] = TESTS,
    steps: int = STEPS,
    draws: int = 3,
    batch_size: int = 64,
    tick: Tick = lambda images: None,
) -> Scores:
    """Every order in every test, over one tensor of images or batches of any number, also a loader's pairs.

    One batch in memory at a time, and one number an image, order and test. `draws` random orders make one random area.
    """
    if not model.config.num_classes:
        raise OptionError("the network has no classifier (num_classes is 0), so it predicts nothing that could be scored.")
    for test in tests:
        choose("test", test, TESTS)
    found: dict[tuple[str, str], list[Tensor]] = {}
    count, patches, size = 0, 0, model.config.patch_size
    for some in batches_of(images, batch_size):
        with only_looking(model):
            orders = {name: [each] for name, each in orders_of(model, some, layer).items()}
            patches = orders["gradient"][0].shape[1]
            orders["centre"] = [_centre(some, size)]
            orders["random"] = _random(len(some), patches, draws, count, some.device)
            for test in tests:
                for order, ranks in orders.items():
                    drawn = [areas(model, some, rank, size, test, steps=steps, first=count) for rank in ranks]
                    found.setdefault((test, order), []).append(torch.stack(drawn).mean(0))
        count += len(some)
        tick(len(some))
    values = {key: torch.cat(each).numpy() for key, each in found.items()}
    scores = []
    for (test, order), each in values.items():
        sign = 1 if test == "insertion" else -1
        better = None if order == "random" else bootstrap(sign * (each - values[test, "random"]))
        ahead = None if order in ("random", "centre") else bootstrap(sign * (each - values[test, "centre"]))
        scores.append(Score(test, order, bootstrap(each), better, ahead))
    return Scores(model.config.name, layer % len(model.blocks), count, patches, steps, draws, tuple(scores))


def _centre(images: Tensor, patch_size: int) -> Tensor:
    """(b, n): minus the distance of a patch from the middle, in patches."""
    down, across = (torch.arange(side // patch_size) - (side // patch_size - 1) / 2 for side in images.shape[-2:])
    near = -(down[:, None].square() + across.square()).sqrt().flatten()
    return near.expand(len(images), -1).to(images.device)


def _random(images: int, patches: int, draws: int, first: int, device: torch.device) -> list[Tensor]:
    """`draws` times (images, patches): of each image always the same orders, whatever its batch."""
    each = [torch.rand(draws, patches, generator=torch.Generator().manual_seed(first + i)) for i in range(images)]
    return list(torch.stack(each, 1).to(device))
