"""`dmst train`, `dmst evaluate` and `dmst recipes`, as a person types them, on a folder of images made for it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dmst import cli
from dmst.engine.recipe import from_toml, list_recipes, read_recipe
from dmst.models import load_model
from tests.runs import pictures

SMALL = {"model.options.depth": 1, "model.options.dim": 16, "model.options.num_heads": 2, "data.path": "resident"}
QUICK = {"schedule.epochs": 2, "schedule.warmup_epochs": 0.5}


class Command:
    """What was typed last: its exit code, and what it said."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.patch, self.capture = patch, capture

    def __call__(self, *words: Any, **_: Any) -> int:
        self.patch.setattr(sys, "argv", ["dmst", *map(str, words)])
        try:
            cli.main()
            self.code = 0
        except SystemExit as leave:
            self.code = int(leave.code or 0)
        self.out, self.err = self.capture.readouterr()
        return self.code

    def train(self, *words: Any, settings: dict[str, Any] | None = None) -> int:
        changes = SMALL | QUICK | (settings or {})
        return self(
            "train",
            *words,
            "--device",
            "cpu",
            *[word for key, value in changes.items() for word in ("--set", f"{key}={value}")],
        )


@pytest.fixture
def dmst(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.delenv("DMST_DATA", raising=False)
    return Command(monkeypatch, capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return pictures(tmp_path / "shapes", each=20, size=32, tests=5)


def files(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file() and x.name != "lock"}


def test_from_a_folder_of_images_to_a_model(dmst: Command, data: Path, tmp_path: Path) -> None:
    """Train, the same again, evaluate in three ways, and fine-tune from that."""
    run = tmp_path / "run"
    learns = {"schedule.epochs": 12, "optim.lr": 0.01, "augment.resized_crop": 0.0}
    words = ["--data", data, "--model", "dmst_cifar", "--out", run]
    assert dmst.train(*words, settings=learns) == 0, dmst.err
    assert "dmst_cifar (" in dmst.out and "on shapes: 60 images, 36 steps, float32 on CPU" in dmst.out and not dmst.err
    assert f"dmst.load_model('{run}/final')" in dmst.out and f"The report is {run}/report.html" in dmst.out
    assert (run / "report.html").read_text().lower().startswith("<!doctype html>")
    recipe = from_toml((run / "recipe.toml").read_text(), "")
    assert (
        recipe.run.batch_size == 16
        and recipe.model.init_from == ""
        and recipe.optim.lr == 0.01
        and recipe.data.evaluated == "test"
    )
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("evaluation") == 12 and events[-1]["event"] == "end"
    assert all("layers" in event for event in events if event["event"] == "evaluation")
    top1 = events[-1]["ema"]["top1"]
    assert top1 > 0.6 and f"top-1 {top1:.2%}" in dmst.out

    before = files(run)
    before.pop("report.html")
    assert dmst.train(*words, settings=learns) == 0, dmst.err
    after = files(run)
    assert after.pop("report.html") and after == before and f"The run in {run} is finished: 36 steps." in dmst.out
    assert dmst.train(*words, settings=learns | {"optim.lr": 0.02}) == 1
    assert "optim.lr: 0.01 -> 0.02" in dmst.err and "--allow-config-change" in dmst.err

    assert dmst("evaluate", run, "--data", data, "--json", "--device", "cpu") == 0
    told = json.loads(dmst.out)
    assert (
        told["top1"] == top1 and told["images"] == 15 and sum(right for right, _ in told["by_class"].values()) == told["right"]
    )
    assert dmst("evaluate", run / "final", "--data", data, "--batch-size", 4, "--device", "cpu") == 0
    assert "shapes test: 15 images" in dmst.out and f"top-1 {top1:.2%} ({told['right']})" in dmst.out and "across" in dmst.out
    assert dmst("evaluate", run, "--data", data, "--split", "train", "--workers", 0, "--device", "cpu", "--json") == 0
    assert json.loads(dmst.out)["images"] == 60

    tuned = [
        "train",
        "--data",
        data,
        "--init-from",
        run,
        "--out",
        tmp_path / "tuned",
        "--device",
        "cpu",
        "--no-report",
        "--quiet",
    ]
    assert dmst(*tuned, "--set", "schedule.epochs=1", "--set", "schedule.warmup_epochs=0.5") == 0, dmst.err
    assert dmst.out == dmst.err == "" and not (tmp_path / "tuned/report.html").exists()
    assert load_model(tmp_path / "tuned/final").config == load_model(run / "final").config


def test_a_folder_without_test_images_is_divided(dmst: Command, data: Path, tmp_path: Path) -> None:
    assert dmst.train("--data", data / "train", "--model", "dmst_cifar", "--out", tmp_path / "run", "--no-report") == 0, (
        dmst.err
    )
    assert "without 0.2 of train: 48 images" in dmst.out and "on 12 images (holdout)" in dmst.out


def damage(data: Path) -> None:
    path = data / "train/down/003.png"
    path.write_bytes(path.read_bytes()[:60])


def test_a_bad_image(dmst: Command, data: Path, tmp_path: Path) -> None:
    """Refused by its name; left out and listed where that is asked for."""
    damage(data)
    words = ["--data", data, "--model", "dmst_cifar", "--out", tmp_path / "run", "--no-report"]
    for extra in ([], ["--on-bad-image", "fail"]):
        assert dmst.train(*words, *extra) == 1
        assert "1 of 60 images cannot be used" in dmst.err and f"{data}/train/down/003.png: it cannot be decoded" in dmst.err
        assert not (tmp_path / "run/final").exists() and not dmst.out
    assert dmst.train(*words, "--on-bad-image=skip") == 0, dmst.err
    assert "on shapes: 59 images" in dmst.out
    assert f"Left out, for they could not be read (1): {data}/train/down/003.png" in dmst.out
    start = json.loads((tmp_path / "run/journal.jsonl").read_text().splitlines()[0])
    assert start["bad_images"] == [f"{data}/train/down/003.png"] and start["train_images"] == 59


def empty_a_class(data: Path) -> None:
    for path in (data / "train/down").iterdir():
        path.unlink()


def one_class_more(data: Path) -> None:
    shutil.copytree(data / "test/down", data / "test/other")


def one_class_less(data: Path) -> None:
    shutil.rmtree(data / "test/down")


def nothing(data: Path) -> None:
    pass


def no_images(data: Path) -> None:
    shutil.rmtree(data)
    data.mkdir()


def one_pixel_more(data: Path) -> None:
    Image.new("RGB", (33, 32)).save(data / "train/down/003.png")


FOLDER = ["--data", "{data}", "--model", "dmst_cifar", "--out", "{out}"]
WRONG: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "an empty class": (empty_a_class, FOLDER, "{data}/train/down has no image"),
    "a class of test alone": (one_class_more, FOLDER, "{data}/test has the unknown class other"),
    "a class without test": (one_class_less, FOLDER, "{data}/test misses the class down"),
    "an empty folder": (no_images, FOLDER, "{data} holds no class folders"),
    "no folder": (nothing, ["--data", "{data}s", "--model", "dmst_cifar", "--out", "{out}"], "not a folder either: '{data}s'"),
    "images of two sizes": (one_pixel_more, FOLDER, "{data}/train/down/003.png has shape (32, 33, 3)"),
    "no network": (nothing, ["--data", "{data}", "--out", "{out}"], "--data alone does not say what to train"),
    "an unknown network": (
        nothing,
        ["--data", "{data}", "--model", "dmst_cifra", "--out", "{out}"],
        "Did you mean 'dmst_cifar'?",
    ),
    "no weights": (nothing, [*FOLDER, "--init-from", "{data}"], "{data}/config.json cannot be read"),
    "nothing at all": (nothing, ["--out", "{out}"], "dmst train needs a recipe"),
    "an unknown recipe": (nothing, ["digit", "--out", "{out}"], "unknown recipe 'digit'. Did you mean 'digits'?"),
    "no such file": (nothing, ["{data}/mine.toml", "--out", "{out}"], "{data}/mine.toml"),
    "an unknown key": (nothing, ["digits", "--out", "{out}", "--set", "optim.lrr=1"], "Did you mean 'lr'?"),
    "a value of the wrong kind": (
        nothing,
        ["digits", "--out", "{out}", "--set", "optim.lr=fast"],
        "--set optim.lr=fast: 'fast' is no",
    ),
    "no value": (nothing, ["digits", "--out", "{out}", "--set", "optim.lr"], "it must be section.key=value"),
    "a rule between keys": (
        nothing,
        ["digits", "--out", "{out}", "--set", "run.accumulate=3"],
        "the first must divide the second",
    ),
    "an unknown word": (nothing, [*FOLDER, "--on-bad-image", "maybe"], "unknown data.on_bad_image 'maybe'"),
    "an unknown device": (nothing, [*FOLDER, "--device", "tpu9"], "device is 'tpu9': it must be cpu, cuda or cuda:N."),
    "a file for a folder": (nothing, ["digits", "--out", "{data}/train/down/003.png"], "cannot be the folder of a run"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_in_one_line(what: str, dmst: Command, data: Path, tmp_path: Path) -> None:
    spoil, words, message = WRONG[what]
    spoil(data)
    places = {"data": data, "out": tmp_path / "out"}
    typed = [word.format(**places) for word in words]
    given = [] if "--device" in typed else ["--device", "cpu"]
    changes = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    assert dmst("train", *typed, *given, *([] if "digit" in typed[0] else changes)) == 1
    assert message.format(**places) in dmst.err and dmst.err.count("\n") == 1 and not dmst.out
    assert not (tmp_path / "out/final").exists()


def test_recipes(dmst: Command) -> None:
    assert dmst("recipes") == 0 and all(name[:6] in dmst.out for name in list_recipes())
    assert dmst("recipes", "digits") == 0 and from_toml(dmst.out, "") == read_recipe("digits")
    assert dmst("recipes", "--keys") == 0 and "optim.lr" in dmst.out and "required" in dmst.out
    assert dmst("recipes", "digitz") == 1 and "Did you mean 'digits'?" in dmst.err
    assert dmst("evaluate", "nowhere", "--data", "digits", "--amp", "fp8") == 1 and "unknown amp 'fp8'" in dmst.err
