"""What timm asks of a model, of every model of the zoo, made small: each keeps its stem, positions, feed-forward and readout.

timm itself is not needed here: test_timm.py has what it makes of them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmst
from dmst.models.vision import VisionModel
from dmst.models.zoo import MODELS, model_config, timm_name
from tests.cases import FEW

SMALL = {"dim": 32, "depth": 3, "num_heads": 2}
GRID = (3, 2)
FAMILIES = [
    "dmst_tiny_patch16_224",
    "gmst_tiny_patch8_224",
    "tost_small_patch8_224",
    "vit_tiny_patch16_224",
    "crate_tiny_patch8_224",
    "dmst_cifar",
]

every_model = pytest.mark.parametrize("name", MODELS, ids=timm_name)
one_of_each = pytest.mark.parametrize("name", FAMILIES, ids=timm_name)


def small(name: str, **options: Any) -> dict[str, Any]:
    """Keywords that make a named model small."""
    config = model_config(name)
    few = FEW.get(options.get("operator", config.operator), {})
    return SMALL | few | {"img_size": (GRID[0] * config.patch_size, GRID[1] * config.patch_size)} | options


def create(name: str, **options: Any) -> Any:
    return dmst.create_model(name, **small(name, **options))


def images(model: VisionModel, batch: int = 2) -> Tensor:
    return torch.randn(batch, model.config.in_chans, *model.config.img_size)  # type: ignore[misc]


@every_model
def test_forward(name: str) -> None:
    model = create(name, num_classes=7)
    assert type(model) is VisionModel
    x = images(model)
    for training in (True, False):
        logits = model.train(training)(x)
        assert type(logits) is Tensor and logits.shape == (2, 7) and logits.isfinite().all()
    model.set_grad_checkpointing()
    assert model.grad_checkpointing
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-5)


@one_of_each
def test_default_configuration(name: str) -> None:
    model = create(name).eval()
    cfg, x, dim = model.default_cfg, images(model), SMALL["dim"]
    assert cfg is model.pretrained_cfg
    assert model.num_classes == cfg["num_classes"] == model_config(name).num_classes
    assert model.num_features == model.head_hidden_size == model.embed_dim == dim
    assert cfg["input_size"] == [model.config.in_chans, *model.config.img_size]
    parameters = dict(model.named_parameters())
    assert f"{cfg['classifier']}.weight" in parameters and f"{cfg['first_conv']}.weight" in parameters

    tokens = model.forward_features(x)
    assert tokens.shape == (2, (model.cls_token is not None) + GRID[0] * GRID[1], dim)
    features = model.forward_head(tokens, pre_logits=True)
    assert features.shape == (2, dim)
    torch.testing.assert_close(model.get_classifier()(features), model(x))

    model.reset_classifier(0)
    assert model.num_classes == 0 and torch.equal(model(x), features)
    model.reset_classifier(0, "")
    assert model.global_pool == "" and torch.equal(model(x), tokens)
    model.reset_classifier(11, "avg")
    assert model(x).shape == (2, 11) and model.get_classifier().out_features == 11
    headless = create(name, num_classes=0).eval()
    assert type(headless.get_classifier()) is nn.Identity and headless(x).shape == (2, dim)


@one_of_each
def test_intermediates(name: str) -> None:
    model = create(name).eval()
    x, depth, config = images(model), SMALL["depth"], model.config
    assert len(model.feature_info) == depth >= 3
    assert all(row["num_chs"] == SMALL["dim"] and row["reduction"] == config.patch_size for row in model.feature_info)
    assert all(model.get_submodule(row["module"]) is model.blocks[i] for i, row in enumerate(model.feature_info))

    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x)) and len(maps) == depth
    for row, seen in zip(model.feature_info, maps, strict=True):
        assert seen.shape == (2, row["num_chs"], *(side // row["reduction"] for side in x.shape[2:]))
        assert seen.is_contiguous()
    assert torch.equal(model.forward_intermediates(x, 1, intermediates_only=True)[0], maps[-1])
    first, last = model.forward_intermediates(x, [0, -1], intermediates_only=True, output_fmt="NLC")
    assert torch.equal(first, maps[0].flatten(2).mT) and torch.equal(last, maps[-1].flatten(2).mT)

    with_prefix = model.forward_intermediates(x, [1], return_prefix_tokens=True, intermediates_only=True)
    assert torch.equal(with_prefix[0][0], maps[1]) and with_prefix[0][1].shape == (2, config.prefix, SMALL["dim"])
    normed = model.forward_intermediates(x, 1, norm=True, output_fmt="NLC", intermediates_only=True)[0]
    torch.testing.assert_close(normed, model.norm(last))
    if config.readout != "class_attention":  # nothing but the norm comes after the last block
        assert torch.equal(normed, final[:, config.prefix :])


@one_of_each
def test_intermediates_stop_early_and_pruned(name: str) -> None:
    model, calls = create(name).eval(), []
    x = images(model)
    wanted = model.forward_intermediates(x, [0, 1], intermediates_only=True)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    found = model.forward_intermediates(x, [0, 1], stop_early=True, intermediates_only=True)
    assert len(calls) == 2 and all(map(torch.equal, wanted, found))
    assert model.prune_intermediate_layers([0, -2], prune_norm=True) == [0, 1]
    assert len(model.blocks) == 2 and type(model.norm) is type(model.get_classifier()) is nn.Identity
    assert len(model.class_blocks) == 0
    assert all(map(torch.equal, wanted, model.forward_intermediates(x, [0, 1], intermediates_only=True)))


@one_of_each
def test_groups_by_depth(name: str) -> None:
    """One pattern for every parameter; those without come last."""
    model = create(name)
    for coarse, last in ((True, {"head", "norm", *(["class_blocks"] if len(model.class_blocks) else [])}), (False, {"head"})):
        rows = model.group_matcher(coarse).values()
        patterns = [pattern for row in rows for pattern, _ in (row if isinstance(row, list) else [(row, None)])]
        met = {key: [p for p in patterns if re.match(p, key)] for key, _ in model.named_parameters()}
        assert max(map(len, met.values())) == 1
        assert {key.split(".")[0] for key, found in met.items() if not found} == last
