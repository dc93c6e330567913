"""What the patches of a layer hold, as colours: the first three principal components are red, green and blue.

    z - mean = U S V'          z (n, d): the tokens of a layer, of all patches of all images given
    y = (z - mean) V[:, :3]    a column of V has the sign that makes its largest entry positive
    colour = 1/2 + y / (4 s)   s: the deviation of y; what is beyond 0 or 1 is cut

Patches of one colour hold alike features. A colour means the same in all images given, and nothing from one layer to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from dmst.analysis.membership import Pixels, Tile, fit, lay_out, picture
from dmst.analysis.running import Tick, batches_of, only_looking
from dmst.errors import OptionError, bad_answer
from dmst.models import VisionModel

NOTHING = 1e-10  # of the mean square of the tokens: a smaller variance is rounding, and stays grey
ACROSS = 5  # tiles in a row of a picture


class Components(NamedTuple):
    """Three principal components of the tokens of one layer."""

    values: Tensor  # (b, 3, rows, columns) float64, each with mean 0 over all patches
    variance: Tensor  # (3,): of each
    total: float  # variance in all directions

    @property
    def share(self) -> float:
        """The part of the variance that the three hold; 0 where all tokens are alike."""
        return self.variance.sum().item() / self.total if self.total else 0.0

    @property
    def colours(self) -> Tensor:
        """(b, 3, rows, columns), 0 to 1: grey is the mean, the ends are two deviations away."""
        spread = self.variance.sqrt().where(self.variance > 0, torch.inf)
        return (0.5 + self.values / (4 * spread[:, None, None])).clamp(0, 1)


def components(maps: Tensor) -> Components:
    """PCA of feature maps (b, d, rows, columns), jointly over the patches of all images."""
    b, d, rows, _ = maps.shape
    tokens = rearrange(maps, "b d h w -> (b h w) d").double().cpu()
    size, centred = tokens.square().sum(-1).mean(), tokens - tokens.mean(0)
    variance, axes = torch.linalg.eigh(centred.T @ centred / len(tokens))  # ascending
    variance, axes = variance.flip(0), axes.flip(1)[:, :3]
    variance = variance.where(variance > NOTHING * size, 0.0)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    values = torch.zeros(len(tokens), 3, dtype=torch.float64)
    values[:, : min(d, 3)] = centred @ axes * (variance[:3] > 0)
    kept = torch.cat((variance[:3], torch.zeros(max(0, 3 - d), dtype=torch.float64)))
    return Components(rearrange(values, "(b h w) c -> b c h w", b=b, h=rows), kept, variance.sum().item())


def layer_components(
    model: VisionModel,
    images: Tensor | Iterable[Any],
    layers: Sequence[int] | None = None,
    *,
    tick: Tick = lambda done: None,
) -> dict[int, Components]:
    """By layer (all, or `layers`; -1 is the last): the components of the tokens after it, jointly over the images."""
    depth = len(model.blocks)
    for layer in layers or ():
        if not -depth <= layer < depth:
            raise OptionError(f"layer is {layer}: the model has layers 0 to {depth - 1}.")
    numbers = sorted({i % depth for i in layers}) if layers else list(range(depth))
    found: list[list[Tensor]] = []
    with only_looking(model):
        for batch in batches_of(images):
            found.append([each.cpu() for each in model.forward_intermediates(batch, numbers, intermediates_only=True)])
            tick(len(batch))
    every = {number: torch.cat(maps) for number, maps in zip(numbers, zip(*found, strict=True), strict=True)}
    if not all(maps.isfinite().all() for maps in every.values()):
        raise bad_answer(model.config.name, "these images")
    return {number: components(maps) for number, maps in every.items()}


def features_sheet(image: Tensor, found: dict[int, Components], index: int = 0, *, size: int = 160) -> Pixels:
    """One picture of one image (c, h, w), number `index` of those given: the image, then each layer's patches as colours."""
    plain = fit(picture(image), size)
    tiles: list[Tile] = [(plain, "image")]
    for number, each in found.items():
        tiles.append((_squares(each.colours[index], plain), f"layer {number}: {each.share:.0%}"))
    return lay_out([tiles[i : i + ACROSS] for i in range(0, len(tiles), ACROSS)])


def _squares(colours: Tensor, plain: Pixels) -> Pixels:
    """(3, rows, columns) at the size of the image: every patch a square of its colour."""
    (height, width), (_, rows, columns) = plain.shape[:2], colours.shape
    pixels = np.round(255 * colours.numpy().transpose(1, 2, 0)).astype(np.uint8)
    return pixels[np.ix_(np.arange(height) * rows // height, np.arange(width) * columns // width)]
