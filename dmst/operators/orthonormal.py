"""A square linear map whose matrix is orthonormal, stored as itself: `weight` is the plain matrix, whatever reads it.

    training    basis = Q^T of weight^T = Q R, diag(R) > 0      Gram-Schmidt on the rows; an optimizer steps freely
    evaluation  basis = weight                                  `eval()` and `state_dict()` first put weight onto the manifold

A matrix that is orthonormal already is left alone to the bit, so saving and loading changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class OrthonormalLinear(nn.Linear):
    """`nn.Linear(dim, dim)` on an orthonormal matrix; `basis()` is the matrix, `retract_()` tidies the stored one."""

    def __init__(self, dim: int, dim_out: int, bias: bool = True, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(dim, dim_out, bias=bias, device=device, dtype=dtype)
        self.register_state_dict_pre_hook(lambda module, *_: module.retract_())

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def basis(self) -> Tensor:
        """The orthonormal matrix that the layer uses."""
        return orthonormal_rows(self.weight) if self.training else self.weight

    def retract_(self) -> None:
        """Put `weight` onto the manifold in place, unless it is there to rounding."""
        if self.weight.is_meta:
            return
        with torch.no_grad():
            wide = self.weight.double()
            error = (wide @ wide.mT - torch.eye(wide.shape[0], dtype=wide.dtype, device=wide.device)).abs().max()
            if not error <= 64 * torch.finfo(self.weight.dtype).eps:
                self.weight.copy_(orthonormal_rows(wide))

    def train(self, mode: bool = True) -> OrthonormalLinear:
        if not mode:
            self.retract_()
        return super().train(mode)

    def forward(self, z: Tensor) -> Tensor:
        return nn.functional.linear(z, self.basis(), self.bias)


def orthonormal_rows(weight: Tensor) -> Tensor:
    """Gram-Schmidt on the rows, by the QR of the transpose, diag(R) > 0; an orthonormal matrix stays itself, to rounding."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    q, r = torch.linalg.qr(wide.mT)
    sign = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return (q * sign).mT.to(weight.dtype)
