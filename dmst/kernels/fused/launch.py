"""How a kernel is launched.

cut = planned(grid, CONSTANT=..., num_warps=...)     what belongs to a shape, made once where the shape is planned
launch(kernel, cut, tensors and numbers)
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Cut(NamedTuple):
    """How a kernel is launched for a shape."""

    grid: tuple[int, ...]
    constants: dict[str, Any]


def planned(grid: tuple[int, ...], **constants: Any) -> Cut:
    return Cut(grid, constants)


def launch(kernel: Any, cut: Cut, *args: Any) -> Any:
    return kernel[cut.grid](*args, **cut.constants)
