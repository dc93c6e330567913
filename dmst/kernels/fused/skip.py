"""The fused layer without its silent heads, for inference: `active.py` put together, beside `layer.forward`, which is dense.

    scores, membership | gate, active heads | s of these heads, their moments | c, or an output weight a sample | output
                                              (on Hopper, of many tokens: `active_hopper.py`, the last one with such a weight)
    short samples:       | gate, active heads | all the rest by one program a sample (`short.py`; of few heads `few.py`)

No host waits for the device on the way, so that CUDA graphs record it. Whether it pays depends on how many heads are silent,
which only the device knows: `skipping.choose_silent` measures it. A kernel that does not compile is reported once, and the
dense layer takes its place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dmst import rotary
from dmst.kernels import plan, registered
from dmst.kernels.arithmetic import aligned, cast
from dmst.kernels.attempt import attempt, remembered
from dmst.kernels.form import Form, Weights
from dmst.kernels.fused import active_hopper, calls, few
from dmst.kernels.fused.active import finish_active_kernel, gate_active_kernel, out_active_kernel, project_active_kernel
from dmst.kernels.fused.calls import F32
from dmst.kernels.fused.casts import cast_all
from dmst.kernels.fused.core import MODES
from dmst.kernels.fused.launch import Cut, launch, planned
from dmst.kernels.fused.short import short_kernel
from dmst.kernels.plan import over

_broken = remembered()


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d), no gradients; a sparsemax gate and a sigmoid membership."""
    key = registered._key(z, form, dtype)
    if not z.numel() or key in _broken:
        return registered.attend(z, weights, form, grid=grid, dtype=dtype)
    _, n, d = z.shape
    factors = rotary.factors(form.rotary, d, n, grid, step=plan.STEP, device=z.device, dtype=F32)

    def every_head(*_: Any) -> Tensor:
        return registered.attend(z, weights, form, grid=grid, dtype=dtype)

    def says(why: str) -> str:
        where = f"tokens {tuple(z.shape)} in {z.dtype}, {form.num_heads} heads"
        return (
            f"The kernels that leave silent heads out do not work here for {where} ({why}). Computing every head from now on."
        )

    return attempt(z, forward, every_head, (z, weights, form, factors, dtype), _broken, key, says)


