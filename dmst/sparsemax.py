"""Sparsemax (the paper's ST): the exact projection of scores onto the simplex.

    sparsemax(s) = argmin_{q in simplex} |q - s|^2 = max(s - tau, 0)
    tau          = (sum_support s - 1) / |support| = max_j (sum of the scores >= s_j, less 1) / (how many they are)
    J v          = 1_support * (v - mean_support v)

The second form of tau needs no support: sum_S (s_i - tau) <= 1 for every set S, with equality on the support.

Always in at least float32, with the row's maximum subtracted first. A row that holds a NaN becomes NaN
and no other row changes; an entry at -inf gets 0. There is no host synchronisation.

`max_active=m` keeps the m largest scores (the lower index wins a tie) and projects those: a real cap.
The `topk` of the published ST is a partial-sort hint that changes no result, so it does not exist here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmst import tracing
from dmst.errors import OptionError, choose

SHORT = 32  # up to here the k x k comparison is cheaper than a sort, and it needs no indices


def sparsemax(scores: Tensor, dim: int = -1, *, max_active: int | None = None, method: str = "auto") -> Tensor:
    """Project `scores` onto the simplex along `dim`; same shape, at least float32.

    `method` is "pairwise" (sort-free, quadratic in the axis), "sort", or "auto": by the length of the axis.
    """
    choose("sparsemax method", method, ("auto", "pairwise", "sort"))
    if max_active is not None and not (type(max_active) is int and max_active >= 1):
        raise OptionError(f"max_active is {max_active!r}: it must be a whole number of at least 1, or None for no cap.")
    rows = scores.movedim(dim, -1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if rows.shape[-1] == 0:
        return rows.movedim(-1, dim)
    if method == "auto":
        method = "pairwise" if rows.shape[-1] <= SHORT else "sort"
    if max_active is not None:
        rows = rows.masked_fill(_RANK[method](rows.detach()) >= max_active, -torch.inf)
    projection = _project(rows.detach(), method)
    # J is constant around a point, so a map with that J carries every derivative; torch.jit.trace wants one graph with and
    # without gradients
    if rows.requires_grad or tracing.transformed() or torch.jit.is_tracing():
        linear = jacobian_product(projection, rows - rows.detach().amax(-1, keepdim=True))
        projection = projection + (linear - linear.detach())  # adds exactly 0
    return projection.movedim(-1, dim)


def jacobian_product(projection: Tensor, v: Tensor, dim: int = -1) -> Tensor:
    """J v at a point whose sparsemax is `projection`: the mean over the support is taken out of `v`."""
    support = projection > 0
    inside = torch.where(support, v, 0)
    mean = inside.sum(dim, keepdim=True) / support.sum(dim, keepdim=True).clamp(min=1)
    return torch.where(support, v - mean, 0)


def _project(rows: Tensor, method: str) -> Tensor:
    shifted = rows - rows.amax(-1, keepdim=True)  # a NaN anywhere in the row makes all of it NaN
    return (shifted - _THRESHOLD[method](shifted)).clamp(min=0)  # and clamp keeps it


def _pairwise_threshold(s: Tensor) -> Tensor:
    """Each score with those that are at least as large: exact with ties, no order needed."""
    at_least = s.unsqueeze(-2) >= s.unsqueeze(-1)  # [j, i]: s_i >= s_j
    total = torch.where(at_least, s.unsqueeze(-2), 0).sum(-1)
    return ((total - 1) / at_least.sum(-1)).amax(-1, keepdim=True)


def _sort_threshold(s: Tensor) -> Tensor:
    """The same on the sorted row, where those are a prefix. No index is looked up, so none can be out of range."""
    total = s.sort(-1, descending=True).values.cumsum(-1)
    count = torch.arange(1, s.shape[-1] + 1, device=s.device, dtype=s.dtype)
    return ((total - 1) / count).amax(-1, keepdim=True)


def _pairwise_rank(s: Tensor) -> Tensor:
    """How many entries stand before j: the larger ones, and the equal ones of lower index."""
    index = torch.arange(s.shape[-1], device=s.device)
    before = (s.unsqueeze(-2) == s.unsqueeze(-1)) & (index < index.unsqueeze(-1))
    return ((s.unsqueeze(-2) > s.unsqueeze(-1)) | before).sum(-1)


def _sort_rank(s: Tensor) -> Tensor:
    return s.argsort(dim=-1, descending=True, stable=True).argsort(-1)


_THRESHOLD = {"pairwise": _pairwise_threshold, "sort": _sort_threshold}
_RANK = {"pairwise": _pairwise_rank, "sort": _sort_rank}
