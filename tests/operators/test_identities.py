"""The mathematics as tests: what the operators are, and which printed claims hold. Row numbers are those of docs/theory.md."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from dmst import objective
from dmst.kernels import Form, reference
from dmst.operators import DMSA, MSSA, TPSUSA, TPUSA, TSSA, Operator
from dmst.sparsemax import sparsemax
from tests.cases import build, excite, orthonormal_rows, relative, tie, tokens, with_form

F64 = torch.float64
FLOATS = [(F64, 1e-10), (torch.float32, 1e-5)]


def fixed_rate(parts: object, subspaces: Tensor, bias: Tensor | None, z: Tensor, eps: float) -> Tensor:
    """R_var of z with membership and gate held where `parts` has them."""
    projected = torch.einsum("bnd,kdp->bknp", z, subspaces)
    if bias is not None:
        k, p = subspaces.shape[0], subspaces.shape[2]
        projected = projected + bias.view(1, k, 1, p)
    gate = None if parts.gate is None else parts.gate.detach()  # type: ignore[attr-defined]
    return objective.variational_rate(projected, parts.membership.detach(), gate, eps=eps)  # type: ignore[attr-defined]


def subspaces_of(operator: Operator) -> Tensor:
    weight = operator.weights().subspace  # type: ignore[operator]
    return weight.detach().view(operator.num_heads, operator.head_dim, operator.dim).mT


def minus_n_gradient(operator: Operator, z: Tensor, eps: float) -> Tensor:
    parts = operator.decompose(z)
    moving = z.detach().clone().requires_grad_()
    bias = operator.subspace.bias  # type: ignore[union-attr]
    rate = fixed_rate(parts, subspaces_of(operator), None if bias is None else bias.detach(), moving, eps)
    return -z.shape[1] * torch.autograd.grad(rate.sum(), moving)[0]


# --- rows 1 to 4: what the operators are -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bar"), FLOATS)
@pytest.mark.parametrize("n", [7, 63, 197])
@pytest.mark.parametrize("name", ["dmsa", "tpsusa", "tssa", "tpusa"])
def test_row_1_operator_is_the_gradient(name: str, n: int, dtype: torch.dtype, bar: float) -> None:
    """`equation` = -n grad R_var, membership and gate fixed. TSSA and TPUSA have no gate: tied and at delta 0, they are too."""
    options = {"mode": "equation"} if name in ("dmsa", "tpsusa") else {}
    operator = with_form(tie(build(name, options, dtype=dtype)), delta=0.0)
    z = tokens(n=n, dtype=dtype)
    expected = minus_n_gradient(operator, z, eps=math.sqrt(operator.dim))  # c = d/eps^2 = 1
    assert relative(operator(z), expected) < bar


def test_row_1_delta_is_why_it_is_0() -> None:
    """With the printed 1e-8 the identity is lost beyond 1e-10; nothing else changed."""
    operator = tie(build("tssa", {}))
    z = tokens(n=7)
    error = relative(operator(z), minus_n_gradient(operator, z, eps=math.sqrt(operator.dim)))
    assert 1e-10 < error < 1e-7


def test_row_1_holds_only_with_membership_fixed() -> None:
    """Let membership follow z and TSSA is not the gradient any more: the theory's objective freezes it."""
    operator = with_form(tie(build("tssa", {"normalize_tokens": False})), delta=0.0)
    torch.nn.init.constant_(operator.temperature, 2.0)
    z = tokens(n=30).requires_grad_()
    rate = operator.rate(z, eps=math.sqrt(operator.dim))
    assert rate is not None
    attached = -30 * torch.autograd.grad(rate.sum(), z)[0]
    assert relative(operator(z).detach(), attached) > 0.1


