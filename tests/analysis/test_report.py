"""Maps, charts and the page: exactly what was computed, everything inside one file, nothing asked from outside."""

from __future__ import annotations

import io
import itertools
import math
import re
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dmst import create_model
from dmst.analysis import membership, report
from dmst.analysis.charts import Line, round_ticks
from dmst.analysis.membership import RAMP, colour, enlarge, gate_by_class, lay_out, maps, overlay, picture, png, sheet
from dmst.errors import OptionError, SaveError
from tests.pages import check_page

# --- maps --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_map_is_the_membership_itself() -> None:
    model = create_model("dmst_digits", dim=16, depth=2).eval()
    trace = model.trace(torch.randn(2, 1, 4, 12))
    drawn = maps(trace, -1)
    assert drawn.shape == (2, 4, 4, 12)
    part = trace.layers[1].parts.membership
    for row, column in ((0, 0), (2, 7), (3, 11)):
        assert torch.equal(drawn[:, :, row, column], part[:, :, row * 12 + column])


@torch.no_grad()
def test_a_map_leaves_the_class_token_out() -> None:
    model = create_model("vit_tiny", operator="dmsa", dim=16, depth=1, num_heads=2, img_size=32, in_chans=1).eval()
    trace = model.trace(torch.randn(1, 1, 32, 48))
    assert trace.prefix == 1
    assert torch.equal(maps(trace, 0).flatten(2), trace.layers[0].parts.membership[..., 1:])


@torch.no_grad()
def test_what_was_not_computed_is_not_drawn() -> None:
    trace = create_model("vit_digits", dim=16, depth=1).eval().trace(torch.randn(1, 1, 8, 8))
    with pytest.raises(OptionError, match="no memberships"):
        maps(trace, 0)
    with pytest.raises(OptionError, match="layers 0 to 0"):
        maps(trace, 1)


def test_colours() -> None:
    drawn = colour(torch.tensor([[0.0, 1.0, 0.5, -3.0, 9.0]]))
    assert drawn.dtype == np.uint8
    assert tuple(drawn[0, 0]) == tuple(drawn[0, 3]) == tuple(RAMP[0].astype(int))
    assert tuple(drawn[0, 1]) == tuple(drawn[0, 4]) == tuple(RAMP[-1].astype(int))
    grey = colour(torch.linspace(0, 1, 50)[None])[0].astype(float) @ [0.299, 0.587, 0.114]
    assert (np.diff(grey) >= -0.5).all() and grey[-1] - grey[0] > 150  # brightness alone tells the order
    assert tuple(colour(torch.tensor([[2.0]]), 1.0, 3.0)[0, 0]) == tuple(drawn[0, 2])


def test_pictures_and_tiles() -> None:
    pixels = picture(torch.tensor([[[-1.0, 1.0], [0.0, 1.0]]]))
    assert pixels.shape == (2, 2, 3) and pixels[0, 0, 0] == 0 and pixels[0, 1, 2] == 255
    assert picture(torch.zeros(1, 2, 2)).max() == 0  # a constant image divides by nothing
    big = enlarge(pixels, 3)
    assert big.shape == (6, 6, 3) and (big[:3, :3] == pixels[0, 0]).all()
    page = lay_out([[(big, ""), (big, "")], [(big, "head 3")]], gap=2, line=16)
    assert page.shape == (46, 14, 3) and (page[6:24] == 255).all() and (page[24:30, :6] == big).all()
    assert (page[24:30, 8:] == 255).all() and page[30:].min() < 200  # ink under the tile
    assert (np.asarray(Image.open(io.BytesIO(png(page)))) == page).all()


@torch.no_grad()
def test_a_sheet_shows_every_head_and_which_are_silent() -> None:
    model = create_model("dmst_digits", dim=16, depth=1, num_heads=2).eval()
    images = torch.randn(3, 1, 8, 8)
    trace = model.trace(images)
    gate = trace.layers[0].parts.gate
    gate[1] = torch.tensor([1.0, 0.0])
    page = sheet(trace, images, size=16)
    assert page.shape == (3 * 32 + 2 * 6, 3 * 16 + 2 * 6, 3)
    plain = enlarge(picture(images[1]), 2)
    assert (page[38:54, :16] == plain).all()
    assert (page[38:54, 22:38] == overlay(plain, maps(trace)[1, 0])).all()
    silent = page[38:54, 44:60]
    assert (silent[..., 0] == silent[..., 2]).all() and silent.min() >= 178  # grey, faint, no membership in it


def test_gates_by_class() -> None:
    gates = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    found = gate_by_class(gates, torch.tensor([2, 2, 0]), 3)
    assert found[2].tolist() == [0.75, 0.25] and found[0].tolist() == [0.0, 1.0]
    assert found[1].isnan().all()


def test_what_is_missing_has_its_own_colour() -> None:
    drawn = colour(torch.tensor([[0.0, math.nan, 1.0]]))
    assert tuple(drawn[0, 1]) == membership.MISSING and tuple(drawn[0, 0]) == tuple(RAMP[0].astype(int))
    image = torch.tensor([[[0.0, math.nan], [math.inf, 1.0]]])
    assert picture(image)[..., 0].tolist() == [[0, 0], [255, 255]]


# --- charts ------------------------------------------------------------------------------------------------------------

