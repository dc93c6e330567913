"""TPSUSA, the paper's ablation "token-sparse Pi, sparse U": TPUSA's membership and DMSA's gate.

    pi_k = sparsemax over tokens of l_k        g = sparsemax_k(mean_n l_nk)        l_nk = <rot_n z_n, w_k>
    out( -g pi a s ),   a_ki = 1 / (1 + g_k^2 T_ki),   T_ki = sum_n pi_nk s_nki^2

Our reading of one sentence. `mode`, the gate's options and `token_sparse_rescale` are those of DMSA and TPUSA.
"""

from __future__ import annotations

from typing import Any

from dmst.operators.dmsa import gated_form
from dmst.operators.family import TokenStatistics


class TPSUSA(TokenStatistics):
    """Token-sparse membership, sparse gate."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        mode: str = "listing",
        gate_activation: str = "sparsemax",
        gate_scale: float = 1.0,
        max_active_heads: int | None = None,
        token_sparse_rescale: bool = False,
        rotary: str = "1d",
        **options: Any,
    ) -> None:
        gate = (mode, gate_activation, gate_scale, max_active_heads)
        form = gated_form(num_heads, "token_sparsemax", *gate, rotary, token_sparse_rescale=token_sparse_rescale)
        super().__init__(dim, form, **options)
