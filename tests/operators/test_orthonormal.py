"""Proximal's matrix: plain and orthonormal wherever it is read, whoever changes it, and never bending a run."""

from __future__ import annotations

import copy

import pytest
import torch

from dmst import tracing
from dmst.operators import create, orthonormal
from dmst.operators.orthonormal import OrthonormalLinear, orthonormal_rows
from tests.cases import tokens


def test_proximal_stores_a_plain_orthonormal_matrix() -> None:
    operator = create("dmsa", 24, 3, mode="proximal")
    optimizer = torch.optim.AdamW(operator.parameters(), lr=0.05)
    z = tokens(dtype=torch.float32)
    for _ in range(5):
        optimizer.zero_grad()
        operator(z).square().mean().backward()
        optimizer.step()
    raw = operator.subspace.weight
    assert off_manifold(raw) > 1e-3  # a step leaves the manifold
    expected = orthonormal_rows(raw.detach())
    stored = operator.state_dict()["subspace.weight"]
    assert stored.data_ptr() == raw.data_ptr()  # the parameter itself, as tools that average state dicts need
    assert torch.equal(operator.eval().subspace.basis(), expected) and off_manifold(expected) < 1e-5
    assert off_manifold(raw) > 1e-3  # neither saving nor evaluating moved it
    assert torch.equal(operator.train().subspace.basis(), expected)
    assert torch.equal(raw, expected)  # the training forward did
    with torch.no_grad():
        assert operator.eval().subspace.basis() is operator.subspace.weight
    assert operator.weights().theta > 0
    torch.testing.assert_close(operator.subspace(z), z @ expected.T + operator.subspace.bias)
    version = operator.subspace.weight._version
    operator.subspace.retract_()
    assert operator.subspace.weight._version == version  # on the manifold it is left alone


def off_manifold(weight: torch.Tensor) -> float:
    return (weight @ weight.T - torch.eye(len(weight))).abs().max().item()


