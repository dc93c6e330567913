"""The page of the demo: what was trained, what it learnt, and what it computes. Every number is measured here.

learning curves · memberships over example digits, layer by layer · gates by class · rates by layer · the digits read wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
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
from dmst.engine.train import versions
from dmst.models import Trace, VisionModel

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
        f"<p>A <b>DMST</b> of {runs[0].parameters:,} parameters learnt to read handwritten digits on one CPU core in "
        f"{sum(run.seconds for run in runs) / len(runs):.0f} seconds, from nothing. Below: how it learnt, and what its layers "
        "compute. Every map is a tensor that the network computed, drawn cell for cell.</p>"
        + tiles(
            [
                (f"{read:.1%}", f"of {len(unseen.labels)} unseen digits read, {_mean(runs)}"),
                (f"{runs[0].parameters:,}", "parameters"),
                (f"{silent:.0%}", "of its heads silent, on average"),
                (f"{sum(run.seconds for run in results.runs):.0f} s", f"of one core, for all {len(results.runs)} runs"),
            ]
        )
    )
    sections = [
        Section("Learning", _learning(results)),
        Section("Where each pixel belongs", _memberships(mine, traces["tost_digits"], unseen)),
        Section("Which heads a digit uses", _gates(mine, unseen)),
        Section("What the layers do to the rate", _rates(rates)),
        Section("The digits it gets wrong", _mistakes(mine.logits, unseen)),
        Section("How this was made", _made(results)),
    ]
    return write_report(path, "A transformer you can look into", lead, sections)


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
    charts = line_chart(reads, "epoch", "held-out digits read, %", y_range=(max(0, 10 * (lowest // 10)), 100), digits=1)
    charts += line_chart(losses, "epoch", "training loss, nats")
    columns = ("network", "attention", "held-out digits read", "runs", "parameters", "training images/s, one core")
    return (
        "<p>Three networks with one skeleton: only the attention layer differs. Runs with the same seed see the same batches. "
        f"{_band(results.of('dmst_digits'))}</p>"
        + table(columns, summary(results))
        + f'<div class="charts">{charts}</div>'
        + '<p class="note">A demonstration, not a contest: the twins have one run each, and one digit more or less is '
        "0.3 points. The loss stays above zero because images are mixed and labels smoothed.</p>"
    )


def _memberships(mine: Trace, tost: Trace, unseen: Batch) -> str:
    chosen = _examples(unseen.labels)
    views = [(f"layer {i}", _map_table(mine, i, chosen, unseen, 0.0, 1.0)) for i in range(len(mine.layers))]
    last = len(tost.layers) - 1
    seen = maps(tost, last)[chosen]
    views.append((f"ToST, layer {last}", _map_table(tost, last, chosen, unseen, seen.min().item(), seen.max().item())))
    return (
        "<p>A DMST layer gives every pixel a <b>membership</b> between 0 and 1 in each of its heads (each head is a subspace), "
        "and every image a <b>gate</b> per head. Yellow pixels belong to the head, dark ones do not. A head whose gate is "
        "exactly 0 is <i>silent</i> for that digit: it contributes nothing, and is drawn faintly.</p>"
        + tabs("layer", views, chosen=len(mine.layers) - 1)
        + '<p class="note">ToST has no gate and derives its memberships from energy; as published they stay close to uniform, '
        "so its map is drawn on a scale of its own, given under it.</p>"
    )


def _map_table(trace: Trace, layer: int, chosen: Sequence[int], unseen: Batch, low: float, high: float) -> str:
    """Digits across, the image and then every head down."""
    every, gate = maps(trace, layer), trace.layers[layer].parts.gate
    sure = trace.logits.softmax(-1)
    row = ""
    for i in chosen:
        says, truth = int(sure[i].argmax()), int(unseen.labels[i])
        wrong = "" if says == truth else f"<b>is {truth},</b> "
        caption = f"{wrong}read as {says}, {sure[i, says]:.0%}"
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
    said = ", ".join(f"{count:.1f} in layer {i}" for i, count in enumerate(on))
    return (
        f"<p>Mean gate over the unseen images of each digit. The gates of a layer sum to 1 for every image. Heads "
        f"that are on, of {heads}: {said}. Nobody told the network which digit uses which head.</p>"
        + cells(
            torch.cat(use, 1).tolist(),
            [str(digit) for digit in range(10)],
            [f"h{k}" for _ in use for k in range(heads)],
            groups=[(f"layer {i}", heads) for i in range(len(use))],
            corner="digit",
        )
    )


def _rates(rates: dict[tuple[str, str], LayerRates]) -> str:
    def lines(quantity: str) -> list[Line]:
        out = []
        for (name, at), found in rates.items():
            mean, std = found.mean[quantity], found.std[quantity]
            band = at == "input"
            out.append(
                Line(
                    f"{name.removesuffix('_digits')}, {'what the layer reads' if band else 'after its step'}",
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
    steps = [b - a for a, b in zip(before.mean["variational"], after.mean["variational"], strict=True)]
    falls = [f"layer {i} {_moves(step)}" for i, step in enumerate(steps)]
    charts = line_chart(lines("variational"), "layer", "variational rate, nats") + line_chart(
        lines("complete"), "layer", "complete rate, nats"
    )
    return (
        "<p>The attention of DMST and ToST is derived as a step that lowers the <b>variational rate</b>: the nats it takes to "
        "code the tokens inside their subspaces. Measured with memberships computed anew after the step, here "
        f"(in nats) {escape('; '.join(falls))}.</p>"
        f'<div class="charts">{charts}</div>'
        f"<p>Read the left picture with care: silent heads cost nothing there, and {_average(before, 'active'):.1f} of DMST's "
        f"heads are on. With every head counted the two rates are {_average(before, 'all_heads'):.1f} (DMST) and "
        f"{_average(other, 'all_heads'):.1f} nats (ToST). The <b>complete rate</b> on the right also charges for what lies "
        f"outside the subspaces: {_average(before, 'complete'):.1f} and {_average(other, 'complete'):.1f}. Means over layers "
        "and images.</p>"
        f'<p class="note">{escape(before.convention)}. Complete rate: c = d/eps², orthonormalised U. Bands: one standard '
        "deviation over images. The printed form of DMSA has a free output matrix, so descent is measured, not promised.</p>"
    )


def _mistakes(logits: Tensor, unseen: Batch) -> str:
    """The surest mistakes first, a few rows of them."""
    sure, says = logits.softmax(-1).max(-1)
    wrong = (says != unseen.labels).nonzero().flatten()
    surest = wrong[sure[wrong].argsort(descending=True)].tolist()
    if not surest:
        return "<p>None in this run.</p>"
    figures = "".join(
        _figure(
            picture(unseen.images[i]),
            f"digit {int(unseen.labels[i])}",
            f"is {int(unseen.labels[i])}, read as {int(says[i])}<br>{sure[i]:.0%} sure",
        )
        for i in surest[:MOST_MISTAKES]
    )
    rest = f" The {MOST_MISTAKES} surest:" if len(wrong) > MOST_MISTAKES else ""
    return f'<p>{len(wrong)} of {len(unseen.labels)} unseen digits, first run.{rest}</p><div class="wrong">{figures}</div>'


def _made(results: Results) -> str:
    optim, schedule, usual = results.recipe.optim, results.recipe.schedule, read_recipe("digits").schedule
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        "<ul>"
        f"<li>Command: <code>dmst demo --epochs {schedule.epochs} --seeds {len(results.of('dmst_digits'))}</code> "
        f"(<code>make demo</code>: {usual.epochs} and 3). {escape(told)}. Each run on one CPU thread.</li>"
        "<li>Data: the 1,797 digits that scikit-learn ships (8 by 8 pixels); every fifth image is held out.</li>"
        f"<li>Recipe <code>digits</code>, the same for all: {schedule.epochs} epochs of batches of "
        f"{results.recipe.run.batch_size}; Muon ({optim.matrix_lr:g}) for the matrices of the blocks, AdamW ({optim.lr:g}) "
        "for the rest; small turns, zooms and shifts; mixed images; smoothed labels. It was chosen for DMST, on other splits "
        "of the data.</li>"
        "<li>Pictures and tables of layers are of the first run (seed 0), on the held-out digits.</li>"
        "<li>Numbers: <code>results.json</code> beside this page. Networks: <code>dmst_digits-seed0/final</code> and so on, "
        "for <code>dmst.load_model</code>; each folder is a run as <code>dmst train</code> leaves it.</li></ul>"
    )


def _moves(step: float) -> str:
    return f"{'lowers' if step < 0 else 'raises'} it by {abs(step):.2f}" if abs(step) >= 0.005 else "leaves it as it is"


def _mean(runs: Sequence[Run]) -> str:
    return f"mean of {len(runs)} runs" if len(runs) > 1 else "one run"


def _band(runs: Sequence[Run]) -> str:
    return f"The band of DMST spans its {len(runs)} runs." if len(runs) > 1 else ""


def _average(rates: LayerRates, quantity: str) -> float:
    return sum(rates.mean[quantity]) / len(rates.mean[quantity])


def _figure(pixels: object, alt: str, caption: str) -> str:
    return f"<figure>{image(pixels, alt, TILE)}<figcaption>{caption}</figcaption></figure>"  # type: ignore[arg-type]


def _examples(labels: Tensor) -> list[int]:
    """The first held-out image of each digit."""
    return [int((labels == digit).nonzero()[0]) for digit in range(10)]
