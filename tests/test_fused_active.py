"""The fused layer without its silent heads against float64 and the dense one, in Triton's interpreter on the CPU.

Weights of the scores are small, so that the pooled scores lie close together and a cap of a heads leaves just a of them on,
other ones for each sample. `check_active` takes a device, so that tests/test_device_fused.py asks the same of a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dmst import kernels, rotary, use_kernels
from dmst.kernels import Form, Weights, choice, plan, reference
from dmst.operators import DMSA
from tests.cases import label, relative

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels.fused import calls, casts, layer, skip
from tests.standins import Engine, Few
from tests.test_fused import F16, F32, LAST_GRID, Layer, _Counted, _Poisoned, check, draw, guarded, strided

pytestmark = [
    pytest.mark.skipif(
        not choice.interpreted(),
        reason="Triton's interpreter is off: there is a CUDA device (`pytest -m gpu`), or TRITON_INTERPRET is not 1",
    ),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"),
]

MODES = ("listing", "equation", "proximal")
SHAPES = [((3, 5, 48, 3), 1), ((2, 37, 96, 8), 2), ((2, 130, 48, 4), 3), ((2, 37, 48, 8), 8)]  # b, n, d, k; heads on


@pytest.fixture(autouse=True, params=["tiles", "whole samples"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program has some tokens of a sample and some columns, or, as of short samples, everything (short.py)."""
    if request.param == "tiles":
        monkeypatch.setattr(plan, "SHORT", [])
    return request.param


tiles_alone = pytest.mark.parametrize("route", ["tiles"], indirect=True)
whole_alone = pytest.mark.parametrize("route", ["whole samples"], indirect=True)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    skip._broken.clear()
    yield
    broken = set(skip._broken)
    skip._broken.clear()
    assert not broken


def attend(made: Layer, dtype: torch.dtype = F32, *, skip: bool = True) -> Tensor:
    """Without silent heads, under autocast where the dtype is a low one and the layer is stored in float32."""
    low = dtype != F32 and made.z.dtype == F32
    device = made.z.device.type
    with use_kernels("fused"), torch.no_grad(), torch.autocast(device, dtype=dtype if low else F16, enabled=low):
        return kernels.attend(made.z, made.weights, made.form, grid=made.grid, skip=skip)


def capped(shape: tuple, active: int, dtype: torch.dtype = F32, **options: Any) -> Layer:
    made = draw(("dmsa", {"max_active_heads": active, **options}), shape, dtype)
    assert made.weights.assign is not None
    return made._replace(weights=made.weights._replace(assign=made.weights.assign / 8))  # as many bits as before


def mixed(shape: tuple, dtype: torch.dtype = F32, size: int = 4, **options: Any) -> Layer:
    """Samples with any number of heads on, some of them with few: the fewer the larger their scores, the more the longer."""
    made = draw(("dmsa", options), shape, dtype)
    assert made.weights.assign is not None
    assign = made.weights.assign * size  # a power of two: as many bits as before
    return made._replace(weights=made.weights._replace(assign=assign))


def gates(made: Layer) -> Tensor:
    wide = made.map(Tensor.double)
    gate = reference.gate_of(reference.score(wide.z, wide.weights, wide.form, wide.grid), wide.form)[1]
    assert gate is not None
    return gate


def check_active(made: Layer, dtype: torch.dtype, active: int) -> Tensor:
    """Just so many heads are on, and the output is as near to float64 as the dense layer's must be."""
    assert (gates(made) != 0).sum(-1).tolist() == [active] * made.z.shape[0]
    found = attend(made, dtype)
    check({"output": found}, made, dtype, some=True)
    return found


