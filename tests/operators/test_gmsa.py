"""GMSA: a gradient, a proximal step that provably lowers its rate, groups that begin as cells, and numbers that stay true."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmst import cells, create_model, load_model, objective, save_model
from dmst.analysis.certificates import certificate_of
from dmst.errors import OptionError, ShapeError, UnknownNameError
from dmst.operators import GMSA, create
from dmst.operators.base import Parts
from tests.cases import MODES, build, gradients, off, relative, tokens
from tests.networks import enliven

F64 = torch.float64
FIXED: dict[str, Any] = {  # what these tests depend on: defaults may move
    "groups": 4, "key_dim": 6, "gate_activation": "gelu", "gate_scale": 3.0, "key_rotary": "none", "normalize_keys": False,
    "rounds": 1, "own": True,
}  # fmt: skip
GRIDS = [(7, None), (63, None), (197, None), (7, (2, 3)), (63, (7, 9)), (197, (14, 14))]  # 7 and 197: one token before them
modes = pytest.mark.parametrize("mode", MODES)


def gmsa(dtype: torch.dtype = F64, **options: Any) -> GMSA:
    operator = build("gmsa", FIXED | options, dtype=dtype)
    assert isinstance(operator, GMSA)
    return operator.eval()


def spread_tokens(n: int = 11, dtype: torch.dtype = F64) -> Tensor:
    """With a mean of their own, so that gates are far from 0, of both signs."""
    return tokens(n=n, dtype=dtype) + 2 * torch.randn(2, 1, 24, dtype=dtype)


def fixed_rate(operator: GMSA, parts: Parts, z: Tensor) -> Tensor:
    """R_mix of z at c = 1, membership and gate held where `parts` has them."""
    projected = torch.einsum("bnd,kdp->bknp", z, operator.subspaces().detach())
    gate = None if parts.gate is None else parts.gate.detach()
    return objective.mixture_rate(projected, parts.membership.detach(), gate, eps=math.sqrt(operator.dim))


def set_theta(operator: GMSA, theta: Tensor) -> None:
    with torch.no_grad():
        operator.theta.copy_(torch.where(theta > 20, theta, torch.log(torch.expm1(theta.clamp(max=20)))))
    assert relative(operator.step_size(), theta) < 1e-9


# --- what it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("n", "grid"), GRIDS)
def test_row_21_the_equation_is_the_gradient(n: int, grid: tuple | None, dtype: torch.dtype, bar: float) -> None:
    """-n grad R_mix, membership and gate fixed: the derivative of a mean cancels, since the mean is the least square."""
    for options in ({}, {"gate_activation": "none"}, {"rounds": 2, "normalize_keys": True, "gate_scale": -2.0}):
        operator = gmsa(dtype, mode="equation", **options)
        z = spread_tokens(n, dtype)
        parts, moving = operator.decompose(z, grid=grid), z.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fixed_rate(operator, parts, moving).sum(), moving)
        assert relative(operator(z, grid=grid), -n * slope) < bar


def test_row_21_holds_only_with_membership_fixed() -> None:
    operator, z = gmsa(mode="equation"), spread_tokens(30).requires_grad_()
    (attached,) = torch.autograd.grad(operator.rate(z, eps=math.sqrt(24)).sum(), z)
    assert relative(operator(z).detach(), -30 * attached) > 0.1


def test_the_rate_is_that_of_the_parts() -> None:
    """And with one group, whose mean is taken off, it is R_var at membership 1."""
    z = spread_tokens()
    operator = gmsa()
    parts = operator.decompose(z)
    assert torch.equal(
        operator.rate(z, eps=0.5), objective.mixture_rate(parts.projected, parts.membership, parts.gate, eps=0.5)
    )
    operator = gmsa(groups=1)
    parts = operator.decompose(z)
    centred = parts.projected - parts.projected.mean(2, keepdim=True)
    expected = objective.variational_rate(centred, torch.ones(2, 3, 11, dtype=F64), parts.gate, eps=0.5)
    assert relative(operator.rate(z, eps=0.5), expected) < 1e-12


def test_parts_are_moments_of_the_groups() -> None:
    operator, z = gmsa(rounds=2), spread_tokens()
    parts = operator.decompose(z)
    for b, k, g in ((0, 0, 0), (1, 2, 3)):
        weight = parts.membership[b, k, g] / parts.membership[b, k, g].sum()
        mean = sum(weight[n] * parts.projected[b, k, n] for n in range(11))
        spread = sum(weight[n] * (parts.projected[b, k, n] - mean) ** 2 for n in range(11))
        assert relative(parts.means[b, k, g], mean) < 1e-12 and relative(parts.spreads[b, k, g], spread) < 1e-10


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("normalize_keys", [False, True])
def test_memberships_and_gate_by_hand(rounds: int, normalize_keys: bool) -> None:
    """Centres are means of cells, in later rounds means by the memberships before; the softmax is over groups."""
    operator, z = gmsa(rounds=rounds, normalize_keys=normalize_keys), spread_tokens(13)
    parts = operator.decompose(z, grid=(3, 4))
    q = (z @ operator.key.weight.T + operator.key.bias).unflatten(-1, (3, 6)).transpose(1, 2)  # (b, k, n, r)
    q = q / q.norm(dim=-1, keepdim=True) if normalize_keys else q
    cell = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3]]).flatten()
    weight = torch.nn.functional.one_hot(cell, 4).T.to(F64)
    weight = torch.cat((torch.zeros(4, 1, dtype=F64), weight), 1).expand(2, 3, 4, 13)  # a token before the patches
    for _ in range(rounds):
        centre = torch.stack([(weight[:, :, g, :, None] * q).sum(2) / weight[:, :, g].sum(-1)[..., None] for g in range(4)], 2)
        centre = centre / centre.norm(dim=-1, keepdim=True) if normalize_keys else centre
        weight = torch.einsum("bknr,bkgr->bkgn", q, centre).mul(8 if normalize_keys else 6**-0.5).softmax(2)
    assert relative(parts.membership, weight) < 1e-12
    score = z.mean(1) @ operator.gate.weight.T
    assert relative(parts.gate, 3 * torch.nn.functional.gelu(score)) < 1e-12


# --- descent -----------------------------------------------------------------------------------------------------------

THETAS = [0.01, 0.3, 1.0, 30.0, 1e4, (0.01, 10.0, 1e4)]


@pytest.mark.parametrize("theta", THETAS, ids=str)
@pytest.mark.parametrize("gate", [("gelu", 3.0), ("sigmoid", -2.0), ("none", 1.0)], ids=str)
def test_row_22_the_proximal_step_descends(theta: Any, gate: tuple) -> None:
    """By at least (f - f^2/2) sum |ds|^2/(n theta) for a fraction f of the step ds, whatever the tokens, gates and theta."""
    signs = set()
    for trial, scale in enumerate((0.1, 1.0, 5.0, 30.0)):
        torch.manual_seed(trial)
        operator = gmsa(mode="proximal", gate_activation=gate[0], gate_scale=gate[1])
        thetas = torch.tensor(theta, dtype=F64).expand(3)
        set_theta(operator, thetas)
        z = scale * spread_tokens()
        step, parts = operator(z).detach(), operator.decompose(z)
        signs |= set() if parts.gate is None else set(parts.gate.sign().flatten().tolist())
        moved = torch.einsum("bnd,kdp->bknp", step, operator.subspaces().detach())
        before = fixed_rate(operator, parts, z)
        for f in (1.0, 0.5, 0.1):
            fall = before - fixed_rate(operator, parts, z + f * step)
            least = (f - f**2 / 2) * (moved.square().sum((-2, -1)) / thetas).sum(-1) / 11
            slack = 1e-12 * before.clamp(min=1)
            assert (least > 0).all() and (fall > 0).all() and (fall >= least - slack).all()
            # the certificate knows this, and more: lin = -quad - |ds|^2/theta at the minimum
            told = certificate_of(parts.projected, f * moved, parts.membership, parts.gate)
            assert (told["bound"].sum(-1) <= -least + slack).all() and (-fall <= told["bound"].sum(-1) + slack).all()
    assert signs >= {"gelu": {1.0, -1.0}, "sigmoid": {-1.0}, "none": set()}[gate[0]]


@pytest.mark.parametrize("theta", [0.3, 1.0, 100.0])
def test_row_23_the_proximal_step_is_the_minimiser(theta: float) -> None:
    """Of the majoriser plus |s' - s|^2/(2 theta), written out group by group; and the majoriser is one."""
    operator = gmsa(mode="proximal")
    thetas = theta * torch.tensor([1.0, 2.0, 5.0], dtype=F64)
    set_theta(operator, thetas)
    z = spread_tokens()
    parts, u = operator.decompose(z), operator.subspaces().detach()
    s, pi, gate = parts.projected.detach(), parts.membership.detach(), parts.gate.detach()[:, :, None, None]
    slope = gate**2 / (1 + gate**2 * parts.spreads.detach())  # of 1/2 log(1 + g^2 V), times 2, at the old spreads

    def majoriser(at: Tensor) -> Tensor:
        """n times the bound of R_mix, but for a constant: (b,)."""
        away = (at.unsqueeze(2) - parts.means.detach().unsqueeze(3)).square()  # (b, k, g, n, p)
        return 0.5 * torch.einsum("bkgn,bkgp,bkgnp->b", pi, slope, away)

    moved = torch.einsum("bnd,kdp->bknp", operator(z).detach(), u)
    at = (s + moved).requires_grad_()
    near = ((at - s).square().sum((-2, -1)) / (2 * thetas)).sum()
    (gradient,) = torch.autograd.grad(majoriser(at).sum() + near, at)
    (start,) = torch.autograd.grad(majoriser(s.requires_grad_()).sum(), s)
    assert gradient.norm() < 1e-12 * start.norm()

    def rate(at: Tensor) -> Tensor:
        return 11 * objective.mixture_rate(at, pi, parts.gate, eps=math.sqrt(24))

    for size in (0.01, 1.0, 30.0):
        other = s.detach() + size * torch.randn_like(s)
        assert (rate(other) - rate(s.detach()) <= majoriser(other) - majoriser(s.detach()) + 1e-10).all()
    (slope_of_rate,) = torch.autograd.grad(rate(s).sum(), s)
    assert relative(slope_of_rate, start) < 1e-12


