"""TSSA, DMSA and their relatives between the two products of a layer.

steps    scores -> gate, membership; moments -> update
pull     G -> dS; the gradients of scores and gate, and of what else has some
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from dmst.kernels.casting import aligned, cast
from dmst.kernels.form import Form, Weights
from dmst.kernels.fused import adjoint, energy, front, gate, moments

Grid = tuple[int, int] | None


class Kept(NamedTuple):
    """For the backward pass; None where a layer has none."""

    projected: Tensor  # (b, n, k p)
    membership: Tensor  # (b, n, k)
    pooled: Tensor | None  # (b, k)
    gate: Tensor | None  # (b, k)
    moment: Tensor  # (b, k, p)
    divisor: Tensor  # (b, k)
    channel: Tensor | None  # (b, k, p), TSSA's energy of each channel


def steps(z: Tensor, weights: Weights, form: Form, grid: Grid) -> tuple[Tensor, Kept]:
    scores = sums = None
    if weights.assign is not None:
        assign, bias = aligned(weights.assign), None if weights.assign_bias is None else aligned(weights.assign_bias)
        how = (form.membership == "sigmoid", form.gate is not None)
        scores, sums, _ = front.front(z, *front.tables(form.rotary, z, grid), assign, bias, None, None, *how)
    projected = F.linear(z, weights.subspace, cast(weights.subspace_bias, z.dtype))
    membership, channel = scores, None
    if form.membership == "energy":
        assert weights.temperature is not None
        membership, channel = energy.energy(projected, scores, weights.temperature.contiguous(), form.text)
    assert membership is not None
    gated = sums if form.gate is not None else None
    update, moment, divisor, opened, pooled = moments.settle(projected, membership, gated, weights.theta, form.text)
    if gated is None:
        return update, Kept(projected, membership, None, None, moment, divisor, channel)
    return update, Kept(projected, membership, pooled, opened, moment, divisor, channel)


def pull(
    flow: Tensor, z: Tensor, weights: Weights, form: Form, grid: Grid, kept: tuple, wanted: Weights, wants_update: bool
) -> tuple[Tensor, Tensor, Tensor | None, None, dict[str, Tensor]]:
    """The update once more, dscores, dpooled, no gradient of keys, and gradients of weights; dS is written over `flow`."""
    projected, membership, pooled, opened, moment, divisor, channel = kept
    grads: dict[str, Tensor] = {}
    wants_bias = bool(wanted.subspace_bias)
    now = wants_bias and form.membership != "energy"  # there the bias is summed in the next pass
    given = (flow, projected, membership, moment, opened, divisor, weights.theta)
    dscores, dgate, dtheta, dbias, update = adjoint.pull(*given, form.text, now, wants_update)
    if form.membership == "energy":
        assert weights.temperature is not None
        dscores = membership * (dscores - (membership * dscores).sum(-1, keepdim=True))
        temperature = weights.temperature.contiguous()
        found = energy.energy_adjoint(flow, projected, dscores, channel, temperature, form.text, wants_bias)
        grads["temperature"], dbias = found
    if form.mode == "proximal":
        grads["theta"] = dtheta.sum()
    if wants_bias:
        grads["subspace_bias"] = dbias.sum((0, 1))
    dpooled = None if pooled is None else gate.gate_adjoint(dgate, pooled, z.shape[1], *form.gate_choice)
    if wanted.assign_bias:
        total = dscores.sum((0, 1))
        grads["assign_bias"] = total if dpooled is None else total + z.shape[1] * dpooled.sum(0)
    return update, dscores, dpooled, None, grads
