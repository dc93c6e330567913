"""Passes that are played from their tapes, on a GPU: the bits of the pass itself at working sizes, in graphs, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dmst import use_kernels
from dmst.kernels import plan
from tests.cases import build, label, relative

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import registered
from dmst.kernels.fused import launch, tape, writer
from tests import test_fused, test_fused_step
from tests.test_fused import BF16, F32, draw
from tests.test_fused_step import bits, draw_step
from tests.test_tape import by_itself, played, recorded, thrice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run `pytest -m gpu` where there is one"),
]
DEVICE = "cuda"
CASES = [("dmsa", {}), ("dmsa", {"mode": "proximal"}), ("tssa", {}), ("gated_channel", {}), ("tpsusa", {})]
WORKING = [(256, 197, 384, 8), (16, 1024, 384, 8), (2, 4096, 384, 8), (3, 197, 96, 2)]  # b, n, d, k
inductor = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """A kernel that fell back would be compared with itself."""
    registered._broken.clear()
    tape._forget()
    yield
    broken = set(registered._broken)
    registered._broken.clear()
    tape._forget()
    torch._dynamo.reset()
    assert not broken


def there(made: Any) -> Any:
    return made.map(lambda x: x.to(DEVICE))


def elsewhere(call: Callable[[], Any]) -> Any:
    """On a stream of its own, as graphs are warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("other", [False, True], ids=["default stream", "another stream"])
@pytest.mark.parametrize("shape", WORKING, ids=str)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_bits_of_the_layer(case: tuple, shape: tuple, other: bool) -> None:
    """With bfloat16 tokens and weights, as inference has them, and with float32 ones under autocast."""
    for low in (True, False):
        tape._forget()

        def made(low: bool = low) -> Any:
            drawn = there(draw(case, shape, BF16))
            return drawn.map(lambda x: x.to(BF16)) if low else drawn

        run = lambda: thrice(lambda made: test_fused.fused(made, BF16), made)  # noqa: E731
        elsewhere(run) if other else run()
        replays = recorded()
        assert len(replays) == 2
        assert not any("launch(c" in replay.source for replay in replays)  # none goes Triton's way


@pytest.mark.parametrize("save", ["projected", "nothing"])
@pytest.mark.parametrize("case", CASES[:3], ids=label)
def test_bits_of_the_step(case: tuple, save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "STEPS", True)

    def made() -> Any:
        drawn = there(draw_step(case, (64, 197, 384, 8), BF16))
        return drawn._replace(form=replace(drawn.form, save=save))

    thrice(lambda made: test_fused_step.fused(made, BF16), made)


@pytest.mark.parametrize("shape", WORKING[:2], ids=str)
def test_memory_is_that_of_the_pass(shape: tuple) -> None:
    """Of forward and backward, up to the one allocation that small buffers share."""
    made, peaks = there(draw(("dmsa", {}), shape, BF16)), []

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        test_fused.fused(made, BF16)
        return torch.cuda.max_memory_allocated() - before

    with by_itself():
        peak()
        right = peak()
    peaks = [peak() for _ in range(4)]
    assert len(recorded()) == 2
    assert max(peaks) <= right + 2 * writer.SMALL


def test_the_launcher_only_passes_on() -> None:
    """Else it is called as before, and slower: a Triton whose launcher does something else."""
    made = there(draw(("dmsa", {}), (3, 197, 96, 2), BF16))
    for _ in range(2):
        test_fused.fused(made, BF16)
    held = [x for replay in recorded() for x in replay.__globals__.values()]
    assert not any(type(x).__name__ == "CudaLauncher" for x in held)
    assert launch.recording.by is None


def test_a_recorded_graph_is_replayed() -> None:
    """Played while a graph is recorded: the graph has the bits of the stream it was warmed up on."""
    made = there(draw(("dmsa", {}), (64, 197, 384, 8), BF16)).map(lambda x: x.to(BF16))
    z = made.z.clone().requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        with use_kernels("fused"):
            out = test_fused.kernels.attend(z, made.weights, made.form, grid=made.grid)
        return out.detach(), torch.autograd.grad(out, z, made.grad)[0]

    right = [x.clone() for x in elsewhere(lambda: [run() for _ in range(3)][-1])]
    count = played()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    assert len(count) == 2
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@inductor
def test_a_compiled_layer() -> None:
    operator = build("dmsa", {}, dim=96, heads=2, dtype=F32).to(DEVICE)
    z, grad = torch.randn(3, 197, 96, device=DEVICE), torch.randn(3, 197, 96, device=DEVICE)
    compiled = torch.compile(operator, fullgraph=True)
    for each in (operator, compiled):
        results, count = [], played()
        for _ in range(4):
            moving = z.clone().requires_grad_()
            with use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16):
                out = each(moving)
            results.append((out.detach(), *torch.autograd.grad(out, (moving, *operator.parameters()), grad)))
        assert all(torch.equal(x, y) for more in results[1:] for x, y in zip(results[0], more, strict=True))
        with torch.no_grad(), use_kernels("fused"), torch.autocast(DEVICE, dtype=BF16):
            assert all(relative(each(z), results[0][0]) < 1e-6 for _ in range(4))
        assert len(recorded()) >= 3  # forward with and without gradients, backward
    assert count  # the compiled layer has those of the eager one


def test_a_kind_for_each_stream() -> None:
    """The default one, on which the host is waited for, takes other kernels than the rest."""
    made = there(draw(("dmsa", {}), (64, 197, 384, 8), BF16))
    for _ in range(3):
        usual = test_fused.fused(made, BF16)
        other = elsewhere(lambda: test_fused.fused(made, BF16))
    assert len(recorded()) == 4
    with by_itself():
        bits(usual, test_fused.fused(made, BF16))
        bits(other, elsewhere(lambda: test_fused.fused(made, BF16)))
