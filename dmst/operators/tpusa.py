"""TPUSA, the paper's ablation "token-sparse Pi, U": membership is sparse over tokens and there is no gate.

    pi_k = sparsemax over tokens of l_k,   l_nk = <rot_n z_n, w_k>         so mass_k = 1
    out( -pi a s ),   a_ki = 1 / (1 + T_ki),   T_ki = sum_n pi_nk s_nki^2

Our reading of one sentence. A membership that sums to 1 over n tokens is about n/2 times smaller than DMSA's, and so is the
update; `token_sparse_rescale` multiplies it by n.
"""

from __future__ import annotations

from typing import Any

from dmst.kernels import Form
from dmst.operators.family import TokenStatistics


class TPUSA(TokenStatistics):
    """Token-sparse membership, every head on."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        token_sparse_rescale: bool = False,
        rotary: str = "1d",
        **options: Any,
    ) -> None:
        form = Form(
            num_heads=num_heads,
            membership="token_sparsemax",
            gate=None,
            rotary=rotary,
            token_sparse_rescale=token_sparse_rescale,
        )
        super().__init__(dim, form, **options)
