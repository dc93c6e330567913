"""`dmst data`: which datasets there are, which of them are here, and how the others come here.

dmst data list               every dataset, and whether it is in the data folder
dmst data info NAME          classes, splits, licence, source; where it was found, how many images
dmst data fetch NAME         the official files, from their authors, checked
dmst data verify [NAME]      the checksums of what is in the data folder
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dmst.cli.progress import downloads
from dmst.terminal import Terminal, say

if TYPE_CHECKING:
    from dmst.data.catalog import Entry

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

    row = "{:<14} {:<18} {:<8} {}".format  # plain lines, for eyes and for grep
    say(row("name", "train + test", "classes", "in the data folder"))
    for name, entry in CATALOG.items():
        images = " + ".join(f"{count:,}" for count in entry.counts.values())
        say(row(name, images, entry.class_count, _here(name, entry, data_dir)))
    say(f"Data folder: {data_dir}" if data_dir else NO_FOLDER)


@app.command("info")
def data_info(
    name: str = typer.Argument(help="A dataset of `dmst data list`, or a folder of images."),
    data_dir: str = typer.Option(None, envvar="DMST_DATA", help=HELP),
    quick: bool = typer.Option(False, "--quick", help="Show where it is, without opening it to count the images."),
) -> None:
    """Describe a dataset: classes, licence, source, and which splits are in the data folder.

    Every split that is found is opened and its images are counted. This takes
    a minute for ImageNet; --quick leaves it out. It also works for your own
    folder (class folders, WebDataset shards, or a Hugging Face dataset saved to
    disk).

    Exit status 0: everything that was found can be read. 1: a part of it
    cannot.
    """
    from dmst.data.catalog import CATALOG, located
    from dmst.data.formats import SPLITS

    entry = CATALOG.get(name)
    if entry is None:
        found = {split: _opened(name, split, data_dir) for split in SPLITS}
        if not any(sound for _, sound in found.values()):
            raise typer.BadParameter(found["train"][0], param_hint="NAME")
        say(*(f"{split}: {told}" for split, (told, _) in found.items()))
        return
    say(entry.title, *(f"{what:<9}{told}" for what, told in _facts(name, entry)), "")
    if not data_dir and entry.places:
        say(NO_FOLDER)
        return
    well = True
    for split in entry.counts:
        place = located(entry, split, Path(data_dir)) if entry.places else entry.layout
        told, sound = ("", True) if quick or not place else _opened(name, split, data_dir)
        say(f"{split}: {place or f'not in {data_dir}'}", *([f"  {told}"] if told else []))
        well &= sound
    raise typer.Exit(0 if well else 1)


@app.command("fetch")
def data_fetch(
    name: str = typer.Argument(help="A dataset of `dmst data list`."),
    data_dir: str = typer.Option(..., envvar="DMST_DATA", help="The folder for the files. It is created if it does not exist."),
    timeout: float = typer.Option(60, min=1, help="Give up after this many seconds without data."),
) -> None:
    """Download the official files of a dataset from their authors, over https.

    Size and md5 are compared with those that the authors publish. If a download
    is interrupted, run the command again: it continues. Archives are unpacked
    next to the file; you may delete the archive then.

    Without network access, the message says which file to download by hand,
    from where, into which folder, and its checksum. Then run the command again.

    ImageNet is not downloaded, because every user must register: `dmst data
    fetch imagenet` explains what to do.
    """
    from dmst.data.catalog import CATALOG
    from dmst.data.fetch import fetch

    if (entry := CATALOG.get(name)) and entry.files:
        say(entry.title, f"licence: {entry.licence}", f"cite: {entry.citation}")
    with downloads() as tick:
        paths = fetch(name, data_dir, tick=tick, timeout=timeout)
    say(*(f"ready {path}" for path in paths))


@app.command("verify")
def data_verify(
    name: str = typer.Argument(None, help="A dataset of `dmst data list`. Default: all."),
    data_dir: str = typer.Option(..., envvar="DMST_DATA", help=HELP),
) -> None:
    """Compare the files in the data folder with their known checksums.

    Official files are compared by size and published md5. Folders of images
    have no checksum: `dmst data info` counts them, and a training run decodes
    every image once before it starts.

    Exit status 0: all files that were found are correct. 1: a file is damaged
    or unknown, or no file was found.
    """
    from dmst.data.catalog import CATALOG
    from dmst.data.fetch import verify

    found: dict[Path, str] = {}
    with downloads() as tick:
        for each in [name] if name else CATALOG:
            found |= verify(each, data_dir, tick=tick)
    if not found:
        what = f"no file of {name}" if name else "no file of a dataset"
        say(f"{data_dir} has {what} with a known checksum. `dmst data list` shows what is there.")
        raise typer.Exit(1)
    for path, wrong in found.items():
        say(f"{'BAD' if wrong else 'ok '}  {path.relative_to(data_dir)}  {wrong or 'size and md5 as published'}")
    raise typer.Exit(1 if any(found.values()) else 0)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _facts(name: str, entry: Entry) -> Iterator[tuple[str, str]]:
    classes = entry.classes if isinstance(entry.classes, tuple) else ()
    shown = classes if len(classes) <= 2 * SHOWN else (*classes[:SHOWN], "...", classes[-1])
    yield "classes", f"{entry.class_count:,}" + (f": {', '.join(shown)}" if shown else "")
    yield "splits", ", ".join(f"{split} {count:,} images" for split, count in entry.counts.items()) + f", {entry.size}"
    yield "licence", entry.licence
    yield "source", entry.source
    yield "cite", entry.citation
    if entry.files:
        yield "fetch", f"dmst data fetch {name}    {sum(file.bytes for file in entry.files) / 1e6:,.0f} MB"
    yield "read as", entry.layout


def _opened(name: str, split: str, data_dir: str | None) -> tuple[str, bool]:
    """What a split is, once it is open; or why it cannot be."""
    from dmst.data.catalog import open_set
    from dmst.errors import DmstError

    try:
        with Terminal(stderr=True).status(f"opening {name} {split}"):
            found = open_set(name, split, data_dir=data_dir)
    except DmstError as error:
        return str(error), False
    pixels = found.pixels()
    size = "" if pixels is None else f" of {pixels.shape[2]} x {pixels.shape[1]}"
    variant = f"; name this with every result: {found.variant}" if found.variant else ""
    return f"{len(found):,} images{size}, {len(found.classes):,} classes{variant}", True


def _here(name: str, entry: Entry, data_dir: str | None) -> str:
    from importlib.util import find_spec

    from dmst.data.catalog import located

    if not entry.places:
        return entry.layout if find_spec("sklearn") else "no: pip install 'dmst[data]'"
    found = [split for split in entry.counts if data_dir and located(entry, split, Path(data_dir))]
    if not found:
        return f"no: dmst data fetch {name}"  # of ImageNet it says how to get it
    return entry.layout if len(found) == len(entry.counts) else f"{entry.layout}, {' and '.join(found)} only"
