"""The fused layer without its silent heads on a GPU: the bars of the dense one, graphs, repeats, and the choice by time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmst.kernels import Form, plan, skipping
from dmst.operators import DMSA

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels.fused import active_hopper, calls, few, layer, skip
from tests.cases import relative
from tests.standins import Few
from tests.test_fused import BF16, F16, F32, Layer, check, guarded
from tests.test_fused_active import (
    MODES,
    _no_fallback,
    _Spoiled,
    attend,
    capped,
    check_active,
    gates,
    mixed,
    route,
    tiles_alone,
    whole_alone,
)

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


@pytest.mark.parametrize("shape", [(3, 1_600_000, 512, 8), (3, 1_900_000, 384, 8)], ids=str)  # in Triton, and by the engine
def test_more_elements_than_32_bits_count(shape: tuple) -> None:
    """The last sample as if it were alone, where its address no longer fits."""
    made = stored(there((1, 1, *shape[2:]), 2, BF16), BF16)
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


# --- samples of few heads ---------------------------------------------------------------------------------------------

TOKENS = (65, 100, 128, 129, 197, 256)
WIDTHS = [(384, 24), (384, 12), (384, 8), (384, 6), (768, 8), (256, 2), (1024, 8), (64, 4), (64, 1), (128, 4)]  # d, k
BAR = {BF16: 6e-3, F16: 8e-4}  # a bit more than half a bit of the update and of the output


def on_few(n: int, d: int, p: int, dtype: torch.dtype) -> None:
    if not few.serves(torch.device("cuda", torch.cuda.current_device()), dtype, n, d, p):
        pytest.skip(f"{torch.cuda.get_device_name()} is no Hopper GPU, or this Triton's Gluon is not one that was read")


def listed(gate: Tensor) -> Tensor:
    """The active heads (b, 1 + k) of a gate, behind their number; the rest is no head."""
    on = gate != 0
    order = torch.argsort((~on).int(), dim=1, stable=True).int()
    count = on.sum(1, keepdim=True)
    place = torch.arange(gate.shape[1], device=gate.device)
    return torch.cat((count.int(), torch.where(place < count, order, 10**9)), 1).int()


def by_hand(shape: tuple, dtype: torch.dtype, mode: str = "listing", *, bias: bool = True, delta: float = 1e-8) -> list[Any]:
    """What `few.attend` is given, of samples with 0, 1, ... k heads on, and an output in the midst of NaN."""
    b, n, d, k = shape
    made = torch.Generator("cuda").manual_seed(n + d + k)

    def drawn(*size: int, like: torch.dtype = F32, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*size, device="cuda", generator=made)).to(like)

    order = torch.rand(b, k, device="cuda", generator=made).argsort(1).argsort(1)
    on = order < (torch.arange(b, device="cuda") % (k + 1))[:, None]
    gate = torch.where(on, 0.2 + drawn(b, k).abs(), 0.0)
    weights = [drawn(d, d, like=dtype, scale=d**-0.5) for _ in range(2)]
    biases = [drawn(d, like=dtype) for _ in range(2)] if bias else [None, None]
    memory = torch.full((b + 2, n, d), torch.nan, device="cuda", dtype=dtype)
    theta = torch.tensor(0.7, device="cuda") if mode == "proximal" else None
    form = Form(k, mode=mode, delta=delta)
    z, membership = drawn(b, n, d, like=dtype), drawn(b, n, k).sigmoid()
    return [z, membership, gate, listed(gate), theta, *weights, *biases, memory[1:-1], form, memory]


def check_few(given: list[Any], dtype: torch.dtype) -> None:
    *args, memory = given
    z, gate, out = args[0], args[2], args[9]
    few.attend(*args)
    right = torch.full_like(out, torch.nan)
    Few.attend(*args[:9], right, args[10])
    mine = (gate != 0).sum(1) * (z.shape[2] // gate.shape[1]) <= plan.FEW
    assert mine.any()
    assert memory[[0, -1]].isnan().all()  # neither its neighbours
    assert out[~mine].isnan().all()  # nor samples of many heads
    assert out[mine].isfinite().all()
    for found, wanted in zip(out[mine], right[mine], strict=True):
        if wanted.any():
            assert relative(found, wanted) < BAR[dtype]
        else:
            assert not found.any()


@whole_alone
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("d", "k"), WIDTHS, ids=str)
def test_few_heads_alone(d: int, k: int, dtype: torch.dtype) -> None:
    """The kernel by itself, against plain torch: heads of 16 to 128 channels, one sample a program."""
    on_few(197, d, d // k, dtype)
    for n in TOKENS:
        check_few(by_hand((2 * k + 3, n, d, k), dtype), dtype)


@whole_alone
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("delta", [0.0, 1e-8, 0.5])
@pytest.mark.parametrize("mode", MODES)
def test_few_heads_of_every_mode(mode: str, delta: float, bias: bool) -> None:
    on_few(197, 384, 48, BF16)
    for shape in ((11, 197, 384, 8), (11, 128, 384, 8), (9, 77, 192, 12)):
        check_few(by_hand(shape, BF16, mode, bias=bias, delta=delta), BF16)


@whole_alone
@pytest.mark.parametrize("shape", [(700, 197, 384, 8), (900, 100, 64, 4), (601, 256, 128, 2), (400, 130, 320, 20)], ids=str)
def test_few_heads_many_samples_a_program(shape: tuple) -> None:
    """Rings and parities go on from one sample to the next, over those that are left to others; a hundred times the same."""
    on_few(shape[1], shape[2], shape[2] // shape[3], BF16)
    given = by_hand(shape, BF16)
    check_few(given, BF16)
    *args, memory = given
    first = memory.clone()
    for _ in range(100):
        memory.fill_(torch.nan)
        few.attend(*args)
        assert torch.equal(first.nan_to_num(12345.0), memory.nan_to_num(12345.0))


@whole_alone
def test_few_heads_read_nothing_of_silent_ones() -> None:
    """Their rows of both weights and their biases are NaN."""
    on_few(197, 384, 48, BF16)
    given = by_hand((300, 197, 384, 8), BF16)
    gate = torch.zeros_like(given[2])
    gate[:, [2, 7]] = 0.4
    gate[::3, 2] = 0.0
    given[2], given[3] = gate, listed(gate)
    silent = [c for c in range(384) if c // 48 not in (2, 7)]
    for place in (5, 6, 7):
        given[place][silent] = torch.nan
    check_few(given, BF16)


@whole_alone
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_few_and_many_heads_in_one_batch(mode: str, dtype: torch.dtype) -> None:
    """The layer, against float64: some samples of few heads, some of many."""
    for n, d, k in ((197, 384, 8), (100, 192, 12), (256, 256, 4), (129, 512, 32)):
        on_few(n, d, d // k, dtype)
        size = 16 if d // k >= 48 else 4
        made = mixed((40, n, d, k), dtype, size, mode=mode, bias=mode != "equation").map(lambda x: x.cuda())
        wide = (gates(made) != 0).sum(-1) * (d // k) > plan.FEW
        assert wide.sum() < 40 and (wide.any() or n == 100)
        check({"output": attend(made, dtype)}, made, dtype, some=True)
        check({"output": attend(stored(made, dtype), dtype)}, made, dtype, some=True)


@whole_alone
def test_few_heads_and_buffers_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    on_few(197, 384, 48, BF16)
    made = stored(mixed((64, 197, 384, 8), BF16, 16).map(lambda x: x.cuda()), BF16)
    right = attend(made, BF16)
    for module in (layer, calls, skip):
        monkeypatch.setattr(module, "torch", _Spoiled([]))
    found = attend(made.map(guarded), BF16)
    assert found.isfinite().all()
    assert torch.equal(found, right)


@whole_alone
def test_few_heads_keep_a_nan_to_its_sample() -> None:
    """A NaN among the tokens, or the gate, of one head."""
    on_few(197, 384, 48, BF16)
    given = by_hand((300, 197, 384, 8), BF16)
    *args, memory = given
    few.attend(*args)
    clean = args[9].clone()
    token, gate = 10, 11  # samples of one and of two heads
    args[0][token, 3, 5] = torch.nan
    args[2][gate] = torch.where(args[2][gate] != 0, torch.nan, 0.0)
    memory.fill_(torch.nan)
    few.attend(*args)
    others = [i for i in range(300) if i not in (token, gate)]
    assert torch.equal(args[9][others].nan_to_num(12345.0), clean[others].nan_to_num(12345.0))
    assert args[9][[token, gate]].isnan().all()


# --- the products of long samples -------------------------------------------------------------------------------------

LENGTHS = (1, 64, 257, 640, 1025)
DIVIDED = [(384, 24), (384, 8), (384, 6), (384, 4), (384, 2), (320, 5), (256, 4), (256, 2), (192, 4), (64, 4), (64, 1)]  # d, k


def on_engine(d: int, p: int, dtype: torch.dtype) -> None:
    if not active_hopper.serves(torch.device("cuda", torch.cuda.current_device()), dtype, d, p):
        pytest.skip(f"{torch.cuda.get_device_name()} is no Hopper GPU, or this Triton's Gluon is not one that was read")


def through(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.float() @ weight.float().mT
    return out if bias is None else out + bias.float()


def folded_of(active: Tensor, d: int, dtype: torch.dtype) -> Tensor:
    """An output weight a sample: as many columns as its heads have, zeros up to a multiple of 64, NaN."""
    p, (b, _) = d // (active.shape[1] - 1), active.shape
    folded = torch.randn(b, d, d, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * d**-0.5
    column, total = torch.arange(d, device="cuda"), active[:, :1] * p
    folded = torch.where((column < total)[:, None], folded, 0.0)
    return torch.where((column < (total + 63) // 64 * 64)[:, None], folded, torch.nan).to(dtype)


def check_products(given: list[Any], dtype: torch.dtype, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Both products against plain torch, sample by sample; every buffer starts as NaN, and silent columns stay so."""
    z, membership, gate, active, _, weight, _, bias_in, bias_out, *_ = given
    (b, _, d), k = z.shape, gate.shape[1]
    p = d // k
    folded = folded_of(active, d, dtype)
    with monkeypatch.context() as spoilt:
        spoilt.setattr(active_hopper, "torch", _Spoiled([]))
        s, energy, mass = active_hopper.project(z, weight, bias_in, membership, active, weighted)
        out = active_hopper.fold_out(s, folded, bias_out, active)
    torch.cuda.synchronize()
    assert out.isfinite().all()
    for i in range(b):
        count = int(active[i, 0])
        total, wide = count * p, (count * p + 63) // 64 * 64
        on = active[i, 1 : 1 + count].long()
        rows = (on[:, None] * p + torch.arange(p, device="cuda")).flatten()
        right = through(z[i], weight[rows], None if bias_in is None else bias_in[rows])
        pi = membership[i, :, on].repeat_interleave(p, 1)
        assert s[i, :, wide:].isnan().all()
        assert energy[i].flatten(1)[:, wide:].isnan().all()
        assert not s[i, :, total:wide].any()
        if count:
            assert relative(s[i, :, :total], right * pi if weighted else right) < BAR[dtype]
            assert relative(energy[i].flatten(1)[:, :total].sum(0), (pi * right.square()).sum(0)) < 1e-5
            assert relative(mass[i, :, :count].sum(0), membership[i, :, on].sum(0)) < 1e-6
        wanted = through(s[i, :, :total], folded[i, :, :total], bias_out)
        assert relative(out[i], wanted) < BAR[dtype] if wanted.any() else not out[i].any()
    return [s, energy, mass, out]


