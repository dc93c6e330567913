"""A square linear map whose matrix is orthonormal, saved as itself: `weight` in a checkpoint is the plain matrix.

    basis = weight, where it is orthonormal to rounding; else Q^T of weight^T = Q R, diag(R) > 0 (Gram-Schmidt on the rows)

The basis is differentiable, so an optimizer may step freely, and it is what a checkpoint holds; the stored parameter is never
changed behind the optimizer's back. `retract_()` puts it onto the manifold: a loop that calls it after every step keeps the
parameter and its basis one and the same, which exact resumption needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmst import watched


class OrthonormalLinear(nn.Linear):
    """`nn.Linear(dim, dim)` whose matrix is `basis()`."""

    def __init__(self, dim: int, dim_out: int, bias: bool = True, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(dim, dim_out, bias=bias, device=device, dtype=dtype)
        self._looked_at: tuple[int, int] | None = None  # the weight's place and version when it was last judged
        self._orthonormal = True

    def reset_parameters(self) -> None:
        wide = torch.empty_like(self.weight, dtype=torch.promote_types(self.weight.dtype, torch.float32))
        with torch.no_grad():
            self.weight.copy_(nn.init.orthogonal_(wide))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def basis(self) -> Tensor:
        """The orthonormal matrix that the layer uses; in training always with the gradient of Gram-Schmidt."""
        as_it_is = self.is_orthonormal()
        if as_it_is and not self.training:
            return self.weight
        rows = orthonormal_rows(self.weight)
        return self.weight.detach() + (rows - rows.detach()) if as_it_is else rows

    def is_orthonormal(self) -> bool:
        """Whether the stored matrix can be used as it is. Judged once for each version of it.

        Where values cannot be read (in a traced graph, under a transform) a training layer answers no, which is always right,
        and a layer in evaluation answers as it did when `eval()` was called.
        """
        if watched.traced() or watched.transformed() or watched.dispatched() or self.weight.is_meta:
            return not self.training and self._orthonormal
        here = (self.weight.data_ptr(), self.weight._version)
        if here != self._looked_at:
            self._looked_at, self._orthonormal = here, error_of(self.weight) <= tolerance(self.weight.dtype)
        return self._orthonormal

    def retract_(self) -> None:
        """Replace the stored matrix by its basis."""
        with torch.no_grad():
            if not self.is_orthonormal():
                self.weight.copy_(orthonormal_rows(self.weight))

    def train(self, mode: bool = True) -> OrthonormalLinear:
        super().train(mode)
        if not mode:
            self.is_orthonormal()
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            with torch.no_grad():
                destination[prefix + "weight"] = self.basis().detach()

    def forward(self, z: Tensor) -> Tensor:
        return nn.functional.linear(z, self.basis(), self.bias)


def orthonormal_rows(weight: Tensor) -> Tensor:
    """Gram-Schmidt on the rows, by the QR of the transpose, diag(R) > 0."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    q, r = torch.linalg.qr(wide.mT)
    sign = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return (q * sign).mT.to(weight.dtype)


def error_of(weight: Tensor) -> float:
    """max |W W^T - I|; NaN where the weight holds one, which no tolerance accepts."""
    wide = weight.detach().to("cpu", torch.float64)
    return (wide @ wide.mT - torch.eye(wide.shape[0], dtype=wide.dtype)).abs().max().item()


def tolerance(dtype: torch.dtype) -> float:
    """What rounding alone may leave: 64 float32 steps, or two of a coarser dtype."""
    return max(64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps, 2 * torch.finfo(dtype).eps)
