"""Stems: images (b, c, h, w) to patch tokens (b, n, d), row-major.

conv        log2(patch) convolutions of stride 2, at least three in all (the first ones then keep the size); channels
            double up to d; batch norm after each, GELU between. Patch 16: d/8, d/4, d/2, d. Patch 8: d/4, d/2, d.
patch       z_n = W patch_n + bias
norm_patch  z_n = norm(W norm(patch_n) + bias), a patch flattened row, column, channel

cuDNN has no tensor-core kernel for images of 3 channels, and slow ones for 8 and for 48. On a CUDA device `patch` is therefore
a product with the patches. So is, in 16 bits, the first convolution of `conv`: its 27 numbers a patch are padded with zeros to
32. The other convolutions read channels padded with zeros, channels last.

In inference the batch norms of `conv` are folded into its convolutions: it needs a pass over memory less for each. On a CPU
(eager calls alone) its images are channels last too, and it is two times faster. On a CUDA device weights that have 16 bits
themselves are not folded: they would be rounded twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import tracing
from dmst.kernels import compute_dtype
from dmst.kernels.casting import wide
from dmst.models.gelu import gelu
from dmst.one_node import OneNode
from dmst.operators.base import linear

if TYPE_CHECKING:
    from dmst.models.config import ModelConfig


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda


def _in_eights(x: Tensor) -> bool:
    return x.is_cuda and compute_dtype(x).itemsize == 2


class Gelu(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class PaddedConv(nn.Conv2d):
    """A convolution whose input channels are padded to a multiple of 8, or of 32 where there are more.

    With fewer than 8 it is a product with the patches (not in transforms: vmap has no rule for the gradient of `unfold`).
    """

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        missing = -self.in_channels % (8 if self.in_channels < 32 else 32)
        if not (missing and _in_eights(x)):
            return super()._conv_forward(x, weight, bias)
        x = x.to(compute_dtype(x))  # as autocast would, but before anything is copied
        form = self.kernel_size, self.padding, self.dilation, self.groups, self.padding_mode
        if self.in_channels < 8 and form == ((3, 3), (1, 1), (1, 1), 1, "zeros") and not tracing.transformed():
            return self._product(x, weight, bias)
        return super()._conv_forward(_pad(x, missing), _pad(weight, missing), bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        missing = -9 * self.in_channels % 8
        windows = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, self.stride[0]).unfold(3, 3, self.stride[1])
        patches = F.pad(rearrange(windows, "b c h w i j -> b h w (c i j)"), (0, missing))
        matrix = F.pad(weight.flatten(1), (0, missing))
        if bias is not None:
            made = F.linear(patches, matrix, bias)
        else:  # image by image: the gradient of the weight is a sum over millions of patches, and cut so it fills the device
            made = patches.flatten(1, 2) @ matrix.mT.expand(patches.shape[0], -1, -1)
        return rearrange(made.view(*patches.shape[:3], matrix.shape[0]), "b h w d -> b d h w")


def _pad(x: Tensor, channels: int) -> Tensor:
    """More channels, of zeros, and channels last in memory (by a view: vmap has no memory formats)."""
    return rearrange(F.pad(rearrange(x, "b c h w -> b h w c"), (0, channels)), "b h w c -> b c h w")


class PatchConv(nn.Conv2d):
    """A convolution whose stride is its kernel: one product for every patch."""

    def forward(self, x: Tensor) -> Tensor:
        i, j = self.kernel_size
        if not _on_cuda(x) or x.shape[-2] % i or x.shape[-1] % j:  # which a convolution crops
            return super().forward(x)
        x = x.to(compute_dtype(x))  # as autocast would, but before the patches are copied
        patches = rearrange(x, "b c (h i) (w j) -> b h w (c i j)", i=i, j=j)
        return rearrange(F.linear(patches, self.weight.flatten(1), self.bias), "b h w d -> b d h w")


class ConvStem(OneNode):
    first = "layers.0"

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        halvings = config.patch_size.bit_length() - 1
        count = max(3, halvings)
        widths = [config.in_chans, *(config.dim >> (count - 1 - i) for i in range(count))]
        layers: list[nn.Module] = []
        for i in range(count):
            stride = 2 if i >= count - halvings else 1
            layers += [
                PaddedConv(widths[i], widths[i + 1], 3, stride, 1, bias=False, **factory),
                nn.BatchNorm2d(widths[i + 1], **factory),
                Gelu(),
            ]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        made = self._folded(images) if self._folds(images) else self.layers(images)
        return rearrange(made, "b d h w -> b (h w) d")

    def _folds(self, images: Tensor) -> bool:
        if torch.is_grad_enabled() or not isinstance(images, Tensor):  # a proxy of torch.fx
            return False
        there = _on_cuda(images)
        compiled = there and tracing.compiled() and not tracing.transformed()
        if not (compiled or (tracing.is_plain_eager() and (there or images.device.type == "cpu"))):
            return False
        layers: list[Any] = list(self.layers)  # unless somebody has put others in their place
        usual = all(type(x) is (PaddedConv, nn.BatchNorm2d, Gelu)[i % 3] for i, x in enumerate(layers))
        if not usual or any(x.training or not x.affine or x.running_mean is None for x in layers[1::3]):
            return False
        if any(x.bias is not None or (there and x.weight.dtype.itemsize == 2) for x in layers[::3]):
            return False
        return tracing.is_plain(self.layers, *layers)

    def _folded(self, x: Tensor) -> Tensor:
        if not _on_cuda(x):
            x = x.contiguous(memory_format=torch.channels_last)
        layers: list[Any] = list(self.layers)
        for i, (conv, norm) in enumerate(zip(layers[::3], layers[1::3], strict=True)):
            x = conv._conv_forward(gelu(x) if i else x, *_fold(conv, norm))
        return x


def _fold(conv: nn.Conv2d, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of norm(conv(x)) in inference, rounded once."""
    scale = wide(norm.weight) * torch.rsqrt(wide(norm.running_var) + norm.eps)
    weight, bias = conv.weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)


class PatchStem(OneNode):
    first = "projection"

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        size = config.patch_size
        self.projection = PatchConv(config.in_chans, config.dim, size, size, **factory)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.projection(images), "b d h w -> b (h w) d")


class NormPatchStem(OneNode):
    first = "projection"

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.size = config.patch_size
        width = config.in_chans * self.size**2
        self.norm_in = nn.LayerNorm(width, **factory)
        self.projection = linear(width, config.dim, **factory)
        self.norm_out = nn.LayerNorm(config.dim, **factory)

    def forward(self, images: Tensor) -> Tensor:
        patches = rearrange(images, "b c (h i) (w j) -> b (h w) (i j c)", i=self.size, j=self.size)
        return self.norm_out(self.projection(self.norm_in(patches)))


STEMS: dict[str, type[ConvStem | PatchStem | NormPatchStem]] = {
    "conv": ConvStem,
    "patch": PatchStem,
    "norm_patch": NormPatchStem,
}
