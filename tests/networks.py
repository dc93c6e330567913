"""The networks that several tests build: every family and operator, small, with weights at which everything matters.

dim 24 = 3 heads of 8, grids of 2 x 3 patches and others, batches of 2 and 5, 7 classes: no two axes can be confused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmst.models import VisionModel, create_model
from dmst.models.residual import Residual
from dmst.operators import OPERATORS
from dmst.operators.orthonormal import OrthonormalLinear
from tests.cases import FEW, excite

F64 = torch.float64
SMALL: dict[str, Any] = {"dim": 24, "depth": 2, "num_heads": 3, "img_size": (32, 48), "num_classes": 7}
GRID, BATCH = (2, 3), 5
DROPS = {"drop_rate": 0.2, "proj_drop_rate": 0.3, "drop_path_rate": 0.4}

Case = tuple[str, dict[str, Any]]
FAMILIES: list[Case] = [
    ("dmst_tiny", {}),
    ("gmst_tiny", FEW["gmsa"]),
    ("tost_tiny", {}),
    ("vit_tiny", {}),
    ("crate_tiny", {}),
    ("dmst_cifar", {}),
]
OPTIONS: list[Case] = [
    ("dmst_tiny", {"mode": "equation", "rotary": "2d"}),
    ("dmst_tiny", {"mode": "proximal"}),
    ("gmst_tiny", FEW["gmsa"] | {"mode": "proximal", "key_rotary": "2d"}),
    ("vit_tiny", {"operator": "tpsusa", "mode": "proximal"}),
    ("tost_tiny", {"position_scores": "2d", "position": "learned", "layer_scale": None}),
    ("crate_tiny", {"relaxed": 0.3, "feedforward": "mlp", "readout": "mean"}),
    ("vit_tiny", {"operator": "dmsa", "feedforward": "local"}),
]
SKELETONS = ("tost_tiny", "vit_tiny")
CASES = FAMILIES + OPTIONS + [(SKELETONS[i % 2], {"operator": x} | FEW.get(x, {})) for i, x in enumerate(OPERATORS)]


def label(case: Case) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


every = pytest.mark.parametrize("case", CASES, ids=label)
families = pytest.mark.parametrize("case", FAMILIES, ids=label)
some = pytest.mark.parametrize("case", FAMILIES + OPTIONS, ids=label)


def build(case: Case, dtype: torch.dtype = F64, **options: Any) -> VisionModel:
    """The model with weights at which everything in it matters."""
    return enliven(create_model(case[0], **SMALL | {"patch_size": 16} | case[1] | options, dtype=dtype))


@torch.no_grad()
def enliven(model: VisionModel) -> VisionModel:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            module.weight.normal_(1, 0.2)
            module.bias.normal_(std=0.2)
        elif isinstance(module, nn.Linear) and not isinstance(module, OrthonormalLinear):
            module.weight.normal_(std=module.in_features**-0.5)
            if module.bias is not None:
                module.bias.normal_(std=0.2)
        elif isinstance(module, Residual) and module.scale is not None:
            module.scale.uniform_(0.3, 0.9)
    for block in model.blocks:
        excite(block.operator)
    for x in (model.cls_token, getattr(model.position, "table", None)):
        if x is not None:
            x.normal_(std=0.5)
    return model


def images(size: tuple[int, int] = (32, 48), batch: int = BATCH, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=dtype)
