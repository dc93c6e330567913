"""Images and membership maps for a page.

photos(model, images, ...)     each image, its label, and what the network answers
maps_of(model, images)         for each image its maps: heads down, layers across
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmst.analysis.charts import evenly
from dmst.analysis.membership import Pixels, colour, fit, maps
from dmst.analysis.running import only_looking
from dmst.models import VisionModel
from dmst.words import short

LETTERS = 26  # of a name
MOST_LAYERS = 12  # across the page
MOST_CELLS = 400_000  # of all maps together: a cell costs up to four bytes of the page
PHOTO = 144  # pixels of an image on the page, the longer side


def class_name(classes: Sequence[str], label: int) -> str:
    return short(classes[label], LETTERS) if label < len(classes) else f"class {label}"


def photos(
    model: VisionModel, images: Tensor, names: Sequence[str], answers: Sequence[str], sure: Sequence[float], kind: str = "label"
) -> list[dict[str, Any]]:
    """Each image with its name and its answer; `kind` says what its name is: "label", or "" for a title of its own."""
    found = []
    for image, name, answer, share in zip(images, names, answers, sure, strict=True):
        pixels = pixels_of(model, image)
        pixels = fit(pixels, PHOTO) if max(pixels.shape) > PHOTO else pixels
        found.append({"pixels": pixels, "name": short(name, LETTERS), "kind": kind, "answer": answer, "sure": share})
    return found


def maps_of(model: VisionModel, images: Tensor) -> dict[str, Any] | None:
    """The maps of the first images, as many as a page has room for; None where the operator computes no memberships.

    rows has for each image a (head, tiles) for each head, with a tile for each layer. A silent head has gate 0; where operators
    have no gates it is None. low and high are the ends of the colours: 0 and 1, or least and greatest where all are close.
    """
    with only_looking(model):
        first = model.blocks[0].trace(*model.embed(images[:1])).parts  # type: ignore[operator]
        if first.membership is None:
            return None
        layers = evenly(range(len(model.blocks)), MOST_LAYERS)
        room = MOST_CELLS // (len(layers) * first.membership[0].numel())
        trace = model.trace(images[: max(1, room)])
    drawn = torch.stack([maps(trace, layer) for layer in layers], 2)  # (b, k, layers, rows, columns)
    low, high = drawn.min().item(), drawn.max().item()
    if high - low > 0.5:
        low, high = 0.0, 1.0

    def tile(i: int, k: int, place: int) -> dict[str, Any]:
        values, gate = drawn[i, k, place], trace.layers[layers[place]].parts.gate
        alt = f"head {k} of layer {layers[place]}: {values.min():.2g} to {values.max():.2g}"
        return {"pixels": colour(values, low, high), "alt": alt, "gate": None if gate is None else gate[i, k].item()}

    count, heads, columns = drawn.shape[:3]
    rows = [[(f"head {k}", [tile(i, k, place) for place in range(columns)]) for k in range(heads)] for i in range(count)]
    gated = first.gate is not None
    return {"layers": layers, "rows": rows, "low": low, "high": high, "gated": gated, "depth": len(model.blocks)}


def pixels_of(model: VisionModel, normalised: Tensor) -> Pixels:
    """An image (c, h, w), normalised for the model, as pixels (h, w, 3); grey where it has one channel."""
    mean, std = (torch.tensor(model.pretrained_cfg[name], dtype=torch.float64).view(-1, 1, 1) for name in ("mean", "std"))
    values = (normalised.detach().double().cpu() * std + mean).nan_to_num().clamp(0, 1)
    values = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)
    return (values * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
