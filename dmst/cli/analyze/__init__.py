"""`dmst analyze`: looking inside a trained network. One file a verb."""

from __future__ import annotations

import typer

from dmst.cli.analyze import certify, maps, rates, scored, theorem

app = typer.Typer(name="analyze", help="Measure and draw what the layers of a network do.", no_args_is_help=True)

app.command()(rates.rates)
app.command()(certify.certify)
app.command()(theorem.theorem)
app.command()(maps.maps)
app.command()(scored.scored)
