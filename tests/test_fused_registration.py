"""The fused layer as an operator that PyTorch knows: opcheck, compile, checkpoint, DDP, export, transforms, FLOPs, and failure.

Everything runs in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dmst import kernels, rotary, use_kernels
from dmst.errors import DmstError
from dmst.kernels import choice, plan
from dmst.kernels.form import Form
from tests.cases import build, gradients, grid_of, label, relative

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import registered
from dmst.kernels.fused import layer
from tests.test_fused import F32, Layer, Net, check, draw, fused, plain

pytestmark = [
    pytest.mark.skipif(
        not choice.interpreted(),
        reason="Triton's interpreter is off: there is a CUDA device (`pytest -m gpu`), or TRITON_INTERPRET is not 1",
    ),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"),
]
FORMS = [("dmsa", {}), ("dmsa", {"mode": "proximal", "rotary": "2d"}), ("tssa", {}), ("gated_channel", {"rotary": "none"})]
forms = pytest.mark.parametrize("case", FORMS, ids=label)
SMALL = (2, 6, 24, 3)  # b, n, d, k


@pytest.fixture(autouse=True)
def _unbroken() -> Iterator[None]:
    registered._broken.clear()
    yield
    registered._broken.clear()
    torch._dynamo.reset()


def arguments(made: Layer) -> tuple[Any, ...]:
    """Of `dmst::attend`, as `registered.attend` passes them."""
    tables: tuple = (None,) * 4
    step = 0
    if made.weights.assign is not None and made.form.rotary != "none":
        n, d = made.z.shape[1:]
        factors = rotary.factors(made.form.rotary, d, n, made.grid, step=plan.STEP, device=made.z.device, dtype=F32)
        assert factors is not None
        tables, step = (*factors.far, *factors.near), factors.step
    return (made.z, *made.weights, *tables, made.form.text, step, F32)


def attend(made: Layer, z: Tensor | None = None) -> Tensor:
    with use_kernels("fused"):
        return kernels.attend(made.z if z is None else z, made.weights, made.form, grid=made.grid)


# --- the operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FORMS[:3], ids=label)
def test_opcheck(case: tuple) -> None:
    """Schema, fake implementation, autograd, and tracing with symbolic sizes, of both operators."""
    made = draw(case, SMALL, excited=True)
    moving = made.map(lambda x: x.clone().requires_grad_())
    opcheck(torch.ops.dmst.attend.default, arguments(moving))
    given = arguments(made)
    *tensors, text, step, dtype = given
    _, *kept = torch.ops.dmst.attend(*given)
    there = [w is not None for w in made.weights]
    some = [ask and index % 2 == 0 for index, ask in enumerate(there)]  # what is not wanted leaves as nothing
    for wanted in ([True, *there], [False, *some]) if case == FORMS[0] else ([False, *some],):
        opcheck(torch.ops.dmst.attend_backward.default, (made.grad, *tensors, *kept, wanted, text, step, dtype))
    grads = torch.ops.dmst.attend_backward(made.grad, *tensors, *kept, [True] * (1 + len(there)), text, step, dtype)
    assert [bool(grad.numel()) for grad in grads[1:]] == there and not registered._broken  # nothing of what is not there


@pytest.mark.parametrize("shape", [(2, 0, 24, 3), (0, 6, 24, 3)], ids=str)
@pytest.mark.parametrize("case", [("dmsa", {}), ("tssa", {})], ids=label)
def test_opcheck_of_nothing(case: tuple, shape: tuple) -> None:
    """No tokens, no samples: no kernel is launched, and the shapes are still those that were promised."""
    made = draw(case, shape, excited=True).map(lambda x: x.requires_grad_())
    opcheck(torch.ops.dmst.attend.default, arguments(made))


def test_fake_tensors_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "forward", None)
    made = draw(("dmsa", {}), SMALL)
    with FakeTensorMode() as mode:
        fake = made.map(mode.from_tensor)
        z = fake.z.requires_grad_()
        out = attend(fake, z)
        out.sum().backward()
    assert out.shape == z.grad.shape == made.z.shape
    assert not registered._broken


def test_the_layer_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    made = draw(("dmsa", {}), SMALL)
    with torch.no_grad():
        graph = make_fx(lambda z: attend(made, z))(made.z)
    assert [node.target for node in graph.graph.nodes].count(torch.ops.dmst.attend.default) == 1
    other = torch.randn_like(made.z)
    torch.testing.assert_close(graph(other), attend(made, other))


@pytest.mark.parametrize("case", FORMS[:3], ids=label)
def test_compiles_to_one_graph_for_every_length(case: tuple) -> None:
    """Full graph, symbolic sizes, forward and backward, and the layer is in it as one operator.

    Lengths from two rotary steps on: up to one step the table of steps has one row, and torch makes a graph of its own for 1.
    """
    graphs = []

    def look(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    operator = build(*case, dtype=F32)
    compiled = torch.compile(operator, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    with use_kernels("fused"):
        for n in (34, 40, 50) if case == FORMS[0] else (34, 50):
            z, grad = torch.randn(2, n, 24), torch.randn(2, n, 24)
            traced, eager = gradients(compiled, z, grad, grid=grid_of(n)), gradients(operator, z, grad, grid=grid_of(n))
            for name, value in eager.items():
                found = traced.get(name, traced.get(f"_orig_mod.{name}"))
                assert relative(found, value) < 1e-5 or (found - value).norm() < 1e-6, (n, name)
    assert len(graphs) == 2  # one forward, one backward, whatever the length
    targets = [[node.target for node in graph.graph.nodes] for graph in graphs]
    assert targets[0].count(torch.ops.dmst.attend.default) == 1
    assert targets[1].count(torch.ops.dmst.attend_backward.default) == 1


def test_a_compiled_layer_follows_the_choice() -> None:
    """The choice is read when the graph is made, and another choice makes another graph."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append(str(graph.code))
        return graph

    operator, z = build("dmsa", {}, dtype=F32), torch.randn(2, 6, 24)
    compiled = torch.compile(operator, fullgraph=True, backend=backend)
    with torch.no_grad():
        for name in ("reference", "fused", "reference"):
            with use_kernels(name):
                torch.testing.assert_close(compiled(z), operator(z))
    assert ["dmst.attend" in graph for graph in graphs] == [False, True]


