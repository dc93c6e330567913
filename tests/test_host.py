"""What an eager call leaves out because nobody can tell the difference; and that it does it where somebody can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize

from dmst import tracing
from dmst.operators import DMSA, create
from dmst.operators.family import TokenStatistics, _is_idle
from tests.cases import FAMILY, label

Z = torch.randn(2, 5, 24)


@pytest.fixture
def layer() -> TokenStatistics:
    return DMSA(24, 3)


def test_dropout_that_does_nothing_is_not_called(layer: TokenStatistics, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer(Z)
    monkeypatch.setattr(nn.Dropout, "forward", None)
    assert torch.equal(layer(Z), right)
    layer.proj_drop.p = 0.5
    layer.eval()
    assert torch.equal(layer(Z), right)


class Zero(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 0 * x


def own_forward(layer: TokenStatistics, seen: list) -> None:
    layer.proj_drop.forward = lambda x: seen.append(1) or x  # type: ignore[method-assign]


def forward_hook(layer: TokenStatistics, seen: list) -> None:
    layer.proj_drop.register_forward_hook(lambda *_: seen.append(1))


def pre_hook(layer: TokenStatistics, seen: list) -> None:
    layer.proj_drop.register_forward_pre_hook(lambda *_: seen.append(1))


def backward_hook(layer: TokenStatistics, seen: list) -> None:
    layer.proj_drop.register_full_backward_hook(lambda *_: seen.append(1))


def backward_pre_hook(layer: TokenStatistics, seen: list) -> None:
    layer.proj_drop.register_full_backward_pre_hook(lambda *_: seen.append(1))


@pytest.mark.parametrize("listen", [own_forward, forward_hook, pre_hook, backward_hook, backward_pre_hook])
def test_who_listens_to_the_dropout_hears_it(listen: Any, layer: TokenStatistics) -> None:
    seen: list[int] = []
    listen(layer, seen)
    layer(Z).sum().backward()
    assert seen == [1]


def test_a_global_hook_hears_every_module(layer: TokenStatistics) -> None:
    seen: list[str] = []
    handle = modules.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        layer(Z)
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "Linear", "Dropout", "DMSA"]


def test_another_dropout_is_called(layer: TokenStatistics) -> None:
    layer.proj_drop = Zero(0)
    assert not layer(Z).any()
    layer.proj_drop = nn.Dropout(1.0)
    assert not layer(Z).any()
    assert not _is_idle(nn.Dropout(0.1))
    assert _is_idle(nn.Dropout(0.1).eval())


@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_weights_are_those_of_the_attributes(case: tuple) -> None:
    layer = create(case[0], 24, 3, **case[1])
    found = layer.weights()
    for name, child in (("subspace", layer.subspace), ("assign", layer.assign), ("out", layer.out)):
        if name != "subspace" or type(child) is nn.Linear:
            assert getattr(found, name) is (None if child is None else child.weight)
        bias = f"{name}_bias"
        assert getattr(found, bias) is (None if child is None else child.bias)
    assert found.temperature is layer.temperature
    assert (found.theta is None) == (layer.theta is None)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_weight_that_is_computed(layer: TokenStatistics) -> None:
    """By a parametrization, or set as a plain attribute, as a replica of nn.DataParallel has it."""
    weight = layer.out.weight
    parametrize.register_parametrization(layer.out, "weight", Doubled())
    assert torch.equal(layer.weights().out, 2 * weight)
    plain = layer.assign.weight.detach().clone()
    del layer.assign.weight
    layer.assign.weight = plain
    assert layer.weights().assign is plain
    layer.temperature = None
    assert layer.weights().temperature is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_nobody_is_none_of_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.is_plain_eager()
    for question in ("_exporting", "is_in_torch_dispatch_mode", "transformed"):
        with monkeypatch.context() as patch:
            patch.setattr(tracing, question, lambda: True)
            assert not tracing.is_plain_eager()
    answers: list[bool] = []
    torch.jit.trace(lambda x: answers.append(tracing.is_plain_eager()) or x + 1, Z, check_trace=False)
    torch.func.vmap(lambda x: answers.append(tracing.is_plain_eager()) or x)(Z)
    assert answers == [False, False]
