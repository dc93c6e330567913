"""The shared body of TSSA, DMSA, TPUSA, TPSUSA and the gated channel: projections around one core (`dmst.kernels`).

    z -> (projected, membership, gate) -> update -> out

A member states its `Form` and which weights it owns; nothing else differs. The core takes the weights themselves. Where one of
`subspace`, `assign` and `out` is more than its weight (an adapter, a hook, a pruned, parametrized or quantized weight), they
are called as modules, in plain torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from dmst import kernels, objective, rotary
from dmst.errors import OptionError, choose, flag, number
from dmst.kernels import Form, Weights, reference
from dmst.kernels.casting import wide
from dmst.kernels.form import SAVES
from dmst.kernels.reference import Steps
from dmst.operators.base import Grid, Parts, lineage_options
from dmst.operators.orthonormal import OrthonormalLinear
from dmst.operators.unrolled import Unrolled, weight_and_bias


class TokenStatistics(Unrolled):
    """One member of the family, given by its form. The options here are those of every member.

    `save` is what the layer keeps for the backward pass beside z: "projected" (with membership and statistics), or "nothing",
    and they are computed again there. Output and gradients are the same to the bit (docs/kernels.md, Recompute).
    """

    maps = ("subspace", "assign", "out")
    assign: nn.Linear | None
    temperature: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        form: Form,
        *,
        bias: bool = True,
        membership_bias: bool = False,
        proj_drop: float = 0.0,
        save: str = "projected",
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        bias = lineage_options(type(self), bias, options)
        super().__init__(dim, form.num_heads)
        for name, value in (("membership_bias", membership_bias), ("token_sparse_rescale", form.token_sparse_rescale)):
            flag(name, value)
        flag("normalize_tokens", form.normalize_tokens)
        form = replace(form, save=choose("save", save, SAVES))
        scored = form.membership != "energy" or form.rotary != "none"
        if membership_bias and not scored:
            raise OptionError("membership_bias is True: without position_scores there are no scores to add it to.")
        rotary.check(form.rotary, dim)
        if form.gate_rotary is not None:
            rotary.check(form.gate_rotary, dim, "gate_rotary")
        factory = {"device": device, "dtype": dtype}
        tied, proximal = form.mode != "listing", form.mode == "proximal"
        self.form = form
        self.wants_scalar_scale = proximal
        self.subspace = (OrthonormalLinear if proximal else nn.Linear)(dim, dim, bias=bias, **factory)
        self.assign = nn.Linear(dim, form.num_heads, bias=membership_bias, **factory) if scored else None
        self.out = None if tied else nn.Linear(dim, dim, **factory)
        self.temperature = nn.Parameter(torch.empty(form.num_heads, 1, **factory)) if form.membership == "energy" else None
        self.theta = nn.Parameter(torch.empty(1, **factory)) if proximal else None
        self.proj_drop = nn.Dropout(number("proj_drop", proj_drop, 0, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.temperature is not None:
            nn.init.ones_(self.temperature)

    def weights(self, scale: Tensor | None = None) -> Weights:
        """The tensors of the layer, as they enter the products."""
        subspace, assign = (weight_and_bias(x, self.dim) for x in (self.subspace, self.assign))
        return Weights(*subspace, *assign, *self.output(scale), self.temperature, self.step_size())

    def forward(self, z: Tensor, *, grid: Grid = None, scale: Tensor | None = None) -> Tensor:
        """With `scale` the output is multiplied by it; only where `out` is free."""
        self.check(z)
        if self.is_plain():
            update = kernels.attend(z, self.weights(scale), self.form, grid=grid)
        else:
            update = self._attend_by_modules(z, grid, scale)
        return self.proj_drop(update)

    def decompose(self, z: Tensor, *, grid: Grid = None) -> Parts:
        """The very steps that `forward` takes, in plain torch, every head."""
        self.check(z)
        steps = self.steps(z, grid)
        return Parts(projected=steps.projected, membership=steps.membership, gate=steps.gate)

    def steps(self, z: Tensor, grid: Grid = None) -> Steps:
        """Everything up to the update, in plain torch."""
        if self.is_plain():
            dtype, weights = kernels.compute_dtype(z), self.weights()
            with kernels.without_autocast(z):
                return reference.take_steps(z, weights, self.form, grid, dtype)
        projected = rearrange(self.subspace(z), "b n (k p) -> b k n p", k=self.num_heads)
        scores = self._scores(z, grid, self.form.rotary)
        pooling = self._scores(z, grid, self.form.gate_rotary or "") if self.form.split else scores
        with kernels.without_autocast(z):
            pooled, gate = reference.gate_of(pooling, self.form)
            return reference.steps_from(projected, scores, self.temperature, self.form)._replace(pooled=pooled, gate=gate)

    def _scores(self, z: Tensor, grid: Grid, mode: str) -> Tensor | None:
        """l_nk of `assign` called as a module, on rotated tokens."""
        if self.assign is None:
            return None
        positions = rotary.table(mode, z.shape[-1], z.shape[-2], grid, device=z.device, dtype=z.dtype)
        scores = self.assign(z if positions is None else rotary.rotate(z, positions))
        return wide(scores).transpose(-2, -1)

    def _attend_by_modules(self, z: Tensor, grid: Grid, scale: Tensor | None) -> Tensor:
        steps = self.steps(z, grid)
        with kernels.without_autocast(z):
            update = reference.update_of(steps, self.step_size(), self.form)
        return self.project_out(update, z, scale)

    def rate(self, z: Tensor, *, eps: float, grid: Grid = None) -> Tensor | None:
        """R_var of this layer's projected tokens, membership and gate, c = d / eps^2. At eps = sqrt(d), c = 1: the core's."""
        parts = self.decompose(z, grid=grid)
        assert parts.projected is not None and parts.membership is not None
        return objective.variational_rate(parts.projected, parts.membership, parts.gate, eps=eps)
