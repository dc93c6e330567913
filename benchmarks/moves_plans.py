"""The runs of moves.py: what was searched, in what order, and the finals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple


class Data(NamedTuple):
    side: int
    classes: int
    images: int
    flip: bool = True


DATA = {
    "cifar10": Data(32, 10, 50_000),
    "cifar100": Data(32, 100, 50_000),
    "svhn": Data(32, 10, 73_257, flip=False),
    "tinyimagenet": Data(64, 200, 100_000),
}


@dataclass(frozen=True)
class Run:
    """One network, trained once."""

    cell: str  # how tables call it
    operator: str
    data: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 8  # patches down and across
    epochs: int = 10
    lr: float = 1e-3
    decay: float = 0.05
    drop_path: float = 0.0
    mixup: float = 0.0
    final: bool = False
    seed: int = 0
    stage: int = 0  # what is run before what

    def told(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k not in ("seed", "stage")}

    @property
    def key(self) -> str:
        """Everything that decides it but its seed and its name."""
        told = self.told() | {"cell": ""}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def network(self) -> str:
        """Runs with the same can use the same recorded step."""
        return replace(self, lr=0.0).key

    @property
    def weight(self) -> float:
        """What it costs, in images of 64 tokens."""
        return self.epochs * DATA[self.data].images * self.rows**2 / 64


TURNED = {"key_rotary": "1d"}  # where the search began: the measurements of the design note
BASE: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax attention": ("mhsa", {}),
    "DMSA": ("dmsa", {}),
    "TSSA": ("tssa", {}),
    "GMSA": ("gmsa", TURNED),
    "GMSA, proximal": ("gmsa", TURNED | {"mode": "proximal"}),
}
RATES = (1e-3, 2e-3)
# data, rows of patches, epochs of a search
SEARCH = (("cifar100", 8, 12), ("tinyimagenet", 8, 5))

# one thing changed at a time; on all of SEARCH, or on the first alone
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "groups 4": ({"groups": 4}, True),
    "groups 64": ({"groups": 64}, True),
    "rounds 2": ({"rounds": 2}, False),
    "key_dim 8": ({"key_dim": 8}, False),
    "key_dim 32": ({"key_dim": 32}, False),
    "keys not turned": ({"key_rotary": "none"}, True),
    "keys turned in 2d": ({"key_rotary": "2d"}, False),
    "unit keys": ({"normalize_keys": True}, False),
    "unit keys, not turned": ({"normalize_keys": True, "key_rotary": "none"}, True),
    "gate none": ({"gate_activation": "none"}, True),
    "gate sparsemax": ({"gate_activation": "sparsemax"}, False),
    "gate sigmoid": ({"gate_activation": "sigmoid"}, False),
    "gate gelu x 1": ({"gate_scale": 1.0}, False),
    "gate gelu x 10": ({"gate_scale": 10.0}, False),
    "own False": ({"own": False}, True),
}
PROXIMAL: dict[str, dict[str, Any]] = {
    "gate none": {"gate_activation": "none"},
    "keys not turned": {"key_rotary": "none"},
    "gate gelu x 10": {"gate_scale": 10.0},
}


def smoke() -> list[Run]:
    """Does everything run? Three epochs of each."""
    return [Run(cell, name, "cifar100", options, epochs=3, mixup=0.4) for cell, (name, options) in BASE.items()]


def search() -> list[Run]:
    """The learning rate of each operator, then one change of GMSA at a time."""
    found = []
    for data, rows, epochs in SEARCH:
        common = {"data": data, "rows": rows, "epochs": epochs}
        found += [
            Run(cell, name, options=options, lr=lr, **common)  # type: ignore[arg-type]
            for cell, (name, options) in BASE.items()
            for lr in RATES
        ]
        for name, (change, everywhere) in VARIANTS.items():
            if everywhere or data == SEARCH[0][0]:
                found.append(Run(f"GMSA, {name}", "gmsa", options=TURNED | change, **common))  # type: ignore[arg-type]
        options = BASE["GMSA, proximal"][1]
        for name, change in PROXIMAL.items():
            found.append(Run(f"GMSA, proximal, {name}", "gmsa", options=options | change, **common))  # type: ignore[arg-type]
        found.append(Run("GMSA, proximal, drop path .1", "gmsa", options=options, drop_path=0.1, **common))  # type: ignore[arg-type]
    return found


def rate(cell: str, epochs: int) -> float:
    """Of the finals: the better one of `search` and, for 60 epochs, of `rates`."""
    return 1e-3 if cell == "softmax attention" and epochs == 60 else 2e-3


# data, rows of patches, epochs, mixup, seeds: in the order in which they are run
FINALS = (
    ("cifar100", 8, 60, 0.4, (0, 1, 2, 3, 4)),
    ("tinyimagenet", 16, 5, 0.0, (0, 1, 2)),
    ("cifar10", 8, 10, 0.0, (0, 1, 2, 3, 4)),
    ("tinyimagenet", 8, 5, 0.0, (0, 1, 2)),
    ("svhn", 8, 4, 0.0, (0, 1, 2)),
)


def rates() -> list[Run]:
    """Does the longest schedule want another learning rate than the twelve epochs of the search?"""
    return [
        Run(cell, name, "cifar100", options, epochs=60, mixup=0.4, lr=lr)
        for lr in RATES
        for cell, (name, options) in BASE.items()
    ]


def search256() -> list[Run]:
    """More tokens: do they ask for more groups?"""
    options = BASE["GMSA"][1]
    return [
        Run(f"GMSA, groups {groups}", "gmsa", "tinyimagenet", options | {"groups": groups}, rows=16, epochs=4, lr=2e-3)
        for groups in (16, 64)
    ]


def finals() -> list[Run]:
    """Every operator at its learning rate, on the test images, once."""
    return [
        Run(cell, name, data, options, rows, epochs, rate(cell, epochs), mixup=mixup, final=True, seed=seed, stage=stage)
        for stage, (data, rows, epochs, mixup, seeds) in enumerate(FINALS)
        for seed in seeds
        for cell, (name, options) in BASE.items()
    ]


def first() -> list[Run]:
    """Softmax attention on CIFAR-100 as the finals began, before the search of 60 epochs was done."""
    name, options = BASE["softmax attention"]
    return [
        Run("softmax attention at 2e-3", name, "cifar100", options, epochs=60, lr=2e-3, mixup=0.4, final=True, seed=seed)
        for seed in range(3)
    ]


PLANS: dict[str, Callable[[], list[Run]]] = {
    "smoke": smoke, "search": search, "search256": search256, "rates": rates, "finals": finals, "first": first,
}  # fmt: skip
