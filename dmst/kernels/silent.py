"""Inference that leaves silent heads out: a head whose gate is exactly 0 for a sample costs that sample no product.

    gate first (it needs only the scores); samples with the same active heads form a group
    projected   each group onto its own heads, zeros elsewhere
    update      all samples at once: a silent head's is 0
    output      each group from its own heads

Exact for a sparsemax gate: what is left out are products with zeros, so even the bits stay those of the dense layer (tested
with float32 on MKL), and no result depends on who else is in the batch. Which heads are on is read by the host, so this is for
the CPU, without gradients, outside of traced graphs. It saves the silent share of the two projections and costs a round of
small operations and a copy of the active weights for each group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmst.kernels import reference
from dmst.kernels.arithmetic import cast
from dmst.kernels.form import Form, Weights
from dmst.onednn import linear

ROUND = 45e6  # multiply-adds that one group costs in overhead, measured on two cores (docs/lab-notes.md)

Groups = dict[tuple[int, ...], list[int]]  # active heads -> the samples that have just these


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d), active heads only where that is faster."""
    scores = reference.score(z, weights, form, grid)
    _, gate = reference.gate_of(scores, form)
    membership = reference.membership_of(scores, None, None, form)
    assert gate is not None
    groups: Groups = {}
    for sample, on in enumerate((gate != 0).tolist()):  # a NaN gate counts as on, so that it shows
        groups.setdefault(tuple(k for k, is_on in enumerate(on) if is_on), []).append(sample)
    silent = sum(len(samples) * (form.num_heads - len(heads)) for heads, samples in groups.items())
    saved = 2 * z.shape[1] * z.shape[2] * (z.shape[2] // form.num_heads) * silent
    pays = saved > ROUND * len(groups)
    projected = (
        project_active(z, weights, form, groups, dtype) if pays else reference.project(z, weights, form.num_heads, dtype)
    )
    update = reference.token_statistics(projected, membership, gate, weights.theta, form=form)
    return project_out_active(update, weights, groups, dtype) if pays else reference.project_out(update, weights, dtype)


def project_active(z: Tensor, weights: Weights, form: Form, groups: Groups, dtype: torch.dtype) -> Tensor:
    """projected (b, k, n, p), zeros where a head is silent."""
    rows = weights.subspace.to(dtype).unflatten(0, (form.num_heads, -1))
    bias = None if weights.subspace_bias is None else weights.subspace_bias.to(dtype).unflatten(0, (form.num_heads, -1))
    projected = z.new_zeros(*z.shape[:2], *rows.shape[:2], dtype=dtype)  # (b, n, k, p)
    for heads, samples in groups.items():
        index = torch.tensor(heads, dtype=torch.int64)
        mine = None if bias is None else bias.index_select(0, index).flatten()
        part = linear(z[samples].to(dtype), rows.index_select(0, index).flatten(0, 1), mine)
        part = part.unflatten(-1, (len(heads), rows.shape[1]))
        if len(samples) == z.shape[0]:
            projected.index_copy_(2, index, part)
        else:
            projected[torch.tensor(samples)[:, None], :, index] = part.transpose(1, 2)
    return projected.transpose(1, 2)


def project_out_active(update: Tensor, weights: Weights, groups: Groups, dtype: torch.dtype) -> Tensor:
    """sum_k update_k W_out,k + bias over the active heads."""
    flat = update.transpose(1, 2).to(dtype)  # (b, n, k, p)
    columns = (weights.subspace if weights.out is None else weights.out.mT).to(dtype).contiguous()
    columns = columns.unflatten(0, (update.shape[1], -1))  # (k, p, d)
    bias = cast(weights.out_bias, dtype)
    out = flat.new_empty(*flat.shape[:2], columns.shape[-1])
    for heads, samples in groups.items():
        index = torch.tensor(heads, dtype=torch.int64)
        part = flat[samples].index_select(2, index).flatten(2)
        out[samples] = linear(part, columns.index_select(0, index).flatten(0, 1).mT, bias)
    return out
