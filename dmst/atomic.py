"""Atomic writes: temporary file, fsync, rename. Reads verify the sha256.

    write_text, write_bytes(path, data)    temporary file beside it, synced, then one rename
    write_folder(folder, {name: bytes})    temporary folder beside it, every file synced; an old folder steps aside, the new one
                                           takes its place, the old one is removed
    append(path, data)                     to the end of a file of ours
    set_aside(folder)                      old folders that stepped aside: all that a kill between two renames can leave
    sealed(told)                           JSON whose last entry, self_sha256, covers the rest; check_seal is its reader
    opened(path), read(path, size)         the bytes of a plain file: no pipe is waited for, no device read, no pickle
    refuse_pickle(path, raw)               by the first bytes, whatever the name

A failure to write raises SaveError, names what is needed and free, and leaves everything as it was. Nothing is written through
a link, or to a file that has a second name: such a file may be somebody else's. Temporary names cannot be guessed, and are
made, never opened. Modes are those of the umask.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dmst.errors import BadFileError, FullDiskError, SaveError
from dmst.words import fitting

Pieces = bytes | Iterable[bytes | memoryview]  # a file at once, or as it comes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, the largest file allowed
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
REMEDY = "Load it where you trust it and save it again with safetensors.torch.save_file."

# --- writing ---------------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> Path:
    """Write a text file; returns its path."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a file; returns its path."""
    staging = unguessed(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(staging, data)
        staging.replace(path)
    except OSError as error:
        raise failed(path, error, len(data)) from error
    finally:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
    with suppress(OSError):  # the new file is in place
        sync(path.parent)
    return path


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is made if there is none. OSError if it is a link; a second name of it stays as it is."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and links are not followed")
    if path.exists() and path.stat().st_nlink > 1:  # `cp -al` made a copy
        write_bytes(path, path.read_bytes() + data)
        return
    with path.open("ab") as file:
        file.write(data)


def unguessed(path: Path) -> Path:
    """A name beside `path` that nobody can have prepared."""
    return path.with_name(f".{fitting(path.name)}.{secrets.token_hex(8)}")


def write_folder(
    folder: Path,
    files: Mapping[str, Pieces],
    *,
    size: int | None = None,
    staging: Path | None = None,
    aside: Path | None = None,
) -> Path:
    """Write a folder of these files, in their order, in the place of an old one if there is one; returns its path.

    `size` is that of files that come in pieces. `staging` and `aside` are for a caller who sweeps them after a kill: where the
    new one is made and where the old one steps, both beside `folder`.
    """
    size = sum(len(x) for x in files.values() if isinstance(x, bytes)) if size is None else size
    needed = size + size // 5  # a fifth to spare
    try:
        _put(folder, files, needed, staging, aside)
    except OSError as error:
        raise failed(folder, error, needed) from error
    with suppress(OSError):  # the new folder is in place: to say that the old one is untouched would be a lie
        sync(folder.parent)
    for left in [x.parent for x in set_aside(folder)] if aside is None else [aside]:
        remove(left)  # ours, and what a kill left: the new folder is whole and in place
    return folder


def set_aside(folder: Path) -> list[Path]:
    with suppress(OSError, ValueError):
        return sorted(folder.parent.glob(f".{glob.escape(folder.name)}.old.*/{glob.escape(folder.name)}"))
    return []


def remove(path: Path) -> None:
    """Remove a folder, file or link, as far as that goes."""
    with suppress(OSError):
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Make renames in `folder` last through a power cut, where the system can sync a folder at all."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks
            raise
    finally:
        os.close(handle)


def failed(path: Path, error: OSError, needed: int) -> SaveError:
    """The error for `path`, which could not be written."""
    parent = next(x for x in path.absolute().parents if x.is_dir())
    return (FullDiskError if error.errno in NO_ROOM else SaveError)(
        f"{path} could not be written ({error.strerror or error}): it needs {needed:,} bytes, and "
        f"{shutil.disk_usage(parent).free:,} are free there. What was there before is untouched."
    )


def _put(folder: Path, files: Mapping[str, Pieces], needed: int, staging: Path | None, aside: Path | None) -> None:
    if staging is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging = staging or unguessed(folder)  # beside it: a rename stays on one disk
    staging.mkdir()
    try:
        for name, data in files.items():
            _write(staging / name, data)
        sync(staging)
        if os.path.lexists(folder):
            _swap(folder, staging, aside)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap(folder: Path, staging: Path, aside: Path | None) -> None:
    """Two renames; what fails is taken back."""
    room = None
    if aside is None:
        room = folder.with_name(f".{folder.name}.old.{secrets.token_hex(8)}")
        room.mkdir()
        aside = room / folder.name
    else:
        remove(aside)
    try:
        old = folder.rename(aside)
        try:
            staging.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
    except BaseException:
        if room:
            room.rmdir()
        raise


def _write(path: Path, data: Pieces) -> None:
    with path.open("xb") as file:  # made by us, or refused
        for piece in [data] if isinstance(data, bytes) else data:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


# --- reading ---------------------------------------------------------------------------------------------------------


def sealed(told: dict[str, Any]) -> bytes:
    """The one way to write `told`, its own hash last."""
    body = json.dumps(told, indent=2, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps(told | {"self_sha256": digest}, indent=2, allow_nan=False) + "\n").encode()


def check_seal(path: Path, told: dict[str, Any], raw: bytes) -> None:
    """Refuse `told`, read from the bytes `raw`, unless these are the ones that `sealed` writes."""
    try:
        same = sealed({key: value for key, value in told.items() if key != "self_sha256"}) == raw
    except (ValueError, RecursionError):  # an infinity, which JSON itself does not know; deeper than it can be written
        same = False
    if not same:
        raise BadFileError(f"{path} is damaged or was edited: its bytes do not match its self_sha256.")


@contextmanager
def opened(path: Path, *, links: bool = False) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file and its size, of which nothing is read yet; `links` to one are followed. OSError if there is none."""
    info = path.stat() if links else path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise BadFileError(f"{path} is not a plain file{'' if links else ': links are not followed'}.")
    with path.open("rb", buffering=0) as file:  # a buffer would hold all of it twice
        refuse_pickle(path, file.read(8))
        file.seek(0)
        try:
            yield file, info.st_size
        except MemoryError as error:
            raise BadFileError(f"{path} has {info.st_size:,} bytes, and there is no memory for so many.") from error


def read(path: Path, size: int | None = None, *, most: int | None = None, links: bool = False) -> bytes:
    """The bytes of a plain file, of this size or of at most so many."""
    with opened(path, links=links) as (file, found):
        if most is not None and found > most:
            raise BadFileError(f"{path} is damaged: {found:,} bytes instead of at most {most:,}.")
        if size not in (None, found):
            raise BadFileError(f"{path} is damaged: {found:,} bytes instead of {size:,}.")
        return file.read()


def json_object(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path} is damaged: not JSON ({error}).") from error
    if not isinstance(told, dict):
        raise BadFileError(f"{path} is not {what}: it must hold an object.")
    return told


def refuse_pickle(path: Path, raw: bytes) -> None:
    """Refuse a file that begins as pickles and zips do: to read one can run code."""
    if raw.startswith(PICKLES):
        raise BadFileError(f"{path} is a pickle or zip file, which can run code when it is read: refused. {REMEDY}")
