"""What a layer of the family computes: the choices (`Form`), the tensors (`Weights`), and the two small tables they index.

TSSA, DMSA, TPUSA, TPSUSA and the gated channel differ only in how membership and gate come about;
from there on one core serves them all (`reference.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dmst.sparsemax import sparsemax

SAVES = ("projected", "nothing")


class Choices:
    """Of a layer. `text` says the same, as an operator's schema can carry it."""

    text: str
    mode: str
    gate: str | None
    gate_scale: float

    def __post_init__(self) -> None:
        choices = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        object.__setattr__(self, "text", json.dumps(choices))

    @classmethod
    @functools.cache
    def read(cls, text: str) -> Self:
        return cls(**json.loads(text))

    @property
    def power(self) -> int:
        """How often the gate multiplies the update."""
        return 1 if self.mode == "listing" else 2

    @property
    def gate_choice(self) -> tuple[str, float]:
        return str(self.gate), self.gate_scale


@dataclass(frozen=True)
class Form(Choices):
    """The choices of one layer. Defaults are those of the paper's listing. Forms are equal where they compute the same."""

    num_heads: int
    membership: str = "sigmoid"  # a key of MEMBERSHIP, or "energy": softmax over heads of projected energy (TSSA)
    gate: str | None = "sparsemax"  # a key of GATE applied to the token mean of the scores; None: all heads on
    mode: str = "listing"  # listing: gate once; equation: gate squared; proximal: the implicit step
    gate_scale: float = 1.0
    max_active_heads: int | None = None
    rotary: str = "1d"
    gate_rotary: str | None = None  # positions in the scores that the gate reads, if others than those of the membership
    uniform_moment: bool = False  # second moment over all tokens alike, not by membership (gated channel)
    sign: float = -1.0  # +1 in the gated channel
    token_sparse_rescale: bool = False  # membership times n, for memberships that sum to 1 over tokens
    normalize_tokens: bool = True  # TSSA's code divides each channel's energy by its sum over tokens
    delta: float = 1e-8  # added to mass where the published code does; 0 means an empty group is guarded instead
    save: str = field(default="projected", compare=False)  # beside z, for the backward pass; nothing: it is computed again

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Of the weights, by their names in `Weights`."""
        k = self.num_heads
        return dict(zip(Weights._fields, ((d, d), (d,), (k, d), (k,), (d, d), (d,), (k, 1), ()), strict=True))

    @property
    def split(self) -> bool:
        """Whether membership and gate read scores of different positions: plain torch alone computes that."""
        return self.gate is not None and self.gate_rotary not in (None, self.rotary)


class Weights(NamedTuple):
    """The tensors of one layer, as they enter the product (a tied output has `out=None`)."""

    subspace: Tensor  # (k p, d): rows of head k span its subspace, U_k = subspace[k].T
    subspace_bias: Tensor | None = None  # (k p)
    assign: Tensor | None = None  # (k, d)
    assign_bias: Tensor | None = None  # (k)
    out: Tensor | None = None  # (d, k p)
    out_bias: Tensor | None = None  # (d)
    temperature: Tensor | None = None  # (k, 1), TSSA
    theta: Tensor | None = None  # (), proximal; positive


def _token_sparsemax(scores: Tensor, form: Form) -> Tensor:
    return sparsemax(scores, -1, method="sort")  # one method for every length, so that a traced graph has one shape


# Membership of token n in head k from scores (b, k, n).
MEMBERSHIP: dict[str, Callable[[Tensor, Form], Tensor]] = {
    "sigmoid": lambda s, form: s.sigmoid(),
    "softmax": lambda s, form: s.softmax(1),
    "token_sparsemax": _token_sparsemax,
}

# Gate of head k from the token mean of its scores (b, k), before `gate_scale`.
GATE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "sparsemax": lambda s, form: sparsemax(s, -1, max_active=form.max_active_heads),
    "sigmoid": lambda s, form: s.sigmoid(),
    "relu": lambda s, form: s.relu(),
    "gelu": lambda s, form: torch.nn.functional.gelu(s),
    "uniform": lambda s, form: torch.full_like(s, 1 / form.num_heads),
}
