"""`dmst bench`: time and memory, ours beside the others."""

from __future__ import annotations

import typer

app = typer.Typer(name="bench", help="Benchmark time and memory against other implementations.", no_args_is_help=True)


@app.command("operators")
def bench_operators(
    out: str = typer.Option(None, help="The file of rows. Default: results/DEVICE/operators.json (CPU: runs/bench)."),
    shapes: str = typer.Option(
        None, help="BATCHxTOKENS,... Default: five shapes of about 60,000 tokens (CPU: two small ones)."
    ),
    only: str = typer.Option(None, help="Only these layers: dmsa,floor,..."),
    modes: str = typer.Option(None, help="Launch modes, of graph,eager,compiled."),
    dtype: str = typer.Option(None, help="bfloat16, float16 or float32."),
    dim: int = typer.Option(384, min=1, help="Width."),
    heads: int = typer.Option(8, min=1, help="Heads, unless the layer fixes them."),
    compiled: str = typer.Option("some", help="Compile at all shapes, at some (256x197 and 4x16384), or at none."),
    figure: str = typer.Option(None, help="STEM of the figure, STEM.svg and STEM.png. Default: next to the rows (CPU: none)."),
    commit: str = typer.Option(None, help="Name of the source version. Default: DMST_COMMIT, else the git commit."),
    limit: float = typer.Option(None, help="Start no new row after this many seconds."),
    add: bool = typer.Option(False, "--add", help="Keep the rows of an earlier run that are not measured again."),
    check: str = typer.Option(None, metavar="FILE", help="Measure nothing: compare the rows of FILE with the targets."),
    readme: str = typer.Option(None, metavar="FILE", help="With --check: write the figures between the markers of FILE."),
) -> None:
    """Benchmark single layers: time of forward and backward, memory. A time is printed only if parity passed."""
    from dmst.bench import operators as measured

    if check:
        raise typer.Exit(measured.check(check, readme))
    asked = {"out": out, "shapes": shapes, "only": only, "modes": modes, "dtype": dtype, "compiled": compiled, "commit": commit}
    raise typer.Exit(measured.measure_all(**asked, dim=dim, heads=heads, figure_stem=figure, limit=limit, add=add))


@app.command("models")
def bench_models(
    out: str = typer.Option(None, help="The file of rows. Default: results/DEVICE/models.json (CPU: runs/bench)."),
    sizes: str = typer.Option(None, help="Image sizes in pixels. Default: 224,512,1024 (CPU: 224)."),
    only: str = typer.Option(
        None, help="Only these networks: NAME[:OPERATOR] or timm:NAME. Default: two ViT-S, DMST-S and two of timm."
    ),
    batch: str = typer.Option(None, help="Batch size, one number or one per image size. Default: 256,48,12 (CPU: 4)."),
    dtype: str = typer.Option(None, help="Autocast type: bf16, fp16, or fp32 for no autocast."),
    modes: str = typer.Option(
        None,
        help="Launch modes, of compiled,recorded,graph,eager. Default: the first two at 224 pixels, else graph (CPU: eager).",
    ),
    figure: str = typer.Option(None, help="STEM of the figure, STEM.svg and STEM.png. Default: next to the rows (CPU: none)."),
    commit: str = typer.Option(None, help="Name of the source version. Default: DMST_COMMIT, else the git commit."),
    limit: float = typer.Option(None, help="Start no new row after this many seconds."),
    add: bool = typer.Option(False, "--add", help="Keep the rows of an earlier run that are not measured again."),
    check: str = typer.Option(None, metavar="FILE", help="Measure nothing: compare the rows of FILE with the targets."),
    readme: str = typer.Option(None, metavar="FILE", help="With --check: write the figures between the markers of FILE."),
) -> None:
    """Benchmark whole networks: images per second and memory. Printed only if logits and gradients are correct."""
    from dmst.bench import models as measured

    if check:
        raise typer.Exit(measured.check(check, readme))
    asked = {"out": out, "sizes": sizes, "only": only, "batch": batch, "dtype": dtype, "modes": modes, "commit": commit}
    raise typer.Exit(measured.measure_all(**asked, figure_stem=figure, limit=limit, add=add))


@app.command("figure")
def bench_figure(
    file: str = typer.Argument(help="A file that `dmst bench operators` or `dmst bench models` wrote."),
    out: str = typer.Option(
        None, help="STEM of the figure, STEM.svg and STEM.png. Default: results/h200/operators, or next to FILE for networks."
    ),
) -> None:
    """Draw the figure of a benchmark from its file of rows. Runs nothing."""
    from dmst.bench import models, operators

    if models.holds(file):
        raise typer.Exit(models.draw(file, out or file.removesuffix(".json")))
    raise typer.Exit(operators.draw(file, out or "results/h200/operators"))


CHANGES = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a key of the recipe. Repeatable.")


@app.command("training")
def bench_training(
    recipe: str = typer.Argument("cifar10", help="A recipe of `dmst recipes`, or a .toml file."),
    changes: list[str] = CHANGES,
    data_dir: str = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets."),
    device: str = typer.Option(None, help="cpu, cuda or cuda:N. Default: a GPU if there is one."),
    runs: str = typer.Option("1", help="Runs that share the device, with another batch size if you like: 1,2,4,1x2048."),
    seconds: float = typer.Option(5.0, min=0.1, help="Seconds for each of the three measurements of a row, about."),
    out: str = typer.Option(None, metavar="FILE", help="Write the rows as JSON."),
    commit: str = typer.Option(None, help="Name of the source version. Default: DMST_COMMIT, else the git commit."),
) -> None:
    """Benchmark training: images per second, and the share of the time that the input pipeline takes."""
    from dmst.bench.training import measure
    from dmst.errors import OptionError

    rows = [[int(x) if x.isdecimal() else 0 for x in part.split("x")] for part in runs.split(",")]
    if not all(len(row) <= 2 and all(row) for row in rows):
        raise OptionError(f"runs is {runs!r}: it must be whole numbers separated by commas, such as 1,2,4 or 1x512,1x2048.")
    asked = {"data_dir": data_dir, "device": device, "out": out, "commit": commit}
    raise typer.Exit(measure(recipe, changes, **asked, runs=rows, seconds=seconds))
