"""The named networks: families x sizes as tables. A new size is one row.

    dmst_tiny_patch16_224, short dmst_tiny     family _ size _ patch _ resolution
    dmst_cifar, dmst_digits                    one small skeleton for every family, so that only the layer differs
    dmst_cifar10, dmst_cifar100                our best small ones (recipes best_*); tost_ and vit_ twins of the same size

dmst, gmst and tost share ToST's skeleton (conv stem, Fourier positions, class attention); vit and crate have their own, as
published.
The skeleton of *_cifar is inferred from the parameter counts of the paper's ablations, which fit it but do not determine it.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch

from dmst.errors import OptionError, unknown_name
from dmst.models.config import ModelConfig
from dmst.models.positions import LearnedPosition
from dmst.models.preprocessing import set_mean_std
from dmst.models.vision import VisionModel

Row = dict[str, Any]

# what a family does to tokens, on any skeleton
LAYERS: dict[str, Row] = {
    "dmst": {"operator": "dmsa"},
    "gmst": {"operator": "gmsa"},
    "tost": {"operator": "tssa"},
    "vit": {"operator": "mhsa"},
    "crate": {"operator": "mssa", "qkv_bias": False, "feedforward": "ista", "layer_scale": None, "norm_eps": 1e-5},
}
# where a family's published skeleton departs from ToST's
SKELETONS: dict[str, Row] = {
    "dmst": {},
    "gmst": {},
    "tost": {},
    "vit": {"stem": "patch", "position": "learned", "readout": "token", "layer_scale": None},
    "crate": {"stem": "norm_patch", "position": "learned", "readout": "token", "token_std": 1.0},
}
TOST_SIZES: dict[str, Row] = {
    "tiny": {"dim": 192, "depth": 12, "num_heads": 4, "layer_scale": 1.0},
    "small": {"dim": 384, "depth": 12, "num_heads": 8, "layer_scale": 1.0},
    "medium": {"dim": 512, "depth": 24, "num_heads": 8, "layer_scale": 1e-5},
    "large": {"dim": 768, "depth": 24, "num_heads": 16, "layer_scale": 1e-5},
}
SIZES: dict[str, dict[str, Row]] = {
    "dmst": TOST_SIZES,
    "gmst": TOST_SIZES,
    "tost": TOST_SIZES,
    "vit": {
        "tiny": {"dim": 192, "depth": 12, "num_heads": 3},
        "small": {"dim": 384, "depth": 12, "num_heads": 6},
        "medium": {"dim": 512, "depth": 12, "num_heads": 8},
        "base": {"dim": 768, "depth": 12, "num_heads": 12},
        "large": {"dim": 1024, "depth": 24, "num_heads": 16},
    },
    "crate": {
        "tiny": {"dim": 384, "depth": 12, "num_heads": 6},
        "small": {"dim": 576, "depth": 12, "num_heads": 12},
        "base": {"dim": 768, "depth": 12, "num_heads": 12},
        "large": {"dim": 1024, "depth": 24, "num_heads": 16},
    },
}
PATCHES = (16, 8)
# one skeleton for all families, LayerScale included: only the layer differs (CRATE's has no LayerScale)
SMALL: dict[str, Row] = {
    "cifar": {"dim": 192, "depth": 8, "num_heads": 4, "patch_size": 4, "img_size": 32, "readout": "mean", "num_classes": 10},
    "digits": {
        "dim": 32, "depth": 4, "num_heads": 4, "patch_size": 1, "img_size": 8, "readout": "mean", "num_classes": 10,
        "in_chans": 1,
    },
}  # fmt: skip

# 9 d^2 weights per block for all: the layers of dmst, gmst, tost and vit have 1, 2.7, 2 and 4 d^2, so their MLPs 8, 6.3, 7, 5
BEST: Row = {
    "dim": 192, "depth": 9, "num_heads": 8, "patch_size": 4, "img_size": 32, "readout": "mean", "feedforward": "local",
}  # fmt: skip
TWINS: dict[str, Row] = {
    "dmst": {"operator_options": {"mode": "proximal"}},
    "gmst": {"mlp_ratio": 3.17},
    "tost": {"mlp_ratio": 3.5},
    "vit": {"mlp_ratio": 2.5},
}
CLASSES = {"cifar10": 10, "cifar100": 100}


def _table() -> tuple[dict[str, Row], dict[str, str]]:
    """Full names to rows, short names to full ones."""
    rows: dict[str, Row] = {}
    aliases = {"crate_medium": "crate_base_patch16_224"}  # between small and large CRATE has a base
    for family, layer in LAYERS.items():
        for size, row in SIZES[family].items():
            for patch in PATCHES:
                name = f"{family}_{size}_patch{patch}_224"
                rows[name] = row | {"patch_size": patch} | layer | SKELETONS[family] | {"name": name}
            aliases[f"{family}_{size}"] = f"{family}_{size}_patch{PATCHES[0]}_224"
        for size, row in SMALL.items():
            rows[f"{family}_{size}"] = row | layer | {"name": f"{family}_{size}"}
    for family, row in TWINS.items():
        for data, classes in CLASSES.items():
            rows[f"{family}_{data}"] = BEST | LAYERS[family] | row | {"name": f"{family}_{data}", "num_classes": classes}
    aliases |= {timm_name(name): name for name in rows if timm_name(name) != name}
    return rows, aliases


def timm_name(name: str) -> str:
    """The name of a model in timm's registry, which has a vit_* of its own."""
    return f"dmst_{name}" if name.startswith("vit_") else name


