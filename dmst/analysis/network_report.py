"""The page of a network: what it gets right and wrong, how sure it is, what its layers do; of a run, also how it learnt.

    write_network_report    `dmst report`: all of it, computed from the weights on the images that are named
    write_run_report        `dmst train`: from the journal, with some of the images that were evaluated
    write_rate_page         `dmst analyze rates --page`: the rates of several networks on the same images

Images without labels say nothing about accuracy: then what was measured before, as of weights that ship, stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmst.analysis import report
from dmst.analysis.certificates import certify
from dmst.analysis.charts import Line, evenly
from dmst.analysis.membership import Pixels, colour, fit, gate_by_class, groups, maps, segmentation
from dmst.analysis.rates import PLACES, QUANTITIES, LayerRates, rates_at
from dmst.analysis.run_journal import WEIGHTS, Run, learning_curves, when
from dmst.analysis.running import Tick, only_looking
from dmst.calibration import Measured
from dmst.calibration import measured as count_answers
from dmst.errors import OptionError
from dmst.models import VisionModel
from dmst.words import short

MOST_CLASSES = 40  # in a table
MOST_PAIRS = 20  # that are confused
SHOWN = 8  # surest answers, right and wrong
LETTERS = 26  # of a name
MOST_LAYERS = 12  # across the page
PHOTO = 144  # pixels of an image on the page, the longer side
WHERE = PLACES | {"input": "before the operator"}  # where rates are measured
Batches = Iterable[tuple[Tensor, Tensor | None]]  # may be gone through several times


def write_network_report(
    path: str | Path,
    model: VisionModel,
    images: Batches,
    name: str,
    *,
    title: str,
    measured: Measured | None = None,
    titles: Sequence[str] = (),
    run: Run | None = None,
    compared: Mapping[str, Any] | None = None,
    in_full: bool = True,
    tick: Tick = lambda images: None,
) -> Path:
    """`name` says which images. Goes through them several times.

    `measured`: what is known of its accuracy, for images without labels. `titles`: what each image is called, if it has a name.
    `compared`: a table and curves of several networks (demo.py). Without `in_full`, the images serve for pictures alone.
    """
    classes = model.class_names or tuple(f"class {i}" for i in range(model.num_classes))
    page: dict[str, Any] = dict.fromkeys(("rates", "gates", "pictures", "answers"))
    page |= {"title": short(title, 80), "model": model, "classes": classes, "images": name, "titles": titles, "run": run}
    page["compared"] = compared
    found = answers(model, images, tick) if images else None
    if found:
        page |= {"answers": found, "pictures": list(_gallery(model, images, found, classes, titles))}
    if found and in_full:
        rates = rates_at(model, images, tick=tick)
        page |= {"rates": rates["input"], "rate_lines": _rate_lines(rates), "certificate": certify(model, images)}
        page["gates"] = _gates(found, classes)
        measured = counted(found, name, len(classes)) if found.labelled else measured
    right: Sequence[tuple[int, int]] = (run.end.get("by_class") if run else None) or []
    if measured is not None:
        right = list(zip(measured.confusion.diagonal().tolist(), measured.confusion.sum(1).tolist(), strict=True))
        page |= {"confusion": _confusion(measured, classes), "calibration": _calibration(measured)}
    page |= {"measured": measured, "by_class": _by_class(right, run.classes if run and measured is None else classes)}
    if run:
        page |= {"weights_of": WEIGHTS, "learning": learning_curves(run), "timedelta": timedelta, "when": when}
    return report.write(path, "network.html", **page, parameters=sum(p.numel() for p in model.parameters()))


def write_run_report(
    path: Path, events: Sequence[dict[str, Any]], recipe: str, model: VisionModel, sample: tuple[Tensor, Tensor] | None
) -> Path:
    """The page of a run: its journal, its recipe as TOML, its final weights, and some images with their labels."""
    run = Run(events, recipe)
    batches = [] if sample is None else list(zip(*(each.split(64) for each in sample), strict=True))
    title = f"{run.facts.get('model', model.config.name)} on {run.name if run.evaluated == 'holdout' else run.data}"
    return write_network_report(path, model, batches, run.seen, title=title, run=run, in_full=False)


def write_rate_page(path: str | Path, found: Mapping[str, Mapping[str, LayerRates]], images: str) -> Path:
    """Curves of several networks. `found`: network -> place -> rates; `images`: those that all of them looked at."""
    lines = {
        quantity: {
            at: [
                rate_line(name, rates[at], quantity, f"c{i % 4 + 1}", dashed=i > 3)
                for i, (name, rates) in enumerate(found.items())
            ]
            for at in WHERE
        }
        for quantity in QUANTITIES
    }
    conventions = dict.fromkeys(rates["input"].convention.rpartition(", ")[0] for rates in found.values())
    missing = [rates["input"].missing for rates in found.values() if rates["input"].missing]
    return report.write(
        path,
        "rates.html",
        title="Rates of the layers",
        networks=list(found),
        images=images,
        lines=lines,
        places=WHERE,
        conventions=list(conventions),
        missing=missing,
    )


# --- numbers -----------------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    says: Tensor  # (n)
    sure: Tensor  # (n)       probability of what it says
    labels: Tensor  # (n)     -1 where none is known
    top5: Tensor  # (n)       whether the label is among the five likeliest
    gates: list[Tensor | None]  # (n, k) a layer; None where the operator has no gate

    @property
    def right(self) -> Tensor:
        return self.says == self.labels

    @property
    def labelled(self) -> bool:
        return bool((self.labels >= 0).all())


def answers(model: VisionModel, batches: Batches, tick: Tick = lambda images: None) -> Answers:
    """What the network says: one pass, a row per image, no picture is kept."""
    rows: list[tuple[Tensor, ...]] = []
    gates: list[list[Tensor]] = [[] for _ in model.blocks]
    with only_looking(model):
        for images, given in batches:
            trace = model.trace(images)
            probabilities = trace.logits.double().softmax(-1).cpu()
            labels = torch.full((len(images),), -1) if given is None else given.cpu()
            best = probabilities.topk(min(5, probabilities.shape[1])).indices
            sure, says = probabilities.max(-1)
            rows.append((says, sure, labels, (best == labels[:, None]).any(1)))
            for kept, layer in zip(gates, trace.layers, strict=True):
                if layer.parts.gate is not None:
                    kept.append(layer.parts.gate.float().cpu())
            tick(len(images))
    if not rows:
        raise OptionError("no images were given.")
    says, sure, labels, top5 = (torch.cat(column) for column in zip(*rows, strict=True))
    return Answers(says, sure, labels, top5, [torch.cat(kept) if kept else None for kept in gates])


def counted(found: Answers, name: str, classes: int) -> Measured:
    """Confusion and calibration of these answers; `name` says which images."""
    if not found.labelled:
        raise OptionError("these images have no labels of the network's classes: there is no right and wrong.")
    return count_answers(name, classes, found.says, found.sure, found.labels, found.top5)


def _by_class(right: Sequence[tuple[int, int]], classes: Sequence[str]) -> dict[str, Any] | None:
    """Rows of the classes with the lowest accuracy, how many classes have images, and the mean over these."""
    found = sorted((some / of, i) for i, (some, of) in enumerate(right) if of)
    if not found:
        return None
    rows = [(class_name(classes, i), f"{share:.1%}", "{:,} of {:,}".format(*right[i])) for share, i in found[:MOST_CLASSES]]
    return {"rows": rows, "count": len(found), "empty": len(right) - len(found), "mean": sum(x for x, _ in found) / len(found)}


def _confusion(measured: Measured, classes: Sequence[str]) -> dict[str, Any]:
    """All cells, or for many classes the most frequent mistakes."""
    counts = measured.confusion.double()
    if len(classes) <= 12:
        share = counts / counts.sum(1, keepdim=True).clamp(min=1)
        return {"share": share.tolist(), "names": [short(name, 14) for name in classes]}
    counts.fill_diagonal_(0)
    most = counts.flatten().topk(MOST_PAIRS)
    pairs = [(class_name(classes, i // len(classes)), class_name(classes, i % len(classes))) for i in most.indices.tolist()]
    return {"pairs": [(*pair, f"{count:.0f}") for pair, count in zip(pairs, most.values.tolist(), strict=True) if count]}


def _calibration(measured: Measured) -> dict[str, Any]:
    bins = measured.bins
    line = Line("the network", [100 * b.sure for b in bins], [100 * b.right for b in bins])
    ideal = Line("perfect calibration", [0, 100], [0, 100], colour="c2", dashed=True)
    return {"lines": [line, ideal], "rows": [(f"{b.sure:.1%}", f"{b.right:.1%}", f"{b.share:.1%}") for b in bins]}


def rate_line(
    name: str, rates: LayerRates, quantity: str, colour: str = "c1", *, band: bool = True, dashed: bool = False
) -> Line:
    """One quantity by layer: the mean over images, in a band of one standard deviation."""
    mean, std = rates.mean[quantity], rates.std[quantity]
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    return Line(name, range(len(mean)), mean, low if band else None, high if band else None, colour, dashed)


def _rate_lines(rates: Mapping[str, LayerRates]) -> dict[str, list[Line]]:
    """For each rate a line for each place; the coding rate where the operator has no other."""
    names = [name for name in ("variational", "complete") if any(map(math.isfinite, rates["input"].mean[name]))]
    return {
        name: [rate_line(place, rates[at], name, f"c{i}", band=at == "input") for i, (at, place) in enumerate(WHERE.items(), 1)]
        for name in names or ["coding"]
    }


def _gates(found: Answers, classes: Sequence[str]) -> dict[str, Any] | None:
    layers = [(i, gate) for i, gate in enumerate(found.gates) if gate is not None]
    if not layers or not found.labelled or len(classes) > MOST_CLASSES:
        return None
    use = [gate_by_class(gate, found.labels, len(classes)) for _, gate in layers]
    return {
        "values": torch.cat(use, 1).tolist(),
        "rows": [short(name, 14) for name in classes],
        "layers": [i for i, _ in layers],
        "heads": use[0].shape[1],
        "high": max(max(each.nan_to_num().max().item() for each in use), 1e-9),
        "on": ", ".join(f"{(gate != 0).double().sum(-1).mean():.1f} in layer {i}" for i, gate in layers),
    }


# --- images and their maps ---------------------------------------------------------------------------------------------


def _gallery(
    model: VisionModel, images: Batches, found: Answers, classes: Sequence[str], titles: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The surest answers with their maps: right, one of each class; wrong; or all where there are no labels."""
    order = found.sure.argsort(descending=True, stable=True)
    kinds = {"" if titles else "Highest confidence": order.tolist()}
    if found.labelled:
        right = found.right[order]
        surest = {int(found.labels[i]): i for i in reversed(order[right].tolist())}
        kinds = {
            "Correct, highest confidence of its class": [i for _, i in sorted(surest.items())],
            "Wrong, highest confidence": order[~right].tolist(),
        }
    for heading, which in kinds.items():
        if chosen := which[:SHOWN]:
            some = pick(images, chosen)
            says = [class_name(classes, i) for i in found.says[chosen].tolist()]
            names = [class_name(classes, i) for i in found.labels[chosen].tolist()] if found.labelled else says
            names, kind = ([short(titles[i], LETTERS) for i in chosen], "") if titles else (names, "label")
            photos = [
                {"pixels": pixels_of(model, image), "name": name, "kind": kind, "answer": answer, "sure": sure}
                for image, name, answer, sure in zip(some, names, says, found.sure[chosen].tolist(), strict=True)
            ]
            yield {"heading": heading, "photos": photos, "maps": maps_of(model, some)}


