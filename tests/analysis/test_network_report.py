"""The page of a network or a run: what the journal says and what the weights compute, safe to open, and nothing beside it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dmst import cli, create_model
from dmst.analysis import network_report
from dmst.analysis.charts import evenly
from dmst.analysis.membership import PALETTE
from dmst.analysis.network_report import answers, counted, maps_of, pick, pixels_of, write_network_report, write_run_report
from dmst.analysis.run_journal import Run, binned
from dmst.engine.prepare import read_weights
from dmst.engine.recipe import read_recipe
from dmst.engine.samples import sample as images_of
from dmst.errors import OptionError
from dmst.models import VisionModel
from tests.pages import check_page

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


# --- of a run ----------------------------------------------------------------------------------------------------------


def test_what_came_of_it(tmp_path: Path) -> None:
    text = page(tmp_path, told(variant="re-cropped"), some=sample())
    assert "<b>88.00%</b><span>accuracy (top-1) of the averaged weights on digits test (re-cropped)" in text
    cells = re.sub(r' class="number"', "", text)
    assert "<td>80.00%</td><td>the last weights</td><td>40 of 50</td><td>96.00%</td><td>1.2500</td>" in cells
    assert "the averaged weights, saved in final/" in text and "the averaged weights, best epoch 2: not a result" in text
    assert "<b>12</b><span>training images" in text  # six images in half a second
    assert "<b>0:00:04</b><span>training time for 8 steps" in text and "0:01:15" in text
    assert "Mean over the classes: 70.00%." in text
    assert cells.index("name 0</td><td>0.0%") < cells.index("name 4</td><td>80.0%") < cells.index("name 5</td><td>100.0%")
    assert text.count("evaluation, the averaged weights, epoch") == 4  # two points in two charts
    assert "Notes" not in text
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
    names = (evil, "turn\u202eed\nround\udce9", "a" * 300, *(f"name {i}" for i in range(7)))
    network = small()
    network.class_names = names
    with torch.no_grad():
        network.head.bias[0] = 50.0  # everything is read as the worst
    facts = {"model": f"m{evil}", "data": f"d{evil}", "variant": f"v{evil}", "device": f"g{evil}", "notes": [f"n{evil}"]}
    facts |= {"bad_images": [f"/x/{evil}{i}.jpg" for i in range(30)], "versions": {evil: evil}, "path": evil, "recipe": evil}
    events = told(classes=list(names), **facts)
    path = write_run_report(tmp_path / "r.html", events, RECIPE + f"# {evil}\n", network, sample())
    check_page(path)
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\u202e" not in text and r"turn\u202eed\nround\xe9" in text and "a" * 30 not in text
    assert "30 training images could not be read" in text and "and 20 more" in text


def test_a_thousand_classes(tmp_path: Path) -> None:
    events = told(classes=[f"class {i:04}" for i in range(1000)])
    events[-1]["by_class"] = [[i % 50, 50] for i in range(999)] + [[0, 0]]
    network = small(num_classes=1000)
    text = page(tmp_path, events, network, sample())
    assert "The 40 of 999 classes" in text and "1,000 classes" in text and "Classes without images: 1." in text
    assert text.count(" of 50</td>") == 40 + 2 and "class 0951" in text and "class 0049" not in text
    text = write_network_report(tmp_path / "w.html", network, [sample(40)], "noise", title="mine").read_text()
    assert "most frequent mistakes" in text


def test_nothing_evaluated(tmp_path: Path) -> None:
    events = [event for event in told(evaluated="", eval_images=0) if event["event"] != "end"]
    for event in events:
        for name in ("model", "ema", "best"):
            if event["event"] == "evaluation":
                del event[name]
    text = page(tmp_path, [*events, {"event": "end", "step": 8, "time": 1075.0, "final": "ema", "by_class": [], "best": {}}])
    assert "not evaluated." in text and "it has no accuracy" in text
    assert "top-1" not in text and "Wrong" not in text and "Accuracy by class" not in text
    assert "nan" not in page(tmp_path, events[:1]).lower()  # not a single step
    assert "unnamed images" in page(tmp_path, [])


@pytest.mark.parametrize("name", ["dmst_digits", "gmst_digits", "tost_digits", "vit_digits", "dmst_cifar"])
def test_every_family(tmp_path: Path, name: str) -> None:
    """Grey and colour; no map or gate where the operator computes none."""
    family = name.partition("_")[0]
    network = small(name, **{"groups": 4, "gate_activation": "gelu"} if family == "gmst" else {}).train()
    text = page(tmp_path, told(), network, sample(12, network))
    assert ("The <b>membership</b>" in text) is (family in ("dmst", "tost"))
    assert ("sorts the patches into groups" in text) is (family == "gmst")
    assert ("dark blue is" in text) is ('class="ramp"' in text) is (family in ("dmst", "tost"))
    assert ("head's <b>gate</b>" in text) is (family in ("dmst", "gmst"))
    assert network.training


def test_large_images_and_many_layers_keep_the_page_small(tmp_path: Path) -> None:
    network = small("dmst_tiny", dim=8, depth=13, num_classes=10)
    text = page(tmp_path, told(), network, sample(11, network))
    assert "12 of 13 layers" in text and "layer 12</th>" in text and (tmp_path / "report.html").stat().st_size < 2_000_000


def test_pieces_of_the_journal() -> None:
    assert evenly(range(300), 4) == [0, 100, 199, 299] and evenly([1, 2], 4) == [1, 2]
    steps = [{"epoch": i, "loss": float(i), "lr": None} for i in range(1, 101)]
    line = binned(steps, "loss", "l")
    assert len(line.ys) == 34 and line.ys[:2] == [2.0, 5.0] and (line.low[1], line.high[1]) == (4.0, 6.0)
    assert binned(steps[:5], "loss", "l").low is None and binned(steps, "lr", "l").ys == []
    assert Run(told(), RECIPE).pace == pytest.approx(0.5)  # pauses and evaluations do not count
    assert math.isnan(Run([], "").pace)


# --- pictures ----------------------------------------------------------------------------------------------------------


def test_images_are_drawn_as_they_were() -> None:
    network = small("dmst_cifar")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    mean, std = (torch.tensor(network.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    normalised = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    assert (pixels_of(network, normalised) == pixels).all()
    grey = pixels_of(small(), torch.tensor([[[-1.0, 1.0, 9.0, math.nan]]]))
    assert grey.shape == (1, 4, 3) and grey[0, :3, 1].tolist() == [0, 255, 255]


def test_maps_are_those_of_their_image(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (images, _) = small(num_heads=4), sample(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        trace = network.trace(images)
    monkeypatch.setattr(network_report, "colour", lambda values, low, high: values)
    found = maps_of(network, images)
    assert found is not None and found["layers"] == [0, 1] and found["gated"] and len(found["rows"]) == 5
    for i, heads in enumerate(found["rows"]):
        for k, (heading, tiles) in enumerate(heads):
            assert heading == f"head {k}"
            for layer, tile in enumerate(tiles):
                part = trace.layers[layer].parts
                assert (
                    torch.allclose(tile["pixels"], part.membership[i, k].view(8, 8)) and tile["gate"] == part.gate[i, k].item()
                )
    assert maps_of(small("vit_digits"), images) is None


def test_maps_of_groups_have_their_colours() -> None:
    """On white: the colour of the group that a patch belongs to most, mixed by its membership."""
    network, (images, _) = small("gmst_digits", groups=6), sample(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        trace = network.trace(images)
    found = maps_of(network, images)
    assert found is not None and found["grouped"] and len(found["rows"][0]) == 2
    member = trace.layers[1].parts.membership[:, 0].unflatten(-1, (8, 8))
    assert not torch.equal(member[0].argmax(0), member[2].argmax(0))
    share, group = member[2].max(0)
    strength = 0.7 + 0.3 * share.double().numpy()[..., None]
    expected = (1 - strength) * 255 + strength * PALETTE[group.numpy()]
    assert np.abs(found["rows"][2][0][1][1]["pixels"] - expected).max() <= 1


# --- of weights --------------------------------------------------------------------------------------------------------


def test_answers_are_the_models() -> None:
    model = read_weights("dmst_digits")
    found, looked = answers(model, images_of(model, batch_size=100)), images_of(model, batch_size=359)
    ((images, labels),) = list(looked)
    with torch.no_grad():
        trace = model.trace(images)
    assert labels is not None and torch.equal(found.labels, labels) and torch.equal(found.says, trace.logits.argmax(-1))
    assert torch.allclose(found.sure, trace.logits.double().softmax(-1).amax(-1), atol=1e-6)
    assert all(torch.allclose(a, b.parts.gate, atol=1e-6) for a, b in zip(found.gates, trace.layers, strict=True))
    assert found.right.double().mean().item() == pytest.approx(358 / 359) and found.labelled  # as its card says
    counts = counted(found, "digits", 10).confusion
    assert counts.sum() == 359 and counts.trace() == 358 and torch.equal(counts.sum(1), labels.bincount())
    assert torch.equal(pick(looked, [5, 2]), images[[5, 2]])


def test_the_page_of_weights(tmp_path: Path) -> None:
    """Of a network with a gate, of one without memberships, and of images without labels."""
    for name, wanted, missing in (
        ("dmst_digits", ("which heads each class uses", "raised by heads", "head 0", "perfect calibration"), ">Highest"),
        ("vit_digits", ("no rate to certify", "Confusion"), "which heads each class uses"),
        (
            "gmst_digits",
            ("Here it is R_mix", "R+ is not defined for groups with means", "R_mix at the tokens"),
            "complete rate</b>",
        ),
    ):
        model = create_model(name, depth=2)
        looked = images_of(model, limit=50)
        path = write_network_report(tmp_path / f"{name}.html", model, looked, looked.name, title="<mine>")
        check_page(path)
        text = path.read_text()
        assert all(each in text for each in wanted) and missing not in text and "&lt;mine&gt;" in text
    model = create_model("dmst_cifar", depth=2, num_classes=3)
    looked = images_of(model, limit=4)
    text = write_network_report(tmp_path / "photos.html", model, looked, looked.name, title="mine").read_text()
    assert "<h3>Highest confidence</h3>" in text and "perfect calibration" not in text and "the photographs that ship" in text
    with pytest.raises(OptionError, match="no images"):
        answers(model, [])
    with pytest.raises(OptionError, match="no labels"):
        counted(answers(model, looked), "photos", 3)


def test_weights_that_ship_show_what_is_known_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any data: accuracy, confusion and calibration as measured on all test images, layers on real photographs."""
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli.app, ["report", "--device", "cpu"])
    assert said.exit_code == 0 and said.output.strip() == "dmst_cifar10-report.html", said.output
    text = " ".join((tmp_path / "dmst_cifar10-report.html").read_text().split())
    assert "95.24%" in text and "accuracy (top-1) on 10,000 images" in text and "measured on cifar10 test" in text
    assert "884 of 1,000" in text and "Confusion" in text and "perfect calibration" in text  # cats
    assert "no class for: rocket, astronaut, coffee, photographer, galaxies" in text
    assert "predicted cat, 94%" in text and "<b>cat</b>" not in text


