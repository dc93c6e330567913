"""LayerScale as a part of the output weight, so that it costs no pass over the tokens: W' = diag(scale) W, b' = scale b.

    dW = diag(scale) dW'    db = scale db'    dscale_i = sum_j dW'_ij W_ij + db'_i b_i    (of one number: the sum over i)

Nothing is kept for it and nothing divided by it. A tied output becomes a weight of its own, whose gradient goes back to
`subspace`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmst.kernels.arithmetic import wide
from dmst.kernels.form import Weights


def _weight_out(weights: Weights) -> Tensor:
    return wide(weights.subspace.mT if weights.out is None else weights.out)


def scaled(weights: Weights, scale: Tensor | None) -> Weights:
    """The weights of scale * attend."""
    if scale is None:
        return weights
    rows = wide(scale).reshape(-1)
    bias = None if weights.out_bias is None else rows * wide(weights.out_bias)
    return weights._replace(out=rows.unsqueeze(-1) * _weight_out(weights), out_bias=bias)


def inner(wanted: Weights, weights: Weights, scale: Tensor | None, wants_scale: bool) -> Weights:
    """Which gradients of the scaled weights `unscaled` needs."""
    if scale is None:
        return wanted
    out = wanted.subspace if weights.out is None else wanted.out
    bias = weights.out_bias is not None and (wanted.out_bias or wants_scale)
    return wanted._replace(out=out or wants_scale, out_bias=bias)  # type: ignore[arg-type]


def unscaled(grads: dict[str, Tensor], weights: Weights, scale: Tensor | None, wanted: Weights) -> dict[str, Tensor]:
    """The gradients of the weights and of `scale`, from those of the scaled weights."""
    if scale is None:
        return grads
    rows, dout, dbias = wide(scale).reshape(-1), grads.pop("out", None), grads.pop("out_bias", None)
    dscale = torch.zeros_like(rows) if dout is None else (wide(dout) * _weight_out(weights)).sum(1)
    if dbias is not None and weights.out_bias is not None:
        dscale = dscale + dbias * weights.out_bias
        grads["out_bias"] = rows * dbias
    if dout is not None:
        dout = rows.unsqueeze(-1) * dout
        if weights.out is not None:
            grads["out"] = dout
        elif wanted.subspace:
            grads["subspace"] = grads["subspace"] + dout.mT
    grads["scale"] = dscale if scale.ndim else dscale.sum()
    return grads
