"""Recipes: what ships says what its sources say, what is written comes back exactly, what breaks a rule is refused by name."""

from __future__ import annotations

import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmst.engine.recipe import SECTIONS, Promise, Recipe, differences, from_toml, help_text, list_recipes, read_recipe
from dmst.errors import BadFileError, ConfigError, OptionError
from dmst.models.vision import VisionModel
from dmst.settings import TEXT, rule_in_words

SHIPPED = list_recipes()
BASE = """
[model]
name = "dmst_cifar"
[data]
name = "cifar10"
[optim]
lr = 1e-3
[schedule]
epochs = 7
[run]
batch_size = 12
"""
KEYS = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.rules()]


def base(*overrides: str) -> Recipe:
    return read_recipe("cifar10", overrides)


# --- what ships ------------------------------------------------------------------------------------------------------

# reference.md 6, columns "ToST code default" and "ToST README", "paper"; the keys that they share, then those that differ
PRETRAINING = {
    "optim.opt": "adamw", "optim.weight_decay": 0.05, "optim.beta1": 0.9, "optim.beta2": 0.999, "optim.eps": 1e-8,
    "optim.clip_grad": 0, "optim.smoothing": 0.1, "optim.model_ema": 0.99996, "schedule.epochs": 400,
    "schedule.sched": "cosine", "schedule.warmup_epochs": 5, "schedule.warmup_lr": 1e-6, "schedule.min_lr": 1e-5,
    "augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.mixup_prob": 1.0, "augment.mixup_switch_prob": 0.5,
    "augment.mixup_mode": "batch", "augment.aa": "rand-m9-mstd0.5-inc1", "augment.interpolation": "bicubic",
    "augment.reprob": 0.25, "augment.repeats": 3, "augment.flip": 0.5, "augment.resized_crop": 0.08,
    "run.amp": "fp16", "run.seed": 0, "run.final": "model", "run.accumulate": 1, "data.name": "imagenet",
}  # fmt: skip
# reference.md 7: the paper's column, and ToST's where the paper is silent
FINE_TUNING = {
    "optim.opt": "adamw", "optim.lr": 1e-3, "optim.weight_decay": 5e-2, "run.batch_size": 256, "schedule.epochs": 200,
    "data.image_size": 224, "data.crop_pct": 1.0, "augment.resized_crop": 0.08, "augment.flip": 0.5, "augment.reprob": 0,
    "augment.mixup": 0, "augment.cutmix": 0, "optim.smoothing": 0, "optim.model_ema": 0, "schedule.sched": "cosine",
    "schedule.warmup_epochs": 0, "schedule.min_lr": 0, "schedule.base_batch": 0, "model.options.drop_path_rate": 0,
    "model.name": "dmst_tiny", "model.init_from": "runs/imagenet_dmst_tiny/final",
}  # fmt: skip
PEAK = "the learning rate in effect"
TABLE: dict[str, dict[str, Any]] = {
    **{
        f"imagenet_{family}_{size}": PRETRAINING
        | {"model.name": f"{family}_{size}", "model.options.drop_path_rate": drop, PEAK: peak, "run.batch_size": batch}
        for size, drop in (("tiny", 0.0), ("small", 0.05))
        for family, peak, batch in (("dmst", 2e-4, 512), ("tost", 1e-3, 1024))
    },
    **{
        f"finetune_{name}": FINE_TUNING | {"data.name": name, PEAK: 1e-3}
        for name in ("cifar10", "cifar100", "pets", "food101", "svhn")
    },
}  # fmt: skip


def flat(recipe: Recipe) -> dict[str, Any]:
    values = {f"{name}.{key}": value for name, table in recipe.tables().items() for key, value in table.items()}
    return values | {PEAK: recipe.optim.lr * recipe.lr_scale}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str) -> None:
    recipe = SHIPPED[name]
    values = flat(recipe)
    wanted = TABLE.get(name, {})
    assert {key: values[key] for key in wanted} == wanted
    assert read_recipe(name) == recipe == from_toml(recipe.to_toml(), "again")
    model = VisionModel(recipe.model_config(num_classes=11), device="meta")
    assert model.num_classes == 11 and model.config.drop_path_rate == recipe.model.options.get("drop_path_rate", 0)
    promise = recipe.promise
    assert all([promise.reproduces, promise.command, promise.hardware, promise.time, promise.expected])
    given = "--data FOLDER" if name == "finetune" else name
    assert f"train {given} " in f"{promise.command} " and promise.obtained


