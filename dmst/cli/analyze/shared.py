"""What the verbs of `dmst analyze` share: options, how network and images are opened, how a table is printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from dmst.terminal import Terminal, say
from dmst.words import visible

if TYPE_CHECKING:
    from dmst.analysis.running import Numbers
    from dmst.engine.samples import Sample
    from dmst.models import VisionModel

NETWORK = "A network that ships (`dmst models --shipped`), a saved model, or a finished run."
Weights = Annotated[str, typer.Argument(help=NETWORK)]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A dataset or a folder. Default: the images a run was evaluated on, else photos that ship with dmst.",
    ),
]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", envvar="DMST_DATA", help="The folder of the datasets.")
]
Split = Annotated[str, typer.Option(help="test or train; if not given test, or all images where there are no test images.")]
Limit = Annotated[int, typer.Option(min=1, help="Use at most this many images, always the same ones.")]
Eps = Annotated[
    float | None,
    typer.Option(help="Precision of the rate, c = d/eps². Default: c = 1, the rate that the layers themselves lower."),
]
Orthonormal = Annotated[
    bool, typer.Option("--orthonormal", help="Use an orthonormal basis (QR) of each head's subspace, without bias.")
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Images per batch. It does not change the numbers.")]
Json = Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")]
Unverified = Annotated[bool, typer.Option(help="Accept weights without hashes, such as those of timm.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")]


@contextmanager
def opened(
    weights: Sequence[str],
    data: str | None,
    split: str,
    data_dir: str | None,
    limit: int,
    batch_size: int,
    device: str | None,
    *,
    photos: Sequence[str] = (),
    unverified: bool = False,
) -> Iterator[list[tuple[VisionModel, Sample]]]:
    """Every network, and the images that are asked for, else those that a run was evaluated on, else what is at hand."""
    from dmst.engine.distributed import joined
    from dmst.engine.prepare import read_weights
    from dmst.engine.samples import sample

    with joined(device) as group:
        models = [read_weights(where, unverified=unverified).to(group.device) for where in weights]
        places = {"split": split, "data_dir": data_dir, "photos": photos, "limit": limit, "batch_size": batch_size}
        yield [
            (model, sample(model, data, run=None if photos else where, device=group.device, **places))  # type: ignore[arg-type]
            for model, where in zip(models, weights, strict=True)
        ]


Columns = Mapping[str, tuple[str, str, str]]  # header -> what it shows ("frozen.mean"), its format, what it means


def by_layer(title: str, columns: Columns, layers: Iterable[tuple[int, Mapping[str, Numbers]]]) -> None:
    """A table with a row for each layer, given as its number and its quantities."""
    rows = []
    for number, quantities in layers:
        pairs = ((told.split("."), form) for told, form, _ in columns.values())
        rows.append([number, *(f"{getattr(quantities[name], part):{form}}" for (name, part), form in pairs)])
    show(title, ("layer", *columns), rows, {name: words for name, (_, _, words) in columns.items()})


def show(title: str, columns: Iterable[str], rows: Iterable[Sequence[object]], words: Mapping[str, str] | None = None) -> None:
    """A table of numbers that a terminal of 80 columns holds, and below it a line for each word that needs one."""
    table = Table(title=visible(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Terminal().print(table)
    if words:
        wide = max(map(len, words))
        say(*(f"{name:<{wide}}  {word}" for name, word in words.items()), "")
