"""Is a map true? Take away the patches that it names and see what the network's answer loses.

    deletion     most important patches first, each replaced by the image's own mean colour      low area: a true map
    insertion    the other way round: from the mean colour alone, most important first           high area: a true map
    road         deletion, each removed pixel the mean of its neighbours, solved as one linear   low area: a true map
                 system, plus a little noise (ROAD, Rong et al. 2022): the holes' shape gives nothing away

    area = of the curve: probability of the class that the network chose, against the share of patches taken, 0 to 1

What puts the patches in order: numbers that the network itself computed, and two that it did not, for comparison:

    membership   pi of the head with the largest |gate|, by image (no gate: of the largest mass);   layer `layer`
                 where heads have groups (GMSA), of its group of the largest mass
    gated        sum_k g_k pi_nk; none with groups: their memberships sum to 1 in every head        layer `layer`, with gates
    attention    what a patch receives: the row of the class token, or the mean of all rows         MHSA and MSSA
    gradient     gradient of the chosen class's logit times the input, summed over the patch
    centre       the middle of the picture first: by no network
    random       the mean area of several random orders, by no network: what the others have to beat

Of each area the mean, and the paired differences to random and to centre with their bootstrap 95 % intervals, positive where
the order is better.

`foreground` asks it another way: do maps find the thing in the picture? Every layer and head against masks that people drew.

    mask            1 the thing, 2 background, 3 border, which nobody counts (the trimaps of Oxford-IIIT Pets)
    map             the memberships of a head, or of each group of a head (GMSA: k g maps, group by group), or the attention its
                    patches receive; stretched bilinearly to the mask's size
    iou_mean        |map above its own mean, and thing| / |either|
    iou_area        the same with the threshold at which the map marks as much as the mask: right size given, where is asked
    pointing        is the largest value on the thing?

    best            of the head (or group) that was best on the other half of the images: choosing it on the same ones would
                    flatter it; of one layer, and of all layers
    median          of the heads (or groups) of a layer, each with its mean over the images: the one in the middle
    centre          no network: a map that says "the middle of the picture". A map that does not beat it has found nothing
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

from dmst.analysis.membership import attention_received, drawn, gradient_map, layer_of
from dmst.analysis.running import Tick, batches_of, only_looking
from dmst.errors import OptionError, choose
from dmst.models import Trace, VisionModel

TESTS = ("insertion", "deletion", "road")
NOISE = 0.01  # of the pixels as the network takes them, road
COARSEST = 8  # pixels: the size at which road's linear system is solved from nothing
LEAST = 0.001  # of an area: a smaller difference is none, however sure
STEPS = 10
MEASURES = ("iou_mean", "iou_area", "pointing")
THING, BORDER = 1, 3
Answer = Callable[[Tensor], Tensor]  # images (b, c, h, w) -> logits (b, classes)


def orders_of(model: VisionModel, images: Tensor, layer: int = -1) -> dict[str, Tensor]:
    """How important each patch is, (b, n), by everything that this network computes of it in one layer; without random."""
    with torch.no_grad():
        trace = model.trace(images)
    parts, found = layer_of(trace, layer).parts, dict[str, Tensor]()
    if parts.membership is not None:
        membership, rows = parts.membership[..., trace.prefix :], torch.arange(len(images))  # (b, k, n), or (b, k, g, n)
        mine = membership if parts.gate is None else membership[rows, parts.gate.abs().argmax(-1)].unsqueeze(1)
        mine = mine.flatten(1, -2)
        found["membership"] = mine[rows, mine.sum(-1).argmax(-1)]
        if parts.gate is not None and membership.ndim == 3:
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
    for some in batches_of(images):
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


# --- against masks -----------------------------------------------------------------------------------------------------


def measures(values: Tensor, mask: Tensor) -> Tensor:
    """(..., measures) of maps (..., h, w) and masks that broadcast to them; the border does not count.

    At the mask's area, as many of the largest values are marked as the mask has pixels of the thing, and ties with the last.
    """
    values, mask = (each.flatten(-2) for each in torch.broadcast_tensors(values, mask))
    thing, counted = mask == THING, mask != BORDER
    mean = (values * counted).sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
    area, ranked = thing.sum(-1, keepdim=True), values.masked_fill(~counted, -torch.inf).sort(-1, descending=True)
    last = ranked.values.gather(-1, (area - 1).clamp(min=0))
    marks = ((values > mean) & counted, (values >= last) & counted & (area > 0))
    iou = [(marked & thing).sum(-1) / (marked | thing).sum(-1).clamp(min=1) for marked in marks]
    peak = values.masked_fill(~counted, -torch.inf).argmax(-1, keepdim=True)
    return torch.stack((*iou, thing.gather(-1, peak)[..., 0].float()), -1)


@dataclass(frozen=True)
class LayerForeground:
    """One layer: measure -> mean and interval."""

    layer: int
    best: dict[str, Interval]
    median: dict[str, float]


@dataclass(frozen=True)
class Foreground:
    model: str
    images: int
    what: str  # "membership" or "attention received"
    share: float  # of the counted pixels that are the thing: what pointing at random finds
    centre: dict[str, Interval]
    best: dict[str, Interval]  # of all layers and heads
    head: dict[str, tuple[tuple[int, int], tuple[int, int]]]  # which (layer, map): chosen on even and on odd images
    ahead: dict[str, Interval]  # best minus centre, paired by image
    layers: tuple[LayerForeground, ...]
    groups: int = 1  # maps of a head: map i is that of group i % groups of head i // groups

    @property
    def verdict(self) -> str:
        ahead, found = self.ahead["iou_area"], self.best["iou_area"].mean
        which = " and ".join(f"{self._named(each)} of layer {layer}" for layer, each in dict.fromkeys(self.head["iou_area"]))
        word = "finds the object better than" if ahead.low > 0 else "is worse than" if ahead.high < 0 else "is no better than"
        return (
            f"The best {self.what} map ({which}; IoU {found:.3f} at the mask's area) {word} a map that always marks the centre "
            f"of the image (IoU {self.centre['iou_area'].mean:.3f}). Difference: {ahead.mean:+.3f}, 95 % interval "
            f"{ahead.low:+.3f} to {ahead.high:+.3f}, {self.images:,} images."
        )

    def _named(self, each: int) -> str:
        return f"head {each}" if self.groups == 1 else f"group {each % self.groups} of head {each // self.groups}"


def foreground(model: VisionModel, batches: Iterable[tuple[Tensor, Tensor]], *, tick: Tick = lambda images: None) -> Foreground:
    """Over batches of images (b, c, h, w) and masks (b, h, w) of the same frame; one batch in memory, few numbers an image."""
    found: list[Tensor] = []  # (b, layers, maps, measures)
    centre: list[Tensor] = []  # (b, measures)
    share, what, groups = list[Tensor](), "", 1
    for images, masks in batches:
        masks = masks.cpu()
        with only_looking(model):
            trace = model.trace(images)
        rows = []
        for layer in range(len(trace.layers)):
            what, small, groups = _maps(trace, layer)
            every = []
            for some in small.split(small.shape[1] // groups, 1):  # as many at once as there are heads: k g would be large
                full = F.interpolate(some, tuple(masks.shape[-2:]), mode="bilinear", align_corners=False)
                every.append(measures(full, masks[:, None]))
            rows.append(torch.cat(every, 1))
        found.append(torch.stack(rows, 1))
        centre.append(measures(_middle(masks), masks))
        share.append((masks == THING).sum((-2, -1)) / (masks != BORDER).sum((-2, -1)).clamp(min=1))
        tick(len(images))
    if not found:
        raise OptionError("no images were given.")
    values, middle = torch.cat(found).double().numpy(), torch.cat(centre).double().numpy()
    each_layer = values.shape[2]
    best, head = {}, {}
    for m, measure in enumerate(MEASURES):
        best[measure], chosen = _cross_chosen(values[..., m].reshape(len(values), -1))
        head[measure] = tuple(divmod(each, each_layer) for each in chosen)
    return Foreground(
        model=model.config.name,
        images=len(values),
        what=what,
        share=torch.cat(share).double().mean().item(),
        centre={measure: bootstrap(middle[:, m]) for m, measure in enumerate(MEASURES)},
        best={measure: bootstrap(each) for measure, each in best.items()},
        head=head,
        ahead={measure: bootstrap(best[measure] - middle[:, m]) for m, measure in enumerate(MEASURES)},
        layers=tuple(_layer(layer, values[:, layer]) for layer in range(values.shape[1])),
        groups=groups,
    )


def _maps(trace: Trace, layer: int) -> tuple[str, Tensor, int]:
    """What the maps show, all maps of a layer (b, k g, rows, columns), and g: 1 without groups."""
    membership = layer_of(trace, layer).parts.membership
    if membership is None or membership.ndim == 3:
        return *drawn(trace, layer), 1
    each = membership[..., trace.prefix :].unflatten(-1, trace.grid).flatten(1, 2)
    return "membership", each.detach().float().cpu(), membership.shape[2]


def _layer(layer: int, values: np.ndarray) -> LayerForeground:
    """From values (b, maps, measures)."""
    best = {measure: bootstrap(_cross_chosen(values[..., m])[0]) for m, measure in enumerate(MEASURES)}
    return LayerForeground(layer, best, dict(zip(MEASURES, np.median(values.mean(0), 0).tolist(), strict=True)))


def _middle(masks: Tensor) -> Tensor:
    """Minus the distance from the middle, each side scaled to -1..1: (b, h, w)."""
    down, across = (torch.linspace(-1, 1, side) for side in masks.shape[-2:])
    return -(down[:, None].square() + across.square()).sqrt().expand(masks.shape)


def _cross_chosen(values: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """(b, k) -> (b,): each image by the head that is best on the images of the other half (even and odd places)."""
    if len(values) == 1:
        head = int(values[0].argmax())
        return values[:, head], (head, head)
    even, odd = int(values[0::2].mean(0).argmax()), int(values[1::2].mean(0).argmax())
    chosen = np.empty(len(values))
    chosen[0::2], chosen[1::2] = values[0::2, odd], values[1::2, even]
    return chosen, (even, odd)
