"""What operators share that were unrolled from a rate: subspaces, an output that is free or tied to them, a step size.

    listing    free output `out`
    equation   tied: the update of head k goes back by U_k^T
    proximal   tied, [U_1 .. U_K] orthonormal, step size softplus(theta) > 0: one number, or one per head

Where one of the linear maps is more than its weight (an adapter, a hook, a pruned, parametrized or quantized weight), a member
calls it as a module, in plain torch; `is_plain` says so.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dmst import tracing
from dmst.kernels import compute_dtype
from dmst.operators.base import Operator, scaled
from dmst.operators.orthonormal import OrthonormalLinear


class Unrolled(Operator):
    """A member builds these and names its linear maps in `maps`."""

    maps: ClassVar[tuple[str, ...]]
    subspace: nn.Linear
    out: nn.Linear | None
    theta: nn.Parameter | None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.theta is not None:
            nn.init.constant_(self.theta, math.log(math.expm1(1)))  # softplus keeps the step positive; it starts at 1

    def is_plain(self) -> bool:
        """Whether the weights of its linear maps are all there is to them."""
        maps = [x for x in (getattr(self, name) for name in self.maps) if x is not None]
        return all(isinstance(x, nn.Linear) for x in maps) and tracing.is_plain(*maps)

    def subspaces(self) -> Tensor:
        return rearrange(weight_and_bias(self.subspace, self.dim)[0], "(k p) d -> k d p", k=self.num_heads)

    def step_size(self) -> Tensor | None:
        """The step size of the proximal mode, above 0: a scalar, or (k,)."""
        step = None if self.theta is None else F.softplus(self.theta)
        return step if step is None or step.numel() > 1 else step.reshape(())

    def output(self, scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Matrix and bias of `out`, scaled; None where it is tied."""
        weight, bias = weight_and_bias(self.out, self.dim)
        return (weight, bias) if weight is None or scale is None else scaled(weight, bias, scale)

    def project_out(self, update: Tensor, z: Tensor, scale: Tensor | None = None) -> Tensor:
        """update (b, k, n, p) through `out`, called as a module, or back by the subspaces."""
        flat = rearrange(update, "b k n p -> b n (k p)").to(compute_dtype(z))
        if self.out is not None:
            return self.out(flat) if scale is None else scale * self.out(flat)
        matrix, _ = weight_and_bias(self.subspace, self.dim)
        return F.linear(flat, matrix.to(flat.dtype).transpose(0, 1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if (theta := state_dict.get(f"{prefix}theta")) is not None and theta.ndim == 0:  # of old files
            state_dict[f"{prefix}theta"] = theta.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def weight_and_bias(linear: Any, dim: int) -> tuple[Any, Any]:
    """The matrix and the bias of a linear map, whatever it is made of."""
    if linear is None:
        return None, None
    if isinstance(linear, nn.Linear) and tracing.is_tensor(linear.weight):
        return linear.basis() if isinstance(linear, OrthonormalLinear) else linear.weight, linear.bias
    like = next((x for x in linear.parameters() if x.is_floating_point()), torch.empty(0))
    axes = torch.eye(dim, dtype=like.dtype, device=like.device)
    bias = linear(torch.zeros_like(axes[:1]))[0]  # an adapter, a quantized weight: what it does to the axes is its matrix
    return (linear(axes) - bias).transpose(0, 1), bias
