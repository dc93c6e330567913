"""`dmst data fetch` against a server on this machine: whole, cut off, wrong, absent; and what is on the disk afterwards."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import os
import random
import re
import shutil
import socket
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dmst.data import catalog, fetch, official
from dmst.data import download as downloading
from dmst.data.formats.sheets import Pack
from dmst.data.official import File
from dmst.errors import BadFileError, FetchError, FullDiskError, OptionError, SaveError, UnknownNameError

CONTENT = random.Random(0).randbytes(300_007)
NAME = "cifar-10-binary.tar.gz"


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
        self.stalls: list[int] = []  # and these without a word
        self.release = threading.Event()
        self.headers: dict[str, str] = {"ETag": '"one"'}
        self.ranges, self.lengths, self.status, self.extra, self.odd_range, self.elsewhere = True, True, 200, b"", "", ""

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
        if server.elsewhere and not self.path.startswith("/moved"):
            return self.say(302, {"Location": server.elsewhere})
        if server.status != 200 or name not in server.files:
            return self.say(server.status if server.status != 200 else 404, {})
        body, start = server.files[name], 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        same = self.headers.get("If-Range", server.headers.get("ETag")) in server.headers.values()
        if asked and server.ranges and same:
            start = int(asked[1])
            if start >= len(body):
                return self.say(416, {})
        told = {"Content-Range": server.odd_range or f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        if server.lengths:
            told["Content-Length"] = str(len(body) - start + len(server.extra))
        self.say(206 if start else 200, told | server.headers)
        cut, stall = (x.pop(0) if x else None for x in (server.cuts, server.stalls))
        self.wfile.write((body[start:] + server.extra)[: cut if cut is not None else stall])
        if stall is not None:
            server.release.wait(20)
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
        server.release.set()
        server.shutdown()
        thread.join()


def published(
    monkeypatch: pytest.MonkeyPatch, content: bytes, path: str = NAME, unpacked: str = "", name: str = "cifar10"
) -> None:
    """The table says that `content` is what the authors publish."""
    file = File(path, f"https://example.org/{Path(path).name}", len(content), md5(content), unpacked)
    monkeypatch.setattr(fetch, "FILES", {name: (file,)})


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- whole and cut ----------------------------------------------------------------------------------------------------


def test_whole(server: Server, tmp_path: Path) -> None:
    ticks: list[tuple[str, int, int]] = []
    folder = tmp_path / "new" / "data"
    assert fetch.fetch("cifar10", folder, base=server.base, tick=lambda *told: ticks.append(told)) == [folder / NAME]
    assert (folder / NAME).read_bytes() == CONTENT and names(folder) == [fetch.SUMS, NAME]
    assert (folder / fetch.SUMS).read_text() == f"{hashlib.sha256(CONTENT).hexdigest()}  {NAME}\n"
    assert ticks[-1] == (f"check {NAME}", len(CONTENT), len(CONTENT))
    assert (f"fetch {NAME}", len(CONTENT), len(CONTENT)) in ticks
    assert len(server.asked) == 1 and server.asked[0]["User-Agent"].startswith("dmst/") and "Range" not in server.asked[0]
    fetch.fetch("cifar10", folder, base=server.base)  # it is there
    assert len(server.asked) == 1


@pytest.mark.parametrize("lengths", [True, False])
def test_cut_off_and_gone_on_with(server: Server, tmp_path: Path, lengths: bool) -> None:
    """In one call, as long as something comes."""
    server.cuts, server.lengths = [100_000, 1, 0x1000], lengths
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert (tmp_path / NAME).read_bytes() == CONTENT and names(tmp_path) == [fetch.SUMS, NAME]
    assert [asked.get("Range") for asked in server.asked] == [None, "bytes=100000-", "bytes=100001-", "bytes=104097-"]
    assert [asked.get("If-Range") for asked in server.asked] == [None, '"one"', '"one"', '"one"']


def test_cut_off_and_resumed_by_the_next_call(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 0]
    with pytest.raises(FetchError, match=r"was cut off after 100,000 of 300,007 bytes, which are kept") as error:
        fetch.fetch("cifar10", tmp_path, base=server.base)
    assert names(tmp_path) == [f"{NAME}.part", f"{NAME}.part.tag"]
    assert "https://example.org" in str(error.value) and md5(CONTENT) in str(error.value)
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert server.asked[-1]["Range"] == "bytes=100000-"
    assert (tmp_path / NAME).read_bytes() == CONTENT and names(tmp_path) == [fetch.SUMS, NAME]


def test_a_server_that_falls_silent(server: Server, tmp_path: Path) -> None:
    server.stalls = [50_000]
    fetch.fetch("cifar10", tmp_path, base=server.base, timeout=0.3)
    assert [asked.get("Range") for asked in server.asked] == [None, "bytes=50000-"]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_ranges_ignored(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ranges = [100_000], False
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert len(server.asked) == 2 and "Range" in server.asked[1]
    assert (tmp_path / NAME).read_bytes() == CONTENT
    shutil.rmtree(tmp_path)
    server.cuts = [100_000, 100_000]  # it would never end
    with pytest.raises(FetchError, match="cut off after 100,000"):
        fetch.fetch("cifar10", tmp_path, base=server.base)


def test_changed_on_the_server(server: Server, tmp_path: Path) -> None:
    """What was begun is of another version: If-Range makes the server send all of it."""
    (tmp_path / f"{NAME}.part").write_bytes(bytes(200_000))
    (tmp_path / f"{NAME}.part.tag").write_text('"zero"')
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert server.asked[0]["If-Range"] == '"zero"' and len(server.asked) == 1
    assert (tmp_path / NAME).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("headers", "mark"),
    [
        ({"ETag": 'W/"weak"', "Last-Modified": "Thu, 04 Jun 2009 09:00:00 GMT"}, "Thu, 04 Jun 2009 09:00:00 GMT"),
        ({}, None),
    ],
)
def test_other_marks(server: Server, tmp_path: Path, headers: dict[str, str], mark: str | None) -> None:
    server.headers, server.cuts = headers, [70_000]
    (tmp_path / f"{NAME}.part.tag").write_text('"of an older run"')
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert server.asked[1].get("If-Range") == mark and server.asked[1]["Range"] == "bytes=70000-"
    assert (tmp_path / NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("size", [9, 200_000])
def test_a_part_that_is_a_link_is_not_written_through(size: int, server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(CONTENT[:size])
    (tmp_path / f"{NAME}.part").symlink_to(mine)
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert mine.read_bytes() == CONTENT[:size] and (tmp_path / NAME).read_bytes() == CONTENT


def test_a_part_that_does_not_fit(server: Server, tmp_path: Path) -> None:
    part = tmp_path / f"{NAME}.part"
    part.write_bytes(bytes(len(CONTENT) + 1))
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert "Range" not in server.asked[0]
    (tmp_path / NAME).rename(part)  # complete, and never renamed
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert len(server.asked) == 1 and (tmp_path / NAME).read_bytes() == CONTENT
    (tmp_path / NAME).unlink()
    part.write_bytes(CONTENT[:9])
    server.odd_range = f"bytes 8-{len(CONTENT) - 1}/{len(CONTENT)}"  # not what was asked for: anew
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert len(server.asked) == 3 and (tmp_path / NAME).read_bytes() == CONTENT
    (tmp_path / NAME).unlink()
    part.write_bytes(CONTENT[:200_000])
    server.files[NAME], server.odd_range = CONTENT[:150_000], ""  # 416; and then it is too short
    with pytest.raises(FetchError, match="has 150,000 bytes, and the file that is published 300,007"):
        fetch.fetch("cifar10", tmp_path, base=server.base)


def test_a_server_that_never_gives_the_stretch(server: Server, tmp_path: Path) -> None:
    server.cuts, server.odd_range = [10, 10, 10], "bytes 3-4/5"
    with pytest.raises(FetchError, match=r"does not give the bytes that it is asked for \(Content-Range: bytes 3-4/5\)"):
        fetch.fetch("cifar10", tmp_path, base=server.base)
    assert len(server.asked) == 4  # cut, refused, anew and cut, refused


# --- wrong ------------------------------------------------------------------------------------------------------------


def test_wrong_checksum(server: Server, tmp_path: Path) -> None:
    server.files[NAME] = CONTENT[:-1] + b"x"
    with pytest.raises(BadFileError, match=r"its md5 is [0-9a-f]{32} instead of") as error:
        fetch.fetch("cifar10", tmp_path, base=server.base)
    assert md5(CONTENT) in str(error.value) and "by hand" in str(error.value)
    assert names(tmp_path) == []


def test_wrong_size(server: Server, tmp_path: Path) -> None:
    server.extra = b"more"
    with pytest.raises(FetchError, match="has 300,011 bytes, and the file that is published 300,007: refused"):
        fetch.fetch("cifar10", tmp_path, base=server.base)
    server.lengths = False
    with pytest.raises(FetchError, match="sends more than the 300,007 bytes"):
        fetch.fetch("cifar10", tmp_path, base=server.base)
    assert NAME not in names(tmp_path)


@pytest.mark.parametrize(("status", "told"), [(404, "answers 404 Not Found"), (503, "answers 503 Service Unavailable")])
def test_refused(server: Server, tmp_path: Path, status: int, told: str) -> None:
    server.status = status
    with pytest.raises(FetchError, match=told):
        fetch.fetch("cifar10", tmp_path, base=server.base)
    assert len(server.asked) == 1 and names(tmp_path) == []


def test_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "*")
    published(monkeypatch, CONTENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(FetchError) as error:
        fetch.fetch("cifar10", tmp_path, base=f"http://127.0.0.1:{port}")
    told = str(error.value)
    assert "cannot be reached" in told and "Connection refused" in told
    for fact in (
        catalog.CATALOG["cifar10"].source,
        f"https://example.org/{NAME}",
        str(tmp_path / NAME),
        "300,007",
        md5(CONTENT),
    ):
        assert fact in told
    assert f"dmst data fetch cifar10 --data-dir {tmp_path}" in told


def test_by_hand_and_then_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published(monkeypatch, CONTENT)
    (tmp_path / NAME).write_bytes(CONTENT)
    assert fetch.fetch("cifar10", tmp_path, base="http://127.0.0.1:9") == [tmp_path / NAME]
    assert names(tmp_path) == [fetch.SUMS, NAME]


def test_a_file_of_the_users_is_never_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"mine")
    with pytest.raises(BadFileError, match="is there and is not the file that is published: it has 4 bytes instead of 300,007"):
        fetch.fetch("cifar10", tmp_path, base=server.base)
    assert (tmp_path / NAME).read_bytes() == b"mine" and server.asked == []


def test_redirects(server: Server, tmp_path: Path) -> None:
    server.elsewhere, server.cuts = f"{server.base.replace('/data', '/moved')}/{NAME}", [1000]
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert [asked.get("Range") for asked in server.asked] == [None, None, "bytes=1000-", "bytes=1000-"]
    strict = urllib.request.build_opener(downloading._Redirects({"https"}))
    with pytest.raises(FetchError, match="which is not https: refused"):
        strict.open(f"{server.base}/{NAME}")


def test_https_alone(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1/x", "file:///etc/hostname", "ftp://127.0.0.1/x"):
        with pytest.raises(FetchError, match="is not https: refused"):
            downloading.download(url, tmp_path / "x.part", 5, tick=pytest.fail)
    with pytest.raises(FetchError, match="is not https"):
        downloading.download("file:///etc/hostname", tmp_path / "x.part", 5, tick=pytest.fail, plain_http=True)
    assert names(tmp_path) == []


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_not_enough_disk(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=fetch.SLACK + 300_006))
    with pytest.raises(FullDiskError, match=r"cifar10 needs 67,408,871 bytes in .*, and 67,408,870 are free there"):
        fetch.fetch("cifar10", tmp_path, base=server.base)
    assert server.asked == [] and names(tmp_path) == []
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:1])  # one byte fewer to come
    fetch.fetch("cifar10", tmp_path, base=server.base)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    fetch.fetch("cifar10", tmp_path, base=server.base)  # all is here


def test_the_disk_is_full_in_the_middle(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = downloading._write

    def full(out: Any, data: bytes) -> None:
        write(out, data[:40_000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(downloading, "_write", full)
    with pytest.raises(FullDiskError, match=r"No space left on device.*are free there.*What has come is kept"):
        fetch.fetch("cifar10", tmp_path, base=server.base)
    monkeypatch.setattr(downloading, "_write", write)
    have = (tmp_path / f"{NAME}.part").stat().st_size
    assert 0 < have <= 40_000
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert server.asked[-1]["Range"] == f"bytes={have}-" and (tmp_path / NAME).read_bytes() == CONTENT


def test_a_folder_that_cannot_be(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="could not be written"):
        fetch.fetch("cifar10", tmp_path / "file" / "data", base=server.base)


def test_two_at_a_time(server: Server, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="another `dmst data fetch` is at work"):
            fetch.fetch("cifar10", tmp_path, base=server.base)
    finally:
        os.close(handle)
    fetch.fetch("cifar10", tmp_path, base=server.base)


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
    ticks: list[tuple[str, int, int]] = []
    assert fetch.fetch("food101", tmp_path, base=server.base, tick=lambda *told: ticks.append(told)) == [tmp_path / "food-101"]
    inside = ["food-101/images/pie/1.jpg", "food-101/meta/classes.txt"]
    assert names(tmp_path) == [fetch.SUMS, "food-101.tar.gz", *inside]
    assert (tmp_path / inside[0]).read_bytes() == random.Random("images/pie/1.jpg").randbytes(1000)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["food-101"]
    assert ticks[-1][0] == "unpack food-101.tar.gz"
    (tmp_path / "food-101.tar.gz").unlink()  # it takes room, and what came out of it is there
    fetch.fetch("food101", tmp_path, base=server.base)
    assert len(server.asked) == 1
    shutil.rmtree(tmp_path / "food-101")
    (tmp_path / "food-101.tar.gz").write_bytes(data)
    fetch.fetch("food101", tmp_path, base="http://127.0.0.1:9")  # got by hand: only unpacked
    assert set(inside) < set(names(tmp_path))


def test_nothing_leaves_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    data = archive(
        member("food-101/../../evil"),
        member(str(tmp_path / "evil")),
        member("food-101/evil", tarfile.SYMTYPE, "/etc"),
        member("food-101/evil2", tarfile.LNKTYPE, "food-101/meta/classes.txt"),
        member("food-101/evil3", tarfile.FIFOTYPE),
        member("._food-101"),
    )
    published(monkeypatch, data, "food-101.tar.gz", "food-101", "food101")
    (folder / "food-101.tar.gz").write_bytes(data)
    fetch.fetch("food101", folder)
    assert [name for name in names(tmp_path) if "food-101/" in name] == [
        "data/food-101/images/pie/1.jpg",
        "data/food-101/meta/classes.txt",
    ]
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


@pytest.mark.parametrize(
    ("data", "told"), [(archive()[:1500], "cannot be unpacked"), (archive(top="other"), "holds no folder food-101")]
)
def test_an_archive_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, told: str) -> None:
    published(monkeypatch, data, "food-101.tar.gz", "food-101", "food101")
    (tmp_path / "food-101.tar.gz").write_bytes(data)
    with pytest.raises(BadFileError, match=told):
        fetch.fetch("food101", tmp_path)
    assert names(tmp_path) == [fetch.SUMS, "food-101.tar.gz"] and not [x for x in tmp_path.iterdir() if x.is_dir()]


# --- checking ---------------------------------------------------------------------------------------------------------


def test_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(monkeypatch, CONTENT)
    pack = Pack({"a.zip": hashlib.sha256(b"a").hexdigest(), "b.zip": hashlib.sha256(b"b").hexdigest()})
    monkeypatch.setattr(fetch, "PACKED", {"cifar10": {"train": pack}})
    assert fetch.verify("cifar10", tmp_path) == []
    (tmp_path / NAME).write_bytes(CONTENT)
    (tmp_path / "a.zip").write_bytes(b"a")
    (tmp_path / "b.zip").write_bytes(b"x")
    told = {verdict.path.name: (verdict.sound, verdict.told) for verdict in fetch.verify("cifar10", tmp_path)}
    assert told[NAME] == (True, "size and md5 as published") and told["a.zip"] == (True, "sha256 as packed")
    assert told["b.zip"][0] is False and hashlib.sha256(b"x").hexdigest() in told["b.zip"][1]
    (tmp_path / NAME).write_bytes(b"!" + CONTENT[1:])
    assert "its md5 is" in fetch.verify("cifar10", tmp_path)[0].told
    (tmp_path / NAME).write_bytes(CONTENT)
    (tmp_path / fetch.SUMS).write_text(f"# mine\n{'0' * 64}  {NAME}\n")
    (verdict, *_) = fetch.verify("cifar10", tmp_path)
    assert not verdict.sound and fetch.SUMS in verdict.told
    with pytest.raises(UnknownNameError, match="cifar10"):
        fetch.verify("cifar", tmp_path)


def test_other_sums_are_kept(server: Server, tmp_path: Path) -> None:
    other = f"{'a' * 64}  other.bin\n"
    (tmp_path / fetch.SUMS).write_text(other)
    fetch.fetch("cifar10", tmp_path, base=server.base)
    assert (tmp_path / fetch.SUMS).read_text() == f"{hashlib.sha256(CONTENT).hexdigest()}  {NAME}\n{other}"


# --- the tables -------------------------------------------------------------------------------------------------------


def test_every_dataset_is_fetched_or_says_why_not() -> None:
    assert official.FILES.keys() | official.NOT_FETCHED.keys() == catalog.CATALOG.keys()
    assert not official.FILES.keys() & official.NOT_FETCHED.keys()
    assert {name for name, entry in catalog.CATALOG.items() if entry.fetched} == official.FILES.keys()


@pytest.mark.parametrize("name", official.NOT_FETCHED)
def test_not_fetched(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        fetch.fetch(name, tmp_path)
    assert ("image-net.org" in str(error.value) and str(tmp_path) in str(error.value)) or name != "imagenet"
    assert name in str(error.value).lower() and "{" not in str(error.value)


def test_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'cifar100'"):
        fetch.fetch("cifar-100", tmp_path)


def test_the_table_is_well_formed() -> None:
    for name in official.FILES:
        places = {place for form in catalog.CATALOG[name].formats for split in form.places.values() for place in split}
        files = official.FILES[name]
        for file in files:
            assert file.url.startswith("https://") and file.url.endswith(f"/{Path(file.path).name}")
            assert re.fullmatch(r"[0-9a-f]{32}", file.md5) and file.bytes > 10**7
            if file.unpacked:
                assert Path(file.unpacked).parent == Path(file.path).parent  # unpacked beside it
            else:
                assert file.path in places  # and read from there
        if files[0].unpacked:
            assert any(place.startswith(file.unpacked) for place in places for file in files)
    assert len({file.md5 for files in official.FILES.values() for file in files}) == 7


def test_every_packed_sheet_can_be_verified() -> None:
    for name, entry in catalog.CATALOG.items():
        packs = [form.read.keywords["packs"] for form in entry.formats if form.what == "packed sheets"]  # type: ignore[attr-defined]
        assert packs == ([official.PACKED[name]] if name in official.PACKED else [])


def test_the_checksums_are_those_of_torchvision() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        pytest.skip("torchvision is not installed")
    source = "".join(path.read_text() for path in sorted((Path(spec.origin).parent / "datasets").glob("*.py")))
    files = [file for files in official.FILES.values() for file in files]
    assert [file.path for file in files if file.md5 not in source] == ["cifar-10-binary.tar.gz", "cifar-100-binary.tar.gz"]
