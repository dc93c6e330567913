"""The layer computes what its formula says, always the same bits, and no sample sees another.

On the CPU by what a user gets (`dmst.kernels.attend`: plain torch) and by
the readable reference; by the fused kernels in Triton's interpreter; and the gate, which is a sparsemax, by itself. How far off
is too far says soak/judge.py; the cases of the precision table are those of soak/precision.py.
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from dmst import kernels, use_kernels
from dmst.kernels import Weights, attempt, choice, reference
from dmst.operators import create
from dmst.operators.dmsa import GATES, MODES
from dmst.operators.family import TokenStatistics
from dmst.sparsemax import jacobian_product, sparsemax
from soak import precision
from soak.case import Case
from soak.judge import Judge, differentiate, plain, switches
from tests import test_sparsemax
from tests.cases import build, gradients, grid_of, relative
from tests.parity import BARS, Layer, draw
from tests.quick import quicken

TITLE = "Operator kernels"

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F32, F32, BF16, F16)
SCALES = (1.0, 1.0, 1.0, 1e-8, 1e-4, 1e-2, 1e2, 1e3, 1e4)
WIDTHS = (*range(8, 65, 8), 5, 7, 9, 11, 13, 17, 33, 63, 96, 128)  # of a head
SIZES: dict[str, dict[str, Any]] = {  # work: (b n + 64) d^2 at most
    "usual": {"tokens": (0, 1, 2, 3, 17, 196, 197, 1024), "widths": WIDTHS, "heads": 16, "work": 3e7},
    "long": {"tokens": (4096, 4096, 4096, 16384), "widths": WIDTHS[:9], "heads": 8, "work": 1.5e8},
    "small": {"tokens": (0, 1, 2, 3, 9, 17, 65, 130), "widths": (3, 4, 5, 8, 16, 33, 48), "heads": 4, "work": 1e6},
    "batch": {"tokens": (1, 2, 3, 17, 65, 197), "widths": WIDTHS[:12], "heads": 8, "work": 1e7},
    "tiny": {"tokens": (1, 2, 3, 4), "widths": (1, 2, 3, 4), "heads": 4, "work": 1.4e4},
}


def _slice(x: Tensor) -> Tensor:
    """In the middle of a larger memory, full of NaN."""
    memory = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
    return memory[tuple(slice(2, 2 + size) for size in x.shape)].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "stride 0": lambda x: x[:1].expand(x.shape),
    "offset slice": _slice,
    "channels first": lambda x: x.mT.contiguous().mT,
}


# --- what is tried ----------------------------------------------------------------------------------------------------


def options(pick: random.Random, name: str, k: int) -> dict[str, Any]:
    """A member of the family, with some of its options."""
    positions = pick.choice(("none", "1d", "1d", "2d"))
    if name == "tssa":
        return {"position_scores": positions, "normalize_tokens": pick.random() < 0.8, "bias": pick.random() < 0.8}
    made: dict[str, Any] = {"rotary": positions, "bias": pick.random() < 0.8, "membership_bias": pick.random() < 0.3}
    if name in ("dmsa", "tpsusa"):
        made["mode"] = pick.choice(MODES)
        made["gate_scale"] = pick.choice((1.0, 1.0, 1.0, 0.5, -0.5, 3.0))
        made["gate_activation"] = pick.choice(("sparsemax",) * 8 + GATES)
        if made["gate_activation"] == "sparsemax" and pick.random() < 0.3:
            made["max_active_heads"] = pick.randint(1, k)
    if name == "dmsa" and pick.random() < 0.1:
        made["membership_activation"] = "softmax"
    if name in ("tpusa", "tpsusa"):
        made["token_sparse_rescale"] = pick.random() < 0.2
    if name == "gated_channel":
        made["moment_weight"] = pick.choice(("uniform", "membership"))
    return made


def form(pick: random.Random, k: int, p: int) -> tuple[str, dict[str, Any]] | None:
    """Half of them DMSA; nothing where its rotation does not divide the width."""
    name = pick.choice(("dmsa",) * 4 + ("tssa", "tpusa", "tpsusa", "gated_channel"))
    made = options(pick, name, k)
    turned = {"none": 1, "1d": 2, "2d": 4}[made.get("rotary", made.get("position_scores"))]
    return None if k * p % turned else (name, made)


def shape(pick: random.Random, tokens: tuple[int, ...], widths: tuple[int, ...], heads: int, work: float) -> tuple[int, ...]:
    """b, n, d, k and p, no more work than this."""
    while True:
        b, n, k, p = pick.randint(0, 5), pick.choice(tokens), pick.randint(1, heads), pick.choice(widths)
        if (b * n + 64) * (k * p) ** 2 <= work and (b * n or pick.random() < 0.3):
            return b, n, k * p, k, p


def fuzz(pick: random.Random, fused: bool = False, **sizes: Any) -> dict[str, Any]:
    """With `fused` a form that the kernels compute."""
    while True:
        *made, k, p = shape(pick, **sizes)
        case = form(pick, k, p)
        if case is not None and not (fused and unfit(case, made[-1], k)):
            break
    wanted = ["z", *Weights._fields]
    return {
        "case": case, "shape": (*made, k), "dtype": pick.choice(DTYPES), "scale": pick.choice(SCALES),
        "layouts": pick.choices(list(LAYOUTS), k=2), "stored": pick.random() < 0.3,
        "wanted": wanted if pick.random() < 0.5 else [name for name in wanted if pick.random() < 0.5],
    }  # fmt: skip


def unfit(case: tuple[str, dict[str, Any]], d: int, k: int) -> str:
    return choice.unfit(create(case[0], d, k, device="meta", **case[1]).form, d)


def told(what: str, i: int, drawn: dict[str, Any]) -> str:
    """Its name: what can be said in one line; the rest follows from its number."""
    (name, made), (b, n, d, k) = drawn["case"], drawn["shape"]
    dtype = str(drawn["dtype"]).removeprefix("torch.")
    return f"{what} {i:04}: {name} {made.get('mode', '')} {b} x {n} x {d}, {k} heads, {dtype} x{drawn['scale']:g}"


# --- against float64 -------------------------------------------------------------------------------------------------


def lay(drawn: dict[str, Any], seed: int) -> Layer:
    torch.manual_seed(seed)
    dtype = drawn["dtype"]
    made = draw(drawn["case"], drawn["shape"], dtype, scale=drawn["scale"], device="cpu")
    z, grad = (LAYOUTS[layout](x) for layout, x in zip(drawn["layouts"], (made.z, made.grad), strict=True))
    return made._replace(z=z, grad=grad)


def against_float64(drawn: dict[str, Any], seed: int, _: Path) -> dict[str, Any]:
    """The readable reference, and what training and inference get."""
    dtype, wanted, made = drawn["dtype"], drawn["wanted"], lay(drawn, seed)
    judge = Judge(made, dtype, wanted, drawn["scale"], drawn["case"][0])
    low = dtype != F32 and not drawn["stored"]
    given = made.map(lambda x: x.to(dtype)) if drawn["stored"] else made
    usual = plain(given, dtype, wanted)
    judge.look("reference", usual, usual)
    with torch.autocast("cpu", dtype=dtype if low else BF16, enabled=low):
        found = differentiate(kernels.attend, given, wanted)
        with torch.no_grad():
            inferred = kernels.attend(given.z, given.weights, given.form, grid=given.grid)
    assert found["output"] is not None and found["output"].dtype == inferred.dtype == dtype
    judge.look("training", found, usual)
    judge.look("inference", {**found, "output": inferred}, usual)
    return judge.facts()


def interpreted(drawn: dict[str, Any], seed: int, _: Path) -> dict[str, Any]:
    """The fused kernels; one that fell back to the plain steps is a failure."""
    dtype, wanted, made = drawn["dtype"], drawn["wanted"], lay(drawn, seed)
    judge = Judge(made, dtype, wanted, drawn["scale"], drawn["case"][0])
    low = dtype != F32 and not drawn["stored"]
    given = made.map(lambda x: x.to(dtype)) if drawn["stored"] else made
    attempt.anew()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), use_kernels("fused"):
        warnings.filterwarnings("ignore", ".* encountered", RuntimeWarning)  # numpy, where an infinity is meant
        quicken(patch)
        with torch.autocast("cpu", dtype=dtype if low else BF16, enabled=low):
            found = differentiate(kernels.attend, given, wanted)
    assert not attempt.broken, "the fused kernel fell back to the plain steps"
    judge.look("fused", found, plain(given, dtype, wanted))
    return judge.facts()


# --- the gate ---------------------------------------------------------------------------------------------------------


def row_of(pick: random.Random) -> list[float]:
    """Scores of 1 to 16 heads, at any scale; every third row full of ties."""
    size, scale = pick.randint(1, 16), 10 ** pick.uniform(-8, 4)
    if pick.random() < 1 / 3:
        few = [pick.gauss(0, 1) for _ in range(pick.randint(1, 3))]
        return [pick.choice(few) for _ in range(size)]
    return torch.tensor([scale * pick.gauss(0, 1) for _ in range(size)]).tolist()  # which float32 can hold


def gate_properties(seed: int, _: Path) -> dict[str, Any]:
    """The tests of tests/test_sparsemax.py on one more row, and those of design 3.8 that they leave out."""
    pick = random.Random(seed)
    row, cap, worst = row_of(pick), pick.randint(1, 16), 0.0
    inner = {name: test.hypothesis.inner_test for name, test in vars(test_sparsemax).items() if hasattr(test, "hypothesis")}
    inner["test_both_methods_are_the_oracle"](row)
    whole = [pick.randint(-64, 64) for _ in row]
    for method in test_sparsemax.METHODS:
        for dtype in (F32, F64):
            inner["test_is_a_point_of_the_simplex"](row, method, dtype)
        inner["test_permutation_and_ties"](row, pick, method)
        inner["test_cap_is_a_cap"](row, cap, method)
        inner["test_shift_invariant_to_the_bit_where_the_shift_is_exact"](whole, pick.randint(-64, 64), method)
        worst = max(worst, alone(row, cap, method, pick))
    return {"error": worst}


def alone(row: list[float], cap: int, method: str, pick: random.Random) -> float:
    project = functools.partial(sparsemax, method=method)
    s, size = torch.tensor(row), len(row)
    even = project(torch.full((size,), pick.gauss(0, 10)))
    assert ((even - 1 / size).abs() <= torch.finfo(F32).eps / size).all(), "tied heads do not share evenly"
    capped = project(s, max_active=cap)
    assert (capped > 0).sum() <= cap, "more heads are on than the cap allows"
    if (project(s) > 0).sum() <= cap and method == "sort" and len(set(row)) == size:
        assert torch.equal(capped, project(s)), "a cap that does not bind changes bits"
    rows = torch.stack([s, s.roll(1), s.flip(0), -s])
    clean, at = project(rows, max_active=cap), pick.randrange(size)
    for bad in (torch.nan, torch.inf):
        rows[1, at] = bad
        dirty = project(rows, max_active=cap)
        assert dirty[1].isnan().any() and (bad == torch.inf or dirty[1].isnan().all()), f"{bad} does not show"
        assert torch.equal(dirty[[0, 2, 3]], clean[[0, 2, 3]]), f"{bad} in one row changed another"
    if size > 1:
        low = s.index_fill(0, torch.tensor([at]), -torch.inf)
        assert project(low)[at] == 0 and project(low).isfinite().all(), "-inf"
    moving, v = s.double().requires_grad_(), torch.randn(size, dtype=F64)
    found = project(moving, max_active=cap)
    support = (found > 0).double()
    jacobian = torch.diag(support) - torch.outer(support, support) / support.sum()
    for product in (torch.autograd.grad(found, moving, v)[0], jacobian_product(found.detach(), v)):
        torch.testing.assert_close(product, jacobian @ v, rtol=0, atol=1e-13)
    return max(abs(q.double().sum().item() - 1) / 1e-6 for q in (capped, project(s), even))


# --- derivatives, repeats, batches, NaN -------------------------------------------------------------------------------


def excited(drawn: dict[str, Any], seed: int, dtype: torch.dtype, b: int) -> tuple[TokenStatistics, Tensor, tuple[int, int]]:
    """An operator with weights of size 1, at which gates close and memberships spread, b samples and their grid."""
    torch.manual_seed(seed)
    _, n, d, k = drawn["shape"]
    operator = build(*drawn["case"], dim=d, heads=k, dtype=F64 if dtype == F64 else F32).to(dtype)
    assert isinstance(operator, TokenStatistics)
    return operator, torch.randn(b, n, d).to(dtype), grid_of(n)


def derivatives(drawn: dict[str, Any], seed: int, _: Path) -> None:
    """First derivatives of operators, second ones in random directions; no score within 1e-3 of a switch."""
    operator, z, grid = excited(drawn, seed, F64, 1 + seed % 2)
    weights = operator.weights()
    for _ in range(1000):
        scores = reference.score(z, weights, operator.form, grid)
        if scores is None or all((far > 1e-3).all() for _, _, far in switches(scores, operator.form)):
            break
        z = torch.randn_like(z)
    else:
        raise AssertionError("every draw is near a switch")
    names, parameters = zip(
        *((name, p.detach().clone().requires_grad_()) for name, p in operator.named_parameters()), strict=True
    )

    def call(z: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(operator, dict(zip(names, values, strict=True)), (z,), {"grid": grid})

    inputs = (z.requires_grad_(), *parameters)
    assert gradcheck(call, inputs, eps=1e-6, atol=1e-5, rtol=1e-3, nondet_tol=0.0)
    assert gradgradcheck(call, inputs, eps=1e-6, atol=1e-5, rtol=1e-3, nondet_tol=0.0, fast_mode=True)


def repeats(drawn: dict[str, Any], seed: int, _: Path) -> None:
    operator, z, grid = excited(drawn, seed, drawn["dtype"], 2)
    grad = torch.randn_like(z)
    first = gradients(operator, z, grad, grid=grid)
    for again in range(500):
        for name, value in gradients(operator, z, grad, grid=grid).items():
            assert torch.equal(value, first[name]), f"{name} is another in repeat {again}"


def one_of_a_batch(drawn: dict[str, Any], seed: int, _: Path) -> dict[str, Any]:
    """Other samples beside it change no bit of a sample's result. Alone it is the same but for the rounding of torch's own
    products and functions, which depends on how many rows there are; "bits": not even that."""
    operator, z, grid = excited(drawn, seed, drawn["dtype"], 2 + seed % 4)
    others = torch.cat((z[:1], 3 * torch.randn_like(z[1:])))
    worst, same = 0.0, True
    for train in (True, False):
        with torch.set_grad_enabled(train):
            whole, beside, single = (operator.train(train)(x, grid=grid)[0] for x in (z, others, z[:1]))
        assert torch.equal(whole, beside), "a sample depends on the others"
        same &= torch.equal(whole, single)
        worst = max(worst, relative(whole, single) / BARS[z.dtype][0])
    assert worst <= 1, f"a sample alone is off by {worst:.2g} of the bar"
    return {"bits": int(same), "error": float(f"{worst:.3g}")}


def sick_sample(drawn: dict[str, Any], seed: int, _: Path) -> None:
    """The others keep every bit of output and gradient; the sick one shows it."""
    operator, z, grid = excited(drawn, seed, drawn["dtype"], 3)
    pick, grad = random.Random(seed), torch.randn_like(z)
    bad, value = z.clone(), pick.choice((torch.nan, torch.nan, torch.inf, -torch.inf))
    bad[1, pick.randrange(z.shape[1]), pick.randrange(z.shape[2])] = value
    clean, dirty = (gradients(operator, x, grad, grid=grid) for x in (z, bad))
    with torch.no_grad():
        clean["inference"], dirty["inference"] = operator(z, grid=grid), operator(bad, grid=grid)
    for name in ("out", "z", "inference"):
        assert torch.equal(clean[name][[0, 2]], dirty[name][[0, 2]]), f"{value} in one sample changed {name} of another"
        assert not dirty[name][1].isfinite().all(), f"{value} does not show in {name}"


# --- the cases --------------------------------------------------------------------------------------------------------

ROWS: dict[str, tuple[Callable[..., Any], list[tuple[str, int]], float]] = {
    "reference, training and inference against float64; error as a share of its bar":
        (against_float64, [("usual", 4960), ("long", 40)], 120.0),
    "fused kernels in Triton's interpreter against float64; error as a share of its bar": (interpreted, [("small", 60)], 300.0),
    "first and second derivatives against finite differences": (derivatives, [("tiny", 50)], 120.0),
    "500 repeats of forward and backward give the same bits": (repeats, [("batch", 20)], 300.0),
    "other samples in the batch change no bit of a sample": (one_of_a_batch, [("batch", 200)], 120.0),
    "NaN or infinity in one sample leaves the others' bits": (sick_sample, [("batch", 100)], 120.0),
}  # fmt: skip
GATE = "sparsemax and its cap: sum, ties, order, shift, NaN, derivative; error as a share of its bar"


def cases(place: Path) -> Iterator[Case]:
    for row, (check, counts, limit) in ROWS.items():
        for seed, size in enumerate(itertools.chain.from_iterable([size] * count for size, count in counts)):
            drawn = fuzz(random.Random(f"{check.__name__} {seed}"), check is interpreted, **SIZES[size])
            yield Case(row, told(check.__name__, seed, drawn), functools.partial(check, drawn, seed), limit)
    for seed in range(1000):
        yield Case(GATE, f"sparsemax {seed:03}", functools.partial(gate_properties, seed))
    yield from precision.cases()
