"""How far a layer is from float64, judged.

    found   what is tried
    plain   the readable reference in the same dtype, by autograd
    exact   the readable reference in float64, of the same rounded numbers
    ideal   the products in the dtypes that ours have, everything between them in float64

|error| <= bar |exact| + one subnormal an element, for plain and found alike (`BARS`; float32 at other scales than 1: 1e-4 and
5e-4). Found is off by at most twice (output) or three times (gradients) what plain is, and a tenth of the bar, for where plain
is nearly exact. The sums of cancelling terms (theta, temperature, the bias of the scores, and the weights of the scores where
large tokens saturate the memberships) are judged by the size of the terms.

Where a bar is not met, the product itself may be to blame, or the question: then the error may be three times that of ideal and
of half a bit of float32 on every input, or, for gradients at other scales than 1 (of TSSA also with up to three tokens), where
memberships saturate and what is left can be one cancelling sum, three times that of plain. Such cases are counted ("over").
Gradients beyond what float16 holds are not judged ("beyond"). Where float32 scores put another head or token on than float64
ones ("support"), that score must be within 1e-5 of the threshold, and found is compared with plain alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.kernels import Form, Weights, reference
from dmst.sparsemax import sparsemax
from tests.cases import relative
from tests.parity import BARS, CANCELLING, Layer, excess, nudged, size_of_terms

F32, F64 = torch.float32, torch.float64
ROUNDING = 0.1  # of the bar
MARGIN = 1e-5  # of a score from its threshold, relative to the largest score where that is above 1


def differentiate(attend: Callable[..., Tensor], made: Layer, wanted: list[str]) -> dict[str, Tensor | None]:
    """The output, and the gradient of each of the tokens and weights that is wanted."""
    given = {"z": made.z, **made.weights._asdict()}
    given = {name: None if x is None else x.detach().requires_grad_(name in wanted) for name, x in given.items()}
    asked = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    z = given.pop("z")
    out = attend(z, Weights(**given), made.form, grid=made.grid)
    found = torch.autograd.grad(out, tuple(asked.values()), made.grad.to(out.dtype), allow_unused=True) if asked else ()
    return {"output": out.detach(), **dict(zip(asked, found, strict=True))}


def plain(made: Layer, dtype: torch.dtype, wanted: list[str]) -> dict[str, Tensor | None]:
    return differentiate(functools.partial(reference.attend, dtype=dtype), made, wanted)


def ideal(made: Layer, dtype: torch.dtype, wanted: list[str]) -> dict[str, Tensor | None]:
    """The two large products in the dtype, that of the scores in float32, the rest in float64: the best our rule can be.

    The products are written out here, so that one that the reference takes in too low a precision is not called ideal.
    """

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, low: torch.dtype) -> Tensor:
        return F.linear(x.to(low), weight.to(low), None if bias is None else bias.to(low)).double()

    def score(z: Tensor, w: Weights, form: Form, grid: tuple[int, int] | None) -> Tensor | None:
        if w.assign is None:
            return None
        turned = rotary.table(form.rotary, z.shape[-1], z.shape[-2], grid, device=z.device, dtype=F64)
        return product(z if turned is None else rotary.rotate(z, turned), w.assign, w.assign_bias, F32).mT

    def project(z: Tensor, w: Weights, heads: int, _: torch.dtype) -> Tensor:
        return product(z, w.subspace, w.subspace_bias, dtype).unflatten(-1, (heads, -1)).transpose(1, 2)

    def out(update: Tensor, w: Weights, _: torch.dtype) -> Tensor:
        weight = w.subspace.mT if w.out is None else w.out
        return product(update.transpose(1, 2).flatten(2), weight, w.out_bias, dtype).to(dtype)

    with mock.patch.multiple(reference, score=score, project=project, project_out=out):
        return plain(made.map(Tensor.double), F64, wanted)


def switches(scores: Tensor, form: Form) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of what a layer switches on and off, heads and tokens: the scores, which are on, and how far each is from switching."""
    if form.gate in ("sparsemax", "relu"):
        pooled, gate = reference.gate_of(scores, form)
        assert pooled is not None and gate is not None
        yield pooled, gate != 0, edge(pooled, form.max_active_heads) if form.gate == "sparsemax" else pooled.abs()
    if form.membership == "token_sparsemax":
        yield scores, reference.membership_of(scores, None, None, form) != 0, edge(scores)


def edge(rows: Tensor, cap: int | None = None) -> Tensor:
    """How far each score is from the threshold of sparsemax, or with a cap from its neighbour, whichever is nearer."""
    value = sparsemax(rows, max_active=cap)
    far = (rows - torch.where(value > 0, rows - value, -torch.inf).amax(-1, keepdim=True)).abs()
    if cap is None:
        return far
    apart = (rows.unsqueeze(-1) - rows.unsqueeze(-2)).abs()
    return torch.minimum(far, apart.masked_fill(torch.eye(rows.shape[-1], dtype=torch.bool), torch.inf).amin(-1))


def margin(made: Layer) -> float | None:
    """How far the scores are from switching that are on in float32 and off in float64, or the other way; None if none is."""
    low, high = (reference.score(each.z, each.weights, each.form, each.grid) for each in (made, made.map(Tensor.double)))
    if low is None or high is None or not high.numel():
        return None
    worst = None
    for (scores, on, far), (_, mine, _) in zip(switches(high, made.form), switches(low, made.form), strict=True):
        if (on != mine).any():
            size = scores.abs().amax(-1, keepdim=True).clamp(min=1)
            worst = max(worst or 0.0, (far / size)[on != mine].max().item())
    return worst


