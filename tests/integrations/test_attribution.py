"""captum and grad-cam on our networks: their maps have our grid, and are the gradients that autograd gives.

Neither library is needed: where one is absent its own test is skipped, and the adapters are tested by hand all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dmst.errors import OptionError, ShapeError
from dmst.integrations.attribution import reshape_transform, target_layers
from dmst.models import VisionModel
from tests.networks import GRID, build, families, images, label


def by_hand(model: VisionModel, x: Tensor, target: int, layer: int) -> tuple[Tensor, Tensor]:
    """What the operator of a layer reads, and the gradient of a logit there, both (b, n, d)."""
    z, grid = model.embed(x)
    for before in model.blocks[:layer]:
        z = before(z, grid)
    block: Any = model.blocks[layer]
    normed = block.norm(z).detach().requires_grad_()
    z = block.feedforward(block.residual(z, block.operator(normed, grid=grid)), grid)
    for rest in model.blocks[layer + 1 :]:
        z = rest(z, grid)
    logits = model.forward_head(model.finish(z))
    return normed.detach(), torch.autograd.grad(logits[:, target].sum(), normed)[0]


@families
def test_the_target_layer_sees_what_the_operator_reads_with_a_gradient(case: Any) -> None:
    model, x = build(case).eval(), images()
    seen: dict[str, Tensor] = {}
    for layer in (0, -1):
        (module,) = target_layers(model, layer)
        handle = module.register_forward_hook(lambda _, args, out: seen.update(tokens=out))
        logits = model(x)
        handle.remove()
        slope = torch.autograd.grad(logits[:, 3].sum(), seen["tokens"])[0]
        maps = reshape_transform(model)(slope)
        assert maps.shape == (5, 24, *GRID)
        assert (maps.flatten(2).abs().amax(1) > 0).all()  # every patch has one, whatever the readout
        normed, told = by_hand(model, x, 3, layer % 2)
        assert (seen["tokens"] - normed).abs().max() < 1e-12 and (slope - told).abs().max() < 1e-12


def test_tokens_become_maps_row_by_row() -> None:
    model = build(("vit_tiny", {}))  # a class token in front
    tokens = torch.arange(7.0)[None, :, None].expand(1, 7, 24)
    maps = reshape_transform(model)(tokens)
    assert maps[0, 0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert reshape_transform(model, (48, 32))(tokens)[0, 0].tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(ShapeError, match="size of the images"):
        reshape_transform(model, (64, 64))(tokens)
    with pytest.raises(OptionError, match="layer is 2"):
        target_layers(model, 2)


def library(name: str, package: str) -> ModuleType:
    """The real one."""
    if name == "pytorch_grad_cam" and importlib.util.find_spec(name):  # it imports torchvision, which may not fit torch
        importlib.import_module("tests.timm_here")
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {package}", exc_type=ImportError)


@families
def test_captum_explains_a_layer(case: Any) -> None:
    attr = library("captum.attr", "captum")
    model, x = build(case).eval(), images()
    tokens = attr.LayerGradientXActivation(model, *target_layers(model, 0)).attribute(x, target=3)
    normed, slope = by_hand(model, x, 3, 0)
    assert (tokens - normed * slope).abs().max() < 1e-12


@families
def test_grad_cam_draws(case: Any) -> None:
    cams = library("pytorch_grad_cam", "grad-cam")
    model, x = build(case, torch.float32).eval(), images(dtype=torch.float32)
    with cams.GradCAM(model, target_layers(model, 0), reshape_transform=reshape_transform(model)) as cam:
        found = cam(x, targets=None)
    assert found.shape == (5, 32, 48), label(case)
    assert found.min() >= 0 and found.max() <= 1
