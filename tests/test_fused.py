"""The fused kernels against the reference and float64: output and every gradient, in Triton's interpreter on the CPU.

The checks take a device, so that tests/test_device_fused.py runs the same ones on a GPU.

    exact   the reference in float64, of the same rounded numbers
    plain   the reference in the same dtype, by autograd
    found   the fused kernels; a fallback to the plain ones is a warning, and every warning here is an error

Bars: reliability.md 3.7, and rows 14 and 15 of the identities. With weights of nn.Linear's size (`rounded`) they hold. With
weights of size 1, at which gates close and memberships saturate, no float32 arithmetic holds them: there the error may be twice
(forward) or three times (gradient) that of `plain`, or what moving every input by half a bit of float32 does to `exact`. theta,
temperature and the bias of the scores are sums whose terms cancel: their bar is relative to the sizes of the terms.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dmst import kernels, rotary, use_kernels
from dmst.kernels import Form, Weights, choice, plan, reference
from dmst.operators import DMSA, create
from tests.cases import FAMILY, build, excite, gradients, grid_of, label, relative
from tests.quick import quicken  # noqa: F401 (soak/areas/kernels.py has it from here)
from tests.standins import Products, Resident, Stream
from tests.test_precision import BARS, PRECISE, excess, rounded

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import registered
from dmst.kernels.fused import calls, casts, layer
from dmst.kernels.fused.calls import Kept
from dmst.kernels.fused.launch import planned

pytestmark = [
    pytest.mark.skipif(
        not choice.interpreted(),
        reason="Triton's interpreter is off: there is a CUDA device (`pytest -m gpu`), or TRITON_INTERPRET is not 1",
    ),
    # the interpreter is numpy, which warns where a NaN or an infinity is meant
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"),
]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CANCELLING = ("theta", "temperature", "assign_bias")
LOW = [("dmsa", {}), ("dmsa", {"mode": "equation"}), ("dmsa", {"mode": "proximal"})]
LOW += [("tssa", {}), ("tpsusa", {}), ("gated_channel", {})]
SMALL = (2, 7, 24, 3)  # b, n, d, k
LAST_GRID = 65_535


def coarsen(patch: pytest.MonkeyPatch) -> None:
    """A program costs the interpreter as much as a tile: larger ones than planned, which test_pending and test_tape have."""
    patch.setattr(plan, "norm", lambda d: plan.Tile(16, plan._chunk(d), 4))
    patch.setattr(plan, "norm_adjoint", lambda d: plan.Tile(8, plan._chunk(d), 4))
    patch.setattr(plan, "NORM_PROGRAMS", 4)
    sizes = {"ROWS": 64, "COLUMNS": 128}
    patch.setattr(
        calls, "_plan_totals", lambda columns: planned((sum(-(-c // 128) for c in columns),), COUNT=len(columns), **sizes)
    )


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """A kernel that fell back would be compared with itself."""
    registered._broken.clear()
    yield
    broken = set(registered._broken)
    registered._broken.clear()
    assert not broken


# --- a layer, its three computations, and the bars --------------------------------------------------------------------


class Layer(NamedTuple):
    """Tokens, weights and output gradient, stored in float32, in numbers that the dtype they were drawn for can hold."""

    z: Tensor
    weights: Weights
    form: Form
    grad: Tensor
    grid: tuple[int, int]

    def map(self, change: Callable[[Tensor], Tensor]) -> Layer:
        weights = Weights(*(None if w is None else change(w) for w in self.weights))
        return Layer(change(self.z), weights, self.form, change(self.grad), self.grid)


def draw(
    case: tuple, shape: tuple[int, int, int, int], dtype: torch.dtype = F32, *, scale: float = 1.0, excited: bool = False
) -> Layer:
    b, n, d, k = shape
    if excited:
        operator = build(*case, dim=d, heads=k, dtype=F32)
        z, grad = scale * torch.randn(b, n, d), torch.randn(b, n, d)
    else:
        operator, z, grad = rounded(case, dtype, scale, b, n, d, k)
    form = operator.form
    made = Layer(z, operator.weights(), form, grad, grid_of(n))
    return made.map(lambda x: x.detach().to(dtype).float().contiguous())


def differentiate(attend: Callable[..., Tensor], made: Layer, wanted: Weights | None = None) -> dict[str, Tensor | None]:
    """The output, dz and the gradient of each weight there is (or is `wanted`)."""
    z = made.z.detach().requires_grad_()
    asked = {
        name: w.detach().requires_grad_()
        for name, w, ask in zip(Weights._fields, made.weights, wanted or (True,) * len(made.weights), strict=True)
        if w is not None and ask
    }
    out = attend(z, made.weights._replace(**asked), made.form, grid=made.grid)
    found = torch.autograd.grad(out, (z, *asked.values()), made.grad.to(out.dtype), allow_unused=True)
    return {"output": out.detach(), **dict(zip(("z", *asked), found, strict=True))}


def fused(made: Layer, dtype: torch.dtype = F32, **options: Any) -> dict[str, Tensor | None]:
    """By the fused kernels, under autocast where the dtype is a low one and the layer is stored in float32."""
    low = dtype != F32 and made.z.dtype == F32
    with use_kernels("fused"), torch.autocast(made.z.device.type, dtype=dtype if low else F16, enabled=low):
        return differentiate(kernels.attend, made, **options)


def plain(made: Layer, dtype: torch.dtype = F32) -> dict[str, Tensor | None]:
    return differentiate(functools.partial(reference.attend, dtype=dtype), made)


def exact(made: Layer) -> dict[str, Tensor | None]:
    return plain(made.map(Tensor.double), F64)


def nudged(x: Tensor) -> Tensor:
    """Half a bit of float32 up or down, each number by itself."""
    return x * (1 + 2.0**-24 * (2 * torch.randint(0, 2, x.shape, device=x.device) - 1))


def size_of_terms(made: Layer, name: str) -> float:
    """sum |terms| of the sum that a gradient is: over tokens for the bias of the scores, else over the output's elements."""
    wide = made.map(Tensor.double)
    value = getattr(wide.weights, name)
    if name == "assign_bias":
        scores = reference.score(wide.z, wide.weights, wide.form, wide.grid).requires_grad_()
        steps = reference.take_steps(wide.z, scores, wide.weights, wide.form, F64)
        out = reference.project_out(reference.update_of(steps, wide.weights.theta, wide.form), wide.weights, F64)
        return torch.autograd.grad(out, scores, wide.grad)[0].abs().sum((0, 2)).norm().item()

    def by(x: Tensor) -> Tensor:
        return reference.attend(wide.z, wide.weights._replace(**{name: x}), wide.form, grid=wide.grid, dtype=F64)

    sizes = []
    for index in range(value.numel()):
        along = torch.zeros_like(value)
        along.view(-1)[index] = 1e-5
        sizes.append((wide.grad * (by(value + along) - by(value - along)) / 2e-5).abs().sum())
    return torch.stack(sizes).norm().item()


