"""What captum and pytorch-grad-cam ask of a network of tokens: the layer to look at, and tokens as maps.

    GradCAM(model, target_layers(model), reshape_transform=reshape_transform(model))(images)         (b, h, w), numpy
    LayerGradientXActivation(model, *target_layers(model)).attribute(images, target=3)               (b, n, d)
    reshape_transform(model)(tokens).sum(1)                                                          (b, rows, columns)

captum's LayerGradCam takes axis 1 for channels, and here axis 1 is tokens: use GradCAM. Both libraries explain by gradients.
What our operators compute themselves, memberships and gates, is in `model.trace`.
"""

from __future__ import annotations

from collections.abc import Callable

from einops import rearrange
from torch import Tensor, nn

from dmst.errors import OptionError, ShapeError, shown
from dmst.models import VisionModel


def target_layers(model: VisionModel, layer: int = -1) -> list[nn.Module]:
    """The module whose output the tools look at, in a list as grad-cam wants it: the norm of a layer (from 0; -1 the last).

    Its output (b, n, d) is what the operator reads, and there every patch has a gradient, with any readout.
    """
    depth = len(model.blocks)
    if type(layer) is not int or not -depth <= layer < depth:
        raise OptionError(f"layer is {shown(layer)}: the model has layers 0 to {depth - 1}.")
    return [model.blocks[layer].norm]  # type: ignore[list-item]


def reshape_transform(model: VisionModel, size: tuple[int, int] | None = None) -> Callable[[Tensor], Tensor]:
    """Tokens (b, prefix + n, d) of any layer to maps (b, d, rows, columns), for images of `size` (h, w); None: the model's."""
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
