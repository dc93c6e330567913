"""`dmst train`, `dmst evaluate` and `dmst recipes`, as a person types them, on a folder of images made for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dmst import cli
from dmst.data.loader import TrainStream, View
from dmst.engine import summary
from dmst.engine.prepare import Sets, build_model, open_sets, settings_of, view_of
from dmst.engine.recipe import Recipe, from_toml, list_recipes, read_recipe
from dmst.models import VisionModel, load_model
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
        given = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        return self("train", *words, "--device", "cpu", *given)


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
    block = dmst.out.partition("\nstep 1 ")[0]
    for name, told in {
        "network": "dmst_cifar (dmsa), 5,527 parameters",
        "starts from": "random weights",
        "images": "32 x 32 pixels, as they are",
        "classes": "3: across 20, block 20, down 20",
        "split": "60 images to learn from, 15 to check with (the test images)",
        "device": "CPU, ",
        "time": "12 epochs of 3 steps, 16 images each",
    }.items():
        assert re.search(rf"^{name} +.*{re.escape(told)}", block, re.MULTILINE), (name, block)
    assert "about " in block and "top-5" not in dmst.out and not dmst.err  # of three classes every answer is among five
    assert f"dmst.load_model('{run}/final')" in dmst.out and f"The report is {run}/report.html" in dmst.out
    assert (run / "report.html").read_text().lower().startswith("<!doctype html>")
    recipe = from_toml((run / "recipe.toml").read_text(), "")
    assert (recipe.run.batch_size, recipe.model.init_from, recipe.optim.lr, recipe.data.evaluated) == (16, "", 0.01, "test")
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
    assert (told["top1"], told["images"]) == (top1, 15)
    assert sum(right for right, _ in told["by_class"].values()) == told["right"]
    assert dmst("evaluate", run / "final", "--data", data, "--batch-size", 4, "--device", "cpu") == 0
    assert f"shapes test: {told['right']} of 15 images right" in dmst.out and "across" in dmst.out
    assert f"top-1 {top1:.2%}, loss" in dmst.out and "top-5" not in dmst.out
    assert dmst("evaluate", run, "--data", data, "--split", "train", "--workers", 0, "--device", "cpu", "--json") == 0
    assert json.loads(dmst.out)["images"] == 60

    tuned = ["--data", data, "--init-from", run, "--out", tmp_path / "tuned", "--device", "cpu", "--no-report", "--quiet"]
    assert dmst("train", *tuned, "--set", "schedule.epochs=1", "--set", "schedule.warmup_epochs=0.5") == 0, dmst.err
    assert dmst.out == dmst.err == "" and not (tmp_path / "tuned/report.html").exists()
    assert load_model(tmp_path / "tuned/final").config == load_model(run / "final").config


def test_a_folder_without_test_images_is_divided(dmst: Command, data: Path, tmp_path: Path) -> None:
    """And the run can be asked about what it held out, without saying again what that is."""
    words = ["--data", data / "train", "--model", "dmst_cifar", "--out", tmp_path / "run"]
    assert dmst.train(*words) == 0, dmst.err
    assert "48 images to learn from, 12 to check with (20 % held out)" in dmst.out and "% on train, 20 % held out" in dmst.out
    assert "train, 20 % held out" in (tmp_path / "run/report.html").read_text()
    right = json.loads((tmp_path / "run/journal.jsonl").read_text().splitlines()[-1])["ema"]["right"]
    assert dmst("evaluate", tmp_path / "run", "--device", "cpu") == 0, dmst.err
    assert f"train, 20 % held out: {right} of 12 images right" in dmst.out
    assert dmst("evaluate", tmp_path / "run/final", "--device", "cpu") == 1 and "--data FOLDER" in dmst.err  # no run


def test_plain_options_and_a_short_schedule(dmst: Command, data: Path, tmp_path: Path) -> None:
    """The warm-up of the recipe takes 3 of 30 epochs: of one epoch it takes a tenth. Set by hand it stays."""
    small = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words = ["train", "--data", data, "--model", "dmst_cifar", "--device", "cpu", "--no-report", "--quiet", *small]
    plain = ["--epochs", 1, "--batch", 10, "--size", 16, "--lr", 0.002]
    assert dmst(*words, *plain, "--out", tmp_path / "run") == 0, dmst.err
    recipe = from_toml((tmp_path / "run/recipe.toml").read_text(), "")
    assert (recipe.schedule.epochs, recipe.run.batch_size, recipe.data.image_size, recipe.optim.lr) == (1, 10, 16, 0.002)
    assert recipe.schedule.warmup_epochs == 0.1
    assert load_model(tmp_path / "run/final").config.img_size == (16, 16)
    assert read_recipe("finetune", ["schedule.epochs=2"]).schedule.warmup_epochs == 0.2
    assert read_recipe("finetune", ["schedule.epochs=20"]).schedule.warmup_epochs == 3  # as the recipe has it
    assert read_recipe("finetune", ["schedule.epochs=4", "schedule.warmup_epochs=3"]).schedule.warmup_epochs == 3
    assert dmst(*words, "--epochs", 1, "--set", "schedule.warmup_epochs=2", "--out", tmp_path / "other") == 1
    assert "the warm-up must end before the run does" in dmst.err


def test_without_out_a_run_is_in_runs(dmst: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert dmst.train("--data", data, "--model", "dmst_cifar", "--no-report", settings={"schedule.epochs": 1}) == 0, dmst.err
    assert (tmp_path / "runs/shapes/final/config.json").is_file()


def test_classes_are_matched_by_name(dmst: Command, data: Path, tmp_path: Path) -> None:
    """A folder with fewer classes, in another order, without test images: the same answers. Unknown names are refused."""
    run = tmp_path / "run"
    learns = {"schedule.epochs": 12, "optim.lr": 0.01, "augment.resized_crop": 0.0}
    assert dmst.train("--data", data, "--model", "dmst_cifar", "--out", run, "--no-report", settings=learns) == 0, dmst.err
    assert dmst("evaluate", run, "--device", "cpu", "--json") == 0, dmst.err
    whole = json.loads(dmst.out)["by_class"]
    shutil.copytree(data / "test/down", tmp_path / "some/down")
    assert dmst("evaluate", run, "--data", tmp_path / "some", "--device", "cpu", "--json") == 0, dmst.err
    some = json.loads(dmst.out)
    assert some["by_class"]["down"] == whole["down"] and some["images"] == 5 and some["variant"] == "all images"
    (tmp_path / "some/down").rename(tmp_path / "some/upside")
    assert dmst("evaluate", run, "--data", tmp_path / "some", "--device", "cpu") == 1
    assert "does not know: upside. It knows across, block, down." in dmst.err
    assert dmst("analyze", "rates", run, "dmst_cifar10", "--data", data / "train", "--limit", 2, "--device", "cpu") == 0, (
        dmst.err
    )
    assert "all images" in dmst.out
    assert load_model(run).class_names == ("across", "block", "down")  # the run itself, as on the command line


def test_weights_of_another_network_are_refused(dmst: Command, data: Path, tmp_path: Path) -> None:
    """Never trained under a wrong name; what differs is told."""
    out = tmp_path / "out"
    for words in (["--data", data], ["finetune", "--data", data]):
        assert (
            dmst("train", *words, "--model", "dmst_tiny", "--init-from", "dmst_cifar100", "--out", out, "--device", "cpu") == 1
        )
        assert "depth 9 (here 12)" in dmst.err and "the name of the network" in dmst.err
    assert not (out / "final").exists()


def block(model: VisionModel, sets: Sets, view: View, recipe: Recipe, processes: int = 1) -> str:
    stream = TrainStream(sets.train, view, recipe.augment, batch_size=recipe.run.batch_size, seed=0)
    return summary.summary(model, sets, stream, recipe, steps=352, done=0, processes=processes)


def test_the_summary_says_how_long_and_of_what(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe("finetune", [*settings_of(str(data), None, None, None), "schedule.epochs=16", "run.batch_size=32"])
    sets = open_sets(recipe)
    model = build_model(recipe, sets.train.classes, sets.channels)
    monkeypatch.setattr(summary, "seconds_per_image", lambda model, view: 0.5)
    told = block(model, sets, view_of(model), recipe)
    assert "about 2 hours: 16 epochs of 22 steps, 32 images each" in told
    assert "the weights of dmst_cifar100, which ships with this package (78.93% right on cifar100 test" in told
    monkeypatch.delattr(summary, "seconds_per_image")  # which must not run in one of several processes
    assert "time         16 epochs of 22 steps" in block(model, sets, view_of(model), recipe, processes=2)


def damage(data: Path, name: str = "train/across/000.png") -> None:
    """The very first, if no other is named: whoever looks at a few images looks at that one."""
    path = data / name
    path.write_bytes(path.read_bytes()[:60])


def test_a_bad_image(dmst: Command, data: Path, tmp_path: Path) -> None:
    """Refused by its name; left out and listed where that is asked for."""
    damage(data)
    words = ["--data", data, "--model", "dmst_cifar", "--out", tmp_path / "run", "--no-report"]
    for extra in ([], ["--on-bad-image", "fail"]):
        assert dmst.train(*words, *extra) == 1
        assert "--on-bad-image skip" in dmst.err and "1 of 60 images cannot be used" in dmst.err
        assert f"{data}/train/across/000.png: it cannot be decoded" in dmst.err
        assert not (tmp_path / "run/final").exists() and not dmst.out
    assert dmst.train(*words, "--on-bad-image=skip") == 0, dmst.err
    assert "59 images to learn from" in dmst.out
    assert f"1 image could not be read and did not count: {data}/train/across/000.png" in dmst.out
    start = json.loads((tmp_path / "run/journal.jsonl").read_text().splitlines()[0])
    assert start["bad_images"] == [f"{data}/train/across/000.png"] and start["train_images"] == 59


def test_a_run_is_evaluated_as_it_evaluated_itself(
    dmst: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bad image that it left out, with its own crop; and what is asked for in vain is refused."""
    damage(data, "test/across/000.png")
    run = tmp_path / "run"
    words = ["--data", data, "--model", "dmst_cifar", "--out", run, "--no-report", "--on-bad-image", "skip"]
    assert dmst.train(*words, settings={"data.crop_pct": 0.5}) == 0, dmst.err
    told = json.loads((run / "journal.jsonl").read_text().splitlines()[-1])["ema"]
    assert dmst("evaluate", run, "--device", "cpu", "--json") == 0, dmst.err
    found = json.loads(dmst.out)
    assert (found["images"], found["right"]) == (14, told["right"]) and found["loss"] == pytest.approx(told["loss"], abs=1e-5)
    assert dmst("evaluate", run, "--split", "train", "--device", "cpu") == 1 and "--split train needs --data" in dmst.err
    shutil.copy(data / "test/down/001.png", data / "test/down/0000.png")
    assert dmst("evaluate", run, "--device", "cpu") == 1 and "has changed since the run" in dmst.err
    data.rename(tmp_path / "elsewhere")
    assert dmst("evaluate", run, "--device", "cpu") == 1 and "or give --data" in dmst.err


