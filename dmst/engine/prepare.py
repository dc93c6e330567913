"""From a recipe to what is trained on what: the sets, images that cannot be read, the network and how it looks at an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dmst import atomic
from dmst.data import catalog, chance
from dmst.data.loader import View
from dmst.data.scan import Scanned, scan_all
from dmst.data.scan import look as look_at
from dmst.data.sets import ImageSet, split_off, subset
from dmst.engine import journal
from dmst.engine.checkpoint import RunFolder
from dmst.engine.recipe import Recipe, from_toml, read_recipe
from dmst.errors import BadFileError, MissingSplitError, OptionError
from dmst.export.onnx_network import OnnxNetwork, read_onnx
from dmst.models import ModelConfig, VisionModel, load_model, model_config, shipped
from dmst.models.hub import SCHEME
from dmst.models.preprocessing import set_mean_std
from dmst.models.zoo import FREE, take_over
from dmst.operators.orthonormal import retract

RECIPE = "recipe.toml"  # of a run
BEST_START = "dmst_cifar100"  # of the weights that ship, for photographs: the most classes (results/transfer.md)


@dataclass(frozen=True)
class Sets:
    """What is learnt from and what is asked about; None where nothing is evaluated."""

    train: ImageSet
    eval: ImageSet | None
    bad_train: frozenset[int] = frozenset()
    bad_eval: frozenset[int] = frozenset()
    train_content: str = ""  # a hash of the files; empty if they were not scanned, or if the fingerprint covers them
    eval_content: str = ""

    @property
    def bad_images(self) -> list[str]:
        """How messages call them."""
        pairs = ((self.train, self.bad_train), (self.eval, self.bad_eval))
        return [each.where(i) for each, bad in pairs if each is not None for i in sorted(bad)]

    @property
    def good_train(self) -> ImageSet:
        """What is learnt from: all but the bad images."""
        return _without(self.train, self.bad_train)

    @property
    def good_eval(self) -> ImageSet | None:
        return None if self.eval is None else _without(self.eval, self.bad_eval)

    @property
    def channels(self) -> int:
        """Of the first image that can be read."""
        return self.good_train.read(0).shape[2]

    @property
    def content(self) -> str:
        """Of the files of both sets."""
        return f"{self.train_content} {self.eval_content}".strip()

    @property
    def fingerprint(self) -> str:
        """Of everything that decides the run but the content of files: names, sizes and labels of both sets."""
        both = [self.train.fingerprint, "" if self.eval is None else self.eval.fingerprint, *map(str, sorted(self.bad_train))]
        return hashlib.sha256("\n".join(both).encode()).hexdigest()


def _without(images: ImageSet, bad: Container[int]) -> ImageSet:
    return subset(images, [i for i in range(len(images)) if i not in bad]) if bad else images


def open_sets(
    recipe: Recipe,
    *,
    data_dir: str | Path | None = None,
    workers: int = 0,
    cache: RunFolder | None = None,
    look: bool = True,
) -> Sets:
    """The sets of a recipe, each image looked at once if it says so (`cache` remembers that), unless another process does."""
    data = recipe.data
    train: ImageSet = catalog.open_set(data.name, "train", data_dir=data_dir)
    held: ImageSet | None = None
    if data.holdout:
        train, held = split_off(train, data.holdout)
    elif data.eval:
        held = catalog.open_set(data.name, data.eval, data_dir=data_dir)
    if data.limit and data.limit < len(train):
        drawn = chance.permutation("limit", 0, 0, len(train))[: data.limit]
        train = subset(train, np.sort(drawn.numpy()))
    if len(train.classes) < 2:
        raise OptionError(
            f"{train} has one class, {train.classes[0]!r}: a network learns to tell classes apart, so it needs at least two. "
            "Images belong in one folder for each class: FOLDER/CLASS/*.jpg."
        )
    if not look or data.scan != "full":
        return Sets(train, held)
    both = {"train": train} | ({} if held is None else {"eval": held})
    caches = {name: None if cache is None else cache.path / f"scan-{name}.json" for name in both}
    write = atomic.write_text if cache is None else cache.write_text
    found = scan_all(both, workers=workers, on_bad=data.on_bad_image, caches=caches, write=write)
    (bad_train, content), (bad_eval, eval_content) = found["train"], found.get("eval", Scanned({}))
    return Sets(train, held, frozenset(bad_train), frozenset(bad_eval), content, eval_content)


def images_of(data: str, split: str = "", data_dir: str | Path | None = None) -> ImageSet:
    """A split of a dataset or folder; if none is named its test images, or all images where there are no test images."""
    try:
        return catalog.open_set(data, split or "test", data_dir=data_dir)
    except MissingSplitError:
        if split:
            raise
    every = catalog.open_set(data, "train", data_dir=data_dir)
    return subset(every, np.arange(len(every)), variant="all images", split="")


def evaluated_by(run: str | Path | None, data_dir: str | Path | None = None) -> tuple[ImageSet | None, float]:
    """The images that a run was evaluated on, held-out ones too, and its crop_pct (0: the model's); no images where `run` is no
    run, or one that evaluated nothing."""
    path = Path(run or "") / RECIPE
    if not run or not path.is_file():
        return None, 0.0
    recipe = from_toml(path.read_text(encoding="utf-8"), str(path))
    try:
        images = open_sets(recipe, data_dir=data_dir, look=False).eval
    except (OptionError, BadFileError) as error:
        raise BadFileError(
            f"the images of the run {run} cannot be opened: {error} Go to the folder where the run was started, or give --data."
        ) from error
    if images is None:
        return None, 0.0
    written = path.with_name(journal.NAME)
    events = journal.read(written) if written.is_file() else iter(())
    began = next((event for event in events if event["event"] == "start"), {})
    (bad, content), _ = look_at(images, path.with_name("scan-eval.json")) if recipe.data.scan == "full" else (Scanned({}), "")
    was = began.get("eval_fingerprint", images.fingerprint), began.get("eval_content", content)
    if was != (images.fingerprint, content):
        raise BadFileError(
            f"{recipe.data.name} has changed since the run {run} began: some of the images evaluated now may have "
            "been learned from. Bring the images back, or name others: --data FOLDER."
        )
    return _without(images, bad), recipe.data.crop_pct


def build_model(recipe: Recipe, classes: Sequence[str], channels: int = 1) -> VisionModel:
    """The network, from `init_from` if the recipe says so, else from its seed. Colour data make a grey network a colour one."""
    config = recipe.model_config(num_classes=len(classes))
    if channels > config.in_chans and not recipe.model.init_from:  # what weights take is refused by the stream of images
        config = config.change(in_chans=channels)
    torch.manual_seed(chance.small_seed("weights", recipe.run.seed))
    model = VisionModel(config)
    model.class_names = tuple(classes)
    if recipe.model.init_from:
        source = read_weights(recipe.model.init_from)
        take_over(model, source, recipe.model.init_from)
    elif recipe.data.name in catalog.CATALOG:
        set_mean_std(model.pretrained_cfg, *catalog.CATALOG[recipe.data.name].statistics)
    return model


def read_weights(where: str | Path, *, unverified: bool = False) -> VisionModel:
    """A saved model, or by its name one that ships, as it is used: in float32, whatever it was saved in."""
    if str(where) in shipped.SHIPPED and not Path(where).is_dir():
        return shipped.pretrained(str(where))
    if Path(where).suffix == ".onnx":
        raise BadFileError(
            f"{where} is an ONNX file: `dmst classify` and `dmst evaluate` take it. Here the network itself is needed: name "
            "the saved model that it was exported from."
        )
    if not (Path(where).exists() or str(where).startswith(SCHEME)):
        have = ", ".join(shipped.SHIPPED)
        raise BadFileError(
            f"{where} is not there: name a saved model, a finished run, weights that ship ({have}), or hf://owner/name."
        )
    model = load_model(where, unverified=unverified).float()
    retract(model)
    return model


def read_network(where: str | Path, *, unverified: bool = False) -> VisionModel | OnnxNetwork:
    """The same for who asks for answers alone: also a file of `dmst export`."""
    return read_onnx(where) if Path(where).suffix == ".onnx" else read_weights(where, unverified=unverified)


def view_of(model: VisionModel | OnnxNetwork, crop_pct: float = 0.0) -> View:
    """How the network looks at an image: its own statistics, and the given crop or its own."""
    told, (rows, columns) = model.pretrained_cfg, model.config.img_size  # type: ignore[misc]
    if rows != columns:
        raise OptionError(
            f"{model.config.name} takes images of {rows} x {columns}, and images are cut to squares here: call it in Python."
        )
    return View(
        rows,
        model.config.in_chans,
        tuple(told["mean"]),
        tuple(told["std"]),
        crop_pct or told["crop_pct"],
        told["interpolation"],
    )


def settings_of(data: str, model: str | None, init_from: str | None, data_dir: str | Path | None) -> list[str]:
    """What a command line without a recipe leaves open, as changes to `finetune`: the network of the weights, the best weights
    that ship where none are named, a held-out share where there are no test images, a batch that the images fill."""
    if not (model or init_from):
        init_from = BEST_START
    told: dict[str, Any] = {"data.name": data, "model.init_from": init_from or ""} | ({"model.name": model} if model else {})
    if init_from and not model:
        told |= network_of(read_weights(init_from).config)
    images = catalog.open_set(data, "train", data_dir=data_dir)
    share = 0.0
    try:
        catalog.open_set(data, "test", data_dir=data_dir)
    except MissingSplitError:
        share = told["data.holdout"] = 0.2 if len(images) < 1000 else 0.1
    size = read_recipe("finetune").run.batch_size
    while size > 2 and size > len(images) * (1 - share) / 2:
        size //= 2
    told["run.batch_size"] = size
    if not torch.cuda.is_available():
        told["run.amp"] = "none"  # slower in bfloat16 on most CPUs
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in told.items()]


def network_of(config: ModelConfig) -> dict[str, Any]:
    """The keys of [model] that give this network."""
    mine, own = config.to_dict(), model_config(config.name).to_dict()
    fields = [field for field in mine if field not in (*FREE, "operator_options")]
    options = {field: mine[field] for field in fields if mine[field] != own[field]} | dict(config.operator_options)
    rows, columns = config.img_size  # type: ignore[misc]
    told = {"model.name": config.name, "data.image_size": rows if rows == columns else 0}
    return told | {f"model.options.{option}": value for option, value in options.items() if value is not None}
