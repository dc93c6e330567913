"""The page of the demo: what was trained, what it learnt, and what it computes. Every number is measured here.

learning curves · memberships over example digits, layer by layer · gates by class · rates by layer · the digits read wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dmst.analysis.charts import Line, cells, line_chart
from dmst.analysis.membership import colour, gate_by_class, maps, picture
from dmst.analysis.rates import LayerRates, layer_rates
from dmst.analysis.report import Section, image, ramp, table, tabs, tiles, write_report
from dmst.data import catalog
from dmst.data.loader import Batch, EvalStream
from dmst.demo import Results, summary
from dmst.demo.runs import Run
from dmst.engine.prepare import view_of
from dmst.engine.recipe import read_recipe
from dmst.engine.train_loop import versions
from dmst.models import Trace, VisionModel
from dmst.words import html

COLOURS = {"dmst_digits": "c1", "tost_digits": "c2", "vit_digits": "c3"}
MOST_MISTAKES = 24
TILE = 80  # pixels of one map on the page


def write_page(path: Path, results: Results, dmst_model: VisionModel, tost_model: VisionModel, vit_model: VisionModel) -> Path:
    unseen = _unseen(dmst_model)
    with torch.no_grad():
        traces = {m.config.name: m.trace(unseen.images) for m in (dmst_model, tost_model)}
    mine = traces["dmst_digits"]
    rates = {
        (m.config.name, at): layer_rates(m, unseen.images, at=at)
        for m in (dmst_model, tost_model)
        for at in ("input", "output")
    }
    runs = results.of("dmst_digits")
    read = sum(run.accuracies[-1] for run in runs) / len(runs)
    silent = 1 - torch.stack([(layer.parts.gate != 0).double().mean() for layer in mine.layers]).mean().item()  # type: ignore[union-attr]
    lead = (
        "<p>This is the report of <code>dmst demo</code>. <b>DMST</b> is a white-box vision transformer: every layer computes "
        "numbers that you can look at and explain. Here a small DMST learned to read handwritten digits, from random weights, "
        f"on one CPU core, in {sum(run.seconds for run in runs) / len(runs):.0f} seconds.</p>"
        + tiles(
            [
                (f"{read:.1%}", f"accuracy on {len(unseen.labels)} held-out digits, {_mean(runs)}"),
                (f"{runs[0].parameters:,}", "parameters"),
                (f"{silent:.0%}", "of the heads are off (gate exactly 0), mean over images and layers"),
                (
                    f"{sum(run.seconds for run in results.runs):.0f} s",
                    f"training time on one core, all {len(results.runs)} runs",
                ),
            ]
        )
        + '<p>What to look at: the <a href="#s2">membership maps</a> show which pixels each head groups together. The '
        '<a href="#s3">gates</a> show which heads are on for which digit. The <a href="#s4">rates</a> show how compactly each '
        "layer encodes the image.</p>"
    )
    sections = [
        Section("Accuracy and learning curves", _learning(results)),
        Section("Membership maps: which pixels belong to which head", _memberships(mine, traces["tost_digits"], unseen)),
        Section("Gates: which heads each digit uses", _gates(mine, unseen)),
        Section("Rates: what each layer optimizes", _rates(rates)),
        Section("Mistakes", _mistakes(mine.logits, unseen)),
        Section("How this was made", _made(results)),
    ]
    return write_report(path, "DMST reads digits: a transformer you can look into", lead, sections)


def _unseen(model: VisionModel) -> Batch:
    """The held-out digits, as the networks take them: all three look alike at an image."""
    image_set = catalog.open_set("digits", "test")
    return next(iter(EvalStream(image_set, view_of(model), batch_size=len(image_set))))


def _learning(results: Results) -> str:
    losses: list[Line] = []
    reads: list[Line] = []
    for name, colour_class in COLOURS.items():
        runs = results.of(name)
        epochs = list(range(1, results.recipe.schedule.epochs + 1))
        for lines, rows in ((losses, [r.losses for r in runs]), (reads, [[100 * a for a in r.accuracies] for r in runs])):
            steps = list(zip(*rows, strict=True))
            band = len(runs) > 1
            lines.append(
                Line(
                    name.removesuffix("_digits"),
                    epochs,
                    [sum(step) / len(step) for step in steps],
                    [min(step) for step in steps] if band else None,
                    [max(step) for step in steps] if band else None,
                    colour_class,
                )
            )
    lowest = min(min(line.ys) for line in reads)
    charts = line_chart(reads, "epoch", "accuracy on held-out digits (%)", y_range=(max(0, 10 * (lowest // 10)), 100), digits=1)
    charts += line_chart(losses, "epoch", "training loss (cross-entropy, nats)")
    columns = ("network", "attention layer", "held-out accuracy", "runs", "parameters", "training images/s, one core")
    return (
        "<p>Three networks were trained in the same way. They differ only in the attention layer. "
        f"{_band(results.of('dmst_digits'))}</p>"
        + table(columns, summary(results))
        + f'<div class="charts">{charts}</div>'
        + '<p class="note">This is a demonstration, not a benchmark: tost and vit have one run each, and one digit more or '
        "less is 0.3 points of accuracy. A nat is a unit of information: 1 nat = 1.44 bits. The training loss stays above "
        "zero because training images are mixed and labels are smoothed.</p>"
    )


def _memberships(mine: Trace, tost: Trace, unseen: Batch) -> str:
    chosen = _examples(unseen.labels)
    views = [(f"layer {i}", _map_table(mine, i, chosen, unseen, 0.0, 1.0)) for i in range(len(mine.layers))]
    last = len(tost.layers) - 1
    seen = maps(tost, last)[chosen]
    views.append((f"ToST, layer {last}", _map_table(tost, last, chosen, unseen, seen.min().item(), seen.max().item())))
    return (
        "<p>A layer has several <b>heads</b>; each head looks at one subspace of the features. The <b>membership</b> of a "
        "pixel in a head, from 0 to 1, says how much the pixel belongs to that head: yellow is 1, dark blue is 0. The "
        "<b>gate</b> of a head, from 0 to 1, says how much the head adds for this image. A head is <i>silent</i> if its gate "
        "is exactly 0: it adds nothing, and its map is drawn in grey.</p>"
        "<p>Choose a layer. Layers and heads are counted from 0. Each map is a tensor of the network, one cell per pixel.</p>"
        + tabs("layer", views, chosen=len(mine.layers) - 1)
        + '<p class="note">ToST has no gate. It computes memberships from the energy of the tokens, and they stay almost '
        "equal for all heads. So its maps have their own colour scale, shown below them.</p>"
    )


def _map_table(trace: Trace, layer: int, chosen: Sequence[int], unseen: Batch, low: float, high: float) -> str:
    """Digits across, the image and then every head down."""
    every, gate = maps(trace, layer), trace.layers[layer].parts.gate
    sure = trace.logits.softmax(-1)
    row = ""
    for i in chosen:
        says, truth = int(sure[i].argmax()), int(unseen.labels[i])
        wrong = "" if says == truth else f"<b>label {truth},</b> "
        caption = f"{wrong}predicted {says}, {sure[i, says]:.0%}"
        row += f"<td>{_figure(picture(unseen.images[i]), f'digit {truth}', caption)}</td>"
    out = [f"<tr><th scope=row>image</th>{row}</tr>"]
    for k in range(every.shape[1]):
        row = ""
        for i in chosen:
            values, g = every[i, k], 1.0 if gate is None else gate[i, k].item()
            bar = f'gate {"&lt; 0.01" if g < 0.01 else f"{g:.2f}"}<span class="bar"><i style="width:{g:.0%}"></i></span>'
            caption = "" if gate is None else bar if g else "silent"
            alt = f"memberships in head {k} of layer {layer}, from {values.min():.2f} to {values.max():.2f}"
            row += f"<td{'' if g else ' class=off'}>{_figure(colour(values, low, high), alt, caption)}</td>"
        out.append(f"<tr><th scope=row>head {k}</th>{row}</tr>")
    return f'<div class="scroll"><table class="maps">{"".join(out)}</table></div>{ramp(low, high, "membership")}'


def _gates(mine: Trace, unseen: Batch) -> str:
    heads = mine.layers[0].parts.gate.shape[1]  # type: ignore[union-attr]
    use = [gate_by_class(layer.parts.gate, unseen.labels, 10) for layer in mine.layers]  # type: ignore[arg-type]
    on = [(layer.parts.gate != 0).double().sum(-1).mean().item() for layer in mine.layers]  # type: ignore[union-attr]
    return (
        "<p>Each cell is the mean gate of one head over the held-out images of one digit. h0, h1, ... are the heads. For "
        "every image, the gates of a layer sum to 1. The network learned this choice of heads by itself, only from the labels "
        "of the digits.</p>"
        + cells(
            torch.cat(use, 1).tolist(),
            [str(digit) for digit in range(10)],
            [f"h{k}" for _ in use for k in range(heads)],
            groups=[(f"layer {i}", heads) for i in range(len(use))],
            corner="digit",
        )
        + f"<h3>Heads that are on, of {heads}, mean over images</h3>"
        + table([f"layer {i}" for i in range(len(on))], [[f"{count:.1f}" for count in on]])
    )


def _rates(rates: dict[tuple[str, str], LayerRates]) -> str:
    def lines(quantity: str) -> list[Line]:
        out = []
        for (name, at), found in rates.items():
            mean, std = found.mean[quantity], found.std[quantity]
            band = at == "input"
            out.append(
                Line(
                    f"{name.removesuffix('_digits')}, {'before the step' if band else 'after the step'}",
                    list(range(len(mean))),
                    mean,
                    [m - s for m, s in zip(mean, std, strict=True)] if band else None,
                    [m + s for m, s in zip(mean, std, strict=True)] if band else None,
                    COLOURS[name],
                    dashed=not band,
                )
            )
        return out

    before, after = rates["dmst_digits", "input"], rates["dmst_digits", "output"]
    other = rates["tost_digits", "input"]
    pairs = list(zip(before.mean["variational"], after.mean["variational"], strict=True))
    steps = [(str(i), f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}") for i, (a, b) in enumerate(pairs)]
    charts = line_chart(lines("variational"), "layer", "variational rate (nats)") + line_chart(
        lines("complete"), "layer", "complete rate (nats)"
    )
    kinds = {
        "variational": "variational rate, only heads that are on (nats)",
        "all_heads": "variational rate, all heads (nats)",
        "complete": "complete rate (nats)",
        "active": "heads that are on",
    }
    means = [(words, f"{_average(before, name):.1f}", f"{_average(other, name):.1f}") for name, words in kinds.items()]
    return (
        "<p>The <b>rate</b> is the number of nats needed to encode the tokens of an image: the fewer, the better the layer has "
        "grouped them. The formula of DMST and ToST attention is one step that lowers the <b>variational rate</b>, the cost of "
        f"the tokens inside the subspaces of the heads. Here it falls in {sum(b < a for a, b in pairs)} of {len(pairs)} layers "
        "of DMST:</p>"
        + table(("layer", "variational rate before the step (nats)", "after the step", "change"), steps)
        + f'<h3>Before and after each step, by layer</h3><div class="charts">{charts}</div>'
        + "<h3>DMST and ToST before the step, mean over layers and images</h3>"
        + table(("quantity", "DMST", "ToST"), means)
        + "<p>Silent heads cost nothing in the variational rate, so compare DMST and ToST with all heads counted. The "
        "<b>complete rate</b> also counts what lies outside the subspaces.</p>"
        f'<p class="note">How it is measured: {html(before.convention)}. Memberships are computed again after the step. '
        "Complete rate: c = d/eps², orthonormalised U. A band is one standard deviation over images. DMSA, the attention of "
        "DMST, has a free output matrix, so the theory does not guarantee that the rate falls; it is measured.</p>"
    )


def _mistakes(logits: Tensor, unseen: Batch) -> str:
    """The surest mistakes first, a few rows of them."""
    sure, says = logits.softmax(-1).max(-1)
    wrong = (says != unseen.labels).nonzero().flatten()
    surest = wrong[sure[wrong].argsort(descending=True)].tolist()
    if not surest:
        return f"<p>The first run predicted all {len(unseen.labels)} held-out digits correctly.</p>"
    figures = "".join(
        _figure(
            picture(unseen.images[i]),
            f"digit {int(unseen.labels[i])}",
            f"label {int(unseen.labels[i])}, predicted {int(says[i])}<br>confidence {sure[i]:.0%}",
        )
        for i in surest[:MOST_MISTAKES]
    )
    rest = f" Shown: the {MOST_MISTAKES} with the highest confidence." if len(wrong) > MOST_MISTAKES else ""
    told = f"The first run predicted {len(wrong)} of {len(unseen.labels)} held-out digits wrong.{rest}"
    return f'<p>{told}</p><div class="wrong">{figures}</div>'


def _made(results: Results) -> str:
    optim, schedule, usual = results.recipe.optim, results.recipe.schedule, read_recipe("digits").schedule
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        "<ul>"
        f"<li>Command: <code>dmst demo --epochs {schedule.epochs} --seeds {len(results.of('dmst_digits'))}</code> "
        f"(the defaults are {usual.epochs} and 3). Each run used one CPU thread. Runs with the same seed saw the same "
        "batches.</li>"
        f"<li>Versions: {html(told)}.</li>"
        "<li>Data: the 1,797 digits of scikit-learn, 8 x 8 pixels. Every fifth image is held out.</li>"
        f"<li>Recipe: <code>digits</code> for all networks. {schedule.epochs} epochs, batch size "
        f"{results.recipe.run.batch_size}, Muon (learning rate {optim.matrix_lr:g}) for the matrices of the blocks, AdamW "
        f"({optim.lr:g}) for the rest. Training images are rotated, zoomed, shifted and mixed a little; labels are smoothed. "
        "The recipe was tuned for DMST, on other splits of the data.</li>"
        "<li>Maps, gates, rates and mistakes are those of the first run (seed 0) on the held-out digits.</li>"
        "<li>All numbers are in <code>results.json</code> next to this page. Load a trained network with "
        "<code>dmst.load_model</code> from <code>dmst_digits-seed0/final</code>; every run has such a folder.</li></ul>"
    )


def _mean(runs: Sequence[Run]) -> str:
    return f"mean of {len(runs)} runs" if len(runs) > 1 else "one run"


def _band(runs: Sequence[Run]) -> str:
    return f"The band of DMST goes from the lowest to the highest of its {len(runs)} runs." if len(runs) > 1 else ""


def _average(rates: LayerRates, quantity: str) -> float:
    return sum(rates.mean[quantity]) / len(rates.mean[quantity])


def _figure(pixels: object, alt: str, caption: str) -> str:
    return f"<figure>{image(pixels, alt, TILE)}<figcaption>{caption}</figcaption></figure>"  # type: ignore[arg-type]


def _examples(labels: Tensor) -> list[int]:
    """The first held-out image of each digit."""
    return [int((labels == digit).nonzero()[0]) for digit in range(10)]