def test_all_bad_images_are_listed_at_once(dmst: Command, data: Path, tmp_path: Path) -> None:
    """Those that would be held out, or that are for testing, too."""
    for split in ("train", "test"):
        damage(data, f"{split}/down/003.png")
    assert dmst.train("--data", data, "--model", "dmst_cifar", "--out", tmp_path / "run") == 1
    assert all(f"{data}/{split}/down/003.png: it cannot be decoded" in dmst.err for split in ("train", "test"))
    for path in (data / "train").rglob("*.png"):
        damage(path.parent, path.name)
    assert dmst.train("--data", data / "train", "--model", "dmst_cifar", "--out", tmp_path / "held") == 1
    assert dmst.err.count("it cannot be decoded") == 60 and "--on-bad-image skip" not in dmst.err  # that would not help


def empty_a_class(data: Path) -> None:
    for path in (data / "train/down").iterdir():
        path.unlink()


def one_class_more(data: Path) -> None:
    shutil.copytree(data / "test/down", data / "test/other")


def one_class(data: Path) -> None:
    for split in ("train", "test"):
        for name in ("down", "block"):
            shutil.rmtree(data / split / name)


def nothing(data: Path) -> None:
    pass


def one_pixel_more(data: Path) -> None:
    Image.new("RGB", (33, 32)).save(data / "train/down/003.png")