@pytest.mark.parametrize("what", ["layer", "block"])
def test_a_graph_without_gradients_keeps_nothing(what: str) -> None:
    """What nobody will read is not handed out by the operator: allocations cost the host as much as kernels."""
    from tests.test_fused_step import block_of

    kept: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Any:
        nodes = [node for node in graph.graph.nodes if "dmst" in str(node.target)]
        (text,) = [arg for node in nodes for arg in node.args if isinstance(arg, str)]
        kept.append(Form.read(text).save != "nothing")
        return graph

    module = build("dmsa", {}, dtype=F32) if what == "layer" else block_of()
    z = torch.randn(2, 6, 24)
    compiled = torch.compile(module.eval(), fullgraph=True, backend=backend)
    with use_kernels("fused"):
        with torch.no_grad():
            assert torch.equal(compiled(z, grid=(2, 3)), module(z, grid=(2, 3)))
        compiled(z, grid=(2, 3)).sum().backward()
    assert kept == [False, True]


# --- derivatives ------------------------------------------------------------------------------------------------------


@forms
def test_checkpointing_gives_the_same_bits(case: tuple) -> None:
    made = draw(case, SMALL, excited=True)
    right = fused(made)

    def rerun(z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(lambda z: kernels.attend(z, *args, **kwargs), z, use_reentrant=False)

    z = made.z.clone().requires_grad_()
    weights = made.map(lambda x: x.clone().requires_grad_()).weights
    with use_kernels("fused"):
        out = rerun(z, weights, made.form, grid=made.grid)
        out.backward(made.grad)
    assert torch.equal(out, right["output"])
    assert torch.equal(z.grad, right["z"])
    for name, weight in weights._asdict().items():
        assert weight is None or torch.equal(weight.grad, right[name]), name


def test_a_second_derivative_says_no() -> None:
    made = draw(("dmsa", {}), SMALL)
    z = made.z.requires_grad_()
    (first,) = torch.autograd.grad(attend(made, z).square().sum(), z, create_graph=True)
    with pytest.raises(DmstError, match=r'use_kernels\("reference"\)'):
        first.sum().backward()
    with use_kernels("reference"):  # the remedy works
        out = kernels.attend(z, made.weights, made.form)
        (usual,) = torch.autograd.grad(out.square().sum(), z, create_graph=True)
        usual.sum().backward()
    assert relative(first, usual) < 1e-5
    assert z.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # inside torch's own import for forward mode
@pytest.mark.parametrize("name", ["auto", "fused"])
def test_transforms_take_the_plain_kernels(name: str) -> None:
    """torch.func and forward mode see through plain torch only; the choice does not stop them."""
    made = draw(("dmsa", {}), SMALL)
    z, weights, form = made.z, made.weights, made.form

    def loss(z: Tensor) -> Tensor:
        return (kernels.attend(z, weights, form) * made.grad).sum()

    usual = plain(made)
    tangent = torch.randn_like(z)
    with use_kernels("reference"):
        usual_jvp = torch.func.jvp(lambda z: kernels.attend(z, weights, form), (z,), (tangent,))[1]
    with use_kernels(name):
        assert relative(torch.func.grad(loss)(z), usual["z"]) < 1e-5
        each = torch.func.vmap(lambda one: kernels.attend(one[None], weights, form)[0])(z)
        assert relative(each, usual["output"]) < 1e-5
        assert torch.equal(torch.func.jvp(lambda z: kernels.attend(z, weights, form), (z,), (tangent,))[1], usual_jvp)
        rows = torch.func.vmap(torch.func.grad(lambda one, g: (kernels.attend(one[None], weights, form)[0] * g).sum()))(
            z, made.grad
        )
        assert relative(rows, usual["z"]) < 1e-5


# --- others who look --------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_formula() -> None:
    """4 b n d^2 + 2 b n d k forward, twice that backward; without scores the second term is gone."""
    b, n, d, k = SMALL
    for case, forward in ((("dmsa", {}), 4 * b * n * d * d + 2 * b * n * d * k), (("tssa", {}), 4 * b * n * d * d)):
        made = draw(case, SMALL)
        with FlopCounterMode(display=False) as counter:
            out = attend(made)
        assert counter.get_total_flops() == forward
        with FlopCounterMode(display=False) as counter:
            out = attend(made, made.z.clone().requires_grad_())
            out.sum().backward()
        assert counter.get_total_flops() == 3 * forward


@pytest.mark.parametrize("case", FORMS[:3], ids=label)
def test_export_takes_the_reference_path(case: tuple) -> None:
    operator = build(*case, dtype=F32).eval()
    z = torch.randn(2, 6, 24)
    grid = {"grid": (2, 3)} if "2d" in case[1].values() else {}
    with use_kernels("fused"), torch.no_grad():
        program = torch.export.export(operator, (z,), grid)
        own = operator(z, **grid)
    assert "dmst" not in program.graph_module.code
    torch.testing.assert_close(program.module()(z, **grid), own)


RANK_1 = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from dmst import use_kernels
from tests.test_fused import Net
import sys
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=1, world_size=2)
torch.manual_seed(0)
net, z = Net(), torch.randn(4, 6, 24)
use_kernels("fused")
mine = DistributedDataParallel(net)  # held: its reducer works in the backward pass
mine(z[2:]).square().mean().backward()
torch.distributed.barrier()
os._exit(0)  # gloo's threads may outlive an orderly end, which aborts
"""


def test_ddp_is_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    """This process is rank 0, a child is rank 1: each sees half of the batch, and the averaged gradients are the whole's."""
    torch.manual_seed(0)
    net, z = Net(), torch.randn(4, 6, 24)
    with use_kernels("fused"):
        net(z).square().mean().backward()
    whole = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(RANK_1), str(tmp_path / "store")]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        store, patience = f"file://{tmp_path}/store", timedelta(seconds=60)
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=2, timeout=patience)
        mine = nn.parallel.DistributedDataParallel(net)
        with use_kernels("fused"):
            mine(z[:2]).square().mean().backward()
        torch.distributed.barrier()
        del mine
    finally:
        gc.collect()  # the reducer before its process group
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        try:
            errors = child.communicate(timeout=60)[1]
        finally:
            child.kill()
    assert child.returncode == 0, errors
    for name, p in net.named_parameters():
        assert relative(p.grad, whole[name]) < 1e-5, name


