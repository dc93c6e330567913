"""`dmst bench`: time and memory, ours beside the others."""

from __future__ import annotations

import typer

app = typer.Typer(name="bench", help="Measure time and memory, ours beside the others.", no_args_is_help=True)


@app.command("operators")
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


@app.command("models")
def bench_models(
    out: str = typer.Option(None, help="The file of rows; results/DEVICE/models.json if not given (CPU: runs/bench)."),
    sizes: str = typer.Option(None, help="Sides of the images in pixels; 224,512,1024 if not given (CPU: 224)."),
    only: str = typer.Option(
        None, help="Which networks, NAME[:OPERATOR] of the zoo or timm:NAME; two ViT-S, DMST-S and two of timm if not given."
    ),
    batch: str = typer.Option(None, help="Images a step, one number or one for each size; 256,48,12 if not given (CPU: 4)."),
    dtype: str = typer.Option(None, help="Of autocast: bf16, fp16, or fp32 for none."),
    modes: str = typer.Option(
        None, help="Of compiled,recorded,graph,eager; the first two at 224 pixels, graph elsewhere (CPU: eager)."
    ),
    figure: str = typer.Option(
        None, help="STEM of the figure, STEM.svg and STEM.png; beside the rows if not given (CPU: none)."
    ),
    commit: str = typer.Option(None, help="What to call the source; else DMST_COMMIT, else what git says."),
    limit: float = typer.Option(None, help="Begin no row after so many seconds."),
    add: bool = typer.Option(False, "--add", help="Keep the rows of an earlier run that are not measured again."),
    check: str = typer.Option(None, metavar="FILE", help="Measure nothing: hold the rows of FILE against the targets."),
    readme: str = typer.Option(None, metavar="FILE", help="With --check: put the figures between the marks of FILE."),
) -> None:
    """Images a second, inference and training, and memory of whole networks; told only where logits and gradients are right."""
    from dmst.bench import models as measured

    if check:
        raise typer.Exit(measured.check(check, readme))
    asked = {"out": out, "sizes": sizes, "only": only, "batch": batch, "dtype": dtype, "modes": modes, "commit": commit}
    raise typer.Exit(measured.measure_all(**asked, figure_stem=figure, limit=limit, add=add))


@app.command("figure")
def bench_figure(
    file: str = typer.Argument(help="A file of `dmst bench operators` or `dmst bench models`."),
    out: str = typer.Option(
        None, help="STEM: writes STEM.svg and STEM.png; results/h200/operators or, of networks, beside FILE if not given."
    ),
) -> None:
    """Draw the paper's figure, or that of networks, from a file of rows, without running anything."""
    from dmst.bench import models, operators

    if models.holds(file):
        raise typer.Exit(models.draw(file, out or file.removesuffix(".json")))
    raise typer.Exit(operators.draw(file, out or "results/h200/operators"))


CHANGES = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a key of the recipe. Repeatable.")


@app.command("training")
def bench_training(
    recipe: str = typer.Argument("cifar10", help="A recipe of `dmst recipes`, or a .toml file."),
    changes: list[str] = CHANGES,
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="Where the datasets are."),
    device: str = typer.Option(None, help="cpu, cuda or cuda:N; the best there is if not given."),
    runs: str = typer.Option("1", help="Runs that share the device, and if not the recipe's, their batch: 1,2,4,1x2048."),
    seconds: float = typer.Option(5.0, min=0.1, help="For each of the three measurements of a row, about."),
    out: str = typer.Option(None, metavar="FILE", help="Write the rows as JSON."),
    commit: str = typer.Option(None, help="What to call the source; else DMST_COMMIT, else what git says."),
) -> None:
    """Images a second of the training engine, and the share of them that the input takes, measured in one run."""
    from dmst.bench.training import measure
    from dmst.errors import OptionError

    rows = [[int(x) if x.isdecimal() else 0 for x in part.split("x")] for part in runs.split(",")]
    if not all(len(row) <= 2 and all(row) for row in rows):
        raise OptionError(f"runs is {runs!r}: it must be whole numbers with commas between, as 1,2,4 or 1x512,1x2048.")
    asked = {"data_dir": data_dir, "device": device, "out": out, "commit": commit}
    raise typer.Exit(measure(recipe, changes, **asked, runs=rows, seconds=seconds))
