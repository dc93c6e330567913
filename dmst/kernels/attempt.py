"""A kernel, or from its first failure on plain torch in its place: slower, never different, and said once a kind.

    attempt(z, call, plain, arguments, broken, kind, says)     call(*arguments), or plain(*arguments)
    remembered()                                               a new set `broken`: the kinds that failed
    anew()                                                     every such set emptied

Who calls asks first whether its kind has failed, as fast as it can.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from dmst.errors import DmstError

_sets: list[set[Hashable]] = []


def remembered() -> set[Hashable]:
    _sets.append(set())
    return _sets[-1]


def anew() -> None:
    """What failed earlier in this process is tried again, so that it is said again."""
    for broken in _sets:
        broken.clear()


def attempt(
    z: Tensor, call: Callable[..., Any], plain: Callable[..., Any], arguments: tuple, broken: set[Hashable], kind: Hashable,
    says: Callable[[str], str],
) -> Any:  # fmt: skip
    """On the device of z. `says` puts the reason into words. Out of memory is raised as it is."""
    try:
        index = z.get_device()
        if index < 0 or index == torch.cuda.current_device():  # Triton launches on the current one
            return call(*arguments)
        with torch.cuda.device(index):
            return call(*arguments)
    except DmstError:  # what is wrong with the call itself, and blames no kernel
        raise
    except Exception as error:  # the compiler has many ways to fail, and each means the same here
        if "out of memory" in str(error).lower():
            raise
        result = plain(*arguments)  # what is wrong with the call itself is raised from here, and blames no kernel
        broken.add(kind)
        first = (str(error).strip() or "no message").splitlines()[0]
        warnings.warn(says(f"{type(error).__name__}: {first}"), RuntimeWarning, stacklevel=3)
        return result
