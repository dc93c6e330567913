"""What is run: tables of cells, each a recipe that ships with a few keys changed, over several seeds.

All runs of a table share everything but the keys of their cells: the same batches for the same seed, the same number of steps,
the last weights, the test set read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dmst.engine.recipe import read_recipe
from dmst.engine.sections import Recipe

SHORT = (
    "schedule.epochs=20", "schedule.warmup_epochs=1", "run.batch_size=512",
    "run.graph=true", "run.compile=true", "run.channels_last=true",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    name: str
    changes: tuple[str, ...] = ()
    paper: float | None = None  # top-1, percent, as printed
    seeds: int = 5


@dataclass(frozen=True)
class Table:
    title: str
    recipe: str
    cells: tuple[Cell, ...]
    against: str  # the cell that the others are compared with
    changes: tuple[str, ...] = SHORT
    notes: tuple[str, ...] = field(default=())

    def recipe_of(self, cell: Cell, seed: int) -> Recipe:
        return read_recipe(self.recipe, self.changes_of(cell, seed))

    def changes_of(self, cell: Cell, seed: int) -> list[str]:
        return [*self.changes, *cell.changes, f"run.seed={seed}"]


def operator(name: str, *options: str) -> tuple[str, ...]:
    return (f"model.options.operator={name}", *(f"model.options.{option}" for option in options))


def _sparsity(data: str, recipe: str, printed: dict[str, float]) -> Table:
    cells = tuple(Cell(name.upper(), operator(name), printed[name]) for name in ("tssa", "tpusa", "dmsa", "tpsusa"))
    note = "The paper states neither epochs nor batch nor augmentation: levels need not agree, the order is the question."
    return Table(f"Where sparsity is put, {data}", recipe, cells, "TSSA", notes=(note,))


PRINTED = {"sigmoid": 60.92, "relu": 61.27, "gelu": 61.11, "sparsemax": 61.30}
# the mean gate of an untrained network is about .5, 1/4, .008 and .008 (theory.md): this brings each to 1/4
SCALE = {"sigmoid": 0.5, "relu": 32.0, "gelu": 32.0, "sparsemax": 1.0}


def _gates() -> Table:
    options = {
        name: () if name == "sparsemax" else (f"gate_activation={name}",) for name in PRINTED
    }  # the default is a run of all tables
    as_printed = [Cell(f"{name}, as printed", operator("dmsa", *options[name]), PRINTED[name]) for name in PRINTED]
    scaled = [
        Cell(f"{name}, gate x {scale:g}", operator("dmsa", f"gate_activation={name}", f"gate_scale={scale}"))
        for name, scale in SCALE.items()
        if scale != 1
    ]
    return Table("The gate's activation, CIFAR-10", "ablation_cifar10", (*as_printed, *scaled), "sparsemax, as printed")


GAIN = (
    Cell("DMSA", operator("dmsa")),
    Cell("DMSA, rotary none", operator("dmsa", "rotary=none")),
    Cell("DMSA, rotary 2d", operator("dmsa", 'rotary="2d"'), seeds=2),
    Cell("TSSA", operator("tssa")),
    Cell("TSSA, position scores 1d", operator("tssa", 'position_scores="1d"')),
    Cell("TSSA, position scores 2d", operator("tssa", 'position_scores="2d"'), seeds=2),
    Cell("DMSA, uniform gate", operator("dmsa", "gate_activation=uniform")),
    Cell("DMSA, gate x 4", operator("dmsa", "gate_scale=4.0"), seeds=2),
    Cell("DMSA, at most 1 head", operator("dmsa", "max_active_heads=1"), seeds=2),
    Cell("DMSA, at most 2 heads", operator("dmsa", "max_active_heads=2"), seeds=2),
    Cell("DMSA, 8 heads", (*operator("dmsa"), "model.options.num_heads=8"), seeds=2),
    Cell("DMSA, equation", operator("dmsa", "mode=equation"), seeds=2),
    Cell("DMSA, proximal", operator("dmsa", "mode=proximal"), seeds=2),
    Cell("DMSA, softmax membership", operator("dmsa", "membership_activation=softmax"), seeds=2),
    Cell("gated channel", operator("gated_channel"), seeds=2),
    Cell("MSSA", operator("mssa"), seeds=2),
    Cell("MHSA", operator("mhsa"), seeds=2),
    Cell("MHSA, matched parameters", (*operator("mhsa"), "model.options.mlp_ratio=3.0"), seeds=2),
)

TABLES = {
    "sparsity-cifar10": _sparsity(
        "CIFAR-10", "ablation_cifar10", {"tssa": 61.59, "tpusa": 62.40, "dmsa": 62.62, "tpsusa": 63.13}
    ),
    "sparsity-svhn": _sparsity(
        "SVHN, re-cropped", "ablation_svhn", {"tssa": 85.55, "tpusa": 86.25, "dmsa": 87.42, "tpsusa": 87.09}
    ),
    "gates": _gates(),
    "gain": Table("What explains the gain, CIFAR-10", "ablation_cifar10", GAIN, "TSSA"),
}
