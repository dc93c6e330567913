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

from dmst.analysis.membership import colour, ends, fit, layers_sheet, overlay, picture
from dmst.cli import app
from dmst.engine.prepare import read_weights
from dmst.engine.samples import sample
from dmst.models import Trace, VisionModel

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
