"""The page of a network: what it gets right and wrong, how sure it is, what its layers do, on named images.

tiles · accuracy by class · confusion · calibration · rates · certificates · gates by class · the surest answers, with maps

All of it is computed here from the weights. Images without labels say nothing about accuracy: then what was measured before, as
of weights that ship, stands in its place, and says so. With the journal of a run, its curves stand first (run_report.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dmst.analysis.answers import Answers, answers, counted
from dmst.analysis.certificates import Certificate, certify
from dmst.analysis.charts import Line, cells, line_chart
from dmst.analysis.membership import gate_by_class
from dmst.analysis.rate_page import WHERE
from dmst.analysis.rates import LayerRates, rates_at
from dmst.analysis.report import Section, table, tiles, write_report
from dmst.analysis.run_journal import named, side_by_side
from dmst.analysis.run_pictures import Sample, memberships
from dmst.calibration import Measured
from dmst.models import VisionModel
from dmst.words import html, short

MOST_CLASSES = 40  # in a table
MOST_PAIRS = 20  # that are confused
SHOWN = 8  # surest answers, right and wrong
Batches = Iterable[tuple[Tensor, Tensor | None]]  # may be gone through several times


def write_weights_report(
    path: str | Path,
    model: VisionModel,
    images: Batches,
    name: str,
    *,
    weights: str,
    measured: Measured | None = None,
    titles: Sequence[str] = (),
    before: Sequence[Section] = (),
    after: Sequence[Section] = (),
    tick: Callable[[int], None] = lambda images: None,
) -> Path:
    """Write the page of `model`; `name` says which images, `weights` which weights. Goes through the images several times.

    `measured`: what is known of its accuracy, for images without labels. `titles`: what each image is called, if it has a name.
    """
    classes = model.class_names or tuple(f"class {i}" for i in range(model.num_classes))
    found = answers(model, images, tick)
    rates = rates_at(model, images, tick=tick)
    certificate = certify(model, images)
    if found.labelled:
        measured = counted(found, name, len(classes))
    bodies: dict[str, str] = {}
    if measured is not None:
        bodies |= {
            "Accuracy by class": _by_class(measured, classes),
            "Confusion": _confused(measured, classes),
            "Calibration": _calibration(measured),
        }
    bodies |= {
        "Rates of the layers": _rates(rates),
        "Certificates: does each layer lower its rate?": _certificate(certificate),
        "Gates: which heads each class uses": _gates(found, classes),
        "Predictions and membership maps": "".join(_gallery(model, images, found, classes, titles)),
    }
    sections = [*before, *(Section(title, body) for title, body in bodies.items() if body), *after]
    return write_report(
        path,
        short(f"{weights}: network report", 80),
        _lead(model, measured, name),
        sections,
        f"<p>How rates are measured: {html(rates['input'].convention)}.</p>",
    )


def _lead(model: VisionModel, measured: Measured | None, name: str) -> str:
    config, figures = model.config, []
    told = [
        "This page shows how good a network is and what its layers do.",
        f"{config.name} has {config.depth} layers of {config.operator} attention with {config.num_heads} heads, width "
        f"{config.dim}.",
    ]
    if measured is not None:
        figures.append((f"{measured.top1:.2%}", f"accuracy (top-1) on {measured.images:,} images"))
        if model.num_classes > 5:
            figures.append((f"{measured.right5 / measured.images:.2%}", "top-5 accuracy"))
        figures.append((f"{measured.error:.3f}", "expected calibration error"))
    if measured is not None and measured.data != name:
        told.append(f"Accuracy, confusion and calibration were measured on {measured.data} when these weights were released.")
        told.append(f"All other numbers and pictures are of {name}.")
    else:
        told.append(f"All numbers and pictures are of {name}.")
    figures.append((f"{sum(p.numel() for p in model.parameters()):,}", "parameters"))
    return f"<p>{html(' '.join(told))}</p>{tiles(figures)}"


def _by_class(measured: Measured, classes: Sequence[str]) -> str:
    of, right = measured.confusion.sum(1), measured.confusion.diagonal()
    rows = sorted((right[i].item() / of[i].item(), i) for i in range(len(classes)) if of[i])
    shown = [(named(classes, i), f"{share:.1%}", f"{right[i]:,} of {of[i]:,}") for share, i in rows[:MOST_CLASSES]]
    which = f"{len(shown)} of {len(rows)} classes" if len(shown) < len(rows) else "All classes"
    half = -(-len(shown) // 2) if len(shown) > 5 else len(shown)
    halves = [f"<div>{table(('class', 'accuracy', 'correct'), some)}</div>" for some in (shown[:half], shown[half:]) if some]
    return f"<p>{which}, lowest accuracy first.</p>{side_by_side(halves)}"


def _confused(measured: Measured, classes: Sequence[str]) -> str:
    counts = measured.confusion.double()
    if len(classes) <= 12:
        share = (counts / counts.sum(1, keepdim=True).clamp(min=1)).tolist()
        names = [short(name, 14) for name in classes]
        told = "<p>Row: label. Column: prediction. A cell is the share of the images with that label.</p>"
        return told + cells(share, names, names)
    counts.fill_diagonal_(0)
    order = counts.flatten().argsort(descending=True, stable=True)[:MOST_PAIRS]
    pairs = [(int(i) // len(classes), int(i) % len(classes)) for i in order if counts.flatten()[i] > 0]
    rows = [(named(classes, a), named(classes, b), f"{counts[a, b]:.0f}") for a, b in pairs]
    return f"<p>The {len(rows)} most frequent mistakes.</p>" + table(("label", "prediction", "images"), rows)


def _calibration(measured: Measured) -> str:
    bins = measured.bins
    line = Line("the network", [100 * b.sure for b in bins], [100 * b.right for b in bins])
    ideal = Line("perfect calibration", [0, 100], [0, 100], colour="c2", dashed=True)
    chart = line_chart([line, ideal], "confidence (%)", "accuracy (%)", y_range=(0, 100), digits=1, whole_x=False)
    rows = [(f"{b.sure:.1%}", f"{b.right:.1%}", f"{b.share:.1%}") for b in bins]
    told = (
        "<p>Can you trust the confidence of the network? Images are grouped into bins by confidence. In a calibrated network "
        "the accuracy of each bin equals its mean confidence. Above the dashed line the network is too careful, below it too "
        f"sure. The mean distance from that line is the expected calibration error, {measured.error:.4f}.</p>"
    )
    return told + side_by_side([chart, table(("mean confidence", "accuracy", "share of images"), rows)])


def _rates(rates: Mapping[str, LayerRates]) -> str:
    """The curves of one network: a chart for each rate, a line for each place."""
    names = {"variational": "variational rate", "complete": "complete rate"}
    names = {name: word for name, word in names.items() if any(map(math.isfinite, rates["input"].mean[name]))}
    names = names or {"coding": "coding rate"}
    charts = []
    for name, word in names.items():
        lines = []
        for (at, place), colour in zip(WHERE.items(), ("c1", "c2", "c3"), strict=True):
            mean, std = rates[at].mean[name], rates[at].std[name]
            low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
            band = at == "input"
            lines.append(Line(place, range(len(mean)), mean, low if band else None, high if band else None, colour))
        charts.append(line_chart(lines, "layer", f"{word} (nats)"))
    told = {
        "variational": "The <b>variational rate</b> is the cost in the subspaces of the layer's heads, weighted by memberships "
        "and gates; a head that is off costs nothing.",
        "complete": "The <b>complete rate</b> also counts what lies outside the subspaces.",
        "coding": f"The <b>coding rate</b> encodes all tokens as one group. {html(rates['input'].missing)}",
    }
    return (
        "<p>A <b>rate</b> is the number of nats needed to encode the tokens of an image (1 nat = 1.44 bits). "
        f"{' '.join(told[name] for name in names)}</p>{side_by_side(charts)}"
        '<p class="note">Lines: mean over images. Band: one standard deviation. Layers count from 0.</p>'
    )


def _certificate(found: Certificate) -> str:
    layers = [layer for layer in found.layers if layer is not None]
    if not layers:
        return f"<p>{html(' '.join(found.sentences()))}</p>"
    rows = []
    for layer in layers:
        mean = {name: numbers.mean for name, numbers in layer.total.items()}
        raising = ", ".join(map(str, layer.raising)) or "none"
        shares = (f"{layer.descends:.0%}", f"{layer.guaranteed:.0%}", raising, f"{mean['reread']:+.2f}")
        rows.append((str(layer.layer), f"{mean['rate']:.2f}", f"{mean['frozen']:+.2f}", *shares))
    columns = (
        "layer",
        "rate (nats)",
        "change by its step",
        "falls on",
        "guaranteed on",
        "raised by heads",
        "change after norm",
    )
    return (
        "<p>The attention of a white-box layer should be a step that lowers the rate of its tokens. A <b>certificate</b> is an "
        "upper bound of the change, computed for each image; if it is below 0, the rate is guaranteed to fall. Shares are of "
        "the images, the other numbers are means over images.</p>"
        + table(columns, rows)
        + "<p>“Change by its step” keeps memberships and gates fixed. “Change after norm” is what the layer would measure if "
        "it read its own result: normed, with memberships and gates computed again.</p>"
        f'<p class="note">{html(found.convention)}.</p>'
    )


def _gates(found: Answers, classes: Sequence[str]) -> str:
    layers = [(i, gate) for i, gate in enumerate(found.gates) if gate is not None]
    if not layers or not found.labelled or len(classes) > MOST_CLASSES:
        return ""
    use = [gate_by_class(gate, found.labels, len(classes)) for _, gate in layers]
    on = ", ".join(f"{(gate != 0).double().sum(-1).mean():.1f} in layer {i}" for i, gate in layers)
    columns = [f"h{k}" for each in use for k in range(each.shape[1])]
    groups = [(f"layer {i}", each.shape[1]) for (i, _), each in zip(layers, use, strict=True)]
    names = [short(name, 14) for name in classes]
    high = max(each.nan_to_num().max().item() for each in use)
    told = (
        "<p>The <b>gate</b> of a head, from 0 to 1, says how much the head adds for an image. Each cell is the mean gate over "
        "the images of one class. h0, h1, ... are the heads. 0 is exactly 0; an empty cell has no image. "
        f"Heads that are on (gate above 0), mean per image: {on}.</p>"
    )
    return told + cells(torch.cat(use, 1).tolist(), names, columns, groups=groups, corner="class", high=max(high, 1e-9))


def _gallery(
    model: VisionModel, images: Batches, found: Answers, classes: Sequence[str], titles: Sequence[str]
) -> Iterator[str]:
    order = found.sure.argsort(descending=True, stable=True)
    kinds = {"Highest confidence": order}
    if found.labelled:
        right = found.right[order]
        kinds = {"Correct, highest confidence": order[right], "Wrong, highest confidence": order[~right]}
    if titles:
        others = ", ".join(title for title in titles if title not in classes)
        told = f" It has no class for: {html(others)}. Its predictions for these are wrong." if others else ""
        yield f"<p>The network always predicts one of its {len(classes)} classes.{told}</p>"
    explained = True
    for title, which in kinds.items():
        chosen = which[:SHOWN].tolist()
        if chosen:
            labels = found.labels[chosen] if found.labelled else found.says[chosen]
            sample = Sample(model, pick(images, chosen), labels, classes, [titles[i] for i in chosen] if titles else ())
            figures = "".join(sample.figure(i, 104) for i in range(len(chosen)))
            heading = "" if titles else f"<h3>{title}</h3>"
            maps = memberships(sample, re.split(r"\W", title)[0].lower(), explained=explained)
            explained = False  # once is enough
            yield f'{heading}<div class="wrong">{figures}</div>{maps}'


def pick(images: Batches, chosen: Sequence[int]) -> Tensor:
    """Images by their places in the stream, in the order asked for; the others pass by."""
    kept, start, wanted = {}, 0, set(chosen)
    for some, _ in images:
        for i in range(len(some)):
            if start + i in wanted:
                kept[start + i] = some[i]
        start += len(some)
    return torch.stack([kept[i] for i in chosen])
