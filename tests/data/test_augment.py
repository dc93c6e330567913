"""Augmentation on whole batches against Pillow, timm, numpy and exact moments; each image for itself."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from dmst.data import chance, geometry, mixing
from dmst.data.augment import Augment
from dmst.data.rand_augment import NUMBER, OPERATIONS, color_jitter, operate, read_policy
from dmst.errors import OptionError

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
GREY = torch.full((1, 3, 1, 1), 128.0)


def pictures(b: int = 5, h: int = 29, w: int = 37, c: int = 3) -> Tensor:
    """uint8 (b, c, h, w): smooth, noisy, dark, of one value, and of two values, so that every operation has something to do."""
    rng = np.random.default_rng(b * h * w)
    y, x = np.mgrid[:h, :w]
    smooth = 127 + 90 * np.sin(x / 7)[..., None] * np.cos(y[..., None] / 5 + np.arange(c))
    kinds = [
        smooth,
        rng.integers(0, 256, (h, w, c)),
        rng.integers(20, 90, (h, w, c)),
        np.full((h, w, c), 77),
        60 + 120 * (smooth > 120),
    ]
    return torch.from_numpy(np.stack([kinds[i % 5] for i in range(b)]).astype(np.uint8)).permute(0, 3, 1, 2).contiguous()


def to_pillow(image: Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])


def from_pillow(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def off(a: Tensor, b: Tensor) -> Tensor:
    return (a.int() - b.int()).abs()


def auto_augment() -> Any:
    """timm.data.auto_augment, by itself: the file needs Pillow alone, and the rest of timm a torchvision that fits torch."""
    timm = importlib.util.find_spec("timm")
    if timm is None or not timm.origin:
        pytest.skip("timm is not installed: pip install 'dmst[timm]'")
    spec = importlib.util.spec_from_file_location("auto_augment", Path(timm.origin).parent / "data/auto_augment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def theirs() -> Any:
    return auto_augment()


# --- the settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flip", 1.1),
        ("crop_padding", 2.0),
        ("mixup", math.nan),
        ("mixup_mode", "elem"),
        ("aa", "rand-m11"),
        ("aa", "rand-m9-m8"),
    ],
)
def test_what_no_augmentation_can_take(field: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"(?s){field}.*{value!r}"):
        Augment(**{field: value})


def test_the_words_of_timm(theirs: Any) -> None:
    assert read_policy("") is None
    for text in ("rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.7", "rand-mstd101", "rand-m0-n1-inc0", "rand-m5-mstd101"):
        mine, policy = read_policy(text), theirs.rand_augment_transform(text)
        op = policy.ops[7]
        spread = math.inf if mine.spread > 100 else mine.spread
        assert mine.layers == policy.num_layers and len(policy.ops) == len(OPERATIONS)
        assert (mine.magnitude, mine.probability, spread) == (op.magnitude, op.prob, op.magnitude_std)
        assert mine.increasing == ("Increasing" in op.name)
        names = [op.name.replace("Increasing", "").replace("Rel", "") for op in policy.ops]
        assert names == list(OPERATIONS)


# --- places ----------------------------------------------------------------------------------------------------------


def test_crops_and_mirrors_are_exact() -> None:
    """Against numpy's padding by reflection, on a set of which only some images are taken."""
    pixels, pad = pictures(7, 11, 13), 4
    rows = torch.tensor([3, 0, 6, 3, 1, 2])
    down, right = torch.tensor([-4, 4, 0, 1, -3, 2]), torch.tensor([4, -4, 0, 3, 2, -1])
    mirrored = torch.tensor([True, False, True, False, True, True])
    out = geometry.take(pixels, rows, down, right, mirrored)
    assert out.dtype == torch.uint8
    padded = np.pad(pixels.numpy(), ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="reflect")
    for i, row in enumerate(rows.tolist()):
        top, left = pad + int(down[i]), pad + int(right[i])
        expected = padded[row, :, top : top + 11, left : left + 13]
        assert np.array_equal(out[i].numpy(), expected[..., ::-1] if mirrored[i] else expected)


def test_whole_numbers_are_even_and_in_range() -> None:
    u = chance.uniform("a", 0, 0, torch.arange(30_000), 1)[:, 0]
    counts = torch.bincount(geometry.integers(u, 9), minlength=9)
    assert len(counts) == 9 and ((counts - 30_000 / 9).abs() < 4 * math.sqrt(30_000 / 9)).all()
    last = torch.full((3,), 1 - 2.0**-24)
    assert geometry.integers(last, 2**20 + 3).tolist() == [2**20 + 2] * 3  # float32 rounds the product up
    assert geometry.integers(last, torch.tensor([1.0, 5.0, 7.0])).tolist() == [0, 4, 6]


