"""The layer in readable steps: the definition that every other kernel is compared with.

    projected  s_nk  = z_n U_k + bias                                    (b, k, n, p)   in the compute dtype
    scores     l_nk  = <rot_n z_n, assign_k> + bias                      (b, k, n)      from here on at least float32
    membership pi_nk = sigmoid(l_nk)          | softmax, sparsemax over tokens, softmax of energy (TSSA)
    gate       g_k   = scale * sparsemax_k(mean_n l_nk)                  (b, k)         | other activations, or none
    moment     T_ki  = sum_n pi_nk s_nki^2 / (mass_k + delta)            (b, k, p)      mass_k = sum_n pi_nk
    attenuation a_ki = 1 / (1 + g_k^2 T_ki)
    update     listing  -g pi a s     equation  -g^2 pi a s     proximal  -w/(1+w) s,  w = theta g^2 pi a
    output     sum_k update_k W_out,k + bias                             (b, n, d)      tied: W_out,k = U_k^T

Every step is plain differentiable torch, to any order, and no `.mT`, which converters do not know. The logical shape
(b, k, n, p) is a view of memory order (b, n, k, p), as the projection leaves it, so no step copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from dmst import rotary
from dmst.kernels.casting import cast, wide
from dmst.kernels.form import GATE, MEMBERSHIP, Form, Weights
from dmst.onednn import linear

if TYPE_CHECKING:
    from jaxtyping import Float


class Steps(NamedTuple):
    """What the layer computed on the way to its update."""

    projected: Tensor  # (b, k, n, p)
    membership: Tensor  # (b, k, n)
    pooled: Tensor | None  # (b, k) token mean of the scores; None without a gate
    gate: Tensor | None  # (b, k)
    second_moment: Tensor  # (b, k, p), ungated
    divisor: Tensor  # (b, k), what the energy was divided by: mass + delta, or the number of tokens


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the two large projections run in `dtype`."""
    steps = take_steps(z, weights, form, grid, dtype)
    return project_out(update_of(steps, weights.theta, form), weights, dtype)


def take_steps(z: Tensor, weights: Weights, form: Form, grid: tuple[int, int] | None, dtype: torch.dtype) -> Steps:
    """Everything up to the update, scores first."""
    scores = score(z, weights, form, grid)
    pooling = score(z, weights, form, grid, form.gate_rotary) if form.split else None
    steps = steps_from(project(z, weights, form.num_heads, dtype), scores, weights.temperature, form)
    if pooling is None:
        return steps
    pooled, gate = gate_of(pooling, form)
    return steps._replace(pooled=pooled, gate=gate)


def steps_from(projected: Tensor, scores: Tensor | None, temperature: Tensor | None, form: Form) -> Steps:
    """The same of tokens that are projected and scored already."""
    membership = membership_of(scores, projected, temperature, form)
    pooled, gate = gate_of(scores, form)
    second_moment, mass = token_moments(projected, membership, form)
    return Steps(projected, membership, pooled, gate, second_moment, mass)


def project(z: Tensor, weights: Weights, heads: int, dtype: torch.dtype) -> Tensor:
    """s_nk = z_n U_k + bias, in the compute dtype."""
    projected = linear(z.to(dtype), weights.subspace.to(dtype), cast(weights.subspace_bias, dtype))
    return rearrange(projected, "b n (k p) -> b k n p", k=heads)


def score(z: Tensor, weights: Weights, form: Form, grid: tuple[int, int] | None, mode: str | None = None) -> Tensor | None:
    """l_nk = <rot_n z_n, assign_k> + bias, rotated as `mode` says or the form; None where the layer has no `assign`."""
    if weights.assign is None:
        return None
    z, assign = wide(z), wide(weights.assign)
    positions = rotary.table(mode or form.rotary, z.shape[-1], z.shape[-2], grid, device=z.device, dtype=z.dtype)
    if positions is None:
        scores = z @ assign.transpose(-2, -1)
    else:  # <rot_n z, w> = <z cos_n, w> + <z sin_n, turn w>: no token is shuffled
        scores = (z * positions.cos) @ assign.transpose(-2, -1) + (z * positions.sin) @ rotary.turn(assign).transpose(-2, -1)
    if weights.assign_bias is not None:
        scores = scores + wide(weights.assign_bias)
    return scores.transpose(-2, -1)


