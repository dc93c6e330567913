"""`dmst analyze rates`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
from dmst.terminal import Terminal, say
from dmst.words import visible

if TYPE_CHECKING:
    from dmst.analysis.rates import LayerRates

SHOWN = {
    "variational": "R_var",
    "raw": "raw",
    "projected": "inside",
    "gap": "gap",
    "complete": "complete",
    "coding": "coding",
    "active": "on",
    "mass": "mass",
}
COLUMNS = {
    "R_var": "cost in the subspaces of the heads; silent heads (gate 0) cost nothing",
    "raw": "the same, with memberships as computed (they need not sum to 1)",
    "inside": "all heads count, each with its full covariance",
    "gap": "part of the rate that is correlation between channels; 0: none",
    "complete": "also counts what lies outside the subspaces: compare networks by it",
    "coding": "all tokens as one Gaussian, without groups",
    "on": "heads whose gate is above 0",
    "mass": "memberships of a token, summed over the heads",
}
UNITS = "Rates are in nats (1 nat = 1.44 bits): mean over images ± standard deviation."
SPREAD = ("variational", "complete", "coding")
COMPARED = "cost in the subspaces; here every head counts, also a silent one, so that networks can be compared"
WEIGHTS = typer.Argument(None, help="Shipped networks, saved models or finished runs. Default: dmst_cifar10.")


def rates(
    weights: list[str] = WEIGHTS,
    data: str = shared.DATA,
    split: str = shared.SPLIT,
    data_dir: str = shared.DATA_DIR,
    limit: int = shared.LIMIT,
    eps: float = typer.Option(0.1, help="Precision of the rates."),
    page: str = typer.Option(None, metavar="FILE.html", help="Draw the curves on an HTML page."),
    as_json: bool = typer.Option(False, "--json", help="Print all numbers as one JSON object."),
    batch_size: int = shared.BATCH,
    device: str = shared.DEVICE,
) -> None:
    """Measure the rate of each layer: before the operator, after it, after the block.

    dmst analyze rates

    dmst analyze rates dmst_cifar10 tost_cifar10 --page rates.html

    The rate is the number of nats needed to encode the tokens of an image, in the subspaces of the layer. For one network, all
    quantities are printed. Several networks are compared in one table, on the same images.
    """
    from dmst.analysis.rates import rates_at
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights
    from dmst.errors import OptionError

    weights = list(dict.fromkeys(weights or ["dmst_cifar10"]))
    found: dict[str, dict[str, LayerRates]] = {}
    with joined(device) as group:
        models = {where: read_weights(where).to(group.device) for where in weights}
        looked = {where: shared.look(model, where, data, split, data_dir, limit, batch_size) for where, model in models.items()}
        first, *others = looked.values()
        if any((each.name, each.fingerprint) != (first.name, first.fingerprint) for each in others):
            told = "; ".join(f"{where}: {each.name}" for where, each in looked.items())
            raise OptionError(
                f"these networks would be measured on different images ({told}), so their rates could not be compared. "
                "Choose images that fit all of them: --data DATASET or --data FOLDER."
            )
        for where, model in models.items():
            with counted(f"{where}: {first.name}", first.count, quiet=as_json) as tick:
                found[where] = rates_at(model, looked[where], eps=eps, tick=tick)
    if as_json:
        say(json.dumps({
            where: {"images": first.name} | {at: each.to_dict() for at, each in mine.items()} for where, mine in found.items()
        }))  # fmt: skip
    else:
        for grid in [_side_by_side(found, first.name)] if others else _in_full(weights[0], found[weights[0]], first.name):
            Terminal().print(grid)
        words = COLUMNS if not others else {"R_var": COMPARED} | {name: COLUMNS[name] for name in ("complete", "coding")}
        say(*shared.legend(words), UNITS if not others else UNITS.partition(":")[0] + ", means over images.", "")
        convention = found[weights[0]]["input"].convention.rpartition(", ")[0]
        say(f"{convention}.")
        if others and not page:
            say("Add --page FILE.html for curves before and after each operator.")
        for mine in found.values():
            if mine["input"].missing:
                say(mine["input"].missing)
    if page:
        from dmst.analysis.rate_page import write_page

        say(write_page(page, found, first.name), err=as_json)


def _table(title: str, columns: Iterable[str]) -> Table:
    grid = Table("layer", title=title, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False, box=box.SIMPLE_HEAD)
    for name in columns:
        grid.add_column(name, justify="right", overflow="fold")
    return grid


def _in_full(where: str, rates: Mapping[str, LayerRates], images: str) -> Iterator[Table]:
    """One network: every quantity, a table for each place."""
    from dmst.analysis.rate_page import WHERE

    for at, each in rates.items():
        grid = _table(visible(f"{where}, {images}: {WHERE[at]}"), SHOWN.values())
        for layer in range(len(each.mean["coding"])):
            grid.add_row(str(layer), *(_cell(each, name, layer) for name in SHOWN))
        yield grid


def _side_by_side(found: Mapping[str, Mapping[str, LayerRates]], images: str) -> Table:
    """Several networks: a column for each, of the rates that can be compared."""
    from dmst.analysis.rate_page import BESIDE

    columns = [f"{visible(where) if i == 0 else ''}\n{word}" for where in found for i, word in enumerate(BESIDE.values())]
    grid = _table(visible(f"{images}: before the operator"), columns)
    for layer in range(max(len(each["input"].mean["coding"]) for each in found.values())):
        cells = (_cell(each["input"], name, layer) for each in found.values() for name in BESIDE)
        grid.add_row(str(layer), *(cell.partition("±")[0] for cell in cells))
    return grid


def _cell(rates: LayerRates, name: str, layer: int) -> str:
    if layer >= len(rates.mean[name]) or math.isnan(rates.mean[name][layer]):
        return "-"
    mean, std = rates.mean[name][layer], rates.std[name][layer]
    return f"{mean:.1f}±{std:.1f}" if name in SPREAD and not math.isnan(std) else f"{mean:.1f}"