def size_of(made: Layer, name: str) -> float:
    """sum |terms| of the sum that a gradient is. By the weights of the scores and by the temperature these are pi dL/dpi times
    what the score is made of, of which saturated memberships leave a difference."""
    if name not in ("assign", "temperature"):
        return size_of_terms(made, name)
    wide = made.map(Tensor.double)
    scores = reference.score(wide.z, wide.weights, wide.form, wide.grid)
    steps = reference.take_steps(wide.z, scores, wide.weights, wide.form, F64)
    membership = steps.membership.detach().requires_grad_()
    update = reference.token_statistics(steps.projected, membership, steps.gate, wide.weights.theta, form=wide.form)
    (by,) = torch.autograd.grad(reference.project_out(update, wide.weights, F64), membership, wide.grad)
    terms = (membership * by).detach().abs()
    if name == "assign":
        return torch.einsum("bkn,bnd->kd", terms, wide.z.abs()).norm().item()
    return (terms * reference.token_energy(steps.projected, wide.form)).sum((0, 2)).norm().item()


class Judge:
    """Holds one layer's exact answer, and the worst error so far as a share of its bar."""

    def __init__(self, made: Layer, dtype: torch.dtype, wanted: list[str], scale: float, name: str) -> None:
        self.made, self.dtype, self.wanted = made, dtype, wanted
        self.exact = plain(made.map(Tensor.double), F64, wanted)
        self.bars = (1e-4, 5e-4) if dtype == F32 and scale != 1 else BARS[dtype]
        self.scale, self.thin = scale, name == "tssa" and made.z.shape[1] <= 3
        self.margin = margin(made)
        self.error, self.over, self.beyond = 0.0, 0, 0

    @functools.cached_property
    def others(self) -> list[dict[str, Tensor | None]]:
        wide = self.made.map(Tensor.double)
        return [ideal(self.made, self.dtype, self.wanted), *(plain(wide.map(nudged), F64, self.wanted) for _ in range(4))]

    def blur(self, name: str, right: Tensor) -> float:
        """What `ideal` is off by, and what half a bit of float32 on every input does to exact, at worst of four tries."""
        best, *moved = (excess(other[name], right, self.dtype) for other in self.others)  # type: ignore[arg-type]
        return best + max(moved)

    def terms(self, name: str, right: Tensor) -> Iterator[float]:
        """The bar by the size of the terms, where they cancel."""
        if name in CANCELLING or (name == "assign" and self.scale != 1):
            yield self.bar(name) * size_of(self.made, name) / right.norm().clamp(min=1e-300).item()

    def bars_of(self, name: str, right: Tensor, usual: float) -> Iterator[float]:
        """The bar, then what else may count where it is not met."""
        yield self.bar(name)
        yield from self.terms(name, right)
        self.over = 1
        yield 3 * self.blur(name, right)
        if name != "output" and (self.scale != 1 or self.thin):
            yield 3 * usual

    def ratios_of(self, name: str, right: Tensor, usual: float) -> Iterator[float]:
        """Twice or three times the reference's error; where that is at rounding level, what rounding does."""
        ratio = 2 if name == "output" else 3
        yield ratio * usual + ROUNDING * self.bar(name)
        yield from (ratio * usual + ROUNDING * bar for bar in self.terms(name, right))
        yield 3 * self.blur(name, right)

    def bar(self, name: str) -> float:
        return self.bars[name != "output"]

    def look(self, who: str, found: dict[str, Tensor | None], usual: dict[str, Tensor | None]) -> None:
        assert found.keys() == self.exact.keys(), f"{who}: gradients of {list(found)}, asked for {list(self.exact)}"
        for name, right in self.exact.items():
            mine, other = found[name], usual[name]
            if right is None or mine is None or other is None:
                assert not any(x is not None and x.count_nonzero() for x in (mine, right)), f"{who}: gradient of {name}"
                continue
            assert mine.shape == right.shape, f"{who}: {name} is {tuple(mine.shape)}"
            if right.numel() and right.abs().max() > torch.finfo(self.dtype).max / 8:
                self.beyond = 1
                continue
            assert mine.isfinite().all(), f"{who}: {name} is not finite"
            off, theirs = excess(mine, right, self.dtype), relative(other, right)
            for rule in (self.bars_of, self.ratios_of)[self.margin is not None : 1 + (found is not usual)]:
                seen = []
                for bar in rule(name, right, theirs):
                    seen.append(bar)
                    if off <= bar:
                        break
                else:
                    raise AssertionError(f"{who}: {name} is off by {off:.2e}, bar {max(seen):.2e}, reference {theirs:.2e}")
                self.error = max(self.error, off / seen[-1] if off else 0.0)

    def facts(self) -> dict[str, Any]:
        if self.margin is not None:
            assert self.margin < MARGIN, f"another support, with a margin of {self.margin:.1e}"
        counts = {"over": self.over, "beyond": self.beyond, "support": int(self.margin is not None)}
        return {"error": float(f"{self.error:.3g}"), **{key: count for key, count in counts.items() if count}}
