"""`dmst.testing.check_operator` finds each broken promise, and says what is wrong and what the contract is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmst
from dmst.errors import OperatorContractError
from dmst.operators import OPERATORS, Operator, Parts
from dmst.testing import check_operator


class Good(Operator):
    """A gate per token on a linear map, with bases to show."""

    def __init__(
        self, dim: int, num_heads: int, *, factor: float = 2.0, bias: bool = True, proj_drop: float = 0.0, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, num_heads)
        self.factor = factor
        self.subspace = nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def subspaces(self) -> Tensor | None:
        return self.subspace.weight.unflatten(0, (self.num_heads, self.head_dim)).mT

    def decompose(self, z: Tensor, *, grid: Any = None) -> Parts:
        self.check(z)
        s = self.subspace(z).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return Parts(projected=s, membership=s.mean(-1).sigmoid())

    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        parts = self.decompose(z)
        assert parts.projected is not None and parts.membership is not None
        return self.proj_drop(self.factor * (parts.membership.unsqueeze(-1) * parts.projected).transpose(1, 2).flatten(2))

    def rate(self, z: Tensor, *, eps: float, grid: Any = None) -> Tensor | None:
        return z.square().mean((1, 2)) / eps


def test_a_sound_operator_passes_and_leaves_no_trace() -> None:
    before, state = list(OPERATORS), torch.get_rng_state()
    check_operator(Good)
    check_operator(Good, options={"factor": 0.5, "bias": False}, dim=10, num_heads=5)
    assert list(OPERATORS) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert dmst.testing.check_operator is check_operator


class Halved(Good):
    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        return super().forward(z)[..., ::2]


class Listed(Good):
    def __init__(self, dim: int, num_heads: int, factor: float = 1.0, **rest: Any) -> None:
        super().__init__(dim, num_heads, factor=factor, **rest)


class OnCpu(Good):
    def __init__(self, dim: int, num_heads: int, **rest: Any) -> None:
        super().__init__(dim, num_heads, **rest)
        self.shift = nn.Parameter(torch.zeros(dim, dtype=torch.float64))


class Unset(Good):
    def __init__(self, dim: int, num_heads: int, *, device: Any = None, dtype: Any = None, **rest: Any) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **rest)
        self.shift = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))


class Unsaved(Good):
    def __init__(self, dim: int, num_heads: int, *, device: Any = None, **rest: Any) -> None:
        super().__init__(dim, num_heads, device=device, **rest)
        self.register_buffer("table", torch.ones(dim, device=device), persistent=False)


class Unused(Good):
    def __init__(self, dim: int, num_heads: int, *, device: Any = None, dtype: Any = None, **rest: Any) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **rest)
        self.spare = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.reset_parameters()


class InPlace(Good):
    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        out = super().forward(z)
        z.mul_(2)
        return out


class Unchecked(Good):
    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        return self.proj_drop(self.subspace(z).sigmoid())


class OverTheBatch(Good):
    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        self.check(z)
        return super().forward(z - z.mean((0, 1)))


class HidesNaN(Good):
    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        return super().forward(z.nan_to_num() if z.is_floating_point() else z)


class NeverDrops(Good):
    def __init__(self, dim: int, num_heads: int, *, proj_drop: float = 0.0, **rest: Any) -> None:
        super().__init__(dim, num_heads, **rest)


class TokensFirst(Good):
    def decompose(self, z: Tensor, *, grid: Any = None) -> Parts:
        parts = super().decompose(z)
        assert parts.membership is not None
        return parts._replace(membership=parts.membership.mT)

    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        self.check(z)
        return self.proj_drop(self.subspace(z))


class OtherBases(Good):
    def subspaces(self) -> Tensor:
        return self.subspace.weight.mT.unflatten(0, (self.num_heads, self.head_dim)).mT


class RateOfTheBatch(Good):
    def rate(self, z: Tensor, *, eps: float, grid: Any = None) -> Tensor:
        return z.square().mean()


class NoTokens(Good):
    def forward(self, z: Tensor, *, grid: Any = None) -> Tensor:
        return super().forward(z) / (1 if z.shape[1] else 1 // z.shape[1])


BROKEN = {
    Halved: (r"^Halved\.forward\(z, grid=\(3, 4\)\) with z of shape \(3, 12, 24\): returned shape \(3, 12, 12\), not that "
             r"of z\. Finite tokens get a finite update of their shape and dtype"),
    Listed: r"Listed\.__init__: takes 'factor' by position",
    OnCpu: r"made 'shift' on cpu\. .*give device and dtype",
    Unset: r"reset_parameters\(\): leaves 'shift' as it was",
    Unsaved: r"keeps the buffer 'table' out of its state dict",
    Unused: r"does not use 'spare\.weight'",
    InPlace: r"changed z in place",
    Unchecked: r"Unchecked\.forward\(z\): took torch\.float32 tokens of shape \(12, 24\)\. .*call self\.check\(z\) first",
    OverTheBatch: r"changes for a sample when others are beside it\. Samples are independent",
    HidesNaN: r"hides a NaN",
    NeverDrops: r"drops nothing in training with proj_drop=0\.5",
    TokensFirst: r"membership has shape \(3, 12, 3\) for 3 heads",
    OtherBases: r"projected is not z times the bases",
    RateOfTheBatch: r"rate\(z, eps=0\.5\): returned \d\.",
    NoTokens: r"with z of shape \(2, 0, 24\): raised ZeroDivisionError",
}  # fmt: skip


@pytest.mark.parametrize("operator", BROKEN, ids=lambda operator: operator.__name__)
def test_a_broken_promise_is_found(operator: type[Operator]) -> None:
    with pytest.raises(OperatorContractError, match=BROKEN[operator]):
        check_operator(operator)


def test_options_that_a_saved_network_cannot_keep() -> None:
    with pytest.raises(OperatorContractError, match=r"in a saved network: raised operator_options are .*text, numbers"):
        check_operator(Good, options={"factor": torch.tensor(2.0, dtype=torch.float32)})
    with pytest.raises(OperatorContractError, match=r"Good\(24, 3, .*facter=1\.0.*\): raised TypeError: .*'facter'"):
        check_operator(Good, options={"facter": 1.0})


def test_what_is_no_operator() -> None:
    with pytest.raises(OperatorContractError, match="Give the class"):
        check_operator(Good(24, 3))  # type: ignore[arg-type]
