"""Choosing by time which layers leave their silent heads out: here with a clock that says what it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmst import use_kernels
from dmst.kernels import choice, skipping
from dmst.kernels.skipping import Row, choose_silent
from dmst.operators import DMSA, TSSA


class Net(nn.Module):
    """Four layers, two of which have heads that can be silent, and are called in another way each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = DMSA(24, 3, max_active_heads=1), TSSA(24, 3)
        self.soft = DMSA(24, 3, gate_activation="sigmoid")
        self.last = DMSA(24, 3, rotary="2d", max_active_heads=2)
        for layer in (self.first, self.last):  # the cap decides
            nn.init.uniform_(layer.assign.weight, -0.01, 0.01)
        self.drop = nn.Dropout(0.5)

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.first(z)
        z = z + self.other(z) + self.soft(z)
        return self.drop(z + self.last(z, grid=(3, 3)) + self.last(2 * z, grid=(3, 3)))


class Block(nn.Module):
    """A layer and what stands around it; where nobody listens to the layer, it is called in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.operator = nn.LayerNorm(24), DMSA(24, 3, max_active_heads=1)
        nn.init.uniform_(self.operator.assign.weight, -0.01, 0.01)
        self.ways: list[tuple[bool, bool]] = []

    def forward(self, z: Tensor) -> Tensor:
        self.ways.append((bool(self.operator._forward_pre_hooks), self.operator.skip_silent))
        call = self.operator if self.ways[-1][0] else self.operator.forward
        return z + call(self.norm(z))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, float]]]:
    """What dense and skipping take, call by call; both are called once, by whatever computes them on this machine."""
    told: list[tuple[float, float]] = []

    def times(*calls: Callable[[], Tensor]) -> tuple[float, float]:
        for call in calls:
            call()
        return told.pop(0)

    monkeypatch.setattr(skipping, "times", times)
    kernel_for = choice.kernel_for

    def pretend(*args: Any, skip: bool = False) -> Any:
        return choice._skipping_attend if skip else kernel_for(*args)

    monkeypatch.setattr(choice, "kernel_for", pretend)
    monkeypatch.setattr(choice, "chosen", lambda: "fused")  # as if there were a device
    yield told
    assert not told


def test_what_was_faster_is_kept(clock: list) -> None:
    net, z = Net().train(), torch.randn(2, 9, 24)
    net.other.eval()
    clock += [(1.0, 0.5), (1.0, 0.99), (1.0, 0.96)]  # the last layer is called twice
    table = choose_silent(net, z)
    assert [row.layer for row in table] == ["first", "last"]
    assert (net.first.skip_silent, net.last.skip_silent, net.soft.skip_silent) == (True, False, False)
    first, last = table
    assert first.silent == pytest.approx(2 / 3)
    assert first[2:] == (1.0, 0.5, True)
    assert last.silent == pytest.approx(1 / 3)
    assert last[2:] == pytest.approx((2.0, 1.95, False))
    assert (net.training, net.first.training, net.other.training) == (True, True, False)
    assert not any(module._forward_pre_hooks for module in net.modules())
    clock += [(1.0, 1.2), (1.0, 0.9), (1.0, 0.9)]
    choose_silent(net, z, batch_size=1)
    assert (net.first.skip_silent, net.last.skip_silent) == (False, True)


def test_a_block_is_measured_as_a_whole(clock: list) -> None:
    net = nn.Sequential(Block(), Block())
    clock += [(1.0, 0.5), (1.0, 0.98)]
    table = choose_silent(net, torch.randn(2, 9, 24))
    assert [(row.layer, row.chosen) for row in table] == [("0.operator", True), ("1.operator", False)]
    assert [row.silent for row in table] == pytest.approx([2 / 3, 2 / 3])
    assert net[0].ways == net[1].ways == [(True, False), (False, False), (False, True), (False, False)]
    assert [block.operator.skip_silent for block in net] == [True, False]


def test_layers_in_a_list_are_measured_by_themselves(clock: list) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([DMSA(24, 3)])

        def forward(self, z: Tensor) -> Tensor:
            return self.layers[0](z)

    clock += [(1.0, 0.5)]
    assert [row.layer for row in choose_silent(Listed(), torch.randn(2, 9, 24))] == ["layers.0"]


def test_the_table_can_be_read(clock: list) -> None:
    clock += [(1.0, 0.5), (1.0, 1.0), (1.0, 1.0)]
    text = str(choose_silent(Net(), torch.randn(1, 9, 24)))
    assert text.splitlines()[0].split() == ["layer", "silent", "dense,", "ms", "without", "silent", "heads"]
    assert "first" in text
    assert "66.7%" in text
    assert "left out" in text
    assert "computed" in text
    assert "0.0%" in str(Row("blocks.0.operator", 0.0, 1.0, 1.0, False))


def test_a_compiled_network_is_looked_into(clock: list) -> None:
    clock += [(1.0, 0.5)] * 3
    net = Net()
    assert len(choose_silent(torch.compile(net, backend="eager"), torch.randn(1, 9, 24))) == 2
    assert net.first.skip_silent


def test_a_failure_leaves_everything_as_it_was(clock: list) -> None:
    net = Net()
    with pytest.raises(IndexError):  # the clock has nothing to say
        choose_silent(net, torch.randn(1, 9, 24))
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert net.training
    assert not net.first.skip_silent


def test_where_there_is_nothing_to_choose() -> None:
    net, z = Net(), torch.randn(1, 9, 24)
    for model, why in ((net, skipping.ON_CPU), (nn.Sequential(TSSA(24, 3)), skipping.NO_LAYER)):
        table = choose_silent(model, z)
        assert not table
        assert str(table) == why
    assert not net.first.skip_silent


def test_where_the_fused_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where no layer is called by itself."""
    monkeypatch.setattr(choice, "chosen", lambda: "fused")
    with use_kernels("reference"):
        assert str(choose_silent(Net(), torch.randn(1, 9, 24))) == skipping.NOT_FUSED

    class Around(Net):
        def forward(self, z: Tensor) -> Tensor:
            return self.first.forward(z)

    assert str(choose_silent(Around(), torch.randn(1, 9, 24))) == skipping.NOT_CALLED


def test_the_clock_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: what it asks of CUDA, in order."""
    log: list[str] = []

    class Anything:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: log.append(f"{self.name}.{name}") or 8.0

        def __enter__(self) -> None:
            log.append(f"{self.name} begins")

        def __exit__(self, *_: object) -> None:
            log.append(f"{self.name} ends")

    class Cuda:
        Stream = staticmethod(lambda: Anything("stream"))
        current_stream = staticmethod(lambda: Anything("current"))
        CUDAGraph = staticmethod(lambda: Anything("graph"))
        synchronize = staticmethod(lambda: log.append("synchronize"))
        stream = staticmethod(lambda _: Anything("side"))
        graph = staticmethod(lambda *_, **__: Anything("capture"))
        Event = staticmethod(lambda **_: Anything("event"))

    monkeypatch.setattr(skipping.torch, "cuda", Cuda)
    calls = [0, 0]

    def call(which: int) -> Tensor:
        calls[which] += 1
        return torch.zeros(())

    assert skipping.times(lambda: call(0), lambda: call(1)) == [8.0 / skipping.CALLS] * 2
    assert calls == [skipping.WARM + skipping.CALLS] * 2
    assert log.count("graph.replay") == 2 * (skipping.WARM + skipping.REPEATS)
    assert log.index("side ends") < log.index("capture begins")
