"""`gate_rotary`: membership and gate read scores of different positions, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmst import kernels
from dmst.errors import OptionError
from dmst.operators import DMSA
from tests.cases import build, relative, tokens

PAIRS = [("1d", "none"), ("none", "1d"), ("2d", "1d")]
GRID = (3, 4)


def same_weights(options: dict[str, Any], of: DMSA) -> DMSA:
    other = DMSA(of.dim, of.num_heads, dtype=torch.float64, **options)
    other.load_state_dict(of.state_dict())
    return other


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
@pytest.mark.parametrize(("membership", "gate"), PAIRS)
def test_each_reads_its_own(mode: str, membership: str, gate: str) -> None:
    shared = {"mode": mode, "gate_activation": "gelu"}  # a gate that saturates would be the same for both
    operator = build("dmsa", {**shared, "rotary": membership, "gate_rotary": gate})
    z = tokens(n=12)
    parts = operator.decompose(z, grid=GRID)
    by = {kind: same_weights({**shared, "rotary": kind}, operator).decompose(z, grid=GRID) for kind in (membership, gate)}
    assert torch.equal(parts.membership, by[membership].membership) and torch.equal(parts.gate, by[gate].gate)
    assert not torch.equal(by[membership].gate, by[gate].gate) and not torch.equal(
        by[membership].membership, by[gate].membership
    )
    update = kernels.reference.token_statistics(
        parts.projected, parts.membership, parts.gate, operator.weights().theta, form=operator.form
    )
    expected = kernels.reference.project_out(update, operator.weights(), torch.float64)
    assert relative(operator(z, grid=GRID), expected) < 1e-12
    with torch.no_grad():
        assert relative(operator(z, grid=GRID), expected) < 1e-12


def test_the_same_positions_are_the_default_to_the_bit() -> None:
    operator, z = build("dmsa", {}), tokens()
    other = same_weights({"gate_rotary": "1d"}, operator)
    assert torch.equal(operator(z), other(z)) and not other.form.split


def test_gradients() -> None:
    operator, z = build("dmsa", {"rotary": "none", "gate_rotary": "1d"}, dim=12), tokens(b=1, n=3, d=12)
    names = [name for name, _ in operator.named_parameters()]

    def call(z: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(operator, dict(zip(names, weights, strict=True)), (z,))

    assert torch.autograd.gradcheck(call, (z.requires_grad_(), *operator.parameters()), fast_mode=True)


def test_fused_kernels_say_why_not() -> None:
    operator = DMSA(24, 3, gate_rotary="none")
    with kernels.use_kernels("fused"), pytest.raises(OptionError, match="same scores for membership and gate"):
        operator(torch.randn(2, 6, 24))
