"""One function a kernel of this folder: allocate, launch. `layer` puts them together.

What a launch has from the shape and the form alone is planned once (`lru_cache`): the host has more to do than the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.kernels import plan
from dmst.kernels.form import MEMBERSHIP, Form, Weights
from dmst.kernels.fused import hopper, resident, stream
from dmst.kernels.fused.adjoint import adjoint_kernel
from dmst.kernels.fused.by_position import position_assign_kernel, position_score_kernel, rotated_kernel
from dmst.kernels.fused.columns import columns_kernel, totals_kernel
from dmst.kernels.fused.core import MODES
from dmst.kernels.fused.energy import energy_adjoint_kernel, energy_kernel
from dmst.kernels.fused.gate import GATES
from dmst.kernels.fused.launch import Cut, launch, planned
from dmst.kernels.fused.moments import finish_kernel, gate_kernel, moments_kernel
from dmst.kernels.fused.score import GROUP, score_kernel
from dmst.kernels.fused.score_adjoint import gate_adjoint_kernel, into_assign_kernel, into_tokens_kernel
from dmst.kernels.fused.turn import words
from dmst.kernels.fused.update import gather_kernel, unfold_kernel, update_kernel
from dmst.kernels.plan import over

F32 = torch.float32


class Kept(NamedTuple):
    """`reference.Steps` in memory order; None where a layer has none."""

    projected: Tensor  # (b, n, k p); where `_keeps_weighted`, each head's times its membership
    membership: Tensor  # (b, n, k)
    pooled: Tensor | None  # (b, k)
    gate: Tensor | None  # (b, k)
    second_moment: Tensor  # (b, k, p)
    divisor: Tensor  # (b, k)
    channel: Tensor | None  # (b, k, p), TSSA's energy of each channel


class Flow(NamedTuple):
    """What reaches a layer's tokens, not yet added up: dz = product + rot^T sum_k (dscores + dpooled)_k assign_k."""

    product: Tensor  # (b, n, d): dS U^T
    dscores: Tensor | None = None  # (b, n, k); None where the layer has no scores
    dpooled: Tensor | None = None  # (b, k): each token's share of the gate


NOTHING = Kept(*(None,) * len(Kept._fields))  # type: ignore[arg-type]  # what a layer with save="nothing" keeps


def flat(weights: Weights) -> Weights:
    """The small weights as the kernels read them, one number after the other."""
    _, subspace_bias, assign, assign_bias, _, out_bias, temperature, _ = weights
    small = (subspace_bias, assign, assign_bias, out_bias, temperature)
    if all(x is None or x.is_contiguous() for x in small):
        return weights
    names = ("subspace_bias", "assign", "assign_bias", "out_bias", "temperature")
    return weights._replace(**{name: x.contiguous() for name, x in zip(names, small, strict=True) if x is not None})


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *onto: Tensor | None) -> Tensor:
    """x W + bias; onto z and keep, where it is made `by_hand`: z + keep * that."""
    return hopper.product(x, weight, bias, *onto) if by_hand(x) else F.linear(x, weight, bias)


def by_hand(x: Tensor) -> bool:
    """Whether our own product serves."""
    b, n, d = x.shape
    return plan.by_hand(b * n) and hopper.serves(x.device, x.dtype, d, 16) and unhurried(x)


def unhurried(x: Tensor) -> bool:
    """Whether the device has more to do than the host: many tokens, or a stream of its own, on which CUDA graphs are warmed up
    and recorded. Elsewhere fewer launches are faster."""
    return x.shape[0] * x.shape[1] >= plan.BUSY or (x.is_cuda and torch._C._cuda_getCurrentRawStream(x.get_device()) != 0)


def column_sums(x: Tensor, part: Tensor | None = None) -> Tensor:
    """In parts, a row a program; `part` has room for more rows after those."""
    rows, d = x.shape
    splits, span = _column_splits(rows)
    if part is None:
        part = torch.empty(splits, d, device=x.device, dtype=F32)
    launch(columns_kernel, _plan_columns(splits, d), x, part, rows, span)
    return part


def _column_splits(rows: int) -> tuple[int, int]:
    """How many programs, and the rows of each."""
    span = max(64, over(rows, 132))
    return over(rows, span), span


