"""What the stems do with images on a CUDA device, exercised on the CPU: other ways to the numbers of their convolutions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmst.models import ModelConfig, stems
from dmst.models.stems import ConvStem, PaddedConv, PatchConv
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
    monkeypatch.setattr(stems, "_on_cuda", lambda x: True)
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


@pytest.mark.parametrize("size", [(33, 35), (34, 36), (1, 2)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [1, 3])
def test_few_channels_are_a_product(
    there: None, monkeypatch: pytest.MonkeyPatch, channels: int, stride: int, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(stems, "_pad", None)  # the other way
    conv, x = PaddedConv(channels, 5, 3, stride, 1, dtype=F64), torch.randn(2, channels, *size, dtype=F64)
    found, wanted = differentiate(conv, conv, x), differentiate(lambda x: plainly(conv, x), conv, x)
    assert all(relative(a, b) < 1e-12 for a, b in zip(found, wanted, strict=True))


def test_a_convolution_of_another_form(there: None) -> None:
    conv, x = PaddedConv(3, 5, 3, 2, 2, dilation=2, dtype=F64), torch.randn(2, 3, 9, 11, dtype=F64)
    assert relative(conv(x), F.conv2d(x, conv.weight, conv.bias, 2, 2, 2)) < 1e-12


def conv_stem(patch: int, dtype: torch.dtype = F64) -> ConvStem:
    """In evaluation, with statistics of images."""
    stem = ConvStem(ModelConfig(dim=80, num_heads=5, img_size=32, patch_size=patch), dtype=dtype)
    with torch.no_grad():
        for _ in range(30):
            stem(torch.randn(3, 3, 32, 32, dtype=dtype) + 0.5)
        for norm in stem.layers[1::3]:
            norm.weight.normal_(1, 0.3), norm.bias.normal_(0, 0.3)
    return stem.eval()


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each batch norm that is computed."""
    calls: list[int] = []
    plain = nn.BatchNorm2d.forward
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, x: (calls.append(1), plain(self, x))[1])
    return calls


@pytest.mark.parametrize("patch", [4, 8, 16])
def test_the_batch_norms_are_folded(there: None, norms: list[int], patch: int) -> None:
    """In inference alone, and not where somebody listens or has put another layer in."""
    stem, x = conv_stem(patch), torch.randn(2, 3, 33, 35, dtype=F64)
    norms.clear()
    with torch.no_grad():
        found = stem(x)
        assert not norms
        assert relative(found, stem.layers(x).flatten(2).mT) < 1e-12
    count = len(norms)
    assert relative(found, stem(x)) < 1e-12 and len(norms) == 2 * count
    with torch.no_grad():
        copy.deepcopy(stem).bfloat16()(x.bfloat16())  # would round the weights twice
        assert len(norms) == 3 * count
        stem.layers[2] = nn.ReLU()
        assert relative(stem(x), found) > 1e-3


@pytest.mark.parametrize("patch", [4, 8, 16])
def test_16_bits_are_as_near_to_float64(monkeypatch: pytest.MonkeyPatch, patch: int) -> None:
    """Folded and as a product, as a plain convolution and a batch norm; so are the gradients of the weights."""
    stem, x = conv_stem(patch, torch.float32), torch.randn(4, 3, 33, 35)

    def results(stem: ConvStem, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            out = stem(x)
        stem.layers(x).float().square().sum().backward()
        return [out, stem.layers[0].weight.grad]

    def errors() -> list[float]:
        with torch.autocast("cpu", BF16):
            found = results(copy.deepcopy(stem), x)
        return [relative(a, b) for a, b in zip(found, wanted, strict=True)]

    wanted = results(copy.deepcopy(stem).double(), x.double())
    with monkeypatch.context() as patched:
        patched.setattr(ConvStem, "_folds", lambda *_: False)
        plain = errors()
    monkeypatch.setattr(stems, "_on_cuda", lambda x: True)
    monkeypatch.setattr(stems, "_in_eights", lambda x: True)
    assert all(a < 1.1 * b < 2e-2 for a, b in zip(errors(), plain, strict=True))


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_folds_too(there: None, dynamic: bool) -> None:
    """In one graph, without a batch norm."""
    torch._dynamo.reset()
    stem, graphs = conv_stem(8), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(stem, fullgraph=True, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for size in [(33, 35), (48, 32)] if dynamic else [(33, 35)]:
            x = torch.randn(3, 3, *size, dtype=F64)
            assert relative(compiled(x), stem.layers(x).flatten(2).mT) < 1e-12
    assert len(graphs) == 1 and torch._C._nn.linear in graphs[0] and F.batch_norm not in graphs[0]


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_graph_serves_other_batches_there(there: None, how: str) -> None:
    stem, x, more = build(("dmst_tiny", {})).stem.eval(), images(batch=2), images(batch=3)
    if how == "trace":
        graph = torch.jit.trace(stem, x)
    else:
        graph = torch.export.export(stem, (x,), dynamic_shapes=({0: torch.export.Dim("b")},)).module()
    assert relative(graph(more), stem(more)) < 1e-12