@pytest.mark.parametrize(("dtype", "bar"), FLOATS)
def test_row_2_tied_listing_descends_another_objective(dtype: torch.dtype, bar: float) -> None:
    """The listing with a tied output is -n grad of sum_k R_k / g_k over active heads, not of sum_k R_k."""
    operator = with_form(tie(build("dmsa", {}, dtype=dtype)), delta=0.0)
    z = tokens(n=30, dtype=dtype)
    parts = operator.decompose(z)
    moving = z.clone().requires_grad_()
    projected = torch.einsum("bnd,kdp->bknp", moving, subspaces_of(operator))
    projected = projected + operator.subspace.bias.detach().view(1, 3, 1, 8)
    total = torch.zeros((), dtype=dtype)
    for k in range(3):
        one = slice(k, k + 1)
        eps = math.sqrt(8)  # c = p/eps^2 = 1 for one head alone
        rate = objective.variational_rate(projected[:, one], parts.membership[:, one], parts.gate[:, one], eps=eps)
        active = parts.gate[:, k] > 0
        total = total + (rate[active] / parts.gate[active, k].detach()).sum()
    reweighted = -30 * torch.autograd.grad(total, moving)[0]
    assert relative(operator(z), reweighted) < bar
    assert relative(operator(z), minus_n_gradient(operator, z, eps=math.sqrt(operator.dim))) > 0.1


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_row_3_constants_are_absorbed(dtype: torch.dtype, bar: float) -> None:
    projected = torch.randn(2, 3, 7, 5, dtype=dtype)
    membership = torch.rand(2, 3, 7, dtype=dtype)
    gate = sparsemax(torch.randn(2, 3, dtype=dtype))
    c = 15 / 0.3**2
    scaled = objective.variational_rate(math.sqrt(c) * projected, membership, gate, eps=math.sqrt(15))
    assert relative(objective.variational_rate(projected, membership, gate, eps=0.3), scaled) < bar
    # core(c; s) = sqrt(c) core(1; sqrt(c) s): the core with f'(t) = c/(1 + c t), written out
    form = Form(num_heads=3, mode="equation", delta=0.0)
    moment = torch.einsum("bkn,bknp->bkp", membership, projected**2) / membership.sum(-1)[..., None]
    slope = c / (1 + c * gate[..., None] ** 2 * moment)
    direct = -(gate[..., None] ** 2 * slope).unsqueeze(-2) * membership[..., None] * projected
    absorbed = math.sqrt(c) * reference.token_statistics(math.sqrt(c) * projected, membership, gate, form=form)
    assert relative(absorbed, direct) < bar


def test_row_3_constants_are_absorbed_proximal() -> None:
    projected, membership = torch.randn(2, 3, 7, 5, dtype=F64), torch.rand(2, 3, 7, dtype=F64)
    gate, theta, c = sparsemax(torch.randn(2, 3, dtype=F64)), torch.tensor(0.7, dtype=F64), 11.0
    form = Form(num_heads=3, mode="proximal", delta=0.0)
    moment = torch.einsum("bkn,bknp->bkp", membership, projected**2) / membership.sum(-1)[..., None]
    w = theta * (gate[..., None] ** 2 * c / (1 + c * gate[..., None] ** 2 * moment)).unsqueeze(-2) * membership[..., None]
    absorbed = reference.token_statistics(math.sqrt(c) * projected, membership, gate, theta * c, form=form) / math.sqrt(c)
    assert relative(absorbed, -w / (1 + w) * projected) < 1e-12


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_row_4_membership_and_gate_only_raise_the_rate(dtype: torch.dtype, bar: float) -> None:
    """1-homogeneous in membership (Euler), increasing in membership and gate: a lower rate is free by shrinking either."""
    projected = torch.randn(2, 3, 7, 5, dtype=dtype)
    membership = torch.rand(2, 3, 7, dtype=dtype, requires_grad=True)
    gate = sparsemax(torch.randn(2, 3, dtype=dtype)).requires_grad_()

    def rate(m: Tensor, g: Tensor) -> Tensor:
        return objective.variational_rate(projected, m, g, eps=0.5)

    value = rate(membership, gate)
    dm, dg = torch.autograd.grad(value.sum(), (membership, gate))
    assert relative((membership * dm).sum((1, 2)), value) < bar
    assert relative(rate(2.5 * membership, gate), 2.5 * value) < bar
    assert (dm >= 0).all()
    assert (dg >= 0).all()
    # the closed forms of both
    c, n = 15 / 0.25, 7
    moment = torch.einsum("bkn,bknp->bkp", membership, projected**2) / membership.sum(-1)[..., None]
    m = gate[..., None] ** 2 * moment
    slope = c / (1 + c * m)
    expected = (torch.log1p(c * m) - slope * m).sum(-1)[..., None]
    expected = (expected + torch.einsum("bkp,bknp->bkn", slope * gate[..., None] ** 2, projected**2)) / (2 * n)
    assert relative(dm, expected) < bar
    assert relative(dg, membership.sum(-1) / n * gate * (slope * moment).sum(-1)) < bar