def add_up(parts: dict[str, Tensor], weights: Weights | None = None) -> dict[str, Tensor]:
    """Each a sum over its first axis, six at most by one launch; in the dtypes of the weights, or in float32."""
    if not parts:
        return {}
    likes = {name: getattr(weights, name, None) for name in parts}  # None: it may be wanted of a weight that is not there
    dtypes = {name: F32 if like is None else like.dtype for name, like in likes.items()}
    made = {name: torch.empty(part.shape[1:], device=part.device, dtype=dtypes[name]) for name, part in parts.items()}
    count = len(parts)
    spare = (None,) * (6 - count), (0,) * (6 - count)
    rows, columns = [len(part) for part in parts.values()], [out.numel() for out in made.values()]
    cut = _plan_totals(tuple(columns))
    sizes = (*rows, *spare[1], *columns, *spare[1])
    launch(totals_kernel, cut, *parts.values(), *spare[0], *made.values(), *spare[0], *sizes)
    return made


@lru_cache(1024)
def _plan_totals(columns: tuple[int, ...]) -> Cut:
    return planned((sum(over(c, 8) for c in columns),), COUNT=len(columns), ROWS=512, COLUMNS=8, num_warps=8)


@lru_cache(1024)
def _plan_columns(splits: int, d: int) -> Cut:
    columns = min(128, max(8, plan.power_of_two(d)))
    return planned((splits, over(d, columns)), D=d, ROWS=min(512, 8192 // columns), COLUMNS=columns, STAGES=3, num_warps=4)


def partial_sums(rows: tuple[int, ...], k: int, p: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(*rows, k, p, device=device, dtype=F32), torch.empty(*rows, k, device=device, dtype=F32)


def _turn_arguments(factors: rotary.Factors | None, unused: Tensor) -> tuple[Any, ...]:
    return (unused,) * 4 if factors is None else (*factors.far, *factors.near)


def _step(factors: rotary.Factors | None) -> int:
    return 1 if factors is None else factors.step


def _turned(d: int, tile: plan.Tile, turned: bool, step: int) -> dict[str, Any]:
    """What the kernels that rotate have in common."""
    return {
        "D": d, "TOKENS": tile.tokens, "CHANNELS": tile.channels, "num_warps": tile.warps,
        "ROTARY": turned, "LEVEL": turned and step % tile.tokens == 0,
    }  # fmt: skip


def _by_position(z: Tensor, form: Form, factors: rotary.Factors | None) -> bool:
    return plan.by_position(z.shape[0], form.num_heads, z.dtype, factors is not None)


def _rotated(z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None) -> Tensor:
    """rot_n^T assign_k in three terms of z's dtype, (n, 3, k padded, d)."""
    assert weights.assign is not None and factors is not None
    _, n, d = z.shape
    assign, assign_kind = words(weights.assign)
    cut = _plan_rotated(n, d, form.num_heads, assign_kind)
    out = torch.empty(n, 3, cut.constants["HEADS"], d, device=z.device, dtype=z.dtype)
    launch(rotated_kernel, cut, assign, *factors.far, *factors.near, out, factors.step, n)
    return out


@lru_cache(1024)
def _plan_rotated(n: int, d: int, k: int, assign_kind: int) -> Cut:
    pairs = min(64, plan.power_of_two(d // 2))
    heads = max(8, plan.power_of_two(k))
    return planned((n, over(d // 2, pairs)), D=d, K=k, HEADS=heads, PAIRS=pairs, ASSIGN=assign_kind, num_warps=4)


def _position_score(z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None) -> tuple[Tensor, Tensor | None]:
    b, n, d = z.shape
    out = torch.empty(b, n, form.num_heads, device=z.device, dtype=F32)
    scores = torch.empty_like(out) if form.gate is not None else None
    cut = _plan_position_score(form, b, n, d, weights.assign_bias is not None)
    launch(position_score_kernel, cut, z, _rotated(z, weights, form, factors), weights.assign_bias, out, scores, b, n)
    return out, scores


@lru_cache(1024)
def _plan_position_score(form: Form, b: int, n: int, d: int, bias: bool) -> Cut:
    k, batch = form.num_heads, plan.position_score(b, d)
    return planned(
        (n, over(b, batch.samples)),
        D=d, K=k, HEADS=max(8, plan.power_of_two(k)), SAMPLES=batch.samples, CHANNELS=batch.channels,
        BIAS=bias, SIGMOID=form.membership == "sigmoid", SUMS=form.gate is not None, STAGES=3, num_warps=batch.warps,
    )  # fmt: skip


def score(z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None) -> tuple[Tensor, Tensor | None]:
    assert weights.assign is not None
    if _by_position(z, form, factors) and unhurried(z):
        return _position_score(z, weights, form, factors)
    (b, n, _), step = z.shape, _step(factors)
    tokens, token_kind = words(z)
    assign, assign_kind = words(weights.assign)
    biased = weights.assign_bias is not None
    tiles, cut = _plan_score(form, z.shape, token_kind, assign_kind, biased, factors is not None, step)
    out = torch.empty(b, n, form.num_heads, device=z.device, dtype=F32)
    sums = torch.empty(b, tiles, form.num_heads, device=z.device, dtype=F32) if form.gate is not None else None
    turn = _turn_arguments(factors, z)
    launch(score_kernel, cut, tokens, assign, weights.assign_bias, *turn, out, sums, n, step, tiles)
    return out, sums


@lru_cache(1024)
def _plan_score(
    form: Form, shape: tuple[int, int, int], token_kind: int, assign_kind: int, bias: bool, turned: bool, step: int
) -> tuple[int, Cut]:
    """And the tiles of a sample."""
    (b, n, d), k = shape, form.num_heads
    tile = plan.score(d)
    tiles = over(n, tile.tokens)
    constants = {"K": k, "Z": token_kind, "ASSIGN": assign_kind, "BIAS": bias, "SIGMOID": form.membership == "sigmoid"}
    constants |= {"SUMS": form.gate is not None, "maxnreg": 128, **_turned(d, tile, turned, step)}
    return tiles, planned((b * tiles, over(k, GROUP)), **constants)


def membership(
    scores: Tensor | None, projected: Tensor, weights: Weights, form: Form, sweep: plan.Sweep
) -> tuple[Tensor, Tensor | None]:
    """pi (b, n, k), and for TSSA the energy of each channel."""
    if form.membership == "sigmoid":
        assert scores is not None
        return scores, None
    if form.membership != "energy":
        assert scores is not None
        value = MEMBERSHIP[form.membership].value(scores.mT, form).mT.contiguous()
        return (value * value.shape[1] if form.token_sparse_rescale else value), None
    b, n, d = projected.shape
    k, p = form.num_heads, d // form.num_heads
    channel = None
    if form.normalize_tokens:
        energy, mass = partial_sums((b, sweep.splits), k, p, projected.device)
        moments(projected, None, None, None, energy, mass, None, None, None, None, form, sweep, None)
        channel = energy.sum(1).clamp_(min=1e-24)
    out = torch.empty(b, n, k, device=projected.device, dtype=F32)
    tiles, cut = _plan_energy(b, n, k, p, channel is not None, scores is not None)
    launch(energy_kernel, cut, projected, channel, weights.temperature, scores, out, n, tiles)
    return out, channel


@lru_cache(1024)
def _plan_energy(b: int, n: int, k: int, p: int, normalize: bool, scored: bool) -> tuple[int, Cut]:
    """And the tiles of a sample."""
    heads, width = plan.power_of_two(k), plan.power_of_two(p)
    tokens = max(1, min(16, 4096 // (heads * width)))
    tiles = over(n, tokens)
    constants = {"K": k, "P": p, "HEADS": heads, "WIDTH": width, "TOKENS": tokens}
    return tiles, planned((b * tiles,), **constants, NORMALIZE=normalize, SCORED=scored)


def open_gate(sums: Tensor | None, n: int, form: Form) -> tuple[Tensor | None, Tensor | None]:
    """The gate and the pooled scores (b, k), from sums (b, tiles, k) of the scores."""
    if form.gate is None:
        return None, None
    assert sums is not None
    b, tiles, k = sums.shape
    gate = torch.empty(b, k, device=sums.device, dtype=F32)
    pooled = torch.empty_like(gate)
    launch(gate_kernel, _plan_open_gate(form, b, tiles), sums, gate, pooled, n, tiles, form.gate_scale)
    return gate, pooled


@lru_cache(1024)
def _plan_open_gate(form: Form, b: int, tiles: int) -> Cut:
    rows = min(1024, 8192 // plan.power_of_two(form.num_heads), max(16, plan.power_of_two(tiles)))
    grid, constants = _plan_gate(form, b)
    return planned(grid, **(constants | {"ROWS": rows, "num_warps": 1 if rows <= 128 else 4}))


@lru_cache(1024)
def _plan_gate(form: Form, b: int) -> Cut:
    k, active = form.num_heads, form.max_active_heads or 0
    return planned((b,), K=k, ALL=plan.power_of_two(k), GATE=GATES[form.gate], ACTIVE=active, num_warps=1)


def moments(
    projected: Tensor, weight: Tensor | None, channel: Tensor | None, sums: Tensor | None, energy: Tensor, mass: Tensor,
    gate: Tensor | None, pooled: Tensor | None, theta: Tensor | None, update: Tensor | None, form: Form, sweep: plan.Sweep,
    route: str | None,
) -> None:  # fmt: skip
    """Without a route: the sums alone, for TSSA's energies."""
    b, n, d = projected.shape
    launch(
        moments_kernel, _plan_moments(form, b, d, sweep, route, weight is not None, channel is not None),
        projected, weight, channel, sums, theta, energy, mass, gate, pooled, update,
        n, sweep.span, sweep.splits, 0 if sums is None else sums.shape[1], form.gate_scale, form.delta, form.sign,
    )  # fmt: skip


@lru_cache(1024)
def _plan_moments(form: Form, b: int, d: int, sweep: plan.Sweep, route: str | None, weighted: bool, normalized: bool) -> Cut:
    k = form.num_heads
    return planned(
        (b, sweep.splits, over(k, sweep.heads)),
        K=k, P=d // k, ALL=plan.power_of_two(k), HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        UNIFORM=not weighted or (form.uniform_moment and not normalized), NORMALIZE=normalized,
        FINISH=route is not None and sweep.splits == 1, DELTA=bool(form.delta),
        GATE=GATES[form.gate] if route is not None else 0, ACTIVE=form.max_active_heads or 0,
        UPDATE=route == "along", WEIGHTED=route == "fold", MODE=MODES[form.mode], STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip


def finish(
    energy: Tensor, mass: Tensor, gate: Tensor | None, weight: Tensor, folded: Tensor | None, n: int, form: Form
) -> tuple[Tensor, Tensor]:
    b, splits, k, p = energy.shape
    moment, divisor = partial_sums((b,), k, p, energy.device)
    cut = _plan_finish(form, b, p, splits, gate is not None, folded is not None, plan.PROGRAMS)
    rest = (n, splits, form.delta, form.sign, *weight.stride())
    launch(finish_kernel, cut, energy, mass, moment, divisor, gate, weight, folded, *rest)
    return moment, divisor


@lru_cache(1024)
def _plan_finish(form: Form, b: int, p: int, splits: int, gated: bool, fold: bool, programs: int) -> Cut:
    grid, shape = folded_cut(b, form.num_heads, p, splits, fold, programs)
    rest = {"DELTA": bool(form.delta), "FOLD": fold, "MODE": MODES[form.mode], "num_warps": 4}
    return planned(grid, **shape, **rest, UNIFORM=form.uniform_moment, GATED=gated)


def folded_cut(b: int, k: int, p: int, splits: int, fold: bool, programs: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """For a head of a sample, partial sums and the rows of its output weight. Few samples: many programs, which add up each for
    itself.
    """
    d, width = k * p, plan.power_of_two(p)
    parts = min(256, max(16, plan.power_of_two(splits)), 16384 // width)  # 128 numbers a thread
    span = over(over(d, 64), min(over(d, 64), over(programs, b * k))) * 64
    shape = {"D": d, "K": k, "P": p, "WIDTH": width, "PARTS": parts, "ROWS": 64, "SPAN": span}
    return (b, k, over(d, span) if fold else 1), shape


def update(kept: Kept, weights: Weights, form: Form, sweep: plan.Sweep, *, weighted: bool) -> Tensor:
    b, n, d = kept.projected.shape
    out = torch.empty_like(kept.projected)
    launch(
        update_kernel, _plan_update(form, b, d, sweep, kept.gate is not None, weighted),
        kept.projected, kept.membership, kept.second_moment, kept.gate, weights.theta, out, n, sweep.span, form.sign,
    )  # fmt: skip
    return out


@lru_cache(1024)
def _plan_update(form: Form, b: int, d: int, sweep: plan.Sweep, gated: bool, weighted: bool) -> Cut:
    k = form.num_heads
    return planned(
        (b, sweep.splits, over(k, sweep.heads)),
        K=k, P=d // k, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        MODE=MODES[form.mode], GATED=gated, WEIGHTED=weighted, STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip


def products(dout: Tensor, weighted: Tensor) -> Tensor:
    """dout_b^T pi s (b, d, d). Few samples go in pieces: the library is slower at sums over more tokens."""
    b, n, d = dout.shape
    pieces = plan.pieces(b, n)
    cut = (b * pieces, n // pieces, d)
    made = dout.view(cut).mT @ weighted.view(cut)
    return made if pieces == 1 else made.view(b, pieces, d, d).sum(1, dtype=F32)


def unfold(product: Tensor, kept: Kept, form: Form, dtype: torch.dtype) -> Tensor:
    """The gradient of the output weight from dout_b^T pi s (b, d, d)."""
    b, d, _ = product.shape
    out = torch.empty(d, d, device=product.device, dtype=dtype)
    cut = _plan_unfold(form, b, d, kept.gate is not None)
    launch(unfold_kernel, cut, product, kept.second_moment, kept.gate, out, b, form.sign)
    return out


@lru_cache(1024)
def _plan_unfold(form: Form, b: int, d: int, gated: bool) -> Cut:
    k = form.num_heads
    return planned(
        (over(d, 8), k),
        D=d, K=k, P=d // k, WIDTH=plan.power_of_two(d // k), ROWS=8, SAMPLES=min(4, plan.power_of_two(b)),
        MODE=MODES[form.mode], GATED=gated, STAGES=3,
    )  # fmt: skip


def gather(product: Tensor, weight_out: Tensor, form: Form) -> Tensor:
    """A of the adjoint (b, k, p) from the same products: no sweep for it."""
    (b, d, _), k = product.shape, form.num_heads
    out = torch.empty(b, k, d // k, device=product.device, dtype=F32)
    launch(gather_kernel, _plan_gather(b, d, k), product, weight_out, out, *weight_out.stride())
    return out


@lru_cache(1024)
def _plan_gather(b: int, d: int, k: int) -> Cut:
    """Every row at once, if so many fit: by a quarter of them at a time it took a third longer."""
    width = plan.power_of_two(d // k)
    rows = max(16, min(plan.power_of_two(d), 32768 // width))
    warps = max(1, min(16, rows * width // 2048))
    return planned((b, k), D=d, K=k, P=d // k, WIDTH=width, ROWS=rows, num_warps=warps)


def pulls(kept: Kept, form: Form, weighted: bool) -> bool:
    """Whether a program holds all tokens of a sample and takes both sweeps of the adjoint from there, with the update."""
    b, n, d = kept.projected.shape
    k, p = form.num_heads, d // form.num_heads
    flow = kept.projected
    return not weighted and bool(plan.whole(b, n, k, p) and resident.fits_pull(n, d, p, flow.dtype, flow.device))


def adjoint(
    flow: Tensor, kept: Kept, weights: Weights, form: Form, sweep: plan.Sweep, wants_bias: bool, weighted: bool,
    total: Tensor | None = None, wants_update: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dS over G, the gradients of scores (or membership), gate, theta (b, k), and of the bias (b, splits, k, p); the update.

    `total`: A (b, k, p), where it is known; then one sweep will do. The update is made where it `pulls`, if it is wanted.
    """
    b, n, d = kept.projected.shape
    k, p = form.num_heads, d // form.num_heads
    late = form.membership == "energy"  # there the bias is summed in the next pass
    sigmoid, wants_bias = form.membership == "sigmoid", wants_bias and not late
    given = (flow, kept.projected, kept.membership, kept.second_moment, kept.gate, kept.divisor, weights.theta)
    options: dict[str, Any] = {"mode": form.mode, "sign": form.sign, "uniform": form.uniform_moment, "sigmoid": sigmoid}
    if pulls(kept, form, weighted):
        return resident.pull(*given, wants_bias=wants_bias, wants_update=wants_update, **options)
    new: dict[str, Any] = {"device": flow.device, "dtype": F32}
    split = sweep.splits > 1 and total is None
    part = torch.empty(b, sweep.splits, k, p, **new) if split else None
    dscores = dgate = dtheta = dbias = None

    def sweeps(total: Tensor | None, first: bool, second: bool) -> None:
        rows = 0 if total is None else total.shape[1]
        cut = _plan_adjoint(form, b, p, sweep, kept.gate is not None, weighted, (first, second), dbias is not None)
        launch(adjoint_kernel, cut, *given, total, dscores, dgate, dtheta, dbias, n, sweep.span, sweep.splits, rows, form.sign)

    if part is not None:
        sweeps(part, True, False)
    if stream.serves(p, flow.dtype, flow.device) and (part is not None or total is not None):
        known = part.sum(1) if total is None else total  # type: ignore[union-attr]
        return *stream.pull(*given, known, sweep, weighted=weighted, wants_bias=wants_bias, **options), None
    dscores = torch.empty(b, n, k, **new)
    dgate = torch.empty(b, k, **new) if kept.gate is not None else None
    dtheta = torch.empty(b, k, **new) if form.mode == "proximal" else None
    dbias = torch.empty(b, sweep.splits, k, p, **new) if wants_bias else None
    rows = part if total is None else total.unsqueeze(1)
    sweeps(rows, rows is None, True)
    return dscores, dgate, dtheta, dbias, None


@lru_cache(1024)
def _plan_adjoint(
    form: Form, b: int, p: int, sweep: plan.Sweep, gated: bool, weighted: bool, phase: tuple[bool, bool], bias: bool
) -> Cut:
    k = form.num_heads
    return planned(
        (b, sweep.splits, over(k, sweep.heads)),
        K=k, P=p, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        MODE=MODES[form.mode], GATED=gated, UNIFORM=form.uniform_moment, SIGMOID=form.membership == "sigmoid",
        WEIGHTED=weighted, SUM=phase[0], PULL=phase[1], BIAS=bias, STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip


def energy_adjoint(
    flow: Tensor, dlogits: Tensor, kept: Kept, weights: Weights, form: Form, sweep: plan.Sweep, wants_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Adds to dS what the energies ask of it; the gradients of the temperature (k, 1) and of the bias."""
    b, n, d = kept.projected.shape
    k, p = form.num_heads, d // form.num_heads
    part, mass = partial_sums((b, sweep.splits), k, p, flow.device)
    moments(kept.projected, dlogits, kept.channel, None, part, mass, None, None, None, None, form, sweep, None)
    mean = part.sum(1)  # (b, k, p): sum_n dlogits s^2 / E
    dtemperature = mean.sum((0, 2)).unsqueeze(-1)
    if kept.channel is not None:  # at the floor the divisor is a constant
        mean = torch.where(kept.channel > 1e-24, mean, 0)
    dbias = torch.empty(b, sweep.splits, k, p, device=flow.device, dtype=F32) if wants_bias else None
    cut = _plan_energy_adjoint(b, k, p, sweep, kept.channel is not None, wants_bias)
    given = (flow, kept.projected, dlogits, kept.channel, mean, weights.temperature, dbias)
    launch(energy_adjoint_kernel, cut, *given, n, sweep.span, sweep.splits)
    return dtemperature, dbias


@lru_cache(1024)
def _plan_energy_adjoint(b: int, k: int, p: int, sweep: plan.Sweep, normalize: bool, bias: bool) -> Cut:
    return planned(
        (b, sweep.splits, over(k, sweep.heads)),
        K=k, P=p, HEADS=sweep.heads, WIDTH=sweep.width, TOKENS=sweep.tokens,
        NORMALIZE=normalize, BIAS=bias, STAGES=sweep.stages, num_warps=sweep.warps,
    )  # fmt: skip


def score_adjoint(
    z: Tensor, flow: Tensor, weight_in: Tensor, dscores: Tensor, dgate: Tensor | None, kept: Kept, weights: Weights,
    form: Form, factors: rotary.Factors | None, wanted: Weights, wants_z: bool, grads: dict[str, Tensor],
    parts: dict[str, Tensor], apart: bool,
) -> Tensor | Flow | None:  # fmt: skip
    """dz = dS U^T + what the scores ask, in place where the product has its dtype, or `apart`; `assign`'s gradients."""
    b, n, d = z.shape
    assert weights.assign is not None
    dpooled, k, splits, dbias = None, form.num_heads, 0, None
    if wanted.assign_bias:  # rows of sums over tokens, and below them what each sample's gate asks of its tokens together
        splits, _ = _column_splits(b * n)
        dbias = torch.empty(splits + (0 if dgate is None else b), k, device=z.device, dtype=F32)
        parts["assign_bias"] = column_sums(dscores.view(-1, k), dbias)
    if dgate is not None:
        dpooled = torch.empty_like(dgate)
        launch(gate_adjoint_kernel, _plan_gate(form, b), dgate, kept.pooled, dpooled, dbias, splits, n, form.gate_scale)
    if wanted.assign:
        parts["assign"] = _assign_adjoint(z, dscores, dpooled, form, factors)
    if not wants_z:
        return None
    product = flow @ weight_in
    if apart:
        return Flow(product.view_as(z), dscores, dpooled)
    dz = product.view_as(z) if product.dtype == z.dtype else torch.empty_like(z)
    assign, assign_kind = words(weights.assign)
    step = _step(factors)
    tiles, cut = _plan_into_tokens(form, b, n, d, assign_kind, dpooled is not None, factors is not None, step)
    launch(
        into_tokens_kernel, cut, assign, dscores, dpooled, product, *_turn_arguments(factors, z), dz, n, step, tiles
    )  # fmt: skip
    return dz


@lru_cache(1024)
def _plan_into_tokens(
    form: Form, b: int, n: int, d: int, assign_kind: int, gated: bool, turned: bool, step: int
) -> tuple[int, Cut]:
    """And the tiles of a sample."""
    tile = plan.into_tokens(d)
    tiles, grid = over(n, tile.tokens), over(d, tile.channels)
    constants = {"K": form.num_heads, "ASSIGN": assign_kind, "GATED": gated, **_turned(d, tile, turned, step)}
    return tiles, planned((b * tiles, grid), **constants)


def _assign_adjoint(z: Tensor, dscores: Tensor, dpooled: Tensor | None, form: Form, factors: rotary.Factors | None) -> Tensor:
    b, n, d = z.shape
    k = form.num_heads
    if _by_position(z, form, factors):
        assert factors is not None
        run, cut = _plan_position_assign(b, n, d, k, dpooled is not None)
        part = torch.empty(over(n, run), k, d, device=z.device, dtype=F32)
        given = (z, dscores, dpooled, *factors.far, *factors.near)
        launch(position_assign_kernel, cut, *given, part, b, n, factors.step, run)
        return part
    tokens, token_kind = words(z)
    turned, step = factors is not None, _step(factors)
    tiles, run, cut = _plan_into_assign(b, n, d, k, token_kind, dpooled is not None, turned, step, plan.ASSIGN_PROGRAMS)
    part = torch.empty(cut.grid[0], k, d, device=z.device, dtype=F32)
    turn = _turn_arguments(factors, z)
    launch(into_assign_kernel, cut, tokens, dscores, dpooled, *turn, part, n, step, tiles, run, b * tiles)
    return part


@lru_cache(1024)
def _plan_into_assign(
    b: int, n: int, d: int, k: int, token_kind: int, gated: bool, turned: bool, step: int, programs: int
) -> tuple[int, int, Cut]:
    """And the tiles of a sample, and those of a program."""
    tile = plan.into_assign(d)
    tiles = over(n, tile.tokens)
    run = over(b * tiles, programs)
    grid = (over(b * tiles, run), over(d, tile.channels), over(k, GROUP))
    return tiles, run, planned(grid, K=k, Z=token_kind, GATED=gated, **_turned(d, tile, turned, step))


@lru_cache(1024)
def _plan_position_assign(b: int, n: int, d: int, k: int, gated: bool) -> tuple[int, Cut]:
    """And the positions of a program: a row of partial sums each."""
    batch = plan.position_adjoint(b, d)
    run = max(1, n * over(d, batch.channels) // plan.POSITION_PROGRAMS)
    return run, planned(
        (over(n, run), over(d, batch.channels)),
        D=d, K=k, HEADS=max(8, plan.power_of_two(k)), GATED=gated,
        SAMPLES=batch.samples, CHANNELS=batch.channels, STAGES=3, num_warps=batch.warps,
    )  # fmt: skip
