"""Rotary position for the input of the membership scores: none, 1d (the paper) or 2d (ours).

    pair j of token n, channels (2j, 2j+1), turns by angle_nj
    1d    angle_nj = n * base^(-2j/d)                              n = row-major token index from 0
    2d    the first d/2 channels turn by the row index, the last d/2 by the column index, each as a 1d table of width d/2

There are no query-key pairs here, so this marks absolute position. Only a product with it is ever needed,
and a rotation can be moved to the other side of a product, <rot_n z, w> = <z, rot_n^T w>, so large tensors
are multiplied by the tables but never shuffled:

    <rot_n z, w> = <z * cos_n, w> + <z * sin_n, turn(w)>,          turn(w)_2j = w_2j+1,  turn(w)_2j+1 = -w_2j

Tables are real, (n, d) with each pair's value written twice. Angles are computed in float64, then cast. One table serves every
layer of its width, device and dtype; its length is a power of two, and it is never saved. A traced graph computes its own.
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
RUN = 16  # tokens, in a compiled graph


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
    return cached(_plane, dim, *_grid(grid, n), device, dtype)


def factors(
    mode: str, dim: int, n: int, grid: tuple[int, int] | None, *, step: int, device: torch.device, dtype: torch.dtype
) -> Factors | None:
    """The same rotations as `table`, factored. 1d: runs of `step` tokens; 2d: far turns by the row, near by the column."""
    if mode == "none":
        return None
    if mode == "1d":
        return cached(_factors, dim, -(-n // step), step, False, device, dtype)
    return cached(_factors, dim, *_grid(grid, n), True, device, dtype)


def _grid(grid: Any, n: int) -> tuple[int, int]:
    if not (isinstance(grid, tuple | list) and len(grid) == 2 and min(grid) >= 0 and grid[0] * grid[1] == n):
        raise ShapeError(f"grid is {grid!r}: rotary '2d' needs grid=(rows, columns) of the {n} tokens in z; '1d' needs none.")
    return grid[0], grid[1]


def turn(w: Tensor) -> Tensor:
    """The quarter turn of each pair, backwards: (w_2j, w_2j+1) becomes (w_2j+1, -w_2j)."""
    even, odd = w.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((odd, -even), -1).flatten(-2)


def turn_back(w: Tensor) -> Tensor:
    """The transpose of `turn`, which is its negative."""
    return -turn(w)


def rotate(z: Tensor, positions: Table) -> Tensor:
    """rot_n z_n for z (..., n, d). A pair is a complex number, so a turn is one product, in one pass; a traced graph, whose
    readers know no complex numbers, has the definition, and so have 16 bits."""
    if tracing.traced() or z.dtype not in (torch.float32, torch.float64):
        return z * positions.cos + turn_back(z) * positions.sin
    pairs = z.unflatten(-1, (-1, 2)).contiguous()
    pairs = torch.view_as_complex(pairs.clone() if pairs.storage_offset() % 2 else pairs)
    return torch.view_as_real(pairs * torch.complex(positions.cos[:, ::2], positions.sin[:, ::2])).flatten(-2)


# --- the shared tables -----------------------------------------------------------------------------------------------

_TABLES: dict[tuple, Any] = {}
_KEPT = 64


def cached(compute: Callable[..., Any], *key: Any) -> Any:
    """compute(*key), kept for the next call. The key ends with device and dtype. Nobody may write into what is kept."""
    device = key[-2]
    if tracing.traced() or tracing.dispatched() or tracing.transformed():  # what a transform computes is of its own level
        return compute(*key)
    found = _TABLES.get((compute, *key))
    if found is None and tracing.recorded(device):  # it has no values yet: not for others
        return compute(*key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # a table made in inference mode could never be trained with
            found = compute(*key)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will read it without waiting
        elif len(_TABLES) >= _KEPT:  # on a GPU all stay: a recorded graph may read them
            _TABLES.pop(next(iter(_TABLES)), None)
        _TABLES[(compute, *key)] = found
    return found


def _line(dim: int, n: int, device: torch.device, dtype: torch.dtype) -> Table:
    """The first n rows of a table that is as long as a power of two: a row depends on n and d alone."""
    if tracing.traced() and not tracing.exported():  # every layer of a compiled graph makes its own: cosines are dear
        return _line_from(_factors(dim, -(-n // RUN), RUN, False, device, dtype), n)
    if tracing.traced() or tracing.dispatched():  # n may be symbolic
        return _line_of(dim, n, device, dtype)
    whole = cached(_line_of, dim, max(64, 1 << (n - 1).bit_length()), device, dtype)
    return Table(whole.cos[:n], whole.sin[:n])


def _line_from(factors: Factors, n: int) -> Table:
    """The same by products of two short tables: cos(a + b) = cos a cos b - sin a sin b."""
    place = torch.arange(n, device=factors.far.cos.device)
    far, near = place // RUN, place % RUN
    c, s, d, t = factors.far.cos[far], factors.far.sin[far], factors.near.cos[near], factors.near.sin[near]
    return Table(*(x.unsqueeze(-1).expand(-1, -1, 2).flatten(1) for x in (c * d - s * t, s * d + c * t)))


def _line_of(dim: int, n: int, device: torch.device, dtype: torch.dtype) -> Table:
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.float64)
    angle = torch.arange(n, device=device, dtype=torch.float64).unsqueeze(-1) * BASE ** (-pair / dim)
    # each twice
    return Table(*(x.to(dtype).unsqueeze(-1).expand(-1, -1, 2).flatten(1) for x in (angle.cos(), angle.sin())))


def _plane(dim: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Table:
    shape = (rows, columns, dim // 2)
    by_row, by_column = (_line(dim // 2, size, device, dtype) for size in (rows, columns))
    cos, sin = (
        torch.cat((row.unsqueeze(1).expand(shape), column.unsqueeze(0).expand(shape)), -1).flatten(0, 1)
        for row, column in zip(by_row, by_column, strict=True)
    )
    return Table(cos, sin)


def _factors(dim: int, far: int, near: int, plane: bool, device: torch.device, dtype: torch.dtype) -> Factors:
    """Four pieces of one tensor (2, far + near, d / 2): every layer of a traced graph computes its own, in one kernel."""
    row = torch.arange(far + near, device=device, dtype=torch.float64).unsqueeze(-1)
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.float64)
    is_near = row >= far
    place = torch.where(is_near, row - far, row if plane else near * row)
    if plane:
        by_column = pair >= dim // 2
        angle = place * BASE ** (-torch.where(by_column, pair - dim // 2, pair) / (dim // 2))
        angle = torch.where(by_column ^ is_near, 0.0, angle)  # the row turns no pair of the column
    else:
        angle = place * BASE ** (-pair / dim)
    first = torch.arange(2, device=device).view(2, 1, 1) == 0
    both = torch.where(first, angle.cos(), angle.sin()).to(dtype)

    def cut(which: int, begin: int, rows: int) -> Tensor:  # a slice would be computed apart
        piece = both.as_strided((rows, dim // 2), (dim // 2, 1), (which * (far + near) + begin) * (dim // 2))
        return piece.clone() if dim % 8 else piece  # wide loads begin at multiples of 16 bytes; Inductor leaves this out

    return Factors(Table(cut(0, 0, far), cut(1, 0, far)), Table(cut(0, far, near), cut(1, far, near)), near)
