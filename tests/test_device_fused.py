"""The fused kernels on a GPU: the checks of tests/test_fused.py, then what only a device has: graphs, streams, huge tensors.

A new combination of compile-time sizes costs compilation, so most tests share the shape (3, 197, 96, 2): two heads of 48.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dmst import kernels, rotary, use_kernels
from dmst.errors import ShapeError
from dmst.kernels import Weights, choice, plan, reference
from dmst.operators import DMSA
from tests.cases import FAMILY, gradients, label, relative
from tests.test_precision import BARS

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import registered
from dmst.kernels.fused import calls, layer
from tests import test_fused as shared
from tests.test_fused import BF16, F16, F32, LOW, Layer, Net, check, differentiate, draw, fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run `pytest -m gpu` where there is one"),
]
DEVICE = "cuda"
SHAPE = (3, 197, 96, 2)  # b, n, d, k
WORKING = (4, 197, 384, 8)
REPEATS = 1000
HUGE = (2, 1_600_000, 1024, 8)  # 3.3e9 elements: an address that is counted in 32 bits goes wrong
LONG = (1, 600_000, 384, 8)
inductor = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """A kernel that fell back would be compared with itself."""
    registered._broken.clear()
    yield
    broken = set(registered._broken)
    registered._broken.clear()
    assert not broken


def there(case: tuple, shape: tuple, dtype: torch.dtype = F32, **options: Any) -> Layer:
    """A layer on the device, its numbers rounded to `dtype` and stored in float32."""
    if "2d" in case[1].values() and shape[1] == 197:
        shape = (shape[0], 196, *shape[2:])  # a grid of 14 x 14
    return draw(case, shape, dtype, **options).map(lambda x: x.to(DEVICE))


def requested() -> int:
    """Bytes that are held, as they were asked for: what torch takes for that may be up to a MiB more, as it happens."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def stored(made: Layer, dtype: torch.dtype) -> Layer:
    return made.map(lambda x: x.to(dtype))


def agree(found: dict[str, Tensor | None], right: dict[str, Tensor | None], bar: float = 0.0) -> None:
    """To the bit, or to a relative error."""
    assert found.keys() == right.keys()
    for name, value in right.items():
        if value is None or found[name] is None:
            assert value is None and found[name] is None, name
        elif bar:
            assert relative(found[name], value) <= bar or (found[name] - value).norm() <= 1e-6, name
        else:
            assert torch.equal(found[name], value), name


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILY, ids=label)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_parity_of_every_form(case: tuple, dtype: torch.dtype) -> None:
    """bfloat16 under autocast, float16 as stored."""
    made = there(case, SHAPE, dtype)
    found = fused(stored(made, dtype) if dtype == F16 else made, dtype)
    assert found["output"].dtype == dtype
    assert found["z"].dtype == (F16 if dtype == F16 else F32)
    check(found, made, dtype)


@pytest.mark.parametrize("n", [64, 197, 1000])
@pytest.mark.parametrize("case", LOW[:3], ids=label)
def test_parity_at_working_sizes(case: tuple, n: int) -> None:
    """Width 384, eight heads: bfloat16 as stored, and float32; few samples and more than are folded."""
    made = there(case, (2, n, 384, 8), BF16)
    check(fused(stored(made, BF16), BF16), made, BF16)
    if n == 197:
        for b in (2, 6):
            made = there(case, (b, n, 384, 8))
            check(fused(made), made)


