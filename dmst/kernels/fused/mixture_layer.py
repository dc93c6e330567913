"""GMSA between the two products of a layer.

steps    keys and gate -> memberships, means and spreads -> update
pull     G -> dS; the gradients of keys and gate, and of what else has some
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import cells
from dmst.kernels.casting import aligned, cast
from dmst.kernels.fused import front
from dmst.kernels.fused.gate import gate_adjoint
from dmst.kernels.fused.mixture import group_adjoint, group_update
from dmst.kernels.mixture import Grid, MixtureForm, MixtureWeights


class Kept(NamedTuple):
    """For the backward pass; None where a layer has no gate."""

    projected: Tensor  # (b, n, k p)
    keys: Tensor  # (b, n, k r)
    centre: Tensor  # (b k, r + 1, g), sums of the keys of each cell, and its size
    gate: Tensor | None  # (b, k)
    pooled: Tensor | None  # (b, k)


def steps(z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid) -> tuple[Tensor, Kept]:
    assign = None if weights.gate is None else aligned(weights.gate)
    key, key_bias = aligned(weights.key.to(z.dtype)), cast(weights.key_bias, z.dtype)
    turn = front.tables(form.rotary, z, grid)
    _, sums, keys = front.front(z, *turn, assign, None, key, key_bias, False, assign is not None)
    projected = F.linear(z, weights.subspace)
    given = (projected, keys, _cells(z, form, grid), None if assign is None else sums, _theta(weights), form.text)
    update, centre, gate, pooled = group_update(*given)
    return update, Kept(projected, keys, centre, *((gate, pooled) if assign is not None else (None, None)))


def _theta(weights: MixtureWeights) -> Tensor | None:
    return None if weights.theta is None else weights.theta.contiguous()


def _cells(z: Tensor, form: MixtureForm, grid: Grid) -> Tensor:
    return cells.index(z.shape[-2], grid, form.groups, device=z.device, dtype=torch.int32)


def pull(
    flow: Tensor, z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, kept: tuple, wanted: MixtureWeights,
    wants_update: bool,
) -> tuple[Tensor, None, Tensor | None, Tensor, dict[str, Tensor]]:  # fmt: skip
    """The update once more, no dscores, dpooled, dkeys, and gradients of weights; dS is written over `flow`."""
    projected, keys, centre, gate, pooled = kept
    given = (projected, keys, _cells(z, form, grid), centre, gate, _theta(weights), flow, form.text)
    dkeys, dbias, dgate, dtheta, update = group_adjoint(*given, wants_update)
    grads = {"key_bias": dbias} if wanted.key_bias else {}
    if weights.theta is not None:
        grads["theta"] = dtheta.sum(0) if weights.theta.numel() > 1 else dtheta.sum()
    dpooled = None if pooled is None else gate_adjoint(dgate, pooled, z.shape[1], *form.gate_choice)
    return update, None, dpooled, dkeys, grads
