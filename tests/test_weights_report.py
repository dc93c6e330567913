"""The page of a network: its numbers are those of the model, whatever the batches; nothing outside it is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dmst import cli, create_model, save_model
from dmst.analysis.answers import Answers, answers, counted
from dmst.analysis.weights_report import pick, write_weights_report
from dmst.engine.prepare import read_weights
from dmst.engine.samples import sample
from dmst.errors import OptionError


@pytest.fixture(scope="module")
def found() -> Answers:
    model = read_weights("dmst_digits")
    return answers(model, sample(model, batch_size=100))


def test_answers_are_the_models(found: Answers) -> None:
    model = read_weights("dmst_digits")
    looked = sample(model, batch_size=359)
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


def test_calibration_by_hand() -> None:
    sure = torch.tensor([0.5, 0.5, 0.9, 0.9], dtype=torch.float64)
    labels, says = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])
    _, _, _, error, bins = counted(Answers(says, sure, labels, says == labels, []), "four", 2)
    assert error == pytest.approx(0.5 * 0.0 + 0.5 * 0.1) and [b.share for b in bins] == [0.5, 0.5]
    assert [b.right for b in bins] == [0.5, 1.0]


def test_the_page(tmp_path: Path) -> None:
    """Of a network with a gate, of one without memberships, and of images without labels."""
    for name, wanted, missing in (
        ("dmst_digits", ("which heads each class uses", "raised by heads", "head&nbsp;0", "perfect calibration"), "Highest"),
        ("vit_digits", ("no rate to certify", "Confusion"), "Which heads"),
    ):
        model = create_model(name, depth=2)
        looked = sample(model, limit=50)
        page = write_weights_report(tmp_path / f"{name}.html", model, looked, looked.name, weights="<mine>").read_text()
        assert all(each in page for each in wanted) and missing not in page
        assert "&lt;mine&gt;" in page and "<mine>" not in page and not re.search(r'(src|href)="(?!data:|#)', page)
    model = create_model("dmst_cifar", depth=2, num_classes=3)
    looked = sample(model, limit=4)
    page = write_weights_report(tmp_path / "photos.html", model, looked, looked.name, weights="mine").read_text()
    assert "Highest confidence</h3>" in page and "perfect calibration" not in page and "the photographs that ship" in page
    with pytest.raises(OptionError, match="no images"):
        answers(model, [])
    with pytest.raises(OptionError, match="no labels"):
        counted(answers(model, looked), "photos", 3)


def test_many_classes(tmp_path: Path) -> None:
    """Pairs in place of a table of 20 x 20."""
    model = create_model("dmst_digits", depth=1, num_classes=20)
    images = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    batches = [(images, torch.arange(40) % 20)]
    page = write_weights_report(tmp_path / "many.html", model, batches, "noise", weights="mine").read_text()
    assert "most frequent mistakes" in page and "class 19" in page


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(create_model("dmst_digits", depth=1), tmp_path / "mine")
    said = CliRunner().invoke(cli.app, ["report", "mine", "--limit", "30", "--device", "cpu"])
    assert said.exit_code == 0 and said.output.strip() == "mine-report.html", said.output
    assert "30 of 359 images by hash" in (tmp_path / "mine-report.html").read_text()


def test_weights_that_ship_show_what_is_known_of_them(tmp_path: Path) -> None:
    """Without any data: accuracy, confusion and calibration as measured on all test images, layers on real photographs."""
    out = tmp_path / "page.html"
    said = CliRunner().invoke(cli.app, ["report", "--out", str(out), "--device", "cpu"])
    assert said.exit_code == 0, said.output
    page = out.read_text()
    assert "95.24%" in page and "accuracy (top-1) on 10,000 images" in page and "measured on cifar10 test" in page
    assert "884 of 1,000" in page and "Confusion" in page and "perfect calibration" in page  # cats
    assert "no class for: rocket, astronaut, coffee, photographer, galaxies" in page
    assert "predicted cat, 94%" in page and "<b>cat</b>" not in page


def test_a_run_has_its_curves_too(tmp_path: Path) -> None:
    small = ["--set", "schedule.epochs=2", "--set", "model.options.depth=1", "--set", "data.limit=96", "--no-report", "--quiet"]
    small += ["--set", "data.holdout=0.2"]  # the page is about these, not about the test images
    done = CliRunner().invoke(cli.app, ["train", "digits", "--out", str(tmp_path / "run"), "--device", "cpu", *small])
    assert done.exit_code == 0, done.output
    out = tmp_path / "page.html"
    said = CliRunner().invoke(cli.app, ["report", str(tmp_path / "run"), "--out", str(out), "--limit", "40", "--device", "cpu"])
    assert said.exit_code == 0, said.output
    page = out.read_text()
    assert "40 of 28" in page and "digits test" not in page
    assert page.index("Learning") < page.index("Predictions and") < page.index("Settings and versions</h2>")
