"""The page of a training run: what was trained on what, what came of it, and how. Every number stands in the journal or is
computed here from the final weights.

score · learning curves · layers over time · accuracy by class · memberships · mistakes · what happened · how it was made
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

from dmst.analysis.charts import Line, line_chart
from dmst.analysis.report import Section, table, tiles, write_report
from dmst.analysis.run_journal import (
    MOST_POINTS,
    WEIGHTS,
    Run,
    binned,
    in_time,
    named,
    numbers,
    percent,
    side_by_side,
    signal_name,
    spread,
    when,
)
from dmst.analysis.run_layers import over_time
from dmst.analysis.run_pictures import Sample, memberships, mistakes
from dmst.models import VisionModel
from dmst.words import html, short

MOST_CLASSES = 40
MOST_NAMED = 10  # images that were left out
COLOURS = {"model": "c2", "ema": "c3"}
# what may be said of a score and of the best epoch, by the images that both were measured on
CLAIMS = {
    "test": "The best epoch was chosen with the test images, so its accuracy is <b>not a result</b>. The final weights are "
    "those of the last epoch: no score was used to choose them.",
    "holdout": "The best epoch was chosen with the same images that score it, so its accuracy is optimistic. The final weights "
    "are those of the last epoch: no score was used to choose them.",
    "train": "The network was trained on the images that score it. This says nothing about other images: it is <b>not a "
    "result</b>.",
}


def write_run_report(
    path: Path, events: list[dict[str, Any]], recipe: str, model: VisionModel, sample: tuple[Tensor, Tensor] | None
) -> Path:
    """Write the page of a run: its journal, its recipe as TOML, its final weights, and some images with their labels."""
    run = Run(events, recipe, model)
    pictures = Sample(model, *sample, run.classes) if sample is not None and len(sample[1]) else None
    bodies = {
        "Results": _scores(run),
        "Learning curves": _learning(run),
        "Layers during training": over_time(run),
        "Accuracy by class": _by_class(run),
        "Membership maps": "" if pictures is None else memberships(pictures),
        "Mistakes": "" if pictures is None else mistakes(pictures, run.seen),
        "Interruptions and notes": _happened(run),
        "Settings and versions": _made(run, recipe),
    }
    sections = [Section(title, body) for title, body in bodies.items() if body]
    title = short(f"{run.model} on {run.name if run.evaluated == 'holdout' else run.data}", 80)
    return write_report(path, title, _lead(run) + _look_at(sections), sections)


def run_sections(
    events: list[dict[str, Any]], recipe: str, model: VisionModel
) -> tuple[tuple[Section, ...], tuple[Section, ...]]:
    """What a journal adds to the page of a network, before and after it."""
    run = Run(events, recipe, model)
    early = {"Results": _scores(run), "Learning curves": _learning(run), "Layers during training": over_time(run)}
    late = {"Interruptions and notes": _happened(run), "Settings and versions": _made(run, recipe)}
    before, after = (tuple(Section(*each) for each in some.items() if each[1]) for some in (early, late))
    return before, after


def _lead(run: Run) -> str:
    score, epochs = run.scores.get(run.final), run.recipe.get("schedule", {}).get("epochs")
    init, batch = run.recipe.get("model", {}).get("init_from"), run.recipe.get("run", {}).get("batch_size", math.nan)
    origin = f"from the weights of {html(init)}" if init else "from scratch"
    told = (
        "This is the report of a training run. "
        f"<b>{html(run.model)}</b> was trained {origin} on {run.facts.get('train_images', 0):,} images of {html(run.data)}"
        f", for {epochs or '?'} epoch{'s' * (epochs != 1)}. It was "
        + (f"evaluated on {score['images']:,} images ({html(run.seen)})." if score else "not evaluated.")
    )
    figures = []
    if score:
        figures.append((f"{score['top1']:.2%}", f"accuracy (top-1) of {WEIGHTS[run.final]} on {run.seen}"))
    figures.append((f"{run.parameters:,}" if run.parameters < 1e7 else f"{run.parameters / 1e6:.1f} M", "parameters"))
    if math.isfinite(run.pace):
        steps = run.steps[-1]["step"]
        figures += [(f"{batch / run.pace:,.0f}", "training images per second, median")] if math.isfinite(batch) else []
        figures.append((in_time(run.pace * steps), f"training time for {steps:,} steps, without evaluations"))
    return f"<p>{told}</p>{tiles(figures)}"


def _look_at(sections: list[Section]) -> str:
    """What to look at first, of what there is."""
    words = {
        "Membership maps": "which parts of an image each head groups together",
        "Mistakes": "the images that the network gets wrong",
        "Learning curves": "whether training went well",
    }
    at = {section.title: f"#s{i}" for i, section in enumerate(sections, 1)}
    told = [f'<a href="{at[title]}">{title}</a> ({why})' for title, why in words.items() if title in at]
    return f"<p>What to look at: {', '.join(told)}.</p>"


def _scores(run: Run) -> str:
    if not run.scores:
        return "<p>This run was not evaluated, so it has no accuracy.</p>"
    rows = []
    for name, score in run.scores.items():
        top5 = [f"{score['top5']:.2%}"] if len(run.classes) > 5 else []
        right, kept = f"{score['right']:,} of {score['images']:,}", ", saved in final/" if name == run.final else ""
        rows.append([f"{score['top1']:.2%}", WEIGHTS[name] + kept, right, *top5, f"{score['loss']:.4f}", run.seen])
    if run.best:
        flaw = "" if run.evaluated == "holdout" else ": not a result"
        best = f"{WEIGHTS[run.final]}, best epoch {run.best['epoch']}{flaw}"
        rows.append([f"{run.best['top1']:.2%}", best, *[""] * (len(rows[0]) - 3), run.seen])
    mean_of = (
        " The averaged weights are a running mean over the steps (<code>optim.model_ema</code>)." if "ema" in run.scores else ""
    )
    top5 = ["top-5"] if len(run.classes) > 5 else []
    columns = ["accuracy (top-1)", "weights", "correct", *top5, "loss (nats)", "evaluated on"]
    return table(columns, rows) + f"<p>{CLAIMS.get(run.evaluated, '')}{mean_of}</p>"


def _learning(run: Run) -> str:
    shown = spread(run.evaluations, MOST_POINTS)
    epochs = numbers(shown, "epoch")
    losses = [binned(run.steps, "loss", "training (augmented)")]
    reads = [Line("training (augmented)", epochs, percent(shown, "train_accuracy"), dashed=True)]
    for name in run.scores:
        losses.append(Line(f"evaluation, {WEIGHTS[name]}", epochs, numbers(shown, name, "loss"), colour=COLOURS[name]))
        reads.append(Line(f"evaluation, {WEIGHTS[name]}", epochs, percent(shown, name, "top1"), colour=COLOURS[name]))
    whole = bool(epochs) and epochs[-1] > 1
    norms, rates = binned(run.steps, "norm", "all parameters"), binned(run.steps, "lr", "schedule")
    rates = rates._replace(ys=[1000 * y for y in rates.ys], low=None, high=None)  # small numbers leave no room for their label
    charts = [
        line_chart(reads, "epoch", "accuracy (%)", y_range=(0, 100) if len(epochs) == 1 else None),
        line_chart(losses, "epoch", "loss (nats)", digits=3, whole_x=whole),
        line_chart([rates], "epoch", "learning rate (x 0.001)", digits=4, whole_x=whole),
        line_chart([norms], "epoch", "gradient norm", digits=3, whole_x=whole),
    ]
    evaluated = f"<p>Evaluated on {html(run.seen)}.</p>" if run.scores else ""
    return (
        evaluated + side_by_side(charts) + '<p class="note">Do not compare the training line with an evaluation line: during '
        "training, images may be augmented and mixed, and labels smoothed (see the recipe). A band goes from the lowest to the "
        "highest value of the steps that one point stands for. A nat is a unit of information: 1 nat = 1.44 bits.</p>"
    )


def _by_class(run: Run) -> str:
    counts = run.end.get("by_class") or []
    found = sorted((right / count, i, right, count) for i, (right, count) in enumerate(counts) if count)
    if not found:
        return ""
    rows = [(named(run.classes, i), f"{share:.1%}", f"{right:,} of {count:,}") for share, i, right, count in found]
    rows = rows[:MOST_CLASSES]
    half = len(rows) if len(rows) <= 5 else math.ceil(len(rows) / 2)
    which = (
        f"The {len(rows)} of {len(found):,} classes with the lowest accuracy"
        if len(rows) < len(found)
        else "All classes, lowest accuracy first"
    )
    empty = len(counts) - len(found)
    halves = [f"<div>{table(('class', 'accuracy', 'correct'), some)}</div>" for some in (rows[:half], rows[half:]) if some]
    return (
        f"<p>{which}: {WEIGHTS[run.final]} on {html(run.seen)}. Mean over the classes: {mean(row[0] for row in found):.2%}."
        f"{f' Classes without images: {empty:,}.' if empty else ''}</p>{side_by_side(halves)}"
    )


def _happened(run: Run) -> str:
    told = list(_interruptions(run))
    bad = [f"<code>{html(name)}</code>" for name in run.facts.get("bad_images") or []]
    if bad:
        rest = [f"and {len(bad) - MOST_NAMED:,} more"] if len(bad) > MOST_NAMED else []
        told.append(f"{len(bad):,} training images could not be read and were left out:{_list(bad[:MOST_NAMED] + rest)}")
    told += [html(note) for note in run.facts.get("notes") or []]
    return _list(told) if told else ""


def _interruptions(run: Run) -> Iterator[str]:
    """Stops, and what was changed. A kill leaves no line: the journal takes back what came after the last checkpoint."""
    for event, after in pairwise([*run.events, {}]):
        at = f"{when(event.get('time'))}, step {event.get('step', 0):,}"
        if event.get("event") == "stopped":
            went_on = f"; continued, next entry at {when(after.get('time'))}" if after else ""
            reason = str(event.get("reason") or "").rstrip(".")  # of a run that was ended by what its layers did
            by = f"ended: {html(reason)}" if reason else f"stopped by {signal_name(event.get('signal'))}"
            yield f"{at}: {by}{went_on}."
        if event.get("event") == "start" and event is not run.starts[0]:
            changes = [f"<code>{html(line)}</code>" for line in event.get("changed") or []]
            yield f"{at}: continued with a changed recipe.{_list(changes)}"


def _made(run: Run, recipe: str) -> str:
    facts, settings = run.facts, run.recipe.get("run", {})
    times = [event["time"] for event in run.events if "time" in event]
    count = facts.get("processes", 1)
    rows = {
        "network": f"{run.model}: attention {run.operator}, {run.parameters:,} parameters",
        "trained on": f"{facts.get('train_images', 0):,} images of {run.data}, {len(run.classes):,} classes",
        "evaluated on": f"{facts.get('eval_images', 0):,} images: {run.seen}" if run.evaluated else "nothing",
        "steps": f"{run.steps[-1]['step']:,} of {facts.get('steps', 0):,}" if run.steps else "none",
        "started, duration": f"{when(times[0])}, {in_time(times[-1] - times[0])} including pauses" if times else "?",
        "checkpoints": str(run.checkpoints),
        "device": f"{facts.get('device', '?')}; {count} process{'es' * (count != 1)}",
        "image loading": str(facts.get("path", "?")),
        "seed, mixed precision": f"{settings.get('seed', '?')}, {settings.get('amp', '?')}",
        "versions": ", ".join(f"{name} {version}" for name, version in (facts.get("versions") or {}).items()),
        "recipe (sha256)": str(facts.get("recipe", "?")),
    }
    text = "\n".join(map(html, recipe.splitlines()))
    return (
        table(("setting", "value"), list(rows.items())) + '<details style="margin:16px 0"><summary>The full recipe</summary>'
        f'<div class="scroll"><pre>{text}</pre></div></details>'
        '<p class="note">All numbers are in <code>journal.jsonl</code> next to this page. Load the network with '
        "<code>dmst.load_model</code> from <code>final/</code>.</p>"
    )


def _list(lines: Iterable[str]) -> str:
    inside = "".join(f"<li>{line}</li>" for line in lines)
    return f'<ul style="overflow-wrap:anywhere">{inside}</ul>' if inside else ""