@pytest.mark.parametrize("leaves_out", [False, True])
def test_output_weights_in_blocks_of_rows(leaves_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """W_b of a wide layer: several programs a head, each with more rows than it takes at a time."""
    monkeypatch.setattr(plan, "PROGRAMS", 5 if leaves_out else 20)
    b, k, p, form = 2, 5, 64, Form(5)
    energy, mass, gate = torch.rand(b, 5, k, p), torch.rand(b, 5, k), torch.rand(b, k)
    weight, folded = torch.randn(k * p, k * p), torch.full((b, k * p, k * p), torch.nan)
    (_, _, blocks), shape = calls.folded_cut(b, k, p, 5, True, 20)
    assert (blocks, shape["SPAN"], shape["ROWS"]) == (2, 192, 64)
    assert [calls.folded_cut(1, 3, width, 256, True, 20)[1]["PARTS"] for width in (64, 128)] == [256, 128]  # as registers hold
    if leaves_out:
        active = torch.tensor([[k, *range(k)]] * b, dtype=torch.int32)
        folded = skip.finish(energy, mass, gate, active, None, weight, 7, form, True)
    else:
        calls.finish(energy, mass, gate, weight, folded, 7, form)
    moment = energy.sum(1) / (mass.sum(1) + form.delta)[..., None]
    c = form.sign * gate[..., None] / (1 + gate[..., None].square() * moment)
    torch.testing.assert_close(folded, weight * c.flatten(1)[:, None])


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("shape", "active"), SHAPES, ids=str)
def test_parity(shape: tuple, active: int, mode: str) -> None:
    """Samples of one short tile and of several; an output weight a sample (n = 130 and d = 48) or not."""
    made = capped(shape, active, mode=mode)
    assert plan.folds(*shape[1:3], False) == (shape[1] == 130)
    check_active(made, F32, active)
    if active == 2:
        assert len({tuple(row) for row in (gates(made) != 0).tolist()}) == 2  # each sample its own


@pytest.mark.parametrize("silent", [(), (0,), (3,), (0, 1, 3), (1, 2)], ids=str)
def test_any_set_of_heads(silent: tuple) -> None:
    made = draw(("dmsa", {"membership_bias": True}), (2, 9, 24, 4))
    bias = torch.zeros(4).index_fill_(0, torch.tensor(silent, dtype=torch.int64), -5.0)
    made = made._replace(weights=made.weights._replace(assign_bias=bias))
    assert ((gates(made) == 0).nonzero()[:, 1].view(2, -1) == torch.tensor(silent)).all()
    check({"output": attend(made)}, made, some=True)


@pytest.mark.parametrize(
    "options", [{"bias": False, "mode": "equation"}, {"gate_scale": -0.5}, {"rotary": "2d", "membership_bias": True}], ids=str
)
def test_other_options(options: dict) -> None:
    for n in (10, 50):  # the second with an output weight a sample
        check_active(capped((1, n, 24, 3), 2, **options), F32, 2)


@pytest.mark.parametrize("mode", MODES)
def test_float16(mode: str) -> None:
    """Where pi s would be too small for the dtype, s is kept."""
    for n in (10, 50):
        made = capped((1, n, 24, 3), 2, F16, mode=mode)
        assert check_active(made, F16, 2).dtype == F16