def pick(images: Batches, chosen: Sequence[int]) -> Tensor:
    """Images by their places in the stream, in the order asked for; the others pass by."""
    kept, start, wanted = {}, 0, set(chosen)
    for some, _ in images:
        for i in range(len(some)):
            if start + i in wanted:
                kept[start + i] = some[i]
        start += len(some)
    return torch.stack([kept[i] for i in chosen])


def class_name(classes: Sequence[str], label: int) -> str:
    return short(classes[label], LETTERS) if label < len(classes) else f"class {label}"


def maps_of(model: VisionModel, images: Tensor) -> dict[str, Any] | None:
    """The maps of these images; None where the operator computes no memberships.

    rows has for each image a (head, tiles) for each head, with a tile for each layer. A silent head has gate 0; where operators
    have no gates it is None. low and high are the ends of the colours: 0 and 1, or least and greatest where all are close.
    Where heads have groups, a patch has the colour of its group, on white, stronger where it belongs more.
    """
    with only_looking(model):
        trace = model.trace(images)
    first = trace.layers[0].parts
    if first.membership is None:
        return None
    layers = evenly(range(len(model.blocks)), MOST_LAYERS)
    drawn = torch.stack([maps(trace, layer) for layer in layers], 2)  # (b, k, layers, rows, columns)
    low, high = drawn.min().item(), drawn.max().item()
    if high - low > 0.5:
        low, high = 0.0, 1.0

    sorted_into = [groups(trace, layer) for layer in layers]
    white = np.full((*trace.grid, 3), 255, np.uint8)

    def tile(i: int, k: int, place: int) -> dict[str, Any]:
        values, gate, group = drawn[i, k, place], trace.layers[layers[place]].parts.gate, sorted_into[place]
        pixels = colour(values, low, high) if group is None else segmentation(white, group[i, k], values, 1.0)
        alt = f"head {k} of layer {layers[place]}: {values.min():.2g} to {values.max():.2g}"
        return {"pixels": pixels, "alt": alt, "gate": None if gate is None else gate[i, k].item()}

    count, heads, columns = drawn.shape[:3]
    rows = [[(f"head {k}", [tile(i, k, place) for place in range(columns)]) for k in range(heads)] for i in range(count)]
    words = {"gated": first.gate is not None, "grouped": sorted_into[0] is not None, "depth": len(model.blocks)}
    return {"layers": layers, "rows": rows, "low": low, "high": high, **words}


def pixels_of(model: VisionModel, normalised: Tensor) -> Pixels:
    """An image (c, h, w), normalised for the model, as pixels (h, w, 3), made small; grey where it has one channel."""
    mean, std = (torch.tensor(model.pretrained_cfg[name], dtype=torch.float64).view(-1, 1, 1) for name in ("mean", "std"))
    values = (normalised.detach().double().cpu() * std + mean).nan_to_num().clamp(0, 1)
    values = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)
    pixels = (values * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return fit(pixels, PHOTO) if max(pixels.shape) > PHOTO else pixels
