"""Compiled, exported and traced: one graph for every length, and nothing of the first input remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dmst import kernels
from dmst.models.positions import LearnedPosition
from dmst.operators import DMSA
from tests import networks
from tests.cases import GATES, MODES, VARIANTS, build, excite, gradients, label, relative, tokens

F64 = torch.float64
# The compiler, which takes a second or two a graph, meets a mode and a gate each by itself: all of both, every mode with the
# gate that is the default. All pairs of them are computed in tests/operators/test_operator_contract.py.
PAIRS = [
    (name, options)
    for name, options in VARIANTS
    if options.keys() != {"mode", "gate_activation"}
    or options["gate_activation"] == "sparsemax"
    or (MODES.index(options["mode"]) + GATES.index(options["gate_activation"])) % 3 == 0
]
pytestmark = pytest.mark.compile
old_and_says_so = pytest.mark.filterwarnings(
    "ignore:`torch.jit", "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.mark.parametrize("case", PAIRS, ids=label)
def test_compiles_to_one_graph_for_every_length(case: tuple) -> None:
    torch._dynamo.reset()
    counter, operator = CompileCounter(), build(*case)
    compiled = torch.compile(operator, fullgraph=True, dynamic=True, backend=counter)
    for n, grid in ((12, (3, 4)), (20, (4, 5)), (42, (6, 7))):
        z = tokens(n=n)
        torch.testing.assert_close(compiled(z, grid=grid), operator(z, grid=grid), rtol=1e-11, atol=1e-11)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inside inductor's own import
def test_inductor_once() -> None:
    torch._dynamo.reset()
    operator = excite(DMSA(24, 3))
    compiled = torch.compile(operator, fullgraph=True, dynamic=True)
    for n in (20, 33):
        z, grad = tokens(n=n, dtype=torch.float32), torch.randn(2, n, 24)
        eager, traced = gradients(operator, z, grad), gradients(compiled, z, grad)
        for name, value in eager.items():
            assert relative(traced.get(name, traced.get(f"_orig_mod.{name}")), value) < 1e-5, name


@pytest.mark.parametrize("case", PAIRS, ids=label)
def test_exports_with_any_batch_and_length(case: tuple) -> None:
    operator = build(*case).eval()
    if "2d" in case[1].values():  # a grid is part of the program: fixed
        shapes = {"z": {0: torch.export.Dim.DYNAMIC}, "grid": (None, None)}
        program = torch.export.export(operator, (tokens(n=12),), {"grid": (3, 4)}, dynamic_shapes=shapes)
        z = tokens(b=3, n=12)
        torch.testing.assert_close(program.module()(z, grid=(3, 4)), operator(z, grid=(3, 4)))
        return
    least = max(2, operator.least_tokens)
    batch, length = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("length", min=least, max=65536)
    program = torch.export.export(operator, (tokens(n=12),), dynamic_shapes={"z": {0: batch, 1: length}})
    for b, n in ((1, 5), (3, 197)):
        z = tokens(b=b, n=n)
        torch.testing.assert_close(program.module()(z), operator(z), rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")  # it is old, and says so
def test_a_traced_program_holds_for_other_gates() -> None:
    """What is recorded once must not remember which heads were on: jit.trace, make_fx, and fake tensors without values."""
    operator = DMSA(384, 8, membership_bias=True).eval()
    nn.init.normal_(operator.assign.weight, std=0.3)
    one, other = torch.randn(8, 196, 384) + 1, torch.randn(8, 196, 384) - 1
    with torch.no_grad():
        assert not torch.equal(operator.decompose(one).gate > 0, operator.decompose(other).gate > 0)
        programs = [torch.jit.trace(operator, one, check_trace=False), make_fx(operator)(one)]
        for program in programs:
            torch.testing.assert_close(program(other), operator(other))
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(one)
            weights = kernels.Weights(*(None if w is None else mode.from_tensor(w) for w in operator.weights()))
            assert kernels.attend(fake, weights, operator.form).shape == one.shape
    with FakeTensorMode() as mode:  # and with gradients, where a real table is already shared
        fake = mode.from_tensor(one).requires_grad_()
        weights = kernels.Weights(*(None if w is None else mode.from_tensor(w) for w in operator.weights()))
        kernels.attend(fake, weights, operator.form).sum().backward()
        assert fake.grad.shape == one.shape


@old_and_says_so
@pytest.mark.parametrize("case", [case for case in PAIRS if "2d" not in case[1].values()], ids=label)  # it knows no `grid`
def test_torch_jit_finds_the_same_graph_without_gradients(case: tuple) -> None:
    """torch.jit.trace takes a second look, without gradients, and refuses a graph that differs. Either way it trains."""
    operator = build(*case)
    z, grad = tokens(b=3, n=9), torch.randn(3, 9, 24, dtype=F64)
    wanted = gradients(operator, z, grad)
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            program = torch.jit.trace(operator, tokens(n=12))
        found = gradients(program, z, grad)
        assert all(relative(found[name], x) < 1e-10 or x.norm() < 1e-12 for name, x in wanted.items())


@old_and_says_so
@networks.some
def test_torch_jit_traces_networks_for_every_size(case: Any) -> None:
    model = networks.build(case, depth=1, readout_depth=1).eval()
    program = torch.jit.trace(model, networks.images(batch=1))
    for x in (networks.images(), networks.images((64, 32), batch=2)):
        assert relative(program(x), model(x)) < 1e-7  # a size is a tensor there: sums with it are in float32


def test_positions_of_a_fixed_size_are_added_as_they_are() -> None:
    """A graph for one size resizes no table: ONNX knows no antialiased bicubic."""
    model = networks.build(("vit_tiny", {})).eval()
    assert isinstance(model.position, LearnedPosition)
    shapes = {"images": {0: torch.export.Dim.DYNAMIC}}
    for size, resized in (((32, 48), False), ((48, 48), True)):
        program = torch.export.export(model, (networks.images(size),), dynamic_shapes=shapes)
        assert ("upsample" in str(program.graph)) == resized
