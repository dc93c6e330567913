"""The kernels in Gluon on a GPU, each alone: against float64 in plain torch, in memory that starts as NaN.

Triton's interpreter knows no Gluon: what surrounds these kernels is tested without a GPU (tests/test_fused.py puts plain
torch in their place) and they themselves here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from dmst.kernels import plan
from dmst.kernels.fused import hopper, resident, stream
from tests.cases import relative
from tests.standins import Products, Resident

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run `pytest -m gpu` where there is one"),
]
BAR = {BF16: 4e-3, F16: 5e-4}  # half a bit of the output, and a little
REPEATS = 20


def drawn(*shape: int, dtype: torch.dtype = BF16, size: float = 1.0) -> Tensor:
    return (size * torch.randn(*shape, device="cuda")).to(dtype)


def near(found: Tensor, right: Tensor, bar: float) -> None:
    assert found.shape == right.shape
    assert found.isfinite().all()
    assert relative(found.double(), right) < bar


def repeats(call: Callable[[], Any]) -> None:
    """Equal to the bit, over and over."""
    first = call()
    for _ in range(REPEATS):
        for one, other in zip(first, call(), strict=True):
            assert one is None or torch.equal(one, other)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels are given to write to is NaN."""
    for module in (hopper, resident, stream):
        monkeypatch.setattr(module, "torch", _Poisoned())


class _Poisoned:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.full(args, float("nan"), **kwargs)

    def empty_like(self, x: Tensor) -> Tensor:
        return torch.full_like(x, float("nan"))


# --- products on Hopper -----------------------------------------------------------------------------------------------

WIDTHS = [(384, 48), (256, 64), (64, 16)]  # d, p


def on_hopper(d: int, p: int, dtype: torch.dtype = BF16) -> None:
    if not hopper.serves(torch.device("cuda", torch.cuda.current_device()), dtype, d, p):
        pytest.skip(
            f"{torch.cuda.get_device_name()} is no Hopper GPU, or this Triton's Gluon is not one of those that were read"
        )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("d", [384, 256, 64])
def test_product(d: int, dtype: torch.dtype) -> None:
    on_hopper(d, 16, dtype)
    weight, bias = drawn(d, d, dtype=dtype, size=d**-0.5), drawn(d, dtype=dtype)
    for rows in (1, 63, 64, 65, 127, 5000, 40_000):
        x = drawn(rows, d, dtype=dtype)
        near(hopper.product(x, weight, bias), x.double() @ weight.double().mT + bias.double(), BAR[dtype])
        near(hopper.product(x, weight.mT, None), x.double() @ weight.double(), BAR[dtype])
    repeats(lambda: (hopper.product(x, weight, bias),))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("d", "h"), [(384, 1536), (192, 768), (256, 1024), (64, 320), (128, 64), (320, 1280)], ids=str)
def test_hidden(d: int, h: int, dtype: torch.dtype) -> None:
    """GELU of the float32 sums; each row by itself, and large numbers stay what they are."""
    on_hopper(d, 16, dtype)
    weight, bias = drawn(h, d, dtype=dtype, size=d**-0.5), drawn(h, dtype=dtype)
    for rows in (1, 63, 64, 65, 127, 5000, 40_000):
        x = drawn(rows, d, dtype=dtype)
        right = x.double() @ weight.double().mT
        near(hopper.hidden(x, weight, bias), torch.nn.functional.gelu(right + bias.double()), BAR[dtype])
        near(hopper.hidden(x, weight, None), torch.nn.functional.gelu(right), BAR[dtype])
    repeats(lambda: (hopper.hidden(x, weight, bias),))
    clean = hopper.hidden(x, weight, bias)
    x[777, 5], x[778] = float("nan"), 100 * x[778]
    found = hopper.hidden(x, weight, bias)
    assert found[777].isnan().all() and found[778].isfinite().all()
    assert torch.equal(found[:777], clean[:777]) and torch.equal(found[779:], clean[779:])
    near(found[778], torch.nn.functional.gelu(x[778].double() @ weight.double().mT + bias.double()), BAR[dtype])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("d", "p"), WIDTHS, ids=str)
