"""What the verbs of `dmst analyze` share: options, the bar, how a table is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table

from dmst.cli.progress import counted
from dmst.terminal import Terminal, say
from dmst.words import visible

if TYPE_CHECKING:
    from torch import Tensor

    from dmst.engine.samples import Sample
    from dmst.models import VisionModel

WEIGHTS = typer.Argument(
    "dmst_cifar10", help="A network that ships (`dmst models --shipped`), a saved model, or a finished run."
)
DATA = typer.Option(
    None,
    metavar="NAME",
    help="A dataset or a folder. Default: the images a run was evaluated on, else photos that ship with dmst.",
)
DATA_DIR = typer.Option(None, "--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets.")
SPLIT = typer.Option("", help="test or train; if not given test, or all images where there are no test images.")
LIMIT = typer.Option(1000, min=1, help="Use at most this many images, always the same ones.")
EPS = typer.Option(None, help="Precision of the rate, c = d/eps². Default: c = 1, the rate that the layers themselves lower.")
ORTHONORMAL = typer.Option(False, "--orthonormal", help="Use an orthonormal basis (QR) of each head's subspace, without bias.")
BATCH = typer.Option(64, "--batch-size", min=1, help="Images per batch. It does not change the numbers.")
JSON = typer.Option(False, "--json", help="Print all numbers, by layer and head, as one JSON object.")
DEVICE = typer.Option(None, help="cpu, cuda or cuda:N. Default: a GPU if there is one.")


def look(
    model: VisionModel, weights: str, data: str | None, split: str, data_dir: str | None, limit: int, batch_size: int
) -> Sample:
    """The images that are asked for, else those that a run was evaluated on, else what is at hand."""
    from dmst.engine.samples import sample

    device = next(model.parameters()).device
    return sample(model, data, run=weights, split=split, data_dir=data_dir, limit=limit, batch_size=batch_size, device=device)


def shown(looked_at: Sample) -> Iterator[Tensor]:
    """The batches of a sample, with a bar for who sits there."""
    with counted(looked_at.name, looked_at.count) as tick:
        for images, _ in looked_at:
            yield images
            tick(len(images))


def columns(weights: str, looked_at: Sample, names: Sequence[str]) -> Table:
    """A table of numbers that a terminal of 80 columns holds."""
    title = visible(f"{weights} on {looked_at.name}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def legend(words: Mapping[str, str]) -> list[str]:
    """What each column means, a line each."""
    wide = max(map(len, words))
    return [f"{name:<{wide}}  {word}" for name, word in words.items()]


def tell(table: Table | None, sentences: list[str], words: Mapping[str, str] | None = None) -> None:
    """The table and what its columns mean, then what it says, a line each."""
    if table is not None:
        Terminal().print(table)
        sentences = [*legend(words), "", *sentences] if words else sentences
    say(*sentences)
