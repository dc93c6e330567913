"""A kernel, or from its first failure on plain torch in its place: slower, never different, and said once a kind.

attempt(fused, plain, given, z, kind)     fused(*given) or plain(*given); kind begins with what is computed, in words
broken                                    the kinds that failed in this process; `anew` forgets them
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from dmst import tracing
from dmst.errors import DmstError

broken: set[Hashable] = set()


def anew() -> None:
    """What failed earlier is tried again, so that it is said again."""
    broken.clear()


def attempt(fused: Callable[..., Any], plain: Callable[..., Any], given: tuple, z: Tensor, kind: tuple[Hashable, ...]) -> Any:
    """On the device of z; plain torch for no tokens at all. Out of memory is raised as it is, and while a graph is traced
    everything is."""
    if not z.numel():
        return plain(*given)
    if tracing.traced():
        return fused(*given)
    if broken and kind in broken:
        return plain(*given)
    try:
        index = z.get_device()
        if index < 0 or index == torch.cuda.current_device():  # Triton launches on the current one
            return fused(*given)
        with torch.cuda.device(index):
            return fused(*given)
    except DmstError:  # what is wrong with the call itself, and blames no kernel
        raise
    except Exception as error:  # the compiler has many ways to fail, and each means the same here
        if "out of memory" in str(error).lower():
            raise
        result = plain(*given)  # what is wrong with the call itself is raised from here, and blames no kernel
        broken.add(kind)
        why = (str(error).strip() or "no message").splitlines()[0]
        warnings.warn(
            f"The fused kernel of {kind[0]} does not work here for tokens {tuple(z.shape)} in {z.dtype} "
            f"({type(error).__name__}: {why}). Using plain torch from now on; `dmst doctor` says more.",
            RuntimeWarning,
            stacklevel=3,
        )
        return result
