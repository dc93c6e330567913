"""Do maps find the thing in the picture? Maps of every layer and head against masks that people drew.

    mask            1 the thing, 2 background, 3 border, which nobody counts (the trimaps of Oxford-IIIT Pets)
    map             the memberships of a head, or the attention its patches receive; stretched bilinearly to the mask's size
    iou_mean        |map above its own mean, and thing| / |either|
    iou_area        the same with the threshold at which the map marks as much as the mask: right size given, where is asked
    pointing        is the largest value on the thing?

    best            of the head that was best on the other half of the images: choosing it on the same ones would flatter it;
                    of one layer, and of all layers
    median          of the heads of a layer, each with its mean over the images: the head in the middle
    used            of the head with the largest gate, by image; only with gates
    centre          no network: a map that says "the middle of the picture". A map that does not beat it has found nothing

Means over images with bootstrap 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.analysis.intervals import Interval, bootstrap
from dmst.analysis.membership import attention_received, maps
from dmst.analysis.probes import only_looking
from dmst.errors import OptionError, ShapeError
from dmst.models import Trace, VisionModel

MEASURES = ("iou_mean", "iou_area", "pointing")
THING, BACKGROUND, BORDER = 1, 2, 3


def iou(values: Tensor, mask: Tensor, threshold: str = "mean") -> Tensor:
    """(...): intersection over union of maps (..., h, w) and masks that broadcast to them, border left out.

    threshold "mean": above the map's own mean. "area": as many of the largest values as the mask has pixels of the thing, and
    ties with the last of them.
    """
    values, thing, counted = _flat(values, mask)
    if threshold == "mean":
        mean = (values * counted).sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
        marked = (values > mean) & counted
    elif threshold == "area":
        area = thing.sum(-1, keepdim=True)
        ranked = values.masked_fill(~counted, -torch.inf).sort(-1, descending=True).values
        last = ranked.gather(-1, (area - 1).clamp(min=0))
        marked = (values >= last) & counted & (area > 0)
    else:
        raise OptionError(f'threshold is {threshold!r}: it is "mean" or "area".')
    return (marked & thing).sum(-1) / (marked | thing).sum(-1).clamp(min=1)


def pointing(values: Tensor, mask: Tensor) -> Tensor:
    """(...): 1 where the largest value of a map lies on the thing, else 0; the border cannot be pointed at."""
    values, thing, counted = _flat(values, mask)
    place = values.masked_fill(~counted, -torch.inf).argmax(-1, keepdim=True)
    return thing.gather(-1, place)[..., 0].float()


def _flat(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if values.shape[-2:] != mask.shape[-2:]:
        raise ShapeError(f"a map of {tuple(values.shape[-2:])} and a mask of {tuple(mask.shape[-2:])}: stretch the map first.")
    values, mask = (each.flatten(-2) for each in torch.broadcast_tensors(values, mask))
    return values, mask == THING, mask != BORDER


def head_maps(trace: Trace, layer: int) -> tuple[str, Tensor]:
    """What the heads of a layer have as maps, (b, k, rows, columns), and its name: "membership", or "attention" received."""
    if trace.layers[layer].parts.membership is not None:
        return "membership", maps(trace, layer)
    received = attention_received(trace, layer)
    if received is None:
        raise OptionError("this model's operator computes neither memberships nor attention weights, so it has no maps.")
    return "attention", received.unflatten(-1, trace.grid).float().cpu()


@dataclass(frozen=True)
class LayerForeground:
    """One layer: measure -> mean and interval."""

    layer: int
    best: dict[str, Interval]
    head: dict[str, tuple[int, int]]  # which head was chosen on even and on odd images
    median: dict[str, float]
    used: dict[str, Interval] | None


@dataclass(frozen=True)
class Foreground:
    model: str
    images: int
    what: str  # "membership" or "attention"
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

    def to_dict(self) -> dict[str, Any]:
        return _plain(asdict(self)) | {"verdict": self.verdict}


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return value._asdict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def foreground(
    model: VisionModel, batches: Iterable[tuple[Tensor, Tensor]], *, tick: Callable[[int], None] = lambda images: None
) -> Foreground:
    """Over batches of images (b, c, h, w) and masks (b, h, w) of the same frame; one batch in memory, few numbers an image."""
    found: list[Tensor] = []  # (b, layers, heads, measures)
    used: list[Tensor] = []  # (b, layers, measures)
    centre: list[Tensor] = []  # (b, measures)
    share, what = list[Tensor](), ""
    for images, masks in batches:
        masks = masks.cpu()
        with only_looking(model):
            trace = model.trace(images)
            rows, gates = [], []
            for layer in range(len(trace.layers)):
                what, small = head_maps(trace, layer)
                rows.append(_measures(_stretched(small, masks), masks[:, None]))
                gate = trace.layers[layer].parts.gate
                if gate is not None:
                    gates.append(rows[-1][torch.arange(len(images)), gate.argmax(-1).cpu()])
        found.append(torch.stack(rows, 1))
        used += [torch.stack(gates, 1)] if len(gates) == len(rows) else []
        centre.append(_measures(_centre(masks), masks))
        share.append((masks == THING).sum((-2, -1)) / (masks != BORDER).sum((-2, -1)).clamp(min=1))
        tick(len(images))
    if not found:
        raise OptionError("foreground was given no images.")
    values, middle = torch.cat(found).double().numpy(), torch.cat(centre).double().numpy()
    picked = torch.cat(used).double().numpy() if used else None
    heads = values.shape[2]
    best = {measure: _cross_chosen(values[..., m].reshape(len(values), -1)) for m, measure in enumerate(MEASURES)}
    return Foreground(
        model=model.config.name,
        images=len(values),
        what=what,
        share=torch.cat(share).double().mean().item(),
        centre={measure: bootstrap(middle[:, m]) for m, measure in enumerate(MEASURES)},
        best={measure: bootstrap(best[measure][0]) for measure in MEASURES},
        head={measure: tuple(divmod(head, heads) for head in best[measure][1]) for measure in MEASURES},
        ahead={measure: bootstrap(best[measure][0] - middle[:, m]) for m, measure in enumerate(MEASURES)},
        layers=tuple(_layer(values, picked, layer) for layer in range(values.shape[1])),
    )


def _layer(values: np.ndarray, picked: np.ndarray | None, layer: int) -> LayerForeground:
    """From values (b, layers, heads, measures)."""
    best = {measure: _cross_chosen(values[:, layer, :, m]) for m, measure in enumerate(MEASURES)}
    return LayerForeground(
        layer,
        {measure: bootstrap(chosen) for measure, (chosen, _) in best.items()},
        {measure: heads for measure, (_, heads) in best.items()},
        {measure: float(np.median(values[:, layer, :, m].mean(0))) for m, measure in enumerate(MEASURES)},
        None if picked is None else {measure: bootstrap(picked[:, layer, m]) for m, measure in enumerate(MEASURES)},
    )


def _measures(values: Tensor, mask: Tensor) -> Tensor:
    """(..., measures) of maps (..., h, w)."""
    return torch.stack((iou(values, mask, "mean"), iou(values, mask, "area"), pointing(values, mask)), -1)


def _stretched(small: Tensor, masks: Tensor) -> Tensor:
    return F.interpolate(small, tuple(masks.shape[-2:]), mode="bilinear", align_corners=False)


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