@tiles_alone
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("d", "k"), DIVIDED, ids=str)
def test_products_alone(d: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 16 to 192 channels, each number of them on, samples that end in the midst of a tile."""
    on_engine(d, d // k, dtype)
    for n in LENGTHS:
        check_products(by_hand((k + 2, n, d, k), dtype, bias=n != 640), dtype, dtype == BF16, monkeypatch)


@tiles_alone
@pytest.mark.parametrize(  # runs of 1, 4, 4, 1, 8 and 2 tiles; programs with one unit and with many
    "shape",
    [(300, 257, 384, 8), (64, 1024, 384, 8), (4, 16384, 384, 8), (500, 300, 64, 4), (256, 1024, 64, 4), (300, 2048, 64, 4)],
    ids=str,
)
def test_products_of_many_samples_a_program(shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings and parities go on from one sample to the next, of any number of heads; a hundred times the same."""
    on_engine(shape[2], shape[2] // shape[3], BF16)
    given = by_hand(shape, BF16)
    first = check_products(given, BF16, True, monkeypatch)
    z, membership, _, active, _, weight, _, bias_in, bias_out, *_ = given
    folded = folded_of(active, shape[2], BF16)
    wide = (active[:, 0] * (shape[2] // shape[3]) + 63) // 64 * 64
    real = torch.arange(shape[2], device="cuda") < wide[:, None, None]
    for _ in range(100):
        s, *_ = active_hopper.project(z, weight, bias_in, membership, active, True)
        assert torch.equal(torch.where(real, s, 0.0), torch.where(real, first[0], 0.0))
        assert torch.equal(active_hopper.fold_out(s, folded, bias_out, active), first[3])


@tiles_alone
def test_products_read_nothing_of_silent_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    on_engine(384, 48, BF16)
    given = by_hand((20, 1000, 384, 8), BF16)
    gate = torch.zeros_like(given[2])
    gate[:, [2, 7]] = 0.4
    gate[::3, 2] = 0.0
    given[2], given[3] = gate, listed(gate)
    silent = [c for c in range(384) if c // 48 not in (2, 7)]
    for place in (5, 7):
        given[place][silent] = torch.nan
    given[1][:, :, [0, 1, 3, 4, 5, 6]] = torch.nan
    check_products(given, BF16, True, monkeypatch)


@tiles_alone
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_long_samples_of_any_number_of_heads(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer, against float64, by the engine; buffers of NaN give the same bits."""
    monkeypatch.setattr(plan, "BY_ENGINE", 0)
    for n, d, k in ((800, 384, 8), (1025, 192, 12), (300, 256, 4)):
        on_engine(d, d // k, dtype)
        made = mixed((12, n, d, k), dtype, 16, mode=mode, bias=mode != "equation").map(lambda x: x.cuda())
        right = attend(made, dtype)
        check({"output": right}, made, dtype, some=True)
        low = stored(made, dtype)
        right = attend(low, dtype)
        with monkeypatch.context() as spoilt:
            for module in (layer, calls, skip, active_hopper):
                spoilt.setattr(module, "torch", _Spoiled([]))
            assert torch.equal(attend(low.map(guarded), dtype), right)
