"""The rates: how many nats it takes to code tokens up to a precision eps. Plain functions of tensors, one number per sample.

    R       coding_rate        all tokens as one Gaussian
    R^c     group_rate         tokens as a mixture: membership says how much of each token belongs to each group
    R_c,f   subspace_rate      tokens coded inside each subspace (CRATE)
    -       projected_rate     membership-weighted log-det inside each subspace
    R_var   variational_rate   the same with the diagonal only: what TSSA and DMSA descend
    R_mix   mixture_rate       groups with means inside each subspace, diagonal spreads: what GMSA descends
    R+      complete_rate      R_var plus the price of what lies outside a subspace: a true bound when subspaces are thin

Shapes: z (b, n, d) tokens, membership (b, k, n), with groups (b, k, g, n), gate (b, k), subspaces (k, d, p),
projected (b, k, n, p) = z U_k.
`eps` is the precision itself and is squared inside; never pass eps^2. `width` names the d of the constant c = d / eps^2:
"dim" is the model width k p (the paper's text), "head_dim" is p (the published curves). Everything is computed in float64, also
under autocast, and returned in at least float32: tokens of low rank at a small eps put 1 beside 1e6 on a diagonal, which
float32 cannot hold. Log-dets are taken on the smaller Gram side. A group of mass 0 costs 0.

What bounds what, all without a gate: variational_rate >= projected_rate always; variational_rate >= group_rate only for square
orthogonal subspaces (there pass width="head_dim", which is d); complete_rate >= group_rate for orthonormal columns of any
number; coding_rate >= group_rate where each token's memberships sum to 1. So "bound" is said of R+ alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmst.errors import OptionError, ShapeError, choose

if TYPE_CHECKING:
    from jaxtyping import Float

WIDTHS = ("dim", "head_dim")


def coding_rate(z: Float[Tensor, "b n d"], *, eps: float) -> Float[Tensor, "b"]:
    """R(Z) = 1/2 logdet(I + d/(n eps^2) Z^T Z)."""
    x = _exact(z)
    n, d = x.shape[-2:]
    return _like_input(0.5 * _logdet(x, x.new_full((n,), 1 / max(n, 1)), _scale(d, eps)), z)


def group_rate(z: Float[Tensor, "b n d"], membership: Float[Tensor, "b k n"], *, eps: float) -> Float[Tensor, "b"]:
    """R^c(Z | Pi) = 1/2 sum_k (mass_k/n) logdet(I + d/(mass_k eps^2) Z^T diag(pi_k) Z).

    With the mass_k/n that the paper's third equation leaves out. Without it R - R^c <= 0 for every z whose memberships sum
    to 1, since logdet(I + A + B) <= logdet(I + A) + logdet(I + B).
    """
    x, pi = _exact(z), _exact(membership)
    _check_shape("membership", pi, (*z.shape[:-2], pi.shape[-2], z.shape[-2]))
    mass = pi.sum(-1)
    per_head = _logdet(x.unsqueeze(-3), pi / _at_least_something(mass).unsqueeze(-1), _scale(x.shape[-1], eps))
    return _like_input(0.5 * (_share(mass, x.shape[-2]) * per_head).sum(-1), z)


membership_rate = group_rate  # the paper writes R^c(Z | Pi) and R_cf(Z, Pi) for one function


def subspace_rate(z: Float[Tensor, "b n d"], subspaces: Float[Tensor, "k d p"], *, eps: float) -> Float[Tensor, "b"]:
    """R_c,f(Z | U) = 1/2 sum_k logdet(I + p/(n eps^2) (Z U_k)^T (Z U_k)): CRATE's. No bound of R^c for arbitrary U."""
    _check_shape("subspaces", subspaces, (subspaces.shape[0], z.shape[-1], subspaces.shape[-1]))
    projected = _project(_exact(z), _exact(subspaces))
    n, p = projected.shape[-2:]
    return _like_input(0.5 * _logdet(projected, projected.new_full((n,), 1 / max(n, 1)), _scale(p, eps)).sum(-1), z)