FOLDER = ["--data", "{data}", "--model", "dmst_cifar", "--out", "{out}"]
WRONG: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "an empty class": (empty_a_class, FOLDER, "{data}/train/down has no image"),
    "a class of test alone": (one_class_more, FOLDER, "{data}/test has the unknown class other"),
    "no folder": (nothing, ["--data", "{data}s", "--model", "dmst_cifar", "--out", "{out}"], "not a folder either: '{data}s'"),
    "images of two sizes": (one_pixel_more, FOLDER, "{data}/train/down/003.png has shape (32, 33, 3)"),
    "one class": (one_class, FOLDER, "shapes train has one class, 'across': a network learns to tell classes apart"),
    "an unknown network": (
        nothing,
        ["--data", "{data}", "--model", "dmst_cifra", "--out", "{out}"],
        "Did you mean 'dmst_cifar'?",
    ),
    "no weights": (nothing, [*FOLDER, "--init-from", "{data}"], "{data}/config.json cannot be read"),
    "nothing at all": (nothing, ["--out", "{out}"], "dmst train needs a recipe"),
    "a folder for a recipe": (nothing, ["{data}", "--out", "{out}"], "is a folder, not a recipe: dmst train --data {data}"),
    "a run among the images": (
        nothing,
        ["--data", "{data}/train", "--out", "{data}/train/out"],
        "among the images of {data}/train: give another folder",
    ),
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
