"""What an analysis looks at: always the same images, named, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dmst import create_model
from dmst.engine.prepare import open_sets
from dmst.engine.recipe import read_recipe
from dmst.engine.samples import sample
from dmst.errors import OptionError
from dmst.photos import PHOTOS


def test_digits_are_at_hand_for_a_network_of_digits() -> None:
    model = create_model("dmst_digits")
    found = sample(model, limit=100, batch_size=32)
    assert found.count == 100 and "digits" in found.name and "100 of 359 images by hash" in found.name
    batches = list(found)
    assert [len(images) for images, _ in batches] == [32, 32, 32, 4]
    again = list(sample(model, "digits", limit=100, batch_size=50))
    assert torch.equal(torch.cat([images for images, _ in batches]), torch.cat([images for images, _ in again]))
    labels = torch.cat([each for _, each in found if each is not None])
    assert len(labels) == 100 and labels.bincount(minlength=10).min() >= 2  # of all classes, not of the first
    assert sample(model, limit=1000).count == 359


def test_labels_of_other_classes_are_none() -> None:
    model = create_model("dmst_digits")
    model.class_names = tuple("abcdefghij")  # as many, and others
    assert all(labels is None for _, labels in sample(model, "digits", limit=40))
    model.class_names = tuple("0123456789")
    assert all(labels is not None for _, labels in sample(model, "digits", limit=40))
    assert all(labels is None for _, labels in sample(create_model("dmst_digits", num_classes=7), "digits", limit=40))


def test_photographs_where_nothing_is_at_hand() -> None:
    """Real ones, which ship; of a network of grey images in grey."""
    found = sample(create_model("dmst_cifar"), limit=5)
    assert found.name == "the photographs that ship (cat, rocket, astronaut, coffee, photographer)"
    assert [(images.shape, labels) for images, labels in found] == [((5, 3, 32, 32), None)]
    assert sample(create_model("dmst_cifar")).titles == tuple(PHOTOS)
    ((images, _), *_) = list(sample(create_model("dmst_cifar", in_chans=1)))
    assert images.shape == (6, 1, 32, 32) and images.std() > 0.1


def test_photos(tmp_path: Path) -> None:
    Image.fromarray(np.full((40, 60, 3), 128, np.uint8)).save(tmp_path / "grey.png")
    found = sample(create_model("dmst_cifar"), photos=[str(tmp_path / "grey.png")])
    ((images, labels),) = list(found)
    assert found.name == "1 photo" and images.shape == (1, 3, 32, 32) and labels is None
    with pytest.raises(OptionError, match="not both"):
        sample(create_model("dmst_cifar"), "digits", photos=[tmp_path / "grey.png"])
    with pytest.raises(OptionError, match="limit is 0"):
        sample(create_model("dmst_cifar"), limit=0)


def test_a_run_is_looked_at_by_what_it_was_evaluated_on(tmp_path: Path) -> None:
    """Of a run with held-out images those, not the test images, which it never saw."""
    recipe = read_recipe("digits", ["data.holdout=0.2"])
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    found = sample(create_model("dmst_digits"), run=tmp_path)
    held = open_sets(recipe).eval
    assert held is not None and found.count == len(held) != 359
    assert torch.equal(torch.cat([labels for _, labels in found if labels is not None]), torch.from_numpy(held.labels))
    assert "by hash" in sample(create_model("dmst_digits"), run=tmp_path, limit=10).name
    assert sample(create_model("dmst_digits"), "digits", run=tmp_path).count == 359  # what is asked for comes first
    assert sample(create_model("dmst_digits"), run="dmst_digits").count == 359  # no run


def test_any_shape_and_dtype_that_the_network_has() -> None:
    ((images, _), *_) = list(sample(create_model("dmst_cifar", img_size=64, dtype=torch.float64), limit=3))
    assert images.shape == (3, 3, 64, 64) and images.dtype == torch.float64
    with pytest.raises(OptionError, match="cut to squares"):
        sample(create_model("dmst_cifar", img_size=(32, 64)))
    ((images, _),) = list(sample(create_model("dmst_digits", dtype=torch.bfloat16), limit=3))
    assert images.dtype == torch.bfloat16
