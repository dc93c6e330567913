"""The page of a run: what the journal says and what the weights compute, whole, safe to open, and nothing beside it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmst import create_model
from dmst.analysis import run_pictures
from dmst.analysis.probes import layers
from dmst.analysis.run_journal import Run, binned, in_time, spread
from dmst.analysis.run_pictures import Sample, examples, memberships, pixels_of
from dmst.analysis.run_report import write_run_report
from dmst.engine.recipe import read_recipe
from dmst.engine.train_loop import Result, train
from dmst.models import VisionModel
from dmst.words import short
from tests.test_report import check_page

RECIPE = read_recipe("digits", ["schedule.epochs=2", "run.batch_size=6"]).to_toml()


def small(name: str = "dmst_digits", **options: object) -> VisionModel:
    return create_model(name, **{"dim": 16, "depth": 2, "num_heads": 2, **options}).eval()


def score(right: int, images: int = 50, loss: float = 1.25) -> dict[str, Any]:
    return {"top1": right / images, "top5": 0.96, "loss": loss, "right": right, "images": images}


def told(**changes: Any) -> list[dict[str, Any]]:
    """The journal of two epochs of four steps, half a second each."""
    start = {
        "model": "dmst_digits", "data": "digits", "variant": "", "classes": [f"name {i}" for i in range(10)],
        "train_images": 25, "eval_images": 50, "evaluated": "test", "bad_images": [], "path": "resident", "notes": [],
        "steps": 8, "recipe": "0f" * 32, "device": "CPU, 1 threads", "processes": 1, "versions": {"dmst": "0.1"}, "changed": [],
    }  # fmt: skip
    events = [{"event": "start", "step": 0, "time": 1000.0, **start, **changes}]
    for step in range(1, 9):
        value = {"epoch": step / 4, "loss": 2.5 - step / 8, "accuracy": 0.1, "lr": 0.001, "norm": 1.0, "seconds": 9.0}
        events.append({"event": "step", "step": step, "time": 1005.0 + step / 2 + 60 * (step > 4), **value})
        if step % 4 == 0:
            epoch = step // 4
            both = {"model": score(20 * epoch), "ema": score(22 * epoch)}
            best = {"step": step, "epoch": epoch, "top1": 0.44 * epoch, "of": "test"}
            events.append(
                {"event": "evaluation", "step": step, "time": events[-1]["time"] + 1, "epoch": epoch, "train_loss": 2.0}
                | {"train_accuracy": 0.3, **both, "best": best}
            )
            events.append({"event": "checkpoint", "step": step, "time": events[-1]["time"] + 1})
    counts = [[i, 5] for i in range(5)] + [[5, 5]] * 5
    end = {"event": "end", "step": 8, "time": 1075.0, "final": "ema", "by_class": counts, "best": best, **both}
    return [*events, end]


def sample(count: int = 12, model: VisionModel | None = None) -> tuple[Tensor, Tensor]:
    shape = (1, 8, 8) if model is None else (model.config.in_chans, *model.config.img_size)
    return torch.randn(count, *shape), torch.arange(count) % 10


def page(path: Path, events: list[dict[str, Any]], model: VisionModel | None = None, some: Any = None) -> str:
    """The text of a page that is well formed and holds everything, without its pictures."""
    written = write_run_report(path / "report.html", events, RECIPE, model or small(), some)
    check_page(written)
    return re.sub(r'src="data:[^"]*"', "", written.read_text(encoding="utf-8"))


# --- a real run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    changes = ["schedule.epochs=1", "schedule.warmup_epochs=0", "data.limit=128", "optim.model_ema=0.5"]
    changes += ["model.options.depth=2", "model.options.dim=16"]
    out = tmp_path_factory.mktemp("run") / "digits"
    return train(read_recipe("digits", changes), out, device="cpu", probes={"layers": layers})


def test_a_real_run_of_one_epoch(finished: Result, tmp_path: Path) -> None:
    recipe = (finished.folder / "recipe.toml").read_text()
    path = write_run_report(tmp_path / "report.html", finished.journal, recipe, finished.model, finished.sample)
    reader = check_page(path)
    text = path.read_text(encoding="utf-8")
    assert finished.score is not None and finished.score.images == 359
    assert f"<b>{finished.score.top1:.2%}</b><span>accuracy (top-1) of the averaged weights on digits test" in text
    assert "128 images of digits, for 1 epoch." in text
    assert "not a result" in text and "At the last evaluation" in text and "heads that are on" not in text  # one evaluation
    right, count = min(finished.score.by_class, key=lambda pair: pair[0] / pair[1])
    assert text.index(f"<td>{right} of {count}</td>") < text.index("<h2>Membership maps")
    images, labels = finished.sample
    with torch.no_grad():
        wrong = int((finished.model(images).argmax(1) != labels).sum())
    assert len(labels) == 256 and f"{wrong} of the first 256 images of digits test" in text
    assert len([a for a in reader.addresses if a.startswith("data:")]) == 8 * (1 + 2 * 4) + min(wrong, 8)
    assert "nan" not in re.sub(r'src="data:[^"]*"', "", text).lower()
    assert not finished.model.training and "model_ema = 0.5" in text


def test_the_journal_carries_the_layers(finished: Result) -> None:
    event = next(event for event in finished.journal if event["event"] == "evaluation")
    assert event["layers"]["images"] == 64 and event["layers"]["heads"] == [4, 4]


# --- a run by hand -----------------------------------------------------------------------------------------------------


def test_what_came_of_it(tmp_path: Path) -> None:
    text = page(tmp_path, told(variant="re-cropped"), some=sample())
    assert "<b>88.00%</b><span>accuracy (top-1) of the averaged weights on digits test (re-cropped)" in text
    assert "<td>80.00%</td><td>the last weights</td><td>40 of 50</td><td>96.00%</td><td>1.2500</td>" in text
    assert "the averaged weights, saved in final/" in text and "the averaged weights, best epoch 2: not a result" in text
    for accuracy in re.finditer(r"<td>\d\d\.00%</td><td>the [^/]*?</tr>", text):
        assert "digits test (re-cropped)" in accuracy[0]
    assert "<b>12</b><span>training images" in text  # six images in half a second
    assert "<b>4.0 s</b><span>training time for 8 steps" in text and "1 min 15 s" in text
    assert "Mean over the classes: 70.00%." in text
    assert text.index("name 0</td><td>0.0%") < text.index("name 4</td><td>80.0%") < text.index("name 5</td><td>100.0%")
    assert text.count("evaluation, the averaged weights, epoch") == 4  # two points in two charts
    assert "Layers during training" not in text and "Interruptions" not in text
    events = told()
    events[-1]["final"] = "model"
    assert "<b>80.00%</b><span>accuracy (top-1) of the last weights on digits test<" in page(tmp_path, events)


@pytest.mark.parametrize(("split", "seen", "claim", "clean"), [
    ("test", "digits test", "so its accuracy is <b>not a result</b>", False),
    ("holdout", "digits, 20 % held out", "optimistic", True),
    ("train", "digits train", "trained on the images that score it", False),
])  # fmt: skip
def test_what_may_be_claimed(tmp_path: Path, split: str, seen: str, claim: str, clean: bool) -> None:
    text = page(tmp_path, told(evaluated=split, variant="without the 20 % held out" if split == "holdout" else ""))
    assert f"50 images ({seen})" in text and claim in text and ("not a result" not in text) is clean


def test_hostile_names_are_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    names = [evil, "turn\u202eed\nround\udce9", "a" * 300] + [f"name {i}" for i in range(7)]
    network = small()
    with torch.no_grad():
        network.head.bias[0] = 50.0  # everything is read as the worst
    facts = {"model": f"m{evil}", "data": f"d{evil}", "variant": f"v{evil}", "device": f"g{evil}", "notes": [f"n{evil}"]}
    facts |= {"bad_images": [f"/x/{evil}{i}.jpg" for i in range(30)], "versions": {evil: evil}, "path": evil, "recipe": evil}
    events = told(classes=names, **facts)
    events.insert(5, {"event": "stopped", "step": 4, "time": 1008.0, "signal": 15})
    events.insert(6, {**events[0], "step": 4, "time": 1060.0, "changed": [f"optim.lr: 1 -> {evil}"]})
    path = write_run_report(tmp_path / "r.html", events, RECIPE + f'# {evil}\nbroken = "', network, sample())
    check_page(path)
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\u202e" not in text and r"turn\u202eed\nround\xe9" in text and "a" * 30 not in text
    assert "30 training images could not be read" in text and "and 20 more" in text
    assert "step 4: stopped by SIGTERM; continued, next entry at 1970-01-01 00:17 UTC" in text
    assert "continued with a changed recipe" in text


def test_a_thousand_classes(tmp_path: Path) -> None:
    events = told(classes=[f"class {i:04}" for i in range(1000)])
    events[-1]["by_class"] = [[i % 50, 50] for i in range(999)] + [[0, 0]]
    text = page(tmp_path, events, small(num_classes=1000), sample())
    assert "The 40 of 999 classes" in text and "1,000 classes" in text and "Classes without images: 1." in text
    assert text.count(" of 50</td>") == 40 + 2 and "class 0951" in text and "class 0049" not in text


def test_nothing_evaluated(tmp_path: Path) -> None:
    events = [event for event in told(evaluated="", eval_images=0) if event["event"] != "end"]
    for event in events:
        for name in ("model", "ema", "best"):
            if event["event"] == "evaluation":
                del event[name]
    text = page(tmp_path, [*events, {"event": "end", "step": 8, "time": 1075.0, "final": "ema", "by_class": [], "best": {}}])
    assert "It was not evaluated." in text and "it has no accuracy" in text
    assert "top-1" not in text and "Mistakes" not in text and "Accuracy by class" not in text
    assert "nan" not in page(tmp_path, events[:1]).lower()  # not a single step
    assert "unnamed images" in page(tmp_path, [])


@pytest.mark.parametrize("name", ["dmst_digits", "tost_digits", "vit_digits", "crate_digits", "dmst_cifar"])
def test_every_family(tmp_path: Path, name: str) -> None:
    """Grey and colour; no map, rate or gate where the operator computes none."""
    network, events = small(name).train(), told()
    some = sample(12, network)
    for event in events:
        if event["event"] == "evaluation":
            event["layers"] = layers(network, some[0])
    text = page(tmp_path, events, network, some)
    family = name.partition("_")[0]
    assert ("Membership maps" in text) is (family in ("dmst", "tost"))
    assert ("computes no memberships" in text) is (family in ("vit", "crate"))
    assert ("variational rate (nats)" in text) is (family in ("dmst", "tost"))
    assert (
        ("heads off for all images" in text)
        is ("heads that are on" in text)
        is ("head's <b>gate</b>" in text)
        is (family == "dmst")
    )
    assert "coding rate (nats)" in text and network.training


def test_layers_over_time(tmp_path: Path) -> None:
    events = told()
    first, last = (event for event in events if event["event"] == "evaluation")
    base = {"images": 7, "eps": 0.1, "heads": [3, 3], "coding": [9.0, 8.0], "variational": [5.0, None]}
    first["layers"] = base | {"active": [3.0, 1.0], "never": [[], []]}
    last["layers"] = base | {"active": [2.5, 1.5], "never": [[0, 2], [1]]}
    text = page(tmp_path, events)
    assert "3 of the 6 heads" in text and "7 images of digits test" in text
    assert "<td>3.00 → 2.50</td><td>3</td><td>0, 2</td>" in text and "<td>1.00 → 1.50</td><td>3</td><td>1</td>" in text
    assert "mean over layers, band: all layers, epoch 1: 2.00 (1.00 to 3.00)" in text
    assert (
        "all layers, of 6 heads, epoch 2: 3" in text and "epoch 2, layer 0: 5.00" in text and "epoch 2, layer 1: 5" not in text
    )


def test_large_images_and_many_layers_keep_the_page_small(tmp_path: Path) -> None:
    network = small("dmst_tiny", dim=8, depth=13, num_classes=10)
    images, labels = sample(11, network)
    path = write_run_report(tmp_path / "r.html", told(), RECIPE, network, (images, labels))
    addresses = [a for a in check_page(path).addresses if a.startswith("data:")]
    text = path.read_text()
    photos = text.count(f'width="{run_pictures.PHOTO}"')
    assert photos == 8 and "12 of 13 layers" in text and "layer 12</th>" in text
    assert len(addresses) == 8 * (1 + 12 * 2) + min(8, int(re.search(r"(\d+) of the first 11", text)[1]))
    assert path.stat().st_size < 2_000_000


# --- pieces ------------------------------------------------------------------------------------------------------------


def test_images_are_drawn_as_they_were() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    statistics = {"mean": [0.4, 0.5, 0.1], "std": [0.2, 0.3, 0.7]}
    mean, std = (torch.tensor(statistics[name]).view(3, 1, 1) for name in ("mean", "std"))
    normalised = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    assert (pixels_of(normalised, statistics) == pixels).all()
    grey = pixels_of(torch.tensor([[[-1.0, 1.0, 9.0, math.nan]]]), {"mean": [0.5], "std": [0.5]})
    assert grey.shape == (1, 4, 3) and grey[0, :, 1].tolist() == [0, 255, 255, 0]


def test_a_map_shows_the_memberships_of_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (images, labels) = small(num_heads=4), sample(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    drawn: list[Tensor] = []
    monkeypatch.setattr(run_pictures, "colour", lambda values, low, high: drawn.append(values) or np.zeros((8, 8, 3), np.uint8))
    text = memberships(Sample(network, images, labels, ["zero"]))
    with torch.no_grad():
        parts = [layer.parts for layer in network.trace(images).layers]
    assert len(drawn) == 5 * 2 * 4
    wanted = [parts[layer].membership[i, k].view(8, 8) for i in range(5) for k in range(4) for layer in range(2)]
    assert all(torch.allclose(a, b) for a, b in zip(drawn, wanted, strict=True))
    silent = sum(int((part.gate == 0).sum()) for part in parts)
    assert text.count("class=off") == text.count("<figcaption>silent") == silent > 0
    assert "1: zero" in text and "2: class 1" in text


def test_examples_are_the_first_of_their_classes() -> None:
    assert examples(torch.tensor([4, 4, 4, 2, 4, 7]), 4) == [0, 1, 3, 5]
    assert examples(torch.tensor([1, 0, 1]), 2) == [0, 1] and examples(torch.tensor([3]), 8) == [0]


def test_pieces_of_the_journal() -> None:
    assert spread(range(300), 4) == [0, 100, 199, 299] and spread([1, 2], 4) == [1, 2]
    steps = [{"epoch": i, "loss": float(i), "lr": None} for i in range(1, 101)]
    line = binned(steps, "loss", "l")
    assert len(line.ys) == 34 and line.ys[:2] == [2.0, 5.0] and (line.low[1], line.high[1]) == (4.0, 6.0)
    assert binned(steps[:5], "loss", "l").low is None and binned(steps, "lr", "l").ys == []
    assert [in_time(x) for x in (4.25, 59.4, 59.7, 185, 25_950, 187_300)] == [
        "4.2 s", "59 s", "1 min 0 s", "3 min 5 s", "7 h 12 min", "2 d 4 h",
    ]  # fmt: skip
    assert short("abcdefghij", 6) == "abc…ij" and short("abc", 3) == "abc" and short("a\x00b") == r"a\x00b"


def test_the_pace_leaves_pauses_out() -> None:
    network = small()
    assert Run(told(), RECIPE, network).pace == pytest.approx(0.5)
    alone = [event for event in told() if event["event"] != "step" or event["step"] % 4 == 0]
    assert Run(alone, RECIPE, network).pace == 9.0  # no stretch of two steps: what the journal's clock says
    assert math.isnan(Run([], "", network).pace)
