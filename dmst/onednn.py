"""x W^T + bias on a CPU by oneDNN, where torch asks MKL: in float32, on x86, where no graph of gradients is made. That is
inference.

On processors that are not Intel's MKL is two times slower (docs/benchmarks.md). A product of less than SMALL multiply-adds an
image stays with torch, whose calls are shorter. The choice does not depend on the batch, so that no image's answer does. Sums
are float32 either way.
"""

from __future__ import annotations

import functools
import math
import platform

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import tracing

SMALL = 2e6
_operators = torch.ops.mkldnn
WORD = {"none": "", "gelu": "none"}  # how the operator wants to be told which GELU: the exact one


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x W^T + bias), "none" or "gelu", for x (..., n, d)."""
    if _serves(x, weight, bias):
        return (_operator if tracing.compiled() else _linear)(x, weight, bias, activation)
    made = F.linear(x, weight, bias)
    return F.gelu(made) if activation == "gelu" else made


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # of a bias it reads no strides
    return _operators._linear_pointwise(x, weight, bias, activation, [], WORD[activation])


# for the compiler, which takes torch's own operator for constant weights alone
_operator = torch.library.custom_op("dmst::linear", _linear, mutates_args=())
_operator.register_fake(lambda x, weight, bias, activation: x.new_empty(*x.shape[:-1], weight.shape[0]))


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return False
    if not (tracing.is_plain_eager() or (tracing.compiled() and not tracing.transformed())):
        return False
    given = (x, weight) if bias is None else (x, weight, bias)
    if any(t.dtype != torch.float32 for t in given) or torch.is_autocast_enabled("cpu"):
        return False
    if x.ndim < 2 or x.shape[-1] != weight.shape[1]:  # torch's to take, or to refuse
        return False
    pays = x.shape[-2] * x.shape[-1] * weight.shape[0] >= SMALL
    return tracing.surely(pays) and tracing.surely(x.numel() > 0) and _present()


def _present() -> bool:
    return bool(torch.backends.mkldnn.enabled) and _works()


_present._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result, which imports the compiler


@functools.cache
def _works() -> bool:
    """Whether torch has the operator, and it does what is said of it."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    x, bias = (torch.tensor(each, device="cpu", dtype=torch.float32) for each in ([[1, 2]], [-9]))
    try:
        plain, bent = (_linear(x, x, bias, name).item() for name in WORD)
    except (AttributeError, RuntimeError):  # another torch
        return False
    return abs(plain + 4) < 1e-6 and abs(bent + 4 * 0.5 * math.erfc(4 / math.sqrt(2))) < 1e-6