def membership_of(scores: Tensor | None, projected: Tensor | None, temperature: Tensor | None, form: Form) -> Tensor:
    """pi_nk, at least float32. Only TSSA's depends on the projected tokens."""
    if form.membership == "energy":
        assert temperature is not None and projected is not None
        logits = wide(temperature) * token_energy(projected, form)
        return (logits if scores is None else logits + scores).softmax(1)
    assert scores is not None
    membership = MEMBERSHIP[form.membership](scores, form)
    return membership * membership.shape[-1] if form.token_sparse_rescale else membership


def token_energy(projected: Tensor, form: Form) -> Tensor:
    """TSSA: e_nk = sum_i s_nki^2 / sum_n s_nki^2, so that each channel's energies sum to 1 over tokens."""
    square = wide(projected).square()
    if form.normalize_tokens:
        square = square / channel_energy(square)
    return square.sum(-1)


def channel_energy(square: Tensor) -> Tensor:
    """sum_n s_nki^2 as a divisor (b, k, 1, p); the floor is that of `torch.nn.functional.normalize`, 1e-12 squared."""
    return square.sum(-2, keepdim=True).clamp(min=1e-24)


def gate_of(scores: Tensor | None, form: Form) -> tuple[Tensor | None, Tensor | None]:
    """The token mean of the scores and the gate it opens, both (b, k); None, None where every head is on."""
    if form.gate is None:
        return None, None
    assert scores is not None
    pooled = scores.sum(-1) / max(scores.shape[-1], 1)
    return pooled, form.gate_scale * GATE[form.gate](pooled, form)


def token_moments(
    projected: Float[Tensor, "b k n p"], membership: Float[Tensor, "b k n"], form: Form
) -> tuple[Float[Tensor, "b k p"], Float[Tensor, "b k"]]:
    """T_ki and the mass it was divided by. The square is taken after the upcast: float16 overflows at 256.

    Memberships are divided, not the sum: T/mass, which autograd would take of it, is infinite where a head has next to no mass,
    and a closed gate's 0 times that is NaN.
    """
    values = wide(projected)
    if form.uniform_moment:
        mass = torch.full_like(membership.sum(-1), max(values.shape[-2], 1))
        return values.square().sum(-2) / mass.unsqueeze(-1), mass
    mass = membership.sum(-1) + form.delta
    mass = mass if form.delta else torch.where(mass < torch.finfo(mass.dtype).tiny, 1, mass)  # 1/mass is finite; NaN stays
    share = membership / mass.unsqueeze(-1)
    return (values * share.unsqueeze(-1) * values).sum(-2), mass


def token_statistics(
    projected: Float[Tensor, "b k n p"],
    membership: Float[Tensor, "b k n"],
    gate: Float[Tensor, "b k"] | None = None,
    theta: Tensor | None = None,
    *,
    form: Form,
) -> Float[Tensor, "b k n p"]:
    """The core: from (projected tokens, membership, gate) to the update."""
    second_moment, mass = token_moments(projected, membership, form)
    return update_of(Steps(projected, membership, None, gate, second_moment, mass), theta, form)


def attenuation_of(steps: Steps) -> tuple[Tensor, Tensor]:
    """a_ki = 1 / (1 + g_k^2 T_ki), and the gate as (b, k, 1), ones where there is none."""
    gate = torch.ones_like(steps.divisor) if steps.gate is None else steps.gate
    gate = gate.unsqueeze(-1)
    return 1 / (1 + gate.square() * steps.second_moment), gate


def update_of(steps: Steps, theta: Tensor | None, form: Form) -> Tensor:
    """The head outputs before the output projection, at least float32."""
    attenuation, gate = attenuation_of(steps)
    values, membership = wide(steps.projected), steps.membership.unsqueeze(-1)
    if form.mode == "proximal":
        assert theta is not None
        w = membership * (wide(theta) * gate.square() * attenuation).unsqueeze(-2)
        return -w / (1 + w) * values
    return values * membership * (form.sign * gate**form.power * attenuation).unsqueeze(-2)


def project_out(update: Tensor, weights: Weights, dtype: torch.dtype) -> Tensor:
    """sum_k update_k W_out,k + bias, in the compute dtype; tied to the subspaces where there is no `out`."""
    flat = rearrange(update, "b k n p -> b n (k p)").to(dtype)
    weight = weights.subspace.transpose(-2, -1) if weights.out is None else weights.out
    out = linear(flat, weight.to(dtype))
    # the bias apart: with one F.linear hands out a view, which nobody may change in place
    return out if weights.out_bias is None else out + weights.out_bias.to(dtype)
