"""A kernel, or from its first failure on plain torch in its place: slower, never different, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def attempt(broken: list[str], what: str, call: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    """`call`, which computes `what`, or `plain`; `broken` remembers why. Out of memory is raised as it is."""
    try:
        return plain(*arguments) if broken else call(*arguments)
    except Exception as error:  # a compiler fails in many ways
        if "out of memory" in str(error).lower():
            raise
        result = plain(*arguments)
        broken.append(str(error))
        first = (str(error).strip() or "no message").splitlines()[0]
        warnings.warn(
            f"The fused kernel does not work here for {what} ({type(error).__name__}: {first}). Using plain torch instead.",
            RuntimeWarning,
            stacklevel=2,
        )
        return result
