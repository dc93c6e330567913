"""`dmst analyze maps`: every tile is the tensor of the trace, cell for cell."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from dmst.analysis import groups as grouping
from dmst.analysis.intervene import groups_off, switched_off
from dmst.analysis.membership import (
    MISSING,
    PALETTE,
    colour,
    drawn,
    ends,
    fit,
    groups,
    layers_sheet,
    maps,
    overlay,
    picture,
    segmentation,
    sheet,
)
from dmst.cli import app
from dmst.engine.prepare import read_weights
from dmst.engine.samples import sample
from dmst.errors import OptionError
from dmst.models import Trace, VisionModel, save_model
from tests import networks

GAP, LINE = 6, 16


def traced() -> tuple[VisionModel, Trace, torch.Tensor]:
    model = read_weights("dmst_digits")
    images = torch.cat([batch for batch, _ in sample(model, limit=3)])
    with torch.no_grad():
        return model, model.trace(images), images


def tile(page: np.ndarray, row: int, column: int, side: int) -> np.ndarray:
    top, left = row * (side + LINE + GAP), column * (side + GAP)
    return page[top : top + side, left : left + side]


def test_every_tile_is_the_membership_of_the_trace() -> None:
    _, trace, images = traced()
    page = layers_sheet(trace, images[1], 1, size=64)
    plain = fit(picture(images[1]), 64)
    assert page.shape == (4 * (64 + LINE + GAP) - GAP, 5 * (64 + GAP) - GAP, 3)
    silent = 0
    for number, layer in enumerate(trace.layers):
        assert np.array_equal(tile(page, number, 0, 64), plain)
        assert layer.parts.gate is not None and layer.parts.membership is not None
        for head in range(4):
            drawn = tile(page, number, head + 1, 64)
            if layer.parts.gate[1, head] == 0:
                silent += 1
                assert (drawn[..., 0] == drawn[..., 2]).all()  # grey: no colour of the ramp
            else:
                cells = layer.parts.membership[1, head].view(8, 8)
                assert np.array_equal(drawn, overlay(plain, cells))
                assert not np.array_equal(drawn, overlay(plain, layer.parts.membership[0, head].view(8, 8)))
    assert 0 < silent < 16
    one = layers_sheet(trace, images[1], 1, layers=[-1], size=64)
    assert np.array_equal(tile(one, 0, 2, 64), tile(page, 3, 2, 64))


def test_softmax_attention_shows_what_the_patches_receive(tmp_path: Path) -> None:
    model = read_weights("vit_cifar10")
    images = torch.cat([batch for batch, _ in sample(model, limit=2)])[:2]
    with torch.no_grad():
        trace = model.trace(images)
    page, plain = layers_sheet(trace, images[1], 1, layers=[0, -1], size=64), fit(picture(images[1]), 64)
    for row, number in enumerate((0, 8)):
        attention = trace.layers[number].parts.attention
        assert attention is not None
        received = attention[1].mean(1).view(8, 8, 8)  # over the patches that look
        for head in range(8):
            assert np.array_equal(tile(page, row, head + 1, 64), overlay(plain, received[head], 0.0, received.max().item()))
    asked = ["analyze", "maps", "--weights", "vit_cifar10", "--limit", "1", "--layer", "0", "--out", str(tmp_path)]
    (told,) = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["layers"]
    assert told["shown"] == "attention received" and told["gate"] is None
    assert told["highest"] == pytest.approx(trace.layers[0].parts.attention[0].mean(1).amax(-1).tolist(), rel=1e-5)
    assert "No memberships" in CliRunner().invoke(app, asked).output


def test_colour_is_the_map_s_alone_and_every_patch_a_square() -> None:
    red = np.zeros((12, 12, 3), np.uint8)
    red[..., 0] = 200
    values = torch.tensor([[0.0, 1.0], [0.5, 0.2]])
    drawn = overlay(red, values)
    wanted = np.round(0.4 * round(0.299 * 200) + 0.6 * colour(values)).astype(np.uint8)
    assert np.array_equal(drawn, wanted.repeat(6, 0).repeat(6, 1))
    assert (overlay(red, values, strength=0.0) == round(0.299 * 200)).all()


@pytest.mark.parametrize(
    ("values", "what", "wanted"),
    [
        ([0.2, 0.4], "membership", (0, 1)),
        ([0.2, 2.5], "membership", (0, 2.5)),
        ([0.2, 0.4], "attention received", (0, 0.4)),
        ([-0.75, 0.5], "gradient", (-0.75, 0.75)),
        ([torch.nan, torch.inf], "membership", (0, 1)),
        ([0.0, 0.0], "gradient", (-1, 1)),
    ],
)
def test_what_the_ends_of_the_colours_stand_for(values: list[float], what: str, wanted: tuple[float, float]) -> None:
    assert ends(torch.tensor(values), what) == pytest.approx(wanted)


def test_the_command_draws_what_was_traced(tmp_path: Path) -> None:
    run = CliRunner().invoke(
        app, ["analyze", "maps", "--weights", "dmst_digits", "--out", str(tmp_path), "--limit", "3", "--json"]
    )
    assert run.exit_code == 0, run.output
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    model, trace, images = traced()
    assert [Path(line["picture"]).name for line in lines] == ["000.png", "001.png", "002.png"]
    for i, line in enumerate(lines):
        drawn = np.asarray(Image.open(io.BytesIO(Path(line["picture"]).read_bytes())))
        assert np.array_equal(drawn, layers_sheet(trace, images[i], i))
        assert line["answer"] == model.class_names[int(trace.logits[i].argmax())]
        for number, told in enumerate(line["layers"]):
            parts = trace.layers[number].parts
            assert parts.gate is not None and parts.membership is not None
            assert told["gate"] == pytest.approx(parts.gate[i].tolist())
            assert told["highest"] == pytest.approx(parts.membership[i].amax(-1).tolist())
            assert told["lowest"] == pytest.approx(parts.membership[i].amin(-1).tolist())


def test_the_command_takes_photos_and_a_layer(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.linear_gradient("L").save(tmp_path / name)
    out = tmp_path / "maps"
    run = CliRunner().invoke(
        app, ["analyze", "maps", str(tmp_path), "--layer", "-1", "--out", str(out), "--weights", "dmst_digits"]
    )
    assert run.exit_code == 0, run.output
    assert sorted(path.name for path in out.iterdir()) == ["000-a.png", "001-b.png"]
    assert np.asarray(Image.open(out / "000-a.png")).shape[0] == 160 + LINE  # one layer
    assert "2 photos: 2 pictures" in run.output
    for wrong, word in (("last", "a whole number, or all"), ("9", "layers 0 to 8")):
        run = CliRunner().invoke(app, ["analyze", "maps", "--layer", wrong, "--out", str(out)])
        assert run.exit_code and word in str(run.exception)


# --- groups --------------------------------------------------------------------------------------------------------------


def grouped(**options: object) -> tuple[VisionModel, Trace, torch.Tensor]:
    model, images = (
        networks.build(("gmst_tiny", {"groups": 4, "img_size": (64, 96), **options})).eval(),
        networks.images((64, 96)),
    )
    with torch.no_grad():
        return model, model.trace(images), images


@pytest.mark.parametrize("options", [{}, {"readout": "token"}], ids=["patches", "class token"])
def test_every_patch_has_the_colour_of_its_group(options: dict[str, str]) -> None:
    model, trace, images = grouped(**options)
    page, plain = layers_sheet(trace, images[1], 1, size=96), fit(picture(images[1]), 96)
    height, width = plain.shape[:2]
    assert trace.prefix == len(options)
    for layer, traced in enumerate(trace.layers):
        belongs = model.blocks[layer].operator.decompose(traced.normed, grid=(4, 6)).membership[..., trace.prefix :]
        strength, group = belongs.max(2)
        what, values = drawn(trace, layer)
        assert what == "group membership" and torch.equal(values, maps(trace, layer))
        assert torch.equal(values, strength.unflatten(-1, (4, 6)).float())
        assert torch.equal(groups(trace, layer), group.unflatten(-1, (4, 6)))
        for head in range(3):
            seen, cells = group[1, head].view(4, 6), strength[1, head].view(4, 6)
            top, left = layer * (height + LINE + GAP), (head + 1) * (width + GAP)
            tile = page[top : top + height, left : left + width]
            assert np.array_equal(tile, segmentation(plain, seen, cells))
            opacity = 0.6 * (0.7 + 0.3 * cells[3, 5].item())
            corner = (1 - opacity) * (plain[-1, -1] @ [0.299, 0.587, 0.114]).round() + opacity * PALETTE[seen[3, 5]].astype(
                float
            )
            assert abs(tile[-1, -1] - corner).max() <= 0.5
    assert np.array_equal(
        sheet(trace, images[:1], size=96)[:height], layers_sheet(trace, images[0], layers=[-1], size=96)[:height]
    )


def test_groups_beyond_the_colours_begin_again_and_what_is_no_number_shows() -> None:
    grey = np.full((2, 3, 3), 100, np.uint8)
    drawn = segmentation(
        grey, torch.tensor([[0, 1, 16], [17, 2, 3]]), torch.tensor([[1.0, 1, 1], [1, torch.nan, 0]]), strength=1.0
    )
    assert np.array_equal(drawn[0, 0], drawn[0, 2]) and np.array_equal(drawn[0, 1], drawn[1, 0])
    assert np.array_equal(drawn[0, 0], PALETTE[0]) and np.array_equal(drawn[1, 1], MISSING)
    assert np.array_equal(drawn[1, 2], np.round(30 + 0.7 * PALETTE[3]))


# what is seen without one kind of cones, in linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)
WITHOUT = {
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "middle": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize(("cones", "least"), [("none", 26), ("long", 16), ("middle", 16), ("short", 12)])
def test_no_two_groups_look_alike(cones: str, least: float) -> None:
    """Over a grey of one half, in CIELAB; 2.3 is what the eye can just tell apart."""
    mixed = 0.6 * PALETTE / 255 + 0.2
    linear = np.where(mixed <= 0.04045, mixed / 12.92, ((mixed + 0.055) / 1.055) ** 2.4) @ np.array(WITHOUT[cones]).T
    to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    x, y, z = np.cbrt(linear.clip(0.001, 1) @ to_xyz.T / to_xyz.sum(1)).T
    lab = np.stack([116 * y, 500 * (x - y), 200 * (y - z)], -1)
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1)[np.triu_indices(16, 1)]
    assert apart.min() > least


@pytest.mark.parametrize("options", [{}, {"readout": "token", "mode": "proximal"}], ids=["listing", "proximal"])
@torch.no_grad()
def test_mass_nearest_patches_and_pull_of_groups(options: dict[str, str]) -> None:
    model, trace, _ = grouped(**options)
    operator, (_, z, parts, *_) = model.blocks[1].operator, trace.layers[1]
    n = 24 + trace.prefix
    mass, nearest, pull = grouping.mass(trace, 1), grouping.nearest(trace, 1, 3), grouping.pull(model, trace, 1)
    assert mass.shape == (5, 3, 4) and (mass.sum(-1) - n).abs().max() < 1e-9
    assert torch.equal(mass, parts.membership.sum(-1))
    away = (parts.projected[:, :, None, trace.prefix :] - parts.means[:, :, :, None]).norm(dim=-1)
    assert torch.equal(nearest, away.argsort(-1)[..., :3])
    assert grouping.nearest(trace, 1, 99).shape == (5, 3, 4, 24)
    assert pull.shape == (5, 3, 4, 6) and pull.min() > 0
    for head in range(3):  # the update of one head is what the output has with the other heads off, through W_out
        with switched_off(model, {1: [k for k in range(3) if k != head]}):
            assert (grouping.pull(model, trace, 1)[:, head] - pull[:, head]).abs().max() < 1e-12
            alone = operator(z, grid=(4, 6)) - (0 if operator.out is None else operator.out.bias)
        weight = operator.subspaces()[head] if operator.out is None else operator.out.weight[:, 8 * head : 8 * head + 8]
        update = torch.linalg.lstsq(weight.expand(5, -1, -1), alone.mT).solution  # (b, p, n)
        assert (update.norm(dim=1)[:, trace.prefix :] - pull[:, head].flatten(1)).abs().max() < 1e-9
    with groups_off(model, {1: {0: range(4)}}):
        assert not grouping.pull(model, trace, 1)[:, 0].any()
    assert torch.equal(grouping.pull(model, trace), pull)


def test_heads_without_groups_have_none() -> None:
    model, trace, _ = traced()
    assert groups(trace) is None
    for ask in (lambda: grouping.mass(trace), lambda: grouping.nearest(trace), lambda: grouping.pull(model, trace)):
        with pytest.raises(OptionError, match="no groups"):
            ask()


def test_the_command_draws_groups(tmp_path: Path) -> None:
    model = networks.build(("gmst_tiny", {"groups": 4, "img_size": 64}), dtype=torch.float32)
    Image.linear_gradient("L").save(tmp_path / "photo.png")
    asked = ["analyze", "maps", str(tmp_path / "photo.png"), "--weights", str(save_model(model, tmp_path / "model"))]
    run = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "maps")])
    assert run.exit_code == 0, run.output
    assert "one per group" in run.output
    assert np.asarray(Image.open(tmp_path / "maps" / "000-photo.png")).shape == (
        2 * (128 + LINE + GAP) - GAP,
        4 * (128 + GAP) - GAP,
        3,
    )
    told = json.loads(CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "maps"), "--json"]).stdout)
    assert [layer["shown"] for layer in told["layers"]] == ["group membership"] * 2
    assert all(
        0.25 <= least <= most <= 1 for x in told["layers"] for least, most in zip(x["lowest"], x["highest"], strict=True)
    )
