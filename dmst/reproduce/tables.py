"""The tables of experiments (tables.toml): a cell is a recipe that ships with a few keys changed, over several seeds."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from dmst.engine.recipe import Recipe, read_recipe
from dmst.reproduce import ledger

LAYERS = {
    "zero_memberships": "Memberships that are exactly 0, %",
    "idle_tokens": "Tokens that belong to no head, %",
    "zero_gates": "Gates that are exactly 0, %",
    "never": "Heads whose gate is 0 for every one of the images",
    "coding": "Coding rate of the tokens that a layer reads, nats",
    "variational": "Variational rate inside the layer's subspaces, nats; closed heads count nothing",
}


@dataclass(frozen=True)
class Cell:
    name: str
    changes: Sequence[str] = ()
    paper: float | None = None  # top-1, percent, as printed
    seeds: int = 5
    published: float | None = None  # the baseline, by its own authors
    recipe: str = ""  # another than the table's
    against: str = ""  # the cell that this one is compared with, if not the table's
    start: str = ""  # the cell of the table "best" whose weights it starts from, those of the same seed


@dataclass(frozen=True)
class Table:
    title: str
    recipe: str
    cells: Sequence[Cell]
    against: str = ""  # the cell that the others are compared with
    changes: Sequence[str] = ()
    note: str = ""
    pairs: Sequence[Sequence[str]] = ()  # other differences, of the first to the second
    layers: Sequence[str] = ()  # what is shown layer by layer, names of LAYERS
    marks: Sequence[str] = ()  # cells whose means cross the picture; without any there is none

    def recipe_of(self, cell: Cell, seed: int = 0) -> Recipe:
        return read_recipe(cell.recipe or self.recipe, self.changes_of(cell, seed))

    def config_of(self, cell: Cell) -> str:
        """The runs of a cell in the ledger have this hash, whatever their seed."""
        return ledger.config_of(self.recipe_of(cell))

    def runs_of(self, cell: Cell, lines: Sequence[ledger.Line]) -> dict[int, ledger.Line]:
        """By seed, the first run of a cell: a second one of the same seed does not count."""
        config, found = self.config_of(cell), dict[int, ledger.Line]()
        for line in lines:
            if line["config"] == config and line["seed"] < cell.seeds:
                found.setdefault(line["seed"], line)
        return found

    def changes_of(self, cell: Cell, seed: int) -> list[str]:
        """A run that starts from other weights is another run, so the hash of those is in its recipe."""
        start = [f'model.init_from="the weights of {cell.start}, {config_of_best(cell.start)}"'] if cell.start else []
        return [*self.changes, *cell.changes, *start, f"run.seed={seed}"]


def config_of_best(name: str) -> str:
    best = TABLES["best"]
    return best.config_of(next(cell for cell in best.cells if cell.name == name))


def _read() -> dict[str, Table]:
    found = tomllib.loads((resources.files("dmst") / "reproduce/tables.toml").read_text(encoding="utf-8"))
    return {name: Table(**table | {"cells": [Cell(**cell) for cell in table["cells"]]}) for name, table in found.items()}


TABLES = _read()
