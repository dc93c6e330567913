"""The hidden channels of an MLP as one product: the formula of GELU, and the kernel at odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cases import relative
from tests.parity import BF16, DEVICE, F16, F32, fresh_memory_is_nan, guarded, needs_triton

pytestmark = needs_triton


def exact_gelu(x: Tensor) -> Tensor:
    """Phi by erfc, which has no cancellation below 0."""
    x = x.double()
    return 0.5 * x * torch.special.erfc(-x / 2**0.5)


def short_gelu(x: Tensor) -> Tensor:
    """x / (1 + 2^(x q(x^2))), as the kernel takes it of its sums."""
    from dmst.kernels.fused.product import GELU

    q = torch.full_like(x, GELU.value[0])
    for more in GELU.value[1:]:
        q = q * x * x + more
    return x / (1 + torch.exp2(x * q))


def test_the_formula_of_gelu() -> None:
    """In float32, and for every 16-bit number: rounded as the exact one, but for a few that lie in the middle between two."""
    x = torch.linspace(-40, 40, 2_000_001)
    found, right = short_gelu(x).double(), exact_gelu(x)
    assert (found - right).abs().max() < 6e-7
    assert ((found - right).abs() <= 2e-5 * right.abs())[x > -3].all()
    for dtype in (BF16, F16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        x = x[x.isfinite()]
        low, right = short_gelu(x.float()).to(dtype), exact_gelu(x).to(dtype)
        assert low.isfinite().all() and (low[x < -40] == 0).all() and torch.equal(low[x > 40], x[x > 40])
        steps = (low.view(torch.int16).int() - right.view(torch.int16).int()).abs()[x > -3]  # below, 6e-7 is half a bit
        assert steps.max() <= 1 and (steps == 0).float().mean() > 0.995
    assert short_gelu(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 35, 48, 80), (1, 1, 16, 16), (3, 50, 80, 144)], ids=str)
def test_the_kernel_at_odd_sizes(shape: tuple, bias: bool) -> None:
    """In bfloat16 on a GPU; the interpreter multiplies float32 alone. Nothing outside its inputs is read."""
    from dmst.kernels.fused.product import linear_gelu

    b, n, d, h = shape
    dtype = BF16 if DEVICE == "cuda" else F32
    x, weight, shift = (torch.randn(*size, device=DEVICE).to(dtype) for size in ((b, n, d), (h, d), (h,)))
    given = [guarded(x), guarded(weight / d**0.5), guarded(shift) if bias else None]
    with fresh_memory_is_nan():
        found = linear_gelu(*given)
    right = F.gelu(F.linear(*(None if y is None else y.double() for y in given)))
    assert found.dtype == dtype and relative(found, right) < (4e-3 if dtype == BF16 else 1e-6)