# --- rows 7 to 9: descent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "slack"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_row_7_certificate_for_any_update(dtype: torch.dtype, slack: float) -> None:
    """R(z + t delta) <= R(z) + (t lin + t^2 quad/2)/n, whatever delta is; t* and 1.999 t* descend where lin < 0."""
    descents = 0
    for _ in range(100):
        n, d = 9, 12
        z, delta = torch.randn(2, n, d, dtype=dtype), torch.randn(2, n, d, dtype=dtype)
        subspaces = torch.randn(3, d, 4, dtype=dtype) / math.sqrt(d)
        membership = torch.rand(2, 3, n, dtype=dtype)
        gate = sparsemax(torch.randn(2, 3, dtype=dtype))
        eps = math.sqrt(d)

        def rate(at: Tensor, m: Tensor = membership, g: Tensor = gate, u: Tensor = subspaces, e: float = eps) -> Tensor:
            return objective.variational_rate(torch.einsum("bnd,kdp->bknp", at, u), m, g, eps=e)

        s, e = (gate[..., None, None] * torch.einsum("bnd,kdp->bknp", x, subspaces) for x in (z, delta))
        moment = torch.einsum("bkn,bknp->bkp", membership, s**2) / membership.sum(-1)[..., None]
        w = membership[..., None] / (1 + moment).unsqueeze(-2)
        lin, quad = (w * s * e).sum((1, 2, 3)), (w * e**2).sum((1, 2, 3))
        for t in (0.01, 0.3, 1.0, 4.0):
            assert (rate(z + t * delta) <= rate(z) + (t * lin + t**2 * quad / 2) / n + slack).all()
        best = -lin / quad
        falls = lin < -1e-3
        descents += int(falls.sum())
        for factor in (1.0, 1.999):
            after = rate(z + (factor * best)[:, None, None] * delta)
            assert (after[falls] < rate(z)[falls] + slack).all()
        guaranteed = lin**2 / (2 * n * quad)
        assert (rate(z)[falls] - rate(z + best[:, None, None] * delta)[falls] >= guaranteed[falls] - slack).all()
    assert descents > 50


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_row_8_proximal_is_the_implicit_step(dtype: torch.dtype, bar: float) -> None:
    """z + update = (I + theta A_n)^-1 z, a linear solve for each token, where the subspaces are jointly orthonormal."""
    operator = build("dmsa", {"mode": "proximal", "bias": False}, dtype=dtype).eval()
    z = tokens(n=11, dtype=dtype)
    parts, u, theta = operator.decompose(z), subspaces_of(operator), operator.weights().theta
    moment = torch.einsum("bkn,bknp->bkp", parts.membership, parts.projected**2) / parts.membership.sum(-1)[..., None]
    slope = parts.gate[..., None] ** 2 / (1 + parts.gate[..., None] ** 2 * moment)
    curvature = torch.einsum("bkn,bkp,kdp,kep->bnde", parts.membership, slope, u, u)
    solved = torch.linalg.solve(torch.eye(24, dtype=dtype) + theta * curvature, z.unsqueeze(-1)).squeeze(-1)
    assert relative(z + operator(z), solved) < bar


