"""A kernel, or from its first failure on plain torch in its place: slower, never different, and said once a kind."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

broken: set[Hashable] = set()


def attempt(what: str, kind: Hashable, call: Callable[..., Any], plain: Callable[..., Any], z: Tensor, *rest: Any) -> Any:
    """`call`, which computes `what`, or `plain`, of z and the rest. Out of memory is raised as it is."""
    if (what, kind) in broken:
        return plain(z, *rest)
    try:
        index = z.get_device()
        if index < 0 or index == torch.cuda.current_device():  # Triton launches on the current one
            return call(z, *rest)
        with torch.cuda.device(index):
            return call(z, *rest)
    except Exception as error:  # a compiler fails in many ways
        if "out of memory" in str(error).lower():
            raise
        result = plain(z, *rest)
        broken.add((what, kind))
        first = (str(error).strip() or "no message").splitlines()[0]
        warnings.warn(
            f"The fused kernel does not work here for {what} ({type(error).__name__}: {first}). Using plain torch instead.",
            RuntimeWarning,
            stacklevel=2,
        )
        return result


def anew() -> None:
    """What failed earlier in this process is tried again, so that it is said again."""
    broken.clear()
    if (registered := sys.modules.get("dmst.kernels.registered")) is not None:  # where Triton is
        registered._broken.clear()
