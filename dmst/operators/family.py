"""The shared body of TSSA, DMSA, TPUSA, TPSUSA and the gated channel: projections around one core (`dmst.kernels`).

    z -> (projected, membership, gate) -> update -> out

A member states its `Form` and which weights it owns; nothing else differs. The core takes the weights themselves. Where one of
`subspace`, `assign` and `out` is more than its weight (an adapter, a hook, a pruned, parametrized or quantized weight), they
are called as modules, in plain torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import kernels, objective, rotary, tracing
from dmst.errors import OptionError, choose, flag, number
from dmst.kernels import Form, Weights, reference
from dmst.kernels.arithmetic import wide
from dmst.kernels.form import SAVES
from dmst.kernels.reference import Steps
from dmst.operators.base import Grid, Operator, Parts, lineage_options
from dmst.operators.orthonormal import OrthonormalLinear


class TokenStatistics(Operator):
    """One member of the family, given by its form. The options here are those of every member.

    `save` is what the layer keeps for the backward pass beside z: "projected" (with membership and statistics), or "nothing",
    and they are computed again there. Output and gradients are the same to the bit (docs/kernels.md, Recompute).
    """

    subspace: nn.Linear
    assign: nn.Linear | None
    out: nn.Linear | None
    temperature: nn.Parameter | None
    theta: nn.Parameter | None
    skip_silent: bool = False  # on a GPU, without gradients: set by `kernels.skipping.choose_silent`, saved nowhere

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
        if self.theta is not None:
            nn.init.constant_(self.theta, math.log(math.expm1(1)))  # softplus keeps the step positive; it starts at 1

    def weights(self) -> Weights:
        """The tensors of the layer, as they enter the products."""
        subspace, assign, out = (_weight_and_bias(x, self.dim) for x in (self.subspace, self.assign, self.out))
        return Weights(*subspace, *assign, *out, self.temperature, self._step())

    def is_plain(self) -> bool:
        """Whether the weights of its linear maps are all there is to them."""
        maps = [x for x in (self.subspace, self.assign, self.out) if x is not None]
        return all(isinstance(x, nn.Linear) for x in maps) and tracing.is_plain(*maps)

    def subspaces(self) -> Tensor:
        return rearrange(self.weights().subspace, "(k p) d -> k d p", k=self.num_heads)

    def forward(self, z: Tensor, *, grid: Grid = None) -> Tensor:
        self.check(z)
        if self.is_plain():
            update = kernels.attend(z, self.weights(), self.form, grid=grid, skip=self.skip_silent)
        else:
            update = self._attend_by_modules(z, grid)
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
                return reference.steps_of(z, weights, self.form, grid, dtype)
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

    def _attend_by_modules(self, z: Tensor, grid: Grid) -> Tensor:
        steps = self.steps(z, grid)
        with kernels.without_autocast(z):
            update = reference.update_of(steps, self._step(), self.form)
        flat = rearrange(update, "b k n p -> b n (k p)").to(kernels.compute_dtype(z))
        if self.out is not None:
            return self.out(flat)
        matrix, _ = _weight_and_bias(self.subspace, self.dim)
        return F.linear(flat, matrix.to(flat.dtype).transpose(0, 1))

    def _step(self) -> Tensor | None:
        """The step size of the proximal mode: a scalar above 0."""
        return None if self.theta is None else F.softplus(self.theta).reshape(())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if (theta := state_dict.get(f"{prefix}theta")) is not None:  # of old files it is a scalar
            state_dict[f"{prefix}theta"] = theta.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def rate(self, z: Tensor, *, eps: float, grid: Grid = None) -> Tensor | None:
        """R_var of this layer's projected tokens, membership and gate, c = d / eps^2. At eps = sqrt(d), c = 1: the core's."""
        projected, membership, gate, _ = self.decompose(z, grid=grid)
        assert projected is not None and membership is not None
        return objective.variational_rate(projected, membership, gate, eps=eps)


def _weight_and_bias(linear: Any, dim: int) -> tuple[Any, Any]:
    """The matrix and the bias of a linear map, whatever it is made of."""
    if linear is None:
        return None, None
    if isinstance(linear, nn.Linear) and tracing.is_tensor(linear.weight):
        return linear.basis() if isinstance(linear, OrthonormalLinear) else linear.weight, linear.bias
    like = next((x for x in linear.parameters() if x.is_floating_point()), torch.empty(0))
    axes = torch.eye(dim, dtype=like.dtype, device=like.device)
    bias = linear(torch.zeros_like(axes[:1]))[0]  # an adapter, a quantized weight: what it does to the axes is its matrix
    return (linear(axes) - bias).transpose(0, 1), bias
