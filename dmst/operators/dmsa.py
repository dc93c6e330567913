"""DMSA, Decoupled Membership-Subspace Attention (the paper's operator).

    s_nk = z_n U_k      l_nk = <rot_n z_n, w_k>      pi_nk = sigmoid(l_nk)      g = sparsemax_k(mean_n l_nk)
    T_ki = sum_n pi_nk s_nki^2 / sum_n pi_nk         a_ki = 1 / (1 + g_k^2 T_ki)

    listing     out( -g pi a s )                 what the paper's appendix prints: free output, gate once
    equation    sum_k -g^2 pi a s U_k^T          exactly -n times the gradient of R_var, membership and gate held fixed
    proximal    sum_k -w/(1+w) s U_k^T           w = theta g^2 pi a, [U_1 .. U_K] orthonormal: lowers R_var for every theta > 0

In words: each token says how much it belongs to each subspace, each image picks its subspaces, and directions that already
carry much energy are shrunk less. The listing is not the gradient: tied, it is -n grad of sum_k R_k / g_k.
"""

from __future__ import annotations

from typing import Any

from dmst.errors import OptionError, choose, number, shown
from dmst.kernels import Form
from dmst.kernels.form import GATE
from dmst.operators.family import TokenStatistics

MODES = ("listing", "equation", "proximal")
GATES = tuple(GATE)
MEMBERSHIPS = ("sigmoid", "softmax")


class DMSA(TokenStatistics):
    """Learned membership, sparse gate. `gate_rotary` gives the scores that the gate reads other positions, for experiments."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        mode: str = "listing",
        gate_activation: str = "sparsemax",
        gate_scale: float = 1.0,
        max_active_heads: int | None = None,
        membership_activation: str = "sigmoid",
        rotary: str = "1d",
        gate_rotary: str | None = None,
        **options: Any,
    ) -> None:
        membership = choose("membership_activation", membership_activation, MEMBERSHIPS)
        gate = (mode, gate_activation, gate_scale, max_active_heads)
        form = gated_form(num_heads, membership, *gate, rotary, gate_rotary=gate_rotary)
        super().__init__(dim, form, **options)


def gated_form(
    num_heads: int,
    membership: str,
    mode: str,
    gate_activation: str,
    gate_scale: float,
    max_active_heads: int | None,
    rotary: str,
    **rest: Any,
) -> Form:
    """The form of a member that has a gate, its options checked."""
    choose("gate_activation", gate_activation, GATES)
    if max_active_heads is not None:
        if type(max_active_heads) is not int or type(num_heads) is not int or not 1 <= max_active_heads <= num_heads:
            raise OptionError(
                f"max_active_heads is {shown(max_active_heads)}: it must be a whole number from 1 to num_heads {num_heads}, "
                "or None."
            )
        if gate_activation != "sparsemax":
            raise OptionError(f"max_active_heads caps a sparsemax gate only, and gate_activation is {shown(gate_activation)}.")
    return Form(
        num_heads=num_heads,
        membership=membership,
        gate=gate_activation,
        mode=choose("mode", mode, MODES),
        gate_scale=number("gate_scale", gate_scale, -1e6, 1e6),
        max_active_heads=max_active_heads,
        rotary=rotary,
        delta=1e-8 if mode == "listing" else 0.0,  # the printed code's, and none where an identity would see it
        **rest,
    )
