"""A run from its recipe to final/, in this process: what it leaves, how it goes on, what it refuses. Kills are elsewhere."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dmst.engine import prepare
from dmst.engine import train_loop as engine
from dmst.engine.checkpoint import RunFolder
from dmst.engine.console import Quiet
from dmst.engine.distributed import Group
from dmst.engine.evaluate import Score, evaluate_weights
from dmst.engine.recipe import Recipe, from_toml
from dmst.engine.train_loop import Result, train
from dmst.engine.train_step import TrainStep
from dmst.errors import ConfigError, DeviceMemoryError, NonFiniteError, OptionError
from dmst.models import VisionModel, load_model, save_model
from dmst.operators.orthonormal import OrthonormalLinear, is_orthonormal
from tests.runs import EVERYTHING, LAST, RANDOM, SAVED, Cut, CutAfter, digests, on_pictures, pictures, tensors, tiny, told

CPU = Group(torch.device("cpu"))
EVERY_STEP = [*RANDOM, "run.accumulate=2", "run.save_every=1", "run.keep=20"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not waited for: what fsync is for, no test can see."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def go(recipe: Recipe, out: Path, **options: Any) -> Result:
    return train(recipe, out, device="cpu", **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that nothing disturbs, with a checkpoint of every step."""
    return go(tiny(*EVERY_STEP), tmp_path_factory.mktemp("reference") / "run")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def same(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())


# --- what a run leaves -----------------------------------------------------------------------------------------------


def test_a_run(tmp_path: Path) -> None:
    heard: list[tuple[dict[str, Any], int]] = []
    modes: list[bool] = []

    def probe(model: nn.Module, images: Tensor) -> dict[str, Any]:
        modes.append(model.training)
        return {"images": list(images.shape), "odd": [math.nan, 1.0]}

    recipe = tiny(*EVERYTHING)
    result = go(recipe, tmp_path, listeners=[lambda values, step: heard.append((values, step))], probes={"looks": probe})
    assert result.folder == tmp_path and not result.model.training and same(load_model(tmp_path / "final"), result.model)
    assert from_toml((tmp_path / "recipe.toml").read_text(), "") == recipe
    events = [(event["event"], event["step"]) for event in result.journal]
    wanted = [("start", 0)]
    for i in range(1, 13):
        wanted += [("step", i)] + [("evaluation", i)] * (i % 6 == 0) + [("checkpoint", i)] * (i % 3 == 0)
    assert events == [*wanted, ("end", 12)] and [step for _, step in heard] == [step for _, step in events]
    start, last, end = result.journal[0], result.journal[-3], result.journal[-1]
    assert RunFolder(tmp_path).steps() == sorted({9, 12, end["best"]["step"]})  # the newest two, and the best
    assert (start["train_images"], start["eval_images"], start["steps"], start["steps_per_epoch"]) == (96, 359, 12, 6)
    assert start["model"] == "dmst_digits" and start["evaluated"] == "test" and start["recipe"] == recipe.digest
    assert start["parameters"] == sum(p.numel() for p in result.model.parameters()) and start["versions"]["torch"]
    assert last["ema"]["top1"] == result.score.top1 == end["ema"]["top1"] and end["final"] == "ema"
    assert last["model"] != last["ema"] and last["looks"]["images"] == [64, 1, 8, 8] and modes == [False, False]
    assert sum(right for right, _ in end["by_class"]) == result.score.right and result.score.images == 359
    assert last["looks"]["odd"] == [None, 1.0]  # a probe that knows no number ends no run
    images, labels = result.sample
    assert images.shape == (256, 1, 8, 8) and (result.model(images).argmax(1) == labels).sum() > 0
    losses = [event["loss"] for event in result.journal if event["event"] == "step"]
    sums = [event["train_loss"] for event in result.journal if event["event"] == "evaluation"]
    assert sums == pytest.approx([np.mean(losses[:6]), np.mean(losses[6:])])


def test_a_finished_run_says_so_and_changes_nothing(reference: Result) -> None:
    said = Sayings()
    files = contents(reference.folder)
    again = go(tiny(*EVERY_STEP), reference.folder, watch=said)
    assert contents(reference.folder) == files
    assert same(again.model, reference.model) and again.score == reference.score and "finished" in said.text
    assert again.journal == reference.journal


class Sayings(Quiet):
    text = ""

    def say(self, text: str) -> None:
        self.text += text + "\n"