@pytest.mark.parametrize("theta", [0.1, 1.0, 10.0, 1e3, 1e6])
def test_row_8_proximal_descends_for_every_step(theta: float) -> None:
    for trial in range(20):
        torch.manual_seed(trial)
        operator = build("dmsa", {"mode": "proximal", "bias": False}).eval()
        with torch.no_grad():
            operator.theta.fill_(theta if theta > 20 else math.log(math.expm1(theta)))
        z = tokens(n=11)
        parts, u = operator.decompose(z), subspaces_of(operator)
        before, after = (fixed_rate(parts, u, None, at, eps=math.sqrt(24)) for at in (z, z + operator(z)))
        assert (after < before).all()


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
def test_scalar_scale_is_safe_where_theory_says(mode: str) -> None:
    """Tied orthonormal subspaces, c = 1, gate <= 1: every scalar scale in (0, 2) descends."""
    u = orthonormal_rows(3, 8, 24)
    weight = u.mT.reshape(24, 24)
    for trial in range(30):
        torch.manual_seed(trial)
        operator = build("dmsa", {"mode": mode, "bias": False}).eval()
        with torch.no_grad():
            operator.subspace.weight.copy_(weight)
        tie(operator)
        z = tokens(n=11)
        parts = operator.decompose(z)
        before = fixed_rate(parts, u, None, z, eps=math.sqrt(24))
        for scale in (0.01, 0.5, 1.0, 1.99):
            assert (fixed_rate(parts, u, None, z + scale * operator(z), eps=math.sqrt(24)) < before).all()


@pytest.mark.parametrize(
    ("membership", "gate", "alpha", "theta", "form", "change"),
    [
        ((0.5, 0.5), (0.9, 0.1), -0.05, None, "listing", 0.083),
        ((0.5, 0.5), (0.9, 0.1), -0.05, None, "equation", -0.035),
        ((1.0, 0.01), (1.0, 1.0), -0.2, 100.0, "proximal", 1.61),
        ((1.0, 0.01), (1.0, 1.0), -0.2, None, "equation", -0.54),
    ],
)
def test_row_9_vector_scales_break_the_descent(
    membership: tuple, gate: tuple, alpha: float, theta: float | None, form: str, change: float
) -> None:
    """A LayerScale vector is safe for `equation` only: two counter-examples in two dimensions, one token."""
    u = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64) / math.sqrt(2)  # two lines at 45 degrees, as rows
    subspaces = u.unsqueeze(-1)
    z = (0.01 * (alpha * u[0] + u[1])).view(1, 1, 2)
    pi, g = torch.tensor(membership, dtype=F64).view(1, 2, 1), torch.tensor(gate, dtype=F64).view(1, 2)
    projected = torch.einsum("bnd,kdp->bknp", z, subspaces)
    step = None if theta is None else torch.tensor(theta, dtype=F64)
    update = reference.token_statistics(projected, pi, g, step, form=Form(num_heads=2, mode=form, delta=0.0))
    delta = torch.einsum("bknp,kdp->bnd", update, subspaces)
    scale = torch.tensor([1.0, 0.0], dtype=F64)

    def rate(at: Tensor) -> float:
        return objective.variational_rate(torch.einsum("bnd,kdp->bknp", at, subspaces), pi, g, eps=math.sqrt(2)).item()

    found = rate(z + scale * delta) / rate(z) - 1
    assert found == pytest.approx(change, rel=0.02)


def test_the_listing_with_a_free_output_promises_nothing() -> None:
    """Random weights, membership and gate fixed: tied, the listing lowers the rate; free, as printed, it raises it as often."""
    falls = {"tied": 0, "free": 0}
    for trial in range(60):
        torch.manual_seed(trial)
        u = orthonormal_rows(3, 8, 24)
        operator = build("dmsa", {"bias": False})
        with torch.no_grad():
            operator.subspace.weight.copy_(u.mT.reshape(24, 24))
            operator.out.bias.zero_()
        z = tokens(n=11)
        parts = operator.decompose(z)
        before = fixed_rate(parts, u, None, z, eps=math.sqrt(24))
        for kind in ("free", "tied"):
            layer = tie(operator) if kind == "tied" else operator
            falls[kind] += int((fixed_rate(parts, u, None, z + layer(z), eps=math.sqrt(24)) < before).sum())
    assert falls["tied"] == 120
    assert falls["free"] < 84


