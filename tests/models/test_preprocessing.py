"""How a network normalises images: by the dataset it was trained on, saved with it; by its name where nothing is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmst.atomic import sealed
from dmst.data.catalog import CATALOG
from dmst.engine.prepare import build_model
from dmst.engine.recipe import Recipe, read_recipe
from dmst.models import create_model, load_model, save_model
from dmst.models.preprocessing import set_mean_std


def recipe(*changes: str) -> Recipe:
    return read_recipe("digits", ["model.name=dmst_cifar", "model.options.depth=1", "model.options.dim=48", *changes])


def told(model: object) -> tuple[list[float], list[float]]:
    cfg = model.pretrained_cfg  # type: ignore[attr-defined]
    return list(cfg["mean"]), list(cfg["std"])


def test_the_dataset_decides_and_weights_keep_what_they_learned_with(tmp_path: Path) -> None:
    model = build_model(recipe("data.name=tinyimagenet"), ["a", "b"], 3)
    tiny = CATALOG["tinyimagenet"].statistics
    assert told(model) == (list(tiny.mean), list(tiny.std))
    save_model(model, tmp_path / "saved")
    assert told(load_model(tmp_path / "saved")) == told(model)
    tuned = build_model(recipe("data.name=cifar10", f"model.init_from={tmp_path / 'saved'}"), ["c", "d"], 3)
    assert told(tuned) == told(model)
    assert told(build_model(recipe("data.name=some/folder"), ["a", "b"], 3)) == told(create_model("dmst_cifar"))
    assert told(build_model(recipe("data.name=digits"), ["a", "b"], 3)) == ([0.5] * 3, [0.5] * 3)  # grey, repeated


@pytest.mark.parametrize("stated", [None, {}, {"mean": [0.1], "std": "x"}, {"mean": [0.1, 0.2], "std": [1, 2]}])
def test_a_file_that_says_nothing_gets_the_rule_by_name(stated: object, tmp_path: Path) -> None:
    model = create_model("dmst_cifar", depth=1)
    set_mean_std(model.pretrained_cfg, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    path = save_model(model, tmp_path / "saved") / "config.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "self_sha256"}
    path.write_bytes(sealed(content | {"pretrained_cfg": stated}))
    assert told(load_model(tmp_path / "saved")) == ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])


def test_what_cannot_be_is_not_taken() -> None:
    cfg = create_model("dmst_cifar", depth=1, device="meta").pretrained_cfg
    before = dict(cfg)
    for mean, std in (((0.1,) * 3, (0.0,) * 3), ((float("nan"),) * 3, (1.0,) * 3), ((0.1,) * 2, (1.0,) * 2), (None, None)):
        set_mean_std(cfg, mean, std)
        assert cfg == before
