"""TSSA, Token Statistics Self-Attention (ToST).

    s_nk = z_n U_k        e_nk = sum_i s_nki^2 / sum_m s_mki^2         pi_nk = softmax_k(temperature_k e_nk)
    T_ki = sum_n pi_nk s_nki^2 / sum_n pi_nk                           out( -pi a s ),   a_ki = 1 / (1 + T_ki)

In words: a token belongs to the subspace it has most energy in, so membership follows from the subspaces.
The published code divides each channel by its norm over tokens first (`normalize_tokens`); the formula in the text does not.
With that division e_nk is about p/n, so membership stays nearly uniform.

`position_scores` (ours) adds DMSA's rotated scores to the membership logits: l_nk = temperature_k e_nk + <rot_n z_n, w_k>.
It separates the two things that DMSA changes, a learned membership and a gate.
"""

from __future__ import annotations

from typing import Any

from dmst.errors import choose
from dmst.kernels import Form
from dmst.operators.family import TokenStatistics


class TSSA(TokenStatistics):
    """Membership from projected energy, every head on."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        position_scores: str = "none",
        normalize_tokens: bool = True,
        **options: Any,
    ) -> None:
        choose("position_scores", position_scores, ("none", "1d", "2d"))
        form = Form(
            num_heads=num_heads,
            membership="energy",
            gate=None,
            rotary=position_scores,
            normalize_tokens=normalize_tokens,
        )
        super().__init__(dim, form, **options)
