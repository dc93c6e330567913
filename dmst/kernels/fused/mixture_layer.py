"""GMSA between the two products of a layer.

steps    keys and gate -> memberships, means and spreads -> update
pull     G -> dS; the gradients of keys and gate, and of what else has some
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst.kernels import mixture
from dmst.kernels.arithmetic import aligned, cast, wide
from dmst.kernels.fused import front
from dmst.kernels.fused.gate import gate_adjoint, open_gate
from dmst.kernels.fused.launch import total
from dmst.kernels.fused.mixture import group_adjoint, group_update
from dmst.kernels.mixture import Grid, MixtureForm, MixtureWeights


class Kept(NamedTuple):
    """For the backward pass; None where a layer has no gate."""

    projected: Tensor  # (b, n, k p)
    keys: Tensor  # (b, n, k r)
    centre: Tensor  # (b k, g, r + 1), sums of the keys of each cell, and its size
    gate: Tensor | None  # (b, k)
    pooled: Tensor | None  # (b, k)


def steps(z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid) -> tuple[Tensor, Kept]:
    assign = None if weights.gate is None else aligned(weights.gate)
    key, key_bias = aligned(weights.key.to(z.dtype)), cast(weights.key_bias, z.dtype)
    turn = front.tables(form.rotary, z, grid)
    _, sums, keys = front.front(z, *turn, assign, None, key, key_bias, False, assign is not None)
    gate = pooled = None
    if assign is not None:
        gate, pooled = open_gate(sums, z.shape[1], *_gate(form))
    projected = F.linear(z, weights.subspace.to(z.dtype))
    _, w, t = _strength(z, gate, weights.theta, form)
    heads, sharpness, mode = _how(form)
    update, centre = group_update(projected, keys, _cells(z, form, grid), w, t, heads, form.groups, sharpness, mode)
    return update, Kept(projected, keys, centre, gate, pooled)


def _gate(form: MixtureForm) -> tuple[str, float, int]:
    return str(form.gate), form.gate_scale, 0


def _strength(z: Tensor, gate: Tensor | None, theta: Tensor | None, form: MixtureForm) -> tuple[Tensor, Tensor, Tensor]:
    """The gate, w and t, (b, k)."""
    if gate is None:
        gate = torch.ones(z.shape[0], form.num_heads, dtype=torch.float32, device=z.device)
    w = gate.square()
    if form.mode == "proximal":
        assert theta is not None
        return gate, w, wide(theta).flatten() * w
    return gate, w, gate if form.mode == "listing" else w


def _cells(z: Tensor, form: MixtureForm, grid: Grid) -> Tensor:
    return mixture.cell_of(z.shape[-2], grid, form.groups, device=z.device, dtype=torch.int32)


def _how(form: MixtureForm) -> tuple[int, float, int]:
    return form.num_heads, form.sharpness, 2 if form.mode == "proximal" else int(not form.own)


def pull(
    flow: Tensor, z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, kept: tuple, wanted: MixtureWeights,
    wants_update: bool,
) -> tuple[Tensor, None, Tensor | None, Tensor, dict[str, Tensor]]:  # fmt: skip
    """The update once more, no dscores, dpooled, dkeys, and gradients of weights; dS is written over `flow`."""
    projected, keys, centre, gate, pooled = kept
    opened, w, t = _strength(z, gate, weights.theta, form)
    given = (projected, keys, _cells(z, form, grid), centre, w, t, flow, *_how(form))
    dkeys, dw, dt, update = group_adjoint(*given, wants_update)
    grads = {"key_bias": total(dkeys)} if wanted.key_bias else {}
    dgate = 2 * opened * dw  # w = g^2; t = g, g^2 or theta g^2
    if form.mode == "listing":
        dgate = dgate + dt
    elif form.mode == "equation":
        dgate = dgate + 2 * opened * dt
    else:
        assert weights.theta is not None
        theta = wide(weights.theta).flatten()
        dgate, dtheta = dgate + 2 * theta * opened * dt, (w * dt).sum(0)
        grads["theta"] = dtheta if theta.numel() > 1 else dtheta.sum()
    dpooled = None if pooled is None else gate_adjoint(dgate.contiguous(), pooled, z.shape[1], *_gate(form))
    return update, None, dpooled, dkeys, grads
