"""Scores of maps: known maps score as known, a perfect order wins where it must, a random one does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from dmst.analysis.membership import attention_received, drawn, maps
from dmst.analysis.scored import (
    BORDER,
    Interval,
    Score,
    Scores,
    areas,
    bootstrap,
    foreground,
    interpolated,
    measures,
    orders_of,
    scored,
)  # fmt: skip
from dmst.cli import app
from dmst.data.loader import EvalStream, View
from dmst.data.sets import ArraySet
from dmst.data.workers import mask_in_view
from dmst.engine.prepare import read_weights
from dmst.engine.samples import Sample, sample
from dmst.errors import OptionError
from tests.networks import build, images

PATCH, NEEDED = 2, (0, 7, 8)  # of a grid of 3 x 4: rows and columns differ


def depends_on_known_patches(x: Tensor) -> Tensor:
    """Logits (b, 2) of images (b, 1, 6, 8): class 1 as far as the needed patches are bright, nothing else matters."""
    patches = F.avg_pool2d(x, PATCH).flatten(1)
    bright = patches[:, NEEDED].mean(-1)
    return torch.stack((torch.zeros_like(bright), 4 * bright), -1)


def bright_images(count: int = 5) -> Tensor:
    """Needed patches 2, the others noise around -1."""
    x = 0.1 * torch.randn(count, 1, 6, 8) - 1
    hidden = torch.zeros(12).index_fill(0, torch.tensor(NEEDED), 1).view(1, 1, 3, 4)
    return torch.where(F.interpolate(hidden, scale_factor=PATCH) > 0, 2.0, x)


@pytest.mark.parametrize("test", ["insertion", "deletion", "road"])
def test_a_perfect_order_wins_and_a_random_one_does_not(test: str) -> None:
    x = bright_images()
    perfect = torch.zeros(5, 12).index_fill(1, torch.tensor(NEEDED), 1)
    sign = 1 if test == "insertion" else -1
    best, worst = (sign * areas(depends_on_known_patches, x, each, PATCH, test, steps=12) for each in (perfect, -perfect))
    chance = [sign * areas(depends_on_known_patches, x, torch.rand(5, 12), PATCH, test, steps=12) for _ in range(20)]
    middle = torch.stack(chance).mean(0)
    assert (best > middle + 0.1).all() and (worst < middle - 0.1).all()
    assert (best >= torch.stack(chance).max(0).values - 1e-6).all()  # nothing beats it


def test_an_area_by_hand() -> None:
    """Two patches, two steps: the curve has three points, each known."""
    x = torch.tensor([[[[3.0, -1.0]]]])  # 1 x 2 pixels, patches of 1

    def answer(y: Tensor) -> Tensor:
        return torch.stack((torch.zeros(len(y)), y[:, 0, 0, 0]), -1)

    def p(logit: float) -> float:
        return torch.tensor(logit).sigmoid().item()

    first, last = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    for test, order, points in (
        ("deletion", first, (3, 1, 1)),  # the mean colour is 1
        ("deletion", last, (3, 3, 1)),
        ("insertion", first, (1, 3, 3)),
        ("insertion", last, (1, 1, 3)),
    ):
        told = sum(p(points[i]) + p(points[i + 1]) for i in range(2)) / 4
        assert areas(answer, x, order, 1, test, steps=2).item() == pytest.approx(told, abs=1e-6)


def test_hidden_pixels_are_means_of_their_neighbours() -> None:
    down, across = torch.linspace(0, 1, 21)[:, None], torch.linspace(0, 1, 33)
    plane = (2 * down + 3 * across - 1).expand(2, 3, 21, 33)  # its own mean of neighbours everywhere inside
    hidden = torch.zeros(2, 1, 21, 33, dtype=torch.bool)
    hidden[0, :, 4:15, 7:25] = True
    found = interpolated(plane, hidden)
    assert torch.equal(found[1], plane[1])
    assert (found[0] - plane[0]).abs().max() < 0.02
    noisy = torch.randn(2, 3, 21, 33)
    filled = interpolated(noisy, hidden)
    kernel = torch.tensor([[1.0, 2, 1], [2, 0, 2], [1, 2, 1]]).expand(3, 1, 3, 3)
    means = F.conv2d(filled, kernel, padding=1, groups=3) / F.conv2d(torch.ones_like(filled), kernel, padding=1, groups=3)
    assert ((means - filled)[0][:, hidden[0, 0]]).abs().max() < 0.01
    assert torch.equal(torch.where(hidden, 0, filled), torch.where(hidden, 0, noisy))
    everything = interpolated(noisy, torch.ones_like(hidden))
    assert (everything - noisy.mean((-2, -1), keepdim=True)).abs().max() < 1e-6


def test_orders_are_what_the_network_computed() -> None:
    model, x = build(("dmst_tiny", {}), torch.float32).eval(), images(dtype=torch.float32)
    with torch.no_grad():
        parts = model.trace(x).layers[0].parts
    found = orders_of(model, x, 0)
    assert set(found) == {"membership", "gated", "gradient"} and all(p.grad is None for p in model.parameters())
    for i in range(len(x)):
        assert torch.equal(found["membership"][i], parts.membership[i, int(parts.gate[i].argmax())])
    assert (found["gated"] - torch.einsum("bk,bkn->bn", parts.gate, parts.membership)).abs().max() < 1e-6

    softmax = build(("vit_tiny", {}), torch.float32).eval()  # a class token in its layers
    with torch.no_grad():
        attention = softmax.trace(x).layers[1].parts.attention
    assert torch.equal(orders_of(softmax, x, 1)["attention"], attention[:, :, 0, 1:].mean(1))
    assert set(orders_of(build(("vit_tiny", {"operator": "xca"}), torch.float32), x)) == {"gradient"}
    without = build(("crate_tiny", {"readout": "mean"}), torch.float32).trace(x)
    assert torch.equal(attention_received(without, 0), without.layers[0].parts.attention.mean(-2))
    assert set(orders_of(build(("tost_tiny", {}), torch.float32), x)) == {"membership", "gradient"}  # no gate


@pytest.mark.parametrize("gate", ["gelu", "none"])
def test_the_order_of_groups(gate: str) -> None:
    """The largest group of the head with the largest gate, by size; without gates, the largest group. There is no `gated`."""
    model = build(("gmst_tiny", {"groups": 3, "gate_activation": gate, "readout": "token"}), torch.float32).eval()
    x = images(dtype=torch.float32)
    with torch.no_grad():
        parts = model.trace(x).layers[1].parts
    found = orders_of(model, x, 1)
    assert set(found) == {"membership", "gradient"} and parts.membership.shape[-1] == 7  # a class token among them
    for i in range(len(x)):
        each = parts.membership[i, :, :, 1:]
        mine = each.flatten(0, 1) if gate == "none" else each[int(parts.gate[i].abs().argmax())]
        assert torch.equal(found["membership"][i], mine[int(mine.sum(-1).argmax())])
    scores = scored(model, x, tests=("deletion",), steps=2, draws=1)
    assert {score.order for score in scores.scores} == {"membership", "gradient", "centre", "random"}


def test_the_gradient_order_is_grad_times_input() -> None:
    model, x = build(("dmst_tiny", {})).eval(), images()
    found = orders_of(model, x)["gradient"]
    direct, chosen = torch.zeros(BATCH := len(x), 6, dtype=torch.float64), model(x).argmax(-1)
    for n in range(6):
        row, column = divmod(n, 3)
        moved = torch.zeros_like(x)
        part = (slice(None), slice(None), slice(16 * row, 16 * row + 16), slice(16 * column, 16 * column + 16))
        moved[part] = x[part]
        ahead, behind = (model(x + sign * 1e-5 * moved).detach()[torch.arange(BATCH), chosen] for sign in (1, -1))
        direct[:, n] = (ahead - behind) / 2e-5 / 256
    assert (found - direct).abs().max() < 1e-6 * direct.abs().max().clamp(min=1)


def test_scored_over_a_network() -> None:
    model = read_weights("dmst_digits")
    x = torch.cat([batch for batch, _ in sample(model, limit=16)])
    model.train()
    found = scored(model, x, tests=("deletion", "insertion"), steps=4, draws=1)
    assert model.training
    by = {(score.test, score.order): score for score in found.scores}
    assert by["deletion", "gradient"].better.low > 0 and by["insertion", "gradient"].better.low > 0
    assert by["deletion", "random"].better is None
    assert found.images == 16 and found.patches == 64 and found.layer == 3
    again = scored(model, [(some, None) for some in x.split(7)], tests=("deletion",), steps=4, draws=1)
    for one in again.scores:  # by image, not by batch
        assert by[one.test, one.order].area.mean == pytest.approx(one.area.mean, abs=1e-5)
    middle = torch.tensor([[-((n // 8 - 3.5) ** 2) - (n % 8 - 3.5) ** 2 for n in range(64)]]).expand(16, -1)
    with torch.no_grad():
        direct = areas(model.eval(), x, middle, 1, "deletion", steps=4)
    assert by["deletion", "centre"].area.mean == pytest.approx(direct.mean().item(), abs=1e-5)
    assert by["deletion", "random"].ahead is by["deletion", "centre"].ahead is None
    gap = by["deletion", "centre"].area.mean - by["deletion", "gated"].area.mean  # positive: less is left than after the middle
    assert by["deletion", "gated"].ahead is not None and by["deletion", "gated"].ahead.mean == pytest.approx(gap)


def test_the_noise_of_road_belongs_to_the_image() -> None:
    x = bright_images(4)
    order = torch.rand(4, 12)
    whole = areas(depends_on_known_patches, x, order, PATCH, "road")
    parts = [areas(depends_on_known_patches, x[i : i + 2], order[i : i + 2], PATCH, "road", first=i) for i in (0, 2)]
    assert (whole - torch.cat(parts)).abs().max() < 1e-6


def test_the_verdict_follows_the_intervals() -> None:
    area, good = Interval(0.5, 0.4, 0.6), Interval(0.2, 0.1, 0.3)
    for gain, wins in ((good, True), (Interval(-0.2, -0.3, -0.1), False), (Interval(5e-4, 4e-4, 6e-4), False)):
        scores = (Score("deletion", "gated", area, good, gain), Score("insertion", "gated", area, good, good))
        told = Scores("m", 3, 9, 64, 10, 3, scores).verdict
        assert "random order, in every test: gated." in told and told.endswith("gated." if wins else "none of them.")


def test_bad_requests_are_refused() -> None:
    with pytest.raises(OptionError, match="deletion"):
        scored(build(("dmst_tiny", {}), torch.float32), images(dtype=torch.float32), tests=["delusion"])
    model = build(("dmst_tiny", {"num_classes": 0}), torch.float32)
    with pytest.raises(OptionError, match="no classifier"):
        scored(model, images(dtype=torch.float32))
    with pytest.raises(OptionError, match="no images"):
        scored(build(("dmst_tiny", {})), [])


# --- against masks ---------------------------------------------------------------------------------------------------


MASK = torch.tensor([[1, 1, 2, 2], [1, 1, 2, 2], [2, 2, 2, 2]])


def test_known_measures() -> None:
    same = (MASK == 1).float()
    moved, away = same.roll(1, -1), same.roll(2, -1)  # 2 x 2 squares that share two of six pixels, and none
    stack = torch.stack((same, moved, away))[None]
    assert measures(stack, MASK[None, None])[0].tolist() == [[1, 1, 1], pytest.approx([1 / 3, 1 / 3, 1]), [0, 0, 0]]
    wide = torch.tensor([[9.0, 8, 7, 6], [5, 4, 3, 2], [1, 0, 0, 0]])  # its mean, 3.75, marks six; the area marks four
    assert measures(wide, MASK).tolist() == pytest.approx([4 / 6, 2 / 6, 1])


def test_the_border_does_not_count() -> None:
    mask = MASK.clone()
    mask[:, 2] = BORDER
    values = torch.zeros(3, 4)
    values[:, 2], values[0, 0] = 9.0, 5.0  # the largest values on the border
    assert measures(values, mask)[2] == 1 and measures(values, MASK)[2] == 0
    assert measures((MASK == 1).float() + (mask == BORDER).float(), mask)[0] == 1
    assert measures(values, torch.full((3, 4), 2)).tolist() == [0, 0, 0]  # nothing to find


def test_bootstrap_intervals() -> None:
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = bootstrap(values)
    half = 1.96 * values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)
    assert bootstrap(values) == found  # always the same
    assert bootstrap(np.array([2.0])) == Interval(2, 2, 2)


@pytest.mark.parametrize("family", ["dmst_tiny", "vit_tiny"])
def test_foreground_reads_the_maps_of_the_trace(family: str) -> None:
    """Masks made of one head's own map: that head has IoU 1 in its layer and is chosen."""
    model = build((family, {}), torch.float32).eval()
    x = images(batch=6, dtype=torch.float32)
    trace = model.trace(x)
    what, values = drawn(trace, 1)
    if family == "dmst_tiny":
        assert what == "membership" and torch.equal(values, maps(trace, 1))
    else:
        assert what == "attention received"
    full = F.interpolate(values, (32, 48), mode="bilinear", align_corners=False)[:, 2]
    masks = torch.where(full > full.mean((1, 2), keepdim=True), 1, 2).to(torch.uint8)
    found = foreground(model, [(x[:4], masks[:4]), (x[4:], masks[4:])])
    row = found.layers[1]
    assert found.images == 6 and found.what == what
    assert row.best["iou_mean"] == Interval(1, 1, 1)
    assert row.best["iou_area"].mean == pytest.approx(1) and row.best["pointing"].mean == 1
    assert row.median["iou_mean"] < 1
    every = F.interpolate(drawn(trace, 0)[1], (32, 48), mode="bilinear", align_corners=False)
    told = measures(every, masks[:, None]).mean(0)  # (heads, measures)
    assert list(found.layers[0].median.values()) == pytest.approx(np.median(told.numpy(), 0), abs=1e-6)
    assert found.best["iou_area"].mean == pytest.approx(1) and found.head["iou_area"] == ((1, 2), (1, 2))
    assert found.share == pytest.approx((masks == 1).float().mean().item())
    assert found.ahead["iou_area"].low > 0 and "finds the object better" in found.verdict