def check(
    found: dict[str, Tensor | None], made: Layer, dtype: torch.dtype = F32, *,
    like_plain: bool = False, scale: float = 1.0, some: bool = False,
) -> None:  # fmt: skip
    """`found` is as near to float64 as its bars ask; with `like_plain` as near as the plain reference, or the bars."""
    told = exact(made)
    if some:  # only those weights were asked for
        told = {name: right for name, right in told.items() if name in found}
    others = (plain(made, dtype), exact(made.map(Tensor.double).map(nudged))) if like_plain else ()
    bars = (1e-4, 5e-4) if dtype == F32 and scale != 1 else BARS[dtype]
    assert found.keys() == told.keys()
    for name, right in told.items():
        mine = found[name]
        if right is None:
            assert mine is None or mine.count_nonzero() == 0, name
            continue
        assert mine is not None, name
        assert mine.shape == right.shape, name
        assert mine.isfinite().all() == right.isfinite().all(), name
        bar, ratio = (bars[0], 2) if name == "output" else (bars[1], 3)
        if name in CANCELLING:
            bar = bar * size_of_terms(made, name) / right.norm().clamp(min=1e-300).item()
        bar = max(bar, *(ratio * excess(other[name], right, dtype) for other in others), 0.0)
        assert excess(mine, right, dtype) <= bar, name


def keep(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Kept]:
    """The result of a call, and what the fused forward pass in it kept: the steps on its way."""
    seen = []
    original = layer.forward

    def spy(*args: Any) -> Any:
        seen.append(original(*args))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", spy)
        result = call()
    ((_, kept),) = seen
    return result, kept


class Net(nn.Module):
    """Two layers with a residual, for tests of whole training steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([excite(DMSA(24, 3)), excite(DMSA(24, 3, mode="equation"))])

    def forward(self, z: Tensor) -> Tensor:
        for inner in self.layers:
            z = z + inner(z)
        return z


def test_the_signatures_are_one() -> None:
    assert inspect.signature(registered.attend) == inspect.signature(reference.attend)


# --- parity: every form, every dtype ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_parity_of_every_form(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN, and behind the end of every input there is nothing but NaN."""
    made = draw(case, SMALL).map(guarded)
    seen = poison(monkeypatch)
    check(fused(made), made)
    assert len(seen) > 3


@pytest.mark.parametrize(
    "case", [case for case in FAMILY if case[1].get("gate_activation") in (None, "gelu", "relu")], ids=label
)
def test_parity_where_gates_close(case: tuple) -> None:
    """Two token tiles, the second one short."""
    made = draw(case, (1, 70, 24, 3), excited=True)
    check(fused(made), made, like_plain=True)