@pytest.mark.parametrize("case", [*LOW[:3], ("dmsa", {"rotary": "2d"}), ("tssa", {"position_scores": "1d"})], ids=label)
@pytest.mark.parametrize("busy", [0, plan.BUSY])
def test_parity_of_large_batches(case: tuple, busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores by position (64 samples of bfloat16) where the host has time, and samples that are not split over programs."""
    monkeypatch.setattr(plan, "BUSY", busy)
    monkeypatch.setattr(plan, "BY_HAND", 0)
    for shape in ((64, 197, 384, 8), (300, 40, 96, 2)):
        made = there(case, shape, BF16)
        mine = stored(made, BF16)
        found = fused(mine, BF16)
        check(found, made, BF16)
        agree(fused(mine, BF16), found)
    made = there(case, (300, 40, 96, 2))
    check(fused(made), made)
    shared.check_isolation(stored(there(case, (64, 197, 96, 2), BF16), BF16), BF16)


@pytest.mark.parametrize("case", [*LOW[:3], ("dmsa", {"membership_bias": True, "max_active_heads": 2})], ids=label)
@pytest.mark.parametrize("streams", [False, True])
def test_parity_of_long_samples(case: tuple, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper pi s is kept, with an output weight a sample; elsewhere, and in the proximal form, s as at other lengths.
    Both kernels of the adjoint's second sweep.
    """
    if not streams:
        monkeypatch.setattr(calls.stream, "serves", lambda *_: False)
    for shape in ((2, 768, 384, 8), (70, 128, 64, 4), (9, 768, 384, 8), (64, 768, 384, 8), (1, 8192, 384, 8)):
        made = there(case, shape, BF16)
        mine = stored(made, BF16)
        found = fused(mine, BF16)
        check(found, made, BF16)
        agree(fused(mine, BF16), found)
        if torch.cuda.get_device_capability() == (9, 0):
            assert layer._keeps_weighted(mine.z, mine.form, BF16) == (mine.form.mode != "proximal")
    shared.check_weights(there(case, (2, 128, 64, 4), BF16), BF16)
    made = there(case, (3, 896, 384, 8), BF16)  # tokens in float32, under autocast
    check(fused(made, BF16), made, BF16)
    shared.check_isolation(stored(there(case, (4, 256, 128, 8), BF16), BF16), BF16)


def test_gates_of_large_batches_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BUSY", 0)
    shared.check_scores(BF16, (64, 197, 384, 8), DEVICE, monkeypatch)


@pytest.mark.parametrize("case", [LOW[0], LOW[3]], ids=label)
def test_parity_where_gates_close(case: tuple) -> None:
    made = there(case, SHAPE, excited=True)
    check(fused(made), made, like_plain=True)


SIZES = [
    (1, 1, 2, 48),
    (1, 2, 2, 48),
    (2, 65, 1, 64),
    (1, 65, 64, 6),
    (1, 65, 2, 128),
    (2, 16, 3, 5),
    (2, 9, 4, 1),
]  # b, n, k, p


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple) -> None:
    """Numbers that are 1 or divisible by 16 are compiled in: one token, one head, one channel a head."""
    b, n, k, p = size
    case = ("dmsa", {"membership_bias": True, "rotary": "1d" if k * p % 2 == 0 else "none"})
    made = there(case, (b, n, k * p, k), excited=True)
    check(fused(made), made, like_plain=True)
    if k in (1, 64):  # TSSA's softmax over all heads at once
        made = there(("tssa", {}), (b, n, k * p, k), F16, excited=True)
        check(fused(made, F16), made, F16, like_plain=True)


@pytest.mark.parametrize("shape", [(2, 0, 96, 2), (0, 197, 96, 2)], ids=str)
def test_nothing_at_all(shape: tuple) -> None:
    for case in (LOW[0], LOW[3]):
        made = there(case, shape)
        check(fused(made), made)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_scores_gate_and_membership_are_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 allowed, which is for products and not for scores."""
    before = torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch renames this switch now and then, and says so
        torch.backends.cuda.matmul.allow_tf32 = True
    try:
        shared.check_scores(dtype, SHAPE, DEVICE, monkeypatch)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.set_float32_matmul_precision(before)


def test_auto_is_what_the_table_says() -> None:
    form = draw(LOW[0], SHAPE).form
    for dtype, allowed in choice.AUTO.items():
        assert choice.verdict(torch.device("cuda", 0), dtype, form, SHAPE[2], "auto").fused is allowed
        assert choice.verdict(torch.device("cuda", 0), dtype, form, SHAPE[2], "fused").fused
    assert not choice.verdict(torch.device("cuda", 0), torch.float64, form, SHAPE[2], "auto").fused


def test_tokens_and_weights_on_two_devices() -> None:
    made = there(LOW[0], SHAPE)
    for z, weights in ((made.z.cpu(), made.weights), (made.z, made.weights._replace(out=made.weights.out.cpu()))):
        with use_kernels("fused"), pytest.raises(ShapeError, match=r"is on (cuda|cpu).* and z on (cuda|cpu)"):
            kernels.attend(z, weights, made.form)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_layouts() -> None:
    made = there(LOW[0], SHAPE)
    shared.check_layouts(made, F32)
    shared.check_layouts(made, BF16)
    shared.check_expanded(there(LOW[0], SHAPE, excited=True), F32)
    shared.check_expanded(there(LOW[0], SHAPE, BF16, excited=True), BF16)


@pytest.mark.parametrize("case", [("dmsa", {"membership_bias": True, "gate_scale": 3.0}), LOW[2], LOW[3]], ids=label)
def test_weights_callers_and_what_is_wanted(case: tuple) -> None:
    """Strided weights, nothing of the caller's written, frozen weights."""
    made = there(case, SHAPE, F16)
    shared.check_weights(made, F32)
    shared.check_weights(made, F16)
    shared.check_nothing_written(made.map(torch.clone))
    shared.check_wanted(made)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(64, 197, 384, 8), (2, 768, 384, 8), (16, 300, 384, 8)], ids=str)
