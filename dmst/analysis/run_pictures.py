"""The images on the page of a run: what the layers make of a few of them, cell for cell, and those that are read wrong.

Sample(model, images, labels, classes)     the first images of what is evaluated, and what the model says of them
memberships(sample)                        one view an image: layers across, heads down; "" where none are computed
mistakes(sample, seen)                     the surest first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmst.analysis.membership import Pixels, colour, fit, maps
from dmst.analysis.probes import only_looking
from dmst.analysis.report import image, ramp, tabs
from dmst.analysis.run_journal import WIDE, named, spread
from dmst.models import Trace, VisionModel
from dmst.words import html, short

MOST_IMAGES = 8  # drawn in a section
MOST_LAYERS = 12  # across the page
MOST_CELLS = 400_000  # of all maps together: a cell costs up to four bytes of the page
PHOTO, THUMB, TILE = 144, 104, 64  # pixels on the page: an image, a small one, a map
AT_ONCE = 32  # images


class Sample:
    """Images as the model takes them, their labels (or titles, where they are of no class), and what it says of them."""

    def __init__(
        self, model: VisionModel, images: Tensor, labels: Tensor, classes: Sequence[str], titles: Sequence[str] = ()
    ) -> None:
        self.model, self.images, self.labels, self.classes, self.titles = model, images, labels.cpu(), classes, titles
        with only_looking(model):
            logits = torch.cat([model(some).double().cpu() for some in images.split(AT_ONCE)])
        self.sure, self.says = logits.softmax(-1).max(-1)

    def name(self, i: int) -> str:
        return short(self.titles[i], WIDE) if self.titles else named(self.classes, int(self.labels[i]))

    def figure(self, i: int, size: int) -> str:
        """HTML: image i, what it is, and what it is read as."""
        pixels = pixels_of(self.images[i], self.model.pretrained_cfg)
        drawn = image(fit(pixels, size) if max(pixels.shape) > size else pixels, f"image {i + 1}, {self.name(i)}", size)
        said = named(self.classes, int(self.says[i]))
        told = f"predicted {html(said)}, {self.sure[i]:.0%}"
        label = "" if self.titles else "label "
        answer = int(self.says[i])
        right = said == self.name(i) if self.titles else answer == int(self.labels[i])
        told = told if right else f"{label}<b>{html(self.name(i))}</b>: {told}"
        caption = f'<figcaption class="note" style="overflow-wrap:anywhere">{told}</figcaption>'
        return f'<figure style="margin:0;flex:none;width:{size}px">{drawn}{caption}</figure>'


def memberships(sample: Sample, name: str = "image", *, explained: bool = True) -> str:
    """`explained`: with the words, which a page needs once."""
    model = sample.model
    with only_looking(model):
        first = model.blocks[0].trace(*model.embed(sample.images[:1]))  # type: ignore[operator]
        if first.parts.membership is None:
            return ""
        layers = spread(range(len(model.blocks)), MOST_LAYERS)
        cells = len(layers) * first.parts.membership[0].numel()
        chosen = examples(sample.labels, max(1, min(MOST_IMAGES, MOST_CELLS // cells)))
        trace = model.trace(sample.images[chosen])
    low, high = _ends(trace, layers)
    views = [(f"{row + 1}: {sample.name(i)}", _view(sample, i, trace, row, layers, low, high)) for row, i in enumerate(chosen)]
    told = [
        "<p>A layer has several <b>heads</b>; each head looks at one subspace of the features. The <b>membership</b> of a "
        "patch in a head, from 0 to 1, says how much the patch belongs to that head: yellow is more, dark blue is less."
    ]
    if first.parts.gate is not None:
        told.append(
            " Under a map is the head's <b>gate</b>: how much the head adds for this image. A head is <i>silent</i> if its "
            "gate is exactly 0: it adds nothing, and its map is drawn in grey."
        )
    told.append("</p><p>Choose an image. Layers and heads count from 0. A map is a tensor of the network, one cell per patch.")
    if len(layers) < len(model.blocks):
        told.append(f" {len(layers)} of {len(model.blocks)} layers are shown.")
    return (
        ("".join(told) + "</p>" if explained else "")
        + tabs(name, views)
        + ramp(low, high, "membership", 2 if high - low > 0.1 else 4)
    )


def mistakes(sample: Sample, seen: str) -> str:
    wrong = (sample.says != sample.labels).nonzero().flatten()
    surest = wrong[sample.sure[wrong].argsort(descending=True, stable=True)].tolist()[:MOST_IMAGES]
    count = f"the first {len(sample.labels):,} images of {html(seen)}"
    if not surest:
        return f"<p>The network predicts all of {count} correctly.</p>"
    rest = f" Shown: the {len(surest)} with the highest confidence (the percentage)." if len(wrong) > len(surest) else ""
    figures = "".join(sample.figure(i, THUMB) for i in surest)
    return f'<p>The network gets {len(wrong):,} of {count} wrong.{rest}</p><div class="wrong">{figures}</div>'


# --- pieces ----------------------------------------------------------------------------------------------------------


def _view(sample: Sample, i: int, trace: Trace, row: int, layers: Sequence[int], low: float, high: float) -> str:
    """One image, row `row` of the trace: itself, then heads down and layers across; beside it where there is room."""
    drawn = [maps(trace, layer)[row] for layer in layers]
    gates = [trace.layers[layer].parts.gate for layer in layers]
    lines = ["<tr><th></th>" + "".join(f"<th scope=col>layer {layer}</th>" for layer in layers) + "</tr>"]
    for k in range(len(drawn[0])):
        line = ""
        for layer, values, gate in zip(layers, drawn, gates, strict=True):
            g = None if gate is None else gate[row, k].item()
            alt = f"head {k} of layer {layer}: {values[k].min():.2g} to {values[k].max():.2g}"
            tile = f"<figure>{image(colour(values[k], low, high), alt, TILE)}<figcaption>{_gate(g)}</figcaption></figure>"
            line += f"<td{' class=off' if g == 0 else ''}>{tile}</td>"
        lines.append(f"<tr><th scope=row>head&nbsp;{k}</th>{line}</tr>")
    wide = f"flex:1 1 min(100%, {80 + (TILE + 12) * len(layers)}px);min-width:0"
    maps_of_it = f'<div class="scroll" style="{wide}"><table class="maps" style="margin-top:0">{"".join(lines)}</table></div>'
    room = "display:flex;flex-wrap:wrap;gap:14px 24px;margin-top:14px"
    return f'<div style="{room}">{sample.figure(i, PHOTO)}{maps_of_it}</div>'


def _gate(gate: float | None) -> str:
    if gate is None:
        return ""
    bar = f'<span class="bar"><i style="width:{min(gate, 1):.0%}"></i></span>'
    return "silent" if gate == 0 else f"{'&lt; 0.01' if gate < 0.01 else f'{gate:.2f}'}{bar}"


def _ends(trace: Trace, layers: Sequence[int]) -> tuple[float, float]:
    """The ends of the colours: 0 and 1, or the least and the greatest where all lie close together."""
    seen = torch.stack([torch.stack(maps(trace, layer).aminmax()) for layer in layers])
    low, high = seen.min().item(), seen.max().item()
    return (0.0, 1.0) if high - low > 0.5 else (low, high)


def pixels_of(normalised: Tensor, statistics: dict[str, Any]) -> Pixels:
    """An image (c, h, w) as the pixels (h, w, 3) it was made of; grey where it has one channel."""
    mean, std = (torch.tensor(statistics[name], dtype=torch.float64).view(-1, 1, 1) for name in ("mean", "std"))
    values = (normalised.detach().double().cpu() * std + mean).nan_to_num().clamp(0, 1)
    values = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)
    return (values * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def examples(labels: Tensor, most: int) -> list[int]:
    """The first image of each class, then the others, up to `most`; in their order."""
    first: dict[int, int] = {}
    for i, label in enumerate(labels.tolist()):
        first.setdefault(label, i)
    chosen = list(first.values())
    return sorted((chosen + sorted(set(range(len(labels))) - set(chosen)))[:most])
