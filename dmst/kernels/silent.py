"""Inference that leaves silent heads out: a head whose gate is exactly 0 for a sample costs that sample nothing.

    gate first (it needs only the scores), then samples with the same active heads together:
    project onto those heads' subspaces, update, project out

Exact for a sparsemax gate. Which heads are on is read by the host, so this is for the CPU, without gradients and outside of
compiled graphs. What is saved is the silent share of the two projections; what it costs is a round of small operations and a
copy of the active heads' weights for each group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmst.kernels import reference
from dmst.kernels.form import Form, Weights

ROUND = 45e6  # multiply-adds that one group costs in overhead, measured on two cores (docs/lab-notes.md)


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d), active heads only where that is faster."""
    scores = reference.score(z, weights, form, grid)
    _, gate = reference.gate_of(scores, form)
    membership = reference.membership_of(scores, None, None, form)
    assert gate is not None
    groups: dict[tuple[bool, ...], list[int]] = {}
    for sample, on in enumerate((gate != 0).tolist()):  # a NaN gate counts as on, so that it shows
        groups.setdefault(tuple(on), []).append(sample)
    silent = sum(len(samples) * (len(on) - sum(on)) for on, samples in groups.items())
    saved = 2 * z.shape[1] * z.shape[2] * (z.shape[2] // form.num_heads) * silent
    if saved > ROUND * len(groups):
        return attend_active(z, weights, form, membership, gate, groups, dtype)
    projected = reference.project(z, weights, form.num_heads, dtype)
    update = reference.token_statistics(projected, membership, gate, weights.theta, form=form)
    return reference.project_out(update, weights, dtype)


def attend_active(
    z: Tensor,
    weights: Weights,
    form: Form,
    membership: Tensor,
    gate: Tensor,
    groups: dict[tuple[bool, ...], list[int]],
    dtype: torch.dtype,
) -> Tensor:
    """Each group with only its own heads' rows of the weights."""
    out = z.new_empty(z.shape, dtype=dtype)
    rows = _by_head(weights, form.num_heads)
    for on, samples in groups.items():
        heads = [k for k, is_on in enumerate(on) if is_on]
        if not heads:
            out[samples] = 0 if weights.out_bias is None else weights.out_bias.to(dtype)
            continue
        index = torch.tensor(heads)
        mine = _only(rows, index)
        pick = slice(samples[0], samples[0] + 1) if len(samples) == 1 else samples
        active_membership, active_gate = (x[pick].index_select(1, index) for x in (membership, gate))
        projected = reference.project(z[pick], mine, len(heads), dtype)
        update = reference.token_statistics(projected, active_membership, active_gate, weights.theta, form=form)
        out[pick] = reference.project_out(update, mine, dtype)
    return out


def _by_head(weights: Weights, k: int) -> Weights:
    """The weights with the head as their first axis, so that choosing heads copies whole rows."""
    bias, out = weights.subspace_bias, weights.out
    return weights._replace(
        subspace=weights.subspace.unflatten(0, (k, -1)),
        subspace_bias=None if bias is None else bias.unflatten(0, (k, -1)),
        out=None if out is None else out.mT.contiguous().unflatten(0, (k, -1)),
    )


def _only(rows: Weights, index: Tensor) -> Weights:
    """The rows of some heads, flat again."""
    bias, out = rows.subspace_bias, rows.out
    return rows._replace(
        subspace=rows.subspace.index_select(0, index).flatten(0, 1),
        subspace_bias=None if bias is None else bias.index_select(0, index).flatten(),
        out=None if out is None else out.index_select(0, index).flatten(0, 1).mT,
    )
