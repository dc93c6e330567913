"""Inference that leaves silent heads out: a head whose gate is exactly 0 for a sample costs that sample nothing.

    gate first (it needs only the scores), then per sample: project onto the active subspaces, update, project out

Exact for a sparsemax gate. Which heads are on is read by the host, so this is for the CPU, without gradients and outside of
compiled graphs. A sample's product over half the heads costs about half; what is lost is one large product for many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmst.kernels import reference
from dmst.kernels.form import Form, Weights

WORTH = 0.8  # share of active heads above which one large product is the faster (docs/lab-notes.md has the figures)
TOKENS = 32  # below this many tokens a sample's own product is too small to pay


def attend(z: Tensor, weights: Weights, form: Form, *, grid: tuple[int, int] | None = None, dtype: torch.dtype) -> Tensor:
    """The whole layer on z (b, n, d), active heads only where that is faster."""
    scores = reference.score(z, weights, form, grid)
    _, gate = reference.gate_of(scores, form)
    assert gate is not None
    membership = reference.membership_of(scores, None, None, form)
    on = gate != 0  # a NaN gate counts as on, so that it shows
    if z.shape[1] >= TOKENS and on.sum() <= WORTH * on.numel():
        return attend_active(z, weights, form, membership, gate, on, dtype)
    projected = reference.project(z, weights, form.heads, dtype)
    update = reference.token_statistics(projected, membership, gate, weights.theta, form=form)
    return reference.project_out(update, weights, dtype)


def attend_active(
    z: Tensor, weights: Weights, form: Form, membership: Tensor, gate: Tensor, on: Tensor, dtype: torch.dtype
) -> Tensor:
    """Samples with the same active heads together, each group with only those heads' rows of the weights."""
    out = z.new_empty(z.shape, dtype=dtype)
    groups: dict[tuple[int, ...], list[int]] = {}
    for sample, row in enumerate(on.tolist()):
        groups.setdefault(tuple(k for k, is_on in enumerate(row) if is_on), []).append(sample)
    for heads, samples in groups.items():
        if not heads:
            out[samples] = 0 if weights.out_bias is None else weights.out_bias.to(dtype)
            continue
        mine = _only(weights, form.heads, list(heads))
        pick = torch.tensor(samples)[:, None], torch.tensor(heads)
        projected = reference.project(z[samples], mine, len(heads), dtype)
        update = reference.token_statistics(projected, membership[pick], gate[pick], weights.theta, form=form)
        out[samples] = reference.project_out(update, mine, dtype)
    return out


def _only(weights: Weights, k: int, heads: list[int]) -> Weights:
    """The rows of `subspace` and the columns of `out` that belong to `heads`."""

    def rows(x: Tensor) -> Tensor:
        return x.unflatten(0, (k, -1))[heads].flatten(0, 1)

    return weights._replace(
        subspace=rows(weights.subspace),
        subspace_bias=None if weights.subspace_bias is None else rows(weights.subspace_bias),
        out=None if weights.out is None else weights.out.unflatten(1, (k, -1))[:, heads].flatten(1),
    )
