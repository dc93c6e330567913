"""Do maps find the thing in the picture? Maps of every layer and head against masks that people drew.

    mask            1 the thing, 2 background, 3 border, which nobody counts (the trimaps of Oxford-IIIT Pets)
    map             the memberships of a head, or the attention its patches receive; stretched bilinearly to the mask's size
    iou_mean        |map above its own mean, and thing| / |either|
    iou_area        the same with the threshold at which the map marks as much as the mask: right size given, where is asked
    pointing        is the largest value on the thing?

    best            of the head that was best on the other half of the images: choosing it on the same ones would flatter it;
                    of one layer, and of all layers
    median          of the heads of a layer, each with its mean over the images: the head in the middle
    centre          no network: a map that says "the middle of the picture". A map that does not beat it has found nothing

Means over images with bootstrap 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.analysis.membership import drawn
from dmst.analysis.running import Tick, only_looking
from dmst.analysis.scored import Interval, bootstrap
from dmst.errors import OptionError
from dmst.models import VisionModel

MEASURES = ("iou_mean", "iou_area", "pointing")
THING, BORDER = 1, 3


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
    head: dict[str, tuple[tuple[int, int], tuple[int, int]]]  # which (layer, head): chosen on even and on odd images
    ahead: dict[str, Interval]  # best minus centre, paired by image
    layers: tuple[LayerForeground, ...]

    @property
    def verdict(self) -> str:
        ahead, found = self.ahead["iou_area"], self.best["iou_area"].mean
        which = " and ".join(f"head {head} of layer {layer}" for layer, head in dict.fromkeys(self.head["iou_area"]))
        word = "finds the object better than" if ahead.low > 0 else "is worse than" if ahead.high < 0 else "is no better than"
        return (
            f"The best {self.what} map ({which}; IoU {found:.3f} at the mask's area) {word} a map that always marks the centre "
            f"of the image (IoU {self.centre['iou_area'].mean:.3f}). Difference: {ahead.mean:+.3f}, 95 % interval "
            f"{ahead.low:+.3f} to {ahead.high:+.3f}, {self.images:,} images."
        )


def foreground(model: VisionModel, batches: Iterable[tuple[Tensor, Tensor]], *, tick: Tick = lambda images: None) -> Foreground:
    """Over batches of images (b, c, h, w) and masks (b, h, w) of the same frame; one batch in memory, few numbers an image."""
    found: list[Tensor] = []  # (b, layers, heads, measures)
    centre: list[Tensor] = []  # (b, measures)
    share, what = list[Tensor](), ""
    for images, masks in batches:
        masks = masks.cpu()
        with only_looking(model):
            trace = model.trace(images)
        rows = []
        for layer in range(len(trace.layers)):
            what, small = drawn(trace, layer)
            full = F.interpolate(small, tuple(masks.shape[-2:]), mode="bilinear", align_corners=False)
            rows.append(measures(full, masks[:, None]))
        found.append(torch.stack(rows, 1))
        centre.append(measures(_centre(masks), masks))
        share.append((masks == THING).sum((-2, -1)) / (masks != BORDER).sum((-2, -1)).clamp(min=1))
        tick(len(images))
    if not found:
        raise OptionError("no images were given.")
    values, middle = torch.cat(found).double().numpy(), torch.cat(centre).double().numpy()
    heads = values.shape[2]
    best, head = {}, {}
    for m, measure in enumerate(MEASURES):
        best[measure], chosen = _cross_chosen(values[..., m].reshape(len(values), -1))
        head[measure] = tuple(divmod(each, heads) for each in chosen)
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
    )


def _layer(layer: int, values: np.ndarray) -> LayerForeground:
    """From values (b, heads, measures)."""
    best = {measure: bootstrap(_cross_chosen(values[..., m])[0]) for m, measure in enumerate(MEASURES)}
    return LayerForeground(layer, best, dict(zip(MEASURES, np.median(values.mean(0), 0).tolist(), strict=True)))


def _centre(masks: Tensor) -> Tensor:
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
