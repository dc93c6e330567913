"""A block's residual step from the kernels of `norm` and the layer: z' = z + keep * scale * attend(norm(z)).

    forward     z -> y = norm(z), scores (one pass) | the layer on y, from its scores on | z' = z + keep * out
    backward    keep * dz', rounded | the layer, but for the last pass | dz = dz' + the norm's adjoint of dy (one pass)

The scale is part of the output weight (`scale.py`, `rows.py`). Kept beside what the layer keeps: y in the compute dtype, mean
and rstd of each token; with save="nothing" none of it, and the backward pass begins with the norm.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dmst import rotary
from dmst.kernels import plan
from dmst.kernels.arithmetic import aligned
from dmst.kernels.form import Form, Weights
from dmst.kernels.fused import calls, layer
from dmst.kernels.fused.calls import F32, Kept
from dmst.kernels.fused.launch import Cut, launch, planned
from dmst.kernels.fused.norm import norm_adjoint_kernel, norm_score_kernel
from dmst.kernels.fused.rows import scaled, unscaled
from dmst.kernels.fused.scale import inner
from dmst.kernels.fused.turn import words
from dmst.kernels.plan import over


class Around(NamedTuple):
    """What stands around the layer."""

    norm_weight: Tensor  # (d)
    norm_bias: Tensor  # (d)
    scale: Tensor | None  # (d), or one number ()
    keep: Tensor | None  # (b, 1, 1): 0 where stochastic depth leaves a sample's update out


class Normed(NamedTuple):
    """What the norm leaves for the way back."""

    y: Tensor  # (b, n, d), compute dtype
    mean: Tensor  # (b, n)
    rstd: Tensor  # (b, n)


def forward(
    z: Tensor, around: Around, eps: float, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype
) -> tuple[Tensor, Normed, Kept]:
    z, weights = aligned(z), calls.flat(weights)
    normed, scored = norm_score(z, around, eps, weights, form, factors, dtype)
    given = (normed.y, scaled(weights, around.scale, dtype), form, factors, dtype, scored)
    out, kept = layer.forward(*given, (z, around.keep))
    return out, normed, kept


def backward(
    dout: Tensor, low: Tensor | None, z: Tensor, around: Around, eps: float, weights: Weights, form: Form,
    factors: rotary.Factors | None, dtype: torch.dtype, normed: Normed, kept: Kept, wants_z: bool, wants: Around,
    wanted: Weights,
) -> tuple[Tensor | None, dict[str, Tensor]]:  # fmt: skip
    """dz, and the gradient of each weight that is wanted. `low`: what `thinned` makes of dout, where that is known."""
    z, dout, weights, scored = aligned(z), aligned(dout), calls.flat(weights), None
    if form.save == "nothing":
        normed, scored = norm_score(z, around, eps, weights, form, factors, dtype)
    weigh = bool(wants.norm_weight or wants.norm_bias)
    below = bool(wants_z or weigh)
    given = (normed.y, scaled(weights, around.scale, dtype), form, factors, dtype, kept)
    asked = inner(wanted, weights, around.scale, bool(wants.scale))
    parts: dict[str, Tensor] = {}
    flow, grads = layer.backward(thinned(dout, around.keep, dtype) if low is None else low, *given, asked, below, scored, parts)
    dz = None
    if flow is not None:
        dz, part = norm_adjoint(flow, weights, form, factors, dout, z, around, normed, weigh)
        if part is not None:
            parts |= {"norm_weight": part[0], "norm_bias": part[1]}
    return dz, unscaled(grads | calls.add_up(parts), weights, around.scale, wanted)


# --- the norm -------------------------------------------------------------------------------------------------------


def norm_score(
    z: Tensor, around: Around, eps: float, weights: Weights, form: Form, factors: rotary.Factors | None, dtype: torch.dtype
) -> tuple[Normed, tuple[Tensor | None, Tensor | None]]:
    """The normed tokens, and their scores as `calls.score` returns them: none where the layer has none."""
    (b, n, d), k, scores = z.shape, form.num_heads, weights.assign is not None
    tokens, token_kind = words(z)
    assign, assign_kind = words(weights.assign) if weights.assign is not None else (None, 0)
    step = 1 if factors is None else factors.step
    biased, turned = weights.assign_bias is not None, factors is not None and scores
    tiles, cut = _plan_norm(form, z.shape, token_kind, assign_kind, scores, biased, turned, step)
    y = torch.empty(b, n, d, device=z.device, dtype=dtype)
    mean, rstd = (torch.empty(b, n, device=z.device, dtype=F32) for _ in range(2))
    out = torch.empty(b, n, k, device=z.device, dtype=F32) if scores else None
    sums = torch.empty(b, tiles, k, device=z.device, dtype=F32) if scores and form.gate is not None else None
    turn = (z,) * 4 if factors is None else (*factors.far, *factors.near)
    gamma, beta = around.norm_weight.contiguous(), around.norm_bias.contiguous()
    launch(
        norm_score_kernel, cut, tokens, gamma, beta, assign, weights.assign_bias, *turn,
        y, mean, rstd, out, sums, n, step, tiles, eps,
    )  # fmt: skip
    return Normed(y, mean, rstd), (out, sums)


@lru_cache(1024)
def _plan_norm(
    form: Form, shape: tuple[int, int, int], token_kind: int, assign_kind: int, scores: bool, bias: bool,
    turned: bool, step: int,
) -> tuple[int, Cut]:  # fmt: skip
    """And the tiles of a sample."""
    b, n, d = shape
    tile = plan.norm(d)
    tiles = over(n, tile.tokens)
    return tiles, planned(
        (b * tiles,),
        D=d, K=form.num_heads, TOKENS=tile.tokens, CHANNELS=tile.channels, Z=token_kind,
        ASSIGN=assign_kind, ROTARY=turned, LEVEL=turned and step % tile.tokens == 0, SCORES=scores, BIAS=bias,
        SIGMOID=form.membership == "sigmoid", SUMS=scores and form.gate is not None, num_warps=tile.warps, maxnreg=128,
    )  # fmt: skip


def norm_adjoint(
    flow: calls.Flow, weights: Weights, form: Form, factors: rotary.Factors | None, dout: Tensor, z: Tensor, around: Around,
    normed: Normed, weigh: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dz = dout + what the norm makes of the layer's flow; partial sums (2, programs, d) of the
    gradients of its weights.
    """
    b, n, d = z.shape
    tile = plan.norm_adjoint(d)
    run = over(over(b * n, tile.tokens), plan.NORM_PROGRAMS) * tile.tokens
    programs = over(b * n, run)
    dz = torch.empty_like(z)
    part = torch.empty(2, programs, d, device=z.device, dtype=F32) if weigh else None
    assign, assign_kind = words(weights.assign) if weights.assign is not None else (None, 0)
    turn, step = ((z,) * 4, 1) if factors is None else ((*factors.far, *factors.near), factors.step)
    turned, gated = factors is not None, flow.dpooled is not None
    cut = _plan_norm_adjoint(programs, d, form.num_heads, tile, assign_kind, flow.dscores is not None, turned, gated, weigh)
    gamma = around.norm_weight.contiguous()
    launch(
        norm_adjoint_kernel, cut, flow.product, flow.dscores, flow.dpooled, assign, *turn,
        dout, z, gamma, normed.mean, normed.rstd, dz, part, b * n, run, n, step,
    )  # fmt: skip
    return dz, part


@lru_cache(1024)
def _plan_norm_adjoint(
    programs: int, d: int, k: int, tile: plan.Tile, assign_kind: int, scores: bool, turned: bool, gated: bool, weigh: bool,
) -> Cut:  # fmt: skip
    return planned(
        (programs,),
        D=d, K=k, TOKENS=tile.tokens, CHANNELS=tile.channels, ASSIGN=assign_kind, ROTARY=turned, SCORES=scores,
        GATED=gated, WEIGHTS=weigh, num_warps=tile.warps,
    )  # fmt: skip


# --- the residual ---------------------------------------------------------------------------------------------------


def thinned(dout: Tensor, keep: Tensor | None, dtype: torch.dtype) -> Tensor:
    """keep * dout, in the compute dtype."""
    if keep is None:
        return dout.to(dtype)
    return torch.mul(dout, keep, out=torch.empty_like(dout, dtype=dtype))
