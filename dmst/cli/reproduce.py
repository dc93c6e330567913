"""`dmst reproduce`."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table as Grid

from dmst.terminal import Terminal, say

CELLS = typer.Option([], "--cell", metavar="NAME", help="Only this cell of the table. Repeatable.")


def reproduce(
    table: str = typer.Argument(None, help="A table of `dmst reproduce --list`."),
    cell: list[str] = CELLS,
    every: bool = typer.Option(False, "--all", help="All tables."),
    listed: bool = typer.Option(False, "--list", help="List the tables, and how many of their runs are finished."),
    render: bool = typer.Option(False, "--render", help="Run nothing: write the markdown of the finished runs."),
    folder: Path = typer.Option(  # noqa: B008 (typer reads it)
        "results/ledger", "--ledger", metavar="DIR", help="The folder of the ledger, the list of finished runs."
    ),
    out: Path = typer.Option("results", metavar="DIR", help="The folder for TABLE.md."),  # noqa: B008
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets."),
    weights: Path = typer.Option(None, metavar="DIR", help="Keep the trained networks in this folder."),  # noqa: B008
    device: str = typer.Option(None, help="cpu, cuda or cuda:N. Default: a GPU if there is one."),
    at_once: int = typer.Option(5, min=1, help="Runs at the same time on the device, each in a process of its own."),
    commit: str = typer.Option(None, help="Name of the source version. Default: DMST_COMMIT, else the git commit."),
) -> None:
    """Repeat the experiments of a table, and write the table.

    Only missing runs are started. The table is markdown: each number with its runs, spread and interval.

    dmst reproduce --list

    dmst reproduce gates --data-dir DIR

    dmst reproduce best --cell "DMST, CIFAR-10" --at-once 1

    dmst reproduce --all --render

    A finished run is a line of the ledger and is not repeated. A run that was killed goes on where it was saved. You can start
    this command several times at once: the processes share the work.
    """
    from dmst.atomic import write_text
    from dmst.errors import DmstError, OptionError, choose
    from dmst.reproduce import ledger
    from dmst.reproduce.render import markdown, svg
    from dmst.reproduce.run import run_table
    from dmst.reproduce.tables import TABLES

    if listed:
        lines, grid = ledger.read(folder), Grid("table", "title", "cells", "runs finished")
        for name, each in TABLES.items():
            done = sum(len(each.runs_of(cell, lines)) for cell in each.cells)
            grid.add_row(name, each.title, str(len(each.cells)), f"{done} of {sum(cell.seeds for cell in each.cells)}")
        Terminal().print(grid)
        return
    if not (table or every):
        raise OptionError("no table was named: choose one of `dmst reproduce --list`, or use --all.")
    names = list(TABLES) if every else [choose("table", table, TABLES)]
    for asked in cell:
        choose("cell", asked, [known.name for name in names for known in TABLES[name].cells])
    failed = []
    for name in names:
        if not render:
            places = {"data_dir": data_dir, "device": device, "commit": commit, "weights": weights}
            try:
                run_table(name, folder, at_once=at_once, cells=cell, say=say, **places)
            except DmstError as error:  # what did run is written all the same
                failed.append(str(error))
        lines = ledger.read(folder)
        say(write_text(out / f"{name}.md", markdown(name, lines)))
        if TABLES[name].marks:
            say(write_text(out / f"{name}.svg", svg(name, lines)))
    if failed:
        raise DmstError("\n".join(failed))