def test_mssa_relaxed_step_descends_and_the_plain_residual_climbs() -> None:
    """CRATE's rate at orthonormal subspaces: (1 - kappa) z + kappa MSSA(z) lowers it, z + MSSA(z) raises it."""
    for trial in range(60):
        torch.manual_seed(trial)
        weight = orthonormal_rows(3, 8, 24).mT.reshape(24, 24)
        z = tokens(n=30)
        relaxed = MSSA(24, 3, relaxed=0.3, bias=False, dtype=F64)
        plain = MSSA(24, 3, bias=False, dtype=F64)
        with torch.no_grad():
            relaxed.subspace.weight.copy_(weight)
            plain.subspace.weight.copy_(weight)
            plain.out.weight.copy_(weight.T)
            plain.out.bias.zero_()
        before = relaxed.rate(z, eps=0.5)
        assert (relaxed.rate(z + relaxed(z), eps=0.5) < before).all()
        assert (plain.rate(z + plain(z), eps=0.5) > before).all()


# --- row 10: Theorem 1 -----------------------------------------------------------------------------------------------


def test_row_10_theorem_1_is_false_as_printed() -> None:
    """All tokens 3 u_1, coupled weight .501, scores (2, 0) and all that follows from them: the claimed gain is -0.437 nats."""
    n = 6
    projected = torch.zeros(1, 2, n, 1, dtype=F64)
    projected[:, 0] = 3.0
    energy = torch.tensor([9.0, 0.0], dtype=F64)
    coupled = (energy / (2 * 1000)).softmax(0).view(1, 2, 1).expand(1, 2, n)
    scores = torch.tensor([[2.0, 0.0]], dtype=F64)  # the same for every token, as DMSA computes from them:
    decoupled, gate = scores.sigmoid().unsqueeze(-1).expand(1, 2, n), sparsemax(scores)
    assert gate.tolist() == [[1.0, 0.0]]
    eps = math.sqrt(2)  # c = 1
    gain = objective.variational_rate(projected, coupled, eps=eps) - objective.variational_rate(
        projected, decoupled, gate, eps=eps
    )
    assert gain.item() == pytest.approx(-0.437, abs=1e-3)


def test_row_10_theorem_1_prime_holds_and_is_only_shrinkage() -> None:
    """Smaller membership and gate <= 1 never raise the rate; so half the subspaces "win" as well."""
    for _ in range(100):
        projected = torch.randn(2, 3, 7, 5, dtype=F64)
        coupled = torch.rand(2, 3, 7, dtype=F64)
        decoupled = coupled * torch.rand(2, 3, 7, dtype=F64)
        gate = sparsemax(torch.randn(2, 3, dtype=F64))
        high = objective.variational_rate(projected, coupled, eps=0.5)
        assert (objective.variational_rate(projected, decoupled, gate, eps=0.5) < high).all()
        assert (objective.variational_rate(projected / 2, coupled, eps=0.5) < high).all()


# --- row 11: gates ---------------------------------------------------------------------------------------------------


