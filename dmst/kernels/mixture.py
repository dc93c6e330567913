"""GMSA in readable steps: groups with means inside each subspace. The definition that every faster form is compared with.

    projected  s_nk  = z_n U_k                                           (b, k, n, p)   in the compute dtype, as the keys
    key        q_nk  = A_k rot_n z_n + bias                              (b, k, n, r)   unit length where they are normalised
    centre     c_kg  = mean of q over the g-th cell of a coarse grid     (b, k, g, r)   from here on at least float32
    membership pi_nkg = softmax_g( t <q_nk, c_kg> )                      (b, k, n, g)   t = 1/sqrt r, or 8 for unit keys
    again      c_kg  = sum_n pi q / mass, and the memberships of that    once for each further round
    gate       g_k   = scale * act( <mean_n rot_n z_n, w_k> )            (b, k)         None: 1
    mass m_kg = sum_n pi     mean mu_kg = sum_n pi s / m                 (b, k, g), (b, k, g, p)
    spread     V_kgi = sum_n pi (s - mu)^2 / m                           (b, k, g, p)
    attenuation a_kg = 1 / (1 + g_k^2 V_kg)
    weight     w_kg  = t_k a_kg                                          (b, k, g, p)   t = g (listing), g^2 (equation),
                                                                                        theta_k g^2 (proximal)
    sums       alpha_n = sum_g pi w          beta_n = sum_g pi w mu      (b, k, n, p)
    update     beta - alpha s                proximal  (beta - alpha s) / (1 + alpha)         without `own`  beta
    output     sum_k update_k W_out,k + bias                             (b, n, d)      tied: W_out,k = U_k^T

A bias of the subspaces would cancel in mu - s, so there is none. Sums over tokens and groups are products of matrices with
the memberships, so cost is linear in tokens and nothing of size n g p exists. These products want heads apart in memory:
coordinates and keys are copied once to that order, where every product would copy them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dmst import cells, rotary
from dmst.kernels.casting import cast, wide
from dmst.kernels.form import GATE, Choices
from dmst.onednn import linear

UNIT_SHARPNESS = 8.0  # of the softmax over groups, where keys have length 1
Grid = tuple[int, int] | None


@dataclass(frozen=True)
class MixtureForm(Choices):
    """The choices of one layer."""

    num_heads: int
    groups: int = 16
    key_dim: int = 16
    mode: str = "listing"  # listing: gate once; equation: gate squared; proximal: the implicit step
    gate: str | None = "gelu"  # a key of GATE; None: all heads on
    gate_scale: float = 3.0
    rotary: str = "1d"  # positions in what keys and gate read
    own: bool = True  # whether a token's own coordinates are part of its update
    normalize_keys: bool = False
    rounds: int = 1
    # what other forms can be asked for, and this one cannot
    max_active_heads = None
    save = "projected"
    split = False

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Of the weights, by their names in `MixtureWeights`; theta is one number or one for each head."""
        k, q = self.num_heads, self.num_heads * self.key_dim
        return dict(zip(MixtureWeights._fields[:-1], ((d, d), (q, d), (q,), (k, d), (d, d), (d,)), strict=True))

    @property
    def sharpness(self) -> float:
        return UNIT_SHARPNESS if self.normalize_keys else self.key_dim**-0.5


class MixtureWeights(NamedTuple):
    """The tensors of one layer, as they enter the product (a tied output has `out=None`)."""

    subspace: Tensor  # (k p, d)
    key: Tensor  # (k r, d)
    key_bias: Tensor | None = None  # (k r)
    gate: Tensor | None = None  # (k, d)
    out: Tensor | None = None  # (d, k p)
    out_bias: Tensor | None = None  # (d)
    theta: Tensor | None = None  # () or (k,), proximal; positive


class MixtureSteps(NamedTuple):
    """What the layer computed on the way to its update."""

    projected: Tensor  # (b, k, n, p)
    keys: Tensor  # (b, k, n, r), before they are normalised
    membership: Tensor  # (b, k, n, g)
    mass: Tensor  # (b, k, g)
    mean: Tensor  # (b, k, g, p)
    spread: Tensor  # (b, k, g, p)
    pooled: Tensor | None  # (b, k), what the gate's activation reads
    gate: Tensor | None  # (b, k)
    silent: Tensor | None = None  # (k, g), groups that an intervention has switched off


