"""The weights of a network: their names, where they start, which are not decayed, and another classifier."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dmst.errors import OptionError
from dmst.models import VisionModel, create_model
from dmst.operators.gmsa import KEY_STD
from dmst.operators.orthonormal import OrthonormalLinear, is_orthonormal
from tests.cases import relative
from tests.networks import (
    BATCH,
    SMALL,
    Case,
    build,
    images,
    some,
)

# --- names of the weights --------------------------------------------------------------------------------------------

KEYS = """
    cls_token stem.layers.0.weight stem.layers.1.weight stem.layers.1.bias stem.layers.1.running_mean
    stem.layers.1.running_var stem.layers.1.num_batches_tracked stem.layers.3.weight stem.layers.4.weight
    stem.layers.4.bias stem.layers.4.running_mean stem.layers.4.running_var stem.layers.4.num_batches_tracked
    stem.layers.6.weight stem.layers.7.weight stem.layers.7.bias stem.layers.7.running_mean stem.layers.7.running_var
    stem.layers.7.num_batches_tracked position.projection.weight position.projection.bias blocks.0.norm.weight
    blocks.0.norm.bias blocks.0.operator.subspace.weight blocks.0.operator.subspace.bias
    blocks.0.operator.assign.weight blocks.0.operator.out.weight blocks.0.operator.out.bias blocks.0.residual.scale
    blocks.0.feedforward.norm.weight blocks.0.feedforward.norm.bias blocks.0.feedforward.mlp.fc1.weight
    blocks.0.feedforward.mlp.fc1.bias blocks.0.feedforward.mlp.fc2.weight blocks.0.feedforward.mlp.fc2.bias
    blocks.0.feedforward.residual.scale class_blocks.0.norm1.weight class_blocks.0.norm1.bias
    class_blocks.0.qkv.weight class_blocks.0.qkv.bias class_blocks.0.out.weight class_blocks.0.out.bias
    class_blocks.0.attention_residual.scale class_blocks.0.norm2.weight class_blocks.0.norm2.bias
    class_blocks.0.mlp.fc1.weight class_blocks.0.mlp.fc1.bias class_blocks.0.mlp.fc2.weight
    class_blocks.0.mlp.fc2.bias class_blocks.0.residual.scale norm.weight norm.bias head.weight head.bias
