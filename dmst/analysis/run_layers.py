"""What the layers did while a network learnt (the events' "layers", as probes.py writes them): rates, heads that are on, heads
that no image chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from dmst.analysis.charts import Line, line_chart
from dmst.analysis.report import table
from dmst.analysis.run_journal import MOST_POINTS, WEIGHTS, Event, Run, number, numbers, side_by_side, spread
from dmst.words import html


def over_time(run: Run) -> str:
    found = [event for event in run.evaluations if isinstance(event.get("layers"), dict) and event["layers"].get("coding")]
    found = [event for event in found if event["layers"].keys() == found[-1]["layers"].keys()]
    if not found:
        return ""
    first, last = found[0]["layers"], found[-1]["layers"]
    charts = [_by_layer(spread(found, 4), name) for name in ("variational", "coding") if name in last]
    if "active" in last and len(found) > 1:
        charts += _heads_over_time(spread(found, MOST_POINTS), last["heads"])
    return _layers_in_words(run, last) + side_by_side(charts) + _layer_table(first, last, len(found) > 1)


def _by_layer(shown: list[Event], name: str) -> str:
    lines = []
    for i, event in enumerate(shown, 1):
        values = list(map(number, event["layers"][name]))
        lines.append(Line(f"epoch {event['epoch']}", range(len(values)), values, colour=f"c{i}"))
    return line_chart(lines, "layer", f"{name} rate (nats)")


def _heads_over_time(shown: list[Event], heads: list[int]) -> Iterator[str]:
    epochs = numbers(shown, "epoch")
    rows = [list(map(number, event["layers"]["active"])) for event in shown]
    line = Line("mean over layers, band: all layers", epochs, list(map(mean, rows)), list(map(min, rows)), list(map(max, rows)))
    yield line_chart([line], "epoch", f"heads that are on, of {max(heads)}", y_range=(0, max(heads)))
    never = [float(sum(map(len, event["layers"]["never"]))) for event in shown]
    if any(never):
        lost = Line(f"all layers, of {sum(heads):,} heads", epochs, never, colour="c2")
        yield line_chart([lost], "epoch", "heads off for all images", y_range=(0, max(never)), digits=0)


def _layers_in_words(run: Run, last: Event) -> str:
    told = (
        "<p>A <b>rate</b> is the number of nats needed to encode the tokens that a layer reads. The <b>coding rate</b> encodes "
        "all tokens as one group."
    )
    where = f" Measured on {last['images']:,} images of {html(run.seen)} with {WEIGHTS[run.final]}."
    if "variational" not in last:
        return told + f"{where} {html(run.operator)} computes no memberships: it has no other rate, and no maps.</p>"
    told += " The <b>variational rate</b> encodes them in the subspaces of the layer's heads, weighted by their memberships."
    if "active" in last:
        lost, total = sum(map(len, last["never"])), sum(last["heads"])
        told += (
            " A head is on for an image if its <b>gate</b> is above 0. A head that is off costs nothing, so the variational "
        )
        told += "rate also falls when heads are off.</p><p>At the last evaluation, "
        told += (
            f"{lost:,} of the {total:,} heads were off for all images."
            if lost
            else f"each of the {total:,} heads was on for at least one image."
        )
    told += where
    note = f"Variational rate: unit-length projected tokens, c = p/eps², eps = {last['eps']:g}, memberships that sum to 1."
    return f'{told}</p><p class="note">{note}</p>'


def _layer_table(first: Event, last: Event, several: bool) -> str:
    """Every layer, at the first evaluation and at the last."""
    names = {"variational": "variational rate (nats)", "coding": "coding rate (nats)", "active": "heads on, mean"}
    names = {name: word for name, word in names.items() if name in last}
    rows = []
    for i, heads in enumerate(last["heads"]):
        pairs = [[f"{number(told[name][i]):.2f}" for told in ((first, last) if several else (last,))] for name in names]
        never = [", ".join(str(k) for k in last["never"][i]) or "none"] if "never" in last else []
        rows.append([str(i), *map(" → ".join, pairs), str(heads), *never])
    columns = ["layer", *names.values(), "heads in all", *(["heads off for all images"] if "never" in last else [])]
    return f"<h3>{'First evaluation → last evaluation' if several else 'At the last evaluation'}</h3>{table(columns, rows)}"