def projected_rate(
    projected: Float[Tensor, "b k n p"], membership: Float[Tensor, "b k n"], *, eps: float, width: str = "dim"
) -> Float[Tensor, "b"]:
    """1/2 sum_k (mass_k/n) logdet(I + c/mass_k S_k^T diag(pi_k) S_k), S_k = Z U_k.

    variational_rate minus this is the decorrelation gap: 0 iff each head's weighted covariance is diagonal.
    """
    s, pi = _exact(projected), _exact(membership)
    _check_shape("membership", pi, s.shape[:-1])
    mass = pi.sum(-1)
    per_head = _logdet(s, pi / _at_least_something(mass).unsqueeze(-1), _scale(_width(s, width), eps))
    return _like_input(0.5 * (_share(mass, s.shape[-2]) * per_head).sum(-1), projected)


def variational_rate(
    projected: Float[Tensor, "b k n p"],
    membership: Float[Tensor, "b k n"],
    gate: Float[Tensor, "b k"] | None = None,
    *,
    eps: float,
    width: str = "dim",
    normalize_membership: bool = False,
    unit_norm: bool = False,
) -> Float[Tensor, "b"]:
    """R_var = 1/2 sum_k (mass_k/n) sum_{i<=p} log(1 + c g_k^2 T_ki),   T_ki = sum_n pi_nk s_nki^2 / mass_k.

    It falls for free when membership or gate shrinks, so values are comparable only at equal mass and gate:
    `normalize_membership` makes the heads' shares of each token sum to 1, and `unit_norm` scales every projected token to
    length 1 (the published curves), which cancels the gate on the heads it leaves on; silent heads then cost 0.
    """
    s, pi = _exact(projected), _exact(membership)
    _check_shape("membership", pi, s.shape[:-1])
    if normalize_membership:
        pi = pi / _at_least_something(pi.sum(-2, keepdim=True))
    if unit_norm:
        s, gate = _unit(s), None if gate is None else gate != 0
    mass = pi.sum(-1)
    per_head = _diagonal_rate(_second_moment(s, pi, mass), gate, _scale(_width(s, width), eps))
    return _like_input(0.5 * (_share(mass, s.shape[-2]) * per_head).sum(-1), projected)


def mixture_rate(
    projected: Float[Tensor, "b k n p"],
    membership: Float[Tensor, "b k g n"],
    gate: Float[Tensor, "b k"] | None = None,
    *,
    eps: float,
    width: str = "dim",
    normalize_membership: bool = False,
    unit_norm: bool = False,
) -> Float[Tensor, "b"]:
    """R_mix = 1/2 sum_k sum_g (m_kg/n) sum_{i<=p} log(1 + c g_k^2 V_kgi),   m_kg = sum_n pi_nkg,

    mu_kg = sum_n pi_nkg s_nk / m_kg,   V_kgi = sum_n pi_nkg (s_nki - mu_kgi)^2 / m_kg: the rate of a mixture of Gaussians with
    means and diagonal spreads inside each subspace. With one group per head and mean 0 it is `variational_rate`, whose options
    mean the same here: `normalize_membership` makes the shares of each token, over heads and groups, sum to 1.
    """
    s, pi = _exact(projected), _exact(membership)
    _check_shape("membership", pi, (*s.shape[:-2], membership.shape[-2], s.shape[-2]))
    if normalize_membership:
        pi = pi / _at_least_something(pi.sum((-3, -2), keepdim=True))
    if unit_norm:
        s, gate = _unit(s), None if gate is None else gate != 0
    mass = pi.sum(-1)
    # a spread does not see where 0 is: around the mean of all tokens E s^2 - mu^2 keeps its digits
    s = s - (s.sum(-2, keepdim=True) / max(s.shape[-2], 1)).detach()
    weight = pi / _at_least_something(mass).unsqueeze(-1)
    spread = (weight @ s.square() - (weight @ s).square()).clamp(min=0)
    if gate is not None:
        _check_shape("gate", gate, s.shape[:-2])
        gate = gate.unsqueeze(-1).expand(mass.shape)
    per_group = _diagonal_rate(spread, gate, _scale(_width(s, width), eps))
    return _like_input(0.5 * (_share(mass, s.shape[-2]) * per_group).sum((-2, -1)), projected)


