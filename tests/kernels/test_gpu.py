"""What only a GPU can do with the fused kernels: working sizes, graphs, streams, the compiler, memory, tensors beyond 2^31.

A new combination of compile-time sizes costs compilation, so most tests share the shape (3, 197, 96, 2): two heads of 48.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmst import kernels, use_kernels
from dmst.errors import ShapeError
from dmst.kernels import Weights, choice, reference
from dmst.operators import DMSA, Spatial
from tests.cases import VARIANTS, build, gradients, label, relative, tokens
from tests.kernels.test_compiler import block_of
from tests.kernels.test_parity import check_isolation, check_wanted
from tests.parity import (
    BARS,
    BF16,
    EQUATION,
    F16,
    F32,
    LISTING,
    PRECISE,
    PROXIMAL,
    TSSA,
    Layer,
    Net,
    check,
    differentiate,
    draw,
    excess,
    fresh_memory_is_nan,
    fused,
    guarded,
    needs_triton,
    rounded,
    same_bits,
)

pytestmark = [pytest.mark.gpu, *needs_triton]
DEVICE = "cuda"
SHAPE = (3, 197, 96, 2)  # b, n, d, k
WORKING, SHORT, LONG = (4, 197, 384, 8), (64, 197, 384, 8), (64, 1024, 384, 8)
BIASED = ("dmsa", {"membership_bias": True, "gate_scale": 3.0})
inductor = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def stored(made: Any, dtype: torch.dtype) -> Any:
    return made.map(lambda x: x.to(dtype))


def requested() -> int:
    """Bytes that are held, as they were asked for: what torch takes for that may be up to a MiB more, as it happens."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def near(found: dict[str, Tensor | None], right: dict[str, Tensor | None], bar: float) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        if value is None or found[name] is None:
            assert value is None and found[name] is None, name
        else:
            assert relative(found[name], value) <= bar or (found[name] - value).norm() <= 1e-6, name


# --- the layer is that of a CPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VARIANTS, ids=label)
def test_gpu_is_cpu(case: tuple) -> None:
    operator, z, grad = build(*case), tokens(n=35), torch.randn(2, 35, 24, dtype=torch.float64)
    here = gradients(operator, z, grad, grid=(5, 7))
    there = gradients(operator.cuda(), z.cuda(), grad.cuda(), grid=(5, 7))
    for name, value in here.items():
        assert relative(there[name].cpu(), value) < 1e-10 or (there[name].cpu() - value).norm() < 1e-12, name


@pytest.mark.parametrize("case", PRECISE, ids=label)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_an_operator_under_autocast(case: tuple, dtype: torch.dtype) -> None:
    operator, z, grad = rounded(case, dtype, 1.0, 3, 197, 192, 4)
    exact = gradients(operator.double(), z.double(), grad.double(), grid=(1, 197))
    with torch.autocast("cuda", dtype=dtype):
        found = gradients(operator.float().cuda(), z.cuda(), grad.cuda(), grid=(1, 197))
    assert found["out"].dtype == dtype
    assert excess(found["out"].cpu(), exact["out"], dtype) <= BARS[dtype][0]
    assert excess(found["z"].cpu(), exact["z"], dtype) <= BARS[dtype][1]