def test_a_real_run(tmp_path: Path) -> None:
    """The page that `dmst train` writes, and that of `dmst report`, which has the curves too."""
    small = ["schedule.epochs=1", "schedule.warmup_epochs=0", "model.options.depth=1", "data.limit=96", "data.holdout=0.1"]
    command = ["train", "digits", "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet"]
    done = CliRunner().invoke(cli.app, command + [word for change in small for word in ("--set", change)])
    assert done.exit_code == 0, done.output
    check_page(tmp_path / "run/report.html")
    text = " ".join((tmp_path / "run/report.html").read_text().split())
    right, count = re.search(r"(\d+) of (\d+)</td>", text).groups()  # the first row: the last weights
    assert f"<b>{int(right) / int(count):.2%}</b><span>accuracy (top-1) of" in text
    assert f"gets {int(count) - int(right)} of the first {count} images of digits, 10 % held out wrong" in text
    assert "for 1 epoch." in text and "optimistic" in text and "holdout = 0.1" in text
    out = tmp_path / "page.html"
    said = CliRunner().invoke(cli.app, ["report", str(tmp_path / "run"), "--out", str(out), "--limit", "40", "--device", "cpu"])
    assert said.exit_code == 0, said.output
    text = out.read_text()
    assert "digits test" not in text  # the page is about the images that were held out
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert (
        headings[:2] == ["Results", "Learning curves"] and headings[-1] == "Settings and versions" and "Confusion" in headings
    )
