"""The page of a network: what it gets right and wrong, how sure it is, what its layers do, on named images.

tiles · accuracy by class · confusion · calibration · rates · certificates · gates by class · the surest answers, with maps

All of it is computed here from the weights. Images without labels say nothing about accuracy: then what was measured before, as
of weights that ship, stands in its place, and says so. With the journal of a run, its curves stand first (run_report.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from dmst.analysis.answers import Answers, answers, counted
from dmst.analysis.certificates import Certificate, certify
from dmst.analysis.charts import Line, cells, line_chart
from dmst.analysis.membership import gate_by_class
from dmst.analysis.rate_page import sections as rate_sections
from dmst.analysis.rates import rates_at
from dmst.analysis.report import Section, table, tiles, write_report
from dmst.analysis.run_journal import named, short, side_by_side
from dmst.analysis.run_pictures import Sample, memberships
from dmst.calibration import Measured
from dmst.models import VisionModel

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
            "What is taken for what": _confused(measured, classes),
            "Is it as sure as it is right?": _calibration(measured),
        }
    bodies |= {
        "What the layers do to the rate": "".join(
            each.body for each in rate_sections({weights: rates}, ("variational", "complete"))
        ),
        "Does each layer lower its rate?": _certificate(certificate),
        "Which heads a class uses": _gates(found, classes),
        "Answers": "".join(_gallery(model, images, found, classes, titles)),
    }
    sections = [*before, *(Section(title, body) for title, body in bodies.items() if body), *after]
    return write_report(
        path,
        short(f"{weights}: a look inside", 80),
        _lead(model, measured, name),
        sections,
        f"<p>{escape(rates['input'].convention)}.</p>",
    )


def _lead(model: VisionModel, measured: Measured | None, name: str) -> str:
    config, figures = model.config, []
    told = [f"{config.name}: {config.depth} layers of {config.operator}, {config.num_heads} heads, width {config.dim}."]
    if measured is not None:
        figures.append((f"{measured.top1:.2%}", f"right, of {measured.images:,} images"))
        if model.num_classes > 5:
            figures.append((f"{measured.right5 / measured.images:.2%}", "right among the five likeliest"))
        figures.append((f"{measured.error:.3f}", "expected calibration error"))
    if measured is not None and measured.data != name:
        told.append(f"Accuracy, confusion and calibration were measured on {measured.data} when these weights were released.")
        told.append(f"The layers and the answers below are of {name}.")
    else:
        told.append(f"On {name}.")
    figures.append((f"{sum(p.numel() for p in model.parameters()):,}", "parameters"))
    return f"<p>{escape(' '.join(told))}</p>{tiles(figures)}"


def _by_class(measured: Measured, classes: Sequence[str]) -> str:
    of, right = measured.confusion.sum(1), measured.confusion.diagonal()
    rows = sorted((right[i].item() / of[i].item(), i) for i in range(len(classes)) if of[i])
    shown = [(short(named(classes, i)), f"{share:.1%}", f"{right[i]:,} of {of[i]:,}") for share, i in rows[:MOST_CLASSES]]
    which = f"The worst {len(shown)} of {len(rows)} classes" if len(shown) < len(rows) else "Every class, the worst first"
    half = -(-len(shown) // 2) if len(shown) > 5 else len(shown)
    halves = [f"<div>{table(('class', 'right', 'images'), some)}</div>" for some in (shown[:half], shown[half:]) if some]
    return f"<p>{which}.</p>{side_by_side(halves)}"


def _confused(measured: Measured, classes: Sequence[str]) -> str:
    counts = measured.confusion.double()
    if len(classes) <= 12:
        share = (counts / counts.sum(1, keepdim=True).clamp(min=1)).tolist()
        names = [short(name, 14) for name in classes]
        return "<p>Row: what it is. Column: what the network says. Share of the row.</p>" + cells(share, names, names)
    counts.fill_diagonal_(0)
    order = counts.flatten().argsort(descending=True, stable=True)[:MOST_PAIRS]
    pairs = [(int(i) // len(classes), int(i) % len(classes)) for i in order if counts.flatten()[i] > 0]
    rows = [(short(named(classes, a)), short(named(classes, b)), f"{counts[a, b]:.0f}") for a, b in pairs]
    return f"<p>The {len(rows)} most frequent mistakes.</p>" + table(("is", "the network says", "images"), rows)


def _calibration(measured: Measured) -> str:
    bins = measured.bins
    line = Line("the network", [100 * b.sure for b in bins], [100 * b.right for b in bins])
    ideal = Line("as sure as right", [0, 100], [0, 100], colour="c2", dashed=True)
    chart = line_chart([line, ideal], "how sure, %", "right, %", y_range=(0, 100), digits=1, whole_x=False)
    rows = [(f"{b.sure:.1%}", f"{b.right:.1%}", f"{b.share:.1%}") for b in bins]
    told = (
        f"<p>Images are sorted into bins by how sure the network is. In each bin the share that is right should be as large as "
        f"the network is sure. On average they are {measured.error:.4f} apart (the expected calibration error).</p>"
    )
    return told + side_by_side([chart, table(("how sure", "right", "of the images"), rows)])


def _certificate(found: Certificate) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.sentences())
    return f'<ul>{sentences}</ul><p class="note">{escape(found.convention)}.</p>'


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
    told = f"<p>Mean gate of each class; 0: exactly so; empty: no image of the class. Heads that are on: {on}.</p>"
    return told + cells(torch.cat(use, 1).tolist(), names, columns, groups=groups, corner="class", high=max(high, 1e-9))


def _gallery(
    model: VisionModel, images: Batches, found: Answers, classes: Sequence[str], titles: Sequence[str]
) -> Iterator[str]:
    order = found.sure.argsort(descending=True, stable=True)
    kinds = {"Surest": order}
    if found.labelled:
        kinds = {"Right, the surest": order[found.right[order]], "Wrong, the surest": order[~found.right[order]]}
    if titles:
        others = ", ".join(title for title in titles if title not in classes)
        told = f" It has no class for these: {escape(others)}. Whatever it says of them is wrong." if others else ""
        yield f"<p>A network names one of its {len(classes)} classes, whatever it is shown.{told}</p>"
    for title, which in kinds.items():
        chosen = which[:SHOWN].tolist()
        if chosen:
            labels = found.labels[chosen] if found.labelled else found.says[chosen]
            sample = Sample(model, pick(images, chosen), labels, classes, [titles[i] for i in chosen] if titles else ())
            figures = "".join(sample.figure(i, 104) for i in range(len(chosen)))
            heading = "" if titles else f"<h3>{title}</h3>"
            yield f'{heading}<div class="wrong">{figures}</div>{memberships(sample, name=title.split(",")[0].lower())}'


def pick(images: Batches, chosen: Sequence[int]) -> Tensor:
    """Images by their places in the stream, in the order asked for; the others pass by."""
    kept, start, wanted = {}, 0, set(chosen)
    for some, _ in images:
        for i in range(len(some)):
            if start + i in wanted:
                kept[start + i] = some[i]
        start += len(some)
    return torch.stack([kept[i] for i in chosen])