def complete_rate(
    z: Float[Tensor, "b n d"], subspaces: Float[Tensor, "k d p"], membership: Float[Tensor, "b k n"], *, eps: float
) -> Float[Tensor, "b"]:
    """R+ = 1/2 sum_k (mass_k/n) [ sum_{i<=p} f(T_ki) + (d-p) f(rho_k) ],   f(t) = log(1 + d/eps^2 t).

    rho_k = sum_n pi_nk (|z_n|^2 - |U_k^T z_n|^2) / (mass_k (d-p)) is the energy that misses the subspace, spread over the
    d-p directions it could lie in. R+ >= group_rate: complete U_k to a square basis, then f is concave. Subspaces are
    orthonormalised by a thin QR first. The truncated R_var charges nothing for a wrong membership; this does.
    """
    x, pi = _exact(z), _exact(membership)
    _check_shape("subspaces", subspaces, (subspaces.shape[0], z.shape[-1], subspaces.shape[-1]))
    _check_shape("membership", pi, (*z.shape[:-2], subspaces.shape[0], z.shape[-2]))
    bases = torch.linalg.qr(_exact(subspaces)).Q
    s = _project(x, bases)
    (n, d), p = x.shape[-2:], bases.shape[-1]
    mass = pi.sum(-1)
    moment = _second_moment(s, pi, mass)
    outside = (x.square().sum(-1).unsqueeze(-2) - s.square().sum(-1)).clamp(min=0)
    residual = (pi * outside).sum(-1) / (_at_least_something(mass) * max(d - p, 1))
    scale = _scale(d, eps)
    per_head = torch.log1p(scale * moment).sum(-1) + (d - p) * torch.log1p(scale * residual)
    return _like_input(0.5 * (_share(mass, n) * per_head).sum(-1), z)


def rate_reduction(total: Float[Tensor, "b"], compressed: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
    """Delta R = R(Z) - R^c(Z): how much the grouping saves. The objective maximises it."""
    return total - compressed


# --- shared pieces ---------------------------------------------------------------------------------------------------


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)  # mps has no float64


def _like_input(rate: Tensor, asked_of: Tensor) -> Tensor:
    """The result in the dtype of the argument, at least float32."""
    return rate.to(torch.promote_types(asked_of.dtype, torch.float32))


def _check_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Refuse what would broadcast into a wrong number."""
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; the other arguments ask for {tuple(shape)}.")


def _scale(width: int, eps: float) -> float:
    if not eps > 0:
        raise OptionError(f"eps is {eps!r}: the precision must be a number above 0 (it is squared inside).")
    return float(width / eps**2)


def _width(projected: Tensor, width: str) -> int:
    k, p = projected.shape[-3], projected.shape[-1]
    return k * p if choose("width", width, WIDTHS) == "dim" else p


def _at_least_something(mass: Tensor) -> Tensor:
    """Mass or length as a divisor: what is empty divides nothing by 1."""
    return torch.where(mass > 0, mass, 1)


def _share(mass: Tensor, n: int) -> Tensor:
    return mass / max(n, 1)


def _project(z: Tensor, subspaces: Tensor) -> Tensor:
    return torch.einsum("...nd,kdp->...knp", z, subspaces)


def _unit(projected: Tensor) -> Tensor:
    return projected / _at_least_something(torch.linalg.vector_norm(projected, dim=-1, keepdim=True))


def _diagonal_rate(moment: Tensor, gate: Tensor | None, scale: float) -> Tensor:
    """sum_i log(1 + c g^2 T_i) of moments (..., p) with gates (...)."""
    if gate is not None:
        _check_shape("gate", gate, moment.shape[:-1])
        moment = _exact(gate).square().unsqueeze(-1) * moment
    return torch.log1p(scale * moment).sum(-1)


def _second_moment(projected: Tensor, membership: Tensor, mass: Tensor) -> Tensor:
    return (membership.unsqueeze(-1) * projected.square()).sum(-2) / _at_least_something(mass).unsqueeze(-1)


def _logdet(x: Tensor, weights: Tensor, scale: float) -> Tensor:
    """logdet(I + scale x^T diag(weights) x) for x (..., n, d), on whichever side is smaller.

    By Cholesky, never by LU: after `torch.set_num_threads` PyTorch's batched LU on the CPU returns wrong numbers.
    The root of a weight of 0 gets the smallest normal number under it: too small to change a value, and its gradient exists.
    A sample that is not finite, or too large for float64 to factor, becomes NaN and leaves the others alone.
    """
    n, d = x.shape[-2:]
    weighted = (weights + torch.finfo(x.dtype).tiny).sqrt().unsqueeze(-1) * x
    gram = weighted.mT @ weighted if d <= n else weighted @ weighted.mT
    factor, failed = torch.linalg.cholesky_ex(torch.eye(min(n, d), dtype=x.dtype, device=x.device) + scale * gram)
    logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(failed == 0, logdet, torch.nan)