@pytest.mark.parametrize("case", LOW, ids=label)
def test_parity_in_float16(case: tuple) -> None:
    """Heads of 48 channels, which registers pad to 64."""
    made = draw(case, (1, 70, 96, 2), F16)
    found = fused(made, F16)
    assert found["output"].dtype == F16
    assert found["z"].dtype == found["subspace"].dtype == F32
    check(found, made, F16)


@pytest.mark.parametrize("case", LOW, ids=label)
def test_parity_in_bfloat16(case: tuple) -> None:
    made = draw(case, (2, 63, 24, 3), BF16)
    found = fused(made, BF16)
    assert found["output"].dtype == BF16
    check(found, made, BF16)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("case", [LOW[0], LOW[2], LOW[3]], ids=label)
def test_a_layer_stored_in_low_precision(case: tuple, dtype: torch.dtype) -> None:
    """Weights and tokens in the dtype itself, no autocast: the same bars."""
    made = draw(case, (2, 17, 32, 4), dtype)
    found = fused(made.map(lambda x: x.to(dtype)), dtype)
    assert {x.dtype for x in found.values()} == {dtype}
    check(found, made, dtype)


def test_what_the_interpreter_does_to_bfloat16() -> None:
    """Triton 3.7 and 3.8 multiply the bit patterns and cut where they should round. Once this fails, more can be asked here."""
    import triton
    import triton.language as tl

    @triton.jit
    def dot_kernel(x_ptr, y_ptr, product_ptr, low_ptr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        product = tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at))
        tl.store(product_ptr + at, product)
        tl.store(low_ptr + at, tl.load(product_ptr + at).to(low_ptr.dtype.element_ty))

    x, y = torch.randn(16, 16), torch.randn(16, 16)
    for dtype, right in ((F16, True), (BF16, False)):
        product, low = torch.empty(16, 16), torch.empty(16, 16, dtype=dtype)
        dot_kernel[(1,)](x.to(dtype), y.to(dtype), product, low)
        assert (relative(product, x.to(dtype).float() @ y.to(dtype).float()) < 1e-5) is right
        assert torch.equal(low, product.to(dtype)) is right


@pytest.mark.parametrize("case", PRECISE, ids=label)
@pytest.mark.parametrize("scale", [1e-8, 1e2, 1e4])
def test_other_scales(case: tuple, scale: float) -> None:
    for dtype in (F32, F16) if case in LOW[2:5] else (F32,):
        made = draw(case, (1, 17, 48, 3), dtype, scale=scale)
        check(fused(made, dtype), made, dtype, like_plain=True, scale=scale)


# --- sizes ------------------------------------------------------------------------------------------------------------

SIZES = [
    *((1, 9, 2, p) for p in (1, 5, 8, 16, 48, 64, 128)),  # b, n, k, p
    *((1, 9, k, 8) for k in (1, 3, 8)),
    (1, 3, 64, 6),
    *((1, n, 2, 6) for n in (0, 1, 2, 63, 64, 65, 197)),
    *((b, 5, 3, 4) for b in (0, 1, 3, 7)),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple) -> None:
    b, n, k, p = size
    for case in (("dmsa", {"membership_bias": True}), ("tssa", {}))[: 1 + (n < 6)]:
        made = draw(case, (b, n, k * p, k), excited=True)
        check(fused(made), made, like_plain=True)


def test_an_odd_width() -> None:
    made = draw(("dmsa", {"rotary": "none"}), (2, 7, 15, 3), excited=True)
    check(fused(made), made, like_plain=True)


SPLIT = [("dmsa", {"max_active_heads": 2}), LOW[2], ("tssa", {"position_scores": "1d"}), LOW[5]]


