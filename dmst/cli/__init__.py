"""The command `dmst` (and `python -m dmst`, the same): verbs here, knobs in recipes.

dmst --version                this package, torch and Python
dmst --import MODULE VERB     import a module or a .py file first: the verb then knows its operators. Repeatable
"""

from __future__ import annotations

import inspect
import io
import json
import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from dmst.cli import analyze, classify, convert, data, explore, export, report, reproduce, train
from dmst.cli.imported import import_module
from dmst.terminal import Terminal, say
from dmst.words import lines

IMPORTS = typer.Option(
    [], "--import", metavar="MODULE", help="Import a module or a .py file first, to use its operators. Repeatable."
)

USAGE: Any = typer.BadParameter.__base__  # UsageError, of click or of typer's own copy of it
WARNING = warnings.formatwarning


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """What was typed wrong is quoted so that it can be shown."""
        try:
            return super().invoke(ctx)
        except USAGE as error:
            error.message = lines(error.message)
            raise


app = typer.Typer(
    name="dmst", help="Train, use and look inside white-box vision transformers.", no_args_is_help=True, add_completion=False,
    cls=_Group,
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        import torch

        import dmst

        say(f"dmst {dmst.__version__}  torch {torch.__version__}  Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the versions and exit."),
    imports: list[str] = IMPORTS,
) -> None:
    for module in imports:
        import_module(module)


def operators() -> None:
    """List the attention layers (operators) and the options of each."""
    from dmst.operators import OPERATORS

    table = Table("operator", "description")
    table.add_column("options and defaults", overflow="fold")
    known, problems = OPERATORS.look()
    for name, operator in known.items():
        home = inspect.getmodule(operator) if name in OPERATORS.built_in else operator
        headline = next(iter((getattr(home, "__doc__", None) or "").strip().splitlines()), "")
        keywords = operator.keywords().items()
        options = [f"{key}={default!r}" for key, default in keywords if key not in ("device", "dtype")]
        table.add_row(name, headline, ", ".join(options))
    Terminal().print(table)
    say(*problems, err=True, style="yellow")


def models(
    pattern: str = typer.Argument("*", help='A pattern such as "dmst_*", or a part of a name.'),
    shipped: bool = typer.Option(False, "--shipped", help="Only networks with weights that ship: their measured accuracy."),
    card: str = typer.Option(
        None, metavar="NAME", help="Print the model card of a shipped network: data, recipe, accuracy by class, limits."
    ),
    verify: bool = typer.Option(False, "--verify", help="Check the weights that ship: their bytes and their stored outputs."),
) -> None:
    """List the networks and their sizes.

    The last two columns are the parameters with 10 and with 1000 classes. * marks weights that ship.
    """
    from dmst.models import VisionModel, list_models, model_config
    from dmst.models import shipped as ours

    if card:
        say(*ours.card(card).splitlines())
        return
    if shipped or verify:
        for name in ours.SHIPPED:
            told = f"ok, answers within {ours.verify(name):.1e} of the stored ones" if verify else ours.measured(name)
            say(f"{name}: {told}")
        say("`dmst models --card NAME` prints the model card: data, recipe, accuracy by class, limits.")
        return

    def count(name: str, classes: int) -> str:
        network = VisionModel(model_config(name, num_classes=classes), device="meta")
        return f"{sum(p.numel() for p in network.parameters()):,}"

    names = list_models(pattern)
    if not names:
        say(f"No network matches {pattern!r}. `dmst models` lists them all.", err=True, style="red")
        raise typer.Exit(1)
    row = "{:<23} {:<5} {:>4} {:>5} {:>5} {:>6} {:>11} {:>12}".format  # plain lines of 78 columns: for eyes and for grep
    say(row("network", "layer", "dim", "depth", "heads", "tokens", "10 classes", "1000 classes"))
    for name in names:
        config = model_config(name)
        tokens = config.prefix + config.grid[0] * config.grid[1]
        shape = (config.operator, config.dim, config.depth, config.num_heads, tokens)
        say(row(name, *shape, count(name, 10), count(name, 1000)) + " *" * (name in ours.SHIPPED))
    say("Last columns: parameters, with the classifier. You may leave _patch16_224 out of a name. *: weights ship (--shipped).")


def demo(
    out: str = typer.Option("runs/demo", help="The folder for the report and the trained networks."),
    seeds: int = typer.Option(3, min=1, help="Runs of DMST, each with another seed."),
    epochs: int = typer.Option(16, min=1, help="Epochs of each run."),
    workers: int = typer.Option(None, min=1, help="Runs at the same time. Default: one per core."),
) -> None:
    """Train small networks on digits, then show on a page what they learned. Takes a few minutes."""
    from dmst.demo import run_demo

    run_demo(out, seeds=seeds, epochs=epochs, workers=workers)


def doctor(as_json: bool = typer.Option(False, "--json", help="Print the result as JSON.")) -> None:
    """Check this machine: what is installed, and whether the kernels compute correctly.

    Shows which kernel each operator uses and why, and tests every kernel. Exit status 0: no problem was found.
    """
    from dmst import doctor as office

    report = office.diagnose()
    say(json.dumps(report)) if as_json else office.show(report)
    raise typer.Exit(0 if report["well"] else 1)


PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {  # of `dmst --help`, in this order
    "Use": (classify.classify, explore.explore, export.export, convert.convert, models, demo),
    "Train": (train.train, train.evaluate, train.recipes, data.app),
    "Look inside": (report.report, analyze.app),
    "Research": (operators, reproduce.reproduce),
    "Machine": (doctor,),
}
for panel, verbs in PANELS.items():
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(verb)


def main() -> None:
    """The command: an error of ours is one line for a person, and its exit code."""
    from dmst.errors import DmstError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    warnings.formatwarning = lambda *told, **more: lines(WARNING(*told, **more))
    try:
        app()
    except DmstError as error:
        say(*str(error).split("\n"), err=True, style="red")
        raise SystemExit(error.exit_code) from None
