"""The command `dmst` (and `python -m dmst`, the same): verbs here, knobs in recipes.

dmst --version            this package, torch and Python
dmst operators            the table of operators and their options
"""

from __future__ import annotations

import inspect
import platform

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(name="dmst", help="A white-box vision transformer.", no_args_is_help=True, add_completion=False)


def _version(asked: bool) -> None:
    if asked:
        import torch

        import dmst

        typer.echo(f"dmst {dmst.__version__}  torch {torch.__version__}  Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Say the versions and stop."),
) -> None:
    pass


@app.command()
def operators() -> None:
    """List the operators, what each is, and the options it takes."""
    from dmst.operators import OPERATORS

    table = Table("operator", "what it is")
    table.add_column("options and their defaults", overflow="fold")
    for name, operator in OPERATORS.items():
        module = inspect.getmodule(operator)
        headline = ((module and module.__doc__) or "").strip().splitlines()[0]
        parameters = inspect.signature(operator.__init__).parameters.values()
        options = [
            f"{p.name}={p.default!r}" for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("device", "dtype")
        ]
        table.add_row(name, escape(headline), escape(", ".join(options)))
    Console().print(table)


def main() -> None:
    app()
