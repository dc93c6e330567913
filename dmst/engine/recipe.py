"""Recipes: TOML files of sections of plain values. Each key has a default, a rule and a word on what it does.

    [promise]   what it reproduces, by which command, on what, how long, which number; all text
    [model]     which network                            [optim]     how weights are stepped
    [data]      which images                             [schedule]  how long, and the learning rate over that time
    [augment]   how they are changed in training         [run]       batch, seed, precision, what is kept

    read_recipe("digits", ["optim.lr=2e-4", "model.options.operator=tssa"])
    from_toml(recipe.to_toml(), "again") == recipe

Keys keep timm's words where timm has one. [augment] is stated beside the code that does it, dmst/data/augment.py. Whatever is
wrong in it is a ConfigError that names file, key or line, and rule. dmst/recipes holds the recipes that ship.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dmst import atomic
from dmst.data.augment import Augment
from dmst.errors import ConfigError, OptionError, choose, shown, unknown_name
from dmst.models.config import ModelConfig
from dmst.models.zoo import model_config
from dmst.settings import REQUIRED, Settings, check, rule_in_words, setting

MOST = 1_000_000_000  # of anything that is counted
FILE = 16 * 1024  # bytes of a recipe; a hostile one of this size takes the standard parser 0.7 s, one of 64 KiB 10 s


@dataclass(frozen=True, kw_only=True)
class Promise(Settings):
    reproduces: str = setting("", "which table or figure, and what is assumed where the source is silent")
    command: str = setting("", "how it is run")
    hardware: str = setting("", "on what")
    time: str = setting("", "how long that takes")
    expected: str = setting("", "the published number, with its source")
    obtained: str = setting("not yet run", "the number measured with this recipe, where and when")


@dataclass(frozen=True, kw_only=True)
class Model(Settings):
    name: str = setting(REQUIRED, "a name of `dmst models`")
    init_from: str = setting(
        "", "saved model to start from, its folder or the name of one that ships; other classes: a new classifier"
    )
    options: dict[str, Any] = setting({}, "fields of the model and options of its operator: drop_path_rate, mode, ...")  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class Data(Settings):
    name: str = setting(REQUIRED, "a dataset by name, or a folder of class folders")
    eval: str = setting("test", "split that is evaluated; empty: none", choices=("test", "train", ""))
    holdout: float = setting(
        0.0, "share of the training images held out, chosen by hash, and evaluated instead", low=0, below=1
    )
    image_size: int = setting(0, "side in pixels; 0: the model's", low=0, high=8192)
    path: str = setting("auto", "images held on the device, or read by workers", choices=("auto", "resident", "workers"))
    on_bad_image: str = setting("fail", "what an image that cannot be read does", choices=("fail", "skip"))
    scan: str = setting("full", "look at every image before the first step", choices=("full", "none"))
    crop_pct: float = setting(0.0, "share of the side that evaluation's centre crop keeps; 0: the model's", low=0, high=1)
    limit: int = setting(0, "first so many training images, by hash; 0: all", low=0, high=MOST)

    @property
    def evaluated(self) -> str:
        """What is evaluated: "holdout", a split, or "" for nothing."""
        return "holdout" if self.holdout else self.eval


@dataclass(frozen=True, kw_only=True)
class Optim(Settings):
    opt: str = setting("adamw", "muon steps the matrices of the blocks, adamw the rest", choices=("adamw", "muon"))
    lr: float = setting(REQUIRED, "peak learning rate", above=0)
    matrix_lr: float = setting(0.0, "the same for the matrices that muon steps", low=0)
    weight_decay: float = setting(0.05, "decoupled from the gradient", low=0)
    beta1: float = setting(0.9, "decay of the mean gradient", low=0, below=1)
    beta2: float = setting(0.999, "decay of the mean squared gradient", low=0, below=1)
    eps: float = setting(1e-8, "added to the root of the mean square", above=0)
    clip_grad: float = setting(0.0, "largest norm of all gradients together; 0: no limit", low=0)
    smoothing: float = setting(0.0, "label smoothing", low=0, below=1)
    model_ema: float = setting(0.0, "decay of the running mean of the weights; 0: none is kept", low=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Schedule(Settings):
    epochs: int = setting(REQUIRED, "passes over the training images", low=1, high=MOST)
    warmup_epochs: float = setting(0.0, "epochs of linear rise from warmup_lr", low=0)
    warmup_lr: float = setting(0.0, "learning rate at the start of the rise", low=0)
    min_lr: float = setting(0.0, "learning rate at the end of the cosine", low=0)
    sched: str = setting("cosine", "after the rise", choices=("cosine", "constant"))
    base_batch: int = setting(0, "if not 0, lr and matrix_lr are multiplied by batch_size / base_batch", low=0, high=MOST)


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    batch_size: int = setting(REQUIRED, "images of one step, over all processes and micro-steps", low=1, high=MOST)
    accumulate: int = setting(1, "micro-steps of one step", low=1, high=MOST)
    seed: int = setting(0, "decides weights, order and augmentation", low=0, high=2**32 - 1)
    amp: str = setting("none", "lower precision of the forward pass", choices=("none", "bf16", "fp16"))
    compile: bool = setting(False, "torch.compile")
    graph: bool = setting(False, "on a GPU: torch.compile with CUDA graphs")
    channels_last: bool = setting(False, "memory layout of images")
    grad_checkpointing: bool = setting(False, "compute activations again in the backward pass instead of keeping them")
    deterministic: bool = setting(False, "only algorithms that repeat to the bit")
    eval_every: int = setting(1, "epochs from one evaluation to the next", low=1, high=MOST)
    eval_batch_size: int = setting(0, "images at a time in evaluation; 0: batch_size", low=0, high=MOST)
    save_every: int = setting(0, "steps from one checkpoint to the next; 0: at every evaluation", low=0, high=MOST)
    keep: int = setting(2, "newest checkpoints kept", low=2, high=MOST)
    final: str = setting("auto", "weights in final/; auto: ema where there is one", choices=("auto", "model", "ema"))


SECTIONS: dict[str, type[Settings]] = {
    "promise": Promise, "model": Model, "data": Data, "augment": Augment, "optim": Optim, "schedule": Schedule, "run": Run,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run."""

    promise: Promise = field(default_factory=Promise)
    model: Model
    data: Data
    augment: Augment = field(default_factory=Augment)
    optim: Optim
    schedule: Schedule
    run: Run

    def __post_init__(self) -> None:
        for keys, holds, reason in self.rules():
            if not holds:
                values = ", ".join(f"{key} is {_toml(self._get(key))}" for key in keys.split())
                raise ConfigError("", keys.split()[0], f"{values}: {reason}.")
        for option in self.model.options.keys() & ELSEWHERE:
            key = f"model.options.{option}"
            raise ConfigError("", key, f"{key} is no option here: the data decides, or model.name, or data.image_size.")
        with reported("", "model.name"):
            config = model_config(self.model.name)
        with reported("", "model.options"):
            config = config.change(**self.model.options)
        with reported("", "data.image_size"):
            config.change(**self._image_size())

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Between keys: (those that a message shows, the one at fault first; whether it holds; what is said where not)."""
        data, optim, schedule, run = self.data, self.optim, self.schedule, self.run
        peak, scaled = optim.lr * self.lr_scale, "(which batch_size / base_batch scales, where there is a base)"
        peaks, micro_batch = "optim.lr schedule.base_batch run.batch_size", run.batch_size // run.accumulate
        yield "data.name", data.name != "", "it must be the name of a dataset, or a folder"
        yield "run.accumulate run.batch_size", run.batch_size % run.accumulate == 0, "the first must divide the second"
        in_time = schedule.warmup_epochs <= schedule.epochs
        yield "schedule.warmup_epochs schedule.epochs", in_time, "the warm-up must end before the run does"
        yield f"schedule.min_lr {peaks}", schedule.min_lr <= peak, f"the least learning rate must be at most the peak {scaled}"
        yield f"schedule.warmup_lr {peaks}", schedule.warmup_lr <= peak, f"the warm-up must rise to the peak {scaled}"
        has_rate = optim.opt != "muon" or optim.matrix_lr > 0
        yield "optim.matrix_lr optim.opt", has_rate, "muon needs one of its own, as 0.02"
        has_mean = run.final != "ema" or optim.model_ema > 0
        yield "run.final optim.model_ema", has_mean, "no running mean is kept; set model_ema, as 0.999"
        yield (
            "data.holdout data.eval", not data.holdout or data.eval != "",
            "what is held out would never be looked at; leave eval as it is, holdout is evaluated instead",
        )  # fmt: skip
        yield (
            "run.batch_size run.accumulate augment.mixup augment.cutmix", not self.augment.mixes or micro_batch % 2 == 0,
            "images are mixed two by two, so a micro-step needs an even number of them",
        )  # fmt: skip
        yield "data.limit run.batch_size", not data.limit or data.limit >= run.batch_size, "too few images for one step"

    def model_config(self, **of_data: int) -> ModelConfig:
        """The network; num_classes and in_chans are those of the data, the named model's where not given."""
        return model_config(self.model.name, **self.model.options, **self._image_size(), **of_data)

    @property
    def lr_scale(self) -> float:
        """What lr and matrix_lr are multiplied by; warmup_lr and min_lr are not."""
        return self.run.batch_size / self.schedule.base_batch if self.schedule.base_batch else 1.0

    def to_toml(self, promise: bool = True) -> str:
        """Every key with its value; `from_toml` gives the same recipe back."""
        tables = self.tables(promise).items()
        return "\n".join(
            "".join([f"[{name}]\n", *(f"{key} = {_toml(value)}\n" for key, value in table.items())]) for name, table in tables
        )

    @property
    def digest(self) -> str:
        """sha256 of the text without the promise, which changes no run."""
        return hashlib.sha256(self.to_toml(promise=False).encode()).hexdigest()

    def tables(self, promise: bool = True) -> dict[str, dict[str, Any]]:
        """Plain values in the order of the sections, flat: the options of the model follow it as "model.options"."""
        tables: dict[str, dict[str, Any]] = {}
        for name, section in SECTIONS.items():
            if promise or name != "promise":
                tables[name] = {key: self._get(f"{name}.{key}") for key in section.rules()}
            if name == "model":
                tables["model.options"] = dict(sorted(tables[name].pop("options").items()))
        return tables

    def _get(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def _image_size(self) -> dict[str, int]:
        return {"img_size": self.data.image_size} if self.data.image_size else {}


# fields of a ModelConfig that a recipe states in another place
ELSEWHERE = {"name", "img_size", "num_classes", "in_chans", "self", "operator_options"}


@contextmanager
def reported(source: str, where: str) -> Iterator[None]:
    """A rule broken inside becomes a ConfigError of this place; one that names its file already passes."""
    try:
        yield
    except ConfigError as error:
        raise (error if error.file else ConfigError(source, error.where, error.reason)) from error.__cause__
    except OptionError as error:
        raise ConfigError(source, where, str(error)) from error


# --- read ------------------------------------------------------------------------------------------------------------


def read_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that ships, by name, or the one in a .toml file; each of `overrides`, "optim.lr=2e-4", sets one key."""
    name, shipped = str(name_or_path), _shipped()
    if name in shipped:
        return _build(shipped[name], f"recipe {name}", overrides)
    if name.endswith(".toml"):
        return _build(atomic.read(Path(name), most=FILE, links=True), name, overrides)
    raise ConfigError("", name, f"{unknown_name('recipe', name, shipped)} Or give the path of a .toml file.")


def from_toml(text: str, source: str) -> Recipe:
    """The recipe that `text` states; `source` is how messages call it."""
    return _build(text.encode(errors="surrogatepass"), source)


def list_recipes() -> dict[str, Recipe]:
    """Every recipe that ships, by name."""
    return {name: _build(data, f"recipe {name}") for name, data in sorted(_shipped().items())}


def _shipped() -> dict[str, bytes]:
    folder = resources.files("dmst") / "recipes"
    return {file.name.removesuffix(".toml"): file.read_bytes() for file in folder.iterdir() if file.name.endswith(".toml")}


def _build(data: bytes, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """From a file, a byte order mark before it or not. Nothing is interpolated or taken from the environment."""
    if len(data) > FILE:
        raise ConfigError(source, "", f"it has more than {FILE:,} bytes, which no recipe needs.")
    try:
        parsed = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, "", f"it is not TOML in UTF-8: {error}.") from error
    tables: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, table in parsed.items():
        if not isinstance(table, dict):
            raise ConfigError(source, name, f"{name} must be a section: a line [{name}], and its keys below.")
        for key, value in table.items():
            with reported(source, f"{name}.{key}"):
                tables[name][key] = check(_rule(name, key), value, f"{name}.{key}")
    before = dict(tables["schedule"])
    for override in overrides:
        _override(tables, override)
    if not any(override.strip().startswith("schedule.warmup_epochs") for override in overrides):
        _shorten_warmup(before, tables["schedule"])
    made: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        for key, rule in section.rules().items():
            if key not in tables[name] and _is_required(rule):
                raise ConfigError(source, f"{name}.{key}", f"{name}.{key} is missing: {rule.metadata['help']}.")
        with reported(source, name):
            made[name] = section(**tables[name])
    with reported(source, "recipe"):
        return Recipe(**made)


def _override(tables: dict[str, dict[str, Any]], override: str) -> None:
    """Set one key: "optim.lr=2e-4", "model.options.mode=equation". Bare words are text where text is asked for."""
    source = f"--set {override[:80]}"
    dotted, equals, text = (part.strip() for part in override.partition("="))
    name, key, option = [*dotted.split(".", 2), "", ""][:3]
    if not (equals and name and key):
        raise ConfigError(source, "", "it must be section.key=value, as optim.lr=2e-4.")
    with reported(source, dotted):
        rule = _rule(name, key)
        kind = str(rule.type)
        if option and not kind.startswith("dict"):
            raise OptionError(f"{name}.{key} is no table and has no {option!r}.")
        bare = bool(re.fullmatch(r"[^\W\d_][\w-]*|\dd", text)) and text not in ("true", "false", "inf", "nan")  # equation, 2d
        if not option:
            bare = kind == "str" and text[:1] not in ("'", '"')
        value = text if bare else _parse_value(text)
        value = tables[name].get(key, {}) | {option: value} if option else value
        tables[name][key] = check(rule, value, f"{name}.{key}")


def _parse_value(text: str) -> Any:
    """The value of `key = text`."""
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        tables = {}
    if list(tables) != ["value"]:
        raise OptionError(f'{shown(text)} is no value of TOML; such are 1, 0.5, 2e-4, true and "text".')
    return tables["value"]


def _rule(name: str, key: str) -> Field[Any]:
    rules = SECTIONS[choose("section", name, SECTIONS)].rules()
    return rules[choose(f"key of [{name}]", key, rules)]


def _shorten_warmup(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Of a run that was made shorter, the warm-up keeps its share where it would fill more than half of the run."""
    warmup, epochs = now.get("warmup_epochs", 0), now.get("epochs", 0)
    if epochs < before.get("epochs", 0) and warmup > epochs / 2:
        now["warmup_epochs"] = round(warmup / before["epochs"] * epochs, 4)


# --- printed and compared --------------------------------------------------------------------------------------------


def differences(old: Recipe, new: Recipe) -> list[str]:
    """A line for every key of a run that differs, "optim.lr: 0.001 -> 0.002"; the promise does not count."""
    lines = []
    befores, afters = old.tables(promise=False), new.tables(promise=False)
    for name, before in befores.items():
        for key in before | afters[name]:
            was, now = (_toml(table[key]) if key in table else "not set" for table in (before, afters[name]))
            lines += [f"{name}.{key}: {was} -> {now}"] if was != now else []
    return lines


def help_text() -> str:
    """Every key of a recipe: its default, what it takes, what it does."""
    rows = [
        [f"{name}.{key}", _default(rule), rule_in_words(rule), rule.metadata["help"]]
        for name, section in SECTIONS.items()
        for key, rule in section.rules().items()
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _default(rule: Field[Any]) -> str:
    if _is_required(rule):
        return "required"
    return "empty" if rule.default is REQUIRED else _toml(rule.default)


def _is_required(rule: Field[Any]) -> bool:
    return rule.default is REQUIRED and rule.default_factory is REQUIRED


def _toml(value: Any) -> str:
    """A value as TOML writes it; for what TOML has, JSON's way is one of TOML's."""
    if value is None:
        raise OptionError("None cannot be written to a recipe: TOML has no word for it. Leave the key out.")
    return json.dumps(value, ensure_ascii=False)
