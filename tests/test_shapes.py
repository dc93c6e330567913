"""The shapes in the signatures, armed: text in the source, checked here. Primes, so that a swap of two axes cannot hide."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from dmst import objective
from dmst.kernels import Form, reference

jaxtyping = pytest.importorskip("jaxtyping", reason="jaxtyping is not installed: pip install 'dmst[dev]'")
beartype = pytest.importorskip("beartype", reason="beartype is not installed: pip install 'dmst[dev]'")
REFUSED = (jaxtyping.TypeCheckError, beartype.roar.BeartypeCallHintViolation)


def arm(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable]:
    """Put the names into the module and wrap every function whose signature states shapes."""
    monkeypatch.setattr(module, "Float", jaxtyping.Float, raising=False)
    armed = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and any("Float" in str(a) for a in function.__annotations__.values()):
            armed[name] = jaxtyping.jaxtyped(function, typechecker=beartype.beartype)
    return armed


def test_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = arm(objective, monkeypatch)
    public = {name for name in vars(objective) if name.endswith("_rate") and name[0] != "_"} | {"rate_reduction"}
    assert public <= set(rates) | {"membership_rate"}  # which is another name of group_rate
    z, membership = torch.randn(2, 7, 11), torch.rand(2, 3, 7)
    projected, subspaces = torch.randn(2, 3, 7, 5), torch.randn(3, 11, 5)
    assert rates["coding_rate"](z, eps=0.5).shape == (2,)
    assert rates["group_rate"](z, membership, eps=0.5).shape == (2,)
    assert rates["subspace_rate"](z, subspaces, eps=0.5).shape == (2,)
    assert rates["projected_rate"](projected, membership, eps=0.5).shape == (2,)
    assert rates["variational_rate"](projected, membership, torch.rand(2, 3), eps=0.5).shape == (2,)
    groups = torch.rand(2, 3, 4, 7)
    assert rates["mixture_rate"](projected, groups, torch.rand(2, 3), eps=0.5).shape == (2,)
    assert rates["complete_rate"](z, subspaces, membership, eps=0.5).shape == (2,)
    for name, arguments in (
        ("group_rate", (z, membership.mT)),
        ("variational_rate", (projected, membership, torch.rand(3, 2))),
        ("variational_rate", (projected.transpose(1, 2), membership)),
        ("mixture_rate", (projected, groups.mT)),
        ("complete_rate", (z, subspaces.mT, membership)),
    ):
        with pytest.raises(REFUSED):
            rates[name](*arguments, eps=0.5)


def test_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = arm(reference, monkeypatch)
    projected, membership, gate = torch.randn(2, 3, 7, 5), torch.rand(2, 3, 7), torch.rand(2, 3)
    assert steps["token_statistics"](projected, membership, gate, form=Form(num_heads=3)).shape == projected.shape
    with pytest.raises(REFUSED):
        steps["token_statistics"](projected, membership.mT, gate, form=Form(num_heads=3))
    with pytest.raises(REFUSED):
        steps["token_moments"](projected.transpose(1, 2), membership, form=Form(num_heads=3))
