"""`dmst analyze`: looking inside a trained network, one function a verb."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from dmst.cli.progress import counted
from dmst.terminal import Terminal, say
from dmst.words import fitting, visible

if TYPE_CHECKING:
    from dmst.analysis.rates import LayerRates
    from dmst.analysis.running import Numbers
    from dmst.analysis.scored import Foreground, Interval
    from dmst.engine.samples import Sample
    from dmst.models import VisionModel

app = typer.Typer(name="analyze", help="Measure and draw what the layers of a network do.", no_args_is_help=True)

NETWORK = "A network that ships (`dmst models --shipped`), a saved model, or a finished run."
Weights = Annotated[str, typer.Argument(help=NETWORK)]
Network = Annotated[str, typer.Option("--weights", help=NETWORK)]
Photos = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PHOTO]...", help="Image files, or folders of them. Default: images of a dataset."),
]
Layer = Annotated[str, typer.Option(metavar="N|all", help="One layer, from 0 (-1 is the last), or all.")]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A dataset or a folder. Default: the images a run was evaluated on, else photos that ship with dmst.",
    ),
]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets.")
]
Split = Annotated[str, typer.Option(help="test or train; if not given test, or all images where there are no test images.")]
Limit = Annotated[int, typer.Option(min=1, help="Use at most this many images, always the same ones.")]
Eps = Annotated[
    float | None,
    typer.Option(help="Precision of the rate, c = d/eps². Default: c = 1, the rate that the layers themselves lower."),
]
Orthonormal = Annotated[
    bool, typer.Option("--orthonormal", help="Use an orthonormal basis (QR) of each head's subspace, without bias.")
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Images per batch. It does not change the numbers.")]
Json = Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")]
Unverified = Annotated[bool, typer.Option(help="Accept weights without hashes, such as those of timm.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")]


@contextmanager
def opened(
    weights: Sequence[str],
    data: str | None,
    split: str,
    data_dir: str | None,
    limit: int,
    batch_size: int,
    device: str | None,
    *,
    photos: Sequence[str | Path] = (),
    unverified: bool = False,
    size: int | None = None,
) -> Iterator[list[tuple[VisionModel, Sample]]]:
    """Every network, and the images that are asked for, else those that a run was evaluated on, else what is at hand."""
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights
    from dmst.engine.samples import sample

    with joined(device) as group:
        models = [read_weights(where, unverified=unverified).to(group.device) for where in weights]
        places = {"split": split, "data_dir": data_dir, "photos": photos, "limit": limit, "batch_size": batch_size}
        places |= {"size": size}
        yield [
            (model, sample(model, data, run=None if photos else where, device=group.device, **places))  # type: ignore[arg-type]
            for model, where in zip(models, weights, strict=True)
        ]


def layers_named(layer: str) -> list[int] | None:
    """What --layer says: the number of one layer; None for all."""
    from dmst.errors import OptionError

    if layer != "all" and not layer.removeprefix("-").isdecimal():
        raise OptionError(f"--layer is {layer!r}: it must be a whole number, or all.")
    return None if layer == "all" else [int(layer)]


def show(title: str, columns: Iterable[str], rows: Iterable[Sequence[object]], words: Mapping[str, str] | None = None) -> None:
    """A table of numbers that a terminal of 80 columns holds, and below it a line for each word that needs one."""
    table = Table(title=visible(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Terminal().print(table)
    if words:
        wide = max(map(len, words))
        say(*(f"{name:<{wide}}  {word}" for name, word in words.items()), "")


Columns = Mapping[str, tuple[str, str, str]]  # header -> what it shows ("frozen.mean"), its format, what it means


def show_layers(title: str, columns: Columns, layers: Iterable[tuple[int, Mapping[str, Numbers]]]) -> None:
    """A table with a row for each layer, given as its number and its quantities."""
    rows = []
    for number, quantities in layers:
        pairs = ((told.split("."), form) for told, form, _ in columns.values())
        rows.append([number, *(f"{getattr(quantities[name], part):{form}}" for (name, part), form in pairs)])
    show(title, ("layer", *columns), rows, {name: words for name, (_, _, words) in columns.items()})


# --- rates -------------------------------------------------------------------------------------------------------------

RATES = {
    "variational": ("R_var", "cost in the subspaces of the heads; silent heads (gate 0) cost nothing"),
    "raw": ("raw", "the same, with memberships as computed (they need not sum to 1)"),
    "projected": ("inside", "all heads count, each with its full covariance"),
    "gap": ("gap", "part of the rate that is correlation between channels; 0: none"),
    "complete": ("complete", "also counts what lies outside the subspaces: compare networks by it"),
    "coding": ("coding", "all tokens as one Gaussian, without groups"),
    "active": ("on", "heads whose gate is not 0"),
    "mass": ("mass", "memberships of a token, summed over the heads"),
}
SPREAD = ("variational", "complete", "coding")


@app.command()
def rates(
    weights: Annotated[
        list[str] | None, typer.Argument(help="Shipped networks, saved models or finished runs. Default: dmst_cifar10.")
    ] = None,
    data: Data = None,
    split: Split = "",
    data_dir: DataDir = None,
    limit: Limit = 1000,
    eps: Annotated[float, typer.Option(help="Precision of the rates.")] = 0.1,
    page: Annotated[str | None, typer.Option(metavar="FILE.html", help="Draw the curves on an HTML page.")] = None,
    as_json: Json = False,
    batch_size: Batch = 64,
    device: Device = None,
) -> None:
    """Measure the rate of each layer: before the operator, after it, after the block.

    dmst analyze rates

    dmst analyze rates dmst_cifar10 tost_cifar10 --page rates.html

    The rate is the number of nats needed to encode the tokens of an image, in the subspaces of the layer. One network has a
    table for each place. Several networks, on the same images, have one table each: before the operator.
    """
    from dmst.analysis.network_report import WHERE, write_rate_page
    from dmst.analysis.rates import rates_at
    from dmst.analysis.running import plain
    from dmst.errors import OptionError

    names = list(dict.fromkeys(weights or ["dmst_cifar10"]))
    with opened(names, data, split, data_dir, limit, batch_size, device) as networks:
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
        say(
            json.dumps(
                {name: {"images": first.name} | {at: plain(x) for at, x in each.items()} for name, each in found.items()}
            )
        )
    else:
        tables = [(name, at) for name in names for at in (WHERE if len(names) == 1 else ("input",))]
        for name, at in tables:
            here = found[name][at]
            rows = [[i, *(_cell(here, x, i) for x in RATES)] for i in range(len(here.mean["coding"]))]
            words = dict(RATES.values())
            if here.rate != "R_var":
                words = {here.rate: words.pop("R_var"), **words}
            last = (name, at) == tables[-1]
            show(f"{name}, {first.name}: {WHERE[at]}", ("layer", *words), rows, words if last else None)
        say("Rates are in nats (1 nat = 1.44 bits): mean over images ± standard deviation.")
        say(*dict.fromkeys(f"{mine['input'].convention.rpartition(', ')[0]}." for mine in found.values()))
        say(*dict.fromkeys(mine["input"].missing for mine in found.values() if mine["input"].missing))
    if page:
        say(write_rate_page(page, found, first.name), err=as_json)


def _cell(rates: LayerRates, name: str, layer: int) -> str:
    """One quantity of one layer, with its deviation where there is room."""
    mean, std = rates.mean[name][layer], rates.std[name][layer]
    spread = f"±{std:.1f}" if name in SPREAD and not math.isnan(std) else ""
    return "-" if math.isnan(mean) else f"{mean:.1f}{spread}"


# --- certify -----------------------------------------------------------------------------------------------------------

CERTIFICATE = {
    "rate": ("rate.mean", ".2f", "cost of the tokens that the layer reads, in nats (1 nat = 1.44 bits)"),
    "change": ("frozen.mean", "+.2f", "change of the rate by the layer's step, in nats; below 0: it falls"),
    "falls": ("frozen.below", ".0%", "share of the images on which the rate falls"),
    "bound": ("bound.mean", "+.2f", "certificate: the change is at most this"),
    "proven": ("bound.below", ".0%", "share of the images with a bound below 0: the fall is guaranteed"),
    "max t": ("longest.mean", ".2f", "a step shorter than this surely lowers the rate; the network has t = 1"),
    "updated": ("anew.mean", "+.2f", "change, with memberships and gates computed again after the step"),
    "normed": ("normed.mean", "+.2f", "change, measured after the norm"),
    "both": ("reread.mean", "+.2f", "change, measured after the norm, memberships and gates computed again"),
}


@app.command()
def certify(
    weights: Weights = "dmst_cifar10",
    data: Data = None,
    data_dir: DataDir = None,
    split: Split = "",
    limit: Limit = 1000,
    eps: Eps = None,
    orthonormal: Orthonormal = False,
    batch_size: Batch = 64,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Check whether each layer lowers its rate: on how many images, and by which heads.

    dmst analyze certify

    dmst analyze certify runs/cifar --data cifar10 --data-dir DIR --eps 0.5

    The rate is the number of nats needed to encode the tokens of an image. docs/certificates.md explains the table.
    """
    from dmst.analysis.certificates import certify as certificate
    from dmst.analysis.running import plain

    with (
        opened([weights], data, split, data_dir, limit, batch_size, device) as [(model, images)],
        counted(images.name, images.count) as tick,
    ):
        found = certificate(model, images, eps=eps, basis="orthonormal" if orthonormal else "raw", tick=tick)
    layers = [layer for layer in found.layers if layer is not None]
    if as_json:
        say(json.dumps({"weights": weights, "data": images.name, **plain(found)}))
    elif not layers:
        say(found.missing)
    else:
        show_layers(f"{weights} on {images.name}", CERTIFICATE, [(layer.layer, layer.total) for layer in layers])
        say(f"{found.convention}.", "Heads that raise the rate, on average:")
        for layer in layers:
            every = len(layer.raising) == len(layer.heads)
            say(f"layer {layer.layer}: {'all' if every else ', '.join(map(str, layer.raising)) or 'none'}")


