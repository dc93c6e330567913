"""The command `dmst` (and `python -m dmst`, the same): verbs here, knobs in recipes.

dmst --version            this package, torch and Python
dmst operators            the table of operators and their options
dmst models [PATTERN]     the named networks, their sizes and parameters
dmst demo                 a DMST learns to read digits, and a page shows what it computes
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
def models(pattern: str = typer.Argument("*", help='Which names: "dmst_*", or a part of a name.')) -> None:
    """List the named networks: shape, tokens, and parameters with 10 and with 1000 classes."""
    from dmst.models import VisionModel, list_models, model_config

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
        typer.echo(row(name, *shape, count(name, 10), count(name, 1000)))
    typer.echo("Parameters, with the classifier. _patch16_224 may be left out of a name: dmst_tiny.")


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


bench = typer.Typer(name="bench", help="Time and memory, ours beside the others.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("operators")
def bench_operators(
    out: str = typer.Option(None, help="The file of rows; results/DEVICE/operators.json if not given (CPU: runs/bench)."),
    shapes: str = typer.Option(None, help="BATCHxTOKENS,...; five of about 60,000 tokens if not given (CPU: two small ones)."),
    only: str = typer.Option(None, help="Which layers: dmsa,floor,..."),
    modes: str = typer.Option(None, help="Of graph,eager,compiled."),
    dtype: str = typer.Option(None, help="bfloat16, float16 or float32."),
    dim: int = typer.Option(384, min=1, help="Width."),
    heads: int = typer.Option(8, min=1, help="Heads, where the layer does not say itself."),
    compiled: str = typer.Option("some", help="Compile at all shapes, some (256x197 and 4x16384) or none."),
    figure: str = typer.Option(
        None, help="STEM of the figure, STEM.svg and STEM.png; beside the rows if not given (CPU: none)."
    ),
    commit: str = typer.Option(None, help="What to call the source; else DMST_COMMIT, else what git says."),
    limit: float = typer.Option(None, help="Begin no row after so many seconds."),
    add: bool = typer.Option(False, "--add", help="Keep the rows of an earlier run that are not measured again."),
    check: str = typer.Option(None, metavar="FILE", help="Measure nothing: hold the rows of FILE against the targets."),
    readme: str = typer.Option(None, metavar="FILE", help="With --check: put the figures between the marks of FILE."),
) -> None:
    """Forward, forward+backward, kept and peak memory of each layer; a time is told only where its parity holds."""
    from dmst.bench import operators as measured

    if check:
        raise typer.Exit(measured.check(check, readme))
    asked = {"out": out, "shapes": shapes, "only": only, "modes": modes, "dtype": dtype, "compiled": compiled, "commit": commit}
    raise typer.Exit(measured.measure_all(**asked, dim=dim, heads=heads, figure_stem=figure, limit=limit, add=add))


@bench.command("figure")
def bench_figure(
    file: str = typer.Argument(help="A file of `dmst bench operators`."),
    out: str = typer.Option("results/h200/operators", help="STEM: writes STEM.svg and STEM.png."),
) -> None:
    """Draw the paper's figure from a file of rows, without running anything."""
    from dmst.bench import operators as measured

    raise typer.Exit(measured.draw(file, out))


def main() -> None:
    """The command: an error of ours is one line for a person, and exit code 1."""
    from dmst.errors import DmstError

    try:
        app()
    except DmstError as error:
        typer.secho(str(error), fg="red", err=True)
        raise SystemExit(1) from None
