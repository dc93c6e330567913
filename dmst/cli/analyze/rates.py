"""`dmst analyze rates`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from dmst.cli.analyze import shared
from dmst.cli.progress import counted
from dmst.terminal import say
from dmst.words import visible

if TYPE_CHECKING:
    from dmst.analysis.rates import LayerRates

COLUMNS = {
    "variational": ("R_var", "cost in the subspaces of the heads; silent heads (gate 0) cost nothing"),
    "raw": ("raw", "the same, with memberships as computed (they need not sum to 1)"),
    "projected": ("inside", "all heads count, each with its full covariance"),
    "gap": ("gap", "part of the rate that is correlation between channels; 0: none"),
    "complete": ("complete", "also counts what lies outside the subspaces: compare networks by it"),
    "coding": ("coding", "all tokens as one Gaussian, without groups"),
    "active": ("on", "heads whose gate is above 0"),
    "mass": ("mass", "memberships of a token, summed over the heads"),
}
SPREAD = ("variational", "complete", "coding")
COMPARED = {"R_var": "cost in the subspaces; here every head counts, also a silent one, so that networks can be compared"}


def rates(
    weights: Annotated[
        list[str] | None, typer.Argument(help="Shipped networks, saved models or finished runs. Default: dmst_cifar10.")
    ] = None,
    data: shared.Data = None,
    split: shared.Split = "",
    data_dir: shared.DataDir = None,
    limit: shared.Limit = 1000,
    eps: Annotated[float, typer.Option(help="Precision of the rates.")] = 0.1,
    page: Annotated[str | None, typer.Option(metavar="FILE.html", help="Draw the curves on an HTML page.")] = None,
    as_json: shared.Json = False,
    batch_size: shared.Batch = 64,
    device: shared.Device = None,
) -> None:
    """Measure the rate of each layer: before the operator, after it, after the block.

    dmst analyze rates

    dmst analyze rates dmst_cifar10 tost_cifar10 --page rates.html

    The rate is the number of nats needed to encode the tokens of an image, in the subspaces of the layer. For one network, all
    quantities are printed. Several networks are compared in one table, on the same images.
    """
    from dmst.analysis.rate_page import write_page
    from dmst.analysis.rates import rates_at
    from dmst.errors import OptionError

    names = list(dict.fromkeys(weights or ["dmst_cifar10"]))
    with shared.opened(names, data, split, data_dir, limit, batch_size, device) as networks:
        first = networks[0][1]
        if len({(images.name, images.fingerprint) for _, images in networks}) > 1:
            told = "; ".join(f"{name}: {images.name}" for name, (_, images) in zip(names, networks, strict=True))
            raise OptionError(
                f"these networks would be measured on different images ({told}), so their rates could not be compared. "
                "Choose images that fit all of them: --data DATASET or --data FOLDER."
            )
        found: dict[str, dict[str, LayerRates]] = {}
        for name, (model, images) in zip(names, networks, strict=True):
            with counted(f"{name}: {first.name}", first.count, quiet=as_json) as tick:
                found[name] = rates_at(model, images, eps=eps, tick=tick)
    if as_json:
        every = {name: {"images": first.name} | {at: x.to_dict() for at, x in mine.items()} for name, mine in found.items()}
        say(json.dumps(every))
    else:
        _show_one(names[0], found[names[0]], first.name) if len(names) == 1 else _show_several(found, first.name)
        say(f"{found[names[0]]['input'].convention.rpartition(', ')[0]}.")
        if len(names) > 1 and not page:
            say("Add --page FILE.html for curves before and after each operator.")
        say(*(mine["input"].missing for mine in found.values() if mine["input"].missing))
    if page:
        say(write_page(page, found, first.name), err=as_json)


def _show_one(name: str, rates: Mapping[str, LayerRates], images: str) -> None:
    """Every quantity, a table for each place."""
    from dmst.analysis.rate_page import WHERE

    for at, each in rates.items():
        rows = [[i, *(_cell(each, quantity, i, quantity in SPREAD) for quantity in COLUMNS)] for i in _layers(each)]
        words = dict(COLUMNS.values())
        shared.show(f"{name}, {images}: {WHERE[at]}", ("layer", *words), rows, words if at == "block" else None)
    say("Rates are in nats (1 nat = 1.44 bits): mean over images ± standard deviation.")


def _show_several(found: Mapping[str, Mapping[str, LayerRates]], images: str) -> None:
    """A column for each network, of the rates that can be compared."""
    from dmst.analysis.rate_page import BESIDE

    columns = [f"{visible(name) if i == 0 else ''}\n{word}" for name in found for i, word in enumerate(BESIDE.values())]
    before = [each["input"] for each in found.values()]
    deepest = max(before, key=lambda each: len(_layers(each)))
    rows = [[i, *(_cell(each, quantity, i) for each in before for quantity in BESIDE)] for i in _layers(deepest)]
    words = COMPARED | dict(COLUMNS[name] for name in ("complete", "coding"))
    shared.show(f"{images}: before the operator", ("layer", *columns), rows, words)
    say("Rates are in nats (1 nat = 1.44 bits), means over images.")


def _layers(rates: LayerRates) -> range:
    return range(len(rates.mean["coding"]))


def _cell(rates: LayerRates, name: str, layer: int, spread: bool = False) -> str:
    if layer >= len(rates.mean[name]) or math.isnan(rates.mean[name][layer]):
        return "-"
    mean, std = rates.mean[name][layer], rates.std[name][layer]
    return f"{mean:.1f}±{std:.1f}" if spread and not math.isnan(std) else f"{mean:.1f}"