def test_what_is_wanted_decides_no_bit_of_the_rest(shape: tuple, dtype: torch.dtype) -> None:
    """By the kernels of short, long and other samples, which have variants for what is wanted."""
    made = there(("dmsa", {"membership_bias": True, "gate_scale": 3.0}), shape, dtype)
    shared.check_wanted(stored(made, dtype))


@pytest.mark.parametrize("case", [LOW[0], LOW[2], LOW[3], ("dmsa", {"rotary": "2d"})], ids=label)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_poison_and_isolation(case: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = there(case, SHAPE, dtype)
    shared.check_poison(made, dtype, monkeypatch)
    shared.check_isolation(made, dtype)


def test_autocast() -> None:
    """The backward pass inside autocast or outside gives the same bits; low tokens are fine too."""
    made = there(LOW[0], SHAPE, BF16)
    right = fused(made, BF16)
    moving = made.z.clone().requires_grad_()
    with use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16):
        out = kernels.attend(moving, made.weights, made.form)
        low = kernels.attend(made.z.to(BF16), made.weights, made.form)
    out.backward(made.grad.to(BF16))
    assert torch.equal(moving.grad, right["z"])
    assert relative(low, right["output"]) < BARS[BF16][0]


def test_the_layer_keeps_two_tensors() -> None:
    """The tokens, which were there already, and the projected ones."""
    made = stored(there(LOW[0], (32, 197, 384, 8), BF16), BF16)
    z = made.z.requires_grad_()
    with use_kernels("fused"):
        kernels.attend(z, made.weights, made.form)
        torch.cuda.synchronize()
        before = requested()
        out = kernels.attend(z, made.weights, made.form)
    assert out.grad_fn is not None
    assert requested() - before <= 2.2 * z.numel() * z.element_size()


