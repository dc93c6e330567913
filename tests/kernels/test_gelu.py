"""The formula of GELU in the product on Hopper."""

from __future__ import annotations

import pytest
import torch

from dmst.kernels import choice
from tests.parity import BF16


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    """Phi by erfc, which has no cancellation below 0."""
    x = x.double()
    return 0.5 * x * torch.special.erfc(-x / 2**0.5)


def short_gelu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + 2^(x q(x^2))), as the product on Hopper takes it of its sums."""
    from dmst.kernels.fused.hopper import GELU

    q = torch.full_like(x, GELU.value[0])
    for more in GELU.value[1:]:
        q = q * x * x + more
    return x * (1 / (1 + torch.exp2(x * q)))


@pytest.mark.skipif(bool(choice.triton_problem()), reason=choice.triton_problem() or "Triton works")
def test_the_formula_of_gelu() -> None:
    """In float32, and for every 16-bit number: rounded as the exact one, but for a few that lie in the middle between two."""
    x = torch.linspace(-40, 40, 2_000_001)
    found, right = short_gelu(x).double(), exact_gelu(x)
    assert (found - right).abs().max() < 6e-7
    assert ((found - right).abs() <= 2e-5 * right.abs())[x > -3].all()
    for dtype in (BF16, torch.float16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        x = x[x.isfinite()]
        low, right = short_gelu(x.float()).to(dtype), exact_gelu(x).to(dtype)
        assert low.isfinite().all() and (low[x < -40] == 0).all() and torch.equal(low[x > 40], x[x > 40])
        steps = (low.view(torch.int16).int() - right.view(torch.int16).int()).abs()[x > -3]  # below, 6e-7 is half a bit
        assert steps.max() <= 1 and (steps == 0).float().mean() > 0.995
    assert short_gelu(torch.tensor([float("nan")])).isnan().all()
