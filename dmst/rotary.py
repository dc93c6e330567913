"""Rotary position for the input of the membership scores: none, 1d (the paper) or 2d (ours).

    pair j of token n, channels (2j, 2j+1), turns by angle_nj
    1d    angle_nj = n * base^(-2j/d)                              n = row-major token index from 0
    2d    the first d/2 channels turn by the row index, the last d/2 by the column index, each as a 1d table of width d/2

There are no query-key pairs here, so this marks absolute position. Only a product with it is ever needed,
and a rotation can be moved to the other side of a product, <rot_n z, w> = <z, rot_n^T w>, so large tensors
are multiplied by the tables but never shuffled:

    <rot_n z, w> = <z * cos_n, w> + <z * sin_n, turn(w)>,          turn(w)_2j = w_2j+1,  turn(w)_2j+1 = -w_2j

Tables are real, (n, d) with each pair's value written twice. Angles are computed in float64, then cast. One
table per (width, device, dtype) serves every layer; it grows by powers of two, and it is never saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmst import tracing
from dmst.errors import OptionError, ShapeError, choose

MODES = ("1d", "2d", "none")
BASE = 10000.0


class Table(NamedTuple):
    cos: Tensor  # (n, d)
    sin: Tensor  # (n, d)


class Factors(NamedTuple):
    """rot_n = far_(n // step) near_(n % step): two short tables, one value a pair, in place of one as long as the image."""

    far: Table  # (ceil(n / step), d / 2)
    near: Table  # (step, d / 2)
    step: int


def check(mode: str, dim: int, option: str = "rotary") -> str:
    """`mode`, if width `dim` can carry it; `option` is what messages call it."""
    choose(f"{option} mode", mode, MODES)
    pairs = {"1d": 2, "2d": 4, "none": 1}[mode]
    if dim % pairs:
        raise OptionError(f"dim is {dim}: {option}={mode!r} turns channel pairs and needs a dim divisible by {pairs}.")
    return mode


def table(
    mode: str, dim: int, n: int, grid: tuple[int, int] | None, *, device: torch.device, dtype: torch.dtype
) -> Table | None:
    """The table for `n` tokens (on `grid` = rows, columns for 2d), or None where nothing turns."""
    if mode == "none":
        return None
    if mode == "1d":
        return _line(dim, n, device, dtype)
    return _plane(dim, *_grid(grid, n), device, dtype)


def factors(
    mode: str, dim: int, n: int, grid: tuple[int, int] | None, *, step: int, device: torch.device, dtype: torch.dtype
) -> Factors | None:
    """The same rotations as `table`, factored. 1d: runs of `step` tokens; 2d: far turns by the row, near by the column."""
    if mode == "none":
        return None
    sides = None if mode == "1d" else _grid(grid, n)
    if tracing.traced() or tracing.dispatched():
        compute = _compute_factors if dim % 8 else _in_one  # whose pieces begin where wide loads can read
        return compute(dim, n, sides, step, device, dtype)
    key = (dim, n, sides, step, device, dtype)
    found = _FACTORS.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = _compute_factors(*key)
        if len(_FACTORS) < _FACTORS_KEPT and type(found.far.cos) is Tensor and not _recorded(device):
            if sides is not None:  # else views of what has settled
                _settle(device)
            _FACTORS[key] = found
    return found


def _compute_factors(
    dim: int, n: int, sides: tuple[int, int] | None, step: int, device: torch.device, dtype: torch.dtype
) -> Factors:
    if sides is None:
        return Factors(_steps(dim, step, -(-n // step), device, dtype), _steps(dim, 1, step, device, dtype), step)
    rows, columns = sides
    still = Table(torch.ones(1, dim // 4, device=device, dtype=dtype), torch.zeros(1, dim // 4, device=device, dtype=dtype))
    far, near = (_steps(dim // 2, 1, side, device, dtype) for side in (rows, columns))
    return Factors(
        Table(*(torch.cat((x, y.expand_as(x)), -1) for x, y in zip(far, still, strict=True))),
        Table(*(torch.cat((y.expand_as(x), x), -1) for x, y in zip(near, still, strict=True))),
        columns,
    )


def _in_one(dim: int, n: int, sides: tuple[int, int] | None, step: int, device: torch.device, dtype: torch.dtype) -> Factors:
    """The same numbers as four pieces of one tensor (2, far + near, d / 2), for a traced graph: every layer of it computes its
    own, and the compiler makes one kernel of this in place of four.
    """
    far, near = (-(-n // step), step) if sides is None else sides
    row = torch.arange(far + near, device=device, dtype=torch.float64).unsqueeze(-1)
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.float64)
    behind = row >= far
    place = torch.where(behind, row - far, row if sides is not None else step * row)
    if sides is None:
        angle = place * BASE ** (-pair / dim)
    else:
        by_column = pair >= dim // 2
        angle = place * BASE ** (-torch.where(by_column, pair - dim // 2, pair) / (dim // 2))
        angle = torch.where(by_column ^ behind, 0.0, angle)  # the row turns no pair of the column
    first = torch.arange(2, device=device).view(2, 1, 1) == 0
    both = torch.where(first, angle.cos(), angle.sin()).to(dtype)

    def cut(which: int, begin: int, rows: int) -> Tensor:  # a slice would be computed apart
        return both.as_strided((rows, dim // 2), (dim // 2, 1), (which * (far + near) + begin) * (dim // 2))

    return Factors(
        Table(cut(0, 0, far), cut(1, 0, far)), Table(cut(0, far, near), cut(1, far, near)), step if sides is None else near
    )


def _grid(grid: tuple[int, int] | None, n: int) -> tuple[int, int]:
    if grid is None:
        raise ShapeError(
            "mode '2d' of rotary needs grid=(rows, columns) of the tokens: pass grid to the operator, or use '1d'."
        )
    rows, columns = _sides(grid)
    if rows * columns != n:
        raise ShapeError(f"grid is {rows} x {columns} = {rows * columns} tokens, but z has {n}: they must be equal.")
    return rows, columns


def _sides(grid: Any) -> tuple[int, int]:
    if (
        isinstance(grid, tuple | list)
        and len(grid) == 2
        and not any(isinstance(side, bool | float | str) or side < 0 for side in grid)
    ):
        return grid[0], grid[1]
    raise ShapeError(f"grid is {grid!r}: it must be (rows, columns), two whole numbers of at least 0.")


def turn(w: Tensor) -> Tensor:
    """The quarter turn of each pair, backwards: (w_2j, w_2j+1) becomes (w_2j+1, -w_2j)."""
    even, odd = w.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((odd, -even), -1).flatten(-2)


def turn_back(w: Tensor) -> Tensor:
    """The transpose of `turn`, which is its negative."""
    return -turn(w)


def rotate(z: Tensor, positions: Table) -> Tensor:
    """rot_n z_n for z (..., n, d): the definition, for reading and tests. The layers use the products above."""
    return z * positions.cos + turn_back(z) * positions.sin


# --- the shared tables -----------------------------------------------------------------------------------------------

_LINES: dict[tuple, Table] = {}  # (dim, device, dtype) -> the longest table so far
_STEPS: dict[tuple, Table] = {}  # (dim, step, device, dtype) -> likewise, every step-th row, one value a pair
_PLANES: dict[tuple, Table] = {}  # (dim, rows, columns, device, dtype) -> table, the most recent last
_PLANES_KEPT = 32
_FACTORS: dict[tuple, Factors] = {}  # (dim, n, grid, step, device, dtype) -> the first so many, for good: short, or views
_FACTORS_KEPT = 128
_RETIRED: list[Table] = []  # replaced on a CUDA device: a recorded graph may still read them. Growth doubles, so they are few


def _line(dim: int, n: int, device: torch.device, dtype: torch.dtype) -> Table:
    """The first n rows of the shared table, grown where needed. Old rows keep their bits: a row depends on n and d alone."""
    return _grown(_LINES, (dim, device, dtype), n, _compute_line, dim)


def _steps(dim: int, step: int, n: int, device: torch.device, dtype: torch.dtype) -> Table:
    return _grown(_STEPS, (dim, step, device, dtype), n, _compute_steps, dim, step)


def _grown(tables: dict[tuple, Table], key: tuple, n: int, compute: Callable[..., Table], *args: int) -> Table:
    *_, device, dtype = key
    if tracing.traced() or tracing.dispatched():  # a traced graph computes its own rows: no state, and n may be symbolic
        return compute(*args, n, device, dtype)
    found = tables.get(key)
    if found is None or found.cos.shape[0] < n:
        if _recorded(device):
            return compute(*args, n, device, dtype)
        found = _keep(tables, key, compute, *args, max(64, 1 << (n - 1).bit_length()), device, dtype)
    return Table(found.cos[:n], found.sin[:n])


def _recorded(device: torch.device) -> bool:
    """Inside a CUDA graph that is being recorded: what is made there has no values yet, and must not be left for others."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _plane(dim: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Table:
    """The table of one grid; the last few grids are remembered."""
    if tracing.traced() or tracing.dispatched():
        return _compute_plane(dim, rows, columns, device, dtype)
    key = (dim, rows, columns, device, dtype)
    found = _PLANES.get(key)
    if found is None and _recorded(device):
        return _compute_plane(*key)
    if found is None:
        found = _keep(_PLANES, key, _compute_plane, *key)
        while len(_PLANES) > _PLANES_KEPT:
            _retire(_PLANES.pop(next(iter(_PLANES)), None), device)
    return found


def _keep(tables: dict[tuple, Table], key: tuple, compute: Callable[..., Table], *args: object) -> Table:
    with torch.inference_mode(False), torch.no_grad():  # a table made in inference mode could never be trained with
        made = compute(*args)
    if type(made.cos) is Tensor:  # a fake or wrapped tensor must not be left for others
        _retire(tables.get(key), made.cos.device)
        _settle(made.cos.device)
        tables[key] = made
    return made


def _settle(device: torch.device) -> None:
    """Wait for what was just made: other streams will read it without waiting."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _retire(table: Table | None, device: torch.device) -> None:
    if table is not None and device.type == "cuda":
        _RETIRED.append(table)


def _compute_steps(dim: int, step: int, n: int, device: torch.device, dtype: torch.dtype) -> Table:
    angle = _angles(dim, step, n, device)
    return Table(angle.cos().to(dtype), angle.sin().to(dtype))


def _compute_line(dim: int, n: int, device: torch.device, dtype: torch.dtype) -> Table:
    angle = _angles(dim, 1, n, device).unsqueeze(-1).expand(-1, -1, 2).flatten(1)  # each twice
    return Table(angle.cos().to(dtype), angle.sin().to(dtype))


def _angles(dim: int, step: int, n: int, device: torch.device) -> Tensor:
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.float64)
    return step * torch.arange(n, device=device, dtype=torch.float64).unsqueeze(-1) * BASE ** (-pair / dim)


def _compute_plane(dim: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Table:
    shape = (rows, columns, dim // 2)
    by_row, by_column = (_line(dim // 2, size, device, dtype) for size in (rows, columns))
    cos, sin = (
        torch.cat((row.unsqueeze(1).expand(shape), column.unsqueeze(0).expand(shape)), -1).flatten(0, 1)
        for row, column in zip(by_row, by_column, strict=True)
    )
    return Table(cos, sin)
