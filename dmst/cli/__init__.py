"""The command `dmst` (and `python -m dmst`, the same): verbs here, knobs in recipes.

dmst --version            this package, torch and Python
dmst operators            the table of operators and their options
dmst models [PATTERN]     the named networks, their sizes and parameters
dmst train RECIPE         train or fine-tune, or go on with a run; dmst train --data FOLDER ... for images of your own
dmst evaluate WEIGHTS     exact top-1 and top-5 of a saved model
dmst classify PHOTO...    what a network sees in photos, with pictures of its memberships
dmst explore              a page in the browser: what networks compute of your picture, and what they do without a head
dmst analyze VERB         look inside: rates by layer, certificates, maps
dmst report WEIGHTS       one page about a network: accuracy, calibration, rates, certificates, gates, answers with maps
dmst recipes [NAME]       the recipes that ship, what each promises; --keys: all that can be set
dmst reproduce TABLE      run what a table of experiments lacks, and write it as markdown
dmst demo                 a DMST learns to read digits, and a page shows what it computes
dmst data list            the datasets; also data info, data fetch, data verify
dmst bench operators      time and memory of one layer beside the others, on the device at hand
dmst doctor               what is installed, which kernels run here, and whether they are right
"""

from __future__ import annotations

import inspect
import platform

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dmst.cli import analyze, bench, classify, data, explore, report, reproduce, train

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


@app.command()
def models(
    pattern: str = typer.Argument("*", help='Which names: "dmst_*", or a part of a name.'),
    shipped: bool = typer.Option(False, "--shipped", help="Only those whose weights ship: what each was measured to do."),
    card: str = typer.Option(None, metavar="NAME", help="The card of one that ships: data, recipe, accuracy by class, limits."),
    verify: bool = typer.Option(False, "--verify", help="Check the weights that ship: their bytes, and their stored answers."),
) -> None:
    """List the named networks: shape, tokens, and parameters with 10 and with 1000 classes. * marks weights that ship."""
    from dmst.models import VisionModel, list_models, model_config
    from dmst.models import shipped as ours

    if card:
        typer.echo(ours.card(card))
        return
    if shipped or verify:
        for name in ours.SHIPPED:
            told = f"answers within {ours.verify(name):.1e} of those stored" if verify else ours.measured(name)
            typer.echo(f"{name}: {told}")
        typer.echo("`dmst models --card NAME` says how each was made, its accuracy by class, and its limits.")
        return

    def count(name: str, classes: int) -> str:
        network = VisionModel(model_config(name, num_classes=classes), device="meta")
        return f"{sum(p.numel() for p in network.parameters()):,}"

    names = list_models(pattern)
    if not names:
        typer.secho(f"No network matches {pattern!r}. `dmst models` lists them all.", fg="red", err=True)
        raise typer.Exit(1)
    row = "{:<23} {:<5} {:>4} {:>5} {:>5} {:>6} {:>11} {:>12}".format  # plain lines of 78 columns: for eyes and for grep
    typer.echo(row("network", "layer", "dim", "depth", "heads", "tokens", "10 classes", "1000 classes"))
    for name in names:
        config = model_config(name)
        tokens = config.prefix + config.grid[0] * config.grid[1]
        shape = (config.operator, config.dim, config.depth, config.num_heads, tokens)
        typer.echo(row(name, *shape, count(name, 10), count(name, 1000)) + " *" * (name in ours.SHIPPED))
    typer.echo(
        "Parameters, with the classifier. _patch16_224 may be left out of a name: dmst_tiny. *: weights ship (--shipped)."
    )


@app.command()
def demo(
    out: str = typer.Option("runs/demo", help="Where the report and the trained networks go."),
    seeds: int = typer.Option(3, min=1, help="Runs of DMST."),
    epochs: int = typer.Option(16, min=1, help="Passes over the digits."),
    workers: int = typer.Option(None, min=1, help="Runs at a time; one a core if not given."),
) -> None:
    """Train small networks on digits, beside one another, and write a page that shows what they compute."""
    from dmst.demo import run_demo

    run_demo(out, seeds=seeds, epochs=epochs, workers=workers)


@app.command()
def doctor(as_json: bool = typer.Option(False, "--json", help="The same as JSON.")) -> None:
    """Say what is installed, which kernel each operator uses and why, and test every kernel. Exit status 0: all is well."""
    from dmst import doctor as office

    report = office.diagnose()
    typer.echo(office.as_json(report)) if as_json else office.show(report)
    raise typer.Exit(0 if report.well else 1)


app.command()(train.train)
app.command()(train.evaluate)
app.command()(classify.classify)
app.command()(explore.explore)
app.command()(train.recipes)
app.command()(reproduce.reproduce)
app.command()(report.report)
app.add_typer(analyze.app, name="analyze")
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")


def main() -> None:
    """The command: an error of ours is one line for a person, and its exit code."""
    from dmst.errors import DmstError

    try:
        app()
    except DmstError as error:
        typer.secho(str(error), fg="red", err=True)
        raise SystemExit(error.exit_code) from None
