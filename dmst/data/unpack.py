"""The folder of an archive, beside it: whole or not at all."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from dmst.data.download import saving
from dmst.data.official import Tick, no_tick
from dmst.errors import BadFileError


def unpack(archive: Path, folder: Path, tick: Tick = no_tick) -> Path:
    """Plain files below the name of `folder` are written, and nothing else that the archive may hold: no link, no way out."""
    staging, total = folder.with_name(f".{folder.name}.unpacking"), archive.stat().st_size
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    try:
        with saving(folder, 2 * total):
            _write(archive, staging, folder.name, tick)
            (staging / folder.name).rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _write(archive: Path, staging: Path, top: str, tick: Tick) -> None:
    written, total = 0, archive.stat().st_size
    try:
        with archive.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                inside = tar.extractfile(member) if member.isreg() and parts[:1] == (top,) and ".." not in parts else None
                if inside is None:
                    continue
                place = staging.joinpath(*parts)
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as out:
                    shutil.copyfileobj(inside, out)
                written += 1
                tick(f"unpack {archive.name}", raw.tell(), total)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadFileError(f"{archive} cannot be unpacked ({error}).") from error
    if not written:
        raise BadFileError(f"{archive} holds no folder {top}: nothing was unpacked.")