@pytest.mark.parametrize("shape", [WORKING, (64, 197, 384, 8), (6, 1000, 96, 2), (4, 768, 384, 8)], ids=str)  # by each route
@pytest.mark.parametrize("case", [LOW[0], LOW[2], LOW[3]], ids=label)
def test_a_layer_that_saves_nothing(case: tuple, shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, the output alone after the forward pass, and no higher a peak in the backward pass."""
    monkeypatch.setattr(plan, "BUSY", 0)
    made = stored(there(case, shape, BF16), BF16)
    other, size = made._replace(form=replace(made.form, save="nothing")), made.z.numel() * made.z.element_size()
    agree(fused(other, BF16), fused(made, BF16))
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


# --- fuzz and repeats -------------------------------------------------------------------------------------------------

FUZZED = st.fixed_dictionaries(
    {
        "what": st.sampled_from([(LOW[0], F32), (LOW[0], BF16), (LOW[3], BF16), (LOW[2], F32)]),
        "b": st.integers(1, 9),
        "n": st.one_of(st.integers(65, 400), st.integers(65, 3000)),
        "excited": st.booleans(),
        "layouts": st.tuples(*(st.sampled_from([None, "a map (b, c, h, w)", "every second token", "not aligned"]),) * 2),
        "wanted": st.tuples(*(st.booleans() for _ in Weights._fields)),
    }
)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(FUZZED)
def test_any_shape_and_stride(drawn: dict[str, Any]) -> None:
    case, dtype = drawn["what"]
    shared.check_drawn({**drawn, "case": case, "dtype": dtype, "k": SHAPE[3], "p": SHAPE[2] // SHAPE[3]}, DEVICE)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_thousand_repeats_are_equal_to_the_bit(dtype: torch.dtype) -> None:
    made = stored(there(LOW[0], WORKING, dtype), dtype)
    first = fused(made, dtype)
    for _ in range(REPEATS if dtype == F32 else REPEATS // 5):
        agree(fused(made, dtype), first)


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of ours needs an exception, and fresh memory is NaN in this mode."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    torch.use_deterministic_algorithms(True)
    try:
        for case in (LOW[0], LOW[2], LOW[3]):
            made = there(case, SHAPE)
            found = fused(made)
            agree(fused(made), found)
            check(found, made)
    finally:
        torch.use_deterministic_algorithms(False)


# --- compilers and graphs ---------------------------------------------------------------------------------------------


def attend(made: Layer, z: Tensor | None = None) -> Tensor:
    with use_kernels("fused"):
        return kernels.attend(made.z if z is None else z, made.weights, made.form, grid=made.grid)


@inductor
def test_inductor_compiles_one_graph_for_every_length() -> None:
    from torch._dynamo import lookup_backend  # it warns where torch is new

    torch._dynamo.reset()
    graphs: list[set[Any]] = []  # what each one calls; the compiler may empty it later

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append({node.target for node in graph.graph.nodes})
        return lookup_backend("inductor")(graph, inputs)

    made = there(LOW[0], SHAPE)

    def run(z: Tensor, *weights: Tensor | None) -> Tensor:
        return kernels.attend(z, Weights(*weights), made.form) * 2  # something of the compiler's own beside ours

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    counts = []
    with use_kernels("fused"):
        for n in (197, 261):
            mine = there(LOW[0], (3, n, 96, 2))
            results = []
            for call in (compiled, run):
                results.append(differentiate(lambda z, weights, form, grid, call=call: call(z, *weights), mine))
            agree(*results, bar=1e-5)
            counts.append(len(graphs))
    assert counts[0] == counts[1]  # nothing is compiled for the second length
    assert any({torch.ops.dmst.attend, torch.ops.dmst.attend.default} & called for called in graphs)


@inductor
def test_reduce_overhead_with_new_inputs() -> None:
    """CUDA graphs by the compiler, forward and backward: every replay computes from what it is given."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    made = there(LOW[0], SHAPE)

    def run(z: Tensor, *weights: Tensor | None) -> Tensor:
        return kernels.attend(z, Weights(*weights), made.form) * 2

    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    with use_kernels("fused"):
        for seed in range(6):
            torch.manual_seed(seed)
            mine = there(LOW[0], SHAPE)
            right = differentiate(lambda z, weights, form, grid: run(z, *weights), mine)
            torch.compiler.cudagraph_mark_step_begin()
            found = differentiate(lambda z, weights, form, grid: compiled(z, *weights), mine)
            agree({name: value.clone() for name, value in found.items()}, right, bar=1e-5)
    assert not counters["inductor"]["cudagraph_skips"]


def record(made: Layer, warm: bool, dtype: torch.dtype = F32) -> tuple[Any, Callable[[], dict[str, Tensor | None]]]:
    """A CUDA graph of forward and backward on these very tensors, and what reads its results."""
    step = functools.partial(fused, made, dtype)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3 if warm else 0):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global" if warm else "relaxed"):  # cold, a kernel may still be loaded
        results = step()
    return graph, lambda: results


@pytest.mark.parametrize("case", [LOW[0], ("dmsa", {"rotary": "2d"}), LOW[3]], ids=label)
def test_a_cuda_graph_with_new_inputs(case: tuple) -> None:
    made = there(case, SHAPE)
    graph, results = record(made, warm=True)
    for seed in range(1, 4):
        torch.manual_seed(seed)
        new = there(case, SHAPE)
        made.z.copy_(new.z)
        made.grad.copy_(new.grad)
        right = fused(made)
        graph.replay()
        torch.cuda.synchronize()
        agree(results(), right, bar=5e-6)