parts = report.templates.get_template("parts.html").module


def chart(*lines: Line, **options: object) -> xml.etree.ElementTree.Element:
    """The SVG of a chart of x against y."""
    drawn = re.search(r"<svg.*?</svg>", parts.line_chart(lines, "x", "y", **options), re.DOTALL)
    assert drawn is not None and "nan" not in drawn[0] and "inf" not in drawn[0]
    return xml.etree.ElementTree.fromstring(drawn[0])


def said(drawn: xml.etree.ElementTree.Element) -> list[str]:
    return [dot.find("title").text for dot in drawn.findall("circle")]


def test_a_line_goes_through_its_points() -> None:
    """Placed to scale: the middle value lies in the middle, and every point says its number."""
    drawn = chart(Line("a<b", [1, 2, 3], [0.0, 5.0, 10.0], [0, 4, 9], [1, 6, 10]))
    xs, ys = ([float(dot.get(name)) for dot in drawn.findall("circle")] for name in ("cx", "cy"))
    assert ys[1] == pytest.approx((ys[0] + ys[2]) / 2, abs=0.1) and ys[0] > ys[2]
    assert xs[1] == pytest.approx((xs[0] + xs[2]) / 2, abs=0.1) and xs[0] < xs[2]
    assert said(drawn)[1] == "a<b, x 2: 5.00 (4.00 to 6.00)"
    assert len(drawn.find("polygon").get("points").split()) == 6


def test_a_gap_stays_a_gap_and_bands_belong_to_their_points() -> None:
    nan = math.nan
    drawn = chart(Line("a", [1, 2, 3, 4], [1.0, nan, 3.0, 4.0], [0.0, nan, 2.0, nan], [2.0, nan, 4.0, 5.0]))
    assert said(drawn) == ["a, x 1: 1.00 (0.00 to 2.00)", "a, x 3: 3.00 (2.00 to 4.00)", "a, x 4: 4.00"]
    assert len(drawn.findall("polyline")) == 2 and len(drawn.findall("polygon")) == 2
    for nothing in ([Line("a", [1], [nan])], []):
        assert "Nothing to draw" in parts.line_chart(nothing, "x", "y")


def test_a_range_widens_to_what_is_there() -> None:
    line = Line("a", [1, 2], [31.0, 90.0])
    places = [[dot.get("cy") for dot in chart(line, y_range=(low, 100)).findall("circle")] for low in (40, 31)]
    assert places[0] == places[1]


@pytest.mark.parametrize("y", [0.0, 1e300, 5e-324])
def test_any_constant_can_be_drawn(y: float) -> None:
    for xs, ys in (([1, 2], [y, y]), ([1], [y]), ([y], [1.0]), ([1, 2], [-y, y])):
        assert chart(Line("a", xs, ys)) is not None


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.93, 0.99), (-5, 1234), (1e-6, 2e-6), (1, 16)])
def test_ticks_are_round_and_cover(low: float, high: float) -> None:
    found = round_ticks(low, high)
    assert found[0] <= low + 1e-9 and found[-1] >= high - 1e-9 and 2 <= len(found) <= 12
    assert all(b > a for a, b in itertools.pairwise(found))
    assert all(x == int(x) for x in round_ticks(1, 16, whole=True))


def test_heat_maps() -> None:
    text = parts.heat_map([[0.0, 0.5], [1.0, math.nan]], ["<r>", "s"], ["a", "b"], [("g", 2)], "c")
    assert "&lt;r&gt;" in text and "<r>" not in text
    assert text.count('class="zero') == 2 and ">0<" in text and ">1.00<" in text and "--v:0.500" in text
    assert 'colspan="2"' in text


def test_columns_of_numbers_stand_to_the_right() -> None:
    text = parts.table(["name", "share"], [["1 <b>", "98.5 %"], ["two", "-3"]])
    assert "<td>1 &lt;b&gt;</td>" in text and text.count('<td class="number">') == 2 and '<th class="number">share' in text


# --- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template of our own: escaped, well formed, and replaced as a whole or not at all."""
    source = """{% extends "report.html" %}{% from "parts.html" import section, image, tabs, ramp, tiles with context %}
    {% block content %}{% call section("one", "S & T") %}{{ tiles([("98 %", word)]) }}
    {% call(i) tabs("t", ["a", "b"], 1) %}{{ image(pixels, "a map", 40) }}{% endcall %}{{ ramp(0, 1, "membership") }}
    {% endcall %}{% endblock %}"""
    page = report.templates.from_string(source)
    values = {"word": "<i>\u202e\x1b", "pixels": colour(torch.rand(4, 5))}
    path = report.write(tmp_path / "deep" / "page.html", page, title="A <title>", **values)
    check_page(path)
    text = path.read_text()
    assert "<title>A &lt;title&gt;</title>" in text and '<a href="#one">S &amp; T</a>' in text
    assert r"&lt;i&gt;\u202e\x1b" in text and "\u202e" not in text
    assert 'width="40" height="32"' in text and text.count(" checked>") == 1 and 'id="t1" checked' in text

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(SaveError, match="No space left"):
        report.write(path, page, title="new", **values)
    assert path.read_text() == text and [x.name for x in path.parent.iterdir()] == ["page.html"]