def test_resized_boxes() -> None:
    h, w, least = 61, 83, 0.2
    box = geometry.resized_boxes(chance.uniform("a", 0, 0, torch.arange(4000), geometry.BOX_DRAWS), h, w, least)
    top, left, height, width = box.double().unbind(1)
    assert (box == box.round()).all() and (top >= 0).all() and (left >= 0).all() and (height >= 1).all()
    assert (top + height <= h).all() and (left + width <= w).all()
    area, ratio = height * width / (h * w), width / height
    assert area.min() > least - 0.03 and ratio.min() > 0.70 and ratio.max() < 1.42  # sides are rounded
    assert 0.19 < area.min() < 0.22 and area.max() > 0.95
    assert (top == 0).any() and (left == 0).any() and (top + height == h).any() and (left + width == w).any()
    assert abs(float((left / (w - width).clamp(min=1)).mean()) - 0.5) < 0.03


def still(b: int, **changes: Tensor) -> dict[str, Tensor]:
    return {"angle": torch.zeros(b), "scale": torch.ones(b), "move": torch.zeros(b, 2)} | changes


@pytest.mark.parametrize("interpolation", FILTERS)
def test_warp_moves_whole_pixels_exactly(interpolation: str) -> None:
    x = pictures(5, 17, 17)
    box = geometry.middle_box(17, 17)
    options: dict[str, Any] = {"size": 17, "interpolation": interpolation}
    assert torch.equal(geometry.warp(x, box, **still(5), **options), x)
    turned = geometry.warp(x, box, **still(5, angle=torch.full((5,), math.pi / 2)), **options)
    assert off(turned, torch.rot90(x, -1, (2, 3))).max() <= 1
    moved = geometry.warp(x, box, **still(5, move=torch.tensor([[3.0, -2.0]]).expand(5, 2)), **options)
    expected = torch.zeros_like(x)  # black comes into view
    expected[:, :, :15, 3:] = x[:, :, 2:, :14]
    assert torch.equal(moved, expected)
    part = geometry.warp(x, torch.tensor([[2.0, 5.0, 7.0, 7.0]]).expand(5, 4), **still(5), size=7, interpolation=interpolation)
    assert torch.equal(part, x[:, :, 2:9, 5:12])
    wide = pictures(2, 9, 15)
    assert torch.equal(
        geometry.warp(wide, geometry.middle_box(9, 15), **still(2), size=9, interpolation=interpolation), wide[..., 3:12]
    )


def test_warp_enlarges_as_pillow_does() -> None:
    x = pictures(5, 20, 20)
    large = geometry.warp(x, (4.0, 6.0, 10.0, 10.0), **still(5), size=30, interpolation="bilinear")
    zoomed = geometry.warp(
        x, geometry.middle_box(20, 20), **still(5, scale=torch.full((5,), 2.0)), size=20, interpolation="bilinear"
    )
    for i in range(5):
        expected = from_pillow(to_pillow(x[i]).crop((6, 4, 16, 14)).resize((30, 30), FILTERS["bilinear"]))
        assert off(large[i], expected)[:, 2:-2, 2:-2].max() <= 1  # at the edges of the box Pillow sees no pixels beyond
        middle = from_pillow(to_pillow(x[i]).crop((5, 5, 15, 15)).resize((20, 20), FILTERS["bilinear"]))
        assert off(zoomed[i], middle)[:, 2:-2, 2:-2].max() <= 1


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(("size", "crop_pct"), [(16, 0.875), (24, 1.0), (64, 0.9)])
def test_resize_as_pillow_does(size: int, crop_pct: float, interpolation: str) -> None:
    for h, w in ((41, 29), (29, 29)):
        x = pictures(5, h, w)
        out = geometry.resize(x, size, crop_pct, interpolation)
        assert out.shape == (5, 3, size, size) and out.dtype == torch.uint8
        short = math.floor(size / crop_pct)
        new = (short, int(short * h / w))
        top, left = round((new[1] - size) / 2), round((new[0] - size) / 2)
        for i in range(5):
            big = to_pillow(x[i]).resize(new, FILTERS[interpolation]).crop((left, top, left + size, top + size))
            assert off(out[i], from_pillow(big)).max() <= 1
    assert torch.equal(geometry.resize(x, 29, 1.0, interpolation), x)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("increasing", [True, False], ids=["inc1", "inc0"])
