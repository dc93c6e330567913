"""Memberships and gates as pictures: what a layer computed, cell for cell, never a second formula.

maps(trace, layer)          (b, k, rows, columns): membership of every patch in every subspace, or in its group of that head
groups(trace, layer)        (b, k, rows, columns): the group that a patch belongs to most; None in layers without groups
attention_received(...)     (b, k, n): of layers that have rows of attention instead, how much each patch is looked at
gradient_map(model, images) (b, rows, columns): how much each patch moves the score of the answer, for any network
ends(values, what)          the numbers that the first and the last colour stand for
colour(values, low, high)   numbers to colours: dark blue (low) over grey to yellow (high), readable in grey and by everyone
overlay(image, map)         the map over its image in grey, one square per patch; the page of `dmst explore` draws the same
segmentation(image, groups, map)  the same for groups: one colour per group, stronger where the membership is larger
sheet(trace, images)        images down, heads across: one picture
layers_sheet(trace, image)  layers down, heads across: one picture of one image
gate_by_class(gates, labels)
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from dmst.errors import OptionError
from dmst.models import LayerTrace, Trace, VisionModel

Pixels = NDArray[np.uint8]  # (h, w, 3)
Tile = tuple[Pixels, str]  # and the words under it

# anchors of a perceptually even ramp that does not lean on red against green
RAMP = np.array(
    [
        (0, 32, 77), (21, 52, 109), (67, 78, 108), (102, 105, 112),
        (137, 134, 121), (176, 165, 113), (217, 199, 91), (255, 234, 70),
    ],
    dtype=np.float64,
)  # fmt: skip

# One colour for each group, then again from the first. Found by search: over grey the two most alike are far apart, also for
# people who see without one kind of cone, and neighbouring cells of a 4 x 4 grid differ most.
PALETTE = np.array(
    [
        (194, 255, 0), (0, 0, 93), (0, 255, 181), (0, 58, 90), (253, 36, 169), (143, 236, 117), (227, 119, 0), (142, 46, 197),
        (0, 71, 255), (93, 11, 0), (143, 255, 255), (255, 255, 92), (197, 34, 0), (162, 180, 255), (34, 0, 255), (12, 136, 91),
    ],
    dtype=np.uint8,
)  # fmt: skip

MISSING = (204, 121, 167)  # a number that is not there: none of the ramp's colours
LUMA = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue look


def maps(trace: Trace, layer: int = -1) -> Tensor:
    """(b, k, rows, columns): the memberships of the patches in one layer (from 0; -1 is the last); of groups, the largest."""
    membership = layer_of(trace, layer).parts.membership
    if membership is None:
        raise OptionError("this model's operator computes no memberships (nor rows of attention of patches): nothing to draw.")
    values = membership if membership.ndim == 3 else membership.amax(-2)
    return values[..., trace.prefix :].unflatten(-1, trace.grid).detach().float().cpu()


def groups(trace: Trace, layer: int = -1) -> Tensor | None:
    """(b, k, rows, columns): argmax over the groups of a head, for each patch; None where heads have no groups."""
    membership = layer_of(trace, layer).parts.membership
    if membership is None or membership.ndim == 3:
        return None
    return membership.argmax(-2)[..., trace.prefix :].unflatten(-1, trace.grid).cpu()


def attention_received(trace: Trace, layer: int = -1) -> Tensor | None:
    """(b, k, n): how much each patch is looked at, by the class token where the layer has it, else by all; None without."""
    attention = layer_of(trace, layer).parts.attention
    rows, columns = trace.grid
    if attention is None or attention.shape[-1] != trace.prefix + rows * columns:  # XCA's rows are channels
        return None
    return (attention[:, :, 0] if trace.prefix else attention.mean(-2))[..., trace.prefix :]


def gradient_map(model: VisionModel, images: Tensor) -> Tensor:
    """(b, rows, columns): gradient of the score (logit) of the likeliest class, times the input, mean over each patch."""
    with torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        logits = model(pixels)
        slope = torch.autograd.grad(logits.gather(1, logits.argmax(-1, keepdim=True)).sum(), pixels)[0]
    return F.avg_pool2d((slope * images).sum(1, keepdim=True), model.config.patch_size)[:, 0]


def drawn(trace: Trace, layer: int = -1) -> tuple[str, Tensor]:
    """What a picture of this layer shows, "membership", "group membership" or "attention received", and its maps (b, k, rows,
    columns)."""
    received = None if layer_of(trace, layer).parts.membership is not None else attention_received(trace, layer)
    if received is None:
        return "membership" if groups(trace, layer) is None else "group membership", maps(trace, layer)
    return "attention received", received.unflatten(-1, trace.grid).detach().float().cpu()


def layer_of(trace: Trace, layer: int) -> LayerTrace:
    """One layer of a trace, from 0; -1 is the last."""
    if not -len(trace.layers) <= layer < len(trace.layers):
        raise OptionError(f"layer is {layer}: the model has layers 0 to {len(trace.layers) - 1}.")
    return trace.layers[layer]


def gate_by_class(gates: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(classes, k): the mean gate of each head over the images of each class; NaN where a class has none."""
    total = torch.zeros(classes, gates.shape[1], dtype=gates.dtype, device=gates.device).index_add(0, labels, gates)
    return total / torch.bincount(labels, minlength=classes).unsqueeze(-1)


