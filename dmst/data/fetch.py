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
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import dmst
from dmst import atomic
from dmst.data.catalog import CATALOG, File
from dmst.errors import BadFileError, DmstError, FetchError, FullDiskError, OptionError, SaveError, unknown_name

Tick = Callable[[str, int, int], None]  # what is being done, how far, of how much
CHUNK = 1 << 20


def no_tick(what: str, done: int, total: int) -> None:
    """Where nobody watches."""


def fetch(name: str, data_dir: str | Path, *, tick: Tick = no_tick, timeout: float = 60, base: str | None = None) -> list[Path]:
    """The files of `name` in `data_dir`, downloaded where they are not there yet; archives unpacked.

    `base` takes the place of the address before the last slash (a mirror, a test).
    """
    folder = Path(data_dir)
    if name not in CATALOG:
        raise unknown_name("dataset", name, CATALOG)
    entry = CATALOG[name]
    if not entry.files:
        raise OptionError(entry.by_hand.format(folder=folder))
    paths = []
    for file in entry.files:
        target = folder / file.path
        unpacked = target.with_name(file.unpacked) if file.unpacked else target
        if not file.unpacked or not unpacked.exists():
            with saving(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                try:
                    _download(f"{base or entry.site}/{target.name}", file, target, tick, timeout)
                except (FetchError, BadFileError) as error:
                    raise type(error)(f"{error}\n{by_hand(name, folder)}") from error
            elif wrong := differs(target, file, tick):
                raise BadFileError(
                    f"{target} is there and is not the file that is published: {wrong}. Move it away and fetch again."
                )
            if file.unpacked:
                _unpack(target, unpacked, tick)
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


class Verdict(NamedTuple):
    """A file that is there, whether it is sound, and why."""

    path: Path
    sound: bool
    told: str


def verify(name: str, data_dir: str | Path, *, tick: Tick = no_tick) -> list[Verdict]:
    """Every official file of `name` in `data_dir`, compared with what is published."""
    if name not in CATALOG:
        raise unknown_name("dataset", name, CATALOG)
    verdicts = []
    for file in CATALOG[name].files:
        path = Path(data_dir) / file.path
        if path.is_file():
            wrong = differs(path, file, tick)
            verdicts.append(Verdict(path, not wrong, wrong or "size and md5 as published"))
    return verdicts


# --- downloads --------------------------------------------------------------------------------------------------------


def _download(url: str, file: File, target: Path, tick: Tick, timeout: float) -> None:
    """Requests until all bytes are there, each begun where the last one ended; then the check, then the rename."""
    part = target.with_name(f"{target.name}.part")
    while (before := _length(part)) < file.bytes:
        trouble = ""
        try:
            _request(url, part, file.bytes, lambda done: tick(f"fetch {target.name}", done, file.bytes), timeout)
        except DmstError:
            raise
        except (OSError, http.client.HTTPException) as error:
            trouble = f" ({getattr(error, 'reason', None) or str(error) or type(error).__name__})"
        have = _length(part)
        if have < file.bytes and have <= before:  # as long as something comes, it goes on
            told = f"was cut off after {have:,} of {file.bytes:,} bytes, which are kept" if have else "cannot be reached"
            raise FetchError(f"{url} {told}{trouble}.")
    if wrong := differs(part, file, tick):
        part.unlink()
        raise BadFileError(f"what {url} sent is not the file that is published: {wrong}. It was thrown away: try again later.")
    with saving(target):
        part.replace(target)


def _request(url: str, part: Path, size: int, tick: Callable[[int], None], timeout: float) -> None:
    """One request: what it brings is added to `part`, or begins it anew where the server does not go on from there."""
    have = _length(part)
    headers = {"User-Agent": f"dmst/{dmst.__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # it has fewer bytes than have come
            part.unlink()
        raise FetchError(f"{url} answers {error.code} {error.reason}.") from error
    with answer:
        start = have if answer.headers.get("Content-Range", "").startswith(f"bytes {have}-") else 0
        with saving(part):
            out = part.open("ab" if start else "wb")
        with out:
            while data := answer.read1(CHUNK):
                start += len(data)
                if start > size:
                    raise FetchError(f"{url} sends more than the {size:,} bytes that are published: refused.")
                with saving(part):
                    out.write(data)
                    out.flush()
                tick(start)
            with saving(part):
                os.fsync(out.fileno())


def _length(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """The disk's errors as SaveError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DmstError):
            raise
        kind = FullDiskError if error.errno in atomic.NO_ROOM else SaveError
        raise kind(
            f"{path} could not be written ({error.strerror or error}). What has come is kept: make room and run it again."
        ) from error


# --- archives ---------------------------------------------------------------------------------------------------------


def _unpack(archive: Path, folder: Path, tick: Tick) -> None:
    """What the archive holds, complete or not at all; tarfile's data filter refuses what would leave the folder."""
    staging = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    total = archive.stat().st_size
    try:
        with saving(folder), archive.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:gz") as tar:
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
