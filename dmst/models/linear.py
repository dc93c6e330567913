"""A linear map with the lineage's start: weight truncated normal .02, bias 0; and whether its weight is all there is to it."""

from __future__ import annotations

from torch import Tensor, nn

from dmst import watched


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def is_plain(linear: nn.Module) -> bool:
    """Whether a product with its weight is all that a call of it is: no adapter, no quantized or sharded weight, no hook."""
    if type(linear) is not Linear or watched.hooked(linear):
        return False
    return type(linear.weight) in (Tensor, nn.Parameter) and not watched.everywhere()