@pytest.mark.parametrize(("programs", "folded"), [(1, 4), (10**6, 4), (10**6, 0)])
@pytest.mark.parametrize("case", SPLIT, ids=label)
def test_how_a_sample_is_split(case: tuple, programs: int, folded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program a sample, or as many as there are steps; the output product by sample, or of all."""
    monkeypatch.setattr(plan, "PROGRAMS", programs)
    monkeypatch.setattr(plan, "FOLDED", folded, raising=False)
    sweep = plan.whole(1, 130, 3, 8) or plan.sweep(1, 130, 3, 8)
    assert sweep.splits == 1 if programs == 1 else sweep.splits > 2
    made = draw(case, (1, 130, 24, 3))
    check(fused(made), made)


@pytest.mark.parametrize("programs", [1, 3])
def test_how_the_scores_are_pulled_back(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that run through several tiles of tokens, of two samples."""
    made = draw(("dmsa", {"membership_bias": True}), (2, 130, 24, 3))
    monkeypatch.setattr(plan, "ASSIGN_PROGRAMS", programs)
    check(fused(made), made)


TURNED = [("dmsa", {"membership_bias": True}), ("dmsa", {"rotary": "2d"}), ("tssa", {"position_scores": "1d"}), LOW[4]]


@pytest.mark.parametrize(("case", "programs"), [*((case, 8) for case in TURNED), (TURNED[0], 3)], ids=str)
def test_scores_by_position(case: tuple, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of large bfloat16 batches, whose product the interpreter gets wrong: here in float32. One position a program, and
    several."""
    monkeypatch.setattr(plan, "by_position", lambda b, k, dtype, turned: turned)
    monkeypatch.setattr(plan, "POSITION_PROGRAMS", programs)
    calls._plan_position_assign.cache_clear()
    monkeypatch.setattr(plan, "BUSY", 0)
    made = draw(case, (3, 8, 24, 3)).map(guarded)
    poison(monkeypatch)
    found, kept = keep(functools.partial(fused, made), monkeypatch)
    check(found, made)
    scores = reference.score(*made.map(Tensor.double)[:3], made.grid)
    assert kept.gate is None or relative(kept.gate, reference.gate_of(scores, made.form)[1]) < 1e-6
    excited = draw(case, (3, 8, 24, 3), excited=True)
    check(fused(excited), excited, like_plain=True)
    one = fused(excited, wanted=Weights(*(name == "assign" for name in Weights._fields)))
    check(one, excited, like_plain=True, some=True)


def weigh_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer, calls):
        monkeypatch.setattr(module, "hopper", Products)
    monkeypatch.setattr(plan, "weighted", lambda n, d, dtype: True)
    monkeypatch.setattr(plan, "by_hand", lambda rows: True)
    monkeypatch.setattr(plan, "BUSY", 0)


WEIGHTED = [("dmsa", {"membership_bias": True}), ("dmsa", {"mode": "equation", "rotary": "2d"}), ("dmsa", {"bias": False})]
WEIGHTED += [("dmsa", {"max_active_heads": 2}), LOW[2], LOW[3], LOW[4], LOW[5]]  # the last four keep s itself


@pytest.mark.parametrize(("unfolded", "streams"), [(0, False), (64, False), (64, True)])
@pytest.mark.parametrize("case", WEIGHTED, ids=label)
def test_what_the_first_product_weighs(case: tuple, unfolded: int, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of long samples on Hopper, whose two products are plain torch here: pi s is kept in place of s."""
    weigh_early(monkeypatch)
    monkeypatch.setattr(plan, "UNFOLDED", unfolded)
    if streams:
        monkeypatch.setattr(calls, "stream", Stream)
        monkeypatch.setattr(plan, "PIECE", 11)  # a sample in two
    made = draw(case, (3, 22, 24, 3)).map(guarded)
    poison(monkeypatch)
    found, kept = keep(functools.partial(fused, made), monkeypatch)
    check(found, made)
    wide = made.map(Tensor.double)
    steps = reference.take_steps(wide.z, reference.score(wide.z, wide.weights, wide.form, wide.grid), *wide[1:3], F64)
    s = steps.projected.transpose(1, 2)
    early = made.form.membership == "sigmoid" and made.form.mode != "proximal" and not made.form.uniform_moment
    weight = steps.membership.mT[..., None] if early else 1
    assert relative(kept.projected, (weight * s).flatten(2)) < 1e-6
    excited = draw(case, (3, 22, 24, 3), excited=True)
    check(fused(excited), excited, like_plain=True)


@pytest.mark.parametrize("case", [("dmsa", {"membership_bias": True}), LOW[3]], ids=label)
def test_layouts_of_the_weights_on_their_way_to_hopper(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    weigh_early(monkeypatch)
    check_weights(draw(case, SMALL, F32, excited=True), F32)
    check_wanted(draw(case, SMALL, F32))


def test_a_weighted_token_of_no_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """A membership so small that it is 0: nothing is divided by it."""
    weigh_early(monkeypatch)
    made = draw(("dmsa", {"membership_bias": True}), (2, 22, 24, 3))
    bias = made.weights.assign_bias
    assert bias is not None
    made = made._replace(weights=made.weights._replace(assign_bias=bias - 200))
    found = fused(made)
    assert all(value is None or value.isfinite().all() for value in found.values())
    check(found, made, like_plain=True)


@pytest.mark.parametrize("case", LOW + WEIGHTED[:3] + [("tssa", {"position_scores": "1d"})], ids=label)
def test_samples_that_wait_in_shared_memory(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of many short samples, whose kernels in Gluon are plain torch here."""
    for module in (layer, calls):
        monkeypatch.setattr(module, "resident", Resident)
    monkeypatch.setattr(plan, "PROGRAMS", 1)  # no sample is split
    monkeypatch.setattr(plan, "BUSY", 0)
    made = draw(case, (3, 22, 24, 3)).map(guarded)
    poison(monkeypatch)
    check(fused(made), made)
    excited = draw(case, (3, 22, 24, 3), excited=True)
    check(fused(excited), excited, like_plain=True)


@pytest.mark.parametrize("case", [*LOW, ("tssa", {"position_scores": "1d"})], ids=label)
def test_samples_that_are_streamed(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sweep over split samples, whose kernel in Gluon is plain torch here; the first is ours."""
    monkeypatch.setattr(calls, "stream", Stream)
    monkeypatch.setattr(plan, "PROGRAMS", 10**6)
    made = draw(case, (3, 66, 24, 3)).map(guarded)
    assert plan.sweep(3, 66, 3, 8).splits > 1
    poison(monkeypatch)
    check(fused(made), made)


def test_the_plan_covers_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for programs in (1, 132, 1024, 10**6):
        monkeypatch.setattr(plan, "PROGRAMS", programs)
        for b in (1, 2, 5, 256, 100_000):
            for n in (1, 2, 63, 64, 65, 197, 1000, 65_536, 3_000_001):
                for k, p in ((1, 1), (3, 5), (8, 48), (64, 128), (16, 64)):
                    for sweep in filter(None, (plan.sweep(b, n, k, p), plan.whole(b, n, k, p))):
                        assert (sweep.splits - 1) * sweep.span < n <= sweep.splits * sweep.span
                        assert sweep.span % sweep.tokens == 0
                        assert sweep.width >= p
                        assert {x & (x - 1) for x in (sweep.heads, sweep.width, sweep.tokens)} == {0}
                        assert sweep.splits <= LAST_GRID


class _Counted:
    """A kernel that is not run; its grid is written down."""

    def __init__(self, name: str, seen: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self.seen.append((self.name, grid))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # to ask how it is aligned
@pytest.mark.parametrize("shape", [(1, 3_000_000, 1024, 8), (100_000, 1, 64, 8), (1, 1_500_000, 64, 64)], ids=str)
@pytest.mark.parametrize("case", [("dmsa", {"membership_bias": True}), LOW[1], ("tssa", {"position_scores": "1d"})], ids=label)
def test_grids_fit_the_device(case: tuple, shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes 65,535 programs along the second and third axis. No memory is touched: the tensors are fakes."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    for module in (calls, casts):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _Counted(name, seen))
    b, n, d, k = shape
    operator = create(case[0], d, k, **case[1])
    with FakeTensorMode() as mode, torch.no_grad():
        weights = Weights(*(None if w is None else mode.from_tensor(w) for w in operator.weights()))
        z, form = torch.empty(b, n, d, dtype=BF16), operator.form
        factors = rotary.factors("1d", d, n, None, step=plan.STEP, device=z.device, dtype=F32)
        out, kept = layer.forward(z, weights, form, factors, BF16)
        wanted = Weights(*(w is not None for w in weights))
        layer.backward(torch.empty_like(out), z, weights, form, factors, BF16, kept, wanted, True)
    assert len(seen) > 5
    for name, (first, *rest) in seen:
        assert first < 2**31, (name, first)
        assert max(rest, default=1) <= LAST_GRID, (name, rest)


# --- memory: layouts, scratch, what is not ours -----------------------------------------------------------------------


def guarded(x: Tensor) -> Tensor:
    """The same numbers at the start of a memory that goes on with NaN for longer than any tile."""
    memory = torch.full((x.numel() + 16_384,), float("nan"), dtype=x.dtype, device=x.device)
    return memory[: x.numel()].view(x.shape).copy_(x)


class _Poisoned:
    """`torch`, with every new buffer full of NaN."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _fill(self, made: Tensor) -> Tensor:
        self.seen.append(made.numel())
        return made.fill_(float("nan"))

    def empty(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._fill(torch.empty(*args, **kwargs))

    def empty_like(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._fill(torch.empty_like(*args, **kwargs))


def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Scratch starts as NaN and the rotary tables end in NaN; the sizes of the buffers that will be asked for."""
    seen: list[int] = []
    for module in (layer, calls):
        monkeypatch.setattr(module, "torch", _Poisoned(seen))
    factors = rotary.factors

    def fenced(*args: Any, **kwargs: Any) -> Any:
        made = factors(*args, **kwargs)
        return made and rotary.Factors(*(rotary.Table(*map(guarded, table)) for table in made[:2]), made.step)

    monkeypatch.setattr(rotary, "factors", fenced)
    return seen


@pytest.mark.parametrize("case", [LOW[2], LOW[3], ("dmsa", {"rotary": "2d"})], ids=label)
def test_poison_changes_no_bit(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    check_poison(draw(case, SMALL, F16, excited=True), F16, monkeypatch)


def check_poison(made: Layer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = fused(made, dtype)
    with monkeypatch.context() as patch:
        seen = poison(patch)
        found = fused(made.map(guarded), dtype)
    assert len(seen) > 3
    for name, value in clean.items():
        assert value.isfinite().all(), name
        assert torch.equal(found[name], value), name


def strided(x: Tensor) -> Tensor:
    """The same numbers, every second one of a memory full of NaN along each axis."""
    memory = torch.full([2 * size for size in x.shape], float("nan"), dtype=x.dtype, device=x.device)
    view = memory[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def transposed(x: Tensor) -> Tensor:
    """The same numbers with the last two axes swapped in memory, if there are two."""
    return x.mT.contiguous().mT if x.ndim > 1 else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a map (b, c, h, w)": lambda x: x.mT.contiguous().mT,
    "every second token": lambda x: torch.stack((x, torch.full_like(x, float("nan"))), 2).flatten(1, 2)[:, ::2],
    "every second channel": lambda x: strided(x),
    "batch last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "not aligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


def test_layouts_of_tokens_and_of_the_output_gradient() -> None:
    check_layouts(draw(("dmsa", {}), SMALL, excited=True), F32)


def check_layouts(made: Layer, dtype: torch.dtype) -> None:
    right = fused(made, dtype)
    for name, view in LAYOUTS.items():
        found = fused(made._replace(z=view(made.z), grad=view(made.grad)), dtype)
        for key, value in right.items():
            assert torch.equal(found[key], value), (name, key)


def test_expanded_tokens_and_output_gradients() -> None:
    check_expanded(draw(("dmsa", {}), SMALL, excited=True), F32)


def check_expanded(made: Layer, dtype: torch.dtype) -> None:
    """One token seen n times; out.sum(), whose gradient is one number in memory."""
    ones = torch.ones((), device=made.z.device).expand(made.z.shape)
    made = made._replace(z=made.z[:, :1].expand(made.z.shape), grad=ones)
    right = fused(made._replace(z=made.z.contiguous(), grad=made.grad.contiguous()), dtype)
    found = fused(made, dtype)
    assert all(torch.equal(found[key], value) for key, value in right.items())
    check(found, made, dtype, like_plain=True)
    z = made.z.clone().requires_grad_()
    with use_kernels("fused"), torch.autocast(z.device.type, dtype=F16 if dtype == F32 else dtype, enabled=dtype != F32):
        kernels.attend(z, made.weights, made.form, grid=made.grid).sum().backward()
    assert torch.equal(z.grad, right["z"])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("case", [("dmsa", {"membership_bias": True}), LOW[2], ("tssa", {})], ids=label)
def test_layouts_of_the_weights(case: tuple, dtype: torch.dtype) -> None:
    check_weights(draw(case, SMALL, dtype, excited=True), dtype)


def check_weights(made: Layer, dtype: torch.dtype) -> None:
    """Each weight strided and transposed; in the layer's own dtype, where nothing is copied on the way in."""
    made = made.map(lambda x: x.to(dtype))
    right = fused(made, dtype)
    for view in (strided, transposed):
        weights = Weights(*(None if w is None else view(w) for w in made.weights))
        found = fused(made._replace(weights=weights), dtype)
        for key, value in right.items():
            assert relative(found[key], value) < BARS[dtype][0], key


@pytest.mark.parametrize("case", [("dmsa", {"membership_bias": True}), LOW[2], LOW[3]], ids=label)
def test_nothing_of_the_callers_is_written(case: tuple) -> None:
    check_nothing_written(draw(case, SMALL, excited=True))


def check_nothing_written(made: Layer) -> None:
    before = made.map(torch.clone)
    z = made.z.requires_grad_()
    tensors = (z, *(w.requires_grad_() for w in made.weights if w is not None))
    with use_kernels("fused"):
        out = kernels.attend(z, made.weights, made.form, grid=made.grid)
    first = torch.autograd.grad(out, tensors, made.grad, retain_graph=True)
    second = torch.autograd.grad(out, tensors, made.grad)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    for mine, was in zip((made.z, made.grad, *made.weights), (before.z, before.grad, *before.weights), strict=True):
        assert mine is None or torch.equal(mine, was)


@pytest.mark.parametrize("case", [("dmsa", {"membership_bias": True}), LOW[2], ("tssa", {"position_scores": "1d"})], ids=label)
def test_only_what_is_wanted(case: tuple) -> None:
    check_wanted(draw(case, (1, 7, 24, 3), excited=True))


def check_wanted(made: Layer) -> None:
    """Frozen weights get no gradient, and the others the same bits as when all are wanted."""
    full = fused(made)
    for field, weight in zip(Weights._fields, made.weights, strict=True):
        if weight is not None:
            one = fused(made, wanted=Weights(*(name == field for name in Weights._fields)))
            assert one.keys() == {"output", "z", field}
            assert all(torch.equal(value, full[name]) for name, value in one.items())
    weights = made.weights._replace(subspace=made.weights.subspace.detach().requires_grad_())
    with use_kernels("fused"):
        out = kernels.attend(made.z, weights, made.form, grid=made.grid)  # tokens that want none
        out.backward(made.grad)
        assert made.z.grad is None
        assert torch.equal(weights.subspace.grad, full["subspace"])
        frozen = kernels.attend(made.z, made.weights, made.form, grid=made.grid)
    assert not frozen.requires_grad
    assert torch.equal(frozen, full["output"])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """A module under autocast; the backward pass inside of it or outside gives the same bits; low tokens are fine too."""
    operator = build("dmsa", {}, dtype=F32)
    z, grad = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    with use_kernels("fused"), torch.autocast("cpu", dtype=dtype):
        inside = gradients(operator, z, grad)
        moving = z.clone().requires_grad_()
        out = operator(moving)
        low = operator(z.to(dtype))
    out.backward(grad.to(dtype))
    assert inside["out"].dtype == out.dtype == low.dtype == dtype
    assert inside["z"].dtype == inside["subspace.weight"].dtype == F32
    assert torch.equal(moving.grad, inside["z"])
    with torch.autocast("cpu", dtype=dtype):
        usual = gradients(operator, z, grad)
    assert relative(low, usual["out"]) < 4 * BARS[dtype][0]
    assert all(relative(inside[name], usual[name]) < 4 * BARS[dtype][1] for name in usual)


def test_inference_mode_and_no_grad() -> None:
    made = draw(("dmsa", {}), SMALL, excited=True)
    right = fused(made)["output"]
    with use_kernels("fused"):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert torch.equal(kernels.attend(made.z, made.weights, made.form), right)


# --- NaN, repeats, ties -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [LOW[0], LOW[2], LOW[3], LOW[5]], ids=label)
def test_a_nan_stays_in_its_sample(case: tuple) -> None:
    check_isolation(draw(case, (3, 9, 24, 3), excited=True), F32)


def check_isolation(made: Layer, dtype: torch.dtype) -> None:
    """The other samples keep every bit, and what the reference makes NaN in its own sample is NaN here too."""
    clean = fused(made, dtype)
    for where in ("z", "grad"):
        value = getattr(made, where).clone()
        value[1, 4, 5] = float("nan")
        sick = made._replace(**{where: value})
        found, usual = fused(sick, dtype), plain(sick, dtype)
        others = torch.arange(len(value)) != 1
        for key in ("output", "z"):
            assert torch.equal(found[key][others], clean[key][others]), (where, key)
            assert torch.equal(found[key].isnan(), usual[key].isnan()), (where, key)
            assert found[key][1].isnan().any() or (where, key) == ("grad", "output")


def test_twenty_repeats_are_equal_to_the_bit() -> None:
    made = draw(("dmsa", {}), (1, 7, 16, 2), excited=True)
    first = fused(made)
    for _ in range(20):
        again = fused(made)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("gate", ["sparsemax", "sigmoid", "relu", "gelu", "uniform"])
def test_gates_at_ties_and_at_zero(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores equal, for any reason or for none: zeros."""
    for value in (0.0, 1.0):
        options = {"gate_activation": gate, "membership_bias": True, "rotary": "none"}
        made = draw(("dmsa", options), (2, 7, 48, 12), excited=True)
        tied = torch.zeros(12, 48).index_fill_(1, torch.tensor([3]), value)
        made = made._replace(weights=made.weights._replace(assign=tied, assign_bias=torch.zeros(12)))
        found, kept = keep(functools.partial(fused, made), monkeypatch)
        check(found, made, like_plain=True)
        assert (kept.gate == kept.gate[:, :1]).all()  # equal scores, equal mass, to the bit
        if gate in ("sparsemax", "uniform"):
            torch.testing.assert_close(kept.gate, torch.full((2, 12), 1 / 12), rtol=2e-7, atol=0)
        if gate in ("relu", "gelu") and not value:
            assert not kept.gate.any()


@pytest.mark.parametrize("heads", [12, 40])  # the reference compares pairs of the first, and sorts the second
def test_a_cap_on_tied_heads(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tied, four allowed: the four lowest indices get a quarter each, and only they are learned from."""
    made = draw(("dmsa", {"max_active_heads": 4}), (2, 3, 4 * heads, heads), excited=True)
    made = made._replace(weights=made.weights._replace(assign=made.weights.assign[:1].expand(heads, -1)))
    found, kept = keep(functools.partial(fused, made), monkeypatch)
    check(found, made, like_plain=True)
    assert torch.equal(kept.gate, torch.tensor([0.25] * 4 + [0.0] * (heads - 4)).expand(2, heads))
    assert not found["subspace"].unflatten(0, (heads, 4))[4:].any()


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "equation"}, {"mode": "proximal"}, {"gate_activation": "relu"}, {"max_active_heads": 1}],
    ids=str,
)
def test_a_silent_head_learns_nothing(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate 0 for the sample: exactly 0 in every gradient that belongs to the head."""
    made = draw(("dmsa", {"membership_bias": True, **options}), (1, 9, 48, 6), excited=True)
    made = made._replace(weights=made.weights._replace(assign_bias=torch.tensor([3.0, -3.0, 2.9, -2.9, 0.0, -4.0])))
    found, kept = keep(functools.partial(fused, made), monkeypatch)
    off = kept.gate[0] == 0
    assert 0 < off.sum() < 6
    owned = {
        "subspace": lambda g: g.unflatten(0, (6, 8)),
        "subspace_bias": lambda g: g.unflatten(0, (6, 8)),
        "assign": lambda g: g,
        "assign_bias": lambda g: g,
        "out": lambda g: g.mT.unflatten(0, (6, 8)),
    }
    for name, by_head in owned.items():
        if found.get(name) is not None:
            assert not by_head(found[name])[off].any(), name
            assert by_head(found[name])[~off].any() or name.startswith("assign"), name


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_scores_gate_and_membership_are_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near a tie scores in low precision would move the gate by percents. Here: to 1e-6 of float64, whatever the dtype."""
    check_scores(dtype, (1, 70, 48, 4), "cpu", monkeypatch)


def check_scores(dtype: torch.dtype, shape: tuple, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for stored in dict.fromkeys((F32, dtype)):
        for options in ({}, {"rotary": "2d"}, {"rotary": "none", "membership_bias": True}):
            made = draw(("dmsa", options), shape, dtype).map(lambda x, stored=stored: x.to(device, stored))
            wide = made.map(Tensor.double)
            scores = reference.score(wide.z, wide.weights, wide.form, wide.grid)
            with (
                use_kernels("fused"),
                torch.no_grad(),
                torch.autocast(device, dtype=F16 if dtype == F32 else dtype, enabled=stored != dtype),
            ):
                call = functools.partial(kernels.attend, made.z, made.weights, made.form, grid=made.grid)
                _, kept = keep(call, monkeypatch)
            assert relative(kept.gate, reference.gate_of(scores, made.form)[1]) < 1e-6
            assert relative(kept.membership.mT, scores.sigmoid()) < 1e-6


# --- fuzz -------------------------------------------------------------------------------------------------------------


def fuzzed(samples: int, most: int, heads: int, width: int) -> Any:
    """A layer's case, sizes, dtype, the layouts of its tokens and output gradient, and which weights want gradients."""
    return st.fixed_dictionaries(
        {
            "case": st.sampled_from(FAMILY),
            "b": st.integers(0, samples),
            "n": st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65]), st.integers(0, most)),
            "k": st.integers(1, heads),
            "p": st.one_of(st.integers(1, 9), st.integers(1, width)),
            "dtype": st.sampled_from([F32, F32, F16, BF16]),
            "excited": st.booleans(),
            "layouts": st.tuples(*(st.sampled_from([None, *LAYOUTS]) for _ in range(2))),
            "wanted": st.tuples(*(st.booleans() for _ in Weights._fields)),
        }
    )


def check_drawn(drawn: dict[str, Any], device: str) -> None:
    name, options = drawn["case"]
    b, n, k, p, dtype = (drawn[key] for key in ("b", "n", "k", "p", "dtype"))
    d = k * p
    turns = 4 if "2d" in options.values() else 1 if "none" in options.values() else 2
    d *= turns // min(turns, next(t for t in (4, 2, 1) if d % t == 0))  # rotary wants pairs, 2d pairs of pairs
    if "max_active_heads" in options:
        options = {**options, "max_active_heads": min(k, options["max_active_heads"])}
    torch.manual_seed(b + 7 * n + 1000 * k + 9000 * p)
    made = draw((name, options), (b, n, d, k), dtype, excited=drawn["excited"]).map(lambda x: x.to(device))
    z, grad = (
        x if layout is None or not x.numel() else LAYOUTS[layout](x)
        for layout, x in zip(drawn["layouts"], (made.z, made.grad), strict=True)
    )
    made = made._replace(z=z, grad=grad)
    found = fused(made, dtype, wanted=Weights(*drawn["wanted"]))
    check(found, made, dtype, like_plain=True, some=True)


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])  # shrinking in the interpreter takes minutes
@given(fuzzed(samples=2, most=70, heads=3, width=16))
def test_any_shape_stride_and_dtype(drawn: dict[str, Any]) -> None:
    check_drawn(drawn, "cpu")


def test_memberships_that_grow_with_the_tokens_do_not_overflow_float16() -> None:
    """pi reaches n there: pi s, here beyond 65504, is never stored without its factor."""
    operator = build("tpsusa", {"token_sparse_rescale": True}, dim=16, heads=2, dtype=F32).half()
    z = 300 * torch.randn(1, 256, 16).half()
    with torch.no_grad(), use_kernels("fused"):
        assert operator(z).isfinite().all()