@pytest.mark.parametrize(("asked", "found"), [("auto", "ema"), ("model", "model")])
def test_final_holds_what_the_recipe_asks_for(asked: str, found: str, reference: Result, tmp_path: Path) -> None:
    """Also where the recipe asks for something else after the end."""
    shutil.copytree(reference.folder, tmp_path / "run")
    result = go(tiny(*EVERY_STEP, f"run.final={asked}"), tmp_path / "run", allow_config_change=True)
    held = tensors(tmp_path / "run", 12)
    for model in (result.model, load_model(tmp_path / "run/final")):
        assert all(torch.equal(x, held[f"{found}.{name}"]) for name, x in model.state_dict().items())
    assert any(not torch.equal(held[f"ema.{name}"], held[f"model.{name}"]) for name in result.model.state_dict())
    assert [event["final"] for event in result.journal if event["event"] == "end"] == [found]


def test_the_newest_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is that of step 4, though steps are saved at 3, 6, 9 .. by themselves."""
    rights = iter([100, 200, 150, 200, 50, 60])

    def scored(model: nn.Module, *_: Any, **__: Any) -> Score:
        return Score(359, next(rights), 359, 1.0, [])

    monkeypatch.setattr(engine, "evaluate", scored)
    recipe = tiny("schedule.epochs=6", "data.limit=33", "run.save_every=3", "run.keep=3")
    result = go(recipe, tmp_path)
    assert RunFolder(tmp_path).steps() == [4, 6, 9, 12]
    assert result.journal[-1]["best"] == {"step": 4, "epoch": 2, "top1": 200 / 359, "of": "test"}


def test_a_share_is_held_out_and_nothing_is_evaluated_where_nothing_is_asked_for(tmp_path: Path) -> None:
    recipe = tiny("data.holdout=0.25", "data.limit=0", "run.batch_size=512", "schedule.epochs=1")
    sets = prepare.open_sets(recipe)
    assert (len(sets.train), len(sets.eval)) == (1078, 360)
    rows = [{x.tobytes() for x in part.pixels()} for part in (sets.train, sets.eval)]
    assert not rows[0] & rows[1]
    result = go(recipe, tmp_path / "held")
    assert result.score.images == 360 and result.journal[0]["evaluated"] == "holdout"
    alone = go(tiny("data.eval=", "schedule.epochs=1", "run.save_every=2"), tmp_path / "alone")
    assert alone.score is None and alone.sample is None and load_model(tmp_path / "alone/final")
    assert [event["event"] for event in alone.journal[-3:]] == ["evaluation", "checkpoint", "end"]


@pytest.mark.parametrize("size", [7, 1000])
def test_every_image_is_counted_once_whatever_the_batch(size: int, reference: Result) -> None:
    score, image_set = evaluate_weights(reference.folder, "digits", batch_size=size, device="cpu")
    assert (score.images, score.right, score.right5, score.by_class) == (359, *reference.score[1:3], reference.score.by_class)
    assert [count for _, count in score.by_class] == np.bincount(image_set.labels).tolist()
    assert score.loss == pytest.approx(reference.score.loss, rel=1e-6)


def test_weights_that_cannot_be_judged(reference: Result, tmp_path: Path) -> None:
    model = load_model(reference.folder / "final")
    with torch.no_grad():
        model.norm.weight.fill_(3e38)  # finite, and what comes of it is not
    save_model(model, tmp_path / "bad")
    with pytest.raises(NonFiniteError, match=r"dmst_digits answers images of digits with NaN or infinity.* other weights"):
        evaluate_weights(tmp_path / "bad", "digits", device="cpu")
    model.reset_classifier(7)
    save_model(model, tmp_path / "seven")
    with pytest.raises(OptionError, match=r"tells 7 classes apart, and digits has 10: fine-tune it first"):
        evaluate_weights(tmp_path / "seven", "digits", device="cpu")


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("opt", "turned"), [("muon", "false"), ("adamw", "true")])
def test_a_run_that_is_cut_off_five_times_ends_in_the_same_bits(opt: str, turned: str, tmp_path: Path) -> None:
    """In mid-epoch, before the first checkpoint and after the last; weights of convolutions in another layout too."""
    recipe = tiny(*EVERYTHING, f"optim.opt={opt}", f"run.channels_last={turned}")
    whole = go(recipe, tmp_path / "whole")
    for step in (2, 4, 8, 8, 12):
        with pytest.raises(Cut):
            go(recipe, tmp_path / "cut", watch=CutAfter(step))
    result = go(recipe, tmp_path / "cut")
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole") and len(digests(tmp_path / "cut")) == 5
    assert told(result.journal) == told(whole.journal)
    modules = [module for module in result.model.modules() if isinstance(module, OrthonormalLinear)]
    assert modules and all(is_orthonormal(module.weight) for module in modules)


def test_a_bad_checkpoint_costs_only_the_steps_since_the_one_before(reference: Result, tmp_path: Path) -> None:
    with pytest.raises(Cut):
        go(tiny(*EVERYTHING), tmp_path, watch=CutAfter(8))
    newest = tmp_path / "checkpoints/step_00000006/optim.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[-9] ^= 4
    newest.write_bytes(raw)
    with pytest.warns(UserWarning, match="step_00000006 is skipped: .*sha256.* goes on from step 3: 3 steps are lost"):
        go(tiny(*EVERYTHING), tmp_path)
    assert digests(tmp_path) == digests(reference.folder)


def test_how_often_is_saved_and_looked_at_changes_nothing(reference: Result, tmp_path: Path) -> None:
    recipe = tiny(*RANDOM, "run.accumulate=2", "run.eval_every=2", "run.grad_checkpointing=true", "run.deterministic=true")
    go(recipe, tmp_path)
    mine, theirs = digests(tmp_path), digests(reference.folder)
    state = f"{LAST}/state.json"  # tells which evaluation was the best
    assert mine.pop(state) and theirs.pop(state) and mine == theirs
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_recipe_is_refused_with_what_differs(tmp_path: Path) -> None:
    recipe = tiny(*EVERYTHING)
    with pytest.raises(Cut):
        go(recipe, tmp_path, watch=CutAfter(5))
    other = tiny(*EVERYTHING, "optim.lr=0.02", "run.seed=3", "promise.time=none")
    files = contents(tmp_path)
    with pytest.raises(ConfigError, match="another recipe") as refused:
        go(other, tmp_path)
    assert "\n  optim.lr: 0.01 -> 0.02\n  run.seed: 0 -> 3\n" in str(refused.value) and "--allow-config-change" in str(
        refused.value
    )
    assert contents(tmp_path) == files
    result = go(other, tmp_path, allow_config_change=True)
    assert [(x["step"], x["changed"]) for x in result.journal if x["event"] == "start"] == [
        (0, []), (3, ["optim.lr: 0.01 -> 0.02", "run.seed: 0 -> 3"])
    ]  # fmt: skip
    assert from_toml((tmp_path / "recipe.toml").read_text(), "") == other
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.02 -> 0\.01"):
        go(recipe, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.options.dim=24", r"does not fit: .* is torch.float32 of shape"),
        ("schedule.epochs=1", r"is at step 9, and this recipe ends after 6"),
        ("optim.model_ema=0.0", ""),
    ],
)
def test_a_change_that_cannot_be_gone_on_with(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Cut):
        go(tiny(*EVERYTHING), tmp_path, watch=CutAfter(10))
    other = tiny(*EVERYTHING, change)
    if message:
        with pytest.raises((OptionError, ValueError), match=message):
            go(other, tmp_path, allow_config_change=True)
    else:  # what is no longer kept is let go of; it cannot be taken up again
        assert go(other, tmp_path, allow_config_change=True).journal[-1]["final"] == "model"
        with pytest.raises(OptionError, match="has no ema"):
            go(tiny(*EVERYTHING), tmp_path, allow_config_change=True)


# --- weights to start from -------------------------------------------------------------------------------------------


def test_weights_to_start_from(tmp_path: Path) -> None:
    """Of a run, with other classes: all but the classifier is taken over."""
    data = pictures(tmp_path / "data")
    start = f"model.init_from={tmp_path / 'earlier'}"
    source = prepare.build_model(on_pictures(data, *RANDOM, "run.seed=7"), "0123456789")
    save_model(source, tmp_path / "earlier/final")
    recipe = on_pictures(data, *RANDOM, start, "schedule.epochs=1")
    model, wanted = prepare.build_model(recipe, "abc"), source.state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(x, wanted[name]) if not name.startswith("head.") else x.shape[0] == 3, name
    assert torch.equal(prepare.build_model(recipe, "0123456789").head.weight, source.head.weight)
    assert go(recipe, tmp_path / "run").journal[0]["classes"] == ["across", "block", "down"]
    with pytest.raises(OptionError, match=r"dmst_cifar cannot start from .* another network: depth 1 \(here 2\)"):
        prepare.build_model(on_pictures(data, *RANDOM, start, "model.options.depth=2"), "abc")
    with pytest.raises(OptionError, match=r"another network: operator_options \{'mode': 'proximal'\} \(here \{\}\)"):
        prepare.build_model(on_pictures(data, start), "abc")


# --- numbers ---------------------------------------------------------------------------------------------------------


def bad_gradient(value: float, at: int) -> Callable[..., None]:
    """A gradient that goes wrong in the last micro-step of step `at`."""
    real, seen = TrainStep._measure, [0]

    def measure(self: TrainStep) -> None:
        if seen[0] == at:
            self.model.head.weight.grad[1, 2] = value
        seen[0] += 1
        real(self)

    return measure


def test_a_step_that_is_not_finite_is_not_taken(reference: Result, tmp_path: Path) -> None:
    """What is saved is the state before it, to the bit: without the fault the run ends as if nothing had been."""
    message = r"^step 4: the gradient of head.weight holds NaN or infinity\. Nothing was applied\..*--set optim\.lr=0\.003"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "_measure", bad_gradient(math.nan, 4))
        with pytest.raises(NonFiniteError, match=message):
            go(tiny(*EVERYTHING), tmp_path)
    assert RunFolder(tmp_path).steps() == [3, 4]
    held, wanted = tensors(tmp_path, 4), tensors(reference.folder, 4)
    assert [name for name, x in wanted.items() if not torch.equal(x, held[name])] == [] and held.keys() == wanted.keys()
    go(tiny(*EVERYTHING), tmp_path)
    assert digests(tmp_path) == digests(reference.folder)


def test_memory_that_does_not_suffice(reference: Result, tmp_path: Path) -> None:
    def hungry(self: TrainStep) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(Cut):
        go(tiny(*EVERY_STEP), tmp_path, watch=CutAfter(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "_measure", hungry)
        told = r"step 7 does not fit on cpu, 8 images at a time\. Nothing was applied\. Try --set run\.accumulate=4"
        with pytest.raises(DeviceMemoryError, match=told):
            go(tiny(*EVERY_STEP), tmp_path)
    held, wanted = tensors(tmp_path, 7), tensors(reference.folder, 7)
    assert [name for name, x in wanted.items() if not torch.equal(x, held[name])] == []


# --- fp16 ------------------------------------------------------------------------------------------------------------


def test_the_scaler_is_brought_back(tmp_path: Path) -> None:
    recipe = tiny(*SAVED, "run.amp=fp16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "_measure", bad_gradient(math.inf, 1))
        go(recipe, tmp_path / "whole")
        patch.undo()
        patch.setattr(TrainStep, "_measure", bad_gradient(math.inf, 1))
        with pytest.raises(Cut):
            go(recipe, tmp_path / "cut", watch=CutAfter(7))
    go(recipe, tmp_path / "cut")
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")
    state = json.loads((tmp_path / "cut" / LAST / "state.json").read_text())
    assert state["scaler"] == [2.0**15, 10, 0]


@pytest.mark.compile
def test_a_compiled_run_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = torch.compile, []

    def compiled(what: Any, **options: Any) -> Any:
        asked.append(what)
        return real(what, **options | {"backend": "aot_eager"})

    monkeypatch.setattr(torch, "compile", compiled)
    still = ["augment.rotate=0.0", "augment.zoom=0.0", "augment.shift=0.0", "augment.mixup=0.0"]  # compiled in test_loader.py
    recipe = ["schedule.epochs=1", "run.save_every=3", *still]
    found = [go(tiny(*recipe, f"run.compile={flag}"), tmp_path / flag) for flag in ("true", "false")]
    assert any(isinstance(what, VisionModel) for what in asked) and len(asked) == 2  # and the stream
    assert found[0].score.right == pytest.approx(found[1].score.right, abs=3)
    losses = [[event["loss"] for event in each.journal if event["event"] == "step"] for each in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_checkpoint_is_kept_though_damaged_ones_are_newer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Cut):
        train(tiny("run.save_every=3", "run.keep=3"), run, watch=CutAfter(10))
    for step in (6, 9):
        (run / f"checkpoints/step_{step:08d}/model.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(Cut):
        train(tiny("run.save_every=4", "run.keep=2"), run, watch=CutAfter(5), allow_config_change=True)
    assert (run / "checkpoints/step_00000004").is_dir()
