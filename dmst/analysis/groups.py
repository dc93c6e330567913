"""The groups of GMSA's heads: how large each is, which patches lie nearest to its mean, and how far a head moves every token.

mass(trace, layer)              (b, k, g): sum_n pi_nkg, the tokens in a group
nearest(trace, layer, count)    (b, k, g, count): the patches with the smallest |s_nk - mu_kg|, numbered along the rows
pull(model, trace, layer)       (b, k, rows, columns): |update_nk|, how far the head moves a patch

`membership.groups` has the group of each patch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmst.analysis.intervene import operator_of
from dmst.analysis.membership import layer_of
from dmst.errors import OptionError
from dmst.kernels import mixture
from dmst.models import Trace, VisionModel
from dmst.operators import GMSA
from dmst.operators.base import Parts


def mass(trace: Trace, layer: int = -1) -> Tensor:
    """(b, k, g): memberships summed over all tokens, a class token too; over the groups of a head they sum to n."""
    membership = _parts(trace, layer).membership
    assert membership is not None
    return membership.sum(-1)


def nearest(trace: Trace, layer: int = -1, count: int = 4) -> Tensor:
    """(b, k, g, count): numbers of patches, the nearest first, in the coordinates of the head; fewer where there are fewer."""
    parts = _parts(trace, layer)
    assert parts.projected is not None and parts.means is not None
    patches = parts.projected[..., trace.prefix :, :].to(parts.means.dtype)
    return torch.cdist(parts.means, patches).topk(min(count, patches.shape[-2]), largest=False).indices


def pull(model: VisionModel, trace: Trace, layer: int = -1) -> Tensor:
    """(b, k, rows, columns), by the operator's own update, with the gates and groups that are forced where this is called."""
    operator, z = operator_of(model, layer), layer_of(trace, layer).normed
    if not isinstance(operator, GMSA):
        raise _no_groups()
    update = mixture.update_of(operator.steps(z, trace.grid), operator.step_size(), operator.form)
    return update[..., trace.prefix :, :].norm(dim=-1).unflatten(-1, trace.grid)


def _parts(trace: Trace, layer: int) -> Parts:
    parts = layer_of(trace, layer).parts
    if parts.means is None:
        raise _no_groups()
    return parts


def _no_groups() -> OptionError:
    return OptionError("the heads of this layer have no groups: only those of GMSA have.")
