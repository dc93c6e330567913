"""`dmst data fetch` against a server on this machine: complete, cut off, wrong, absent; and what is on the disk afterwards."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dmst.data import fetch
from dmst.data.catalog import CATALOG, File
from dmst.errors import BadFileError, FetchError, FullDiskError, OptionError, SaveError, UnknownNameError

CONTENT = random.Random(0).randbytes(300_007)
NAME = "train_32x32.mat"


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files`, as it is told: what is set here is done to the next answers."""

    daemon_threads = False
    block_on_close = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {NAME: CONTENT}
        self.asked: list[dict[str, str]] = []  # the headers of every request
        self.cuts: list[int] = []  # end the next answers after so many bytes
        self.ranges, self.extra = True, b""

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(dict(self.headers.items()))
        name = self.path.rpartition("/")[2]
        if name not in server.files:
            return self.say(404, {})
        body, start = server.files[name], 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and server.ranges:
            start = int(asked[1])
            if start >= len(body):
                return self.say(416, {})
        told = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        self.say(206 if start else 200, told | {"Content-Length": str(len(body) - start + len(server.extra))})
        self.wfile.write((body[start:] + server.extra)[: server.cuts.pop(0) if server.cuts else None])
        return None

    def say(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    published(monkeypatch, CONTENT)
    with Server() as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def published(
    monkeypatch: pytest.MonkeyPatch, content: bytes, path: str = NAME, unpacked: str = "", name: str = "svhn"
) -> None:
    """The catalog says that `content` is what the authors publish."""
    file = File(path, len(content), md5(content), unpacked)
    monkeypatch.setitem(CATALOG, name, CATALOG[name]._replace(files=(file,), site="https://example.org"))  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- complete and cut -------------------------------------------------------------------------------------------------


def test_complete(server: Server, tmp_path: Path) -> None:
    ticks: list[tuple[str, int, int]] = []
    folder = tmp_path / "new" / "data"
    assert fetch.fetch("svhn", folder, base=server.base, tick=lambda *told: ticks.append(told)) == [folder / NAME]
    assert (folder / NAME).read_bytes() == CONTENT and names(folder) == [NAME]
    assert ticks[-1] == (f"check {NAME}", len(CONTENT), len(CONTENT))
    assert len(server.asked) == 1 and server.asked[0]["User-Agent"].startswith("dmst/")
    fetch.fetch("svhn", folder, base=server.base)  # it is there
    assert len(server.asked) == 1


def test_a_link_in_its_place_is_not_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "somebodys").write_bytes(b"kept")
    (tmp_path / f"{NAME}.part").symlink_to(tmp_path / "somebodys")
    with pytest.raises(BadFileError, match="links are not followed"):
        fetch.fetch("svhn", tmp_path, base=server.base)
    assert (tmp_path / "somebodys").read_bytes() == b"kept"


def test_cut_off_and_continued(server: Server, tmp_path: Path) -> None:
    """In one call as long as something comes, then by the next call."""
    server.cuts = [100_000, 1, 0]
    with pytest.raises(FetchError, match=r"was cut off after 100,001 of 300,007 bytes, which are kept") as error:
        fetch.fetch("svhn", tmp_path, base=server.base)
    assert names(tmp_path) == [f"{NAME}.part"]
    assert "https://example.org" in str(error.value) and md5(CONTENT) in str(error.value)
    fetch.fetch("svhn", tmp_path, base=server.base)
    assert [asked.get("Range") for asked in server.asked] == [None, "bytes=100000-", "bytes=100001-", "bytes=100001-"]
    assert (tmp_path / NAME).read_bytes() == CONTENT and names(tmp_path) == [NAME]