def test_the_model_of_a_recipe() -> None:
    recipe = base("model.options.operator=tssa", "data.image_size=48", "model.options.mlp_ratio=2")
    config = recipe.model_config(num_classes=23, in_chans=1)
    assert (config.operator, config.img_size, config.num_classes, config.in_chans) == ("tssa", (48, 48), 23, 1)
    assert (config.mlp_ratio, config.drop_path_rate, recipe.model_config().num_classes) == (2, 0.1, 10)


# --- refused: reliability.md 2.8, 3.10 -------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[Any, str, str]] = {  # text or a change of the least recipe; the place; part of the reason
    "unknown key": (("lr = 1e-3", "lr = 1e-3\nmomentun = 0.9"), "optim.momentun", "unknown key of [optim] 'momentun'"),
    "unknown section": (("[optim]", "[optimizer]"), "optimizer.lr", "Did you mean 'optim'?"),
    "no section": (("[model]", "augment = 3\n[model]"), "augment", "augment must be a section"),
    "missing key": (("lr = 1e-3", ""), "optim.lr", "optim.lr is missing"),
    "text for a number": (("1e-3", '"1e-3"'), "optim.lr", "it must be a number"),
    "nan": (("1e-3", "nan"), "optim.lr", "optim.lr is nan"),
    "5,000 digits": (("= 12", "= " + "9" * 5000), "", "it is not TOML"),
    "below its range": (("= 7", "= 0"), "schedule.epochs", "schedule.epochs is 0"),
    "nested 900 deep": (("1e-3", "[" * 900 + "]" * 100), "", "it is not TOML"),
    "10 MB": ("x = 1\n" * 1_700_000, "", "more than 16,384 bytes"),
    "no TOML": (("lr = 1e-3", "lr: 1e-3"), "", "(at line 7"),
    "empty": ("", "model.name", "model.name is missing"),
    "half a character": (('"cifar10"', '"\udcff"'), "", "it is not TOML in UTF-8"),
    "too long": (('"cifar10"', '"""' + 9 * ("a" * 900 + "\n") + '"""'), "data.name", "at most 480 bytes"),
    "unknown model": (('"dmst_cifar"', '"../dmst_cifar"'), "model.name", "Did you mean 'dmst_cifar'?"),
    "unknown option": (("[data]", "[model.options]\nmod = 1\n[data]"), "model.options", "Did you mean 'mode'?"),
    "what the data decides": (("[data]", "options.num_classes = 3\n[data]"), "model.options.num_classes", "data decides"),
    "patches do not fit": (("[optim]", "image_size = 30\n[optim]"), "data.image_size", "not a multiple of the patch size 4"),
    "interpolation": (('"cifar10"', '"${HOME}"\nscan = "$SCAN"'), "data.scan", "unknown data.scan '$SCAN'"),
    "augmentation": (("[optim]", '[augment]\naa = "rand-m14-n2"\n[optim]'), "augment", "aa is 'rand-m14-n2'"),
}  # fmt: skip


@pytest.fixture
def _usual_depth() -> Iterator[None]:
    """torch's compiler raises the limit for the whole process."""
    raised = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(raised)


@pytest.mark.usefixtures("_usual_depth")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(case: str) -> None:
    change, where, reason = HOSTILE[case]
    text = change if isinstance(change, str) else BASE.replace(*change, 1)
    assert text != BASE
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        from_toml(text, "my.toml")
    assert time.process_time() - begun < 5
    error = caught.value
    assert (error.file, error.where) == ("my.toml", where) and reason in error.reason and isinstance(error, OptionError)
    assert len(str(error)) < 3000 and str(error).startswith("my.toml")


