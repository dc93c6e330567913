"""One equation per file, one table of them all. A new operator is one file here and one line below; `table.py` says how one
that lives elsewhere becomes known.

OPERATORS["dmsa"](dim, num_heads, **options)       create("dmsa", dim, num_heads, **options)
"""

from __future__ import annotations

from typing import Any

from dmst.operators.base import Operator, Parts, Spatial
from dmst.operators.dmsa import DMSA
from dmst.operators.gated_channel import GatedChannel
from dmst.operators.gmsa import GMSA
from dmst.operators.mhsa import MHSA
from dmst.operators.mssa import MSSA
from dmst.operators.table import OperatorTable
from dmst.operators.tpsusa import TPSUSA
from dmst.operators.tpusa import TPUSA
from dmst.operators.tssa import TSSA
from dmst.operators.xca import XCA

OPERATORS = OperatorTable(
    {
        "mhsa": MHSA,
        "xca": XCA,
        "mssa": MSSA,
        "tssa": TSSA,
        "dmsa": DMSA,
        "gmsa": GMSA,
        "tpusa": TPUSA,
        "tpsusa": TPSUSA,
        "gated_channel": GatedChannel,
    }
)


def create(name: str, dim: int, num_heads: int, **options: Any) -> Operator:
    """The operator called `name`, built with its options."""
    return OPERATORS.find(name)(dim, num_heads, **options)


__all__ = ["OPERATORS", "Operator", "Parts", "Spatial", "create", *(each.__name__ for each in OPERATORS.built_in.values())]