# --- groups and their cells --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rounds": 2}, {"normalize_keys": True, "mode": "proximal"}], ids=str)
def test_tokens_inside_a_cell_may_change_places(options: dict) -> None:
    operator, z, grid = gmsa(**options), spread_tokens(24), (4, 6)
    cell = means(24, grid, 4).argmax(0)
    inside = torch.empty(24, dtype=torch.long)
    for g in range(4):
        members = (cell == g).nonzero().flatten()
        inside[members] = members[torch.randperm(len(members))]
    assert (inside != torch.arange(24)).sum() > 8
    assert relative(operator(z[:, inside], grid=grid), operator(z, grid=grid)[:, inside]) < 1e-12
    across = torch.randperm(24)
    assert relative(operator(z[:, across], grid=grid), operator(z, grid=grid)[:, across]) > 1e-3


def means(n: int, grid: tuple | None, groups: int) -> Tensor:
    return cells.means(n, grid, groups, device=torch.device("cpu"), dtype=F64)


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize(
    ("grid", "groups", "cells"),
    [((5, 7), 4, (2, 2)), ((8, 8), 16, (4, 4)), ((2, 8), 4, (1, 4)), ((8, 2), 4, (4, 1)), ((14, 14), 15, (3, 5)),
     ((7, 5), 6, (3, 2)), ((3, 3), 9, (3, 3)), ((1, 6), 5, (1, 5)), ((4, 4), 1, (1, 1))],
)  # fmt: skip
def test_cells_divide_the_patches(grid: tuple, groups: int, cells: tuple, before: int) -> None:
    """Every patch in one cell, no cell empty, rectangles, nearly of one size; tokens before the patches in none."""
    rows, columns = grid
    found = means(before + rows * columns, grid, groups)
    assert found.shape == (groups, before + rows * columns) and not found[:, :before].any()
    inside = found[:, before:] > 0
    assert (inside.sum(0) == 1).all() and (inside.sum(1) > 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(groups, dtype=F64))
    maps = inside.view(groups, rows, columns)
    down, across = maps.any(2), maps.any(1)  # rows and columns that a cell touches
    assert torch.equal(maps, down[:, :, None] & across[:, None, :])
    for sides, count, length in ((down.sum(1), cells[0], rows), (across.sum(1), cells[1], columns)):
        assert set(sides.tolist()) <= {length // count, -(-length // count)}
    assert maps[0, 0, 0] and maps[-1, -1, -1]


def test_without_a_grid_cells_are_runs() -> None:
    found = means(11, None, 4) > 0
    assert (found.sum(0) == 1).all() and set(found.sum(1).tolist()) == {2, 3}
    cell = found.int().argmax(0)
    assert torch.equal(cell, cell.sort().values)


def test_a_token_before_the_patches_is_a_member_like_others() -> None:
    """It moves no centre, so the memberships of the patches do not know it; its own are a softmax too."""
    operator, z = gmsa(groups=4), spread_tokens(13)
    with_it, without = operator.decompose(z, grid=(3, 4)), operator.decompose(z[:, 1:], grid=(3, 4))
    assert relative(with_it.membership[..., 1:], without.membership) < 1e-12
    assert relative(with_it.means, without.means) > 1e-3  # it belongs to groups
    assert (with_it.membership.sum(2) - 1).abs().max() < 1e-12


# --- bad input ---------------------------------------------------------------------------------------------------------


def calls(groups: int, n: int, grid: Any = None) -> Tensor:
    return gmsa(groups=groups)(tokens(n=n), grid=grid)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: calls(8, 7), ShapeError, r"groups is 8 and there are 7 tokens.*must be at most 7"),
        (lambda: gmsa(groups=0), OptionError, r"groups is 0: it must be a whole number of at least 1"),
        (lambda: gmsa(groups=2.0), OptionError, r"groups is 2.0: it must be a whole number"),
        (lambda: gmsa(groups=True), OptionError, r"groups is True: it must be a whole number"),
        (lambda: gmsa(key_dim=0), OptionError, r"key_dim is 0: it must be a whole number of at least 1"),
        (lambda: gmsa(rounds=0), OptionError, r"rounds is 0: it must be a whole number of at least 1"),
        (lambda: calls(7, 9, (3, 3)), ShapeError, r"groups is 7: a grid of 3 x 3 patches cannot be cut into 7 cells"),
        (lambda: calls(5, 5, (2, 2)), ShapeError, r"groups is 5: a grid of 2 x 2 .*down at most 2 and across at most 2"),
        (lambda: calls(4, 9, (4, 4)), ShapeError, r"grid is \(4, 4\): .*\(rows, columns\) of the patches among the 9 tokens"),
        (lambda: calls(4, 9, (0, 3)), ShapeError, r"grid is \(0, 3\)"),
        (lambda: calls(4, 9, ("3", "3")), ShapeError, r"grid is \('3', '3'\)"),
        (lambda: calls(4, 9, 9), ShapeError, r"grid is 9: it must be \(rows, columns\)"),
        (lambda: gmsa(own=False, mode="equation"), OptionError, r"own is False: mode 'equation'.*use mode 'listing'"),
        (lambda: gmsa(own=False, mode="proximal"), OptionError, r"own is False: mode 'proximal'"),
        (lambda: gmsa(own="no"), OptionError, r"own is 'no': it must be True or False"),
        (lambda: gmsa(gate_activation="softmax"), UnknownNameError, r"gate_activation 'softmax'. Did you mean 'sparsemax'"),
        (lambda: gmsa(gate_activation="uniform"), UnknownNameError, r"gate_activation 'uniform'.*Known: .*none"),
        (lambda: gmsa(mode="listings"), UnknownNameError, r"mode 'listings'. Did you mean 'listing'"),
        (lambda: gmsa(key_rotary="3d"), UnknownNameError, r"rotary mode '3d'"),
        (lambda: create("gmsa", 15, 3, key_rotary="1d"), OptionError, r"dim is 15: key_rotary='1d'.*divisible by 2"),
        (lambda: create("gmsa", 24, 3, group=4), UnknownNameError, r"option of GMSA 'group'. Did you mean 'groups'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(make: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# --- numbers -----------------------------------------------------------------------------------------------------------


@modes
def test_a_hook_takes_the_plain_path_to_the_same_numbers(mode: str) -> None:
    """Each map is then called as a module; what a hook returns counts."""
    operator, z, grad = gmsa(mode=mode, key_rotary="1d", rounds=2), spread_tokens(), torch.randn(2, 11, 24, dtype=F64)
    wanted, seen = gradients(operator, z, grad, grid=(2, 5)), list[tuple]()
    handle = operator.key.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    assert not operator.is_plain()
    for name, x in gradients(operator, z, grad, grid=(2, 5)).items():
        assert relative(x, wanted[name]) < 1e-11, name
    assert seen == [(2, 11, 18)]
    handle.remove()
    operator.key.register_forward_hook(lambda module, given, out: 2 * out)
    changed = operator(z, grid=(2, 5))
    assert relative(changed, wanted["out"]) > 1e-3
    with torch.no_grad():
        double = copy.deepcopy(operator)
        double.key._forward_hooks.clear()
        for parameter in double.key.parameters():
            parameter.mul_(2)
    assert relative(double(z, grid=(2, 5)), changed) < 1e-11


class Adapted(nn.Module):
    """A linear map and a part of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.low = base, nn.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, z: Tensor) -> Tensor:
        return self.base(z) + self.low(z)


@pytest.mark.parametrize("name", ["subspace", "key", "gate", "out"])
def test_adapters(name: str) -> None:
    operator, z = gmsa(), spread_tokens()
    merged, adapted = copy.deepcopy(operator), Adapted(getattr(operator, name))
    with torch.no_grad():
        getattr(merged, name).weight.add_(adapted.low.weight)
    setattr(operator, name, adapted)
    assert relative(operator(z), merged(z)) < 1e-11
    assert relative(operator.rate(z, eps=0.5), merged.rate(z, eps=0.5)) < 1e-11


@modes
def test_autocast(mode: str) -> None:
    """The projections round to bfloat16, nothing between them does."""
    operator, z, grad = gmsa(torch.float32, mode=mode), spread_tokens(40, torch.float32), torch.randn(2, 40, 24)
    wanted = gradients(operator, z, grad)
    found = gradients(operator, z, grad, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        parts = operator.decompose(z)
    assert found["out"].dtype == torch.bfloat16 and parts.membership.dtype == parts.means.dtype == torch.float32
    assert max(off(found, wanted).values()) < 0.05
    assert relative(found["out"], wanted["out"]) < 0.02
    operator.key.register_forward_hook(lambda *_: None)
    for dtype in (torch.bfloat16, torch.float16):  # of the tokens, by modules: their weights are float32
        with torch.autocast("cpu", torch.bfloat16):
            assert relative(operator(z.to(dtype)), wanted["out"]) < 0.02


def small_network(**options: Any) -> nn.Module:
    sizes = {"dim": 24, "depth": 2, "num_heads": 3, "img_size": 8, "groups": 6, "key_dim": 5, "rounds": 2}
    return enliven(create_model("gmst_digits", dtype=F64, **FIXED | sizes | options)).eval()


@modes
def test_saved_and_loaded(mode: str, tmp_path: Path) -> None:
    model, x = small_network(mode=mode), torch.randn(3, 1, 8, 8, dtype=F64)
    save_model(model, tmp_path / "net")
    again = load_model(tmp_path / "net").double()
    assert again.blocks[1].operator.form == model.blocks[1].operator.form and again.blocks[1].operator.form.groups == 6
    assert relative(again(x), model(x)) < 1e-6
    other, same = (gmsa(mode=mode, gate_activation="none") for _ in range(2))
    same.load_state_dict(other.state_dict())
    z = spread_tokens()
    assert torch.equal(same(z), other(z))


# --- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("mode", ["proximal"])  # test_traced.py has layers of the others
def test_a_network_compiles_and_exports(mode: str) -> None:
    """In one graph. Layers of every kind are in test_traced."""
    torch._dynamo.reset()
    model, x = small_network(mode=mode, key_rotary="2d", depth=1), torch.randn(3, 1, 8, 8, dtype=F64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x), model(x)) < 1e-10
    eager, traced = (torch.autograd.grad(each(x).square().sum(), list(model.parameters())) for each in (model, compiled))
    assert all(relative(b, a) < 1e-9 or a.norm() < 1e-12 for a, b in zip(eager, traced, strict=True))
    program = torch.export.export(model, (x,), dynamic_shapes={"images": {0: torch.export.Dim.DYNAMIC}}).module()
    other = torch.randn(5, 1, 8, 8, dtype=F64)
    assert relative(program(other), model(other)) < 1e-10


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inside inductor's own import
def test_inductor_once() -> None:
    torch._dynamo.reset()
    operator, z = gmsa(torch.float32), spread_tokens(20, torch.float32)
    with torch.no_grad():
        assert relative(torch.compile(operator, fullgraph=True)(z, grid=(4, 5)), operator(z, grid=(4, 5))) < 1e-5
