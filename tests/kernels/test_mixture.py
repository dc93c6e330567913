"""GMSA's closed-form gradient against autograd on its readable steps, to second order, and what it keeps in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from dmst.kernels import closed_form, mixture
from dmst.kernels.mixture import MixtureWeights
from dmst.operators import create
from dmst.operators.gmsa import GMSA
from tests.cases import VARIANTS, build, gradients, grid_of, label, relative, tokens
from tests.kernels.test_closed_form import kept

F64 = torch.float64
CASES = [case for case in VARIANTS if case[0] == "gmsa"]
cases = pytest.mark.parametrize("case", CASES, ids=label)


def leaves(operator: GMSA) -> tuple[list[Tensor], MixtureWeights]:
    """The layer's tensors as leaves that want gradients, so that each is checked on its own."""
    fresh = [None if w is None else w.detach().clone().requires_grad_() for w in operator.weights()]
    return [w for w in fresh if w is not None], MixtureWeights(*fresh)  # type: ignore[arg-type]


@cases
@pytest.mark.parametrize("n", [4, 6, 63, 197])
def test_closed_form_is_autograd(case: tuple, n: int) -> None:
    operator = build(*case)
    z = tokens(n=n).requires_grad_()
    tensors, weights = leaves(operator)
    grad = torch.randn_like(z)
    results = []
    for attend in (closed_form.attend, mixture.attend):
        out = attend(z, weights, operator.form, grid=grid_of(n), dtype=F64)
        results.append((out, *torch.autograd.grad(out, (z, *tensors), grad)))
    for found, expected in zip(*results, strict=True):
        assert relative(found, expected) < 1e-12 or (found - expected).norm() < 1e-13


@cases
def test_second_derivatives_are_right(case: tuple) -> None:
    """The closed form keeps tensors without a graph; asked for a second derivative it must not use them."""
    operator = build(*case, dim=12)
    z = tokens(n=4, d=12).requires_grad_()
    tensors, weights = leaves(operator)

    def call(z: Tensor, *values: Tensor) -> Tensor:
        given = iter(values)
        mine = MixtureWeights(*(None if w is None else next(given) for w in weights))  # type: ignore[arg-type]
        return closed_form.attend(z, mine, operator.form, grid=(2, 2), dtype=F64)

    assert torch.autograd.gradgradcheck(call, (z, *tensors), fast_mode=True)


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
    """With one head or one token both memory orders are the same, so a view would stand where a copy must."""
    b, n, heads = shape
    operator = build("gmsa", {"groups": 1}, heads=heads)
    z = tokens(b, n).requires_grad_()
    grad, parameters = torch.randn_like(z), list(operator.parameters())
    plain = mixture.attend(z, operator.weights(), operator.form, dtype=F64)
    for found, expected in zip(
        gradients(operator, z, grad).values(),
        (plain.detach(), *torch.autograd.grad(plain, (z, *parameters), grad)),
        strict=True,
    ):
        assert relative(found, expected) < 1e-12 or (found - expected).norm() < 1e-13


@cases
def test_the_layer_keeps_tokens_coordinates_keys_and_small_statistics(case: tuple) -> None:
    operator = create(case[0], 384, 8, **case[1])
    z = torch.randn(8, 196, 384, requires_grad=True)
    form = operator.form
    statistics = 2 * form.groups * 384 + 8 * (form.groups + 2)  # means and spreads; masses, gate and its score
    expected = 2 + 8 * form.key_dim / 384 + statistics / (196 * 384)
    extra = 4 * 384 * 384 / z.numel() if form.mode == "proximal" else 0.0  # its QR keeps a few matrices of d x d
    assert expected - 1e-3 <= kept(operator, z) <= expected + extra + 1e-3
    operator.is_plain = lambda: False  # type: ignore[method-assign]  # from here on autograd takes the plain steps
    assert kept(operator, z) > expected + 2


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
def test_a_group_of_no_mass_has_finite_gradients(mode: str) -> None:
    """The first cell holds x and -x: its centre is 0, and every token is far nearer to another one."""
    operator = build("gmsa", {"groups": 4, "mode": mode, "bias": False}, dtype=torch.float32)
    x, y = 100 * torch.randn(2, 24)
    z, grad = torch.stack([x, -x, x, x, -x, -x, y, y]).unsqueeze(0), torch.randn(1, 8, 24)
    mass = mixture.take_steps(z, operator.weights(), operator.form, None, torch.float32).mass
    assert mass[0, :, 0].tolist() == [0, 0, 0]
    found = gradients(operator, z, grad)
    plain = mixture.attend(z.requires_grad_(), operator.weights(), operator.form, dtype=torch.float32)
    expected = torch.autograd.grad(plain, (z, *operator.parameters()), grad)
    for gradient, mine in zip(expected, list(found.values())[1:], strict=True):
        assert gradient.isfinite().all() and mine.isfinite().all()
