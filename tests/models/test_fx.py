"""torch.fx: a symbolic trace of every network gives its very numbers, in training too, and knows the parts by their names.

timm and torchvision, which take features out of such graphs, are in test_timm.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from dmst.errors import OptionError
from dmst.models import create_model
from dmst.operators import DMSA, create
from tests.cases import VARIANTS, label, tokens
from tests.cases import build as build_operator
from tests.networks import SMALL, build, every, images


@every
def test_a_symbolic_graph_is_the_network(case: Any) -> None:
    """Whatever the batch and the size of the images."""
    model = build(case).eval()
    graph = symbolic_trace(model)
    for x in (images(), images((96, 16), batch=1)):
        assert torch.equal(graph(x), model(x))
    assert {f"blocks.{i}.operator" for i in range(2)} <= {node.target for node in graph.graph.nodes if node.op == "call_module"}


@pytest.mark.parametrize("case", VARIANTS, ids=label)
def test_an_operator_is_one_node_of_any_network(case: tuple) -> None:
    network = nn.Sequential(nn.LayerNorm(24, dtype=torch.float64), build_operator(*case)).eval()
    if "2d" in case[1].values():
        network = Gridded(network)
    graph, z = symbolic_trace(network), tokens(n=12)
    assert torch.equal(graph(z), network(z))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


class Gridded(nn.Module):
    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.norm, self.operator = parts

    def forward(self, z: Tensor) -> Tensor:
        return self.operator(z=self.norm(z), grid=(3, 4))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripting_is_refused_in_a_line() -> None:
    for module in (create_model("vit_tiny", **SMALL), nn.Sequential(create("dmsa", 24, 3)), DMSA(24, 3)):
        with pytest.raises(OptionError, match=r"torch\.jit\.script .* torch\.export\.export or torch\.jit\.trace"):
            torch.jit.script(module)
