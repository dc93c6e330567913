"""Kernels of MLPs: gelu(h + 3x3(h)) of a local one against plain torch; the formula of GELU in the product on Hopper."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dmst import create_model, use_kernels
from dmst.errors import DmstError, ShapeError
from dmst.kernels import choice
from dmst.kernels.neighbours import local_gelu
from tests.cases import relative
from tests.parity import BF16, DEVICE, F32, F64, needs_triton

SHAPES = [(3, (4, 5), 24), (1, (5, 8), 72), (1, (1, 7), 65), (2, (1, 1), 8), (5, (3, 3), 64)]
if DEVICE == "cuda":
    SHAPES += [(64, (8, 8), 768), (3, (14, 14), 100), (1, (64, 64), 256)]


class TestFused:
    pytestmark = needs_triton

    @pytest.mark.parametrize(("b", "grid", "c"), SHAPES)
    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    def test_parity(self, b: int, grid: tuple[int, int], c: int, dtype: torch.dtype) -> None:
        h, w = torch.randn(b, grid[0] * grid[1], c, dtype=dtype, device=DEVICE), torch.randn(c, 1, 3, 3, device=DEVICE)
        g, found = torch.randn_like(h), []
        for kernels, wide in (("fused", dtype), ("reference", F64)):
            given = [h.to(wide).requires_grad_(), w.to(torch.promote_types(wide, F32)).requires_grad_()]
            with use_kernels(kernels):
                y = local_gelu(given[0], given[1], grid)
            assert ("local_gelu" in type(y.grad_fn).__name__) is (kernels == "fused")
            found.append((y, *torch.autograd.grad(y, given, g.to(wide))))
        assert found[0][1].dtype == dtype and found[0][2].dtype == F32
        for got, want in zip(*found, strict=True):
            assert relative(got, want) < (2e-6 if dtype == F32 else 1e-2 if DEVICE == "cuda" else 2e-2)

    def test_a_second_derivative_says_no(self) -> None:
        h = torch.randn(2, 6, 8, requires_grad=True, device=DEVICE)
        with use_kernels("fused"):
            y = local_gelu(h, torch.randn(8, 1, 3, 3, device=DEVICE), (2, 3))
            (first,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
            with pytest.raises(DmstError, match="reference"):
                torch.autograd.grad(first.sum(), h)


def test_what_does_not_fit_is_refused() -> None:
    h, w = torch.randn(2, 6, 4), torch.randn(4, 1, 3, 3)
    for given in ((h, w, (2, 4)), (h, w[:2], (2, 3)), (h, w[..., :2], (2, 3))):
        with pytest.raises(ShapeError, match="do not fit together"):
            local_gelu(*given)


def test_plain_where_no_kernel_runs() -> None:
    """On a CPU, with every derivative; and a class token has no neighbours."""
    h, w = torch.randn(2, 6, 4, dtype=F64, requires_grad=True), torch.randn(4, 1, 3, 3, dtype=F64)
    assert torch.autograd.gradgradcheck(lambda h: local_gelu(h, w, (2, 3)), (h,))
    model = create_model("vit_tiny", dim=24, depth=1, num_heads=3, feedforward="local", img_size=32).eval()
    mlp = model.blocks[0].feedforward.mlp
    z = torch.randn(1, 5, 24)
    with torch.no_grad():
        torch.nn.init.normal_(mlp.local.weight)
        assert torch.allclose(mlp(z, (2, 2))[:, :1], mlp.fc2(F.gelu(mlp.fc1(z[:, :1]))), atol=1e-6)
        assert not torch.allclose(mlp(z, (2, 2))[:, 1:], mlp.fc2(F.gelu(mlp.fc1(z[:, 1:]))), atol=1e-3)


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