def forward(z: Tensor, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype) -> Tensor:
    """The layer on z (b, n, d), with at least one token."""
    z, weights = aligned(z), calls.flat(weights)
    b, n, d = z.shape
    membership, sums = calls.score(z, weights, form, factors)
    assert sums is not None
    gate, active = open_gate(sums, n, form)
    tile = plan.short(n, d, dtype)
    by_columns = tile is not None and few.serves(z.device, dtype, n, d, d // form.num_heads)
    out = None if by_columns else weights.subspace.mT if weights.out is None else weights.out
    weight_in, weight_out, bias_in, bias_out = cast_all(dtype, weights.subspace, out, weights.subspace_bias, weights.out_bias)
    if by_columns:  # a row for each column of s, as the copy engine needs it
        weight_in = aligned(weight_in)
        weight_out = (weight_in if weights.out is None else _turned(weights.out, dtype)).mT
    if tile is not None:
        rest = (weights.theta, weight_in, weight_out, bias_in, bias_out, form, tile)
        return whole(cast(z, dtype), membership, gate, active, *rest, by_columns)
    by_engine = plan.by_engine(b * n) and active_hopper.serves(z.device, dtype, d, d // form.num_heads)
    weighted = form.mode != "proximal" and dtype != torch.float16  # which has no room for small pi s
    fold = weighted and plan.folds(n, d, by_engine)
    first, second = plan.active(n, d, dtype)
    given = (cast(z, dtype), aligned(weight_in), bias_in, membership, active)
    s, energy, mass = active_hopper.project(*given, weighted) if by_engine else project(*given, first, weighted)
    c = finish(energy, mass, gate, active, weights.theta, weight_out, n, form, fold)
    if by_engine and fold:
        return active_hopper.fold_out(s, c, bias_out, active)
    return project_out(s, c, weight_out, bias_out, membership, active, second, form, weighted, fold)


def _turned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The transpose in the compute dtype, in one copy."""
    return aligned(weight.mT.to(dtype, memory_format=torch.contiguous_format))


def open_gate(sums: Tensor, n: int, form: Form) -> tuple[Tensor, Tensor]:
    """The gate (b, k), and the active heads (b, 1 + k): their number, then which; the rest is not written."""
    b, tiles, k = sums.shape
    gate = torch.empty(b, k, device=sums.device, dtype=F32)
    active = torch.empty(b, 1 + k, device=sums.device, dtype=torch.int32)
    launch(gate_active_kernel, calls._plan_open_gate(form, b, tiles), sums, gate, active, n, tiles, form.gate_scale)
    return gate, active


def whole(
    z: Tensor, membership: Tensor, gate: Tensor, active: Tensor, theta: Tensor | None, weight_in: Tensor, weight_out: Tensor,
    bias_in: Tensor | None, bias_out: Tensor | None, form: Form, tile: plan.Short, by_columns: bool,
) -> Tensor:  # fmt: skip
    """The layer from its gate on, a program a sample (b, n, d). `by_columns`: samples of few heads are taken by `few`."""
    b, n, d = z.shape
    update, out = torch.empty_like(z), torch.empty_like(z)
    if by_columns:
        few.attend(z, membership, gate, active, theta, weight_in, weight_out.mT, bias_in, bias_out, out, form)
    tensors = (z, weight_in, bias_in, membership, gate, active, theta, weight_out, bias_out, update, out)
    cut = _plan_whole(form, b, d, tile, bias_in is not None, bias_out is not None, plan.FEW if by_columns else -1)
    launch(short_kernel, cut, *tensors, n, form.delta, form.sign, *weight_in.stride(), *weight_out.stride())
    return out


@lru_cache(1024)
def _plan_whole(form: Form, b: int, d: int, tile: plan.Short, bias_in: bool, bias_out: bool, least: int) -> Cut:
    k = form.num_heads
    p = d // k
    return planned(
        (b,),
        D=d, K=k, P=p, RUN=min(p & -p, 16), SLOTS=min(k, _heads(tile.columns, p)), ALL=plan.power_of_two(k),
        TOKENS=tile.tokens, COLUMNS=tile.columns, DEPTH=tile.depth, OUT=tile.out, STAGES=tile.stages,
        BIAS_IN=bias_in, BIAS_OUT=bias_out, DELTA=bool(form.delta), MODE=MODES[form.mode], LEAST=least, num_warps=tile.warps,
    )  # fmt: skip


def project(
    z: Tensor, weight: Tensor, bias: Tensor | None, membership: Tensor, active: Tensor, tile: plan.Product, weighted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """pi s or s of the active heads (b, n, d), and their energy (b, tiles, d) and mass (b, tiles, k) in each tile of tokens."""
    (b, n, d), k = z.shape, membership.shape[-1]
    tiles = over(n, tile.tokens)
    s = torch.empty_like(z)
    energy, mass = calls.partial_sums((b, tiles), k, d // k, z.device)
    cut = _plan_project(b, tiles, d, k, tile, bias is not None, weighted)
    rest = (n, tiles, *weight.stride())
    launch(project_active_kernel, cut, z, weight, bias, membership, active, s, energy, mass, *rest)
    return s, energy, mass


def _heads(columns: int, p: int) -> int:
    """Heads at most that so many neighbouring columns belong to."""
    return (columns + p - 2) // p + 1


@lru_cache(1024)
def _plan_project(b: int, tiles: int, d: int, k: int, tile: plan.Product, bias: bool, weighted: bool) -> Cut:
    p, blocks = d // k, over(d, tile.columns)
    return planned(
        (b * tiles * blocks,),
        D=d, K=k, P=p, RUN=min(p & -p, 16), SLOTS=min(k, _heads(tile.columns, p)), BLOCKS=blocks,
        TOKENS=tile.tokens, COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages,
        BIAS=bias, WEIGHTED=weighted, num_warps=tile.warps,
    )  # fmt: skip


def finish(
    energy: Tensor, mass: Tensor, gate: Tensor, active: Tensor, theta: Tensor | None, weight: Tensor, n: int, form: Form,
    fold: bool,
) -> Tensor:  # fmt: skip
    """c (b, d) in float32, or the output weight of each sample (b, d, d)."""
    b, tiles, k, p = energy.shape
    made = torch.empty(b, *(k * p,) * (1 + fold), device=energy.device, dtype=weight.dtype if fold else F32)
    into = (None, made) if fold else (made, None)
    rest = (n, tiles, form.delta, form.sign, *weight.stride())
    launch(
        finish_active_kernel,
        _plan_finish(form, b, p, tiles, fold, plan.PROGRAMS),
        energy,
        mass,
        gate,
        active,
        theta,
        weight,
        *into,
        *rest,
    )
    return made


@lru_cache(1024)
def _plan_finish(form: Form, b: int, p: int, tiles: int, fold: bool, programs: int) -> Cut:
    programs *= 2  # where it pays, about one head in four is on
    grid, shape = calls.folded_cut(b, form.num_heads, p, tiles, fold, programs)
    return planned(grid, **shape, DELTA=bool(form.delta), FOLD=fold, MODE=MODES[form.mode], num_warps=4)


def project_out(
    s: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, membership: Tensor, active: Tensor, tile: plan.Product,
    form: Form, weighted: bool, fold: bool,
) -> Tensor:  # fmt: skip
    """The update of the active heads, through the output weight (b, n, d)."""
    b, n, d = s.shape
    tiles = over(n, tile.tokens)
    out = torch.empty_like(s)
    cut = _plan_out(form, b, tiles, d, tile, bias is not None, weighted, fold)
    given, strides = ((c, None), c.stride()[1:]) if fold else ((weight, c), weight.stride())
    launch(out_active_kernel, cut, s, *given, bias, membership, active, out, n, tiles, *strides)
    return out


@lru_cache(1024)
def _plan_out(form: Form, b: int, tiles: int, d: int, tile: plan.Product, bias: bool, weighted: bool, fold: bool) -> Cut:
    k, blocks = form.num_heads, over(d, tile.columns)
    p = d // k
    return planned(
        (b * tiles * blocks,),
        D=d, K=k, P=p, RUN=min(p & -p, 16), SLOTS=min(k, _heads(tile.depth, p)), BLOCKS=blocks,
        TOKENS=tile.tokens, COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages,
        BIAS=bias, WEIGHTED=weighted, FOLD=fold, MODE=MODES[form.mode], ALL=plan.power_of_two(k), num_warps=tile.warps,
    )  # fmt: skip
