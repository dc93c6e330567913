"""LayerScale as a part of the output weight (`scale.py` is the definition), one launch each way: a program has a row.

W'_i = scale_i W_i in the compute dtype,    b'_i = scale_i b_i
dW_i = scale_i dW'_i,    db_i = scale_i db'_i,    dscale_i = sum_j dW'_ij W_ij + db'_i b_i
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmst.kernels.form import Weights
from dmst.kernels.fused.core import rounded
from dmst.kernels.fused.launch import launch, planned
from dmst.kernels.plan import power_of_two


@triton.jit
def scale_kernel(
    weight_ptr, bias_ptr, scale_ptr, out_ptr, out_bias_ptr, along_rows, along_columns, each,
    D: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """each: 1, or 0 where one number scales every row."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    scale = tl.load(scale_ptr + row * each).to(tl.float32)
    weight = tl.load(weight_ptr + row * along_rows + column * along_columns, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + column, (scale * weight).to(out_ptr.dtype.element_ty), mask=column < D)
    if BIAS:
        tl.store(out_bias_ptr + row, (scale * tl.load(bias_ptr + row).to(tl.float32)).to(out_bias_ptr.dtype.element_ty))


@triton.jit
def unscale_kernel(
    dout_ptr, dbias_ptr, weight_ptr, bias_ptr, scale_ptr, dweight_ptr, new_dbias_ptr, dscale_ptr,
    along_rows, along_columns, each,
    D: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    scale = tl.load(scale_ptr + row * each).to(tl.float32)
    dscale = 0.0
    if WEIGHT:
        weight = tl.load(weight_ptr + row * along_rows + column * along_columns, mask=column < D, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        tl.store(dweight_ptr + row * D + column, scale * dout, mask=column < D)
        dscale += tl.sum(rounded(dout * weight), 0)
    if BIAS:
        dbias = tl.load(dbias_ptr + row).to(tl.float32)
        tl.store(new_dbias_ptr + row, scale * dbias)
        dscale += dbias * tl.load(bias_ptr + row).to(tl.float32)
    tl.store(dscale_ptr + row, dscale)


def _weight_out(weights: Weights) -> Tensor:
    return weights.subspace.mT if weights.out is None else weights.out


def scaled(weights: Weights, scale: Tensor | None, dtype: torch.dtype) -> Weights:
    """The weights of scale * attend, those of the output in the compute dtype."""
    if scale is None:
        return weights
    weight, bias = _weight_out(weights), weights.out_bias
    d = len(weight)
    out = torch.empty(d, d, device=weight.device, dtype=dtype)
    out_bias = None if bias is None else torch.empty(d, device=weight.device, dtype=dtype)
    cut = planned((d,), D=d, WIDTH=power_of_two(d), BIAS=bias is not None, num_warps=2)
    launch(scale_kernel, cut, weight, bias, scale.contiguous(), out, out_bias, *weight.stride(), scale.ndim)
    return weights._replace(out=out, out_bias=out_bias)


def unscaled(grads: dict[str, Tensor], weights: Weights, scale: Tensor | None, wanted: Weights) -> dict[str, Tensor]:
    """The gradients of the weights and of `scale`, from those of the scaled weights."""
    if scale is None:
        return grads
    weight, bias, dout, dbias = _weight_out(weights), weights.out_bias, grads.pop("out", None), grads.pop("out_bias", None)
    d = len(weight)
    dscale = torch.empty(d, device=weight.device, dtype=torch.float32)
    dweight = None if dout is None else torch.empty(d, d, device=weight.device, dtype=torch.float32)
    new_dbias = None if dbias is None else torch.empty_like(dscale)
    cut = planned((d,), D=d, WIDTH=power_of_two(d), WEIGHT=dout is not None, BIAS=dbias is not None, num_warps=2)
    into = (dweight, new_dbias, dscale)
    launch(unscale_kernel, cut, dout, dbias, weight, bias, scale.contiguous(), *into, *weight.stride(), scale.ndim)
    if new_dbias is not None:
        grads["out_bias"] = new_dbias
    if dweight is not None and weights.out is not None:
        grads["out"] = dweight
    elif dweight is not None and wanted.subspace:
        grads["subspace"] = grads["subspace"] + dweight.mT
    grads["scale"] = dscale if scale.ndim else dscale.sum()
    return grads
