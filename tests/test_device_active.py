"""The fused layer without its silent heads on a GPU: the bars of the dense one, graphs, repeats, and the choice by time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dmst.kernels import plan, skipping
from dmst.operators import DMSA

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels.fused import skip
from tests.test_fused import BF16, F16, F32, Layer
from tests.test_fused_active import MODES, _no_fallback, attend, capped, check_active, gates, route

__all__ = ["_no_fallback", "route"]  # fixtures of every test here: a kernel that fell back would be the dense one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run `pytest -m gpu` where there is one"),
]
LONG, SHORT = (64, 1024, 384, 8), (64, 197, 384, 8)


def there(shape: tuple, active: int, dtype: torch.dtype, **options: object) -> Layer:
    return capped(shape, active, dtype, **options).map(lambda x: x.cuda())


def stored(made: Layer, dtype: torch.dtype) -> Layer:
    return made.map(lambda x: x.to(dtype))


@pytest.mark.parametrize("active", [8, 4, 2])
@pytest.mark.parametrize("shape", [LONG, SHORT], ids=str)
def test_parity(shape: tuple, active: int) -> None:
    """With an output weight a sample, and without; under autocast and as stored."""
    made = there(shape, active, BF16)
    assert check_active(made, BF16, active).dtype == BF16
    check_active(stored(made, BF16), BF16, active)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_dtype(mode: str, dtype: torch.dtype) -> None:
    for shape, active in (((3, 197, 96, 2), 1), ((3, 261, 96, 4), 3), ((2, 1000, 384, 8), 2), ((2, 500, 768, 8), 5)):
        made = there(shape, active, dtype, mode=mode, membership_bias=mode == "equation")
        check_active(made, dtype, active)


@pytest.mark.parametrize(
    "case", [((2, 65, 60, 5), 3), ((1, 1, 96, 2), 1), ((2, 300, 64, 64), 9), ((2, 130, 256, 2), 1)], ids=str
)
def test_sizes(case: tuple) -> None:
    """Heads of 12, 48, 1 and 128 channels."""
    shape, active = case
    for dtype in (F32, BF16):
        check_active(there(shape, active, dtype), dtype, active)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [LONG, SHORT], ids=str)
def test_a_hundred_repeats_are_equal_to_the_bit(shape: tuple, mode: str) -> None:
    made = stored(there(shape, 3, BF16, mode=mode), BF16)
    first = attend(made, BF16)
    for _ in range(100):
        assert torch.equal(attend(made, BF16), first)


@pytest.mark.parametrize("shape", [LONG, SHORT], ids=str)
def test_a_cuda_graph_finds_other_heads_at_each_replay(shape: tuple) -> None:
    """The number of active heads is read by the device: one graph for any."""
    made = stored(there(shape, 8, BF16, membership_bias=True), BF16)
    bias = made.weights.assign_bias
    assert bias is not None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            attend(made, BF16)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = attend(made, BF16)
    for seed, silent in enumerate(((), (0, 1, 2), (7,), (0, 2, 3, 4, 5, 6, 7))):
        torch.manual_seed(seed)
        made.z.copy_(torch.randn_like(made.z))
        bias.zero_()[list(silent)] = -5.0
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert (gates(made) == 0).sum(-1).eq(len(silent)).all()
        with torch.cuda.stream(side):  # the kernels of a stream of its own, as in the graph
            right = attend(made, BF16)
        torch.cuda.synchronize()
        assert torch.equal(out, right)
        assert torch.isfinite(out).all()


def test_a_nan_stays_in_its_sample() -> None:
    for shape in (LONG, SHORT):
        made = stored(there(shape, 2, BF16), BF16)
        clean = attend(made, BF16)
        z = made.z.clone()
        z[1, 4, 5] = torch.nan
        dirty = attend(made._replace(z=z), BF16)
        others = torch.arange(shape[0]) != 1
        assert torch.equal(dirty[others], clean[others])
        assert dirty[1].isnan().all()


def test_more_elements_than_32_bits_count() -> None:
    """The last sample as if it were alone, where its address no longer fits."""
    shape = (3, 1_600_000, 512, 8)
    made = stored(there((1, 1, 512, 8), 2, BF16), BF16)
    z = torch.randn(*shape[:3], device="cuda", dtype=BF16, generator=torch.Generator("cuda").manual_seed(0))
    made = made._replace(z=z, grid=(1, shape[1]))
    assert z.numel() > 2**31
    out, alone = attend(made, BF16)[-1], attend(made._replace(z=z[-1:]), BF16)[0]
    assert torch.isfinite(alone).all()
    assert (out.float() - alone.float()).norm() <= 1e-3 * alone.float().norm()


def test_the_choice_by_time() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.open, self.closed = DMSA(384, 8), DMSA(384, 8, max_active_heads=1)

        def forward(self, z: Tensor) -> Tensor:
            z = z + self.open(z)
            return z + self.closed(z)

    net, z = Net().cuda(), torch.randn(16, 1024, 384, device="cuda")
    with torch.autocast("cuda", dtype=BF16):
        table = skipping.choose_silent(net, z)
        assert [row.layer for row in table] == ["open", "closed"]
        assert all(row.dense > 0 and row.skipping > 0 for row in table)
        assert [net.open.skip_silent, net.closed.skip_silent] == [row.chosen for row in table]
        assert table[1].silent == 7 / 8
        print(table)
        with torch.no_grad():
            net.closed.skip_silent = True
            mine = net(z)
            net.closed.skip_silent = False
            assert (mine - net(z)).norm() <= 1e-2 * mine.norm()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("d", "k"), [(96, 2), (384, 8), (768, 8), (1024, 8)])
def test_the_plan_has_room_for_every_shape(d: int, k: int, dtype: torch.dtype) -> None:
    """Tiles beyond the shared memory of a device would fall back, with a warning: here an error."""
    for n in (16, 197, 4096):
        assert attend(stored(there((1, n, d, k), 1, dtype), dtype), dtype).shape == (1, n, d)
        assert plan.active(n, d, dtype)
    assert not skip._broken
