"""Sparsemax: against hand numbers, an oracle, and the properties that hold for every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from dmst.errors import OptionError, UnknownNameError
from dmst.sparsemax import jacobian_product, sparsemax

oracle = pytest.importorskip("entmax", reason="entmax, the oracle, is not installed: pip install 'dmst[dev]'").sparsemax
METHODS = ("pairwise", "sort")
scores = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=16)
# ties are where implementations differ, so they are drawn on purpose
tied = st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.1, 0.1, 0.5]), min_size=1, max_size=16)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.25] * 4),  # not below its argument: the paper's proof needs it to be
        ([0.1, 0.1, 0.0, -0.2], [0.35, 0.35, 0.25, 0.05]),
        ([1.0, 0.0], [1.0, 0.0]),  # the second stands exactly at the threshold
        ([3.0, 1.0, 0.2], [1.0, 0.0, 0.0]),
        ([0.5, 0.3], [0.6, 0.4]),
        ([7.0], [1.0]),
    ],
)
def test_by_hand(method: str, row: list[float], expected: list[float]) -> None:
    result = sparsemax(torch.tensor(row, dtype=torch.float64), method=method)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


@given(st.one_of(scores, tied))
def test_both_methods_are_the_oracle(row: list[float]) -> None:
    s = torch.tensor([row], dtype=torch.float64)
    expected = oracle(s, dim=-1)
    for method in METHODS:
        torch.testing.assert_close(sparsemax(s, method=method), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(sparsemax(s.float(), method=method).double(), oracle(s.float().double()), rtol=0, atol=1e-6)


@given(st.one_of(scores, tied), st.sampled_from(METHODS), st.sampled_from([torch.float32, torch.float64]))
def test_is_a_point_of_the_simplex(row: list[float], method: str, dtype: torch.dtype) -> None:
    q = sparsemax(torch.tensor(row, dtype=dtype), method=method)
    assert (q >= 0).all()
    assert abs(q.double().sum().item() - 1) < (1e-6 if dtype == torch.float32 else 1e-14)
    again = sparsemax(q, method=method)
    torch.testing.assert_close(again, q, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)  # idempotent


@given(st.one_of(scores, tied), st.randoms(use_true_random=False), st.sampled_from(METHODS))
def test_permutation_and_ties(row: list[float], random: object, method: str) -> None:
    s = torch.tensor(row)
    order = torch.tensor(random.sample(range(len(row)), len(row)))  # type: ignore[attr-defined]
    straight, shuffled = sparsemax(s, method=method)[order], sparsemax(s[order], method=method)
    if method == "sort":
        assert torch.equal(straight, shuffled)
    else:  # sums in head order
        torch.testing.assert_close(straight, shuffled, rtol=0, atol=3e-7)
    q = sparsemax(s, method=method)
    for value in s.unique():
        assert q[s == value].unique().numel() == 1  # equal scores, equal bits


@given(st.lists(st.integers(-64, 64), min_size=1, max_size=12), st.integers(-64, 64), st.sampled_from(METHODS))
def test_shift_invariant_to_the_bit_where_the_shift_is_exact(row: list[int], shift: int, method: str) -> None:
    s = torch.tensor(row, dtype=torch.float32) / 8
    assert torch.equal(sparsemax(s + shift, method=method), sparsemax(s, method=method))


def test_support_is_full_exactly_when_theory_says() -> None:
    s = torch.randn(2000, 5, dtype=torch.float64) * 0.4
    full = (sparsemax(s) > 0).all(-1)
    assert torch.equal(full, (s - s.amin(-1, keepdim=True)).sum(-1) < 1)
    assert 0 < full.sum() < 2000


@pytest.mark.parametrize("method", METHODS)
def test_any_axis_and_shape(method: str) -> None:
    s = torch.randn(2, 5, 3, dtype=torch.float64)
    for dim in (-3, -2, -1, 0, 1, 2):
        expected = oracle(s, dim=dim)
        torch.testing.assert_close(sparsemax(s, dim, method=method), expected, rtol=0, atol=1e-14)
    assert sparsemax(torch.zeros(2, 0)).shape == (2, 0)
    assert sparsemax(torch.zeros(0, 3)).shape == (0, 3)


def test_long_axis_sorts_and_agrees() -> None:
    s = torch.randn(3, 20000)
    torch.testing.assert_close(sparsemax(s), oracle(s, dim=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    s = (torch.randn(50, 8) + 50).to(dtype)
    q = sparsemax(s)
    assert q.dtype == torch.float32
    torch.testing.assert_close(q.double(), oracle(s.double(), dim=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cap", [None, 2])
def test_nan_stays_in_its_row(method: str, cap: int | None) -> None:
    s = torch.randn(4, 6)
    clean = sparsemax(s, method=method, max_active=cap)
    s[1, 3] = torch.nan
    s[2, 0] = torch.inf
    q = sparsemax(s, method=method, max_active=cap)
    assert q[1].isnan().all()
    assert q[2].isnan().any()
    assert torch.equal(q[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("method", METHODS)
def test_minus_infinity_gets_nothing(method: str) -> None:
    s = torch.tensor([0.2, -torch.inf, 0.1], requires_grad=True)
    q = sparsemax(s, method=method)
    torch.testing.assert_close(q, torch.tensor([0.55, 0.0, 0.45]))
    q[0].backward()
    assert torch.equal(s.grad, torch.tensor([0.5, 0.0, -0.5]))


@given(st.one_of(scores, tied), st.integers(1, 16), st.sampled_from(METHODS))
def test_cap_is_a_cap(row: list[float], m: int, method: str) -> None:
    s = torch.tensor(row, dtype=torch.float64)
    q = sparsemax(s, method=method, max_active=m)
    assert (q > 0).sum() <= m
    assert abs(q.sum().item() - 1) < 1e-14
    # it is the sparsemax of the m largest, the lower index first among equals
    kept = sorted(sorted(range(len(row)), key=lambda i: -row[i])[:m])
    torch.testing.assert_close(q[kept], sparsemax(s[kept], method=method), rtol=0, atol=1e-12)
    # and it changes nothing exactly when the m largest already fill the simplex
    largest = s.sort(descending=True).values
    fills = m >= len(row) or 1 + m * largest[m] <= largest[:m].sum()
    if fills:
        torch.testing.assert_close(q, sparsemax(s, method=method), rtol=0, atol=1e-12)


def test_cap_under_ties_and_its_condition() -> None:
    q = sparsemax(torch.zeros(12), max_active=4)
    assert q.tolist() == [0.25] * 4 + [0.0] * 8
    s = torch.randn(2000, 6, dtype=torch.float64) * 0.5
    largest = s.sort(-1, descending=True).values
    fills = 1 + 3 * largest[:, 3] <= largest[:, :3].sum(-1)
    same = (sparsemax(s, max_active=3) - sparsemax(s)).abs().amax(-1) < 1e-12
    assert torch.equal(fills, same)
    assert 0 < fills.sum() < 2000


@pytest.mark.parametrize("method", METHODS)
def test_jacobian(method: str) -> None:
    s = torch.randn(30, 7, dtype=torch.float64)
    v = torch.randn_like(s)
    q = sparsemax(s, method=method)
    for row in range(30):
        support = (q[row] > 0).double()
        jacobian = torch.diag(support) - torch.outer(support, support) / support.sum()
        torch.testing.assert_close(jacobian_product(q, v)[row], jacobian @ v[row], rtol=0, atol=1e-14)
        found = torch.autograd.functional.jacobian(lambda x: sparsemax(x, method=method), s[row])
        torch.testing.assert_close(found, jacobian, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cap", [None, 2])
def test_gradcheck_twice(method: str, cap: int | None) -> None:
    s = torch.tensor([[0.9, 0.31, -0.2, 0.55], [0.0, 2.0, 0.1, -1.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sparsemax(x, method=method, max_active=cap), (s,))
    assert torch.autograd.gradgradcheck(lambda x: sparsemax(x, method=method, max_active=cap), (s,))


def test_at_the_threshold_value_and_gradient_are_zero() -> None:
    s = torch.tensor([1.0, 0.0], requires_grad=True)
    q = sparsemax(s)
    (gradient,) = torch.autograd.grad(q[1], s)
    assert q[1] == 0
    assert torch.equal(gradient, torch.zeros(2))
    one = torch.randn(5, 1, requires_grad=True)
    sparsemax(one).sum().backward()
    assert torch.equal(one.grad, torch.zeros(5, 1))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # inside PyTorch's own forward mode
def test_derivatives_survive_every_transform() -> None:
    """Batched and dual tensors hide that they want a gradient; it must not be lost for that."""
    s, w, v = (torch.randn(6, 5, dtype=torch.float64) for _ in range(3))
    expected = torch.func.grad(lambda x: (sparsemax(x) * w).sum())(s)
    inside = torch.func.grad(lambda x: (torch.func.vmap(sparsemax)(x) * w).sum())(s)
    torch.testing.assert_close(inside, expected)
    leaf = s.clone().requires_grad_()
    (torch.func.vmap(sparsemax)(leaf) * w).sum().backward()
    torch.testing.assert_close(leaf.grad, expected)
    for cap in (None, 2):
        tangent = torch.func.jvp(lambda x, m=cap: sparsemax(x, max_active=m), (s,), (v,))[1]
        torch.testing.assert_close(tangent, jacobian_product(sparsemax(s, max_active=cap), v))
        with forward_ad.dual_level():  # the same without torch.func
            dual = sparsemax(forward_ad.make_dual(s, v), max_active=cap)
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)
    torch.testing.assert_close(torch.func.jacfwd(sparsemax)(s[0]), torch.func.jacrev(sparsemax)(s[0]))


def test_huge_scores_keep_their_gradient() -> None:
    s = torch.tensor([3e38, 3e38, -3e38], requires_grad=True)
    sparsemax(s)[0].backward()
    assert torch.equal(s.grad, torch.tensor([0.5, -0.5, 0.0]))


def test_bad_options() -> None:
    for cap in (0, 1.5, True, "2"):
        with pytest.raises(OptionError, match="at least 1"):
            sparsemax(torch.zeros(3), max_active=cap)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="'sort'"):
        sparsemax(torch.zeros(3), method="sorted")
