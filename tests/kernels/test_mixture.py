"""GMSA's plain steps: which gradients they give, buffers that are used again, groups without mass."""

from __future__ import annotations

import copy

import pytest
import torch

from dmst.kernels import mixture
from tests.cases import VARIANTS, build, gradients, label, relative, tokens

F64 = torch.float64
CASES = [case for case in VARIANTS if case[0] == "gmsa"]
cases = pytest.mark.parametrize("case", CASES, ids=label)


@cases
def test_only_what_is_wanted(case: tuple) -> None:
    """Frozen parameters get none, and the others get the same numbers as when all are wanted."""
    operator = build(*case)
    z, grad = tokens(), torch.randn(2, 7, 24, dtype=F64)
    full = gradients(operator, z, grad, grid=(1, 7))
    for wanted, _ in operator.named_parameters():
        one = copy.deepcopy(operator)
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name == wanted)
        one(z, grid=(1, 7)).backward(grad)
        for name, parameter in one.named_parameters():
            assert (parameter.grad is not None) == (name == wanted)
        assert relative(dict(one.named_parameters())[wanted].grad, full[wanted]) < 1e-13
    moving = z.clone().requires_grad_()
    copy.deepcopy(operator).requires_grad_(False)(moving, grid=(1, 7)).backward(grad)
    assert relative(moving.grad, full["z"]) < 1e-13


@pytest.mark.parametrize("shape", [(2, 7, 1), (2, 1, 3), (1, 7, 3)], ids=str)
def test_buffers_are_not_shared_where_heads_or_tokens_are_one(shape: tuple[int, int, int]) -> None:
    """With one head or one token both memory orders are the same, so a view would stand where a copy must. Buffers are used
    again where no gradient is wanted."""
    b, n, heads = shape
    operator = build("gmsa", {"groups": 1}, heads=heads)
    z = tokens(b, n)
    right, before = operator(z), z.clone()
    with torch.no_grad():
        assert relative(operator(z), right) < 1e-12 and torch.equal(z, before)


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
def test_a_group_of_no_mass_has_finite_gradients(mode: str) -> None:
    """The first cell holds x and -x: its centre is 0, and every token is far nearer to another one."""
    operator = build("gmsa", {"groups": 4, "mode": mode, "bias": False}, dtype=torch.float32)
    x, y = 100 * torch.randn(2, 24)
    z, grad = torch.stack([x, -x, x, x, -x, -x, y, y]).unsqueeze(0), torch.randn(1, 8, 24)
    mass = mixture.take_steps(z, operator.weights(), operator.form, None, torch.float32).mass
    assert mass[0, :, 0].tolist() == [0, 0, 0]
    for gradient in gradients(operator, z, grad).values():
        assert gradient.isfinite().all()