def low(dtype: torch.dtype, bar: float, *tensors: Tensor) -> tuple[list[Tensor], list[Tensor], float]:
    """Inputs rounded to dtype as they are stored, and the same numbers in float64."""
    rounded = [t.to(dtype) for t in tensors]
    return [t.to(torch.promote_types(dtype, torch.float32)) for t in rounded], [t.double() for t in rounded], bar


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_row_11_gate_identities(dtype: torch.dtype, bar: float) -> None:
    k, n, p, d = 3, 7, 5, 15
    (s, scores, gate, u), (s64, scores64, gate64, u64), bar = low(
        dtype, bar, torch.randn(2, k, n, p), torch.randn(2, k, n), sparsemax(torch.randn(2, k)), torch.randn(k, d, p)
    )
    pi, pi64, g64 = scores.sigmoid(), scores64.sigmoid(), gate64[..., None]
    listing = Form(num_heads=k)
    update = reference.token_statistics(s, pi, gate, form=listing)
    mass = pi64.sum(-1) + 1e-8
    moment = torch.einsum("bkn,bknp->bkp", pi64, s64**2) / mass[..., None]

    # E2: the listing is sigmoid(scores) times a head output that knows token weights through T alone: G1's form, with
    # membership as the gate
    head = -(g64 / (1 + g64**2 * moment)).unsqueeze(-2) * s64
    assert relative(update, pi64[..., None] * head) < bar

    # E1: gating both bases gives the gate squared, not the paper's single G_k
    both = reference.token_statistics(s, pi, gate, form=Form(num_heads=k, mode="equation"))
    gated_bases = g64[..., None] * u64
    inner = torch.einsum("bkdp,bkp,bknp->bnd", gated_bases, -1 / (1 + g64**2 * moment), g64[..., None] * s64 * pi64[..., None])
    assert relative(torch.einsum("bknp,kdp->bnd", both, u), inner) < bar
    single = torch.einsum("bkn,bknp,kdp->bnd", pi64, head, u64)
    assert relative(single, inner) > 0.3

    # E3: membership 1 leaves gate times channel attention of gated energy
    ones = torch.ones_like(pi)
    channel = -s64 / (1 + g64**2 * (s64**2).mean(-2)).unsqueeze(-2)
    assert (
        relative(reference.token_statistics(s, ones, gate, form=Form(num_heads=k, delta=0.0)), g64[..., None] * channel) < bar
    )
    ungated = -s64 / (1 + (s64**2).mean(-2)).unsqueeze(-2)
    assert relative(channel, ungated) > 0.1  # a gate outside ungated channel attention is something else

    # E5: a gate per token inside both bases comes out squared: (G_n U) D (G_n U)^T z_n = G_n^2 U D U^T z_n
    z64, diagonal = torch.randn(2, n, d, dtype=F64), torch.rand(k, p, dtype=F64)
    per_token = pi64[..., None, None] * u64[:, None]  # (b, k, n, d, p): each token its own basis
    inside = torch.einsum("bkndp,kp,bknep,bne->bnd", per_token, diagonal, per_token, z64)
    outside = torch.einsum("bkn,kdp,kp,kep,bne->bnd", pi64**2, u64, diagonal, u64, z64)
    assert relative(inside, outside) < 1e-12
    assert relative(inside, torch.einsum("bkn,kdp,kp,kep,bne->bnd", pi64, u64, diagonal, u64, z64)) > 0.1

    # E6: a mask on columns sits inside, a mask on rows outside
    columns, rows = torch.rand(k, p, dtype=F64), torch.rand(d, dtype=F64)
    column_masked = u64 * columns.unsqueeze(1)
    left = torch.einsum("kdp,kp,kep->de", column_masked, diagonal, column_masked)
    assert relative(left, torch.einsum("kdp,kp,kep->de", u64, columns**2 * diagonal, u64)) < 1e-12
    row_masked = u64 * rows.view(1, d, 1)
    left = torch.einsum("kdp,kp,kep->de", row_masked, diagonal, row_masked)
    plain = torch.einsum("kdp,kp,kep->de", u64, diagonal, u64)
    assert relative(left, rows[:, None] * plain * rows) < 1e-12


def test_row_11_e4_hard_gates_make_all_forms_one() -> None:
    s, pi = torch.randn(2, 3, 7, 5, dtype=F64), torch.rand(2, 3, 7, dtype=F64)
    hard = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=F64)
    once, twice = (
        reference.token_statistics(s, pi, hard, form=Form(num_heads=3, mode=form)) for form in ("listing", "equation")
    )
    assert torch.equal(once, twice)


def test_row_11_e7_a_gate_does_not_leave_the_sum() -> None:
    """Pulling G_k out of sum_k, as the paper does, needs all G_k equal."""
    heads = torch.randn(3, 7, 5, dtype=F64)
    gate = torch.rand(3, 1, 1, dtype=F64)
    together, gated = heads.sum(0), (gate * heads).sum(0)
    best = (together * gated).sum() / together.square().sum()  # no other number comes closer
    assert relative(best * together, gated) > 0.1
    equal = torch.full_like(gate, 0.4)
    assert relative(0.4 * heads.sum(0), (equal * heads).sum(0)) < 1e-15


