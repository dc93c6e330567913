"""`dmst classify`: the classes of a network for any photo, and pictures of what it computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from dmst import cli, create_model
from dmst.analysis.membership import ends, fit, gradient_map, overlay, picture, sheet
from dmst.data import catalog
from dmst.engine.classify import classify, photos_in
from dmst.errors import DmstError, NonFiniteError, OptionError
from dmst.models import load_model, save_model


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten digits as PNG files, enlarged as a photo is larger than what the network reads."""
    folder = tmp_path_factory.mktemp("photos")
    digits = catalog.open_set("digits", "test")
    for label in range(10):
        index = int(np.flatnonzero(digits.labels == label)[0])
        Image.fromarray(digits.read(index)[:, :, 0].repeat(4, 0).repeat(4, 1)).save(folder / f"{label}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_digits_are_read(photos: Path) -> None:
    model = create_model("dmst_digits", pretrained=True)
    answers = list(classify(model, photos_in([str(photos)]), top=3))
    assert [answer.path.name for answer in answers] == [f"{i}.png" for i in range(10)]
    assert sum(answer.top[0][0] == answer.path.stem for answer in answers) >= 9
    for answer in answers:
        shares = [p for _, p in answer.top]
        assert len(shares) == 3 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1 and answer.trace is None


def test_the_answer_is_that_of_the_network(photos: Path) -> None:
    model = create_model("dmst_digits", pretrained=True)
    (answer,) = classify(model, [photos / "7.png"], top=10, traced=True)
    assert answer.image is not None and answer.trace is not None
    with torch.no_grad():
        shares = model(answer.image)[0].softmax(-1)
        membership = model.trace(answer.image).layers[-1].parts.membership
    assert {name: pytest.approx(shares[int(name)].item(), abs=1e-5) for name, _ in answer.top} == dict(answer.top)
    assert torch.equal(answer.trace.layers[-1].parts.membership, membership)


def test_what_cannot_be_read_costs_itself_alone(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes((photos / "1.png").read_bytes()[:-30])
    said = CliRunner().invoke(
        cli.app, ["classify", str(tmp_path / "broken.png"), str(photos / "2.png"), "--weights", "dmst_digits", "--json"]
    )
    first, second = (json.loads(line) for line in said.stdout.splitlines())
    assert said.exit_code == 1 and "broken.png" in first["problem"] and second["top"][0]["class"] == "2"
    for words, message in (
        ([""], "name is empty"),
        ([str(tmp_path / "nothing.png")], "does not exist"),
        ([str(tmp_path / "folder")], "has no images"),
    ):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(OptionError, match=message):
            photos_in(words)


def test_pictures_of_maps(photos: Path, tmp_path: Path) -> None:
    asked = ["classify", str(photos), "--weights", "dmst_digits", "--maps", str(tmp_path / "maps"), "--top", "1"]
    said = CliRunner().invoke(cli.app, asked)
    assert said.exit_code == 0 and len(said.output.splitlines()) == 10 and "maps/3.png.png" in said.output
    model = create_model("dmst_digits", pretrained=True)
    (answer,) = classify(model, [photos / "3.png"], traced=True)
    assert answer.trace is not None and answer.image is not None
    drawn = np.asarray(Image.open(tmp_path / "maps/3.png.png"))
    heads = sheet(answer.trace, answer.image)
    assert np.array_equal(drawn[:, : heads.shape[1]], heads)
    gradient = gradient_map(model, answer.image)[0]
    last = overlay(fit(picture(answer.image[0]), 160), gradient, *ends(gradient, "gradient"))
    assert drawn.shape[1] == heads.shape[1] + 6 + 160 and np.array_equal(drawn[:160, -160:], last)
    (tmp_path / "3.png").write_bytes((photos / "8.png").read_bytes())  # another photo of the same name
    said = CliRunner().invoke(cli.app, ["classify", str(photos / "3.png"), str(tmp_path / "3.png"), *asked[2:]])
    assert said.exit_code == 0 and {path.name for path in (tmp_path / "maps").glob("3*")} == {
        "3.png.png",
        "3.png-1.png",
        "3.png-2.png",
    }


def test_bad_requests_say_what_to_do(photos: Path, tmp_path: Path) -> None:
    photo = str(photos / "1.png")
    (tmp_path / "taken").write_text("x")
    save_model(create_model("dmst_digits", num_classes=0), tmp_path / "headless")
    for words, message in (
        (["--weights", "dmst_digits", "--device", "cuda:77"], "cuda"),
        (["--weights", "dmst_digits", "--device", "foo"], "foo"),
        (["--weights", "dmst_digits", "--maps", str(tmp_path / "taken")], "could not be written"),
        (["--weights", str(tmp_path / "headless")], "has no classifier"),
        (["--weights", str(tmp_path / "nowhere")], "weights that ship (dmst_cifar10"),
    ):
        said = CliRunner().invoke(cli.app, ["classify", photo, *words])
        assert isinstance(said.exception, DmstError) and message in str(said.exception), words


def test_an_answer_that_is_not_finite_is_an_error(photos: Path, tmp_path: Path) -> None:
    model = create_model("dmst_digits", pretrained=True)
    with torch.no_grad():
        model.norm.weight.fill_(3e38)  # finite, and what comes of it is not
    save_model(model, tmp_path / "bad")
    for more in ([], ["--json"], ["--maps", str(tmp_path / "maps")]):
        said = CliRunner().invoke(cli.app, ["classify", str(photos / "1.png"), "--weights", str(tmp_path / "bad"), *more])
        assert said.exit_code != 0 and isinstance(said.exception, NonFiniteError) and not said.stdout
        assert "dmst_digits answers 1.png with NaN or infinity" in str(said.exception).replace(f"{photos}/", "")
        assert "other weights" in str(said.exception)


def test_a_folder_is_meant_before_a_name(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(create_model("dmst_digits", num_classes=3), tmp_path / "dmst_digits")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli.app, ["classify", str(photos / "1.png"), "--weights", "dmst_digits", "--json"])
    assert len(json.loads(said.stdout)["top"]) == 3


def test_networks_of_ones_own_keep_their_names(photos: Path, tmp_path: Path) -> None:
    model = create_model("dmst_digits", num_classes=2)
    save_model(model, tmp_path / "plain")
    model.class_names = ("cat", "dög")
    save_model(model, tmp_path / "named")
    assert load_model(tmp_path / "named").class_names == ("cat", "dög") and load_model(tmp_path / "plain").class_names == ()
    for folder, names in (("named", {"cat", "dög"}), ("plain", {"class 0", "class 1"})):
        said = CliRunner().invoke(cli.app, ["classify", str(photos / "1.png"), "--weights", str(tmp_path / folder), "--json"])
        assert {each["class"] for each in json.loads(said.stdout)["top"]} == names
    for wrong in (("one",), ("cat", 3), "ab"):
        model.class_names = wrong  # type: ignore[assignment]
        with pytest.raises(OptionError, match="must be a tuple of 2 names"):
            save_model(model, tmp_path / "wrong")