@tiles_alone
@pytest.mark.parametrize("mode", ["listing", "proximal"])
def test_tiles_of_every_size(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads across two blocks of columns, blocks of many heads, odd channels; tiles that end with a sample and that do not."""
    for tile in (plan.Product(16, 16, 16, 4, 2), plan.Product(32, 64, 32, 4, 3)):
        monkeypatch.setattr(plan, "ACTIVE", [(1e9, 1e9, tile, tile)])
        for shape, active in (((1, 33, 60, 5), 3), ((1, 20, 36, 12), 5)):
            check_active(capped(shape, active, mode=mode), F32, active)


def test_layouts_of_tokens_and_weights() -> None:
    made = capped((2, 9, 24, 3), 2, membership_bias=True)
    right = attend(made)
    assert torch.equal(attend(made._replace(z=strided(made.z))), right)
    for mode in ("listing", "proximal"):
        made = capped((1, 9, 24, 3), 2, mode=mode)
        weights = Weights(*(None if w is None else strided(w) for w in made.weights))
        assert relative(attend(made._replace(weights=weights)), attend(made)) < 1e-6


@whole_alone
@pytest.mark.parametrize("mode", ["listing", "proximal"])
def test_whole_samples_by_tiles_of_every_size(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, out, depth in ((16, 16, 16), (64, 32, 32)):
        monkeypatch.setattr(plan, "SHORT", [(64, plan.Short(64, columns, out, depth, 4, 2))])
        for shape, active in (((1, 33, 60, 5), 3), ((1, 20, 36, 12), 5)):
            check_active(capped(shape, active, mode=mode), F32, active)


# --- samples of few heads ---------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Samples with up to 36 columns of active heads, three of 12, go to a kernel in Gluon; what it was given to write to."""
    seen: list[Tensor] = []

    class Watched(Few):
        @staticmethod
        def attend(*args: Any) -> None:
            seen.append(args[9])
            Few.attend(*args)

    monkeypatch.setattr(plan, "FEW", 36)
    monkeypatch.setattr(skip, "few", Watched)
    return seen


@whole_alone
@pytest.mark.parametrize("mode", MODES)
def test_each_sample_is_taken_by_one_of_two_kernels(mode: str, few: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts as NaN, and what one of them has written the other leaves alone."""
    made = mixed((8, 20, 96, 8), mode=mode, bias=mode != "equation")
    count = (gates(made) != 0).sum(-1)
    assert 2 <= (count <= 3).sum() <= 6
    alone, inner = [], skip.launch

    def watch(kernel: Any, cut: Any, *args: Any) -> Any:
        if kernel is skip.short_kernel:
            before = args[10].clone()
            inner(kernel, cut, *args)
            alone.append((before, args[10].clone()))
        else:
            inner(kernel, cut, *args)

    for module in (layer, calls, skip):
        monkeypatch.setattr(module, "torch", _Spoiled([]))
    monkeypatch.setattr(skip, "launch", watch)
    check({"output": attend(made.map(guarded))}, made, some=True)
    ((before, after),) = alone
    assert len(few) == 1
    assert before[count > 3].isnan().all()
    assert not after.isnan().any()
    assert torch.equal(before[count <= 3], after[count <= 3])


@whole_alone
def test_samples_of_few_heads_with_weights_of_any_layout(few: list[Tensor]) -> None:
    for mode in ("listing", "proximal"):  # with an output weight, and without
        made = mixed((3, 9, 96, 8), mode=mode)
        right = attend(made)
        for view in (strided, lambda x: x.mT.contiguous().mT if x.ndim > 1 else x):
            weights = Weights(*(None if w is None else view(w) for w in made.weights))
            assert relative(attend(made._replace(weights=weights)), right) < 1e-6
        low = made.map(lambda x: x.to(F16))
        assert relative(attend(low, F16), attend(made, F16)) < 2e-3  # under autocast, and as stored
    assert len(few) == 10


@whole_alone
def test_few_heads_may_be_none_and_a_nan_is_none_of_them(few: list[Tensor]) -> None:
    made = capped((2, 20, 96, 8), 2, gate_scale=0.0)
    assert torch.equal(attend(made), made.weights.out_bias.expand(2, 20, 96))
    made = mixed((4, 9, 96, 8))
    clean = attend(made)
    z = made.z.clone()
    z[1, 4, 5] = torch.nan
    dirty = attend(made._replace(z=z))
    assert torch.equal(dirty[[0, 2, 3]], clean[[0, 2, 3]])
    assert dirty[1].isnan().all()
    assert len(few) == 3


# --- long samples by the copy engine ----------------------------------------------------------------------------------


@tiles_alone
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [9, 200])
def test_long_samples_by_the_engine(mode: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of any number of heads, with an output weight each and without; every buffer starts as NaN."""
    made = mixed((6, n, 128, 8), size=16, mode=mode, bias=mode != "equation")
    right, calls_of = attend(made), []
    assert len(set((gates(made) != 0).sum(-1).tolist())) > 1

    class Watched(Engine):
        @staticmethod
        def fold_out(*args: Any) -> Tensor:
            calls_of.append("out")
            return Engine.fold_out(*args)

        @staticmethod
        def project(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
            calls_of.append("in")
            return Engine.project(*args)

    monkeypatch.setattr(skip, "active_hopper", Watched)
    monkeypatch.setattr(plan, "BY_ENGINE", 6 * n)
    for module in (layer, calls, skip):
        monkeypatch.setattr(module, "torch", _Spoiled([]))
    found = attend(made.map(guarded))
    assert relative(found, right) < 1e-6
    check({"output": found}, made, some=True)
    assert calls_of == (["in", "out"] if n == 200 and mode != "proximal" else ["in"])  # 128 channels
    before = calls_of.copy()
    monkeypatch.setattr(plan, "BY_ENGINE", 6 * n + 1)
    attend(made)
    assert calls_of == before


# --- memory -----------------------------------------------------------------------------------------------------------


class _Spoiled(_Poisoned):
    """And integers that are no head."""

    def _fill(self, made: Tensor) -> Tensor:
        return super()._fill(made) if made.is_floating_point() else made.fill_(10**9)


@tiles_alone
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [9, 50])
def test_silent_heads_are_neither_written_nor_read(mode: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN: what belongs to silent heads stays so, in every tile, and the output has every bit."""
    made = capped((3, n, 24, 4), 2, mode=mode)
    right, seen, kept = attend(made), [], {}
    for module in (layer, calls, skip):
        monkeypatch.setattr(module, "torch", _Spoiled(seen))
    for name in ("open_gate", "project", "finish"):
        inner = getattr(skip, name)
        monkeypatch.setattr(skip, name, lambda *a, _do=inner, _name=name: kept.setdefault(_name, _do(*a)))
    assert torch.equal(attend(made.map(guarded)), right)
    assert len(seen) > 6
    (gate, active), (s, energy, mass), c = kept["open_gate"], kept["project"], kept["finish"]
    assert torch.equal(active[:, 0], torch.tensor([2, 2, 2], dtype=torch.int32))
    assert torch.equal(active[:, 1:3].long(), (gate != 0).nonzero()[:, 1].view(3, 2))
    for x, size in ((s, 12), (energy.flatten(2), 12), (mass, 2), (c, 12)):
        assert not x[..., :size].isnan().any()
        assert x[..., size:].isnan().all()


@whole_alone
@pytest.mark.parametrize("mode", MODES)
def test_whole_samples_leave_silent_heads_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where a program has a whole sample; silent columns of the update stay NaN, as do silent rows of the weights."""
    made = capped((3, 9, 24, 4), 2, mode=mode)
    right, seen, updates = attend(made), [], []
    for module in (layer, calls, skip):
        monkeypatch.setattr(module, "torch", _Spoiled(seen))
    inner = skip.launch

    def watch(kernel: Any, cut: Any, *args: Any) -> Any:
        if kernel is skip.short_kernel:
            updates.append(args[9])
        return inner(kernel, cut, *args)

    monkeypatch.setattr(skip, "launch", watch)
    assert torch.equal(attend(made.map(guarded)), right)
    assert len(updates) == 1
    assert not updates[0][..., :12].isnan().any()
    assert updates[0][..., 12:].isnan().all()


def test_a_nan_stays_in_its_sample_and_shows() -> None:
    """A NaN gate counts as on."""
    made = capped((3, 9, 24, 4), 2)
    clean = attend(made)
    z = made.z.clone()
    z[1, 4, 5] = torch.nan
    dirty = attend(made._replace(z=z))
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
    assert dirty[1].isnan().all()


def test_no_head_at_all_leaves_the_bias() -> None:
    made = capped((2, 20, 48, 4), 2, gate_scale=0.0)
    assert torch.equal(attend(made), made.weights.out_bias.expand(2, 20, 48))
    assert not attend(capped((2, 20, 48, 4), 2, gate_scale=0.0, mode="equation")).any()


@pytest.mark.parametrize("shape", [(2, 0, 48, 4), (0, 5, 48, 4)], ids=str)
def test_nothing_at_all(shape: tuple) -> None:
    assert attend(capped(shape, 2)).shape == shape[:3]


@pytest.mark.parametrize("mode", ["listing", "proximal"])
def test_bits_repeat_and_samples_are_alone(mode: str) -> None:
    made = capped((2, 9, 24, 3), 2, mode=mode)
    first = attend(made)
    for _ in range(3):
        assert torch.equal(attend(made), first)
    for sample in range(2):
        assert torch.equal(attend(made._replace(z=made.z[sample : sample + 1]))[0], first[sample])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # to ask how it is aligned
@pytest.mark.parametrize("shape", [(1, 3_000_000, 1024, 8), (100_000, 1, 64, 8)], ids=str)
def test_grids_fit_the_device(shape: tuple, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    for module in (calls, skip, casts):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _Counted(name, seen))
    b, n, d, k = shape
    operator = DMSA(d, k)
    with FakeTensorMode() as mode, torch.no_grad():
        weights = Weights(*(None if w is None else mode.from_tensor(w) for w in operator.weights()))
        z = torch.empty(b, n, d, dtype=torch.bfloat16)
        factors = rotary.factors("1d", d, n, None, step=plan.STEP, device=z.device, dtype=F32)
        assert skip.forward(z, weights, operator.form, factors, torch.bfloat16).shape == z.shape
    assert len(seen) >= 5 - (route != "tiles")
    for name, (first, *rest) in seen:
        assert first < 2**31, (name, first)
        assert max(rest, default=1) <= LAST_GRID, (name, rest)


# --- when it serves ---------------------------------------------------------------------------------------------------


@pytest.fixture
def calls_of_skip(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    monkeypatch.setattr(skip, "forward", lambda *a, _do=skip.forward: seen.append(1) or _do(*a))
    return seen


def test_the_flag_of_an_operator(calls_of_skip: list[int]) -> None:
    """Off at the start, in no file, and taken where there is no gradient."""
    operator, z = DMSA(24, 3, max_active_heads=1).eval(), torch.randn(2, 9, 24)
    assert operator.skip_silent is False
    names = set(operator.state_dict())
    with use_kernels("fused"), torch.no_grad():
        dense = operator(z)
        assert not calls_of_skip
        operator.skip_silent = True
        assert relative(operator(z), dense) < 1e-6
        assert len(calls_of_skip) == 1
        assert copy.deepcopy(operator).skip_silent is True
    assert set(operator.state_dict()) == names
    with use_kernels("fused"):
        operator(z).sum().backward()  # with gradients: dense
    assert operator.subspace.weight.grad is not None
    with use_kernels("reference"), torch.no_grad():
        operator(z)
    assert len(calls_of_skip) == 1


@pytest.mark.parametrize(
    "case", [("dmsa", {"gate_activation": "relu"}), ("dmsa", {"membership_activation": "softmax"}), ("tssa", {})], ids=label
)
def test_other_layers_stay_dense(case: tuple, calls_of_skip: list[int]) -> None:
    made = draw(case, (2, 7, 24, 3))
    assert torch.equal(attend(made), attend(made, skip=False))
    assert not calls_of_skip


def test_whoever_looks_sees_the_dense_layer(calls_of_skip: list[int]) -> None:
    operator, z = DMSA(24, 3, max_active_heads=1).eval(), torch.randn(2, 9, 24)
    operator.skip_silent = True
    with use_kernels("fused"), torch.no_grad():
        torch.compile(operator, fullgraph=True, backend="eager")(z)
        with FlopCounterMode(display=False) as counter:
            operator(z)
    assert counter.get_total_flops() == 4 * 2 * 9 * 24 * 24 + 2 * 2 * 9 * 24 * 3
    with torch.no_grad():
        torch.export.export(operator, (z,))
    assert not calls_of_skip


def test_a_kernel_that_does_not_compile_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = capped((2, 9, 24, 3), 1)
    dense = attend(made, skip=False)
    with monkeypatch.context() as patch:
        patch.setattr(skip, "forward", lambda *_: (_ for _ in ()).throw(ValueError("no such layout")))
        with pytest.warns(RuntimeWarning, match=r"silent heads out do not work here .*no such layout.*every head"):
            assert torch.equal(attend(made), dense)
        assert torch.equal(attend(made), dense)
    assert torch.equal(attend(made), dense)  # and from then on
    skip._broken.clear()
    with monkeypatch.context() as patch:
        patch.setattr(skip, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            attend(made)