# --- rows 16, 19, 20 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("mode", ["listing", "equation"])
def test_row_16_silent_heads_can_be_left_out(mode: str, dtype: torch.dtype, bar: float) -> None:
    """Remove the heads whose gate is 0 for a sample: output and every gradient stay."""
    operator = build("dmsa", {"mode": mode}, heads=6, dtype=dtype)
    torch.nn.init.normal_(operator.assign.weight)
    z = tokens(b=1, n=13, dtype=dtype).requires_grad_()
    gate = operator.decompose(z).gate
    on = gate[0].nonzero().flatten().tolist()
    assert 0 < len(on) < 6
    out = operator(z)
    grad = torch.randn_like(out)
    names = [name for name, _ in operator.named_parameters()]
    dense = dict(zip(["z", *names], torch.autograd.grad(out, (z, *operator.parameters()), grad), strict=True))

    weights = operator.weights()
    scores = reference.score(z, weights, operator.form, None)
    keep = torch.tensor([k * 4 + i for k in on for i in range(4)])  # p = 4
    some = weights._replace(
        subspace=weights.subspace[keep],
        subspace_bias=weights.subspace_bias[keep],
        out=None if weights.out is None else weights.out[:, keep],
    )
    projected = reference.project(z, some, len(on), dtype)
    update = reference.token_statistics(
        projected, scores.sigmoid()[:, on], sparsemax(scores.mean(-1))[:, on], form=operator.form
    )
    sparse_out = reference.project_out(update, some, dtype)
    assert relative(sparse_out, out) < bar
    sparse = torch.autograd.grad(sparse_out, (z, *operator.parameters()), grad)
    for (name, expected), found in zip(dense.items(), sparse, strict=True):
        assert relative(found, expected) < bar, name


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize(
    ("name", "options", "equivariant"),
    [
        ("mhsa", {}, True),
        ("xca", {}, True),
        ("mssa", {}, True),
        ("mssa", {"relaxed": 0.3}, True),
        ("tssa", {}, True),
        ("tssa", {"position_scores": "1d"}, False),
        ("dmsa", {"rotary": "none"}, True),
        ("dmsa", {"rotary": "1d"}, False),
        ("dmsa", {"rotary": "2d"}, False),
        ("tpusa", {"rotary": "none"}, True),
        ("tpusa", {"rotary": "1d"}, False),
        ("tpsusa", {"rotary": "none"}, True),
        ("gated_channel", {"rotary": "none"}, True),
        ("gated_channel", {"rotary": "1d"}, False),
    ],
)
def test_row_19_permuting_tokens(name: str, options: dict, equivariant: bool, dtype: torch.dtype, bar: float) -> None:
    operator = build(name, options, dtype=dtype)
    z = tokens(n=15, dtype=dtype)
    order = torch.randperm(15)
    error = relative(operator(z[:, order], grid=(3, 5)), operator(z, grid=(3, 5))[:, order])
    assert (error < bar) if equivariant else (error > 0.01)


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_row_20_late_gate_is_the_early_gate(dtype: torch.dtype, bar: float) -> None:
    """The listing gates before squaring; statistics of ungated tokens with the gate squared are the same numbers."""
    s, pi = torch.randn(2, 3, 7, 5, dtype=dtype), torch.rand(2, 3, 7, dtype=dtype)
    gate = sparsemax(torch.randn(2, 3, dtype=dtype))
    early = gate[..., None, None] * s
    dots = torch.einsum("bkn,bknp->bkp", pi / (pi.sum(-1, keepdim=True) + 1e-8), early**2)
    expected = -early * pi[..., None] / (1 + dots).unsqueeze(-2)
    assert relative(reference.token_statistics(s, pi, gate, form=Form(num_heads=3)), expected) < bar


# --- the start of training -------------------------------------------------------------------------------------------


