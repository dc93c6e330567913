"""One file over https into `part`: cut off, it goes on from where it was; changed on the server, it begins anew.

    NAME.part        what has come so far
    NAME.part.tag    the server's mark of that version (ETag or date), sent back as If-Range when the rest is asked for

The size is known beforehand: a server that states or sends another is refused. The caller says whether the bytes are right.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dmst
from dmst import atomic
from dmst.errors import DmstError, FetchError, FullDiskError, SaveError

CHUNK = 1 << 18


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, schemes: set[str]) -> None:
        self.schemes = schemes

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme not in self.schemes:
            fp.close()
            raise FetchError(f"{req.full_url} sends on to {newurl}, which is not https: refused.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Anew(Exception):
    """The server holds another file than the one that was begun."""


def download(
    url: str, part: Path, size: int, *, tick: Callable[[int], None], timeout: float = 60, plain_http: bool = False
) -> None:
    """Stretches until `part` has `size` bytes, each begun where the last one ended; `tick` is told how many there are."""
    schemes = {"https", "http"} if plain_http else {"https"}
    if urlsplit(url).scheme not in schemes:
        raise FetchError(f"{url} is not https: refused.")
    opener = urllib.request.build_opener(_Redirects(schemes))
    if length(part) > size:
        forget(part)
    begun_anew = False
    while (before := length(part)) < size:
        trouble = ""
        try:
            _stretch(opener, url, part, size, tick, timeout)
        except DmstError:
            raise
        except _Anew as error:
            if begun_anew:
                raise FetchError(f"{url} does not give the bytes that it is asked for ({error}).") from error
            forget(part)
            begun_anew = True
            continue
        except (OSError, http.client.HTTPException) as error:
            trouble = f" ({getattr(error, 'reason', None) or str(error) or type(error).__name__})"
        have = length(part)
        if have < size and have <= before:  # as long as something comes, it goes on
            told = f"was cut off after {have:,} of {size:,} bytes, which are kept" if have else "cannot be reached"
            raise FetchError(f"{url} {told}{trouble}.")


def _stretch(opener: Any, url: str, part: Path, size: int, tick: Callable[[int], None], timeout: float) -> None:
    """One request: what it brings is added to `part`, or begins it anew where the server does not go on."""
    have, tag = length(part), _tag(part)
    headers = {"User-Agent": f"dmst/{dmst.__version__}"}
    if have:
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": tag.read_text()} if tag.is_file() else {})
    try:
        answer = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            raise _Anew("416 Range Not Satisfiable") from error
        raise FetchError(f"{url} answers {error.code} {error.reason}.") from error
    with answer:
        start = _start(answer, url, have, size)
        with saving(part, size - start):
            if not start:  # whatever is there is not written through
                part.unlink(missing_ok=True)
            out = part.open("ab" if start else "xb", buffering=0)
        with out:
            if not start:
                _note(answer.headers, tag)
            while data := answer.read1(CHUNK):
                if start + len(data) > size:
                    raise FetchError(f"{url} sends more than the {size:,} bytes that are published: refused.")
                with saving(part, size - start):
                    _write(out, data)
                start += len(data)
                tick(start)
            with saving(part, size - start):
                os.fsync(out.fileno())


def _start(answer: Any, url: str, have: int, size: int) -> int:
    """The place of the first byte that the answer brings."""
    told = answer.headers.get("Content-Range", "")
    if answer.status == 206 and not re.fullmatch(rf"bytes {have}-\d+/({size}|\*)", told):
        raise _Anew(f"Content-Range: {told}")
    start = have if answer.status == 206 else 0
    stated = answer.headers.get("Content-Length", "")
    if stated.isdecimal() and start + int(stated) != size:
        raise FetchError(f"{url} has {start + int(stated):,} bytes, and the file that is published {size:,}: refused.")
    return start


def _note(headers: Any, tag: Path) -> None:
    """Keep what If-Range takes: a strong ETag or a date."""
    etag = headers.get("ETag", "")
    mark = etag if etag.startswith('"') else headers.get("Last-Modified", "")
    with saving(tag, len(mark)):
        atomic.write_text(tag, mark) if mark else tag.unlink(missing_ok=True)


def _write(out: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[out.write(left) :]


def length(part: Path) -> int:
    """Bytes that have come; none to a link, which is not ours."""
    return part.stat().st_size if part.is_file() and not part.is_symlink() else 0


def _tag(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")


def forget(part: Path) -> None:
    """Remove what has come."""
    for path in (part, _tag(part)):
        path.unlink(missing_ok=True)


@contextmanager
def saving(path: Path, needed: int) -> Iterator[None]:
    """The disk's errors as SaveError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DmstError):
            raise
        there = next(x for x in path.absolute().parents if x.is_dir())
        kind = FullDiskError if error.errno in atomic.NO_ROOM else SaveError
        raise kind(
            f"{path} could not be written ({error.strerror or error}): it needs {needed:,} bytes, and "
            f"{shutil.disk_usage(there).free:,} are free there. What has come is kept: make room and run it again."
        ) from error
