"""The norm before a step writes the 16 bits of autocast itself, and is else that of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dmst
from dmst import use_kernels
from dmst.errors import DmstError
from dmst.models.norm import normed
from tests.cases import relative
from tests.parity import BARS, BF16, DEVICE, F16, needs_triton

pytestmark = needs_triton


def narrow(norm: nn.Module, z: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    with use_kernels("fused"), torch.autocast(DEVICE, dtype):
        return normed(norm, z)[0]


def made(d: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(d, device=DEVICE)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(2, 35, 48), (1, 1, 7), (3, 700, 100), (0, 5, 16)], ids=str)
def test_it_is_the_norm_in_float64(shape: tuple, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, z, grad = made(shape[-1]), 3 + torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE).to(dtype)
    leaves = [z.requires_grad_(), norm.weight, norm.bias]
    found = narrow(norm, z, dtype)
    assert found.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = F.layer_norm(exact[0], shape[-1:], *exact[1:], norm.eps)
    assert relative(found, right) <= BARS[dtype][0]
    for x, y in zip(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(right, exact, grad.double()), strict=True):
        assert x.dtype == torch.float32 and relative(x, y) < 2e-6


def test_gradients_of_the_residual_are_added_to_those_of_the_norm() -> None:
    norm, z = made(48), torch.randn(2, 35, 48, device=DEVICE, requires_grad=True)
    dy, more = torch.randn(2, 35, 48, device=DEVICE).to(BF16), torch.randn(35, 2, 48, device=DEVICE).transpose(0, 1)
    (alone,) = torch.autograd.grad(narrow(norm, z), z, dy)
    with use_kernels("fused"), torch.autocast(DEVICE, BF16):
        tokens, again = normed(norm, z)
    assert torch.equal(again, z)
    (both,) = torch.autograd.grad((tokens, again), z, (dy, more))
    assert torch.equal(both, alone + more)
    assert torch.equal(torch.autograd.grad(normed(norm, z)[1], z, more)[0], more)  # without autocast


def test_nothing_is_divided_by_nothing_beyond_the_last_token() -> None:
    norm, z = made(16), torch.randn(5, 16, device=DEVICE, requires_grad=True)
    norm.eps = 0.0
    narrow(norm, z).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (z, norm.weight, norm.bias))


def test_a_broken_token_breaks_itself_alone() -> None:
    norm, z = made(40), torch.randn(2, 9, 40, device=DEVICE)
    right = narrow(norm, z)
    z[1, 4, 3] = float("nan")
    found = narrow(norm, z)
    assert found[1, 4].isnan().all()
    found[1, 4] = right[1, 4]
    assert torch.equal(found, right)


def test_everybody_else_gets_the_norm_of_torch() -> None:
    norm, z = made(40), torch.randn(2, 9, 40, device=DEVICE)
    heard: list[Tensor] = []
    for other, tokens in ((norm, z.double()), (norm, z.to(BF16)), (nn.Identity(), z), (nn.LayerNorm(40, bias=False).to(z), z)):
        with torch.autocast(DEVICE, BF16):  # without it a GPU takes no tokens narrower than the weights
            right = other(tokens) if tokens.dtype != torch.float64 else other.double()(tokens)
        assert torch.equal(narrow(other, tokens).to(right.dtype), right)
        norm.float()
    assert normed(norm, z)[0].dtype == z.dtype  # without autocast
    hook = norm.register_forward_hook(lambda _, __, out: heard.append(out))
    narrow(norm, z)
    hook.remove()
    with torch.autocast(DEVICE, BF16), use_kernels("reference"):
        assert torch.equal(normed(norm, z)[0], heard[0]) and heard[0].dtype == z.dtype


def test_a_second_derivative_is_an_error() -> None:
    norm, z = made(40), torch.randn(2, 9, 40, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(narrow(norm, z).float().square().sum(), z, create_graph=True)
    with pytest.raises(DmstError, match="no second derivative"):
        grad.sum().backward()


def test_a_kernel_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from dmst.kernels import attempt
    from dmst.kernels.fused import norm as kernels

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no room")

    norm, z = made(40), torch.randn(2, 9, 40, device=DEVICE, requires_grad=True)
    right, found = narrow(norm, z), None
    monkeypatch.setattr(kernels, "launch", fail)
    with pytest.warns(RuntimeWarning, match="fused kernel of the layer norm does not work here"):
        found = narrow(norm, z)
    attempt.anew()
    assert relative(found, right) < 5e-3
    with pytest.warns(RuntimeWarning, match="layer norm"):
        (grad,) = torch.autograd.grad(found.float().square().sum(), z)
    attempt.anew()
    assert relative(grad, torch.autograd.grad(norm(z).square().sum(), z)[0]) < 1e-2


def test_a_network_under_autocast() -> None:
    """Its output, with these norms and with those of torch: as far apart as bfloat16 is from float32."""
    torch.manual_seed(0)
    network = dmst.create_model("dmst_tiny", dim=48, num_heads=4, depth=2, img_size=32, patch_size=8, num_classes=5).to(DEVICE)
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        exact = network.eval().double()(images.double())
        network.float()
        with torch.autocast(DEVICE, BF16), use_kernels("reference"):
            plain = network(images)
        with torch.autocast(DEVICE, BF16), use_kernels("fused"):
            found = network(images)
    assert relative(found, exact) < 1.5 * max(relative(plain, exact), 5e-3)
