"""gelu: PyTorch's where it is called, a shorter formula where it is compiled for a GPU in bfloat16; both round alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dmst.models import activation
from dmst.models.activation import Gelu, gelu
from dmst.models.config import ModelConfig
from dmst.models.feedforward import MlpStep
from dmst.models.stems import ConvStem
from tests.cases import relative

F64, BF16 = torch.float64, torch.bfloat16


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whatever the device."""
    monkeypatch.setattr(activation, "_on_gpu", lambda x: True)
    torch._dynamo.reset()


def test_the_formula_is_the_normal_distribution() -> None:
    x = torch.linspace(-12, 12, 100_001, dtype=F64)
    below, bell = activation._normal(x)
    assert (below - torch.special.ndtr(x)).abs().max() < 7.5e-8
    assert torch.equal(bell, torch.exp(-0.5 * x * x))


def test_in_bfloat16_it_is_what_rounding_leaves() -> None:
    """Every number of bfloat16 between -6 and 6, by value and slope: as near to the truth as PyTorch's, or nearly so."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = bits[bits.abs() < 6]
    exact = x.double().requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(exact).sum(), exact)
    for call in (activation._Short.apply, F.gelu):
        moving = x.clone().requires_grad_()
        out = call(moving)
        (found,) = torch.autograd.grad(out, moving, torch.ones_like(out))
        assert relative(out.double(), F.gelu(exact.detach())) < 1.8e-3
        assert relative(found.double(), slope) < 1.8e-3
        assert (out.double() - F.gelu(exact.detach())).abs().max() < 2**-7


def test_the_ends() -> None:
    x = torch.tensor([torch.inf, 3e38, 0.0, -0.0, -3e38], dtype=BF16)
    assert torch.equal(activation._Short.apply(x), x.clamp(min=0))
    assert activation._Short.apply(torch.tensor([torch.nan], dtype=BF16)).isnan().all()


def test_called_it_is_pytorchs() -> None:
    x = torch.randn(100).to(BF16)
    assert torch.equal(gelu(x), F.gelu(x))
    assert torch.equal(Gelu()(x), F.gelu(x))
    assert torch.equal(Gelu("tanh")(x), F.gelu(x, approximate="tanh"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_it_is_the_formula_in_one_graph(short: None) -> None:
    graphs: list[Any] = []

    def look(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append(graph)
        return graph.forward

    call: Any = torch.compile(gelu, backend=look, fullgraph=True)
    x = torch.randn(100).to(BF16)
    assert torch.equal(call(x), activation._Short.apply(x))
    assert "exp" in "".join(str(m.graph) for m in graphs[0].modules() if isinstance(m, torch.fx.GraphModule))
    assert torch.equal(call(x.float()), F.gelu(x.float()))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_a_compiled_stem_and_feedforward(again: bool, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = ModelConfig(img_size=16, dim=16, depth=1, num_heads=2, num_classes=5)
    pieces = nn.Sequential(ConvStem(config), MlpStep(config))
    images = torch.randn(2, 3, 16, 16)

    def forward(images: Tensor) -> Tensor:
        return checkpoint(pieces, images, use_reentrant=False) if again else pieces(images)

    def outcome(call: Any) -> list[Tensor]:
        with torch.autocast("cpu", BF16):
            out = call(images).float()
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(pieces.parameters()))]

    right = outcome(forward)
    found = outcome(torch.compile(forward, backend="aot_eager", fullgraph=True))
    assert all(relative(x.double(), y.double()) < 0.02 for x, y in zip(found, right, strict=True))
    monkeypatch.setattr(activation, "B", (0.0,) * 5)
    torch._dynamo.reset()
    wrong = outcome(torch.compile(forward, backend="aot_eager", fullgraph=True))
    assert relative(wrong[0], right[0]) > 0.02  # so it was taken


def test_exported_it_keeps_its_name(short: None) -> None:
    program = torch.export.export(Gelu(), (torch.randn(3).to(BF16),), strict=True)
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [torch.ops.aten.gelu.default]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_gradients_of_each_sample(short: None) -> None:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return gelu(x * weight).float().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))
    weight, x = torch.randn(4).to(BF16), torch.randn(3, 4).to(BF16)
    assert torch.equal(torch.compile(each, backend="aot_eager", fullgraph=True)(weight, x), each(weight, x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run `pytest -m gpu` where there is one")
def test_it_is_taken_on_a_gpu() -> None:
    graphs: list[str] = []

    def look(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append("".join(str(m.graph) for m in graph.modules() if isinstance(m, torch.fx.GraphModule)))
        return graph.forward

    torch._dynamo.reset()
    x = torch.randn(1000, device="cuda").to(BF16)
    call: Any = torch.compile(gelu, backend=look, fullgraph=True)
    assert relative(call(x).double(), F.gelu(x.double())) < 3e-3
    call(x.float())
    assert ["exp" in graph for graph in graphs] == [True, False]
