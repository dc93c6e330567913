"""GELU by its formula, and the hidden channels of an MLP."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.models.gelu import Formula, hidden, normal
from tests.cases import relative
from tests.parity import BF16, F16


def exact_gelu(x: Tensor) -> Tensor:
    """Phi by erfc, which has no cancellation below 0."""
    x = x.double()
    return 0.5 * x * torch.special.erfc(-x / 2**0.5)


def test_the_formula() -> None:
    """In float32, and for every 16-bit number: rounded as the exact one, but for a few that lie in the middle between two."""
    x = torch.linspace(-40, 40, 2_000_001)
    found, right = (x * normal(x)).double(), exact_gelu(x)
    assert (found - right).abs().max() < 6e-7
    assert ((found - right).abs() <= 2e-5 * right.abs())[x > -3].all()
    for dtype in (BF16, F16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        x = x[x.isfinite()]
        low, right = Formula.apply(x), exact_gelu(x).to(dtype)
        assert low.isfinite().all() and (low[x < -40] == 0).all() and torch.equal(low[x > 40], x[x > 40])
        steps = (low.view(torch.int16).int() - right.view(torch.int16).int()).abs()[x > -3]  # below, 6e-7 is half a bit
        assert steps.max() <= 1 and (steps == 0).float().mean() > 0.995
    assert Formula.apply(torch.tensor([float("nan")], dtype=BF16)).isnan().all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_gradient_of_the_formula(dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 4001).to(dtype).requires_grad_()
    (found,) = torch.autograd.grad(Formula.apply(x).sum(), x)
    y = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(exact_gelu(y).sum(), y)
    assert (found.double() - right).abs().max() < (4e-3 if dtype == BF16 else 5e-4)  # half a step at 1


def test_hidden_channels_on_a_cpu_are_the_two_steps() -> None:
    z, weight, bias = torch.randn(2, 5, 8), torch.randn(12, 8), torch.randn(12)
    with torch.no_grad():
        assert torch.equal(hidden(z, weight, bias), F.gelu(F.linear(z, weight, bias)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 35, 48, 80), (1, 1, 16, 16), (3, 50, 80, 144), (7, 9, 13, 5)], ids=str)
def test_hidden_channels_are_nearer_to_float64(shape: tuple) -> None:
    """Than product and GELU in bfloat16, which round in between; eager and compiled alike."""
    b, n, d, h = shape
    z, weight, bias = (torch.randn(*size, device="cuda").to(BF16) for size in ((b, n, d), (h, d), (h,)))
    weight /= d**0.5
    exact = exact_gelu(F.linear(z.double(), weight.double(), bias.double()))
    with torch.no_grad():
        plain = F.gelu(F.linear(z, weight, bias))
        found = hidden(z, weight, bias), torch.compile(hidden, fullgraph=True)(z, weight, bias)
    for x in found:
        assert x.dtype == BF16 and relative(x, exact) < max(3e-3, relative(plain, exact))