def test_whoever_changes_the_matrix_the_basis_stays_orthonormal() -> None:
    """EMA, a foreign checkpoint and steps in evaluation mode all change the parameter unseen."""
    operator = create("dmsa", 24, 3, mode="proximal").eval()
    z = tokens(dtype=torch.float32)
    average = torch.optim.swa_utils.AveragedModel(operator).eval()
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.add_(torch.randn_like(parameter))
    average.update_parameters(operator)
    average.update_parameters(operator)
    loaded = create("dmsa", 24, 3, mode="proximal").eval()
    loaded.load_state_dict({**loaded.state_dict(), "subspace.weight": torch.randn(24, 24)})
    assert off_manifold(average.module.subspace.weight) > 0.1
    for model in (operator, average.module, loaded):
        assert off_manifold(model.subspace.basis()) < 1e-5
        assert torch.equal(model(z), copy.deepcopy(model)(z))
        torch.testing.assert_close(model(z), model.train()(z), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recorded", [False, True])
def test_the_gradient_on_the_manifold_is_that_of_gram_schmidt(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a CUDA graph is recorded, where no value may be looked at."""
    layer = OrthonormalLinear(7, 7, bias=False, dtype=torch.float64)
    h = torch.randn(7, 7, dtype=torch.float64)
    (expected,) = torch.autograd.grad((orthonormal_rows(layer.weight) * h).sum(), layer.weight)
    if recorded:
        monkeypatch.setattr(tracing, "recorded", lambda x: True)
        monkeypatch.setattr(orthonormal, "is_orthonormal", lambda w: pytest.fail("a value was looked at"))
    basis = layer.basis()
    torch.testing.assert_close(basis, layer.weight, rtol=0, atol=1e-14 if recorded else 0)
    (found,) = torch.autograd.grad((basis * h).sum(), layer.weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("training", [True, False])
def test_autocast_leaves_the_matrix_alone(training: bool) -> None:
    """Judged in bfloat16 every matrix would look off, and be moved by every forward."""
    operator = create("dmsa", 24, 3, mode="proximal").train(training).requires_grad_(False)
    weight, z = operator.subspace.weight, tokens(dtype=torch.float32)
    before, version = weight.clone(), weight._version
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            operator(z)
        assert torch.equal(operator.subspace.basis(), before)
    assert torch.equal(weight, before) and weight._version == version


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_proximal_in_low_precision(dtype: torch.dtype) -> None:
    operator = create("dmsa", 24, 3, mode="proximal", dtype=dtype)
    z = tokens(dtype=dtype)
    with torch.no_grad():
        operator.subspace.weight.add_(0.05 * torch.randn_like(operator.subspace.weight))
    assert torch.equal(operator.eval()(z), operator.train()(z))
    assert off_manifold(operator.subspace.basis().detach().float()) < 2 * torch.finfo(dtype).eps


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["compiled", "exported"])
def test_a_traced_evaluation_uses_the_basis_too(way: str) -> None:
    """After a step the stored matrix is off the manifold, and a graph cannot look at its values."""
    operator = create("dmsa", 24, 3, mode="proximal").eval()
    with torch.no_grad():
        operator.subspace.weight.add_(0.2 * torch.randn(24, 24))
    z = tokens(dtype=torch.float32)
    if way == "compiled":
        traced = torch.compile(operator, fullgraph=True, backend="aot_eager")
    else:
        traced = torch.export.export(operator, (z,)).module()
    torch.testing.assert_close(traced(z), operator(z), rtol=1e-5, atol=1e-6)


def test_settling_survives_a_step_that_is_far_too_long() -> None:
    """A first step of AdamW along a rank-one gradient: |W W^T - I| near 3, where the undamped passes blow up."""
    torch.manual_seed(0)
    layer = orthonormal.OrthonormalLinear(384, 384, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.add_(torch.outer(torch.randn(384), torch.randn(384)).sign(), alpha=4e-3)
    far = layer.weight @ layer.weight.mT - torch.eye(384)
    assert torch.linalg.matrix_norm(far, 2) > 2.5
    right = orthonormal.orthonormal_rows(layer.weight)
    orthonormal.settle_([layer])
    assert (layer.weight - right).abs().max() < 1e-6


@pytest.mark.parametrize("size", [0.02, 0.15])
def test_settling_is_gram_schmidt_by_products_alone(size: float) -> None:
    """What a CUDA graph can hold in place of a QR, for matrices that a step has moved: |W W^T - I| of 0.05 and 0.4."""
    torch.manual_seed(0)
    layers = [orthonormal.OrthonormalLinear(d, d, bias=False, dtype=torch.float64) for d in (48, 192, 48)]
    expected = []
    with torch.no_grad():
        for layer in layers:
            moved = torch.linalg.qr(torch.randn_like(layer.weight))[0]
            layer.weight.add_(moved, alpha=size)
            expected.append(orthonormal.orthonormal_rows(layer.weight))
    orthonormal.settle_(layers)
    for layer, right in zip(layers, expected, strict=True):
        assert (layer.weight - right).abs().max() < 1e-12


@pytest.mark.compile
def test_a_matrix_that_is_kept_is_traced_without_gram_schmidt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine retracts after every step, so that a compiled forward need not hold a QR; the gradient is the same."""
    torch.manual_seed(0)
    operator = create("dmsa", 24, 3, mode="proximal", dtype=torch.float64)
    z = tokens(dtype=torch.float64)

    def gradient(layer: torch.nn.Module) -> torch.Tensor:
        operator.zero_grad()
        layer(z).square().mean().backward()
        assert operator.subspace.weight.grad is not None
        return operator.subspace.weight.grad.clone()

    plain = gradient(operator)
    called = []
    rows = orthonormal.orthonormal_rows
    monkeypatch.setattr(orthonormal, "orthonormal_rows", lambda weight: called.append(1) or rows(weight))
    for kept in (False, True):
        called.clear()
        operator.subspace.kept = kept
        torch.compiler.reset()
        assert (gradient(torch.compile(operator, backend="aot_eager")) - plain).abs().max() < 1e-12
        assert bool(called) is not kept