def test_operations_are_those_of_timm(name: str, increasing: bool, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at four magnitudes and both signs, on images with and without colour, against timm's functions of Pillow."""
    known = {n.replace("Increasing", "").replace("Rel", ""): n for n in theirs.rand_augment_choices("", increasing)}[name]
    operation = theirs.NAME_TO_OP[known]
    if name == "Posterize":  # Pillow refuses the 0 bits of magnitude 10

        def operation(image: Image.Image, bits: int, **_: Any) -> Image.Image:
            return image.point([value & -(1 << (8 - bits)) for value in range(256)] * len(image.getbands()))

    moves = name in ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
    for magnitude in (0.0, 2.3, 9.0, 10.0):
        for negative in (False, True):
            monkeypatch.setattr(theirs, "_randomly_negate", lambda v, negative=negative: -v if negative else v)
            level = theirs.LEVEL_TO_ARG[known]
            arguments = level(magnitude, {}) if level else ()
            for c in (3, 1):
                x = pictures(5, c=c)
                one = torch.full((5,), NUMBER[name])
                out = operate(
                    x, one, torch.full((5,), magnitude), torch.full((5,), negative), increasing, GREY[:, :c], "bilinear"
                )
                fill = (128,) * 3 if c == 3 else 128
                for i in range(5):
                    image = operation(to_pillow(x[i]), *arguments, resample=FILTERS["bilinear"], fillcolor=fill)
                    apart = off(out[i], from_pillow(image))
                    if moves:  # one row may fall to the other side of an edge
                        assert (apart > 1).float().mean() < 0.01 and apart.float().mean() < 1
                    else:
                        assert apart.max() <= 1 and (apart > 0).float().mean() < 0.05
                if magnitude == 9.0 and name not in ("Color", "AutoContrast", "Equalize"):
                    assert not torch.equal(out, x)


def test_color_jitter_as_pillow_does() -> None:
    x, draws = pictures(5), chance.uniform("a", 0, 0, torch.arange(5), 3)
    out = color_jitter(x, draws, 0.4)
    for i in range(5):
        image = to_pillow(x[i])
        factors = [0.6 + 0.8 * u for u in draws[i].tolist()]
        for kind, factor in zip((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), factors, strict=True):
            image = kind(image).enhance(factor)
        assert off(out[i], from_pillow(image)).max() <= 1
    assert torch.equal(color_jitter(x, torch.full((5, 3), 0.5), 0.4), x)


# --- rectangles ------------------------------------------------------------------------------------------------------


def test_erasing() -> None:
    n, h, w = 600, 40, 56
    index, key, epoch = torch.arange(n), torch.tensor(chance.key("noise", 0)), torch.tensor(3)
    images = torch.full((n, 3, h, w), 9.0)  # no noise is as large
    noise = mixing.normal_noise(key, epoch, index, torch.arange(h * w), 3, h, w)
    out = mixing.erase(images, chance.uniform("erase", 0, 3, index, mixing.ERASE_DRAWS), noise, 0.25)
    hit = out != 9
    assert torch.equal(hit.all(1), hit.any(1)) and torch.equal(out[hit], noise[hit])
    rows, columns = hit[:, 0].any(2), hit[:, 0].any(1)
    assert torch.equal(hit[:, 0], rows[:, :, None] & columns[:, None, :])  # one rectangle each
    erased = rows.any(1)
    assert 0.18 < erased.float().mean() < 0.32
    height, width = rows.sum(1)[erased].double(), columns.sum(1)[erased].double()
    area, ratio = height * width / (h * w), width / height
    assert 0.015 < area.min() < 0.06 and 0.25 < area.max() < 0.345
    assert 0.25 < ratio.min() < 0.6 and 1.7 < ratio.max() < 3.8
    assert (rows[:, 0] & erased).any() and (rows[:, -1] & erased).any() and height.max() < h


def test_noise_is_normal_and_of_every_channel() -> None:
    key, epoch = torch.tensor(chance.key("noise", 0)), torch.tensor(0)
    for c in (3, 1):
        noise = mixing.normal_noise(key, epoch, torch.arange(10), torch.arange(33 * 31), c, 33, 31).double()
        assert noise.shape == (10, c, 33, 31)
        assert abs(noise.mean()) < 0.03 and abs(noise.var() - 1) < 0.05 and abs((noise**4).mean() - 3) < 0.3
        assert 3 < noise.abs().max() < 6
    noise = mixing.normal_noise(key, epoch, torch.arange(10), torch.arange(33 * 31), 3, 33, 31).double()
    flat = torch.stack([noise[:, 0].flatten(), noise[:, 1].flatten(), noise[:, 2].flatten(), noise[:, 0].roll(1, 2).flatten()])
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.04


def test_cutout() -> None:
    n, side, h, w = 900, 6, 17, 23
    out = mixing.cutout(torch.ones(n, 2, h, w), chance.uniform("cutout", 0, 0, torch.arange(n), 2), side)
    gone = out[:, 0] == 0
    assert torch.equal(out[:, 1] == 0, gone)
    rows, columns = gone.any(2).sum(1), gone.any(1).sum(1)
    assert torch.equal(gone.sum((1, 2)), rows * columns)
    assert rows.max() == side and columns.max() == side and rows.min() == 3 and columns.min() == 3  # a corner hangs over
    assert (rows == side).float().mean() > 0.6 and gone.any(0).all()


# --- mixing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0])
def test_quantiles_of_beta(alpha: float) -> None:
    """Even draws through the table have the moments of Beta(alpha, alpha), up to the sixth."""
    table = mixing.beta_quantiles(alpha)
    assert (table.diff() >= 0).all() and table[0] == 0 and table[-1] == 1 and table[mixing.CELLS // 2] == 0.5
    x = mixing.quantile(table, (torch.arange(2**17) + 0.5) / 2**17).double()
    expected = 1.0
    for power in range(1, 7):
        expected *= (alpha + power - 1) / (2 * alpha + power - 1)
        assert abs(float((x**power).mean()) - expected) < 2e-4, power


def mixing_draws(n: int) -> Tensor:
    return chance.uniform("mix", 0, 0, torch.arange(n), mixing.DRAWS)


def test_pairs_are_mixed_as_said() -> None:
    """Against a loop over pairs: mixup by lambda, cutmix by an exact rectangle of the area that the target says."""
    pairs, h, w = 40, 12, 20
    images, targets = torch.randn(2 * pairs, 3, h, w), torch.eye(2 * pairs)
    tables = mixing.beta_quantiles(0.8), mixing.beta_quantiles(1.0)
    draws = mixing_draws(pairs)
    share, mean = mixing.shares(draws, *tables, 0.9, 0.5, h, w)
    out, mixed = mixing.mix(images, targets, share, mean, "pair")
    kinds = set()
    for i in range(pairs):
        whether, which, at, down, across = draws[i].tolist()
        a, b = images[2 * i], images[2 * i + 1]
        if whether >= 0.9:
            lam, one, two, kind = 1.0, a, b, "none"
        elif which < 0.5:
            side = math.sqrt(1 - float(mixing.quantile(tables[1], torch.tensor(at))))
            y, x, height, width = int(down * h), int(across * w), int(h * side), int(w * side)
            rows = slice(max(0, y - height // 2), min(h, y + (height + 1) // 2))
            columns = slice(max(0, x - width // 2), min(w, x + (width + 1) // 2))
            one, two, kind = a.clone(), b.clone(), "cutmix"
            one[:, rows, columns], two[:, rows, columns] = b[:, rows, columns], a[:, rows, columns]
            lam = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (h * w)
        else:
            lam, kind = float(mixing.quantile(tables[0], torch.tensor(at))), "mixup"
            one, two = lam * a + (1 - lam) * b, lam * b + (1 - lam) * a
        kinds.add(kind)
        torch.testing.assert_close(out[2 * i : 2 * i + 2], torch.stack((one, two)), atol=1e-6, rtol=1e-6)
        if kind == "cutmix":
            assert torch.equal(out[2 * i], one) and torch.equal(out[2 * i + 1], two)
        for j, other in ((2 * i, 2 * i + 1), (2 * i + 1, 2 * i)):
            expected = torch.zeros(2 * pairs)
            expected[j], expected[other] = lam, 1 - lam
            torch.testing.assert_close(mixed[j], expected, atol=1e-6, rtol=0)
    assert kinds == {"none", "cutmix", "mixup"}


def test_a_batch_is_mixed_with_itself_reversed() -> None:
    images, targets = torch.randn(6, 3, 8, 8), torch.eye(6)
    table = mixing.beta_quantiles(0.8)
    share, mean = mixing.shares(mixing_draws(1), table, None, 1.0, 0.5, 8, 8)
    out, mixed = mixing.mix(images, targets, share, mean, "batch")
    lam = 1 - float(mean)
    assert 0 < lam < 1
    torch.testing.assert_close(out, lam * images + (1 - lam) * images.flip(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mixed, lam * targets + (1 - lam) * targets.flip(0), atol=1e-6, rtol=0)
