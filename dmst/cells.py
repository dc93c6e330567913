"""The cells of a coarse grid on the patches: the groups of GMSA begin as these.

`cut` chooses them, as square as they can be; `index` names the cell of every token, `means` is the matrix that averages them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dmst import rotary
from dmst.errors import ShapeError, shown

Grid = tuple[int, int] | None


def means(n: int, grid: Grid, groups: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(g, n): the matrix that takes tokens to the means of their cells."""
    return rotary.cached(_means, n, groups, *cut(n, grid, groups), device, dtype)


def index(n: int, grid: Grid, groups: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(n): the cell of every token, -1 for tokens before the patches."""
    return rotary.cached(_index, n, groups, *cut(n, grid, groups), device, dtype)


def _means(
    n: int, groups: int, down: int, across: int, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    cell = _index(n, groups, down, across, shape, device, torch.int64)
    inside = (cell == torch.arange(groups, device=device).unsqueeze(-1)).to(dtype)
    return inside / inside.sum(-1, keepdim=True)


def _index(
    n: int, groups: int, down: int, across: int, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    rows, columns = shape
    row = torch.arange(rows, device=device) * down // rows
    column = torch.arange(columns, device=device) * across // columns
    cell = (row.unsqueeze(-1) * across + column).flatten()
    return F.pad(cell.to(dtype), (n - rows * columns, 0), value=-1)


def cut(n: int, grid: Grid, groups: int) -> tuple[int, int, tuple[int, int]]:
    """Cells down and across, as square as they can be, and the grid that they divide; without one, runs of tokens."""
    if n < groups:
        raise ShapeError(
            f"groups is {groups} and there are {n} tokens: a group starts as a cell of tokens, so groups must be at most {n}. "
            "Take fewer groups, larger images or smaller patches."
        )
    if grid is None:
        return 1, groups, (1, n)
    sizes = (int, torch.SymInt, Tensor)  # of torch.compile and of torch.jit.trace
    pair = isinstance(grid, tuple | list) and len(grid) == 2 and all(isinstance(side, sizes) for side in grid)
    if not (pair and 0 < grid[0] * grid[1] <= n and min(grid) > 0):
        raise ShapeError(f"grid is {shown(grid)}: it must be (rows, columns) of the patches among the {n} tokens in z.")
    rows, columns = grid
    down, across, least = 0, 0, None
    for d in (d for d in range(1, groups + 1) if groups % d == 0):  # no min(..., key=...): torch.compile has none of such sizes
        off = abs(d * columns - groups // d * rows)  # 0 where cells are squares
        if (least is None or off < least) and d <= rows and groups // d <= columns:
            down, across, least = d, groups // d, off
    if least is None:
        raise ShapeError(
            f"groups is {groups}: a grid of {rows} x {columns} patches cannot be cut into {groups} cells, as many in each row "
            f"of cells. Take groups = down x across with down at most {rows} and across at most {columns}, or larger images."
        )
    return down, across, (rows, columns)