def test_ranges_ignored(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ranges = [100_000], False
    fetch.fetch("svhn", tmp_path, base=server.base)
    assert len(server.asked) == 2 and (tmp_path / NAME).read_bytes() == CONTENT


def test_changed_on_the_server(server: Server, tmp_path: Path) -> None:
    """What was begun is of another version: the checksum sees it, and the next call begins anew."""
    (tmp_path / f"{NAME}.part").write_bytes(bytes(200_000))
    with pytest.raises(BadFileError, match="It was thrown away"):
        fetch.fetch("svhn", tmp_path, base=server.base)
    fetch.fetch("svhn", tmp_path, base=server.base)
    assert (tmp_path / NAME).read_bytes() == CONTENT


# --- wrong ------------------------------------------------------------------------------------------------------------


def test_wrong_content(server: Server, tmp_path: Path) -> None:
    server.files[NAME] = CONTENT[:-1] + b"x"
    with pytest.raises(BadFileError, match=r"its md5 is [0-9a-f]{32} instead of") as error:
        fetch.fetch("svhn", tmp_path, base=server.base)
    assert md5(CONTENT) in str(error.value) and "by hand" in str(error.value)
    assert names(tmp_path) == []
    server.extra = b"more"
    with pytest.raises(BadFileError, match="it has 300,011 bytes instead of 300,007"):
        fetch.fetch("svhn", tmp_path, base=server.base)
    server.files.clear()
    with pytest.raises(FetchError, match="404: Not Found"):
        fetch.fetch("svhn", tmp_path, base=server.base)
    assert NAME not in names(tmp_path)


def test_no_server_and_then_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "*")
    published(monkeypatch, CONTENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(FetchError) as error:
        fetch.fetch("svhn", tmp_path, base=base)
    told = str(error.value)
    facts = (CATALOG["svhn"].source, f"https://example.org/{NAME}", str(tmp_path / NAME), "300,007", md5(CONTENT))
    assert all(fact in told for fact in (*facts, "cannot be reached", "Connection refused"))
    assert f"dmst data fetch svhn --data-dir {tmp_path}" in told
    (tmp_path / NAME).write_bytes(CONTENT)
    assert fetch.fetch("svhn", tmp_path, base=base) == [tmp_path / NAME]


def test_a_file_of_the_users_is_never_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"mine")
    with pytest.raises(BadFileError, match="is there and is not the file that is published: it has 4 bytes instead of 300,007"):
        fetch.fetch("svhn", tmp_path, base=server.base)
    assert (tmp_path / NAME).read_bytes() == b"mine" and server.asked == []


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_the_disk_is_full_in_the_middle(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(FullDiskError, match="No space left on device"):
            fetch.fetch("svhn", tmp_path, base=server.base)
    assert names(tmp_path) == [f"{NAME}.part"]
    fetch.fetch("svhn", tmp_path, base=server.base)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="could not be written"):
        fetch.fetch("svhn", tmp_path / "file" / "data", base=server.base)


# --- archives ---------------------------------------------------------------------------------------------------------


def archive(*extra: tuple[tarfile.TarInfo, bytes], top: str = "food-101") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in ("meta/classes.txt", "images/pie/1.jpg"):
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = 1000
            tar.addfile(info, io.BytesIO(random.Random(name).randbytes(1000)))
        for info, data in extra:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b"evil" if kind == tarfile.REGTYPE else b""


def test_unpacked(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive()
    published(monkeypatch, data, "food-101.tar.gz", "food-101", "food101")
    server.files["food-101.tar.gz"] = data
    (tmp_path / ".food-101.unpacking" / "food-101").mkdir(parents=True)
    (tmp_path / ".food-101.unpacking" / "food-101" / "half").write_text("of a run that was killed")
    assert fetch.fetch("food101", tmp_path, base=server.base) == [tmp_path / "food-101"]
    inside = ["food-101/images/pie/1.jpg", "food-101/meta/classes.txt"]
    assert names(tmp_path) == ["food-101.tar.gz", *inside]
    assert (tmp_path / inside[0]).read_bytes() == random.Random("images/pie/1.jpg").randbytes(1000)
    (tmp_path / "food-101.tar.gz").unlink()  # it takes room, and what came out of it is there
    fetch.fetch("food101", tmp_path, base=server.base)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (archive()[:1500], "cannot be unpacked"),
        (archive(top="other"), "holds no folder food-101"),
        (archive(member("food-101/../../evil")), "cannot be unpacked"),
        (archive(member("food-101/evil", tarfile.SYMTYPE, "/etc")), "cannot be unpacked"),
        (archive(member("food-101/evil", tarfile.LNKTYPE, "../../evil")), "cannot be unpacked"),
        (archive(member("food-101/evil", tarfile.FIFOTYPE)), "cannot be unpacked"),
    ],
)
def test_bad_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, told: str) -> None:
    """Got by hand, damaged or hostile: nothing is left of it, inside the folder or outside."""
    folder = tmp_path / "data"
    published(monkeypatch, data, "food-101.tar.gz", "food-101", "food101")
    folder.mkdir()
    (folder / "food-101.tar.gz").write_bytes(data)
    with pytest.raises(BadFileError, match=told):
        fetch.fetch("food101", folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "food-101.tar.gz"]


# --- the table --------------------------------------------------------------------------------------------------------


def test_not_fetched(tmp_path: Path) -> None:
    for name in ("digits", "imagenet", "tinyimagenet"):
        with pytest.raises(OptionError) as error:
            fetch.fetch(name, tmp_path)
        assert (str(tmp_path) in str(error.value)) == (name != "digits") and "{" not in str(error.value)
    with pytest.raises(UnknownNameError, match="Did you mean 'cifar100'"):
        fetch.fetch("cifar-100", tmp_path)