# --- a kernel that does not work --------------------------------------------------------------------------------------


def boom(*_: Any) -> Any:
    raise RuntimeError("boom\nand a long story")


@pytest.mark.parametrize("broken", ["forward", "backward"])
@forms
def test_a_kernel_that_fails_falls_back_once(case: tuple, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning that names the shape, the right numbers, and from then on silence."""
    monkeypatch.setattr(layer, broken, boom)
    made = draw(case, SMALL)
    with pytest.warns(RuntimeWarning, match=r"\(2, 6, 24\).*3 heads.*RuntimeError: boom\).*plain") as seen:
        found = fused(made)
    assert len(seen) == 1
    assert "story" not in str(seen[0].message)
    check(found, made)
    longer = draw(case, (2, 10, 24, 3))
    check(fused(longer), longer)  # a second warning would be an error
    assert len(registered._broken) == 1
    monkeypatch.undo()
    wider = draw(case, (2, 6, 36, 3))  # another width is another kernel
    check(fused(wider), wider)
    assert len(registered._broken) == 1


@pytest.mark.parametrize("case", FORMS[:3], ids=label)
def test_a_kernel_that_fails_inside_a_compiled_graph(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph was promised shapes; what falls back keeps the promise."""
    monkeypatch.setattr(layer, "forward", boom)
    made = draw(case, SMALL).map(lambda x: x.requires_grad_())
    with pytest.warns(RuntimeWarning, match="boom"):
        opcheck(torch.ops.dmst.attend.default, arguments(made), test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_no_memory_is_no_broken_kernel(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer, broken, full)
    made = draw(("dmsa", {}), SMALL)
    with pytest.raises(torch.OutOfMemoryError):
        fused(made)
    assert not registered._broken
    monkeypatch.undo()
    check(fused(made), made)
