"""The fused kernels as operators that PyTorch knows: opcheck, compile, export, transforms, DDP, FLOPs, and failure."""

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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dmst import kernels, use_kernels
from dmst.errors import DmstError
from dmst.kernels import attempt
from dmst.models.block import Block
from dmst.models.config import ModelConfig
from tests.cases import build, excite, gradients, grid_of, label, relative
from tests.parity import DEVICE, F32, LISTING, TSSA, Layer, Net, check, draw, fused, needs_triton, plain

pytestmark = [
    *needs_triton,
    # the compiler makes an object of torch's own class when it traces an autograd function
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
SMALL = (2, 6, 24, 3)  # b, n, d, k
KERNELS = "triton_kernel_wrapper" if DEVICE == "cuda" else "dmst"  # in a graph: the compiler sees no interpreted kernels
FORMS = [LISTING, ("dmsa", {"mode": "proximal", "rotary": "2d"}), TSSA, ("gmsa", {"groups": 4})]


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def attend(made: Layer, z: Tensor | None = None) -> Tensor:
    with use_kernels("fused"):
        return kernels.attend(made.z if z is None else z, made.weights, made.form, grid=made.grid)


class Calls(TorchDispatchMode):
    """Every call of one of our operators, with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if call.namespace == "dmst":
            self.seen.append((call, args))
        return call(*args, **(kwargs or {}))


@pytest.mark.compile
def test_opcheck() -> None:
    """Schema, fake implementation and tracing with symbolic sizes, of every operator that forward and backward passes call."""
    from dmst.kernels.fused.norm import layer_norm

    with Calls() as calls:
        for case in (LISTING, TSSA):
            fused(draw(case, SMALL, excited=True))
        with use_kernels("fused"):
            z = torch.randn(2, 6, 24, device=DEVICE)
            gradients(build("gmsa", {"groups": 4}, dtype=F32).to(DEVICE), z, z, grid=(2, 3))
        weight = torch.ones(24, device=DEVICE, requires_grad=True)
        sum(x.sum() for x in layer_norm(z, weight, weight, 1e-6, torch.bfloat16)).backward()
    assert len({call for call, _ in calls.seen}) == 12
    for call, given in calls.seen:
        opcheck(call, [x.detach() if isinstance(x, Tensor) else x for x in given])


def test_fake_tensors() -> None:
    made = draw(LISTING, SMALL)
    with FakeTensorMode() as mode:
        fake = made.map(mode.from_tensor)
        z = fake.z.requires_grad_()
        out = attend(fake, z)
        out.sum().backward()
    assert out.shape == z.grad.shape == made.z.shape


# --- the compiler -----------------------------------------------------------------------------------------------------


def keeping(graphs: list[str]) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def look(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=look, bw_compiler=look)


@pytest.mark.compile
@pytest.mark.parametrize("case", FORMS, ids=label)
def test_a_compiled_layer_is_one_graph_for_every_length(case: tuple) -> None:
    """Full graph, symbolic sizes, forward and backward, by our kernels.

    Lengths from two rotary steps on: up to one step the table of steps has one row, and torch makes a graph of its own for 1.
    """
    graphs: list[str] = []
    operator = build(*case, dtype=F32).to(DEVICE)
    compiled = torch.compile(operator, fullgraph=True, dynamic=True, backend=keeping(graphs))
    with use_kernels("fused"):
        for n in (66, 70):
            z, grad = torch.randn(2, n, 24, device=DEVICE), torch.randn(2, n, 24, device=DEVICE)
            traced, eager = gradients(compiled, z, grad, grid=grid_of(n)), gradients(operator, z, grad, grid=grid_of(n))
            for name, value in eager.items():
                found = traced.get(name, traced.get(f"_orig_mod.{name}"))
                assert relative(found, value) < 1e-5 or (found - value).norm() < 3e-6, (n, name)  # some are sums that cancel
    assert [KERNELS in graph for graph in graphs] == [True, True]


def block_of(dim: int, heads: int) -> Block:
    torch.manual_seed(0)
    block = Block(ModelConfig(operator="dmsa", dim=dim, num_heads=heads, layer_scale=0.5), dtype=F32)
    excite(block.operator)
    return block.to(DEVICE).train()


@pytest.mark.compile
def test_a_compiled_block_is_one_graph() -> None:
    graphs: list[str] = []
    block = block_of(24, 3)
    compiled = torch.compile(block, fullgraph=True, backend=keeping(graphs))
    z = torch.randn(4, 6, 24, device=DEVICE)
    results = []
    for each in (block, compiled):
        moving = z.clone().requires_grad_()
        with use_kernels("fused"):
            out = each(moving, grid=(2, 3))
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (moving, *block.parameters()))))
    assert all(relative(x, y) < 1e-5 for x, y in zip(*results, strict=True))
    assert [KERNELS in graph for graph in graphs] == [True, True]


@pytest.mark.compile
def test_a_compiled_layer_follows_the_choice() -> None:
    """The choice is read when the graph is made, and another choice makes another graph."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append(str(graph.code))
        return graph

    operator, z = build("dmsa", {}, dtype=F32).to(DEVICE), torch.randn(2, 6, 24, device=DEVICE)
    compiled = torch.compile(operator, fullgraph=True, backend=backend)
    with torch.no_grad():
        for name in ("reference", "fused", "reference"):
            with use_kernels(name):
                torch.testing.assert_close(compiled(z), operator(z))
    assert ["dmst.front" in graph for graph in graphs] == [False, True]


@pytest.mark.compile
def test_export_takes_the_reference_path() -> None:
    operator, z = build("dmsa", {"rotary": "2d"}, dtype=F32).eval().to(DEVICE), torch.randn(2, 6, 24, device=DEVICE)
    with use_kernels("fused"), torch.no_grad():
        program = torch.export.export(operator, (z,), {"grid": (2, 3)})
        own = operator(z, grid=(2, 3))
    assert "dmst" not in program.graph_module.code
    torch.testing.assert_close(program.module()(z, grid=(2, 3)), own)


# --- derivatives ------------------------------------------------------------------------------------------------------


def test_a_second_derivative_says_no() -> None:
    """And the remedy that it names works."""
    made = draw(LISTING, SMALL)
    z = made.z.requires_grad_()
    (first,) = torch.autograd.grad(attend(made, z).square().sum(), z, create_graph=True)
    with pytest.raises(DmstError, match=r'use_kernels\("reference"\)'):
        first.sum().backward()
    with use_kernels("reference"):
        out = kernels.attend(z, made.weights, made.form)
        (usual,) = torch.autograd.grad(out.square().sum(), z, create_graph=True)
        usual.sum().backward()
    assert relative(first, usual) < 1e-5
    assert z.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # inside torch's own import for forward mode
@pytest.mark.parametrize("name", ["auto", "fused"])
def test_transforms_take_the_plain_kernels(name: str) -> None:
    """torch.func and forward mode see through plain torch only; the choice does not stop them."""
    made = draw(LISTING, SMALL)
    z, weights, form = made.z, made.weights, made.form
    usual, tangent = plain(made), torch.randn_like(z)
    with use_kernels("reference"):
        usual_jvp = torch.func.jvp(lambda z: kernels.attend(z, weights, form), (z,), (tangent,))[1]
    with use_kernels(name):
        dz = torch.func.grad(lambda z: (kernels.attend(z, weights, form) * made.grad).sum())(z)
        assert relative(dz, usual["z"]) < 1e-5
        each = torch.func.vmap(lambda one: kernels.attend(one[None], weights, form)[0])(z)
        assert relative(each, usual["output"]) < 1e-5
        assert torch.equal(torch.func.jvp(lambda z: kernels.attend(z, weights, form), (z,), (tangent,))[1], usual_jvp)


# --- others -----------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_formula() -> None:
    """4 b n d^2 + 2 b n d k forward, twice that backward; without scores the second term is gone."""
    b, n, d, k = SMALL
    for case, forward in ((LISTING, 4 * b * n * d * d + 2 * b * n * d * k), (TSSA, 4 * b * n * d * d)):
        made = draw(case, SMALL)
        with FlopCounterMode(display=False) as counter:
            fused(made)
        assert counter.get_total_flops() == 3 * forward


RANK_1 = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from dmst import use_kernels
from tests.parity import Net
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


@pytest.mark.process
@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks on one CPU; one rank on a GPU is in test_gpu.py")
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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """The forward and backward passes raise what stands in the list. Afterwards every kernel is tried again."""
    from dmst.kernels.fused import layer

    raised: list[Exception] = []

    def fail(*_: Any) -> Any:
        raise raised[0]

    attempt.anew()
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(layer, name, fail)
    yield raised
    attempt.anew()


def test_a_kernel_that_fails_falls_back_once(failing: list[Exception]) -> None:
    """One warning that names the shape, the right numbers, and from then on silence."""
    failing.append(RuntimeError("boom\nand a long story"))
    made = draw(LISTING, SMALL)
    with pytest.warns(RuntimeWarning, match=r"the layer .*\(2, 6, 24\).*RuntimeError: boom\).*plain") as seen:
        found = fused(made)
    assert len(seen) == 1 and "story" not in str(seen[0].message)
    check(found, made)
    longer = draw(LISTING, (2, 10, 24, 3))
    check(fused(longer), longer)  # a second warning would be an error
    with pytest.warns(RuntimeWarning, match="boom"):  # another width is another kernel
        fused(draw(LISTING, (2, 6, 36, 3)))


def test_no_memory_is_no_broken_kernel(failing: list[Exception]) -> None:
    failing.append(torch.OutOfMemoryError("CUDA out of memory"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            fused(draw(LISTING, SMALL))
