"""freeze(model): a copy for inference, in which every orthonormal map is a plain `nn.Linear` with its basis as weight.

An orthonormal map makes its matrix orthonormal at each call: a traced graph holds a QR for that, which ONNX cannot say. Frozen,
the graph is products alone. The logits are the same to the bit, and `save_model` writes the same file.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from dmst.errors import OptionError
from dmst.models.vision import VisionModel
from dmst.operators.orthonormal import OrthonormalLinear


@torch.no_grad()
def freeze(model: VisionModel) -> VisionModel:
    """A copy in evaluation mode that wants no gradients. The model itself stays as it is."""
    if not isinstance(model, VisionModel):
        raise OptionError(f"freeze takes a VisionModel of this package, not {type(model).__name__}: unwrap it first.")
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    for name, module in list(frozen.named_modules()):
        if type(module) is OrthonormalLinear:
            frozen.set_submodule(name, _baked(module))
    return frozen


def _baked(layer: OrthonormalLinear) -> nn.Linear:
    weight = layer.basis()
    size, place = (layer.in_features, layer.out_features), {"device": weight.device, "dtype": weight.dtype}
    plain = nn.utils.skip_init(nn.Linear, *size, bias=layer.bias is not None, **place)
    plain.weight.copy_(weight)
    if layer.bias is not None:
        plain.bias.copy_(layer.bias)
    return plain.eval().requires_grad_(False)