def attend(z: Tensor, weights: MixtureWeights, form: MixtureForm, *, grid: Grid = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d); the large projections run in `dtype`."""
    return project_out(update_of(take_steps(z, weights, form, grid, dtype), weights.theta, form), weights, dtype)


def take_steps(z: Tensor, weights: MixtureWeights, form: MixtureForm, grid: Grid, dtype: torch.dtype) -> MixtureSteps:
    """Everything up to the update."""
    turned = turn(z, form, grid)
    keys = split(linear(turned.to(dtype), weights.key.to(dtype), cast(weights.key_bias, dtype)), form)
    pooled = None if weights.gate is None else token_mean(turned) @ wide(weights.gate).transpose(-2, -1)
    projected = split(linear(z.to(dtype), weights.subspace.to(dtype)), form)
    return steps_from(projected, keys, pooled, form, grid)


def steps_from(projected: Tensor, keys: Tensor, pooled: Tensor | None, form: MixtureForm, grid: Grid) -> MixtureSteps:
    """The same of tokens that have coordinates, keys and the score of their gate already."""
    membership = memberships_of(keys, form, grid)[-1]
    gate = None if pooled is None else form.gate_scale * GATE[str(form.gate)](wide(pooled), form)
    return MixtureSteps(projected, keys, membership, *moments(projected, membership), pooled, gate)


def turn(z: Tensor, form: MixtureForm, grid: Grid) -> Tensor:
    """rot_n z_n, at least float32 where anything turns."""
    positions = rotary.table(form.rotary, z.shape[-1], z.shape[-2], grid, device=z.device, dtype=wide(z[:0]).dtype)
    return z if positions is None else rotary.rotate(wide(z), positions)


def token_mean(z: Tensor) -> Tensor:
    return wide(z).mean(-2)


def split(flat: Tensor, form: MixtureForm) -> Tensor:
    """(b, n, k p) to (b, k, n, p), always a copy."""
    return rearrange(flat, "b n (k p) -> b k n p", k=form.num_heads).clone(memory_format=torch.contiguous_format)


def memberships_of(keys: Tensor, form: MixtureForm, grid: Grid) -> list[Tensor]:
    """The memberships of every round, the last ones last: (b, k, n, g) each."""
    q = unit(wide(keys), form)
    found: list[Tensor] = []  # not list[Tensor](), which torch.compile cannot call
    n = q.shape[-2]
    for _ in range(form.rounds):
        if found:
            centre = found[-1].transpose(-2, -1) @ q / divisor(found[-1].sum(-2)).unsqueeze(-1)
        else:
            centre = cells.means(n, grid, form.groups, device=q.device, dtype=q.dtype) @ q
        found.append((q @ (form.sharpness * unit(centre, form)).transpose(-2, -1)).softmax(-1))
    return found


def unit(keys: Tensor, form: MixtureForm) -> Tensor:
    return F.normalize(keys, dim=-1) if form.normalize_keys else keys


def divisor(mass: Tensor) -> Tensor:
    """Mass as a divisor: an empty group divides nothing by 1. NaN stays."""
    return torch.where(mass < torch.finfo(mass.dtype).tiny, 1, mass)


def moments(projected: Tensor, membership: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass, mean and spread of every group. E s^2 - mu^2 is off by some 1e-7 mu^2 in float32: a = 1/(1 + g^2 V) sees
    that only where |g mu| is above 100."""
    s, mass = wide(projected), membership.sum(-2)
    # the sum divided by the mass has a gradient that is infinite where a group has next to no mass
    share = membership.transpose(-2, -1) / divisor(mass).unsqueeze(-1)
    mean = share @ s
    return mass, mean, (share @ s.square() - mean.square()).clamp(min=0)


def attenuation_of(steps: MixtureSteps) -> tuple[Tensor, Tensor]:
    """a_kg (b, k, g, p), and the gate as (b, k, 1, 1), ones where there is none."""
    gate = torch.ones_like(steps.mass[..., 0]) if steps.gate is None else steps.gate
    gate = gate.unsqueeze(-1).unsqueeze(-1)
    attenuation = 1 / (1 + gate.square() * steps.spread)
    if steps.silent is not None:
        attenuation = torch.where(steps.silent.unsqueeze(-1), 0, attenuation)
    return attenuation, gate


def strength_of(gate: Tensor, theta: Tensor | None, form: MixtureForm) -> Tensor:
    """t_k, from a gate of (b, k, 1, 1)."""
    if form.mode != "proximal":
        return gate**form.power
    assert theta is not None
    return by_head(theta) * gate.square()


def update_of(steps: MixtureSteps, theta: Tensor | None, form: MixtureForm) -> Tensor:
    """The head outputs before the output projection, at least float32."""
    return pulls_of(steps, theta, form)[1]


def pulls_of(steps: MixtureSteps, theta: Tensor | None, form: MixtureForm) -> tuple[Tensor, Tensor]:
    """alpha, how strongly a token is pulled to the means of its groups, and the update."""
    attenuation, gate = attenuation_of(steps)
    weight = strength_of(gate, theta, form) * attenuation
    alpha, beta = steps.membership @ weight, steps.membership @ (weight * steps.mean)
    if not form.own:
        return alpha, beta
    pull = beta - alpha * wide(steps.projected)
    return alpha, pull / (1 + alpha) if form.mode == "proximal" else pull


def by_head(theta: Tensor) -> Tensor:
    """A number, or one per head, as something that multiplies (b, k, n, p)."""
    return wide(theta).reshape(-1, 1, 1)


def project_out(update: Tensor, weights: MixtureWeights, dtype: torch.dtype) -> Tensor:
    """sum_k update_k W_out,k + bias, in the compute dtype; tied to the subspaces where there is no `out`."""
    weight = weights.subspace.transpose(-2, -1) if weights.out is None else weights.out
    out = linear(rearrange(update, "b k n p -> b n (k p)").to(dtype), weight.to(dtype))
    # the bias apart: with one F.linear hands out a view, which nobody may change in place
    return out if weights.out_bias is None else out + weights.out_bias.to(dtype)