MODELS, ALIASES = _table()


def list_models(pattern: str = "*") -> list[str]:
    """Full names that match a pattern such as "dmst_*"; a bare word is looked for anywhere in the name."""
    return sorted(fnmatch.filter(MODELS, pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"))


def model_config(name: str, **overrides: Any) -> ModelConfig:
    """The config of a named model, changed by `overrides`: fields of ModelConfig, or options of the operator."""
    full = ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(full, str) or full not in MODELS:
        raise unknown_name("model", name, [*MODELS, *ALIASES])
    return ModelConfig(**MODELS[full]).change(**overrides)


def create_model(
    name: str,
    pretrained: bool = False,
    *,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    in_chans: int | None = None,
    operator: str | None = None,
    device: Any = None,
    dtype: Any = None,
    **overrides: Any,
) -> VisionModel:
    """A network by name, with fresh weights: `create_model("dmst_small", num_classes=10, operator="tssa")`.

    What is None keeps the model's own. Further keywords are fields of ModelConfig or options of the operator. `pretrained`
    takes the weights that ship (`dmst models --shipped`), in evaluation mode; another `num_classes` gives a fresh classifier,
    and another `img_size` is possible.
    """
    asked = {"num_classes": num_classes, "img_size": img_size, "in_chans": in_chans, "operator": operator}
    overrides |= {key: value for key, value in asked.items() if value is not None}
    config = model_config(name, **overrides)
    if not pretrained:
        return VisionModel(config, device=device, dtype=dtype)
    from dmst.models import shipped  # which builds networks itself

    source = shipped.pretrained(config.name, device, dtype)
    config = source.config.change(**overrides)  # what is not asked for is as the weights were trained
    if config == source.config:
        return source
    model = VisionModel(config, device=device, dtype=next(source.parameters()).dtype)
    take_over(model, source, config.name)
    return model.eval()


# --- one network from the weights of another ----------------------------------------------------------------------------

FREE = ("name", "num_classes", "img_size", "drop_rate", "proj_drop_rate", "drop_path_rate")  # may differ from the weights'


@torch.no_grad()
def take_over(model: VisionModel, source: VisionModel, name: str) -> None:
    """Copy the weights of `source`, called `name`; those of another network are refused.

    Other classes keep the new classifier; another image size resizes positions.
    """
    mine, theirs = model.config.to_dict(), source.config.to_dict()
    differing = [key for key in mine if key not in FREE and mine[key] != theirs[key]]
    if differing:
        told = ", ".join(f"{key} {theirs[key]!r} (here {mine[key]!r})" for key in differing)
        raise OptionError(
            f"{model.config.name} cannot start from the weights {name}, which are of another network: {told}. Leave out what "
            "differs (with --init-from, the name of the network), or start from random weights."
        )
    set_mean_std(model.pretrained_cfg, source.pretrained_cfg["mean"], source.pretrained_cfg["std"])
    weights, position = source.state_dict(), source.position
    if isinstance(position, LearnedPosition):
        weights["position.table"] = position.resized(model.config.grid)
    named = (model.class_names, source.class_names)
    if model.num_classes == source.num_classes and (not all(named) or named[0] == named[1]):
        model.class_names = model.class_names or source.class_names
    else:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}
    model.load_state_dict(weights, strict=False)