def test_every_group_is_a_map() -> None:
    """Masks made of one group's memberships: that group is found, and named."""
    model = build(("gmst_tiny", {"groups": 6}), torch.float32).eval()
    x = images(batch=6, dtype=torch.float32)
    with torch.no_grad():
        trace = model.trace(x)
    small = trace.layers[1].parts.membership[:, 2, 4, trace.prefix :].view(6, 1, 2, 3)
    full = F.interpolate(small, (32, 48), mode="bilinear", align_corners=False)[:, 0]
    masks = torch.where(full > full.mean((1, 2), keepdim=True), 1, 2).to(torch.uint8)
    found = foreground(model, [(x, masks)])
    assert found.layers[1].best["iou_mean"] == Interval(1, 1, 1) and found.groups == 6 and found.what == "membership"
    assert found.head["iou_mean"] == ((1, 16), (1, 16))  # map 16 = 2 * 6 + 4
    assert "group 4 of head 2 of layer 1" in found.verdict and found.layers[0].median["iou_mean"] < 1


def test_a_head_is_not_chosen_on_the_images_it_is_scored_on() -> None:
    """Pure noise: the best of many heads on the same images would look good; chosen on the others it has no lead."""
    from dmst.analysis.scored import _cross_chosen

    noise = np.random.default_rng(0).random((40, 500))
    chosen, _ = _cross_chosen(noise)
    assert abs(chosen.mean() - 0.5) < 0.1 < noise.mean(0).max() - 0.5


