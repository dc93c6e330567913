"""`dmst data fetch`: the official files of a dataset, from their authors, checked. The only download of this package.

    NAME.part      what has come so far: cut off, the next call goes on from there
    NAME           renamed to this when size and md5 are those that the authors publish
    FOLDER/        of an archive, unpacked beside it: complete or not at all

Nothing of the user's is overwritten.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import dmst
from dmst import atomic
from dmst.data.catalog import CATALOG, File
from dmst.errors import BadFileError, FetchError, OptionError, choose

Tick = Callable[[str, int, int], None]  # what is being done, how far, of how much
CHUNK = 1 << 20


def no_tick(what: str, done: int, total: int) -> None:
    """Where nobody watches."""


def fetch(name: str, data_dir: str | Path, *, tick: Tick = no_tick, timeout: float = 60, base: str | None = None) -> list[Path]:
    """The files of `name` in `data_dir`, downloaded where they are not there yet; archives unpacked.

    `base` takes the place of the address before the last slash (a mirror, a test).
    """
    folder, entry = Path(data_dir), CATALOG[choose("dataset", name, CATALOG)]
    if not entry.files:
        raise OptionError(entry.by_hand.format(folder=folder))
    paths = []
    for file in entry.files:
        target = folder / file.path
        unpacked = target.with_name(file.unpacked) if file.unpacked else target
        try:
            if not file.unpacked or not unpacked.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    _download(f"{base or entry.site}/{target.name}", file, target, tick, timeout)
                elif wrong := differs(target, file, tick):
                    raise BadFileError(f"{target} is there and is not the file that is published: {wrong}. Move it away.")
                if file.unpacked:
                    _unpack(target, unpacked, tick)
        except (FetchError, BadFileError) as error:
            raise type(error)(f"{error}\n{by_hand(name, folder)}") from error
        except OSError as error:
            raise atomic.failed(target, error, file.bytes) from error
        paths.append(unpacked)
    return paths


def by_hand(name: str, folder: Path) -> str:
    """What to do where there is no network."""
    entry = CATALOG[name]
    rows = (
        f"  {entry.site}/{Path(file.path).name}\n    to {folder / file.path}    {file.bytes:,} bytes, md5 {file.md5}"
        for file in entry.files
    )
    again = f"Then run `dmst data fetch {name} --data-dir {folder}` again: it checks what is there, and goes on."
    return "\n".join([f"To get it by hand, from {entry.source}:", *rows, again])


def differs(path: Path, file: File, tick: Tick = no_tick) -> str:
    """How `path` differs from what is published; empty: not at all."""
    if (size := path.stat().st_size) != file.bytes:
        return f"it has {size:,} bytes instead of {file.bytes:,}"
    md5, done = hashlib.md5(usedforsecurity=False), 0
    with path.open("rb") as source:
        while data := source.read(CHUNK):
            md5.update(data)
            done += len(data)
            tick(f"check {path.name.removesuffix('.part')}", done, size)
    return "" if md5.hexdigest() == file.md5 else f"its md5 is {md5.hexdigest()} instead of {file.md5}"


def verify(name: str, data_dir: str | Path, *, tick: Tick = no_tick) -> dict[Path, str]:
    """How every official file of `name` that is in `data_dir` differs from what is published."""
    files = {Path(data_dir) / file.path: file for file in CATALOG[choose("dataset", name, CATALOG)].files}
    return {path: differs(path, file, tick) for path, file in files.items() if path.is_file()}


def _download(url: str, file: File, target: Path, tick: Tick, timeout: float) -> None:
    """Requests until all bytes are there, each begun where the last one ended; then the check, then the rename."""
    part = target.with_name(f"{target.name}.part")
    if part.is_symlink():
        raise BadFileError(f"{part} is a link, and links are not followed: remove it.")
    with part.open("ab") as out:
        while (before := out.tell()) < file.bytes:
            trouble = ""
            try:
                for data in _request(url, before, timeout):
                    out.write(data)
                    tick(f"fetch {target.name}", out.tell(), file.bytes)
                    if out.tell() > file.bytes:
                        break
            except FetchError as error:
                trouble = f" ({error})"
            if out.tell() == before:  # as long as something comes, it goes on
                told = (
                    f"was cut off after {before:,} of {file.bytes:,} bytes, which are kept" if before else "cannot be reached"
                )
                raise FetchError(f"{url} {told}{trouble}.")
        out.flush()
        os.fsync(out.fileno())
    if wrong := differs(part, file, tick):
        part.unlink()
        raise BadFileError(f"what {url} sent is not the file that is published: {wrong}. It was thrown away: try again later.")
    part.replace(target)


def _request(url: str, start: int, timeout: float) -> Iterator[bytes]:
    """The bytes of a file from `start` on, as one request brings them; every trouble of the network is a FetchError."""
    headers = {"User-Agent": f"dmst/{dmst.__version__}"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            known = 0 if answer.status == 206 else start  # a server that begins anew: what is here already is passed over
            while data := answer.read1(CHUNK):
                yield data[known:]
                known = max(0, known - len(data))
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(str(error) or type(error).__name__) from error


def _unpack(archive: Path, folder: Path, tick: Tick) -> None:
    """Into a folder beside it, by tarfile's filter "data" (no link or name that leads out), then renamed."""
    staging, total = folder.with_name(f".{folder.name}.unpacking"), archive.stat().st_size
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    try:
        with archive.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:gz") as tar:
            for member in tar:
                tar.extract(member, staging, filter="data")
                tick(f"unpack {archive.name}", raw.tell(), total)
        if not (staging / folder.name).is_dir():
            raise BadFileError(f"{archive} holds no folder {folder.name}: nothing was unpacked.")
        (staging / folder.name).rename(folder)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadFileError(f"{archive} cannot be unpacked ({error}).") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
