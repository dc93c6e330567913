"""Stems: images (b, c, h, w) to patch tokens (b, n, d), row-major.

conv        log2(patch) convolutions of stride 2, at least three in all (the first ones then keep the size); channels
            double up to d; batch norm after each, GELU between. Patch 16: d/8, d/4, d/2, d. Patch 8: d/4, d/2, d.
patch       z_n = W patch_n + bias
norm_patch  z_n = norm(W norm(patch_n) + bias), a patch flattened row, column, channel

cuDNN has no tensor-core kernel for images of 3 channels, and a slow one for 48. On a CUDA device `patch` is therefore a product
with the patches, and a convolution of `conv`, in 16 bits, reads channels padded with zeros, channels last. On a CPU, in
inference, `conv` works channels last too, with each batch norm folded into its convolution: two times faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights

from dmst import tracing
from dmst.kernels import compute_dtype
from dmst.models.gelu import gelu
from dmst.one_node import OneNode
from dmst.operators.base import linear

if TYPE_CHECKING:
    from dmst.models.config import ModelConfig


def _by_product(x: Tensor) -> bool:
    return x.is_cuda


def _in_eights(x: Tensor) -> bool:
    return x.is_cuda and compute_dtype(x).itemsize == 2


class Gelu(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class PaddedConv(nn.Conv2d):
    """A convolution whose input channels are padded to a multiple of 8, or of 32 where there are more."""

    def forward(self, x: Tensor) -> Tensor:
        missing = -self.in_channels % (8 if self.in_channels < 32 else 32)
        if not (missing and _in_eights(x)):
            return super().forward(x)
        x = x.to(compute_dtype(x))  # as autocast would, but before the channels are copied
        return self._conv_forward(_pad(x, missing), _pad(self.weight, missing), self.bias)


def _pad(x: Tensor, channels: int) -> Tensor:
    """More channels, of zeros, and channels last in memory (by a view: vmap has no memory formats)."""
    return rearrange(F.pad(rearrange(x, "b c h w -> b h w c"), (0, channels)), "b h w c -> b c h w")


class PatchConv(nn.Conv2d):
    """A convolution whose stride is its kernel: one product for every patch."""

    def forward(self, x: Tensor) -> Tensor:
        i, j = self.kernel_size
        if not _by_product(x) or x.shape[-2] % i or x.shape[-1] % j:  # which a convolution crops
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
        if torch.is_grad_enabled() or not isinstance(images, Tensor) or images.device.type != "cpu":  # a proxy of torch.fx
            return False
        convs, norms = list(self.layers)[::3], list(self.layers)[1::3]  # unless somebody has put others in their place
        usual = all(type(x) is PaddedConv for x in convs) and all(
            type(x) is nn.BatchNorm2d and not x.training and x.running_mean is not None for x in norms
        )
        return usual and tracing.is_plain_eager() and tracing.is_plain(self.layers, *self.layers)

    def _folded(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        layers: list[Any] = list(self.layers)
        for i, (conv, norm) in enumerate(zip(layers[::3], layers[1::3], strict=True)):
            statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            folded = fuse_conv_bn_weights(conv.weight, None, *statistics)
            x = F.conv2d(F.gelu(x) if i else x, *folded, conv.stride, conv.padding)
        return x


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
