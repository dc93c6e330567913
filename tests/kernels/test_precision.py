"""Low precision: bfloat16 and float16 projections, float32 between them, against float64 of the same rounded numbers."""

from __future__ import annotations

import copy

import pytest
import torch

from dmst import rotary
from dmst.kernels import reference
from dmst.operators import DMSA
from dmst.sparsemax import sparsemax
from tests.cases import build, gradients, grid_of, label, relative, tokens
from tests.parity import BARS, F64, PRECISE, excess, rounded

SHAPES = [(1, 1, 48, 3), (3, 2, 48, 3), (3, 17, 64, 8), (2, 197, 48, 1), (1, 197, 192, 4)]


@pytest.mark.parametrize("case", [*PRECISE, ("mhsa", {}), ("xca", {}), ("mssa", {})], ids=label)
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_precision_at_scale_1(case: tuple, dtype: torch.dtype, shape: tuple) -> None:
    """Output and every gradient against float64 of the same rounded numbers, under autocast.

    theta and temperature are single sums whose terms cancel: their relative error has no bar; gradcheck judges them.
    TSSA divides each channel by its energy over tokens, which one or two tokens bring near 0: there the plain formula is off
    by up to 1.3e-5 in float32 (200 draws), and the next test's rule applies.
    """
    if case[0] == "tssa" and shape[1] <= 2:
        check_against_plain(case, dtype, 1.0, shape)
        return
    forward_bar, gradient_bar = BARS[dtype]
    for seed in range(3):
        torch.manual_seed(seed)
        operator, z, grad = rounded(case, dtype, 1.0, *shape)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            found = gradients(operator, z, grad, grid=grid_of(shape[1]))
        exact = gradients(copy.deepcopy(operator).double(), z.double(), grad.double(), grid=grid_of(shape[1]))
        assert found["out"].dtype == dtype
        assert excess(found["out"], exact["out"], dtype) <= forward_bar
        assert excess(found["z"], exact["z"], dtype) <= gradient_bar
        for name in ("subspace.weight", "out.weight"):
            if name in exact:
                assert excess(found[name], exact[name], dtype) <= gradient_bar, name


@pytest.mark.parametrize("case", PRECISE, ids=label)
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e2, 1e4])
def test_precision_at_other_scales(case: tuple, dtype: torch.dtype, scale: float) -> None:
    """The output holds its bar at every scale; the gradient holds its bar, or is as exact as the plain formula's.

    Large tokens saturate memberships, and what is left of the gradient can be one cancelling sum: no arithmetic in float32
    holds a fixed bar there. It must then be no worse than three times autograd's error on the reference, in the same dtype.
    """
    for shape in SHAPES:
        check_against_plain(case, dtype, scale, shape)


def check_against_plain(case: tuple, dtype: torch.dtype, scale: float, shape: tuple) -> None:
    forward_bar, gradient_bar = (1e-4, 5e-4) if dtype == torch.float32 and scale != 1 else BARS[dtype]
    operator, z, grad = rounded(case, dtype, scale, *shape)
    grid = grid_of(shape[1])
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        found = gradients(operator, z, grad, grid=grid)
    moving = z.clone().requires_grad_()
    plain = reference.attend(moving, operator.weights(), operator.form, grid=grid, dtype=dtype)
    (plain_z,) = torch.autograd.grad(plain, moving, grad.to(dtype))
    exact = gradients(copy.deepcopy(operator).double(), z.double(), grad.double(), grid=grid)
    assert excess(found["out"], exact["out"], dtype) <= forward_bar, shape
    allowed = max(gradient_bar, 3 * excess(plain_z, exact["z"], dtype))
    assert excess(found["z"], exact["z"], dtype) <= allowed, shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", PRECISE, ids=label)
def test_a_model_stored_in_low_precision(case: tuple, dtype: torch.dtype) -> None:
    """Weights and tokens in the dtype itself, no autocast: the same bars."""
    operator, z, grad = rounded(case, dtype, 1.0, 3, 17, 64, 8)
    exact = gradients(copy.deepcopy(operator).double(), z.double(), grad.double(), grid=(1, 17))
    found = gradients(operator.to(dtype), z.to(dtype), grad, grid=(1, 17))
    assert found["out"].dtype == found["z"].dtype == found["subspace.weight"].dtype == dtype
    assert excess(found["out"], exact["out"], dtype) <= BARS[dtype][0]
    assert excess(found["z"], exact["z"], dtype) <= BARS[dtype][1]


def test_scores_are_float32_under_autocast() -> None:
    """Logits near a tie: bfloat16 scores would move the gate by percents."""
    operator = DMSA(64, 8).eval()
    z = 30 * torch.randn(4, 33, 64)
    exact = copy.deepcopy(operator).double().decompose(z.double())
    for low in (torch.bfloat16, torch.float16):
        for tokens_in in (z, z.to(low)):  # a low-precision input must not switch it back on
            with torch.autocast("cpu", dtype=low):
                parts = operator.decompose(tokens_in)
            assert parts.membership.dtype == parts.gate.dtype == torch.float32
            assert parts.projected.dtype == low
            if tokens_in is z:
                torch.testing.assert_close(parts.gate.double(), exact.gate, rtol=0, atol=1e-5)
    turned = rotary.rotate(z, rotary.table("1d", 64, 33, None, device=z.device, dtype=z.dtype))
    low_scores = turned.bfloat16() @ operator.assign.weight.bfloat16().T
    assert (sparsemax(low_scores.float().mean(1)).double() - exact.gate).abs().max() > 1e-3  # what the rule avoids


def test_autocast_leaves_float64_alone() -> None:
    operator, z = build("dmsa", {}), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = operator(z)
    assert inside.dtype == F64
    assert torch.equal(inside, operator(z))


@pytest.mark.parametrize("name", ["dmsa", "tssa", "gated_channel"])
def test_fp16_squares_do_not_overflow(name: str) -> None:
    """256 squared is too large for float16; ours squares after the upcast, so moments are those of float64."""
    z = 1e3 * torch.randn(2, 17, 64)
    ours = build(name, {}, dim=64, heads=8, dtype=torch.float32).half()
    s = ours.subspace(z.half())
    assert (s * s).isinf().any()
    out = ours(z.half())
    assert relative(out, ours.double()(z.half().double())) < 1e-3
