"""A lock file: one process at a time; the kernel frees it when the process dies.

    4711 64769:1048602      the process that holds it, and the folder that it is in

In a copy of a folder made of hard links (`cp -al`) the lock is the same file. So a lock with two names is never written: the
name in this folder is given to a new file, unless the process that holds the lock is in this very folder.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import stat
from pathlib import Path
from types import ModuleType

from dmst.errors import OptionError

SIZE = 80  # bytes that a lock has at most
FORM = re.compile(r"(\d+( \d+:\d+)?\n)?")


def posix() -> ModuleType:
    """fcntl; Windows has none. Asked for by those who lock, so that all else works there."""
    try:
        return importlib.import_module("fcntl")
    except ImportError as error:
        raise OptionError(
            "training needs a POSIX system: a run's folder is locked with flock. Use Linux, macOS or WSL."
        ) from error


def take(path: Path) -> int:
    """A handle that holds the lock `path` until it is closed. BlockingIOError, with the process, if another one holds it.

    OptionError if the file is no lock of ours: it stays as it is.
    """
    place = path.parent.stat()
    here = f"{place.st_dev}:{place.st_ino}"
    while True:
        handle = _opened(path)
        try:
            if _taken(handle, path, here):
                os.ftruncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
                os.write(handle, f"{os.getpid()} {here}\n".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OptionError(f"{path} is a link, and links are not followed: remove it, or choose another folder.") from error
        raise


def _taken(handle: int, path: Path, here: str) -> bool:
    """Whether the lock is ours; False where it has to be opened again."""
    fcntl = posix()
    info = os.fstat(handle)
    text = os.read(handle, SIZE).decode(errors="replace") if stat.S_ISREG(info.st_mode) else "a pipe or device"
    if not FORM.fullmatch(text):
        raise OptionError(f"{path} is not the lock of a run: move it away, or choose another folder.")
    who, where = (*text.split(), "", "")[:2]
    shared = info.st_nlink > 1
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if not shared or where in ("", here):
            raise BlockingIOError(error.errno, who) from error
    if shared:
        path.unlink(missing_ok=True)
        return False
    try:  # somebody may have removed it since it was opened
        return os.path.samestat(info, os.lstat(path))
    except FileNotFoundError:
        return False
