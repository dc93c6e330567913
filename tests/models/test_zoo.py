"""Models by name: what is listed builds, what is misspelt is named, and every field of a config has a rule."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import dmst
from dmst.errors import OptionError, ShapeError, UnknownNameError
from dmst.models import ModelConfig, VisionModel, create_model, list_models, model_config
from dmst.models.zoo import ALIASES, MODELS

SMALL: dict[str, Any] = {"dim": 24, "depth": 1, "num_heads": 3, "img_size": 32, "num_classes": 5}
FAMILIES = ("dmst", "gmst", "tost", "vit", "crate")


def tiny(name: str = "dmst_tiny", **options: Any) -> VisionModel:
    return create_model(name, **SMALL | options)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_models())
def test_every_listed_model_builds_by_its_name(name: str) -> None:
    model = create_model(name, device="meta")
    config = model.config
    assert config == model_config(name) == ModelConfig(**json.loads(json.dumps(config.to_dict()))) and config.name == name
    images = torch.empty(2, config.in_chans, *config.img_size, device="meta")  # type: ignore[misc]
    assert model(images).shape == (2, config.num_classes)
    family, size, *rest = name.split("_")
    assert family in FAMILIES
    if rest:
        assert rest == [f"patch{config.patch_size}", "224"] and config.img_size == (224, 224) and config.num_classes == 1000
    else:
        assert config.num_classes == (100 if size == "cifar100" else 10) and config.readout == "mean"
        assert config.grid == (8, 8) and config.img_size == ((8, 8) if size == "digits" else (32, 32))


def test_families_differ_where_they_should() -> None:
    def parts(name: str) -> tuple:
        c = model_config(name)
        return c.operator, c.stem, c.position, c.feedforward, c.readout, c.qkv_bias

    assert parts("dmst_tiny") == ("dmsa", "conv", "fourier", "mlp", "class_attention", True)
    assert parts("gmst_tiny") == ("gmsa", "conv", "fourier", "mlp", "class_attention", True)
    assert parts("tost_tiny") == ("tssa", "conv", "fourier", "mlp", "class_attention", True)
    assert parts("vit_tiny") == ("mhsa", "patch", "learned", "mlp", "token", True)
    assert parts("crate_tiny") == ("mssa", "norm_patch", "learned", "ista", "token", False)
    assert parts("vit_cifar") == ("mhsa", "conv", "fourier", "mlp", "mean", True)
    assert parts("crate_cifar") == ("mssa", "conv", "fourier", "ista", "mean", False)
    dmst_cifar = model_config("dmst_cifar")
    for family in ("gmst", "tost", "vit"):  # one skeleton: only the operator differs
        assert replace(model_config(f"{family}_cifar"), operator="dmsa", name="dmst_cifar") == dmst_cifar


def test_short_names() -> None:
    assert model_config("dmst_small") == model_config("dmst_small_patch16_224")
    assert model_config("crate_medium") == model_config("crate_base_patch16_224")
    assert model_config("dmst_vit_tiny_patch16_224") == model_config("vit_tiny")  # as timm calls it
    assert not ALIASES.keys() & MODELS.keys()
    assert set(ALIASES.values()) <= MODELS.keys()
    assert dmst.create_model is create_model and dmst.list_models is list_models


def test_patterns() -> None:
    assert list_models() == sorted(MODELS)
    assert list_models("dmst_tiny*") == ["dmst_tiny_patch16_224", "dmst_tiny_patch8_224"]
    assert list_models("*cifar") == ["crate_cifar", "dmst_cifar", "gmst_cifar", "tost_cifar", "vit_cifar"]
    assert list_models("dmst_tiny") == list_models("dmst_tiny*")
    assert list_models("tiny_patch8") == [f"{family}_tiny_patch8_224" for family in ("crate", "dmst", "gmst", "tost", "vit")]
    assert list_models("resnet") == []


def test_an_unknown_model_names_the_nearest() -> None:
    for name, near in (("dmst_tinny", "dmst_tiny"), ("dmst-cifar", "dmst_cifar")):
        with pytest.raises(UnknownNameError, match=rf"unknown model '{name}'\. Did you mean '{near}'\? Known: .*dmst_cifar"):
            create_model(name)
    for name in (None, 5, ["dmst_tiny"], ""):
        with pytest.raises(UnknownNameError, match="unknown model"):
            create_model(name)  # type: ignore[arg-type]


# --- overrides -------------------------------------------------------------------------------------------------------


def test_options_of_the_operator() -> None:
    model = tiny(mode="equation", rotary="2d", gate_scale=2.0)
    assert model.config.operator_options == {"mode": "equation", "rotary": "2d", "gate_scale": 2.0}
    form = model.blocks[0].operator.form
    assert (form.mode, form.rotary, form.gate_scale) == ("equation", "2d", 2.0)
    both = tiny("vit_tiny", operator="tssa", position_scores="1d")
    assert both.blocks[0].operator.form.rotary == "1d"
    again = model.config.change(gate_scale=3.0)  # more options join those that are there
    assert again.operator_options == {"mode": "equation", "rotary": "2d", "gate_scale": 3.0}
    other = model.config.change(operator="tssa")  # those of another operator do not
    assert other.operator_options == {} and other.operator == "tssa"
    assert model.config.change(operator="dmsa").operator_options == model.config.operator_options
    assert model.config.change(operator_options={"rotary": "1d"}).operator_options == {"rotary": "1d"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dmst_tiny", {"rotari": "2d"}, "'rotari'. Did you mean 'rotary'?"),
        ("dmst_tiny", {"drop_path": 0.1}, "'drop_path'. Did you mean 'drop_path_rate'?"),
        ("dmst_tiny", {"operator": "tssa", "gate_scale": 2.0}, "with operator 'tssa' 'gate_scale'."),
        ("dmst_tiny", {"bias": False}, "with operator 'dmsa' 'bias'. Did you mean 'qkv_bias'?"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(message)):
        create_model(name, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "equations"}, "mode 'equations'. Did you mean 'equation'"),
        ({"rotary": "3d"}, "'3d'. Did you mean"),
        ({"operator": "dsma"}, "unknown operator 'dsma'. Did you mean 'dmsa'"),
        ({"operator": 5}, "unknown operator 5"),
        ({"max_active_heads": 9}, "from 1 to num_heads 3"),
        ({"num_heads": 5}, "dim 24 is not divisible by num_heads 5; the nearest that divides it is 4"),
        ({"stem": "patches"}, "unknown stem 'patches'. Did you mean 'patch'"),
        ({"readout": "cls"}, "unknown readout 'cls'"),
        ({"operator": ""}, "unknown operator ''"),
        ({"gate_scale": "1"}, "gate_scale"),
        ({"img_size": 100}, "100 is not a multiple of the patch size 16; 96 is"),
        ({"patch_size": 12, "img_size": 24}, "power of two"),
        ({"dim": 30}, "needs a multiple of 8"),
        ({"img_size": 40000}, "img_size is 40000: it must be a whole number from 1 to 4,096"),
        ({"img_size": 512, "patch_size": 1}, "img_size is (512, 512): that is 262,144 patches, and at most 65,536"),
        ({"dim": 10**6}, "dim is 1000000: it must be a whole number from 1 to 65,536"),
        ({"readout_depth": 0}, "never looks at the patches"),
        ({"operator": "gmsa", "img_size": 32}, "img_size (32, 32) gives 4 tokens, and gmsa needs at least 16"),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        tiny(**options)


@pytest.mark.parametrize("operator", ["dmsa", "tssa"])
def test_2d_positions_and_a_class_token_do_not_go_together(operator: str) -> None:
    option = "position_scores" if operator == "tssa" else "rotary"
    for name, options in (("vit_tiny", {}), ("dmst_tiny", {"readout": "token"})):
        with pytest.raises(OptionError, match="2d positions need a grid of patches alone"):
            model_config(name, operator=operator, **{option: "2d"}, **options)
        assert model_config(name, operator=operator, **{option: "1d"}, **options)
    assert tiny(operator=operator, **{option: "2d"})(torch.randn(1, 3, 32, 16)).shape == (1, 5)


# --- images that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 32, 32), r"takes images of shape \(batch, 3, height, width\), not \(3, 32, 32\): images\[None\]"),
        ((1, 2, 3, 32, 32), r"not \(1, 2, 3, 32, 32\)"),
        ((2, 1, 32, 32), r"not \(2, 1, 32, 32\): .*in_chans= builds"),
        ((2, 32, 32, 3), r"images.permute moves channels"),
        ((2, 3, 40, 32), r"patches of 16 pixels, and the height is 40: resize or pad it to a multiple\."),
        ((2, 3, 32, 8), r"patches of 16 pixels, and the width is 8: resize or pad it to a multiple\."),
        ((2, 3, 0, 32), r"the height is 0"),
    ],
    ids=str,
)
def test_images_of_a_wrong_shape(shape: tuple[int, ...], message: str) -> None:
    model = tiny()
    for call in (model, model.trace, model.forward_intermediates):
        with pytest.raises(ShapeError, match=message):
            call(torch.zeros(shape))


@pytest.mark.parametrize(
    ("images", "hint"),
    [
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), r"was given torch.uint8 images: .*images / 255"),
        (torch.randn(2, 3, 32, 32).double(), r"images.to\(torch.float32\)\."),
        (torch.randn(2, 3, 32, 32).half(), "or torch.autocast"),
        (np.zeros((2, 3, 32, 32)), "takes a torch tensor"),
    ],
)
def test_images_of_a_wrong_dtype(images: Any, hint: str) -> None:
    with pytest.raises(ShapeError, match=hint):
        tiny()(images)


def test_autocast_converts_no_whole_numbers_and_no_doubles() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.uint8, torch.float64):
            with pytest.raises(ShapeError, match=f"was given {dtype} images: "):
                tiny()(torch.zeros(2, 3, 32, 32).to(dtype))
        with pytest.raises(ShapeError, match=r"holds torch.float64 weights"):
            tiny(dtype=torch.float64)(torch.zeros(2, 3, 32, 32))
        assert tiny()(torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16)).shape == (2, 5)  # what it does convert


# --- every field has a rule ------------------------------------------------------------------------------------------

NOT_WHOLE = (True, 1.0, math.nan, -1, "4", None, [4])
NOT_A_RATE = (True, math.nan, 1.1, "0.1", None)
NOT_A_WORD = (5, None, "nonsense")
BAD: dict[str, tuple] = {
    "name": (5, None),
    "dim": (*NOT_WHOLE, 0),
    "depth": (*NOT_WHOLE, 0),
    "num_heads": (*NOT_WHOLE, 0),
    "operator": NOT_A_WORD,
    "operator_options": (5, None, ["rotary"], {1: 2}, {"bias": False}, {"device": "cpu"}),
    "patch_size": (*NOT_WHOLE, 0),
    "stem": NOT_A_WORD,
    "position": NOT_A_WORD,
    "feedforward": NOT_A_WORD,
    "mlp_ratio": (True, math.nan, -1.0, 0, "4", None),
    "readout": NOT_A_WORD,
    "readout_depth": NOT_WHOLE,
    "global_pool": (5, "max"),
    "layer_scale": (True, math.inf, "1"),
    "token_std": (True, math.nan, -0.1, None),
    "norm_eps": (0, 2.0, None, True),
    "qkv_bias": (0, None, "True"),
    "drop_rate": NOT_A_RATE,
    "proj_drop_rate": NOT_A_RATE,
    "drop_path_rate": NOT_A_RATE,
    "img_size": (*NOT_WHOLE, 0, (224,), (224, 0), (224, 224.0), [], 100),
    "in_chans": (*NOT_WHOLE, 0),
    "num_classes": NOT_WHOLE,
}


@pytest.mark.parametrize(
    ("field", "value"), [pytest.param(key, x, id=f"{key}={x!r}") for key, values in BAD.items() for x in values]
)
def test_bad_values_of_every_field(field: str, value: Any) -> None:
    assert set(BAD) == {f.name for f in fields(ModelConfig)}
    with pytest.raises(OptionError, match=f"{field.partition('_options')[0]}"):
        ModelConfig(**{field: value})
    if field not in ("name", "operator"):  # the first argument, and None keeps the model's own
        with pytest.raises(OptionError, match=field.partition("_options")[0]):
            model_config("dmst_tiny", **{field: value})


def test_a_config_stays_as_it_was_made() -> None:
    options = {"rotary": "2d"}
    config = ModelConfig(operator_options=options)
    options["rotary"] = "1d"
    assert config.operator_options == {"rotary": "2d"}
    config.to_dict()["operator_options"]["rotary"] = "none"
    assert config.operator_options == {"rotary": "2d"}
    with pytest.raises(AttributeError, match="cannot assign"):
        config.dim = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModelConfig(192)  # type: ignore[misc]  # by keyword only
    assert ModelConfig(img_size=[32, 48]).img_size == (32, 48)  # type: ignore[arg-type]  # as JSON gives it


def test_every_model_says_how_to_prepare_its_images() -> None:
    cfg = create_model("dmst_digits", device="meta").pretrained_cfg
    assert cfg["input_size"] == [1, 8, 8] and cfg["mean"] == [0.5]
    cfg = create_model("dmst_tiny", in_chans=5, img_size=(64, 32), device="meta").pretrained_cfg
    assert cfg["input_size"] == [5, 64, 32] and cfg["std"] == [0.5] * 5 and cfg["crop_pct"] == 1.0
    assert create_model("vit_tiny", device="meta").pretrained_cfg["mean"] == [0.485, 0.456, 0.406]
