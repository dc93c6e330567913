"""GMSA, Group-Mean Subspace Attention (ours): every token moves toward the means of the groups it belongs to.

    s_nk = z_n U_k     q_nk = A_k rot_n z_n     c_kg = mean of q over the g-th cell of a coarse grid
    pi_nkg = softmax_g(<q_nk, c_kg> / sqrt r)        mu_kg, V_kg = mean and spread of s_nk, weighted by pi_nkg
    g_k = scale gelu(<mean rot z, w_k>)              a_kg = 1 / (1 + g_k^2 V_kg)

    listing     out( g sum_g pi a (mu - s) )                free output, gate once
    equation    sum_k g^2 [ sum_g pi a (mu - s) ] U_k^T     -n times the gradient of R_mix, membership and gate held fixed
    proximal    sum_k [ (M - A s) / (1 + A) ] U_k^T         A = theta_k g^2 sum_g pi a,  M = theta_k g^2 sum_g pi a mu,
                                                            [U_1 .. U_K] orthonormal: lowers R_mix for every theta > 0

In words: each head sorts the tokens into groups, which begin as regions of the image, and draws the tokens of a group together;
tight groups pull more. What one token learns of the others are the means of its groups, so values travel, in linear time.
DMSA's rate is the case of one group with mean 0. `dmst/kernels/mixture.py` has the steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmst import kernels, objective, rotary
from dmst.errors import OptionError, choose, flag, number, shown
from dmst.kernels import mixture
from dmst.kernels.form import GATE
from dmst.kernels.mixture import MixtureForm, MixtureSteps, MixtureWeights
from dmst.operators.base import Grid, Parts, lineage_options
from dmst.operators.dmsa import MODES
from dmst.operators.orthonormal import OrthonormalLinear
from dmst.operators.unrolled import Unrolled, weight_and_bias

GATES = (*(name for name in GATE if name != "uniform"), "none")
MOST = 65_536  # groups, channels of a key, rounds: as many as an image may have patches
KEY_STD = 0.1  # memberships must differ from the start: with the lineage's .02 all groups begin as one


class GMSA(Unrolled):
    """Groups with means in each subspace.

    `groups` are the cells of a coarse grid, as square as they can be; without a grid, runs of tokens. Tokens before the patches
    belong to no cell and get memberships like others. `rounds=2` takes memberships again from the means of the keys.
    `own=False` leaves the token's own coordinates out of its update (`listing` only: no rate falls). `bias` is that of the
    keys: one of the subspaces would cancel in mu - s.
    """

    maps = ("subspace", "key", "gate", "out")
    gate: nn.Linear | None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        groups: int = 16,
        key_dim: int = 16,
        mode: str = "listing",
        gate_activation: str = "gelu",
        gate_scale: float = 3.0,
        key_rotary: str = "1d",
        own: bool = True,
        normalize_keys: bool = False,
        rounds: int = 1,
        bias: bool = True,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        bias = lineage_options(GMSA, bias, options)
        super().__init__(dim, num_heads)
        for name, value in (("groups", groups), ("key_dim", key_dim), ("rounds", rounds)):
            if type(value) is not int or not 1 <= value <= MOST:
                raise OptionError(f"{name} is {shown(value)}: it must be a whole number of at least 1 and at most {MOST:,}.")
        rotary.check(key_rotary, dim, "key_rotary")
        choose("mode", mode, MODES)
        choose("gate_activation", gate_activation, GATES)
        if not flag("own", own) and mode != "listing":
            raise OptionError(f"own is False: mode {mode!r} descends its rate by the token's own term; use mode 'listing'.")
        self.form = MixtureForm(
            num_heads=num_heads,
            groups=groups,
            key_dim=key_dim,
            mode=mode,
            gate=None if gate_activation == "none" else gate_activation,
            gate_scale=number("gate_scale", gate_scale, -1e6, 1e6),
            rotary=key_rotary,
            own=own,
            normalize_keys=flag("normalize_keys", normalize_keys),
            rounds=rounds,
        )
        factory = {"device": device, "dtype": dtype}
        self.least_tokens = groups
        self.wants_scalar_scale = proximal = mode == "proximal"
        self.subspace = (OrthonormalLinear if proximal else nn.Linear)(dim, dim, bias=False, **factory)
        self.key = nn.Linear(dim, num_heads * key_dim, bias=bias, **factory)
        self.gate = None if self.form.gate is None else nn.Linear(dim, num_heads, bias=False, **factory)
        self.out = nn.Linear(dim, dim, **factory) if mode == "listing" else None
        self.theta = nn.Parameter(torch.empty(num_heads, **factory)) if proximal else None
        self.proj_drop = nn.Dropout(number("proj_drop", proj_drop, 0, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.key.weight, std=KEY_STD, a=-20 * KEY_STD, b=20 * KEY_STD)

    def weights(self, scale: Tensor | None = None) -> MixtureWeights:
        """The tensors of the layer, as they enter the products."""
        subspace, key, gate = (weight_and_bias(x, self.dim) for x in (self.subspace, self.key, self.gate))
        return MixtureWeights(subspace[0], *key, gate[0], *self.output(scale), self.step_size())

    def forward(self, z: Tensor, *, grid: Grid = None, scale: Tensor | None = None) -> Tensor:
        """With `scale` the output is multiplied by it; only where `out` is free."""
        self.check(z)
        if self.is_plain():
            return self.proj_drop(kernels.attend(z, self.weights(scale), self.form, grid=grid))
        steps = self.steps(z, grid)
        with kernels.without_autocast(z):
            update = mixture.update_of(steps, self.step_size(), self.form)
        return self.proj_drop(self.project_out(update, z, scale))

    def decompose(self, z: Tensor, *, grid: Grid = None) -> Parts:
        """The very steps that `forward` takes, in plain torch, every head and group."""
        self.check(z)
        steps = self.steps(z, grid)
        membership = steps.membership.transpose(-2, -1)
        return Parts(steps.projected, membership, steps.gate, means=steps.mean, spreads=steps.spread)

    def steps(self, z: Tensor, grid: Grid = None) -> MixtureSteps:
        """Everything up to the update, in plain torch."""
        if self.is_plain():
            dtype, weights = kernels.compute_dtype(z), self.weights()
            with kernels.without_autocast(z):
                return mixture.take_steps(z, weights, self.form, grid, dtype)
        turned = mixture.turn(z, self.form, grid).to(z.dtype)
        projected, keys = (mixture.split(flat, self.form) for flat in (self.subspace(z), self.key(turned)))
        like = self._a_weight()
        with kernels.without_autocast(z):
            mean = mixture.token_mean(turned).to(z.dtype if like is None else like.dtype)
            pooled = None if self.gate is None else self.gate(mean)
            return mixture.steps_from(projected, keys, pooled, self.form, grid)

    def rate(self, z: Tensor, *, eps: float, grid: Grid = None) -> Tensor:
        """R_mix of this layer's projected tokens, membership and gate, c = d / eps^2. At eps = sqrt(d), c = 1: the core's."""
        parts = self.decompose(z, grid=grid)
        assert parts.projected is not None and parts.membership is not None
        return objective.mixture_rate(parts.projected, parts.membership, parts.gate, eps=eps)
