"""Adapters for captum and pytorch-grad-cam: our models as they are, the layer to look at, and tokens as maps.

    pip install grad-cam                                       pip install captum
    cam = grad_cam(model)                                      IntegratedGradients(forward_function(model)).attribute(...)
    cam(images, targets=None)          (b, h, w) numpy         layer_map(model, images, target)     (b, rows, columns)

By hand, for any other tool:

    target_layers(model, layer)        [the norm before the operator]: its output (b, n, d) is what the operator reads, and all
                                       patches have a gradient there with any readout (after the last block perhaps cls alone)
    reshape_transform(model, size)     tokens (b, prefix + n, d) -> (b, d, rows, columns)

`subspace`, `assign` and `out` inside an operator are never called as modules, so hooks on them do not fire: do not target them.
Both libraries explain by gradients. What our operators compute themselves, memberships and gates, is in `model.trace`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from dmst.errors import MissingExtraError, OptionError, ShapeError, need, shown
from dmst.models import VisionModel

PACKAGES = {"captum": "captum", "pytorch_grad_cam": "grad-cam"}  # what is imported, and what pip calls it


def target_layers(model: VisionModel, layer: int = -1) -> list[nn.Module]:
    """The module whose output the tools look at, in a list as grad-cam wants it: the norm of a layer (from 0; -1 the last)."""
    depth = len(model.blocks)
    if type(layer) is not int or not -depth <= layer < depth:
        raise OptionError(f"layer is {shown(layer)}: the model has layers 0 to {depth - 1}.")
    return [model.blocks[layer].norm]  # type: ignore[list-item]


def reshape_transform(model: VisionModel, size: tuple[int, int] | None = None) -> Callable[[Tensor], Tensor]:
    """Tokens of any layer to maps, for images of `size` (h, w); the model's own size if not given."""
    prefix, patch = model.config.prefix, model.config.patch_size
    height, width = size or model.config.img_size  # type: ignore[misc]
    rows, columns = height // patch, width // patch

    def reshape(tokens: Tensor) -> Tensor:
        if tokens.ndim != 3 or tokens.shape[1] != prefix + rows * columns:
            raise ShapeError(
                f"tokens of shape {tuple(tokens.shape)} are not {prefix} + {rows} x {columns} patches: give reshape_transform "
                "the size of the images, and target a module of `target_layers`."
            )
        return rearrange(tokens[:, prefix:], "b (rows columns) d -> b d rows columns", rows=rows).contiguous()

    return reshape


def grad_cam(
    model: VisionModel, method: str = "GradCAM", layer: int = -1, size: tuple[int, int] | None = None, **options: Any
) -> Any:
    """A CAM of pytorch-grad-cam on this model: GradCAM, GradCAMPlusPlus, LayerCAM, EigenCAM, ..."""
    library = library_of("pytorch_grad_cam")
    made = getattr(library, method, None)
    if not callable(made):
        raise OptionError(f"method is {shown(method)}: pytorch-grad-cam has no class of that name.")
    layers = target_layers(model, layer)
    return made(model=model, target_layers=layers, reshape_transform=reshape_transform(model, size), **options)


def forward_function(model: VisionModel) -> Callable[[Tensor], Tensor]:
    """Images to logits in evaluation mode, as captum's methods on pixels take it: the network's own forward."""

    def forward(images: Tensor) -> Tensor:
        if model.training:
            raise OptionError("the model is in training mode: call model.eval() before it is explained.")
        return model(images)

    return forward


def layer_map(
    model: VisionModel, images: Tensor, target: Any, layer: int = -1, method: str = "LayerGradientXActivation"
) -> Tensor:
    """(b, rows, columns): a layer attribution of captum on tokens (b, n, d), summed over d.

    Not LayerGradCam: it takes axis 1 for channels, and here axis 1 is tokens.
    """
    if method == "LayerGradCam":
        raise OptionError("LayerGradCam takes axis 1 for channels, and here that is tokens: use grad_cam(model) for Grad-CAM.")
    library_of("captum")
    made = getattr(need("captum.attr", "attribution"), method, None)
    if not callable(made):
        raise OptionError(f"method is {shown(method)}: captum.attr has no class of that name.")
    tokens = made(forward_function(model), target_layers(model, layer)[0]).attribute(images, target=target)
    return reshape_transform(model, (images.shape[2], images.shape[3]))(tokens).sum(1).detach()


def library_of(module: str) -> ModuleType:
    """captum or pytorch_grad_cam, or how to install it: neither is an extra of this package."""
    try:
        return need(module, "attribution")
    except MissingExtraError as error:
        if isinstance(error.__cause__, ImportError):
            raise MissingExtraError(
                f"{module} could not be imported ({error.__cause__}). Install it with: pip install {PACKAGES[module]}"
            ) from error.__cause__
        raise