def test_project(d: int, p: int, biased: bool) -> None:
    on_hopper(d, p)
    weight, bias = drawn(d, d, size=d**-0.5), drawn(d) if biased else None
    for b, n in ((1, 64), (3, 64), (5, 192), (2, 320), (9, 1024), (70, 512), (1, 40_960)):
        x, membership = drawn(b, n, d), torch.rand(b, n, d // p, device="cuda")
        weighted, energy, mass = hopper.project(x, weight, bias, membership)
        wide = (x.double(), weight.double(), None if bias is None else bias.double(), membership.double())
        right = Products.project(*wide)
        near(weighted, right[0], BAR[BF16])
        near(energy.sum(1), right[1].sum(1), 3e-6)
        near(mass.sum(1), right[2].sum(1), 1e-6)
    repeats(lambda: hopper.project(x, weight, bias, membership))


@pytest.mark.parametrize(("d", "p"), WIDTHS, ids=str)
def test_fold_out(d: int, p: int) -> None:
    """A weight for each sample; programs that see one sample, many, or none."""
    on_hopper(d, p)
    bias = drawn(d)
    for b, n in ((1, 128), (3, 128), (7, 256), (200, 128), (64, 1024), (5, 4096)):
        x, weights = drawn(b, n, d), drawn(b, d, d, size=d**-0.5)
        right = x.double() @ weights.double().mT
        near(hopper.fold_out(x, weights, bias), right + bias.double(), BAR[BF16])
        near(hopper.fold_out(x, weights, None), right, BAR[BF16])
    repeats(lambda: (hopper.fold_out(x, weights, bias),))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("stored", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(256, 197, 384), (3, 197, 384), (5, 896, 384), (200, 128, 384), (1, 1, 256), (7, 256, 256), (70, 384, 64)],
    ids=str,
)
def test_onto_z(shape: tuple, stored: torch.dtype, kept: bool) -> None:
    """z + keep * the product, from its float32 sums: tiles of several samples, of few tokens; nothing else is written."""
    b, n, d = shape
    on_hopper(d, 16)
    x, z, weight, bias = drawn(*shape), drawn(*shape, dtype=stored), drawn(d, d, size=d**-0.5), drawn(d)
    keep = 1.25 * (torch.arange(b, device="cuda") % 3 > 0).float().view(b, 1, 1) if kept else None
    bar, before = BAR[BF16] if stored == BF16 else 3e-6, z.clone()
    ways: list[tuple[Callable[..., Tensor], Tensor]] = [(hopper.product, weight)]
    if n % 128 == 0:
        ways.append((hopper.fold_out, drawn(b, d, d, size=d**-0.5)))
    for make, given in ways:
        for added in (bias, None):
            found = make(x, given, added, z, keep)
            assert found.dtype == stored
            near(found, Products._onto(exact(x, given, added), *_wide(z, keep)), bar)
        repeats(lambda make=make, given=given: (make(x, given, bias, z, keep),))
    assert torch.equal(z, before)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().mT
    return out if bias is None else out + bias.double()


# --- samples in shared memory -----------------------------------------------------------------------------------------

LENGTHS = (1, 2, 15, 16, 17, 64, 100, 196, 197, 256, 300)
SIZES = [(384, 8), (512, 8), (64, 8)]  # d, k
OPTIONS = [
    {"mode": "listing", "sign": -1.0, "uniform": False},
    {"mode": "equation", "sign": -1.0, "uniform": True},
    {"mode": "proximal", "sign": -1.0, "uniform": False},
]


