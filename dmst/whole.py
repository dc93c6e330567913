"""Written whole or not at all: a file or a folder appears complete in its place, and what was there before stays until then.

    write_text(path, text)                 temporary file beside it, then one rename
    write_folder(folder, {name: bytes})    temporary folder beside it, every file synced; an old folder steps aside, the new one
                                           takes its place, the old one is removed
    set_aside(folder)                      old folders that stepped aside: all that a kill between two renames can leave

A failure raises SaveError, names what is needed and free, and leaves everything as it was.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dmst.errors import SaveError


def write_text(path: Path, text: str) -> Path:
    """Write a text file; returns its path."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.write_text(text, encoding="utf-8")
        staging.replace(path)
    except OSError as error:
        raise _failed(path, error, len(text)) from error
    finally:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
    return path


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write a folder of these files, in the place of an old one if there is one; returns its path."""
    try:
        _put(folder, files)
    except OSError as error:
        raise _failed(folder, error, sum(len(data) for data in files.values())) from error
    with suppress(OSError):  # the new folder is in place: to say that the old one is untouched would be a lie
        _sync(folder.parent)
    for left in set_aside(folder):  # ours, and what a kill left: the new folder is whole and in place
        shutil.rmtree(left.parent, ignore_errors=True)
    return folder


def set_aside(folder: Path) -> list[Path]:
    with suppress(OSError, ValueError):
        return sorted(folder.parent.glob(f".{glob.escape(folder.name)}.old.*/{glob.escape(folder.name)}"))
    return []


def _put(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))  # beside it: a rename stays on one disk
    try:
        for name, data in files.items():
            _write(staging / name, data)
        staging.chmod(0o755)
        _sync(staging)
        if folder.exists():
            _swap(folder, staging)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap(folder: Path, staging: Path) -> None:
    """Two renames; what fails is taken back."""
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        old = folder.rename(aside / folder.name)
        try:
            staging.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
    except BaseException:
        aside.rmdir()
        raise


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
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


def _failed(path: Path, error: OSError, needed: int) -> SaveError:
    parent = next(x for x in path.absolute().parents if x.is_dir())
    return SaveError(
        f"{path} could not be written ({error.strerror or error}): it needs {needed:,} bytes, and "
        f"{shutil.disk_usage(parent).free:,} are free there. What was there before is untouched."
    )
