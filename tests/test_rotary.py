"""Rotary tables: against complex multiplication, by identity rows, and as shared state."""

from __future__ import annotations

import pytest
import torch

from benchmarks.published import apply_rotary, rotary_table
from dmst import rotary
from dmst.errors import ShapeError
from tests.cases import relative

CPU, F64 = torch.device("cpu"), torch.float64


def line(dim: int, n: int, dtype: torch.dtype = F64) -> rotary.Table:
    found = rotary.table("1d", dim, n, None, device=CPU, dtype=dtype)
    assert found is not None
    return found


def plane(dim: int, grid: tuple[int, int], dtype: torch.dtype = F64) -> rotary.Table:
    found = rotary.table("2d", dim, grid[0] * grid[1], grid, device=CPU, dtype=dtype)
    assert found is not None
    return found


def test_1d_is_the_complex_rotation() -> None:
    z = torch.randn(2, 197, 22, dtype=F64)
    assert relative(rotary.rotate(z, line(22, 197)), apply_rotary(z, rotary_table(22, 197))) < 1e-14


def test_2d_by_hand() -> None:
    dim, rows, columns = 12, 3, 5
    table = plane(dim, (rows, columns))
    for token in range(rows * columns):
        row, column = divmod(token, columns)
        for pair in range(dim // 2):
            index, j = (row, pair) if pair < dim // 4 else (column, pair - dim // 4)
            angle = torch.tensor(index * 10000.0 ** (-2 * j / (dim // 2)), dtype=F64)
            for channel in (2 * pair, 2 * pair + 1):
                assert abs(table.cos[token, channel] - angle.cos()) < 1e-15
                assert abs(table.sin[token, channel] - angle.sin()) < 1e-15


@pytest.mark.parametrize(("dtype", "bar"), [(F64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_row_13_a_rotation_moves_to_the_other_side(mode: str, dtype: torch.dtype, bar: float) -> None:
    z = torch.randn(63, 20).to(dtype)
    w = torch.randn(20).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    table, exact = (line(20, 63, t) if mode == "1d" else plane(20, (7, 9), t) for t in (wide, F64))
    assert table is not None and exact is not None
    direct = rotary.rotate(z.double(), exact) @ w.double()
    z, w = z.to(wide), w.to(wide)
    folded = (z * table.cos) @ w + (z * table.sin) @ rotary.turn(w)
    assert relative(folded, direct) < bar
    turned_back = torch.stack([w * c - rotary.turn_back(w) * s for c, s in zip(*table, strict=True)])  # rot_n^T w
    assert relative((z * turned_back).sum(-1), direct) < bar


def test_turn_and_its_transpose() -> None:
    w, v = torch.randn(2, 8, dtype=F64)
    assert torch.equal(rotary.turn(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([2.0, -1.0, 4.0, -3.0]))
    torch.testing.assert_close(rotary.turn(w) @ v, w @ rotary.turn_back(v))


def test_row_13_growth_keeps_old_rows_to_the_bit() -> None:
    before = line(26, 50)
    old = before.cos.clone(), before.sin.clone()
    after = line(26, 5000)
    assert after.cos.shape == (5000, 26)
    assert torch.equal(after.cos[:50], old[0])
    assert torch.equal(after.sin[:50], old[1])
    assert torch.equal(before.cos, old[0])


def test_one_table_serves_every_layer() -> None:
    first, second = line(28, 40), line(28, 33)
    assert first.cos.data_ptr() == second.cos.data_ptr()
    assert plane(28, (4, 5)).cos.data_ptr() == plane(28, (4, 5)).cos.data_ptr()


def test_float32_table_is_the_rounded_float64_one() -> None:
    assert torch.equal(line(30, 4097, torch.float32).sin, line(30, 4097).sin.float())


def test_a_table_made_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        line(34, 10)
        plane(36, (2, 3))
    z = torch.randn(10, 34, dtype=F64, requires_grad=True)
    rotary.rotate(z, line(34, 10)).sum().backward()
    z = torch.randn(6, 36, dtype=F64, requires_grad=True)
    rotary.rotate(z, plane(36, (2, 3))).sum().backward()


def test_a_fake_table_is_not_left_for_others() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        line(38, 10)
    assert type(line(38, 10).cos) is torch.Tensor


def test_none_and_errors() -> None:
    assert rotary.table("none", 15, 7, None, device=CPU, dtype=F64) is None
    assert rotary.check("none", 15) == "none"
    for grid in (None, 12, (3, 5), (-3, -4)):
        with pytest.raises(ShapeError, match="grid"):
            rotary.table("2d", 16, 12, grid, device=CPU, dtype=F64)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize(
    ("dim", "n", "grid"),
    [(384, 197, None), (384, 196, (14, 14)), (8, 1, None), (64, 32, None), (20, 12, (3, 4))],
    ids=str,
)
def test_a_traced_graph_computes_the_same_factors(
    dim: int, n: int, grid: tuple[int, int] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, each from an address that wide loads can use; together they are the table."""

    def factors() -> rotary.Factors:
        found = rotary.factors("2d" if grid else "1d", dim, n, grid, step=32, device=CPU, dtype=dtype)
        assert found is not None
        return found

    eager = factors()
    monkeypatch.setattr(rotary.tracing, "traced", lambda: True)
    traced = factors()
    assert traced.step == eager.step
    for one, other in zip((*traced.far, *traced.near), (*eager.far, *eager.near), strict=True):
        assert torch.equal(one, other) and one.is_contiguous() and one.data_ptr() % 16 == 0
    table = rotary.table("2d" if grid else "1d", dim, n, grid, device=CPU, dtype=F64)
    assert table is not None
    far, near = (torch.complex(*(x.double() for x in part)) for part in (eager.far, eager.near))
    whole = (far.unsqueeze(1) * near).flatten(0, 1)[:n].repeat_interleave(2, -1)  # rot_n = far_(n // step) near_(n % step)
    torch.testing.assert_close(whole, torch.complex(*table), rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("n", [1, 16, 197])
def test_a_compiled_table_is_the_same(n: int) -> None:
    """A compiled graph multiplies two short tables; no other way leads there."""
    compiled = torch.compile(rotary.table, backend="eager", fullgraph=True, dynamic=False)
    for dtype, bar in ((torch.float32, 3e-7), (torch.float64, 5e-14)):  # an angle of 196 has steps of 3e-14
        place = {"device": torch.device("cpu"), "dtype": dtype}
        found, expected = (table("1d", 24, n, None, **place) for table in (compiled, rotary.table))
        assert all((a - b).abs().max() < bar for a, b in zip(found, expected, strict=True))


def test_tokens_that_begin_at_an_odd_place() -> None:
    """A view of float32 that does not begin at a pair cannot be taken for complex numbers as it is."""
    z = torch.randn(1 + 2 * 5 * 8)[1:].view(2, 5, 8)
    positions = rotary.table("1d", 8, 5, None, device=z.device, dtype=z.dtype)
    assert positions is not None
    assert torch.equal(rotary.rotate(z, positions), rotary.rotate(z.clone(), positions))
