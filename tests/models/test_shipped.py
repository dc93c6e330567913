"""Weights that ship: the released bytes, the stored answers, what create_model makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import ship
from dmst import cli, create_model
from dmst.calibration import calibration
from dmst.engine import prepare
from dmst.errors import BadFileError, OptionError
from dmst.explorer.session import Session
from dmst.models import load_model, save_model, shipped
from dmst.operators.orthonormal import is_orthonormal
from dmst.photos import photo
from tests.forged import forge, put

LARGEST, ALL = 12_000_000, 30_000_000
every = pytest.mark.parametrize("name", list(shipped.SHIPPED))


@every
def test_they_answer_as_stored(name: str) -> None:
    assert shipped.verify(name) <= shipped.NEAR
    stored = shipped.answers(name)
    size = stored["images"].shape[1:]
    assert torch.allclose(stored["images"], ship.drawn(*size), atol=1e-5)  # by the formula, not from any data
    assert stored["logits"].std() > 0.1 and len(stored["images"]) == 8


@every
def test_they_are_small_and_their_card_says_what_was_measured(name: str) -> None:
    folder, found, card = shipped.FOLDER / name, shipped.measurement(name), shipped.card(name)
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors", "config.json", "card.md", "answers.safetensors", "measured.json",
    }  # fmt: skip
    assert (folder / "model.safetensors").stat().st_size <= LARGEST
    model = load_model(folder)
    assert next(model.parameters()).dtype == torch.float16 and model.config.name == name
    assert f"Measured on {found.data} ({found.images:,} images)" in card and f"top-1 {found.top1:.2%}" in card
    assert f"calibration error {found.error:.4f}" in card and found.right5 >= found.confusion.diagonal().sum()
    assert "parameters" in card and "Licence" in card
    for label, right, of in zip(model.class_names, found.confusion.diagonal(), found.confusion.sum(1), strict=True):
        assert f"| {label} | {right} | {of} |" in card


def test_all_of_them_are_small_and_listed() -> None:
    assert {path.name for path in shipped.FOLDER.iterdir() if path.is_dir()} == set(shipped.SHIPPED)
    assert sum(path.stat().st_size for path in shipped.FOLDER.rglob("*") if path.is_file()) <= ALL


def test_create_model_takes_them() -> None:
    model = create_model("dmst_digits", pretrained=True)
    assert not model.training and next(model.parameters()).dtype == torch.float32
    assert model.class_names == tuple("0123456789")
    stored = shipped.answers("dmst_digits")
    with torch.no_grad():
        assert (model(stored["images"]) - stored["logits"]).abs().max() < 1e-3
    assert next(create_model("dmst_digits", pretrained=True, dtype=torch.float64).parameters()).dtype == torch.float64
    other = create_model("dmst_digits", pretrained=True, num_classes=3)
    assert other(stored["images"]).shape == (8, 3) and not other.class_names
    assert [other.pretrained_cfg[key] for key in ("mean", "std")] == [model.pretrained_cfg[key] for key in ("mean", "std")]
    assert torch.equal(other.blocks[0].operator.subspace.weight, model.blocks[0].operator.subspace.weight)
    with pytest.raises(
        OptionError, match=r"weights dmst_digits, which are of another network: operator 'dmsa' \(here 'tssa'\)"
    ):
        create_model("dmst_digits", pretrained=True, operator="tssa")
    with pytest.raises(OptionError, match=r"no weights ship for dmst_small_patch16_224\. Those that do: .*dmst_digits"):
        create_model("dmst_small", pretrained=True)


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a whole saved model in their place, or other names of the classes."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    folder = shutil.copytree(Path(shipped.__file__).parents[1] / "weights/dmst_digits", tmp_path / "dmst_digits")
    shipped.pretrained("dmst_digits")
    forge(folder, change=put("label_names", value=list("9876543210")))
    assert load_model(folder).class_names[0] == "9"  # a whole saved model, but not ours
    with pytest.raises(BadFileError, match="not hold the files that were released"):
        shipped.pretrained("dmst_digits")
    for path in save_model(create_model("dmst_digits"), tmp_path / "other").iterdir():
        shutil.copy(path, folder / path.name)
    with pytest.raises(BadFileError, match="not hold the files that were released"):
        shipped.pretrained("dmst_digits")
    monkeypatch.setitem(shipped.SHIPPED, "dmst_digits", shipped.digest(folder))
    with pytest.raises(BadFileError, match="off what was stored"):
        shipped.verify("dmst_digits")
    (folder / "config.json").unlink()
    with pytest.raises(BadFileError, match=r"config.json cannot be read"):
        shipped.pretrained("dmst_digits")


def test_the_stated_accuracy_is_that_of_the_weights() -> None:
    from dmst.data import catalog

    found, loss = ship.measure(shipped.pretrained("dmst_digits"), catalog.open_set("digits", "test"))
    assert f"mean cross-entropy {loss:.4f}" in shipped.card("dmst_digits")
    stored = shipped.measurement("dmst_digits")
    assert torch.equal(found.confusion, stored.confusion) and found.error == pytest.approx(stored.error, abs=1e-4)


def test_they_load_by_every_documented_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """create_model, classify, evaluate, explore, --init-from; timm: test_timm.py."""
    monkeypatch.setattr("os.fsync", lambda handle: None)

    def dmst(*words: object) -> str:
        said = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
        assert said.exit_code == 0, said.output
        return said.output

    name, data = "dmst_digits", "digits"
    model = create_model(name, pretrained=True)
    classes = model.class_names
    told = json.loads(dmst("classify", photo("cat"), "--weights", name, "--top", 1, "--json"))
    assert told["top"][0]["class"] in classes
    evaluated = json.loads(dmst("evaluate", name, "--data", data, "--device", "cpu", "--json"))
    assert evaluated["images"] == 359 and set(evaluated["by_class"]) == set(classes)
    session = Session([name])
    session.networks["m0"].load()
    looked = session.network("m0").look(session.picture("e0"), {})
    assert looked["top"][0]["class"] in classes and len(looked["layers"]) == model.config.depth
    words = ["--init-from", name, "--epochs", 1, "--batch", 4, "--set", "data.limit=4", "--no-report", "--quiet"]
    dmst("train", "--data", data, "--out", tmp_path / "run", "--device", "cpu", *words)
    tuned = load_model(tmp_path / "run/final")
    assert tuned.config.operator == model.config.operator and tuned.class_names == classes


def test_calibration_by_hand() -> None:
    """Two images at 3/4 of which one is right, two at 1/2 (of two classes) that are both right."""
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 1.0], [1.0, 1.0]]).log()
    right = torch.tensor([True, False, True, True])
    assert calibration(logits.softmax(1).amax(1), right)[0] == pytest.approx((2 * abs(0.5 - 0.75) + 2 * abs(1 - 0.5)) / 4)


def test_a_saved_model_is_made_ready_to_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 leaves the manifold; whoever reads the weights gets the orthonormal matrix that is used, made once."""
    save_model(create_model("dmst_digits", mode="proximal"), tmp_path / "trained")
    digest = ship.ship(tmp_path / "trained", "dmst_digits", "digits", tmp_path / "out", notes=["How it was made."])
    folder = tmp_path / "out/dmst_digits"
    assert load_model(folder).class_names == tuple("0123456789") and digest == shipped.digest(folder)
    assert "How it was made." in (folder / "card.md").read_text()
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "out")
    monkeypatch.setitem(shipped.SHIPPED, "dmst_digits", digest)
    assert not is_orthonormal(load_model(folder).float().blocks[0].operator.subspace.weight)
    for model in (shipped.pretrained("dmst_digits"), prepare.read_weights(folder)):
        assert is_orthonormal(model.blocks[0].operator.subspace.weight) and not model.training
    assert shipped.verify("dmst_digits") == 0


def test_a_missing_folder_is_told_with_the_names_that_ship() -> None:
    with pytest.raises(BadFileError, match=r"dmst_digit is not there: .*weights that ship \(.*dmst_digits"):
        prepare.read_weights("dmst_digit")


@pytest.mark.slow  # verifies every set of weights that ships
def test_the_command() -> None:
    said = CliRunner().invoke(cli.app, ["models", "--verify"])
    assert said.exit_code == 0
    assert [line.split(": ")[0] for line in said.output.splitlines()[:-1]] == list(shipped.SHIPPED)
    assert all("answers within " in line for line in said.output.splitlines()[:-1])
    assert "dmst_digits: Measured on digits test" in CliRunner().invoke(cli.app, ["models", "--shipped"]).output
    assert CliRunner().invoke(cli.app, ["models", "--card", "tost_cifar10"]).output.startswith("# tost_cifar10")
    with pytest.raises(OptionError, match="no weights ship for nothing"):
        CliRunner().invoke(cli.app, ["models", "--card", "nothing"], catch_exceptions=False)
    rows = CliRunner().invoke(cli.app, ["models"]).output.splitlines()
    assert {row.split()[0] for row in rows[1:-1] if row.endswith(" *")} == set(shipped.SHIPPED)