def test_maps_of_65536_tokens() -> None:
    layer = Spatial(DMSA(96, 4, rotary="2d")).cuda()
    x = torch.randn(1, 96, 256, 256, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


def test_tokens_and_weights_on_two_devices() -> None:
    made = draw(LISTING, SHAPE)
    for z, weights in ((made.z.cpu(), made.weights), (made.z, made.weights._replace(out=made.weights.out.cpu()))):
        with use_kernels("fused"), pytest.raises(ShapeError, match=r"is on (cuda|cpu).* and z on (cuda|cpu)"):
            kernels.attend(z, weights, made.form)


def test_auto_is_what_the_table_says() -> None:
    form = draw(LISTING, SHAPE).form
    for dtype in choice.DTYPES:
        assert choice.verdict(torch.device("cuda", 0), dtype, form, SHAPE[2], "auto").fused
        assert choice.verdict(torch.device("cuda", 0), dtype, form, SHAPE[2], "fused").fused
    assert not choice.verdict(torch.device("cuda", 0), torch.float64, form, SHAPE[2], "auto").fused


# --- parity at working sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 197, 1000])
@pytest.mark.parametrize("case", [LISTING, EQUATION, PROXIMAL], ids=label)
def test_working_sizes(case: tuple, n: int) -> None:
    """Width 384, eight heads: bfloat16 as stored, and float32."""
    made = draw(case, (2, n, 384, 8), BF16)
    check(fused(stored(made, BF16), BF16), made, BF16)
    for b in (2, 6) if n == 197 else ():
        made = draw(case, (b, n, 384, 8))
        check(fused(made), made)


@pytest.mark.parametrize(
    "case", [LISTING, EQUATION, PROXIMAL, ("dmsa", {"rotary": "2d"}), ("tssa", {"position_scores": "1d"})], ids=label
)
def test_large_batches(case: tuple) -> None:
    """Samples that are not split over programs; NaN stays in its sample."""
    for shape in (SHORT, (300, 40, 96, 2)):
        made = draw(case, shape, BF16)
        found = fused(stored(made, BF16), BF16)
        check(found, made, BF16)
        same_bits(fused(stored(made, BF16), BF16), found)
    made = draw(case, (300, 40, 96, 2))
    check(fused(made), made)
    check_isolation(stored(draw(case, (64, 197, 96, 2), BF16), BF16), BF16)


@pytest.mark.parametrize("case", [LISTING, EQUATION, PROXIMAL, ("dmsa", {"membership_bias": True})], ids=label)
def test_long_samples(case: tuple) -> None:
    """As stored and under autocast, with NaN in fresh memory; NaN stays in its sample."""
    for shape in ((2, 768, 384, 8), (70, 128, 64, 4), (9, 768, 384, 8), (64, 768, 384, 8), (1, 8192, 384, 8)):
        made = draw(case, shape, BF16)
        mine = stored(made, BF16)
        found = fused(mine, BF16)
        check(found, made, BF16)
        same_bits(fused(mine, BF16), found)
        with fresh_memory_is_nan():
            same_bits(fused(mine.map(guarded), BF16), found)
    made = draw(case, (3, 896, 384, 8), BF16)
    check(fused(made, BF16), made, BF16)
    check_isolation(stored(draw(case, (4, 256, 128, 8), BF16), BF16), BF16)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [SHORT, (2, 768, 384, 8), (16, 300, 384, 8)], ids=str)
def test_what_is_wanted_decides_no_bit_of_the_rest(shape: tuple, dtype: torch.dtype) -> None:
    """Short, long and other samples, by kernels that have variants for what is wanted."""
    check_wanted(stored(draw(BIASED, shape, dtype), dtype), dtype)


# --- the hidden channels of an MLP ------------------------------------------------------------------------------------


def test_hidden_channels_of_a_network() -> None:
    """A network's MLPs in inference take one kernel: near the plain ones, eager and compiled."""
    from dmst import create_model

    torch._dynamo.reset()
    options = {"dim": 192, "depth": 3, "num_heads": 3, "img_size": 128, "num_classes": 7}
    model = create_model("vit_tiny", **options, device="cuda").eval()
    images = torch.randn(256, 3, 128, 128, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype=BF16):
        found = model(images)
        assert torch.equal(model.trace(images).logits, found)
        with use_kernels("reference"):
            plain = model(images)
        compiled = torch.compile(model, dynamic=False, fullgraph=True)(images)
    assert relative(found, plain) < 3e-2 and relative(compiled, plain) < 3e-2


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_layer_keeps_two_tensors() -> None:
    """The tokens, which were there already, and the projected ones."""
    made = stored(draw(LISTING, (32, 197, 384, 8), BF16), BF16)
    z = made.z.requires_grad_()
    with use_kernels("fused"):
        kernels.attend(z, made.weights, made.form)
        torch.cuda.synchronize()
        before = requested()
        out = kernels.attend(z, made.weights, made.form)
    assert out.grad_fn is not None
    assert requested() - before <= 2.2 * z.numel() * z.element_size()


@pytest.mark.parametrize("shape", [WORKING, SHORT, (6, 1000, 96, 2), (4, 768, 384, 8)], ids=str)  # by each route
@pytest.mark.parametrize("case", [LISTING, PROXIMAL, TSSA], ids=label)
def test_a_layer_that_saves_nothing(case: tuple, shape: tuple) -> None:
    """The same bits, the output alone after the forward pass, and no higher a peak in the backward pass."""
    made = stored(draw(case, shape, BF16), BF16)
    other, size = made._replace(form=replace(made.form, save="nothing")), made.z.numel() * made.z.element_size()
    same_bits(fused(other, BF16), fused(made, BF16))
    peaks = []
    for each in (other, made):
        z = each.z.detach().requires_grad_()
        torch.cuda.synchronize()
        before, asked = torch.cuda.memory_allocated(), requested()
        with use_kernels("fused"):
            out = kernels.attend(z, each.weights, each.form, grid=each.grid)
        if each is other:
            assert requested() - asked <= 1.1 * size
        torch.cuda.reset_peak_memory_stats()
        out.backward(each.grad)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out, z
    assert peaks[0] <= peaks[1] + 2**20