"""
# the other families: what departs from the above in a block, and around it
BLOCK_KEYS = {
    "vit_tiny": """norm.weight norm.bias operator.qkv.weight operator.qkv.bias operator.out.weight operator.out.bias
        feedforward.norm.weight feedforward.norm.bias feedforward.mlp.fc1.weight feedforward.mlp.fc1.bias
        feedforward.mlp.fc2.weight feedforward.mlp.fc2.bias""",
    "crate_tiny": """norm.weight norm.bias operator.subspace.weight operator.out.weight operator.out.bias
        feedforward.dictionary feedforward.norm.weight feedforward.norm.bias""",
}
AROUND_KEYS = {
    "vit_tiny": """cls_token stem.projection.weight stem.projection.bias position.table norm.weight norm.bias
        head.weight head.bias""",
    "crate_tiny": """cls_token stem.norm_in.weight stem.norm_in.bias stem.projection.weight stem.projection.bias
        stem.norm_out.weight stem.norm_out.bias position.table norm.weight norm.bias head.weight head.bias""",
}


def test_the_names_in_a_saved_file() -> None:
    """Written out, because a rename would make every saved model useless."""
    model = create_model("dmst_tiny", dim=16, depth=1, num_heads=2, readout_depth=1, patch_size=8, img_size=8, num_classes=3)
    assert list(model.state_dict()) == KEYS.split()


@pytest.mark.parametrize("name", BLOCK_KEYS)
def test_the_names_of_other_families(name: str) -> None:
    keys = {f"blocks.{i}.{key}" for i in range(2) for key in BLOCK_KEYS[name].split()}
    assert set(build((name, {})).state_dict()) == keys | set(AROUND_KEYS[name].split())


# --- where the weights start -----------------------------------------------------------------------------------------


def fresh(case: Case, seed: int = 1, **options: Any) -> VisionModel:
    torch.manual_seed(seed)
    return create_model(case[0], **SMALL | {"dim": 96} | case[1] | options)


@some
def test_the_start_of_every_weight(case: Case) -> None:
    """Also of one that was built on meta, moved to memory full of NaN, and reset: no entry is forgotten."""
    reset = fresh(case, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for x in reset.state_dict(keep_vars=True).values():
            x.fill_(math.nan if x.is_floating_point() else 7)
    torch.manual_seed(2)
    reset.init_weights()
    for model in (fresh(case), reset):
        check_start(model)
    assert list(reset.state_dict()) == list(fresh(case).state_dict())


def check_start(model: VisionModel) -> None:
    config, modules = model.config, dict(model.named_modules())
    for key, x in model.state_dict().items():
        owner, _, kind = key.rpartition(".")
        module = modules[owner]
        if kind in ("theta", "temperature"):
            assert torch.allclose(F.softplus(x) if kind == "theta" else x, torch.ones_like(x)), key
        elif kind == "scale":
            assert torch.equal(x, torch.full_like(x, config.layer_scale)), key
            scalar = config.operator_options.get("mode") == "proximal" and re.fullmatch(r"blocks\.\d\.residual", owner)
            assert x.shape == ((1,) if scalar else (96,)), key
        elif key in ("cls_token", "position.table"):
            assert 0.8 * config.token_std < x.std() < 1.2 * config.token_std and x.abs().max() < 6 * config.token_std, key
        elif kind == "dictionary":
            bound = math.sqrt(6 / 96)  # kaiming, uniform
            assert 0.98 * bound < x.abs().max() <= bound and abs(x.std() / (bound / 3**0.5) - 1) < 0.05, key
        elif owner.endswith(".local"):
            assert not x.any(), key
        elif isinstance(module, nn.Conv2d):
            fan = module.in_channels * module.kernel_size[0] ** 2
            assert 0.8 * fan**-0.5 < x.abs().max() <= fan**-0.5, key  # PyTorch's own
        elif isinstance(module, OrthonormalLinear):
            assert is_orthonormal(x) if kind == "weight" else not x.any(), key
        elif isinstance(module, nn.Linear):
            std = KEY_STD if owner.endswith("operator.key") else 0.02
            assert (abs(x.std() / std - 1) < 0.12 and abs(x.mean()) < 0.15 * std) if kind == "weight" else not x.any(), key
        elif kind in ("weight", "running_var"):
            assert torch.equal(x, torch.ones_like(x)), key
        else:
            assert kind in ("bias", "running_mean", "num_batches_tracked") and not x.any(), key


@some
def test_the_seed_decides_the_start(case: Case) -> None:
    same = [fresh(case, seed).state_dict() for seed in (1, 1, 2)]
    assert all(torch.equal(same[0][key], same[1][key]) for key in same[0])
    random = [key for key in same[0] if not torch.equal(same[0][key], same[2][key])]
    assert {"head.weight", "blocks.1.operator.out.weight"} & set(random)


def test_layer_scale() -> None:
    """1 at depth 12, 1e-5 at depth 24, one number beside a proximal step, none where the family has none."""
    scales = {
        name: {
            key: x
            for key, x in create_model(name, dim=16, num_heads=2, img_size=16).named_parameters()
            if key.endswith("scale")
        }
        for name in ("dmst_tiny", "dmst_large", "tost_medium", "vit_tiny", "crate_tiny")
    }
    assert {len(scales[name]) for name in ("vit_tiny", "crate_tiny")} == {0}
    for name, depth, start in (("dmst_tiny", 12, 1.0), ("dmst_large", 24, 1e-5), ("tost_medium", 24, 1e-5)):
        assert len(scales[name]) == 2 * (depth + 2)
        assert all(torch.equal(x, torch.full((16,), start)) for x in scales[name].values())
    model = build(("dmst_tiny", {"mode": "proximal"}), layer_scale=0.3)
    assert {block.residual.scale.shape for block in model.blocks} == {(1,)}
    assert {block.feedforward.residual.scale.shape for block in model.blocks} == {(24,)}


@some
def test_what_is_not_decayed(case: Case) -> None:
    """Beside the vectors, which no optimizer decays: tokens, places, scales, temperatures, step sizes. No matrix of a map."""
    model = build(case)
    still = model.no_weight_decay()
    for key, x in model.named_parameters():
        last = key.rpartition(".")[2]
        special = key in ("cls_token", "position.table") or last in ("scale", "temperature", "theta")
        assert (key in still) == special, key
        assert special or x.ndim < 2 or last in ("weight", "dictionary"), key
    assert still <= {key for key, _ in model.named_parameters()}


# --- the classifier --------------------------------------------------------------------------------------------------


@some
def test_another_classifier(case: Case) -> None:
    model, x = build(case, torch.float32).bfloat16().eval(), images(dtype=torch.bfloat16)
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    assert torch.equal(model.head(features), model(x)) and model.get_classifier() is model.head
    kept = {key: y for key, y in model.state_dict().items() if not key.startswith("head")}
    model.reset_classifier(11)
    assert model(x).shape == (BATCH, 11) and model.num_classes == model.config.num_classes == 11
    assert model.head.weight.dtype == torch.bfloat16 and not model.head.bias.any()
    assert abs(model.head.weight.float().std() - 0.02) < 0.003
    model.reset_classifier(0)
    assert torch.equal(model(x), features) and type(model.head) is nn.Identity
    assert all(torch.equal(y, kept[key]) for key, y in model.state_dict().items())
    with pytest.raises(OptionError, match="num_classes is -1"):
        model.reset_classifier(-1)
    assert model.num_classes == 0 and torch.equal(model(x), features)  # a refusal changes nothing
    with pytest.raises(OptionError, match="global_pool"):
        model.reset_classifier(5, "max")
    assert model.num_classes == 0 and torch.equal(model(x), features)


@pytest.mark.parametrize("readout", ["class_attention", "token", "mean"])
def test_what_the_classifier_reads(readout: str) -> None:
    model, x = build(("tost_tiny", {"readout": readout})).eval(), images()
    tokens, prefix = model.forward_features(x), int(readout != "mean")
    assert tokens.shape == (BATCH, 6 + prefix, 24) and model.num_prefix_tokens == (readout == "token")
    assert (model.cls_token is None) == (readout == "mean") and len(model.class_blocks) == 2 * (readout == "class_attention")
    own = tokens[:, 0] if prefix else tokens.mean(1)
    assert relative(model(x), model.head(own)) < 1e-13
    for pool, wanted in (("avg", tokens[:, prefix:].mean(1)), ("", tokens)):
        model.reset_classifier(0, pool)
        assert torch.equal(model(x), wanted)
    blocks_see = model.trace(x).layers[0].z.shape[1]
    assert blocks_see == 6 + (readout == "token")  # a class token is among the patches in one of the three


def test_dropout_before_the_classifier() -> None:
    model = build(("dmst_tiny", {}), drop_rate=0.5)
    tokens = model.forward_features(images())
    dropped, kept = model.forward_head(tokens, pre_logits=True), model.eval().forward_head(tokens, pre_logits=True)
    on = dropped != 0
    assert 0.3 < on.double().mean() < 0.7 and torch.equal(dropped[on], 2 * kept[on])