def test_masks_are_cut_as_the_images_are() -> None:
    """A square of one value in a wide picture: its mask after the view is where its pixels are."""
    mask = np.full((20, 36), 2, np.uint8)
    mask[4:12, 10:22] = 1
    pixels = np.where(mask == 1, 255, 0).astype(np.uint8)[..., None]
    image_set = ArraySet("pets", "test", ["a"], np.zeros(3, np.int64), np.stack([pixels] * 3))
    image_set.masks = lambda index: mask  # type: ignore[method-assign]
    view = View(10, 1, (0.5,), (0.5,), crop_pct=0.8)
    cut = mask_in_view(mask, view)
    assert cut.shape == (10, 10) and set(cut.unique().tolist()) == {1, 2}
    batches = list(Sample("x", EvalStream(image_set, view, batch_size=2), torch.float32).masked())
    assert [len(each) for each, _ in batches] == [2, 1]  # the padded image of the last batch is not there
    for batch, masks in batches:
        assert masks.shape == (len(batch), 10, 10)
        assert ((batch[:, 0] > 0) == (masks == 1)).float().mean() > 0.9  # but for pixels that straddle the edge
    with pytest.raises(OptionError, match="no masks"):
        next(sample(read_weights("dmst_digits"), limit=2).masked())


def test_the_command(tmp_path: Path) -> None:
    arguments = ["analyze", "scored", "dmst_digits", "--limit", "4", "--steps", "2", "--draws", "1", "--test", "deletion"]
    run = CliRunner().invoke(app, [*arguments, "--json"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert told["scored"]["scores"][0]["area"].keys() == {"mean", "low", "high"} and told["scored"]["verdict"]
    assert told["foreground"] is None and "digits test: 4 of 359" in told["sample"]
    assert {row["order"] for row in told["scored"]["scores"]} == {"membership", "gated", "gradient", "centre", "random"}
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0 and "Layer 3, 4 images" in run.output and "gradient" in run.output