# --- repeats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "repeats"), [(F32, 1000), (BF16, 200)], ids=str)
def test_repeats_are_equal_to_the_bit(dtype: torch.dtype, repeats: int) -> None:
    made = stored(draw(LISTING, WORKING, dtype), dtype)
    first = fused(made, dtype)
    for _ in range(repeats):
        same_bits(fused(made, dtype), first)


def test_side_streams() -> None:
    """Two streams at once, forward and backward, as on the first one."""
    layers = [draw(LISTING, SHAPE), draw(TSSA, SHAPE)]
    right = [fused(made) for made in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    for _ in range(20):
        found = []
        for made, stream in zip(layers, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(fused(made))
        torch.cuda.synchronize()
        for mine, told in zip(found, right, strict=True):
            same_bits(mine, told)


# --- compilers and graphs ---------------------------------------------------------------------------------------------


@inductor
def test_inductor_compiles_one_graph_for_every_length() -> None:
    torch._dynamo.reset()
    form = draw(LISTING, SHAPE).form

    def run(z: Tensor, *weights: Tensor | None) -> Tensor:
        return kernels.attend(z, Weights(*weights), form) * 2  # something of the compiler's own beside ours

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    with use_kernels("fused"):
        for n, stance in ((197, "default"), (250, "fail_on_recompile")):  # which are cut in the same way
            mine = draw(LISTING, (3, n, 96, 2))
            with torch.compiler.set_stance(stance):
                found = differentiate(lambda z, weights, form, grid: compiled(z, *weights), mine)
            near(found, differentiate(lambda z, weights, form, grid: run(z, *weights), mine), bar=1e-5)


@inductor
def test_reduce_overhead_with_new_inputs() -> None:
    """CUDA graphs by the compiler, forward and backward: every replay computes from what it is given."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    form = draw(LISTING, SHAPE).form

    def run(z: Tensor, *weights: Tensor | None) -> Tensor:
        return kernels.attend(z, Weights(*weights), form) * 2

    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    with use_kernels("fused"):
        for seed in range(6):
            torch.manual_seed(seed)
            mine = draw(LISTING, SHAPE)
            right = differentiate(lambda z, weights, form, grid: run(z, *weights), mine)
            torch.compiler.cudagraph_mark_step_begin()
            found = differentiate(lambda z, weights, form, grid: compiled(z, *weights), mine)
            near({name: value.clone() for name, value in found.items()}, right, bar=1e-5)
    assert not counters["inductor"]["cudagraph_skips"]


@inductor
def test_a_compiled_block() -> None:
    """With torch's own compiler, as far as the feed-forward is its work."""
    torch._dynamo.reset()
    block = block_of(96, 2)
    z, grad = torch.randn(3, 196, 96, device=DEVICE), torch.randn(3, 196, 96, device=DEVICE)
    results = []
    for each in (block, torch.compile(block, fullgraph=True)):
        moving = z.clone().requires_grad_()
        with use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16):
            out = each(moving, grid=(14, 14))
        results.append((out.detach(), *torch.autograd.grad(out, (moving, *block.parameters()), grad)))
    assert all(relative(x, y) < 2e-2 for x, y in zip(*results, strict=True))


def record(call: Callable[[], Any], warm: bool = True) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the call, and the tensors that a replay writes."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3 if warm else 0):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global" if warm else "relaxed"):  # cold, a kernel may still be loaded
        results = call()
    return graph, results


@pytest.mark.parametrize("case", [LISTING, ("dmsa", {"rotary": "2d"}), TSSA], ids=label)
def test_a_cuda_graph_with_new_inputs(case: tuple) -> None:
    made = draw(case, SHAPE)
    graph, results = record(functools.partial(fused, made))
    for seed in range(1, 4):
        torch.manual_seed(seed)
        new = draw(case, SHAPE)
        made.z.copy_(new.z)
        made.grad.copy_(new.grad)
        right = fused(made)
        graph.replay()
        torch.cuda.synchronize()
        near(results, right, bar=5e-6)


@pytest.mark.parametrize("shape", [SHORT, (256, 197, 384, 8), (4, 768, 384, 8)], ids=str)
def test_a_cuda_graph_of_working_sizes(shape: tuple) -> None:
    made = draw(LISTING, shape, BF16)
    graph, results = record(functools.partial(fused, stored(made, BF16), BF16))
    graph.replay()
    torch.cuda.synchronize()
    check(results, made, BF16)