@pytest.mark.parametrize("shape", [(64, 197, 384, 8), (256, 197, 384, 8), (4, 768, 384, 8)], ids=str)
def test_a_cuda_graph_takes_routes_of_its_own(shape: tuple) -> None:
    """In bfloat16 a graph's kernels are others than those of an eager call; what is warmed up beside it is what it records."""
    made = there(LOW[0], shape, BF16)
    graph, results = record(stored(made, BF16), warm=True, dtype=BF16)
    graph.replay()
    torch.cuda.synchronize()
    check(results(), made, BF16)


@pytest.mark.parametrize(("known", "n"), [(197, 261), (953, 1093)])  # the last needs longer rotary tables than were made
def test_the_first_call_of_a_shape_inside_a_capture(known: int, n: int) -> None:
    """What is recorded has no values before it is replayed: an eager call afterwards must not find it in a cache."""
    rotary._TABLES.clear()
    fused(there(LOW[0], (1, known, 96, 2)))  # the kernels are loaded; nothing of the other length is known
    made = there(LOW[0], (1, n, 96, 2))
    graph, results = record(made, warm=False)
    eager = fused(made)  # before the graph has ever run
    check(eager, made)
    torch.manual_seed(1)
    new = there(LOW[0], (1, n, 96, 2))
    made.z.copy_(new.z)
    made.grad.copy_(new.grad)
    graph.replay()
    torch.cuda.synchronize()
    agree(results(), fused(made), bar=5e-6)
    check(results(), made)


# --- others -----------------------------------------------------------------------------------------------------------


def test_checkpointing_gives_the_same_bits() -> None:
    made = there(LOW[0], SHAPE)
    with use_kernels("fused"):
        again = differentiate(
            lambda z, weights, form, grid: checkpoint(
                lambda z: kernels.attend(z, weights, form, grid=grid), z, use_reentrant=False
            ),
            made,
        )
    agree(again, fused(made))


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


def test_side_streams() -> None:
    """Two streams at once, forward and backward, as on the first one."""
    layers = [there(LOW[0], SHAPE), there(LOW[3], SHAPE)]
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
            agree(mine, told)


def test_a_network_trains_alike() -> None:
    """Ten steps of two layers under autocast: the losses of fused and plain kernels stay together."""
    losses = {}
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


def test_a_module_under_auto_is_fused_and_float64_is_not() -> None:
    """Modules take the path that the table names, and their gradients agree with the reference's."""
    operator = DMSA(96, 2).to(DEVICE)
    z, grad = torch.randn(3, 197, 96, device=DEVICE), torch.randn(3, 197, 96, device=DEVICE)
    chosen = choice.kernel_for(z, operator.weights(), operator.form, F32)
    assert (chosen is choice._fused_attend) is choice.AUTO[F32]
    auto = gradients(operator, z, grad)
    with use_kernels("reference"):
        usual = gradients(operator, z, grad)
    agree(auto, usual, bar=2e-5)
    wide = operator.double()
    usual = reference.attend(z.double(), wide.weights(), wide.form, dtype=torch.float64)
    assert relative(wide(z.double()), usual) < 1e-12


# --- last, since a bad address would end the process's use of the device ------------------------------------------------


def long(case: tuple, shape: tuple) -> Layer:
    """Stored in bfloat16, the tokens drawn on the device."""
    b, n, d, k = shape
    made = stored(there(case, (1, 1, d, k), BF16), BF16)
    generator = torch.Generator(DEVICE).manual_seed(0)
    z, grad = (torch.randn(b, n, d, device=DEVICE, dtype=BF16, generator=generator) for _ in range(2))
    return made._replace(z=z, grad=grad, grid=(1, n))


def test_more_tokens_than_a_grid_has_rows() -> None:
    """CUDA counts to 65,535 along the second axis."""
    made = long(LOW[3], LONG)
    with torch.no_grad():
        out = attend(made)
        usual = reference.attend(made.z, made.weights, made.form, dtype=BF16)
    for end in (slice(0, 4096), slice(-4096, None)):
        assert relative(out[:, end], usual[:, end]) < 2 * BARS[BF16][0]


def test_more_elements_than_32_bits_count() -> None:
    """Every sample as if it were alone, where the address of the last no longer fits; the weights' gradients are sums."""
    made = long(LOW[0], HUGE)
    b, n = HUGE[:2]
    assert made.z.numel() * 3 // 4 > 2**31 or made.z.device.type == "cpu"
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
