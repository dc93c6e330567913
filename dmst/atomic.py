"""Atomic writes: temporary file, fsync, rename. Reads are of plain files, of a bounded size.

    write_text, write_bytes(path, data)    .<name>.<random> beside it, synced, then one rename
    write_folder(folder, files, size)      the same with a folder; an old one steps aside to .<name>.old.<random> until the
                                           new one is in its place
    read(path)                             no pipe, device or pickle, and no more bytes than asked for
    sealed(told), read_sealed              JSON whose last entry, self_sha256, covers the rest

A failure to write raises SaveError, says how many bytes are needed and free, and leaves everything as it was. Nothing is
written through a link: a rename replaces it. Temporary names are random, and are made with O_EXCL.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dmst.errors import BadFileError, FullDiskError, SaveError
from dmst.words import fitting

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, the largest file allowed
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
REMEDY = "Load it where you trust it and save it again with safetensors.torch.save_file."

# --- writing ---------------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> Path:
    """Write a text file; returns its path."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a file; returns its path."""
    with _staged(path, len(data)) as staging:
        _write(staging, data)
        staging.replace(path)
    return path


def write_folder(folder: Path, files: Iterable[tuple[str, bytes]], size: int) -> Path:
    """Write a folder of these files, about `size` bytes in all, in the place of an old one; returns its path."""
    needed = size + size // 5  # a fifth to spare
    aside = temporary(folder, "old.")
    with _staged(folder, needed) as staging:
        if shutil.disk_usage(folder.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        staging.mkdir()
        for name, data in files:
            _write(staging / name, data)
        sync(staging)
        try:
            if os.path.lexists(folder):
                folder.rename(aside)
            staging.rename(folder)
        except BaseException:
            if os.path.lexists(aside):
                aside.rename(folder)
            raise
    for left in set_aside(folder):
        remove(left)
    return folder


@contextmanager
def _staged(path: Path, needed: int) -> Iterator[Path]:
    """A temporary name that the block renames to `path`; gone if the block fails, and the rename synced if not."""
    staging = temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield staging
    except OSError as error:
        raise failed(path, error, needed) from error
    finally:
        remove(staging)
    with suppress(OSError):  # the new one is in place: to say that the old one is untouched would be a lie
        sync(path.parent)


def set_aside(folder: Path) -> list[Path]:
    """What stepped aside for a new `folder`: all that a kill between the two renames leaves of it."""
    with suppress(OSError, ValueError):
        return sorted(folder.parent.glob(f".{glob.escape(fitting(folder.name))}.old.*"))
    return []


def temporary(path: Path, kind: str = "") -> Path:
    """A name beside `path` that nobody can have prepared; beside it, for a rename stays on one disk."""
    return path.with_name(f".{fitting(path.name)}.{kind}{secrets.token_hex(8)}")


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


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, size: int | None = None, *, sha256: str = "", most: int | None = None, links: bool = False) -> bytes:
    """The bytes of a plain file, of this size and hash or of at most so many bytes; `links` to one are followed."""
    try:
        info = path.stat() if links else path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise BadFileError(f"{path} is not a plain file{'' if links else ': links are not followed'}.")
        with path.open("rb") as file:
            if file.read(8).startswith(PICKLES):
                raise BadFileError(f"{path} is a pickle or zip file, which can run code when it is read: refused. {REMEDY}")
            if most is not None and info.st_size > most:
                raise BadFileError(f"{path} is damaged: {info.st_size:,} bytes instead of at most {most:,}.")
            if size not in (None, info.st_size):
                raise BadFileError(f"{path} is damaged: {info.st_size:,} bytes instead of {size:,}.")
            file.seek(0)
            raw = file.read()
    except OSError as error:
        raise BadFileError(f"{path} cannot be read ({error.strerror or error}).") from error
    if sha256 and hashlib.sha256(raw).hexdigest() != sha256:
        raise BadFileError(f"{path} is damaged: its sha256 is not the one that was stated for it. Copy it again.")
    return raw


def json_object(path: Path, raw: bytes) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path} is damaged: not JSON ({error}).") from error
    if not isinstance(told, dict):
        raise BadFileError(f"{path} is damaged: it must hold an object.")
    return told


def sealed(told: dict[str, Any]) -> bytes:
    """The one way to write `told`, its own hash last."""
    digest = hashlib.sha256(json.dumps(told, indent=2, allow_nan=False).encode()).hexdigest()
    return (json.dumps(told | {"self_sha256": digest}, indent=2, allow_nan=False) + "\n").encode()


def read_sealed(path: Path, *, most: int, links: bool = False, required: bool = True) -> dict[str, Any]:
    """What `sealed` wrote; where it is not `required`, JSON without a seal too."""
    raw = read(path, most=most, links=links)
    told = json_object(path, raw)
    try:
        same = sealed({key: value for key, value in told.items() if key != "self_sha256"}) == raw
    except (ValueError, RecursionError):  # an infinity, which JSON itself does not know; deeper than it can be written
        same = False
    if not same and (required or "self_sha256" in told):
        raise BadFileError(f"{path} is damaged or was edited: its bytes do not match its self_sha256.")
    return told
