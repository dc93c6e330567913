"""dmst: attention layers for white-box vision transformers, derived from the coding rate, with proofs as tests.

from dmst import DMSA
update = DMSA(dim=384, num_heads=8)(tokens)            # (b, n, 384) to the same shape
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> the module it lives in; imported when first asked for, so that `import dmst` is quick and quiet
_HOMES = {
    "DMSA": "dmst.operators",
    "TSSA": "dmst.operators",
    "OPERATORS": "dmst.operators",
    "Parts": "dmst.operators",
    "Spatial": "dmst.operators",
}
_MODULES = ("errors", "kernels", "objective", "operators", "rotary", "sparsemax")

if TYPE_CHECKING:
    from dmst import errors, kernels, objective, operators, rotary, sparsemax
    from dmst.operators import DMSA, OPERATORS, TSSA, Parts, Spatial

__all__ = [
    "DMSA", "OPERATORS", "TSSA", "Parts", "Spatial", "__version__",
    "errors", "kernels", "objective", "operators", "rotary", "sparsemax",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dmst.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dmst' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