def a_sample(b: int, n: int, d: int, k: int, dtype: torch.dtype, mode: str, gated: bool) -> tuple:
    gate = torch.rand(b, k, device="cuda") if gated else None
    theta = torch.tensor(0.7, device="cuda") if mode == "proximal" else None
    return drawn(b, n, d, dtype=dtype), torch.rand(b, n, k, device="cuda"), gate, theta


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["mode"])
@pytest.mark.parametrize(("d", "k"), SIZES, ids=str)
def test_settle(d: int, k: int, options: dict) -> None:
    gated, dtype = d != 512, F16 if d == 64 else BF16
    delta = 1e-8 if options["mode"] == "listing" else 0.0
    for n in LENGTHS:
        if not resident.fits(n, d, d // k, dtype, torch.device("cuda")):
            pytest.skip(f"{torch.cuda.get_device_name()} has too little shared memory, or this Triton no Gluon that was read")
        s, pi, gate, theta = a_sample(7, n, d, k, dtype, options["mode"], gated)
        s[3] = float("nan")  # of no concern to the others
        found = resident.settle(s, pi, gate, theta, delta=delta, **options)
        wide = [None if x is None else x.double() for x in (s, pi, gate, theta)]
        right = Resident.settle(*wide, delta=delta, **options)
        others = [0, 1, 2, 4, 5, 6]
        for mine, told, bar in zip(found, right, (BAR[dtype], 2e-6, 2e-6), strict=True):
            near(mine[others], told[others], bar)
        assert found[0][3].isnan().all()
    s, pi, gate, theta = a_sample(7, 197, d, k, dtype, options["mode"], gated)
    repeats(lambda: resident.settle(s, pi, gate, theta, delta=delta, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["mode"])
@pytest.mark.parametrize(("d", "k"), SIZES, ids=str)
def test_pull(d: int, k: int, options: dict) -> None:
    gated, dtype = d != 512, F16 if d == 64 else BF16
    for n in LENGTHS:
        if not resident.fits_pull(n, d, d // k, dtype, torch.device("cuda")):
            pytest.skip(f"{torch.cuda.get_device_name()} has too little shared memory, or this Triton no Gluon that was read")
        s, pi, gate, theta = a_sample(7, n, d, k, dtype, options["mode"], gated)
        grad = drawn(7, n, d, dtype=dtype)
        _, moment, divisor = Resident.settle(s.double(), pi.double(), *_wide(gate, theta), delta=0.0, **options)
        rest = (moment.float(), gate, divisor.float(), theta)
        asked = {"sigmoid": n % 2 == 0, "wants_bias": n % 3 == 0, "wants_update": n % 3 != 1}
        mine, told = grad.clone(), grad.double()
        found = resident.pull(mine, s, pi, *rest, **options, **asked)
        right = Resident.pull(told, s.double(), pi.double(), *_wide(*rest), **options, **asked)
        near(mine, told, BAR[dtype])
        for name, value, exact in zip(("dscores", "dgate", "dtheta", "dbias", "update"), found, right, strict=True):
            assert (value is None) == (exact is None), name
            if value is not None:
                near(value, exact.double(), {"dbias": 4e-3, "update": BAR[dtype]}.get(name, 2e-5))
    repeats(lambda: (lambda flow: (*resident.pull(flow, s, pi, *rest, **options, **asked), flow))(grad.clone()))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["mode"])
@pytest.mark.parametrize(("d", "k"), SIZES, ids=str)
def test_stream(d: int, k: int, options: dict, weighted: bool) -> None:
    """Samples in pieces of any length, whose last is not whole; memberships of 0 among them."""
    if weighted and (options["mode"] == "proximal" or options["uniform"]):
        options = {"mode": "listing", "sign": 1.0, "uniform": False}
    gated, dtype = d != 512, F16 if d == 64 else BF16
    if not stream.serves(d // k, dtype, torch.device("cuda")):
        pytest.skip("this Triton has no Gluon that was read")
    for n, span in ((1, 64), (131, 64), (1000, 176), (300, 300)):
        s, pi, gate, theta = a_sample(3, n, d, k, dtype, options["mode"], gated)
        pi[:, ::7] = 0
        grad = drawn(3, n, d, dtype=dtype)
        kept = (pi.unsqueeze(-1) * s.unflatten(-1, (k, -1)).float()).flatten(2).to(dtype) if weighted else s
        cut = plan.sweep(3, n, k, d // k)._replace(splits=plan.over(n, span), span=span)
        asked = {"sigmoid": weighted or n % 2 == 0, "wants_bias": n != 131}
        bare = torch.where(pi > 0, 1 / pi, 0).double().unsqueeze(-1) if weighted else 1
        exact_s = (kept.double().unflatten(-1, (k, -1)) * bare).flatten(2)
        _, moment, divisor = Resident.settle(exact_s, pi.double(), *_wide(gate, theta), delta=1e-8, **options)
        rest = (moment.float(), gate, divisor.float(), theta)
        told = grad.double()
        total = (grad.double() * exact_s).unflatten(-1, (k, -1))
        if options["mode"] == "proximal":
            g = 1 if gate is None else gate.double()[:, None, :, None]
            w = pi.double().unsqueeze(-1) * (theta.double() * g**2 / (1 + g**2 * moment[:, None]))
            total = total / (1 + w).square()
        total = (pi.double().unsqueeze(-1) * total).sum(1).float()
        mine = grad.clone()
        found = stream.pull(mine, kept, pi, *rest, total, cut, weighted=weighted, **options, **asked)
        wide = (exact_s, pi.double(), *_wide(*rest))
        right = Resident.pull(told, *wide, wants_update=False, **options, **asked)
        near(mine, told, BAR[dtype])
        for name, value, exact in zip(("dscores", "dgate", "dtheta", "dbias"), found, right[:4], strict=True):
            assert (value is None) == (exact is None), name
            if value is not None:
                value = value.sum(1, keepdim=True) if name == "dbias" else value
                near(value, exact.double(), 4e-3 if name == "dbias" else 2e-5)
    again = (kept, pi, *rest, total, cut)
    repeats(lambda: (lambda flow: (*stream.pull(flow, *again, weighted=weighted, **options, **asked), flow))(grad.clone()))


def _wide(*values: Tensor | None) -> list[Tensor | None]:
    return [None if value is None else value.double() for value in values]


def test_the_plan_sends_them_there() -> None:
    """The shapes at which `docs/kernels.md` says that these kernels serve."""
    on_hopper(384, 48)
    device = torch.device("cuda", torch.cuda.current_device())
    assert plan.weighted(1024, 384, BF16) and not plan.weighted(197, 384, BF16)
    assert resident.fits(197, 384, 48, BF16, device) and resident.fits_pull(197, 384, 48, BF16, device)
    assert not resident.fits(197, 384, 48, F32, device) and not resident.fits(100_000, 384, 48, BF16, device)
