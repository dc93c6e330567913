"""`dmst data`: which datasets there are, which of them are here, and how the others come here.

dmst data list               every dataset, and whether it is in the data folder
dmst data info NAME          classes, splits, licence, source; where it was found, in which form, how many images
dmst data fetch NAME         the official files, from their authors, checked
dmst data verify [NAME]      the checksums of what is in the data folder
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from dmst.terminal import Terminal, say
from dmst.words import visible

if TYPE_CHECKING:
    from dmst.data.catalog import Entry
    from dmst.data.formats import Format
    from dmst.data.official import Tick

app = typer.Typer(name="data", help="List, download and check datasets.", no_args_is_help=True)
HELP = "The folder of the datasets."
SHOWN = 12  # classes, of more than twice as many
NO_FOLDER = "No data folder is set. Set DMST_DATA (or --data-dir) to the folder of the datasets."


@app.command("list")
def data_list(data_dir: str = typer.Option(None, envvar="DMST_DATA", help=HELP)) -> None:
    """List the datasets: images (train + test), classes, and whether it is in the data folder.

    The last column shows the format that was found, or how to get the dataset.
    Nothing is opened or checked: use `dmst data verify` to compare checksums.
    Recipes and commands accept these names, or the path of a folder with one
    folder of images per class.
    """
    from dmst.data.catalog import CATALOG

    rows, folder = [], _folder(data_dir)
    for name, entry in CATALOG.items():
        images = " + ".join(f"{count:,}" for count in entry.counts.values())
        rows.append((name, images, str(_number_of_classes(entry)), _here(name, entry, folder)))
    Terminal().print(_grid(("name", "train + test", "classes", "in the data folder"), rows))
    say(f"Data folder: {data_dir}" if data_dir else NO_FOLDER)


@app.command("info")
def data_info(
    name: str = typer.Argument(help="A dataset of `dmst data list`, or a folder of images."),
    data_dir: str = typer.Option(None, envvar="DMST_DATA", help=HELP),
    quick: bool = typer.Option(False, "--quick", help="Show where it is, without opening it to count the images."),
) -> None:
    """Describe a dataset: classes, licence, source, and which splits are in the data folder.

    Every split that is found is opened and its images are counted; packed
    sheets are compared with their sha256. This takes a minute for ImageNet;
    --quick leaves it out. It also works for your own folder (class folders,
    WebDataset shards, or a Hugging Face dataset saved to disk).

    Exit status 0: everything that was found can be read. 1: a part of it
    cannot.
    """
    from dmst.data.catalog import CATALOG
    from dmst.data.formats import SPLITS

    console, folder, entry = Terminal(), _folder(data_dir), CATALOG.get(name)
    if entry is None:
        found = [_opened(name, split, folder) for split in SPLITS]
        if not any(sound for _, sound in found):
            raise typer.BadParameter(found[0][0], param_hint="NAME")
        console.print(_grid(("", ""), zip(SPLITS, (told for told, _ in found), strict=True)))
        return
    console.print(Text.assemble((entry.title, "bold"), f"  {name}"), _grid(("", ""), _facts(name, entry)), "", sep="\n")
    if folder is None and entry.built_in is None:
        say(NO_FOLDER)
        return
    rows, well = [], True
    for split in entry.counts:
        place = _located(entry, split, folder) if entry.built_in is None else None
        if place is None and entry.built_in is None:
            rows.append((split, f"not in {folder}"))
            continue
        told, sound = ("", True) if quick else _opened(name, split, folder)
        where = [f"{place[1]}, {place[0].what}"] if place else ["in scikit-learn"]
        rows.append((split, "\n".join([*where, *([told] if told else [])])))
        well &= sound
    console.print(Text("In the data folder", "bold"), _grid(("", ""), rows), sep="\n")
    raise typer.Exit(0 if well else 1)


@app.command("fetch")
def data_fetch(
    name: str = typer.Argument(help="A dataset of `dmst data list`."),
    data_dir: str = typer.Option(..., envvar="DMST_DATA", help="The folder for the files. It is created if it does not exist."),
    timeout: float = typer.Option(60, min=1, help="Give up after this many seconds without data."),
) -> None:
    """Download the official files of a dataset from their authors, over https.

    Size and md5 are compared with those that the authors publish; the sha256 is
    written to SHA256SUMS. If a download is interrupted, run the command again:
    it continues. Archives that cannot be read directly are unpacked next to
    the file; you may delete the archive then.

    Without network access, the message says which file to download by hand,
    from where, into which folder, and its checksum. Then run the command again.

    ImageNet is not downloaded, because every user must register: `dmst data
    fetch imagenet` explains what to do.
    """
    from dmst.data.catalog import CATALOG
    from dmst.data.fetch import fetch

    if name in CATALOG and CATALOG[name].fetched:
        entry = CATALOG[name]
        Terminal().print(_grid(("", ""), [("dataset", entry.title), ("licence", entry.licence), ("cite", entry.citation)]))
    with _progress() as tick:
        paths = fetch(name, data_dir, tick=tick, timeout=timeout)
    for path in paths:
        Terminal().print(Text.assemble(("ready", "green"), f" {path}"), soft_wrap=True)


@app.command("verify")
def data_verify(
    name: str = typer.Argument(None, help="A dataset of `dmst data list`. Default: all."),
    data_dir: str = typer.Option(..., envvar="DMST_DATA", help=HELP),
) -> None:
    """Compare the files in the data folder with their known checksums.

    Official files are compared by size and published md5, and with SHA256SUMS;
    packed sheets by their sha256. Folders of images have no checksum: `dmst
    data info` counts them, and a training run decodes every image once before
    it starts.

    Exit status 0: all files that were found are correct. 1: a file is damaged
    or unknown, or no file was found.
    """
    from dmst.data.catalog import CATALOG
    from dmst.data.fetch import verify

    with _progress() as tick:
        verdicts = [verdict for each in ([name] if name else CATALOG) for verdict in verify(each, data_dir, tick=tick)]
    if not verdicts:
        what = f"no file of {name}" if name else "no file of a dataset"
        say(f"{data_dir} has {what} with a known checksum. `dmst data list` shows what is there.")
        raise typer.Exit(1)
    Terminal().print(
        _grid(("", "file", ""), [("ok" if v.sound else "BAD", str(v.path.relative_to(data_dir)), v.told) for v in verdicts])
    )
    raise typer.Exit(0 if all(verdict.sound for verdict in verdicts) else 1)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _facts(name: str, entry: Entry) -> Iterator[tuple[str, str]]:
    from dmst.data.official import FILES

    classes = entry.classes if isinstance(entry.classes, tuple) else ()
    shown = classes if len(classes) <= 2 * SHOWN else (*classes[:SHOWN], "...", classes[-1])
    yield "classes", f"{_number_of_classes(entry):,}" + (f": {', '.join(shown)}" if shown else "")
    yield "splits", ", ".join(f"{split} {count:,} images" for split, count in entry.counts.items()) + f", {entry.size}"
    yield "licence", entry.licence
    yield "source", entry.source
    yield "cite", entry.citation
    if name in FILES:
        yield "fetch", f"dmst data fetch {name}    {sum(file.bytes for file in FILES[name]) / 1e6:,.0f} MB"
    for form in entry.formats:
        yield "read as", f"{form.what}: {', '.join(dict.fromkeys(place for split in form.places.values() for place in split))}"


def _opened(name: str, split: str, data_dir: Path | None) -> tuple[str, bool]:
    """What a split is, once it is open; or why it cannot be."""
    from dmst.data.catalog import open_set
    from dmst.errors import DmstError

    try:
        with Terminal(stderr=True).status(f"opening {visible(name)} {split}"):
            found = open_set(name, split, data_dir=data_dir)
    except DmstError as error:
        return str(error), False
    pixels = found.pixels()
    size = "" if pixels is None else f" of {pixels.shape[2]} x {pixels.shape[1]}"
    variant = f"; name this with every result: {found.variant}" if found.variant else ""
    return f"{len(found):,} images{size}, {len(found.classes):,} classes{variant}", True


def _here(name: str, entry: Entry, folder: Path | None) -> str:
    from importlib.util import find_spec

    if entry.built_in is not None:
        return "in scikit-learn" if find_spec("sklearn") else "no: pip install 'dmst[data]'"
    found = {split: place[0].what for split in entry.counts if folder and (place := _located(entry, split, folder))}
    if not found:
        return f"no: dmst data fetch {name}" if entry.source.startswith("http") else "no"  # of ImageNet it says how to get it
    forms = ", ".join(dict.fromkeys(found.values()))
    return forms if len(found) == len(entry.counts) else f"{forms}, {' and '.join(found)} only"


def _located(entry: Entry, split: str, folder: Path | None) -> tuple[Format, Path] | None:
    """The form that would be read, and where it lies: the first there is, as `open_set` takes it."""
    places = ((form, folder / place) for form in entry.formats for place in form.places[split]) if folder else ()
    return next(((form, place) for form, place in places if place.exists()), None)


def _folder(data_dir: str | None) -> Path | None:
    return Path(data_dir) if data_dir else None


def _number_of_classes(entry: Entry) -> int:
    return entry.classes if isinstance(entry.classes, int) else len(entry.classes)


def _grid(columns: tuple[str, ...], rows: Iterable[Iterable[str]]) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for column in columns:
        grid.add_column(column, overflow="fold", no_wrap=column is not columns[-1])
    for row in rows:
        grid.add_row(*row)
    return grid


@contextmanager
def _progress() -> Iterator[Tick]:
    """A bar for each thing that is done, on the error stream, where somebody looks."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console, tasks = Terminal(stderr=True), dict[str, Any]()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def tick(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(visible(what), total=total)
            progress.update(tasks[what], completed=done)

        yield tick