# --- theorem -----------------------------------------------------------------------------------------------------------

THEOREM = {
    "coupled": ("coupled.mean", ".2f", "rate in nats with coupled memberships (softmax over heads)"),
    "decoupled": ("decoupled.mean", ".2f", "rate with the layer's own memberships and gates"),
    "gain": ("gain.mean", "+.2f", "coupled less decoupled; above 0: the claim of Theorem 1 holds"),
    "holds": ("gain.above", ".0%", "share of the images on which the claim holds"),
    "membership": ("membership.mean", "+.2f", "part of the gain: the memberships fit better"),
    "mass": ("mass.mean", "+.2f", "part of the gain: the memberships of a token sum to less"),
    "gate": ("gate.mean", "+.2f", "part of the gain: gates are below 1"),
    "premise": ("premise.mean", ".0%", "share of the images that meet the conditions of the proof"),
}


@app.command()
def theorem(
    weights: Weights = "dmst_cifar10",
    data: Data = None,
    data_dir: DataDir = None,
    split: Split = "",
    limit: Limit = 1000,
    eps: Eps = None,
    orthonormal: Orthonormal = False,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature 1/(2 eta) of the coupled memberships.")] = 1.0,
    energy: Annotated[
        str,
        typer.Option(help="Energy in the coupled memberships: formula (the paper), or code (ToST, channels normalised)."),
    ] = "formula",
    batch_size: Batch = 64,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Test Theorem 1 of the paper on every layer.

    dmst analyze theorem

    dmst analyze theorem runs/cifar --data cifar10 --data-dir DIR --eps 0.1 --orthonormal

    The gain has three parts. Only the membership part is a real gain: less mass and smaller gates always lower the rate.
    """
    from dmst.analysis.running import plain
    from dmst.analysis.theorem import theorem as verdict

    basis = "orthonormal" if orthonormal else "raw"
    with (
        opened([weights], data, split, data_dir, limit, batch_size, device) as [(model, images)],
        counted(images.name, images.count) as tick,
    ):
        found = verdict(model, images, eps=eps, basis=basis, temperature=temperature, energy=energy, tick=tick)
    layers = [(layer.layer, layer.quantities) for layer in found.layers if layer is not None]
    if as_json:
        say(json.dumps({"weights": weights, "data": images.name, **plain(found)}))
    elif not layers:
        say(f"{found.model}: the theorem does not apply, because the operator has no memberships like those of DMSA.")
    else:
        show_layers(f"{weights} on {images.name}", THEOREM, layers)
        say(f"{found.convention}.")


# --- maps --------------------------------------------------------------------------------------------------------------

READ = {
    "membership": "Colours: membership 0 is dark blue, 1 is yellow. A faint tile is a silent head (gate 0).",
    "group membership": "Colours: one per group of a head, stronger where the membership is larger.",
    "attention received": "No memberships here. Colours: attention that a patch receives, 0 is dark blue, the largest of the "
    "layer is yellow.",
}


@app.command()
def maps(
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder for the pictures, one per image.")],
    photos: Photos = None,
    weights: Network = "dmst_cifar10",
    data: Data = None,
    split: Split = "",
    layer: Layer = "all",
    limit: Limit = 8,
    unverified: Unverified = False,
    data_dir: DataDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per picture: image, picture, gates, range of memberships.")
    ] = False,
    device: Device = "cpu",
) -> None:
    """Draw the memberships of every head over the image, one picture per image.

    dmst analyze maps --out maps

    dmst analyze maps photo.jpg --weights runs/mine --layer -1 --out maps

    Rows are layers, columns are heads, the gate is printed under each map. Colours: 0 is dark blue, 1 is yellow. A silent head
    (gate 0) is faint. Heads of GMSA sort the patches into groups, and each group has a colour. Networks with softmax attention
    have no memberships: their maps show the attention that a patch receives.
    """
    from dmst.analysis.membership import drawn, layer_of, layers_sheet, png
    from dmst.analysis.running import only_looking
    from dmst.atomic import write_bytes
    from dmst.engine.classify import photos_in

    asked, paths = layers_named(layer), photos_in(photos) if photos else []
    with (
        opened([weights], data, split, data_dir, limit, 8, device, photos=paths, unverified=unverified) as [(model, found)],
        only_looking(model),
    ):
        layers = asked or list(range(len(model.blocks)))
        classes = model.class_names or tuple(f"class {i}" for i in range(model.config.num_classes))
        done = 0
        for images, _ in found:
            trace = model.trace(images)
            for i, image in enumerate(images):
                title = f"-{fitting(found.titles[done])}" if found.titles else ""
                picture = png(layers_sheet(trace, image, i, layers=layers))
                path = write_bytes(Path(out) / f"{done:03d}{title}.png", picture)
                done += 1
                if not as_json:
                    continue
                told = []
                for number in layers:
                    (shown, values), gate = drawn(trace, number), layer_of(trace, number).parts.gate
                    told.append({
                        "layer": number % len(trace.layers), "gate": None if gate is None else gate[i].tolist(), "shown": shown,
                        "lowest": values[i].amin((1, 2)).tolist(), "highest": values[i].amax((1, 2)).tolist(),
                    })  # fmt: skip
                answer = classes[int(trace.logits[i].argmax())] if classes else None
                say(json.dumps({"picture": str(path), "images": found.name, "answer": answer, "layers": told}))
        if not as_json:
            say(f"{found.name}: {done} pictures written to {out}. {READ[drawn(trace, layers[0])[0]]}")


# --- features ----------------------------------------------------------------------------------------------------------


@app.command()
def features(
    photos: Photos = None,
    weights: Network = "dmst_cifar10",
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder for the pictures, one per image.")] = "features",
    data: Data = None,
    split: Split = "",
    layer: Layer = "all",
    size: Annotated[
        int | None,
        typer.Option(metavar="PIXELS", help="Read the images at this size: more patches. Default: the network's own."),
    ] = None,
    limit: Limit = 8,
    unverified: Unverified = False,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per picture.")] = False,
    device: Device = "cpu",
) -> None:
    """Draw the features of the patches after each layer as colours, one picture per image.

    dmst analyze features photo.jpg

    dmst analyze features photo.jpg --weights runs/mine --size 128 --out features

    Red, green and blue are the first three principal components of the layer's tokens, over all images given: patches of one
    colour hold alike features. The number under a tile is the part of the variance that the three components hold.
    """
    from dmst.analysis.features import features_sheet, layer_components
    from dmst.analysis.membership import png
    from dmst.atomic import write_bytes
    from dmst.engine.classify import photos_in

    layers, paths = layers_named(layer), photos_in(photos) if photos else []
    with opened([weights], data, split, data_dir, limit, 8, device, photos=paths, unverified=unverified, size=size) as [
        (model, images)
    ]:
        with counted(images.name, images.count, quiet=as_json) as tick:
            found = layer_components(model, images, layers, tick=tick)
        done = 0
        for batch, _ in images:
            for image in batch:
                title = f"-{fitting(images.titles[done])}" if images.titles else ""
                path = write_bytes(Path(out) / f"{done:03d}{title}.png", png(features_sheet(image, found, done)))
                done += 1
                if as_json:
                    shares = {number: (each.variance / (each.total or 1)).tolist() for number, each in found.items()}
                    told = [{"layer": number, "share": share} for number, share in shares.items()]
                    say(json.dumps({"picture": str(path), "images": images.name, "layers": told}))
    if not as_json:
        say(
            f"{images.name}: {done} {'picture' if done == 1 else 'pictures'} written to {out}. Colours: the first three "
            "principal components of each layer's patches. Under a tile: their part of the variance."
        )


# --- scored ------------------------------------------------------------------------------------------------------------

TESTED = {
    "insertion": "patches are shown, most important first; a large area is good",
    "deletion": "patches are hidden, most important first; a small area is good",
    "road": "deletion, patches filled in from their neighbours; small is good",
}
ORDERS = {
    "membership": "memberships of the head with the largest gate, or its largest group",
    "gated": "memberships times gates, summed over the heads",
    "attention": "attention that a patch receives",
    "gradient": "gradient times input (no map of the layer)",
    "centre": "centre of the image first (no network)",
    "random": "random order (no network)",
}
AREA = "under the curve: probability of the predicted class by share of patches"
MEASURES = {"iou_mean": "IoU, threshold at mean", "iou_area": "IoU, area of the mask", "pointing": "peak on object"}


@app.command()
def scored(
    weights: Weights = "dmst_cifar10",
    data: Data = None,
    split: Split = "",
    layer: Annotated[int, typer.Option(help="The layer whose map ranks the patches, from 0; -1 is the last.")] = -1,
    test: Annotated[list[str], typer.Option("--test", help="insertion, deletion or road. Repeatable.")] = [*TESTED],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Steps of a curve.")] = 10,
    draws: Annotated[int, typer.Option(min=1, help="Random orders per image.")] = 3,
    limit: Limit = 200,
    batch_size: Batch = 64,
    foreground: Annotated[bool, typer.Option(help="With masks (--data pets): do the maps find the object?")] = True,
    unverified: Unverified = False,
    data_dir: DataDir = None,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Score the maps: does the prediction depend on the patches that a map marks?

    dmst analyze scored

    dmst analyze scored runs/mine --data pets --data-dir DIR

    Patches are hidden or shown in the order of a map, and the probability of the predicted class is measured. A gain above 0
    means: better than a random order, or better than starting at the centre of the image.
    """
    from dmst.analysis.running import plain
    from dmst.analysis.scored import foreground as against_masks
    from dmst.analysis.scored import scored as curves
    from dmst.errors import choose

    tests = list(dict.fromkeys(choose("test", name, TESTED) for name in test))
    with opened([weights], data, split, data_dir, limit, batch_size, device, unverified=unverified) as [(model, images)]:
        with counted("curves", images.count) as tick:
            scores = curves(model, images, layer=layer, tests=tests, steps=steps, draws=draws, tick=tick)
        masks = None
        if foreground and images.has_masks:
            with counted("masks", images.count) as tick:
                masks = against_masks(model, images.masked(), tick=tick)
    if as_json:
        say(json.dumps({"sample": images.name, "scored": plain(scores), "foreground": masks and plain(masks)}))
        return
    orders = {score.order for score in scores.scores}
    words = {name: word for name, word in (TESTED | ORDERS).items() if name in {*tests, *orders}} | {"area": AREA}
    rows = [
        (score.test, score.order, f"{score.area.mean:.3f}", _signed(score.better), _signed(score.ahead))
        for score in scores.scores
    ]
    columns = ("test", "ranked by", "area", "over random (95 %)", "over centre (95 %)")
    show(f"{scores.model}, {images.name}", columns, rows, words)
    say(scores.verdict)
    if masks is not None:
        _show_masks(masks)


def _signed(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.mean:+.3f} ({interval.low:+.2f} {interval.high:+.2f})"


def _show_masks(found: Foreground) -> None:
    """Three measures of the best head, or group, of each layer, and of the one in the middle."""
    of = "head" if found.groups == 1 else "group"
    rows = [[row.layer, *(f"{_short(row.best[x])} {row.median[x]:.2f}" for x in MEASURES)] for row in found.layers]
    rows += [["all", *(_short(found.best[x]) for x in MEASURES)], ["centre", *(_short(found.centre[x]) for x in MEASURES)]]
    show("Maps against masks", ("layer", *MEASURES.values()), rows)
    say(
        f"{found.what} of the best {of} (95 % interval), chosen on the other half of the images; then the median {of}. "
        f"centre: a map of the image centre, without a network. A random peak is on the object with probability "
        f"{found.share:.2f}.",
        found.verdict,
    )


def _short(interval: Interval) -> str:
    low, high = (f"{end:.2f}".removeprefix("0") for end in (interval.low, interval.high))
    return f"{interval.mean:.2f} ({low}-{high})"
