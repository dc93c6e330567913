"""`dmst data fetch`: the official files of a dataset, from their authors, whole and checked. The only download of this package.

    NAME.part      what has come so far (download.py)
    NAME           renamed to this when size and md5 are those that the authors publish (official.py)
    FOLDER/        unpacked beside it, where an archive is not read as it is (unpack.py)
    SHA256SUMS     what is here, for `sha256sum --check SHA256SUMS`

Whatever stops it, the next call goes on from there. Nothing of the user's is overwritten.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dmst import atomic
from dmst.data import catalog
from dmst.data.download import download, forget, length, saving
from dmst.data.official import FILES, NOT_FETCHED, PACKED, File, Tick, differs, digests, no_tick
from dmst.data.unpack import unpack
from dmst.errors import BadFileError, FetchError, FullDiskError, OptionError, unknown_name

SUMS = "SHA256SUMS"
SLACK = 64 << 20  # bytes that stay free


def fetch(
    name: str, data_dir: str | Path, *, tick: Tick | None = None, timeout: float = 60, base: str | None = None
) -> list[Path]:
    """The files of `name` in `data_dir`, downloaded where they are not there yet; archives that need it unpacked.

    `base` takes the place of the address before the last slash (a mirror, a test): it may be http, all others are https.
    """
    folder = Path(data_dir)
    if name in NOT_FETCHED:
        raise OptionError(NOT_FETCHED[name].format(folder=folder))
    if name not in FILES:
        raise unknown_name("dataset", name, FILES)
    tick = tick or no_tick
    with saving(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        _room(name, folder)
        return [_fetch_one(name, file, folder, tick, timeout, base) for file in FILES[name]]


def by_hand(name: str, folder: Path) -> str:
    """What to do where there is no network."""
    entry = catalog.CATALOG[name]
    rows = (f"  {file.url}\n    to {folder / file.path}    {file.bytes:,} bytes, md5 {file.md5}" for file in FILES[name])
    again = f"Then run `dmst data fetch {name} --data-dir {folder}` again: it checks what is there, and goes on."
    return "\n".join([f"To get it by hand, from {entry.source}:", *rows, again])


def _fetch_one(name: str, file: File, folder: Path, tick: Tick, timeout: float, base: str | None) -> Path:
    target = folder / file.path
    if file.unpacked and (folder / file.unpacked).exists():
        return folder / file.unpacked
    with saving(target, file.bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        wrong, sha256 = differs(target, file, tick)
        if wrong:
            raise BadFileError(
                f"{target} is there and is not the file that is published: {wrong}. Move it away and fetch again."
            )
    else:
        sha256 = _download(name, file, folder, tick, timeout, base)
    _record(folder, file.path, sha256)
    return unpack(target, folder / file.unpacked, tick) if file.unpacked else target


def _download(name: str, file: File, folder: Path, tick: Tick, timeout: float, base: str | None) -> str:
    """Bring one file to its place; returns its sha256."""
    target = folder / file.path
    part = _part(target)
    url = f"{base.rstrip('/')}/{target.name}" if base else file.url
    plain = base is not None and base.startswith("http:")
    try:
        told = f"fetch {target.name}"
        download(url, part, file.bytes, tick=lambda done: tick(told, done, file.bytes), timeout=timeout, plain_http=plain)
    except FetchError as error:
        raise FetchError(f"{error}\n{by_hand(name, folder)}") from error
    wrong, sha256 = differs(part, file, tick)
    if wrong:
        forget(part)
        raise BadFileError(
            f"what {url} sent is not the file that is published: {wrong}. It was thrown away: try again later.\n"
            f"{by_hand(name, folder)}"
        )
    with saving(target, file.bytes):
        part.replace(target)
        forget(part)
    return sha256


class Verdict(NamedTuple):
    """A file that is there, whether it is sound, and why."""

    path: Path
    sound: bool
    told: str


def verify(name: str, data_dir: str | Path, *, tick: Tick | None = None) -> list[Verdict]:
    """Every file of `name` in `data_dir` whose checksum is known: the official ones and the packed sheets."""
    if name not in catalog.CATALOG:
        raise unknown_name("dataset", name, catalog.CATALOG)
    tick, folder, verdicts = tick or no_tick, Path(data_dir), []
    recorded = _recorded(folder)
    for file in FILES.get(name, ()):
        if (folder / file.path).is_file():
            wrong, sha256 = differs(folder / file.path, file, tick)
            if not wrong and recorded.get(file.path, sha256) != sha256:
                wrong = f"its sha256 is {sha256}, and {SUMS} says {recorded[file.path]}"
            verdicts.append(Verdict(folder / file.path, not wrong, wrong or "size and md5 as published"))
    for pack in PACKED.get(name, {}).values():
        for packed, sha256 in pack.files.items():
            if (folder / packed).is_file():
                found = digests(folder / packed, tick)[1]
                told = "sha256 as packed" if found == sha256 else f"its sha256 is {found}, not {sha256}"
                verdicts.append(Verdict(folder / packed, found == sha256, told))
    return verdicts


def _recorded(folder: Path) -> dict[str, str]:
    with suppress(OSError, UnicodeDecodeError):
        rows = (re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line) for line in (folder / SUMS).read_text("utf-8").splitlines())
        return {row[2]: row[1] for row in rows if row}
    return {}


def _record(folder: Path, path: str, sha256: str) -> None:
    held = _recorded(folder)
    if held.get(path) != sha256:
        rows = sorted((held | {path: sha256}).items())
        atomic.write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in rows))


def _room(name: str, folder: Path) -> None:
    """Refuse before the first byte what would not fit."""
    needed = SLACK
    for file in FILES[name]:
        if file.unpacked and (folder / file.unpacked).exists():
            continue
        target = folder / file.path
        held = target if target.exists() else _part(target)
        needed += max(file.bytes - length(held), 0) + (file.bytes * 11 // 10 if file.unpacked else 0)
    free = shutil.disk_usage(folder).free
    if needed > SLACK and free < needed:
        raise FullDiskError(f"{name} needs {needed:,} bytes in {folder}, and {free:,} are free there. Nothing was downloaded.")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One fetch a folder at a time; the system forgets the lock of a process that dies."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(f"another `dmst data fetch` is at work in {folder}: wait for it.") from None
        except OSError:  # some network disks know no locks
            pass
        yield
    finally:
        os.close(handle)


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")
