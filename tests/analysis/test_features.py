"""Pictures of features: the components are those of a singular value decomposition, and every square has its patch's colour."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from dmst.analysis.features import components, features_sheet, layer_components
from dmst.analysis.membership import fit, picture
from dmst.cli import app
from dmst.errors import OptionError
from dmst.models import save_model
from tests import networks
from tests.analysed import analyze


def by_svd(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Scores on three axes, up to a sign each, and the share of the variance that each axis holds."""
    tokens = rearrange(maps, "b d h w -> (b h w) d")
    u, s, _ = torch.linalg.svd(tokens - tokens.mean(0), full_matrices=False)
    return rearrange((u * s)[:, :3], "(b h w) c -> b c h w", b=len(maps), h=maps.shape[2]), (s.square() / s.square().sum())[:3]


@pytest.mark.parametrize("case", [("dmst_tiny", {}), ("vit_tiny", {}), ("gmst_tiny", {"groups": 2})], ids=networks.label)
def test_components_are_those_of_an_svd_over_all_images(case: networks.Case) -> None:
    model, images = networks.build(case).eval(), networks.images()
    found = layer_components(model, [images[:2], images[2:]], [-1, 0])
    assert list(found) == [0, 1]
    with torch.no_grad():
        right = model.forward_intermediates(images, [0, 1], intermediates_only=True)
    for layer, maps in enumerate(right):
        values, share = by_svd(maps)
        assert found[layer].share == pytest.approx(share.sum().item(), abs=1e-9)
        for axis in range(3):
            mine, theirs = found[layer].values[:, axis], values[:, axis]
            assert min((mine - theirs).abs().max(), (mine + theirs).abs().max()) < 1e-7, (layer, axis)
        assert found[layer].values.shape == (5, 3, 2, 3)


def test_known_features_have_known_colours() -> None:
    """One direction with values -1 and 1, another half as wide: red tells them apart, green the other, blue nothing."""
    maps = torch.zeros(1, 5, 2, 2)
    maps[0, 3] = torch.tensor([[-1.0, -1], [1, 1]])
    maps[0, 1] = torch.tensor([[0.5, -0.5], [0.5, -0.5]])
    found = components(maps)
    assert torch.equal(found.variance, torch.tensor([1, 0.25, 0], dtype=torch.float64)) and found.share == 1
    assert torch.equal(found.colours[0, 0], torch.tensor([[0.25, 0.25], [0.75, 0.75]], dtype=torch.float64))
    assert torch.equal(found.colours[0, 1], torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=torch.float64))
    assert (found.colours[0, 2] == 0.5).all()


@pytest.mark.parametrize("width", [1, 2, 7])
def test_patches_that_are_all_alike_are_grey(width: int) -> None:
    found = components(torch.full((2, width, 3, 2), 0.1))
    assert found.share == 0 and (found.colours == 0.5).all() and found.colours.shape == (2, 3, 3, 2)


def test_every_square_of_a_picture_has_the_colour_of_its_patch() -> None:
    model, images = networks.build(("vit_tiny", {})).eval(), networks.images()
    found = layer_components(model, images)
    page, plain = features_sheet(images[3], found, 3, size=96), fit(picture(images[3]), 96)
    height, width = plain.shape[:2]
    assert np.array_equal(page[:height, :width], plain)
    for layer, each in found.items():
        tile = page[:height, (layer + 1) * (width + 6) :][:, :width]
        for row in range(2):
            for column in range(3):
                square = tile[row * height // 2 : (row + 1) * height // 2, column * width // 3 : (column + 1) * width // 3]
                assert abs(square - 255 * each.colours[3, :, row, column].numpy()).max() <= 0.5


def test_the_command_draws_photos_at_another_size(tmp_path: Path) -> None:
    model = save_model(networks.build(("gmst_tiny", {"groups": 4, "img_size": 64}), dtype=torch.float32), tmp_path / "model")
    Image.linear_gradient("L").save(tmp_path / "a.png")
    Image.radial_gradient("L").save(tmp_path / "b.png")
    asked = ["features", str(tmp_path / "a.png"), str(tmp_path / "b.png"), "--weights", str(model), "--size", "128"]
    told = analyze(*asked, "--out", str(tmp_path / "out"), "--json").splitlines()
    assert [Path(json.loads(line)["picture"]).name for line in told] == ["000-a.png", "001-b.png"]
    for layer in json.loads(told[1])["layers"]:
        assert len(layer["share"]) == 3 and 0 < sum(layer["share"]) <= 1
    assert np.asarray(Image.open(tmp_path / "out/001-b.png")).shape == (128 + 16, 3 * (128 + 6) - 6, 3)
    assert "2 photos: 2 pictures" in analyze(*asked, "--out", str(tmp_path / "out"), "--layer", "-1")
    assert np.asarray(Image.open(tmp_path / "out/000-a.png")).shape == (128 + 16, 2 * (128 + 6) - 6, 3)
    for wrong, word in (
        (["--size", "100"], "multiple of 16"),
        (["--layer", "2"], "layers 0 to 1"),
        (["--layer", "x"], "or all"),
    ):
        run = CliRunner().invoke(app, ["analyze", *asked, *wrong])
        assert isinstance(run.exception, OptionError) and word in str(run.exception)
