"""Every parameter count that the reference states, to the digit. Built on meta: shapes without numbers.

Each row says which classifier it counts (`classes`; 0 is none). Where a count is ours, its formula stands beside it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from dmst.models import create_model, list_models, model_config

SIZES = ("tiny", "small", "medium", "large")


def count(name: str, **options: Any) -> int:
    return parameters(create_model(name, device="meta", **options))


def parameters(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())


# --- one skeleton, every operator ------------------------------------------------------------------------------------

COLUMNS: dict[str, dict[str, Any]] = {
    "tssa": {"operator": "tssa"},
    "dmsa": {"operator": "dmsa"},
    "mhsa": {"operator": "mhsa"},
    "xca": {"operator": "xca"},
    "mssa": {"operator": "mssa"},
    "dmsa equation": {"operator": "dmsa", "mode": "equation"},
}
# (size, classes) -> one count a column; patch 16, biases, two class-attention blocks
TABLE: dict[tuple[str, int], tuple[int, ...]] = {
    ("tiny", 10): (5_578_258, 5_587_426, 6_467_554, 6_467_602, 5_578_210, 5_142_754),
    ("tiny", 1000): (5_769_328, 5_778_496, 6_658_624, 6_658_672, 5_769_280, 5_333_824),
    ("small", 10): (22_208_794, 22_245_562, 25_756_858, 25_756_954, 22_208_698, 20_471_482),
    ("small", 1000): (22_589_944, 22_626_712, 26_138_008, 26_138_104, 22_589_848, 20_852_632),
    ("medium", 10): (70_973_194, 71_071_306, 83_580_490, 83_580_682, 70_973_002, 64_767_562),
    ("medium", 1000): (71_481_064, 71_579_176, 84_088_360, 84_088_552, 71_480_872, 65_275_432),
    ("large", 10): (159_525_610, 159_820_138, 187_873_642, 187_874_026, 159_525_226, 145_645_930),
    ("large", 1000): (160_286_920, 160_581_448, 188_634_952, 188_635_336, 160_286_536, 146_407_240),
}


@pytest.mark.parametrize(("size", "classes"), TABLE)
def test_operators_on_one_skeleton(size: str, classes: int) -> None:
    for options, expected in zip(COLUMNS.values(), TABLE[size, classes], strict=True):
        assert count(f"tost_{size}", num_classes=classes, **options) == expected
    for operator in ("tpusa", "tpsusa", "gated_channel"):  # which count as DMSA
        assert count(f"tost_{size}", num_classes=classes, operator=operator) == TABLE[size, classes][1]


@pytest.mark.parametrize(
    ("size", "options", "classes", "tssa", "dmsa"),
    [
        ("tiny", {"patch_size": 8}, 1000, 5_759_560, 5_768_728),
        ("small", {"patch_size": 8}, 1000, 22_549_672, 22_586_440),
        ("tiny", {}, 0, 5_576_328, 5_585_496),
    ],
)
def test_other_patches_and_heads(size: str, options: dict[str, Any], classes: int, tssa: int, dmsa: int) -> None:
    assert count(f"tost_{size}", num_classes=classes, **options) == tssa
    assert count(f"dmst_{size}", num_classes=classes, **options) == dmsa
    if options:  # the same under the name of its own
        assert count(f"tost_{size}_patch8_224") == tssa
        assert count(f"dmst_{size}_patch8_224") == dmsa


def test_the_named_models_are_those_of_the_table() -> None:
    """By name alone: 1000 classes."""
    for size in SIZES:
        tssa, dmsa = TABLE[size, 1000][:2]
        assert (count(f"tost_{size}"), count(f"dmst_{size}")) == (tssa, dmsa)
        assert (count(f"tost_{size}_patch16_224"), count(f"dmst_{size}_patch16_224")) == (tssa, dmsa)


@pytest.mark.parametrize("size", SIZES[:2])
def test_differences_by_rule(size: str) -> None:
    """What one operator has and another has not, from d, k and depth alone."""
    config = model_config(f"dmst_{size}")
    d, k, depth = config.dim, config.num_heads, config.depth
    found = {name: count(f"dmst_{size}", num_classes=10, **options) for name, options in COLUMNS.items()}
    assert found["dmsa"] - found["tssa"] == depth * (d * k - k)  # assign added, temperature removed
    assert found["tssa"] - found["mssa"] == depth * k  # the temperature
    assert found["xca"] - found["mhsa"] == depth * k
    assert found["mhsa"] - found["mssa"] == depth * 2 * (d * d + d)  # three projections instead of one
    assert found["dmsa"] - found["dmsa equation"] == depth * (d * d + d)  # the output, weight and bias
    assert count(f"dmst_{size}", num_classes=10, qkv_bias=False) == found["dmsa"] - (depth + 2 * 3) * d
    assert count(f"dmst_{size}", num_classes=10, layer_scale=None) == found["dmsa"] - (depth + 2) * 2 * d


def test_the_differences_of_the_paper() -> None:
    assert TABLE["tiny", 10][1] - TABLE["tiny", 10][0] == 9_168
    assert TABLE["small", 10][1] - TABLE["small", 10][0] == 36_768


@pytest.mark.parametrize(("size", "expected"), [("tiny", 5_140_474), ("small", 20_466_898)])
def test_proximal(size: str, expected: int) -> None:
    """10 classes. Per block, beside `equation`: one step size theta more, one LayerScale number instead of d (the
    feed-forward keeps its vector)."""
    config = model_config(f"dmst_{size}")
    tied = TABLE[size, 10][5]
    assert count(f"dmst_{size}", mode="proximal", num_classes=10) == expected == tied + config.depth * (1 - (config.dim - 1))
    assert count(f"dmst_{size}", operator="tpsusa", mode="proximal", num_classes=10) == expected


# --- GMSA, ours -------------------------------------------------------------------------------------------------------

GMST: dict[str, tuple[int, int]] = {  # 10 and 1000 classes
    "tiny": (5_733_346, 5_924_416),
    "small": (22_832_314, 23_213_464),
    "medium": (72_634_954, 73_142_824),
    "large": (164_526_442, 165_287_752),
}


@pytest.mark.parametrize("size", SIZES)
def test_gmst(size: str) -> None:
    """Beside DMSA: keys of width 16 with a bias, and no bias of the subspaces. The number of groups changes no count."""
    options: dict[str, Any] = {"key_dim": 16, "gate_activation": "gelu", "mode": "listing"}
    config = model_config(f"gmst_{size}")
    d, keys, depth = config.dim, 16 * config.num_heads, config.depth
    for classes, expected in zip((10, 1000), GMST[size], strict=True):
        dmsa = TABLE[size, classes][1]
        assert count(f"gmst_{size}", num_classes=classes, **options) == expected == dmsa + depth * (keys * (d + 1) - d)
    found = count(f"gmst_{size}", groups=4, num_classes=10, **options)
    assert found == GMST[size][0]
    without = {
        name: found - count(f"gmst_{size}", num_classes=10, **options | {key: name})
        for key, name in (("gate_activation", "none"), ("mode", "equation"), ("mode", "proximal"))
    }
    assert without["none"] == depth * d * config.num_heads
    assert without["equation"] == depth * (d * d + d)  # the output, weight and bias
    assert without["proximal"] == without["equation"] + depth * (d - 1 - config.num_heads)  # a step size per head, one scale


# --- what the paper prints -------------------------------------------------------------------------------------------


def test_the_printed_figures_by_the_adopted_reading() -> None:
    """5.57 / 5.58 / 22.20 / 22.25 M: 10 classes, three truncated and the last rounded; no other head gives the last."""
    printed = {("tost", "tiny"): 5.57, ("dmst", "tiny"): 5.58, ("tost", "small"): 22.20, ("dmst", "small"): 22.25}
    for (family, size), figure in printed.items():
        hundredths = count(f"{family}_{size}", num_classes=10) / 1e4
        shorten = round if figure == 22.25 else math.floor
        assert shorten(hundredths) == round(100 * figure)
    for classes in (0, 100, 1000):
        hundredths = count("dmst_small", num_classes=classes) / 1e4
        assert 2225 not in (round(hundredths), math.floor(hundredths))


# --- the small models of the ablations, 10 classes -------------------------------------------------------------------


def test_cifar_models() -> None:
    """Reading (a): depth 8, patch 4 by a stem whose first stride is 1, the mean of the patches; no class token at all."""
    assert count("tost_cifar") == 3_193_242
    for operator in ("dmsa", "tpusa", "tpsusa", "gated_channel"):
        assert count("dmst_cifar", operator=operator) == count("tost_cifar", operator=operator) == 3_199_354
    assert [round(n / 1e4) for n in (3_193_242, 3_199_354)] == [319, 320]  # as printed: 3.19 and 3.20 M
    assert count("dmst_cifar", patch_size=8) == 3_199_354  # strides do not change the count
    d, k, depth = 192, 4, 8
    mssa = 3_193_242 - depth * k
    assert count("vit_cifar") == mssa + depth * 2 * (d * d + d)
    mlp_step = 2 * d * 4 * d + 5 * d + d + 2 * d  # two maps with biases, a LayerScale, a norm
    ista = d * d + 2 * d  # a dictionary, a norm
    assert count("crate_cifar") == mssa - depth * (d + d + mlp_step - ista)  # no input bias, no LayerScale


def test_the_other_readings_of_the_ablation() -> None:
    b = {"mlp_ratio": 2.0, "readout_depth": 1, "patch_size": 8, "img_size": 32, "num_classes": 10}
    assert count("tost_tiny", qkv_bias=False, **b) == 3_198_442
    assert count("dmst_tiny", qkv_bias=False, **b) == 3_207_610
    # (c) counts 17 places, one of them the class token's; here no class token is among the patches, so none is stored
    assert count("tost_tiny", position="learned", **b) == 3_192_106 - 192
    assert count("dmst_tiny", position="learned", **b) == 3_201_274 - 192


# --- families of their own, 1000 classes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"), [("tiny", 6_090_856), ("small", 13_116_328), ("base", 22_796_008), ("large", 77_641_192)]
)
def test_crate(size: str, expected: int) -> None:
    assert count(f"crate_{size}", num_classes=1000) == count(f"crate_{size}") == expected


@pytest.mark.parametrize(
    ("size", "expected"), [("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656), ("large", 304_326_632)]
)
def test_vit_counts_as_published(size: str, expected: int) -> None:
    """224 pixels, patch 16: the counts of timm's vit_*_patch16_224."""
    assert count(f"vit_{size}_patch16_224", num_classes=1000) == expected


# --- nothing dead, nothing twice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_models())
def test_only_parameters_and_batch_norm_are_stored(name: str) -> None:
    """At full size: no parameter is counted twice or shared, and the only buffers are those of batch norm."""
    model = create_model(name, device="meta")
    every = [x for _, x in model.named_parameters(remove_duplicate=False)]
    assert len({id(x) for x in every}) == len(every)
    stored = sum(x.numel() for x in model.state_dict().values())
    norms = sum(2 * m.num_features + 1 for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert stored == parameters(model) + norms
    parts = (model.stem, model.position, model.blocks, model.class_blocks, model.norm, model.head)
    token = 0 if model.cls_token is None else model.config.dim
    assert sum(map(parameters, parts)) + token == parameters(model)
    assert (model.cls_token is None) == (model.config.readout == "mean")
