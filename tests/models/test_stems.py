"""What the stems do with images on a CUDA device, exercised on the CPU: other ways to the numbers of their convolutions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmst.models import stems
from dmst.models.stems import PaddedConv, PatchConv
from tests.cases import relative
from tests.networks import F64, build, images

BF16 = torch.bfloat16
both = pytest.mark.parametrize("kind", [PaddedConv, PatchConv])
families = pytest.mark.parametrize("name", ["dmst_tiny", "vit_tiny"])


def convolution(kind: type[nn.Conv2d], channels: int = 3, size: int = 4, dtype: torch.dtype = F64) -> nn.Conv2d:
    if kind is PaddedConv:
        return PaddedConv(channels, 11, 3, 2, 1, bias=False, dtype=dtype)
    return PatchConv(channels, 11, size, size, dtype=dtype)


def plainly(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def differentiate(call: Callable[[Tensor], Tensor], conv: nn.Conv2d, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of images, weight and bias; of second order too."""
    x = x.detach().requires_grad_()
    out = call(x)
    weigh = torch.linspace(-1, 2, out.numel(), dtype=F64).view(out.shape).to(out.dtype)
    first = torch.autograd.grad((out * weigh).tanh().sum(), [x, *conv.parameters()], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *conv.parameters()])
    return [out, *first, *second]


def strided(x: Tensor) -> list[Tensor]:
    """The same values in memory of other orders."""
    apart = x.new_empty(*x.shape[:2], 2 * x.shape[2], 3 * x.shape[3])[:, :, ::2, 1::3].copy_(x)
    turned = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    return [x, x.to(memory_format=torch.channels_last), apart, turned, x[:1].expand(*x.shape)]


def images_of(*size: int) -> Tensor:
    return images(size, batch=3)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the images were on a CUDA device, and their products in 16 bits."""
    monkeypatch.setattr(stems, "_by_product", lambda x: True)
    monkeypatch.setattr(stems, "_in_eights", lambda x: True)


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_product_with_patches_is_the_convolution(there: None, size: int, channels: int) -> None:
    conv = convolution(PatchConv, channels, size)
    for x in strided(torch.randn(5, channels, 2 * size, 3 * size, dtype=F64)):
        found, wanted = differentiate(conv, conv, x), differentiate(lambda x: plainly(conv, x), conv, x)
        assert all(relative(a, b) < 1e-12 for a, b in zip(found, wanted, strict=True))
        assert found[0].shape == (5, 11, 2, 3) and found[0].permute(0, 2, 3, 1).is_contiguous()  # tokens without a copy
    assert conv(x[:0]).shape == (0, 11, 2, 3)


@pytest.mark.parametrize("channels", [3, 8, 13, 48])
def test_padded_channels_are_the_convolution(there: None, channels: int) -> None:
    """Zeros add nothing; the copy is channels last."""
    conv = convolution(PaddedConv, channels)
    for x in strided(torch.randn(5, channels, 6, 10, dtype=F64)):
        found, wanted = differentiate(conv, conv, x), differentiate(lambda x: plainly(conv, x), conv, x)
        assert all(relative(a, b) < 1e-12 for a, b in zip(found, wanted, strict=True))
        assert channels == 8 or found[0].is_contiguous(memory_format=torch.channels_last)
    assert conv(x[:0]).shape == (0, 11, 3, 5)


@families
def test_transforms_there(there: None, name: str) -> None:
    """Stacked weights, one image at a time, gradients of each image; and the replicas of DataParallel."""
    stem, x = build((name, {})).stem.eval(), images()
    weights = {key: p.detach() for key, p in stem.named_parameters()}
    wanted, call = stem(x), torch.func.functional_call
    stacked = torch.func.vmap(lambda p: call(stem, p, (x,)))({key: torch.stack((2 * p, p)) for key, p in weights.items()})
    assert relative(stacked[1], wanted) < 1e-12
    assert relative(torch.func.vmap(lambda x: stem(x[None])[0])(x), wanted) < 1e-12
    each = torch.func.vmap(torch.func.grad(lambda p, x: call(stem, p, (x[None],)).tanh().sum()), in_dims=(None, 0))(weights, x)
    wanted.tanh().sum().backward()
    assert all(relative(each[key].sum(0), p.grad) < 1e-12 for key, p in stem.named_parameters())
    assert torch.equal(stem._replicate_for_data_parallel()(x), wanted)