def test_at_the_start_the_gate_follows_the_mean_token() -> None:
    """Weights of std .02. Uncorrelated tokens leave every head on near 1/k; tokens that share a mean close some at once."""
    operator = DMSA(384, 8)
    shared = torch.nn.functional.layer_norm(torch.randn(64, 196, 384) + 2 * torch.randn(64, 1, 384), (384,))
    on = operator.decompose(shared).gate > 0
    assert 3 < on.sum(1).float().mean() < 7.9
    z = torch.nn.functional.layer_norm(torch.randn(4, 196, 384), (384,))
    parts = operator.decompose(z)
    assert (parts.gate > 0).all()
    torch.testing.assert_close(parts.gate, torch.full_like(parts.gate, 1 / 8), rtol=0, atol=0.1)
    moment = torch.einsum("bkn,bknp->bkp", parts.membership, parts.projected**2) / parts.membership.sum(-1)[..., None]
    attenuation = 1 / (1 + parts.gate[..., None] ** 2 * moment)
    assert 0.99 < attenuation.mean() < 1


def test_linear_membership_cannot_see_sign_symmetric_subspaces() -> None:
    """Without bias sigmoid(<z, w>) is odd about 1/2: on tokens z and -z its mean is 1/2 for every w. Energy sees them."""
    half = torch.randn(1, 50, 24, dtype=F64)
    z = torch.cat((half, -half), 1)
    dmsa = build("dmsa", {"rotary": "none"})
    torch.testing.assert_close(dmsa.decompose(z).membership.mean(-1), torch.full((1, 3), 0.5, dtype=F64))
    # two kinds of tokens, each in its own subspace with either sign: energy tells them apart, every one
    u = orthonormal_rows(2, 12, 24)
    kind = torch.arange(100) % 2
    z = torch.einsum("np,ndp->nd", torch.randn(100, 12, dtype=F64), u[kind]).unsqueeze(0)
    tssa = TSSA(24, 2, bias=False, normalize_tokens=False, dtype=F64)
    with torch.no_grad():
        tssa.subspace.weight.copy_(u.mT.reshape(24, 24))
    assert torch.equal(tssa.decompose(z).membership.argmax(1)[0], kind)


def test_ablations_share_dmsas_parts() -> None:
    """TPSUSA is TPUSA's membership with DMSA's gate, and TPUSA's rows sum to 1 over tokens."""
    z = tokens(n=30)
    dmsa, tpusa, tpsusa = excite(DMSA(24, 3, dtype=F64)), TPUSA(24, 3, dtype=F64), TPSUSA(24, 3, dtype=F64)
    tpusa.load_state_dict(dmsa.state_dict())
    tpsusa.load_state_dict(dmsa.state_dict())
    assert torch.equal(tpsusa.decompose(z).membership, tpusa.decompose(z).membership)
    assert torch.equal(tpsusa.decompose(z).gate, dmsa.decompose(z).gate)
    torch.testing.assert_close(tpusa.decompose(z).membership.sum(-1), torch.ones(2, 3, dtype=F64))
    rescaled = TPUSA(24, 3, token_sparse_rescale=True, dtype=F64)
    rescaled.load_state_dict(dmsa.state_dict())
    torch.testing.assert_close(rescaled.decompose(z).membership.sum(-1), torch.full((2, 3), 30.0, dtype=F64))


def test_rates_of_the_baselines() -> None:
    z = tokens()
    assert build("mhsa", {}).rate(z, eps=0.5) is None
    assert build("xca", {}).rate(z, eps=0.5) is None
    assert build("gated_channel", {}).rate(z, eps=0.5) is None
    mssa = build("mssa", {})  # with its bias: the rate of the very coordinates that it mixes
    s = mssa.decompose(z).projected
    inside = torch.eye(8, dtype=F64) + 8 / (7 * 0.25) * s.mT @ s
    torch.testing.assert_close(mssa.rate(z, eps=0.5), 0.5 * torch.logdet(inside).sum(1))
    tssa = TSSA(24, 3, dtype=F64)
    parts = tssa.decompose(z)
    assert torch.equal(tssa.rate(z, eps=0.5), objective.variational_rate(parts.projected, parts.membership, eps=0.5))
    assert copy.deepcopy(tssa).rate(z, eps=0.5) is not None
