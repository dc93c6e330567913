"""The closed-form gradient against autograd on the reference, to second order, and what it keeps in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.published import AttentionDMSA, AttentionTSSA
from dmst import kernels
from dmst.kernels import closed_form, reference
from dmst.operators import create
from dmst.operators.family import TokenStatistics
from tests.cases import FAMILY, VARIANTS, build, gradients, grid_of, label, relative, tokens

F64 = torch.float64
family = pytest.mark.parametrize("case", FAMILY, ids=label)
variants = pytest.mark.parametrize("case", VARIANTS, ids=label)


def leaves(operator: TokenStatistics) -> tuple[list[Tensor], kernels.Weights]:
    """The layer's tensors as leaves that want gradients, so that each is checked on its own."""
    weights = operator.weights()
    fresh = [None if w is None else w.detach().clone().requires_grad_() for w in weights]
    return [w for w in fresh if w is not None], kernels.Weights(*fresh)  # type: ignore[arg-type]


@family
@pytest.mark.parametrize("n", [1, 6, 63, 197])
def test_closed_form_is_autograd(case: tuple, n: int) -> None:
    operator = build(*case)
    z = tokens(n=n).requires_grad_()
    tensors, weights = leaves(operator)
    grad = torch.randn_like(z)
    results = []
    for attend in (closed_form.attend, reference.attend):
        out = attend(z, weights, operator.form, grid=grid_of(n), dtype=F64)
        results.append((out, *torch.autograd.grad(out, (z, *tensors), grad, allow_unused=True)))
    for found, expected in zip(*results, strict=True):
        if expected is None:  # a uniform gate with one use of assign never happens here; nothing may be lost silently
            assert found is None or found.abs().max() == 0
        else:
            assert relative(found, expected) < 1e-12 or (found - expected).norm() < 1e-13


@pytest.mark.parametrize("scale", [1e-13, 1e-12, 1e-10])
def test_tssa_at_the_floor_of_its_normalisation(scale: float) -> None:
    operator = build("tssa", {"bias": False})
    z = (scale * tokens()).requires_grad_()
    tensors, weights = leaves(operator)
    grad = torch.randn_like(z)
    found, expected = (
        torch.autograd.grad(attend(z, weights, operator.form, dtype=F64), (z, *tensors), grad)
        for attend in (closed_form.attend, reference.attend)
    )
    assert all(relative(a, b) < 1e-10 for a, b in zip(found, expected, strict=True))


@family
def test_second_derivatives_are_right(case: tuple) -> None:
    """The closed form keeps tensors without a graph; asked for a second derivative it must not use them."""
    operator = build(*case, dim=12)
    z = tokens(b=2, n=4, d=12).requires_grad_()
    tensors, weights = leaves(operator)

    def call(z: Tensor, *values: Tensor) -> Tensor:
        given = iter(values)
        mine = kernels.Weights(*(None if w is None else next(given) for w in weights))
        return closed_form.attend(z, mine, operator.form, grid=(2, 2), dtype=F64)

    assert torch.autograd.gradgradcheck(call, (z, *tensors), fast_mode=True)  # in random directions: ten times as fast


@family
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
    frozen = copy.deepcopy(operator).requires_grad_(False)
    moving = z.clone().requires_grad_()
    frozen(moving, grid=(1, 7)).backward(grad)
    assert relative(moving.grad, full["z"]) < 1e-13


@family
def test_checkpointing_gives_the_same_gradients(case: tuple) -> None:
    operator = build(*case)
    z, grad = tokens(), torch.randn(2, 7, 24, dtype=F64)
    plain = gradients(operator, z, grad, grid=(1, 7))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = operator

        def forward(self, z: Tensor) -> Tensor:
            return checkpoint(lambda z: self.operator(z, grid=(1, 7)), z, use_reentrant=False)

    for name, value in gradients(Wrapped(), z, grad).items():
        assert torch.equal(value, plain[name.removeprefix("operator.")])


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


# --- kept memory -----------------------------------------------------------------------------------------------------


def kept(layer: nn.Module, z: Tensor) -> float:
    """Distinct storages that autograd holds after forward, parameters left out, in units of z."""
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), *layer.buffers())}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = layer(z, grid=grid_of(z.shape[1])) if not isinstance(layer, AttentionDMSA | AttentionTSSA) else layer(z)
    nodes = [held.grad_fn]
    for node in nodes:  # what a node holds outside of the hooks' sight counts too
        for value in getattr(node, "__dict__", {}).values():
            if isinstance(value, Tensor):
                pack(value)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return sum(found.values()) / z.numel()


@family
def test_the_layer_keeps_two_tensors(case: tuple) -> None:
    operator = create(case[0], 384, 8, **case[1])
    z = torch.randn(8, 196, 384, requires_grad=True)
    limit = 2.1
    if "proximal" in case[1].values():  # its QR keeps a few matrices of d x d, whatever the batch
        limit += 4 * 384 * 384 / z.numel()
    assert 2.0 <= kept(operator, z) <= limit


def test_the_published_layers_keep_three_times_as_much() -> None:
    z = torch.randn(8, 196, 384, requires_grad=True)
    assert kept(AttentionDMSA(384, 8, qkv_bias=True), z) > 7.0
    assert kept(AttentionTSSA(384, 8, qkv_bias=True), z) > 6.0


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("mode", ["equation", "proximal"])
def test_a_silent_head_of_next_to_no_mass_has_no_nan_gradient(mode: str, dtype: torch.dtype) -> None:
    """Memberships near the smallest number there is: autograd would take T/mass, infinite, times the closed gate's 0."""
    for logit in (-84.0, -86.0, -88.0) if dtype == torch.float32 else (-702.0, -705.0, -709.0):
        operator = build("dmsa", {"mode": mode, "membership_bias": True}, dtype=dtype).eval()
        with torch.no_grad():
            operator.assign.weight.zero_()
            operator.assign.bias.copy_(torch.tensor([0.0, logit, 2 * logit]))
        z, grad = (100 * tokens(dtype=dtype)).requires_grad_(), torch.randn(2, 7, 24, dtype=dtype)
        found = gradients(operator, z, grad)
        out = reference.attend(z, operator.weights(), operator.form, dtype=dtype)
        plain = torch.autograd.grad(out, (z, *operator.parameters()), grad)
        for gradient, mine in zip(plain, list(found.values())[1:], strict=True):
            assert gradient.isfinite().all(), logit
            torch.testing.assert_close(gradient, mine, rtol=1e-4, atol=1e-4 * mine.abs().max().item())
