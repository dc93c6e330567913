"""A block's residual step: norm, layer, scale and addition. Here its definition, and whether the fused kernels take it as one.

    z' = z + keep * scale * attend(norm(z))

Under autocast z stays in float32. Apart, the norm writes float32, the scores read that and a cast reads it again; in one, z is
read once, and the norm leaves its tokens in the compute dtype with their scores (`fused/layer.py`). LayerScale becomes a part
of the output weight, W' = diag(scale) W, and costs no pass over the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import kernels
from dmst.kernels import choice, plan
from dmst.kernels.arithmetic import cast, wide
from dmst.kernels.autocast import without_autocast
from dmst.kernels.form import Form, Weights

Grid = tuple[int, int] | None


def residual_step(
    z: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weights: Weights,
    form: Form,
    *,
    scale: Tensor | None = None,
    keep: Tensor | None = None,
    grid: Grid = None,
) -> Tensor:
    """z' (b, n, d) in the dtype of z, which is that of the weights. scale: (d) or (); keep: (b, 1, 1), a factor a sample."""
    kernels.check(z, weights, form)
    dtype = kernels.compute_dtype(z)
    if not serves(z, form, dtype):
        return plain(z, norm_weight, norm_bias, eps, weights, form, scale=scale, keep=keep, grid=grid)
    from dmst.kernels.fused import layer  # Triton is imported only where it is used

    with without_autocast(z):
        weights = scaled(weights, scale)
        return layer.residual_step(z, norm_weight, norm_bias, keep, eps, weights, form, grid=grid, dtype=dtype)


def scaled(weights: Weights, scale: Tensor | None) -> Weights:
    """The weights of scale * attend."""
    if scale is None:
        return weights
    rows = wide(scale).reshape(-1)
    out = wide(weights.subspace.mT if weights.out is None else weights.out)
    bias = None if weights.out_bias is None else rows * wide(weights.out_bias)
    return weights._replace(out=rows.unsqueeze(-1) * out, out_bias=bias)


def plain(
    z: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weights: Weights,
    form: Form,
    *,
    scale: Tensor | None = None,
    keep: Tensor | None = None,
    grid: Grid = None,
) -> Tensor:
    """The definition, which everything else is compared with."""
    update = kernels.attend(F.layer_norm(z, z.shape[-1:], norm_weight, norm_bias, eps), weights, form, grid=grid)
    if scale is not None:
        update = scale * update
    return cast(z + (update if keep is None else keep * update), z.dtype)


def serves(z: Tensor, form: Form, dtype: torch.dtype) -> bool:
    """Whether the step is taken in one: `plan` allows it, and the fused kernels compute the layer."""
    exact = z.dtype in (dtype, torch.float32)  # z' has the dtype of z, also where the parts are added one by one
    return exact and plan.step(z.shape[-1], dtype) and choice.serves(z, form, dtype)
