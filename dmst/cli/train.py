"""`dmst train`, `dmst evaluate`, `dmst recipes`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.table import Table

from dmst.terminal import Terminal, say
from dmst.words import short

OUT = typer.Option(None, metavar="DIR", help="Folder of the run; runs/NAME if not given. A run that is in it goes on.")
EPOCHS = typer.Option(None, min=1, help="Passes over the images. A long warm-up gets shorter with it.")
BATCH = typer.Option(None, min=1, help="Images of one step.")
SIZE = typer.Option(None, min=1, metavar="PIXELS", help="Side of the images that the network sees; its own if not given.")
LR = typer.Option(None, help="Peak learning rate.")
CHANGES = typer.Option(
    [], "--set", metavar="KEY=VALUE", help="Change any key of the recipe: --set optim.smoothing=0; repeat for more."
)
INIT_FROM = typer.Option(
    None, metavar="WEIGHTS",
    help="Start from weights: a finished run, a saved model, or one that ships: dmst_cifar10, dmst_cifar100, tost_cifar10, "
    "vit_cifar10, dmst_digits. With --data alone: dmst_cifar100.",
)  # fmt: skip
DATA_DIR = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="Where the datasets are.")
DEVICE = typer.Option(None, help="cpu, cuda or cuda:N; the best there is if not given.")
WORKERS = typer.Option(0, min=0, help="Processes that read large images. They change nothing but the speed.")


def train(
    recipe: str = typer.Argument(None, help="A recipe of `dmst recipes`, or a .toml file. Not needed with --data."),
    data: str = typer.Option(None, help="Images to learn: a folder of class folders, or a dataset's name."),
    out: str = OUT,
    model: str = typer.Option(None, help="A network of `dmst models`; that of the weights if not given."),
    init_from: str = INIT_FROM,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    size: int = SIZE,
    lr: float = LR,
    changes: list[str] = CHANGES,
    data_dir: str = DATA_DIR,
    device: str = DEVICE,
    workers: int = WORKERS,
    on_bad_image: str = typer.Option(
        None, help="fail (the default): list every bad image and stop; skip: leave them out, listed."
    ),
    allow_config_change: bool = typer.Option(
        False, "--allow-config-change", help="Go on with another recipe than the run began with."
    ),
    keep_going_on_full_disk: bool = typer.Option(
        False, "--keep-going-on-full-disk", help="Train on where a checkpoint finds no room."
    ),
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Write DIR/tensorboard too."),
    timeout: float = typer.Option(60.0, min=1, help="Seconds that processes wait for each other."),
    certify: bool = typer.Option(False, "--certify", help="At each evaluation, log on how many images each layer descends."),
    stop_ascending: bool = typer.Option(
        False, "--stop-ascending", help="End the run, saved, where a layer raises its rate twice in a row; implies --certify."
    ),
    no_report: bool = typer.Option(False, "--no-report", help="Do not write DIR/report.html at the end."),
    quiet: bool = typer.Option(False, "--quiet", help="Say nothing but errors."),
) -> None:
    """Train a network on your images or by a recipe, or go on with a run that was stopped.

    dmst train --data PHOTOS

    (PHOTOS/CLASS/*.jpg, of which some are held out; or PHOTOS/train/CLASS/*.jpg and PHOTOS/test/CLASS/*.jpg)

    dmst train --data PHOTOS --init-from runs/cifar --size 64 --epochs 10 --out runs/photos

    dmst train digits

    dmst train cifar10 --out runs/cifar --data-dir DIR --epochs 20

    torchrun --nproc-per-node 4 -m dmst train imagenet_dmst_small --out runs/imagenet --data-dir DIR --workers 8

    The folder holds checkpoints, a journal, and in the end final/ (for dmst.load_model and `dmst evaluate`) and report.html.
    If it was killed, the same command goes on and ends in the same bits. `dmst recipes --keys` lists what --set takes.

    Exit status: 0 finished, 130 or 143 stopped by Ctrl-C or SIGTERM (saved), 3 by --stop-ascending (saved), 75 the disk is
    full, 1 any other error.
    """
    from dmst.analysis.certificates import ascending, descent
    from dmst.analysis.probes import layers
    from dmst.engine import journal
    from dmst.engine.console import watcher
    from dmst.engine.prepare import settings_of
    from dmst.engine.recipe import read_recipe
    from dmst.engine.train_loop import Probe, Result
    from dmst.engine.train_loop import train as run
    from dmst.errors import OptionError

    if recipe is None and data is None:
        raise OptionError("dmst train needs a recipe (`dmst recipes` lists them), or --data with a folder of images.")
    if recipe is not None and Path(recipe).is_dir():
        raise OptionError(f"{recipe} is a folder, not a recipe: dmst train --data {recipe}")
    out = out or f"runs/{Path(recipe or data or '').resolve().name.removesuffix('.toml')}"
    given: dict[str, object] = {"schedule.epochs": epochs, "run.batch_size": batch, "data.image_size": size, "optim.lr": lr}
    given["data.on_bad_image"] = on_bad_image
    settings: list[str] = []
    if recipe is None:
        recipe, settings = "finetune", settings_of(data, model, init_from, data_dir)
    else:
        given |= {"data.name": data, "model.name": model, "model.init_from": init_from}
    settings += [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None]
    flat = data and Path(data).is_dir() and not (Path(data) / "train").is_dir()  # its folders are classes
    if flat and Path(out).resolve().is_relative_to(Path(data).resolve()):
        raise OptionError(f"the run would be written to {out}, among the images of {data}: give another folder, --out DIR.")
    listeners = [journal.tensorboard(Path(out) / "tensorboard")] if tensorboard and _is_main() else []
    plan = read_recipe(recipe, [*settings, *changes])
    probes: dict[str, Probe] = {"layers": layers}
    if certify or stop_ascending:
        if not (plan.data.eval or plan.data.holdout):
            raise OptionError("--certify asks at evaluations, and this recipe has none: set data.eval or data.holdout.")
        probes["certificate"] = descent

    def report(result: Result) -> None:
        from dmst.analysis.network_report import write_run_report

        page = write_run_report(result.folder / "report.html", result.journal, plan.to_toml(), result.model, result.sample)
        if not quiet:
            say(f"The report is {page}")

    run(
        plan, out, data_dir=data_dir, device=device, workers=workers, watch=watcher(quiet), probes=probes,
        stop_rule=ascending if stop_ascending else None, listeners=listeners, report=None if no_report else report,
        allow_config_change=allow_config_change, keep_going_on_full_disk=keep_going_on_full_disk, timeout=timeout,
    )  # fmt: skip


def evaluate(
    weights: str = typer.Argument(help="A finished run, a saved model, or the name of one that ships."),
    data: str = typer.Option(None, help="A dataset's name, or a folder; of a run: the images it held out, if not given."),
    split: str = typer.Option("", help="test or train, of --data; test if not given."),
    data_dir: str = DATA_DIR,
    device: str = DEVICE,
    workers: int = WORKERS,
    batch_size: int = typer.Option(256, min=1, help="Images at a time; the counts do not depend on it."),
    amp: str = typer.Option("none", help="none, bf16 or fp16."),
    crop_pct: float = typer.Option(0.0, min=0, max=1, help="Share of the side that the centre crop keeps; 0: the model's."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Measure the accuracy of a trained network: top-1, top-5, and by class.

    dmst evaluate runs/photos

    dmst evaluate dmst_cifar10 --data cifar10 --data-dir DIR

    Without --data, a run is asked about the images that it did not learn from: its held-out share, or its test images.
    Every image counts once; the figures are exact whatever the batch size, workers or processes.
    """
    from dmst.engine.evaluate import AMP, evaluate_weights
    from dmst.errors import choose

    choose("amp", amp, ("none", *AMP))
    score, image_set = evaluate_weights(
        weights, data, split=split, data_dir=data_dir, device=device, workers=workers, batch_size=batch_size, amp=amp,
        crop_pct=crop_pct,
    )  # fmt: skip
    if not _is_main():
        return
    by_class = dict(zip(image_set.classes, score.by_class, strict=True))
    if as_json:
        told = {"weights": weights, "data": image_set.name, "split": image_set.split or "held out"}
        told |= {"variant": image_set.variant, **score.to_dict()}
        say(json.dumps(told | {"by_class": by_class}))
        return
    say(f"{image_set}: {score.right:,} of {score.images:,} images right")
    say(f"{score.words}, loss {score.loss:.4f}")
    table = Table("class", "right", "of", "share")
    for name, (right, count) in by_class.items():
        table.add_row(short(name), f"{right:,}", f"{count:,}", f"{right / count:.1%}" if count else "-")
    Terminal().print(table)


def recipes(
    name: str = typer.Argument(None, help="Print this recipe whole, as a .toml file to start one of your own from."),
    keys: bool = typer.Option(False, "--keys", help="Every key, its default, what it takes and what it does."),
) -> None:
    """List the training recipes that ship.

    `dmst recipes NAME` prints one whole, with the accuracy that was expected and the one that was measured.
    """
    from dmst.engine.recipe import help_text, list_recipes, read_recipe

    if keys:
        say(*help_text().splitlines())
    elif name:
        say(*read_recipe(name).to_toml().splitlines())
    else:
        row = "{:<21} {:<15} {:<15} {:>6}".format
        say(row("recipe", "network", "data", "epochs"))
        for each, found in list_recipes().items():
            say(row(each, found.model.name, found.data.name, found.schedule.epochs))
        say("`dmst recipes NAME` prints one whole: what it reproduces, what was expected, what was measured.")


def _is_main() -> bool:
    """Whether this process is the one that speaks, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"