RULE_BREAKERS = [
    (["data.name="], "data.name"),
    (["run.accumulate=5"], "run.accumulate"),
    (["schedule.warmup_epochs=100.5"], "schedule.warmup_epochs"),
    (["schedule.min_lr=1.5e-3"], "schedule.min_lr"),
    (["schedule.min_lr=9e-4", "schedule.base_batch=512"], "schedule.min_lr"),
    (["schedule.warmup_lr=1.5e-3"], "schedule.warmup_lr"),
    (["optim.opt=muon"], "optim.matrix_lr"),
    (["run.final=ema", "optim.model_ema=0"], "run.final"),
    (["data.holdout=0.1", "data.eval="], "data.holdout"),
    (["run.batch_size=36", "run.accumulate=12"], "run.batch_size"),
    (["data.limit=255"], "data.limit"),
]


@pytest.mark.parametrize(("overrides", "where"), RULE_BREAKERS, ids=[where for _, where in RULE_BREAKERS])
def test_rules_between_keys(overrides: list[str], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        base(*overrides)
    assert caught.value.where == where and caught.value.reason.startswith(f"{where} is ")
    assert caught.value.file == "recipe cifar10"


def test_a_recipe_made_in_python_is_checked_alike() -> None:
    recipe = base()
    with pytest.raises(OptionError, match="keep is 1: it must be a whole number from 2 to"):
        replace(recipe.run, keep=1)
    with pytest.raises(ConfigError, match=r"^run\.accumulate is 3, run\.batch_size is 256: the first must divide"):
        replace(recipe, run=replace(recipe.run, accumulate=3))


def test_what_is_evaluated() -> None:
    told = [base(*overrides).data.evaluated for overrides in ([], ["data.holdout=0.1"], ["data.eval="], ["data.eval=train"])]
    assert told == ["test", "holdout", "", "train"]


# --- where recipes come from -----------------------------------------------------------------------------------------


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(BASE.replace("\n", "\r\n").encode("utf-8-sig"))  # as a Windows editor may save it
    assert read_recipe(path) == read_recipe(str(path)) == from_toml(BASE, "x")
    path.write_text(BASE.replace("12", "-12"))
    with pytest.raises(ConfigError) as caught:
        read_recipe(path, ["optim.lr=1.0"])
    assert (caught.value.file, caught.value.where) == (str(path), "run.batch_size")


def fifo(path: Path) -> None:
    os.mkfifo(path)


NO_FILES: dict[str, Callable[[Path], Any]] = {"nothing": lambda path: None, "a folder": Path.mkdir, "a pipe": fifo}


@pytest.mark.parametrize("what", NO_FILES)
def test_no_file(what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    NO_FILES[what](path)
    with pytest.raises(BadFileError, match=rf"^{path} (cannot be read .No such file|is not a plain file)"):
        read_recipe(path)


def test_a_file_without_end_is_read_no_further_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    path.touch()
    os.truncate(path, 1 << 40)  # a hole: a terabyte to read, nothing on the disk
    with pytest.raises(BadFileError, match="instead of at most 16,384"):
        read_recipe(path)


@pytest.mark.parametrize("name", ["digit", "../recipes/digits", "digits/..", "", "DIGITS"])
def test_unknown_recipe(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe .* Or give the path of a \.toml file") as caught:
        read_recipe(name)
    assert name != "digit" or "Did you mean 'digits'?" in caught.value.reason


OVERRIDES = {  # what is written, and the line of `differences`
    "optim.lr=2e-4": "optim.lr: 0.001 -> 0.0002",
    "run.batch_size=1_024": "run.batch_size: 256 -> 1024",
    "run.compile=true": "run.compile: false -> true",
    "run.amp=none": 'run.amp: "bf16" -> "none"',
    "data.name=true": 'data.name: "cifar10" -> "true"',
    "data.name=/a folder/b=c #1": 'data.name: "cifar10" -> "/a folder/b=c #1"',
    "data.eval=": 'data.eval: "test" -> ""',
    "model.options.drop_path_rate=0.25": "model.options.drop_path_rate: 0.1 -> 0.25",
    "model.options.mode=equation": 'model.options.mode: not set -> "equation"',
    "model.options.rotary='2d'": 'model.options.rotary: not set -> "2d"',
    "model.options={}": "model.options.drop_path_rate: 0.1 -> not set",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides(override: str) -> None:
    assert differences(base(), base(override)) == [OVERRIDES[override]]


def test_overrides_in_order_and_together() -> None:
    changed = base(
        "schedule.epochs=90", "optim.lr=1", "optim.lr=3e-3", "model.options.drop_path_rate=0.3", "model.options.mode=equation"
    )
    assert differences(base(), changed) == [
        "model.options.drop_path_rate: 0.1 -> 0.3",
        'model.options.mode: not set -> "equation"',
        "optim.lr: 0.001 -> 0.003",
        "schedule.epochs: 100 -> 90",
    ]


BAD_OVERRIDES = {
    "optim.lr": ("", "section.key=value"),
    "optim.=1": ("", "section.key=value"),
    "optim..lr=1": ("", "section.key=value"),
    "optim.lrr=.1": ("optim.lrr", "Did you mean 'lr'?"),
    "optimiser.lr=1": ("optimiser.lr", "Did you mean 'optim'?"),
    "optim.lr=.1": ("optim.lr", "'.1' is no value of TOML"),
    "optim.lr=1\n[run]\nseed=3": ("optim.lr", "is no value"),
    "optim.lr=nan": ("optim.lr", "optim.lr is nan"),
    "optim.lr.x=1": ("optim.lr.x", "no table"),
    "run.compile=1": ("run.compile", "it must be true or false"),
    "run.amp=fp8": ("run.amp", "Did you mean 'fp16'?"),
    "data.name=\udcff": ("data.name", "it must be text"),
    "model.options=3": ("model.options", "it must be a table"),
    "optim.smoothing=1": ("optim.smoothing", "of at least 0 and below 1"),
    "data.name=a\x7fb": ("data.name", "without control characters"),
    "model.options.mlp_ratio=9223372036854775808": (
        "model.options.mlp_ratio",
        "model.options.mlp_ratio is 9223372036854775808",
    ),
    "run.seed=" + "9" * 5000: ("run.seed", "is no value"),
}


@pytest.mark.parametrize("override", BAD_OVERRIDES, ids=ascii)
def test_bad_overrides(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        base(override)
    where, reason = BAD_OVERRIDES[override]
    assert caught.value.where == where and reason in caught.value.reason
    assert str(caught.value).startswith(f"--set {override[:80]}") and len(str(caught.value)) < 1000


# --- written and read again ------------------------------------------------------------------------------------------

WORD = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t\"\\'"), max_size=TEXT // 4)


@given(WORD, st.floats(0, 1e300, exclude_min=True), st.booleans(), st.integers(1, 10**9))
@settings(max_examples=60)
def test_round_trip(text: str, lr: float, compiled: bool, epochs: int) -> None:
    least = from_toml(BASE, "least")
    recipe = replace(
        least,
        promise=Promise(expected=text),
        optim=replace(least.optim, lr=lr),
        run=replace(least.run, compile=compiled),
        schedule=replace(least.schedule, epochs=epochs),
    )
    again = from_toml(recipe.to_toml(), "again")
    assert again == recipe and again.to_toml() == recipe.to_toml() and again.digest == recipe.digest
    assert differences(recipe, again) == [] and tomllib.loads(recipe.to_toml())["promise"]["expected"] == text


def test_a_promise_changes_no_run() -> None:
    new = base("promise.time=never")
    assert new != base() and new.digest == base().digest and differences(base(), new) == []


def test_a_digest_is_the_same_everywhere() -> None:
    recipe = base()
    assert recipe.digest == read_recipe("cifar10").digest and len(recipe.digest) == 64
    told = [
        base(*pair).digest
        for pair in (
            ["model.options.mode=equation", "model.options.rotary='2d'"],
            ["model.options.rotary='2d'", "model.options.mode=equation"],
        )
    ]
    assert told[0] == told[1]  # the order of options decides nothing


# --- explained -------------------------------------------------------------------------------------------------------


def test_help_names_every_key() -> None:
    lines = help_text().splitlines()
    assert [line.split()[0] for line in lines] == KEYS
    row = {line.split()[0]: line for line in lines}
    assert row["optim.lr"].split(maxsplit=1)[1] == "required       a number above 0                        peak learning rate"
    assert "adamw | muon" in row["optim.opt"] and '"adamw"' in row["optim.opt"] and "empty" in row["model.options"]
    assert all(
        rule.metadata["help"] and rule_in_words(rule) for section in SECTIONS.values() for rule in section.rules().values()
    )


def test_2d_needs_no_quotes() -> None:
    assert read_recipe("digits", ["model.options.rotary=2d"]).model.options["rotary"] == "2d"