@pytest.mark.parametrize("n", [283, 5077])  # lengths of which no other test leaves rotary tables behind
def test_the_first_call_of_a_shape_inside_a_capture(n: int) -> None:
    """What is recorded has no values before it is replayed: an eager call afterwards must not find it in a cache."""
    fused(draw(LISTING, (1, 197, 96, 2)))  # the kernels are loaded; nothing of the other length is known
    made = draw(LISTING, (1, n, 96, 2))
    graph, results = record(functools.partial(fused, made), warm=False)
    check(fused(made), made)  # before the graph has ever run
    torch.manual_seed(1)
    new = draw(LISTING, (1, n, 96, 2))
    made.z.copy_(new.z)
    made.grad.copy_(new.grad)
    graph.replay()
    torch.cuda.synchronize()
    near(results, fused(made), bar=5e-6)
    check(results, made)


# --- training ---------------------------------------------------------------------------------------------------------


def test_ddp_of_one(tmp_path: Path) -> None:
    """One device, so one rank: the hooks and buckets are those of many."""
    torch.manual_seed(0)
    net, z = Net().to(DEVICE), torch.randn(4, 65, 24, device=DEVICE)
    with use_kernels("fused"):
        net(z).square().mean().backward()
    whole = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    backend = "nccl" if torch.distributed.is_nccl_available() else "gloo"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about what it would do on another machine
        torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            mine = nn.parallel.DistributedDataParallel(net)
            with use_kernels("fused"):
                mine(z).square().mean().backward()
            torch.cuda.synchronize()
            del mine
        finally:
            gc.collect()
            torch.distributed.destroy_process_group()
    for name, p in net.named_parameters():
        assert relative(p.grad, whole[name]) < 1e-6, name


def test_a_network_trains_alike() -> None:
    """Ten steps of two layers under autocast: the losses of fused and plain kernels stay together."""
    losses: dict[str, list[float]] = {}
    for name in ("reference", "fused"):
        torch.manual_seed(0)
        net, z, goal = Net().to(DEVICE), torch.randn(8, 65, 24, device=DEVICE), torch.randn(8, 65, 24, device=DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses[name] = []
        with use_kernels(name):
            for _ in range(10):
                with torch.autocast(DEVICE, dtype=BF16):
                    loss = (net(z).float() - goal).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[name].append(loss.item())
    assert losses["fused"][-1] < losses["fused"][0]
    assert losses["fused"] == pytest.approx(losses["reference"], rel=1e-2)


# --- last, since a bad address would end the process's use of the device ----------------------------------------------


def long(case: tuple, shape: tuple) -> Layer:
    """Stored in bfloat16, the tokens drawn on the device."""
    b, n, d, k = shape
    made = stored(draw(case, (1, 1, d, k), BF16), BF16)
    generator = torch.Generator(DEVICE).manual_seed(0)
    z, grad = (torch.randn(b, n, d, device=DEVICE, dtype=BF16, generator=generator) for _ in range(2))
    return made._replace(z=z, grad=grad, grid=(1, n))


def test_more_tokens_than_a_grid_has_rows() -> None:
    """CUDA counts to 65,535 along the second axis."""
    made = long(TSSA, (1, 600_000, 384, 8))
    with torch.no_grad(), use_kernels("fused"):
        out = kernels.attend(made.z, made.weights, made.form)
        usual = reference.attend(made.z, made.weights, made.form, dtype=BF16)
    for end in (slice(0, 4096), slice(-4096, None)):
        assert relative(out[:, end], usual[:, end]) < 2 * BARS[BF16][0]


def test_more_elements_than_32_bits_count() -> None:
    """Every sample as if it were alone, where the address of the last no longer fits; the weights' gradients are sums."""
    b, n = 2, 1_600_000  # 3.3e9 elements: an address that is counted in 32 bits goes wrong
    made = long(LISTING, (b, n, 1024, 8))
    ends = [slice(0, 4096), slice(n // 2, n // 2 + 4096), slice(n - 4096, n)]

    def run(first: int, last: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        results = fused(made._replace(z=made.z[first:last], grad=made.grad[first:last]), BF16)
        samples = [results.pop(name) for name in ("output", "z")]
        return [x[-1, end].clone() for x in samples for end in ends], results

    found, whole = run(0, b)
    alone, total = run(b - 1, b)
    for mine, right in zip(found, alone, strict=True):
        assert right.isfinite().all()
        assert relative(mine, right) < BARS[BF16][0]
    for sample in range(b - 1):
        _, part = run(sample, sample + 1)
        total = {name: total[name].float() + value.float() for name, value in part.items()}
    for name, value in whole.items():
        assert relative(value, total[name]) < 5e-2, name  # rounded to bfloat16, one by one; a lost sample would be 0.7
