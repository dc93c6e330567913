"""From a recipe to what is trained on what: the sets, images that cannot be read, the network and how it looks at an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.data import catalog, chance
from dmst.data.loader import View
from dmst.data.scan import scan
from dmst.data.sets import ImageSet, split_off, subset
from dmst.engine.recipe import Recipe, read_recipe
from dmst.errors import BadFileError, MissingSplitError, OptionError
from dmst.models import ModelConfig, VisionModel, load_model, model_config, shipped
from dmst.operators.orthonormal import retract

NOT_OF_THE_WEIGHTS = ("name", "num_classes", "img_size", "drop_rate", "proj_drop_rate", "drop_path_rate")


@dataclass(frozen=True)
class Sets:
    """What is learnt from and what is asked about; None where nothing is evaluated."""

    train: ImageSet
    eval: ImageSet | None
    bad_train: frozenset[int] = frozenset()
    bad_eval: frozenset[int] = frozenset()

    @property
    def bad_images(self) -> list[str]:
        """How messages call them."""
        pairs = ((self.train, self.bad_train), (self.eval, self.bad_eval))
        return [each.where(i) for each, bad in pairs if each is not None for i in sorted(bad)]

    @property
    def channels(self) -> int:
        """Of the first image that can be read."""
        first = next((i for i in range(len(self.train)) if i not in self.bad_train), None)
        return 1 if first is None else self.train.read(first).shape[2]

    @property
    def fingerprint(self) -> str:
        """Of everything that decides the run: pixels and labels of both sets."""
        both = [self.train.fingerprint, "" if self.eval is None else self.eval.fingerprint, *map(str, sorted(self.bad_train))]
        return hashlib.sha256("\n".join(both).encode()).hexdigest()


def open_sets(
    recipe: Recipe,
    *,
    data_dir: str | Path | None = None,
    workers: int = 0,
    cache: Path | None = None,
    tick: Callable[[int, int], None] | None = None,
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
    bad = [
        scan(image_set, workers=workers, on_bad=data.on_bad_image, cache=cache and cache / f"scan-{name}.json", tick=tick)
        if look and data.scan == "full" and image_set is not None
        else frozenset[int]()
        for name, image_set in (("train", train), ("eval", held))
    ]
    return Sets(train, held, *bad)


def build_model(recipe: Recipe, classes: Sequence[str], channels: int = 1) -> VisionModel:
    """The network, from `init_from` if the recipe says so, else from its seed. One of grey images takes colour ones too."""
    config = recipe.model_config(num_classes=len(classes))
    if channels > config.in_chans:
        config = config.change(in_chans=channels)
    torch.manual_seed(chance.small_seed("weights", recipe.run.seed))
    model = VisionModel(config)
    model.class_names = tuple(classes)
    if recipe.model.init_from:
        take_over(model, read_weights(recipe.model.init_from), recipe.model.init_from)
    return model


def weights_in(folder: str | Path) -> Path:
    """The saved model itself, or the one in `final/` of a run."""
    inside = Path(folder) / "final"
    return inside if inside.is_dir() else Path(folder)


def read_weights(where: str | Path, *, unverified: bool = False) -> VisionModel:
    """A saved model, or by its name one that ships, as it is used: in float32, whatever it was saved in."""
    if str(where) in shipped.SHIPPED and not Path(where).is_dir():
        return shipped.pretrained(str(where))
    if not Path(where).exists():
        have = ", ".join(shipped.SHIPPED)
        raise BadFileError(f"{where} is not there: name a saved model, a finished run, or weights that ship ({have}).")
    model = load_model(weights_in(where), unverified=unverified).float()
    retract(model)
    return model


@torch.no_grad()
def take_over(model: VisionModel, source: VisionModel, where: str) -> None:
    """The weights of `source`: the classifier stays new if classes differ, learnt positions are resized to another grid."""
    mine, theirs = model.config.to_dict(), source.config.to_dict()
    differ = [name for name in mine if name not in NOT_OF_THE_WEIGHTS and mine[name] != theirs[name]]
    if differ:
        told = ", ".join(f"{name} {theirs[name]!r} (here {mine[name]!r})" for name in differ)
        raise OptionError(f"init_from {where} holds another network than {model.config.name}: {told}. Set it in [model].")
    wanted, found = model.state_dict(), source.state_dict()
    for name, tensor in found.items():
        if tensor.shape == wanted[name].shape:
            wanted[name].copy_(tensor)
        elif name == "position.table":
            wanted[name].copy_(_resized(tensor, source, model))
        elif not name.startswith("head."):
            raise OptionError(f"init_from {where}: {name} has shape {tuple(tensor.shape)}, not {tuple(wanted[name].shape)}.")


def _resized(table: Tensor, source: VisionModel, model: VisionModel) -> Tensor:
    prefix, (rows, columns) = source.config.prefix, source.config.grid
    places = table[prefix:].unflatten(0, (rows, columns)).permute(2, 0, 1).unsqueeze(0)
    places = F.interpolate(places, model.config.grid, mode="bicubic", antialias=True)
    return torch.cat((table[:prefix], places.squeeze(0).permute(1, 2, 0).flatten(0, 1)))


def view_of(model: VisionModel, crop_pct: float = 0.0) -> View:
    """How the network looks at an image: its own statistics, and the given crop or its own."""
    told, (rows, columns) = model.pretrained_cfg, model.config.img_size  # type: ignore[misc]
    if rows != columns:
        raise OptionError(f"{model.config.name} takes images of {rows} x {columns}: the loaders make squares only.")
    return View(
        rows,
        model.config.in_chans,
        tuple(told["mean"]),
        tuple(told["std"]),
        crop_pct or told["crop_pct"],
        told["interpolation"],
    )


def settings_of(data: str, model: str | None, init_from: str | None, data_dir: str | Path | None) -> list[str]:
    """What a command line without a recipe leaves open, as changes to `finetune`: the network of the weights, a held-out share
    where there are no test images, a batch that the images fill."""
    if not (model or init_from):
        raise OptionError("--data alone does not say what to train: add --model NAME, or --init-from WEIGHTS, or both.")
    told: dict[str, Any] = {"data.name": data, "model.init_from": init_from or ""} | ({"model.name": model} if model else {})
    if init_from:
        told |= _network_of(read_weights(init_from).config, model)
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


def _network_of(config: ModelConfig, name: str | None) -> dict[str, Any]:
    """The keys of [model] that give this network."""
    mine, named = config.to_dict(), model_config(name or config.name).to_dict()
    fields = [field for field in mine if field not in (*NOT_OF_THE_WEIGHTS, "operator_options")]
    options = {field: mine[field] for field in fields if mine[field] != named[field]} | dict(config.operator_options)
    rows, columns = config.img_size  # type: ignore[misc]
    told = {"model.name": name or config.name, "data.image_size": rows if rows == columns else 0}
    return told | {f"model.options.{option}": value for option, value in options.items() if value is not None}
