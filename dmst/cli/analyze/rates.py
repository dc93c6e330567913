"""`dmst analyze rates`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dmst.cli.analyze import shared
from dmst.cli.progress import counted

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
SPREAD = ("variational", "complete", "coding")
WEIGHTS = typer.Argument(None, help="Saved models, runs, or names of those that ship; dmst_digits if not given.")


def rates(
    weights: list[str] = WEIGHTS,
    data: str = shared.DATA,
    split: str = shared.SPLIT,
    data_dir: str = shared.DATA_DIR,
    limit: int = shared.LIMIT,
    eps: float = typer.Option(0.1, help="Precision of the rates; its square enters."),
    page: str = typer.Option(None, metavar="FILE.html", help="Draw the curves, on a page of its own."),
    as_json: bool = typer.Option(False, "--json", help="One object, every quantity at every place."),
    batch_size: int = shared.BATCH,
    device: str = shared.DEVICE,
) -> None:
    """How many nats the tokens of each layer cost: before the operator, after it, after the block.

    dmst analyze rates

    dmst analyze rates dmst_cifar10 tost_cifar10 --data cifar10 --data-dir DIR --page rates.html

    Rates in the layer's own subspaces, in the lineage's convention, which is named; means over images ± standard deviation.
    """
    from dmst.analysis.rates import PLACES, rates_at
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights

    found = {}
    names = {}
    with joined(device) as group:
        for where in weights or ["dmst_digits"]:
            model = read_weights(where).to(group.device)
            looked = shared.look(model, where, data, split, data_dir, limit, batch_size)
            with counted(f"{where}: {looked.name}", looked.count, quiet=as_json) as tick:
                found[where], names[where] = rates_at(model, looked, eps=eps, tick=tick), looked.name
    if as_json:
        told = {
            where: {"images": names[where]} | {at: each.to_dict() for at, each in mine.items()} for where, mine in found.items()
        }
        typer.echo(json.dumps(told))
    else:
        console = Console()
        for where, mine in found.items():
            for at, each in mine.items():
                grid = Table(
                    "layer",
                    title=f"{escape(where)}, {escape(names[where])}: {PLACES[at]}",
                    title_justify="left",
                    pad_edge=False,
                    box=box.SIMPLE_HEAD,
                )
                for word in SHOWN.values():
                    grid.add_column(word, justify="right", no_wrap=True)
                for layer in range(len(each.mean["coding"])):
                    grid.add_row(str(layer), *(_cell(each, name, layer) for name in SHOWN))
                console.print(grid)
            console.print(f"{mine['input'].convention.rpartition(', ')[0]}.", highlight=False, soft_wrap=True)
            if mine["input"].missing:
                console.print(mine["input"].missing, highlight=False, markup=False, soft_wrap=True)
    if page:
        from dmst.analysis.rate_page import write_page

        typer.echo(f"{write_page(page, found, names)}", err=as_json)


def _cell(rates: LayerRates, name: str, layer: int) -> str:
    mean, std = rates.mean[name][layer], rates.std[name][layer]
    if math.isnan(mean):
        return "-"
    return f"{mean:.1f}±{std:.1f}" if name in SPREAD and not math.isnan(std) else f"{mean:.1f}"