def ends(values: Tensor, what: str = "membership") -> tuple[float, float]:
    """What the first and the last colour of a map stand for: a membership 0 and 1, whatever the layer has of them (more where
    it is above 1); a gradient its largest size below and above 0; attention 0 and its largest."""
    seen = values[values.isfinite()]
    low, high = (seen.min().item(), seen.max().item()) if seen.numel() else (0.0, 1.0)
    if what == "gradient":
        most = max(-low, high) or 1.0
        return -most, most
    least, most = min(0.0, low), max(high, 1.0) if what.endswith("membership") else high
    return least, most if most > least else least + 1


def colour(values: Tensor, low: float = 0.0, high: float = 1.0) -> Pixels:
    """(h, w) numbers to (h, w, 3) colours; `low` and `high` are the ends of the ramp."""
    missing = values.isnan().numpy()
    place = ((values.double() - low) / max(high - low, 1e-12)).nan_to_num().clamp(0, 1).numpy() * (len(RAMP) - 1)
    below = np.minimum(place.astype(int), len(RAMP) - 2)
    part = (place - below)[..., None]
    pixels = np.round(RAMP[below] * (1 - part) + RAMP[below + 1] * part).astype(np.uint8)
    pixels[missing] = MISSING
    return pixels


def picture(image: Tensor) -> Pixels:
    """One image (c, h, w) with pixels -1..1, or any range, stretched to 0..255."""
    image = image.detach().float().cpu()[: 3 if len(image) >= 3 else 1]
    seen = image[image.isfinite()]
    low, high = (seen.min(), seen.max()) if seen.numel() else (torch.zeros(()), torch.ones(()))
    image = image.nan_to_num(low.item(), high.item(), low.item())
    pixels = ((image - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    return pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()


def enlarge(pixels: Pixels, factor: int) -> Pixels:
    """Every pixel a square of `factor`: nothing is made up between them."""
    return pixels.repeat(factor, 0).repeat(factor, 1)


def overlay(image: Pixels, values: Tensor, low: float = 0.0, high: float = 1.0, strength: float = 0.6) -> Pixels:
    """A map (rows, columns), each number a square over its patch; the image below is grey, so that all colour is the map's."""
    return _cover(image, colour(values.detach().cpu(), low, high), np.full((*values.shape, 1), strength))


def segmentation(image: Pixels, group: Tensor, values: Tensor, strength: float = 0.6) -> Pixels:
    """Groups (rows, columns) and their memberships, as `overlay` does it: from 0.7 of `strength` at 0 to all of it at 1."""
    pixels, missing = PALETTE[group.cpu().numpy() % len(PALETTE)], values.isnan().cpu().numpy()
    pixels[missing] = MISSING
    return _cover(image, pixels, strength * (0.7 + 0.3 * values.detach().cpu().double().nan_to_num(1).numpy()[..., None]))


def _cover(image: Pixels, colours: Pixels, strength: NDArray[np.float64]) -> Pixels:
    """Every patch a square of its colour (rows, columns, 3) over the grey image, in its strength (rows, columns, 1)."""
    height, width = image.shape[:2]
    rows, columns = colours.shape[:2]
    place = np.ix_(np.arange(height) * rows // height, np.arange(width) * columns // width)
    return np.round((1 - strength[place]) * grey(image) + strength[place] * colours[place]).astype(np.uint8)


def grey(pixels: Pixels) -> Pixels:
    return np.round(pixels @ LUMA).astype(np.uint8)[..., None].repeat(3, -1)


def sheet(trace: Trace, images: Tensor, layer: int = -1, *, gradients: Tensor | None = None, size: int = 160) -> Pixels:
    """One picture: images down; the image and then every head across, its memberships laid over the image, its gate under it.

    `size` is the longer side of a tile in pixels. A head that is silent for an image (gate exactly 0) is left as the faint
    image alone. A head with groups shows them in colours. Takes the first images of the trace, or all of them. Layers with rows
    of attention show what the patches receive; a head's largest is written under it. With `gradients`, of `gradient_map`, there
    is one more tile at the end.
    """
    rows = []
    for i, image in enumerate(images):
        rows.append(_row(trace, layer, i, fit(picture(image), size), "image"))
        if gradients is not None:
            rows[-1].append((overlay(rows[-1][0][0], gradients[i], *ends(gradients[i], "gradient")), "gradient"))
    return lay_out(rows)


def layers_sheet(
    trace: Trace, image: Tensor, index: int = 0, *, layers: Sequence[int] | None = None, size: int = 160
) -> Pixels:
    """One picture of one image (c, h, w), number `index` of the trace: layers (all, or `layers`) down, heads across."""
    plain, depth = fit(picture(image), size), len(trace.layers)
    return lay_out([_row(trace, i, index, plain, f"layer {i % depth}") for i in (range(depth) if layers is None else layers)])


def _row(trace: Trace, layer: int, index: int, plain: Pixels, name: str) -> list[Tile]:
    """The image, and the tiles of the heads of one layer for it, with the words under them."""
    what, values = drawn(trace, layer)
    group = groups(trace, layer)
    gate = trace.layers[layer].parts.gate
    low, high = ends(values[index], what)
    row = [(plain, name)]
    for k, each in enumerate(values[index]):
        g = None if gate is None else gate[index, k].item()
        words = "" if g is None else ": silent" if g == 0 else f": gate {g:.2f}"
        if what == "attention received":
            words = f": looked at, to {each.max():.2g}"
        covered = overlay(plain, each, low, high) if group is None else segmentation(plain, group[index, k], each)
        row.append((_faint(plain) if g == 0 else covered, f"head {k}{words}"))
    return row


def fit(pixels: Pixels, size: int) -> Pixels:
    """The longer side brought to about `size`: whole squares when it grows, averaged when it shrinks."""
    longer = max(pixels.shape[:2])
    if longer <= size:
        return enlarge(pixels, max(1, size // longer))
    height, width = (max(1, round(side * size / longer)) for side in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX))


def lay_out(rows: Sequence[Sequence[Tile]], gap: int = 6, line: int = 16) -> Pixels:
    """Tiles of one size in rows on white, with a line of words under each."""
    tall, wide = rows[0][0][0].shape[:2]
    down, across = tall + line + gap, wide + gap
    page = Image.new("RGB", (across * max(len(row) for row in rows) - gap, down * len(rows) - gap), (255, 255, 255))
    pen = ImageDraw.Draw(page)
    for i, row in enumerate(rows):
        for j, (tile, words) in enumerate(row):
            page.paste(Image.fromarray(tile), (j * across, i * down))
            pen.text((j * across, i * down + tall + 2), words, fill=(60, 64, 70))
    return np.asarray(page)


def _faint(pixels: Pixels) -> Pixels:
    return np.round(255 - 0.3 * (255.0 - grey(pixels))).astype(np.uint8)


def png(pixels: Pixels, level: int = 9) -> bytes:
    """1 is quickest, 9 smallest."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=level)
    return out.getvalue()
