"""Images and membership maps for a page.

photos(model, images, labels, classes)     each image, its label, and what the network answers
maps_of(model, images)                     for each image its maps: heads down, layers across
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmst.analysis.membership import Pixels, colour, fit, maps
from dmst.analysis.running import only_looking
from dmst.models import Trace, VisionModel
from dmst.words import short

LETTERS = 26  # of a name
MOST_LAYERS = 12  # across the page
MOST_CELLS = 400_000  # of all maps together: a cell costs up to four bytes of the page
PHOTO = 144  # pixels of an image on the page, the longer side


class Photo(NamedTuple):
    pixels: Pixels
    name: str
    kind: str  # "label", or "" for a photo with a title of its own
    answer: str
    sure: float
    right: bool


class Tile(NamedTuple):
    """One map. Silent heads have gate 0; heads of operators without gates have None."""

    pixels: Pixels
    alt: str
    gate: float | None = None


class Maps(NamedTuple):
    layers: list[int]
    rows: list[list[tuple[str, list[Tile]]]]  # for each image: (head, a tile for each layer)
    low: float  # the ends of the colours
    high: float
    gated: bool
    depth: int


def class_name(classes: Sequence[str], label: int) -> str:
    return short(classes[label], LETTERS) if label < len(classes) else f"class {label}"


def photos(
    model: VisionModel, images: Tensor, labels: Sequence[int], classes: Sequence[str], titles: Sequence[str] = ()
) -> list[Photo]:
    """`titles`: what photos are called that have no label."""
    with only_looking(model):
        sure, says = model(images).double().cpu().softmax(-1).max(-1)
    found = []
    for i, image in enumerate(images):
        pixels, answer = pixels_of(model, image), class_name(classes, int(says[i]))
        name = short(titles[i], LETTERS) if titles else class_name(classes, labels[i])
        right = name == answer if titles else int(says[i]) == labels[i]
        pixels = fit(pixels, PHOTO) if max(pixels.shape) > PHOTO else pixels
        found.append(Photo(pixels, name, "" if titles else "label", answer, sure[i].item(), right))
    return found


def maps_of(model: VisionModel, images: Tensor) -> Maps | None:
    """The maps of the first images, as many as a page has room for; None where the operator computes no memberships."""
    depth = len(model.blocks)
    with only_looking(model):
        first = model.blocks[0].trace(*model.embed(images[:1]))  # type: ignore[operator]
        if first.parts.membership is None:
            return None
        layers = evenly(range(depth), MOST_LAYERS)
        room = MOST_CELLS // (len(layers) * first.parts.membership[0].numel())
        trace = model.trace(images[: max(1, room)])
    low, high = colour_range(trace, layers)
    columns = [tiles(trace, layer, low, high) for layer in layers]
    rows = [
        [(f"head {k}", [column[i][k] for column in columns]) for k in range(len(columns[0][i]))]
        for i in range(len(trace.logits))
    ]
    return Maps(layers, rows, low, high, first.parts.gate is not None, depth)


def tiles(trace: Trace, layer: int, low: float, high: float) -> list[list[Tile]]:
    """The maps of one layer: for each image, a tile for each head."""
    gate = trace.layers[layer].parts.gate
    return [
        [
            Tile(
                colour(values, low, high),
                f"head {k} of layer {layer}: {values.min():.2g} to {values.max():.2g}",
                None if gate is None else gate[i, k].item(),
            )
            for k, values in enumerate(image)
        ]
        for i, image in enumerate(maps(trace, layer))
    ]


def colour_range(trace: Trace, layers: Sequence[int]) -> tuple[float, float]:
    """0 and 1, or the least and the greatest membership where all lie close together."""
    seen = torch.stack([torch.stack(maps(trace, layer).aminmax()) for layer in layers])
    low, high = seen.min().item(), seen.max().item()
    return (0.0, 1.0) if high - low > 0.5 else (low, high)


def pixels_of(model: VisionModel, normalised: Tensor) -> Pixels:
    """An image (c, h, w), normalised for the model, as pixels (h, w, 3); grey where it has one channel."""
    mean, std = (torch.tensor(model.pretrained_cfg[name], dtype=torch.float64).view(-1, 1, 1) for name in ("mean", "std"))
    values = (normalised.detach().double().cpu() * std + mean).nan_to_num().clamp(0, 1)
    values = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)
    return (values * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def evenly(rows: Sequence[Any], most: int) -> list[Any]:
    """At most so many of `rows`, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]
