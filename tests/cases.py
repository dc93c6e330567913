"""What several tests share: the variants of every operator, weights that make them do something, and errors as numbers.

Sizes are distinct primes (b, n, k, p = 2, 7, 3, 5), so that no two axes can be confused.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dmst.kernels import choice
from dmst.operators import OPERATORS, Operator, create
from dmst.operators.family import TokenStatistics

B, N, K, P = 2, 7, 3, 5
D = K * P  # 15: odd, so tests with rotary use p = 6 or 8

MODES = ("listing", "equation", "proximal")
GATES = ("sparsemax", "sigmoid", "relu", "gelu", "uniform")

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mhsa", {}),
    ("mhsa", {"bias": False}),
    ("xca", {}),
    ("mssa", {}),
    ("mssa", {"relaxed": 0.3}),
    ("tssa", {}),
    ("tssa", {"position_scores": "1d"}),
    ("tssa", {"position_scores": "2d"}),
    ("tssa", {"normalize_tokens": False}),
    *(("dmsa", {"mode": mode, "gate_activation": gate}) for mode, gate in itertools.product(MODES, GATES)),
    ("dmsa", {"rotary": "2d"}),
    ("dmsa", {"rotary": "none", "bias": False}),
    ("dmsa", {"membership_bias": True, "gate_scale": 3.0}),
    ("dmsa", {"gate_scale": -0.5}),
    ("dmsa", {"max_active_heads": 2}),
    ("dmsa", {"membership_activation": "softmax"}),
    *(("gmsa", {"groups": 2, "mode": mode}) for mode in MODES),
    ("gmsa", {"groups": 2, "own": False, "bias": False}),
    ("gmsa", {"groups": 4, "rounds": 3, "key_rotary": "1d", "gate_activation": "sparsemax", "gate_scale": -0.5}),
    ("gmsa", {"groups": 4, "rounds": 2, "normalize_keys": True, "mode": "proximal", "key_dim": 5, "gate_activation": "none"}),
    ("gmsa", {"groups": 2, "normalize_keys": True, "key_rotary": "2d", "gate_activation": "sigmoid", "key_dim": 2}),
    ("tpusa", {}),
    ("tpusa", {"token_sparse_rescale": True, "rotary": "none"}),
    *(("tpsusa", {"mode": mode}) for mode in MODES),
    ("tpsusa", {"gate_activation": "gelu", "token_sparse_rescale": True, "membership_bias": True}),
    ("gated_channel", {}),
    ("gated_channel", {"moment_weight": "membership", "rotary": "2d"}),
]
FEW: dict[str, dict[str, Any]] = {"gmsa": {"groups": 4}}  # the default number of groups asks for more tokens than tests have
FAMILY = [(name, options) for name, options in VARIANTS if issubclass(OPERATORS[name], TokenStatistics)]
FUSED = [case for case in FAMILY if not choice.unfit(create(case[0], 24, K, **case[1]).form, 24)]  # the kernels compute these


def label(case: tuple[str, dict[str, Any]]) -> str:
    name, options = case
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


def build(name: str, options: dict[str, Any], dim: int = 24, heads: int = K, dtype: torch.dtype = torch.float64) -> Operator:
    """The operator with weights of size 1, at which gates close, memberships spread and attenuation bites."""
    return excite(create(name, dim, heads, dtype=dtype, **FEW.get(name, {}) | options))


def excite(operator: Operator, scale: float = 1.0) -> Operator:
    with torch.no_grad():
        for key, parameter in operator.named_parameters():
            if key == "subspace.weight" and operator.state_dict().keys() >= {"theta"}:
                continue  # orthonormal already
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.normal_(std=scale * (2.0 if "assign" in key else 1.0) / fan_in**0.5)
    return operator


def tokens(b: int = B, n: int = N, d: int = 24, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, n, d, dtype=dtype)


def grid_of(n: int) -> tuple[int, int]:
    """Rows and columns of n tokens, as square as they go."""
    rows = max(r for r in range(1, int(n**0.5) + 1) if n % r == 0) if n else 1
    return rows, n // rows


def relative(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference|, in float64."""
    x, reference = x.double(), reference.double()
    return ((x - reference).norm() / reference.norm().clamp(min=1e-300)).item()


def gradients(
    operator: nn.Module, z: Tensor, grad: Tensor, autocast: torch.dtype | None = None, **call: Any
) -> dict[str, Tensor]:
    """The output and every gradient of <output, grad>. `autocast` is for the forward pass alone, as torch asks."""
    z = z.detach().requires_grad_()
    with nullcontext() if autocast is None else torch.autocast(z.device.type, autocast):
        out = operator(z, **call)
    names, parameters = zip(*operator.named_parameters(), strict=True)
    found = torch.autograd.grad(out, (z, *parameters), grad.to(out.dtype), allow_unused=True)
    return {"out": out.detach(), "z": found[0], **dict(zip(names, found[1:], strict=True))}


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors. The bias of the keys is a sum that cancels; one column of their weight is of as many terms."""
    scales = {name: x.norm().item() for name, x in expected.items()}
    if "key.bias" in scales:
        weight = expected["key.weight"]
        scales["key.bias"] = max(scales["key.bias"], scales["key.weight"] / weight.shape[1] ** 0.5)
    return {name: (found[name].double() - x.double()).norm().item() / scales[name] for name, x in expected.items()}


def with_form(operator: Operator, **changes: Any) -> Operator:
    """A copy whose form differs, for identities that hold at delta = 0."""
    assert isinstance(operator, TokenStatistics)
    other = copy.deepcopy(operator)
    other.form = replace(operator.form, **changes)
    return other


def tie(operator: Operator) -> Operator:
    """Set a free output to the transpose of the subspaces, without bias."""
    assert isinstance(operator, TokenStatistics)
    if operator.out is not None:
        with torch.no_grad():
            operator.out.weight.copy_(operator.subspace.weight.T)
            operator.out.bias.zero_()
    return operator


def orthonormal_rows(k: int, p: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """k bases of p orthonormal columns each, as (k, d, p); jointly orthonormal where k p <= d."""
    if k * p <= d:
        q = torch.linalg.qr(torch.randn(d, k * p, dtype=dtype)).Q
        return q.reshape(d, k, p).permute(1, 0, 2)
    return torch.linalg.qr(torch.randn(k, d, p, dtype=dtype)).Q
