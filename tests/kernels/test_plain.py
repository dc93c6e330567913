"""The plain steps, as autograd differentiates them: nothing of the caller's is written, bits repeat, no NaN from nothing."""

from __future__ import annotations

import pytest
import torch

from tests.cases import VARIANTS, build, gradients, label, tokens

F64 = torch.float64
variants = pytest.mark.parametrize("case", VARIANTS, ids=label)


@variants
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_nothing_of_the_callers_is_written(case: tuple, dtype: torch.dtype) -> None:
    """Buffers are used again inside; tokens, output gradient, weights and what is kept for a second backward are not."""
    operator = build(*case, dtype=dtype)
    z, grad = tokens(n=12, dtype=dtype).requires_grad_(), torch.randn(2, 12, 24, dtype=dtype)
    mine = (z, grad, *operator.parameters())
    before = [t.detach().clone() for t in mine]
    out = operator(z, grid=(3, 4))
    wanted = (z, *operator.parameters())
    first = torch.autograd.grad(out, wanted, grad, retain_graph=True)
    second = torch.autograd.grad(out, wanted, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        operator(z, grid=(3, 4))
        operator.decompose(z, grid=(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


@variants
def test_same_input_same_bits(case: tuple) -> None:
    operator = build(*case, dtype=torch.float32)
    z, grad = tokens(n=63, dtype=torch.float32), torch.randn(2, 63, 24)
    first = gradients(operator, z, grad, grid=(7, 9))
    for _ in range(10):
        again = gradients(operator, z, grad, grid=(7, 9))
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("mode", ["equation", "proximal"])
def test_a_silent_head_of_next_to_no_mass_has_no_nan_gradient(mode: str, dtype: torch.dtype) -> None:
    """Memberships near the smallest number there is: T/mass is infinite, and the closed gate is 0."""
    for logit in (-84.0, -86.0, -88.0) if dtype == torch.float32 else (-702.0, -705.0, -709.0):
        operator = build("dmsa", {"mode": mode, "membership_bias": True}, dtype=dtype).eval()
        with torch.no_grad():
            operator.assign.weight.zero_()
            operator.assign.bias.copy_(torch.tensor([0.0, logit, 2 * logit]))
        z, grad = (100 * tokens(dtype=dtype)).requires_grad_(), torch.randn(2, 7, 24, dtype=dtype)
        found = gradients(operator, z, grad)
        assert all(gradient.isfinite().all() for gradient in found.values()), logit
