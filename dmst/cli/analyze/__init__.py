"""`dmst analyze`: looking inside a trained network. One file a verb."""

from __future__ import annotations

import typer

app = typer.Typer(name="analyze", help="Look inside a trained network.", no_args_is_help=True)
