"""The residual step on a GPU: the checks of tests/test_fused_step.py in true bfloat16, at working sizes, graphs, compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dmst import use_kernels
from dmst.kernels import plan, step
from tests.cases import label, relative

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import registered
from tests import test_fused_step as shared
from tests.test_fused import BF16, F32
from tests.test_fused_step import CASES, EQUATION, LISTING, PROXIMAL, Step, bits, check, draw_step, fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run `pytest -m gpu` where there is one"),
]
DEVICE = "cuda"
SHAPE, WORKING = (3, 197, 96, 2), (256, 197, 384, 8)  # b, n, d, k
ODD = [(1, 1, 384, 8), (5, 37, 48, 4), (2, 65, 192, 3), (2, 100, 1000, 8), (2, 70, 1024, 16), (3, 33, 100, 10), (2, 7, 15, 3)]
inductor = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that fell back would be compared with itself."""
    monkeypatch.setattr(plan, "STEPS", True)
    registered._broken.clear()
    yield
    broken = set(registered._broken)
    registered._broken.clear()
    torch._dynamo.reset()
    assert not broken


def there(case: tuple, shape: tuple, dtype: torch.dtype = F32, **options: object) -> Step:
    return draw_step(case, shape, dtype, **options).map(lambda x: x.to(DEVICE))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *shared.OTHERS], ids=label)
def test_parity(case: tuple, dtype: torch.dtype, keep: bool) -> None:
    """bfloat16 under autocast, z in float32."""
    made = there(case, (3, 196, 96, 2), dtype, keep=keep)
    found = fused(made, dtype)
    assert {x.dtype for x in found.values() if x is not None} == {F32}
    check(found, made, dtype)


@pytest.mark.parametrize("busy", [0, plan.BUSY])
@pytest.mark.parametrize("case", [LISTING, EQUATION, PROXIMAL, ("tssa", {})], ids=label)
def test_parity_at_working_size(case: tuple, busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BUSY", busy)
    made = there(case, WORKING, BF16)
    found = fused(made, BF16)
    check(found, made, BF16)
    bits(fused(made, BF16), found)


@pytest.mark.parametrize("shape", ODD, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_odd_sizes(shape: tuple, dtype: torch.dtype) -> None:
    made = there(("dmsa", {"rotary": "none" if shape[2] % 2 else "1d", "membership_bias": True}), shape, dtype)
    check(fused(made, dtype), made, dtype)


@pytest.mark.parametrize("case", [LISTING, EQUATION, PROXIMAL], ids=label)
def test_long_samples(case: tuple) -> None:
    """On Hopper the first product leaves pi s, with the scores of the norm's pass."""
    made = there(case, (3, 896, 384, 8), BF16)
    check(fused(made, BF16), made, BF16)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_poison_repeats_and_nothing_kept(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = there(LISTING, SHAPE, dtype)
    first = fused(made, dtype)
    for _ in range(100):
        bits(fused(made, dtype), first)
    form = shared.replace(made.form, save="nothing")
    bits(fused(made._replace(form=form), dtype), first)
    shared.spoil(monkeypatch)
    bits(fused(made.map(shared.guarded), dtype), first)


def test_scores_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate of the step is that of float64, whatever the compute dtype."""
    made = there(LISTING, (8, 197, 384, 8), BF16)
    seen = []
    original = shared.layer.forward

    def spy(*args: object) -> tuple:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(shared.layer, "forward", spy)
    fused(made, BF16)
    wide = made.map(Tensor.double)
    y = torch.nn.functional.layer_norm(wide.z, (384,), wide.norm_weight, wide.norm_bias, shared.EPS)
    scores = shared.kernels.reference.score(y, wide.weights, wide.form, wide.grid)
    kept = seen[0][1]
    assert relative(kept.gate, shared.kernels.reference.gate_of(scores, wide.form)[1]) < 2e-6
    assert relative(kept.membership.mT, scores.sigmoid()) < 1e-6


def test_a_recorded_graph_is_replayed() -> None:
    made = there(LISTING, SHAPE, BF16)
    z = made.z.clone().requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        with use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16):
            out = step.residual_step(
                z, *made[1:3], shared.EPS, made.weights, made.form, scale=made.scale, keep=made.keep, grid=made.grid
            )
        return out, torch.autograd.grad(out, z, made.grad)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        right = [x.clone() for x in run()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(relative(x.detach(), y.detach()) < 1e-6 for x, y in zip(found, right, strict=True))


@inductor
def test_a_compiled_block() -> None:
    """With torch's own compiler, as far as the feed-forward is its work."""
    block = shared.block_of(dim=96, num_heads=2).to(DEVICE).train()
    z, grad = torch.randn(3, 196, 96, device=DEVICE), torch.randn(3, 196, 96, device=DEVICE)
    compiled = torch.compile(block, fullgraph=True)
    results = []
    for each in (block, compiled):
        moving = z.clone().requires_grad_()
        with use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16):
            out = each(moving, grid=(14, 14))
        results.append((out.detach(), *torch.autograd.grad(out, (moving, *block.parameters()), grad)))
    assert all(relative(x, y) < 2e-2 for x, y in zip(*results, strict=True))
