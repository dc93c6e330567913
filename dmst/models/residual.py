"""The residual step: z + drop_path(scale * update).

`scale` is LayerScale: one number per channel, or one shared number if the operator has `wants_scalar_scale` (`proximal`: a
scale per channel could make its step raise the rate). drop_path leaves out the update of a whole sample at random, in
training only.

scale (W x + b) = (scale W) x + scale b: under torch.compile, and in training on a GPU, where the update ends with a linear map
of ours, that map is scaled in place of the tokens. That saves a pass over them forward and three on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmst import tracing
from dmst.kernels import compute_dtype, without_autocast
from dmst.one_node import OneNode


class Residual(OneNode):
    def __init__(
        self, dim: int, layer_scale: float | None, drop_path: float = 0.0, *, scalar: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.layer_scale, self.drop_path = layer_scale, drop_path
        self.scale = None if layer_scale is None else nn.Parameter(torch.empty(1 if scalar else dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scale is not None:
            nn.init.constant_(self.scale, self.layer_scale)  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if (scale := state_dict.get(f"{prefix}scale")) is not None and scale.ndim == 0:  # of old files
            state_dict[f"{prefix}scale"] = scale.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def folds(self, z: Tensor, step: nn.Module, last: nn.Module | None) -> bool:
        """Whether `step`, on tokens z, shall scale its `last` linear map itself: in bfloat16 alone. float16 has no room for
        small scales, and wider types are for those who compare bits. Who listens to the step shall hear its update."""
        if self.scale is None or type(last) is not nn.Linear or not isinstance(z, Tensor):  # a proxy of torch.fx
            return False
        pays = tracing.compiled() or (z.is_cuda and torch.is_grad_enabled() and tracing.is_plain_eager())
        return pays and compute_dtype(z) == torch.bfloat16 and tracing.is_plain(step, last)

    def forward(self, z: Tensor, update: Tensor, scaled: bool = False) -> Tensor:
        factor = self.draw(update)
        if factor is not None:
            update = (update * factor).to(update.dtype)
        if self.scale is None or scaled:
            return z + update
        with without_autocast(z):  # which would widen the update in a pass of its own
            return torch.addcmul(z, update, self.scale)

    def draw(self, like: Tensor) -> Tensor | None:
        """drop_path's factor of each sample (b, 1, 1), 0 or 1/keep, at least float32: rounded it would be wrong on average.

        None where every sample keeps its update.
        """
        if not (self.drop_path and self.training):
            return None
        keep = 1 - self.drop_path
        dtype = torch.promote_types(like.dtype, torch.float32)
        kept = like.new_empty(like.shape[0], 1, 1, dtype=dtype).bernoulli_(keep)
        return kept / keep if keep else kept

    def extra_repr(self) -> str:
        return f"layer_scale={self.layer_scale}, drop_path={self.drop_path}"
