"""`dmst data`, called in process, on folders that the tests make."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from dmst import cli
from dmst.data import catalog, fetch, official
from dmst.data.formats.sheets import Pack
from dmst.data.official import File
from dmst.errors import FetchError, OptionError

CONTENT = bytes(range(251)) * 7
FILE = File(
    "cifar-10-binary.tar.gz",
    "https://example.org/cifar-10-binary.tar.gz",
    len(CONTENT),
    hashlib.md5(CONTENT, usedforsecurity=False).hexdigest(),
)


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FILES", {"cifar10": (FILE,)})
    pack = Pack({"cifar10-test.zip": hashlib.sha256(b"packed").hexdigest()})
    monkeypatch.setattr(fetch, "PACKED", {"cifar10": {"test": pack}})


def run(*arguments: str | Path, columns: int = 80, folder: Path | None = None) -> tuple[int, str]:
    env = {"COLUMNS": str(columns), "TERM": "dumb", "DMST_DATA": str(folder) if folder else ""}
    result = CliRunner(env=env).invoke(cli.app, ["data", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def plain(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """CIFAR-10 as class folders, three images a class to learn from and one to be asked about."""
    for split, count in (("train", 3), ("test", 1)):
        for name in catalog.CIFAR10:
            place = tmp_path / "cifar10" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (5, 7)).save(place / f"{i}.png")
    return tmp_path


# --- list -------------------------------------------------------------------------------------------------------------


def test_list_names_every_dataset_and_fits_a_narrow_terminal(folder: Path) -> None:
    code, text = run("list", "--data-dir", folder)
    assert code == 0
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(catalog.CATALOG)
    assert max(len(line) for line in lines[:-1]) <= 80
    rows = {line.split()[0]: plain(line) for line in lines[1:-1]}
    assert rows["cifar10"] == "cifar10 50,000 + 10,000 10 class folders"
    assert rows["food101"] == "food101 75,750 + 25,250 101 no: dmst data fetch food101"
    assert rows["digits"].endswith("in scikit-learn")
    assert rows["imagenet"].endswith("no: dmst data fetch imagenet")
    assert rows["imagenet-sample"].endswith("1000 no")
    assert str(folder) in lines[-1]


def test_list_takes_the_variable_and_says_where_there_is_none(folder: Path) -> None:
    assert "class folders" in run("list", folder=folder)[1]
    code, text = run("list")
    assert code == 0
    assert "Set DMST_DATA" in text
    assert "class folders" not in text


def test_list_says_what_is_there_by_half(folder: Path) -> None:
    (folder / "train_32x32.mat").write_bytes(b"")
    text = run("list", "--data-dir", folder)[1]
    assert "official .mat files, train only" in text


# --- info -------------------------------------------------------------------------------------------------------------


def test_info_tells_all(folder: Path) -> None:
    code, text = run("info", "cifar10", "--data-dir", folder, columns=300)
    assert code == 0
    entry = catalog.CATALOG["cifar10"]
    for fact in (
        *catalog.CIFAR10,
        entry.licence,
        entry.source,
        entry.citation,
        "train 50,000 images",
        "official binary batches",
    ):
        assert fact in text
    assert f"{folder / 'cifar10'}, class folders" in text
    variant = catalog.open_set("cifar10", "train", data_dir=folder).variant
    assert f"30 images, 10 classes; name this with every result: {variant}" in text
    assert f"{official.FILES['cifar10'][0].bytes / 1e6:,.0f} MB" in text


def test_info_fits_a_narrow_terminal(folder: Path) -> None:
    for name in catalog.CATALOG:
        code, text = run("info", name, "--quick", "--data-dir", folder)
        assert code == 0
        assert max(len(line) for line in text.splitlines()) <= 80, name
    assert "..., yorkshire_terrier" in plain(run("info", "pets", "--quick", "--data-dir", folder)[1])


def test_info_where_nothing_is(tmp_path: Path) -> None:
    code, text = run("info", "svhn", "--data-dir", tmp_path, columns=300)
    assert code == 0
    assert text.count(f"not in {tmp_path}") == 2
    code, text = run("info", "svhn")
    assert code == 0
    assert "Set DMST_DATA" in text
    code, text = run("info", "digits", columns=200)
    assert code == 0
    assert "1,438 images of 8 x 8, 10 classes" in text


def test_info_of_what_is_damaged(folder: Path) -> None:
    (folder / "cifar10" / "train" / "ship" / "0.png").unlink()
    for i in (1, 2):
        (folder / "cifar10" / "train" / "ship" / f"{i}.png").unlink()
    code, text = run("info", "cifar10", "--data-dir", folder, columns=300)
    assert code == 1
    assert "ship has no image" in text
    assert "10 images, 10 classes" in text  # of test
    assert run("info", "cifar10", "--quick", "--data-dir", folder)[0] == 0


def test_info_of_a_folder(folder: Path) -> None:
    code, text = run("info", folder / "cifar10", columns=300)
    assert code == 0
    assert "30 images, 10 classes" in text
    assert run("info", "cifar10/", folder=folder)[0] == 0
    code, text = run("info", "cifar-11", columns=300)
    assert code == 2
    assert "Did you mean 'cifar10'" in plain(text) or "Did you mean 'cifar100'" in plain(text)


# --- fetch ------------------------------------------------------------------------------------------------------------


def test_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(url: str, part: Path, size: int, **options: object) -> None:
        assert (url, size, options["plain_http"], options["timeout"]) == (FILE.url, FILE.bytes, False, 7)
        part.write_bytes(CONTENT)
        options["tick"](size)  # type: ignore[operator]

    monkeypatch.setattr(fetch, "download", download)
    code, text = run("fetch", "cifar10", "--timeout", 7, folder=tmp_path / "new", columns=300)
    assert code == 0
    assert (tmp_path / "new" / FILE.path).read_bytes() == CONTENT
    assert f"ready {tmp_path / 'new' / FILE.path}" in text
    assert catalog.CATALOG["cifar10"].licence in text
    assert catalog.CATALOG["cifar10"].citation in text


def test_fetch_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(url: str, *_: object, **__: object) -> None:
        raise FetchError(f"{url} cannot be reached.")

    monkeypatch.setattr(fetch, "download", download)
    with pytest.raises(FetchError, match=r"cannot be reached\.\nTo get it by hand, from https://www\.cs\.toronto\.edu"):
        run("fetch", "cifar10", "--data-dir", tmp_path)


def test_fetch_refuses(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="register"):
        run("fetch", "imagenet", "--data-dir", tmp_path)
    code, text = run("fetch", "cifar10")
    assert code == 2
    assert "DMST_DATA" in text


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify(tmp_path: Path) -> None:
    code, text = run("verify", "cifar10", "--data-dir", tmp_path, columns=300)
    assert code == 1
    assert "no file of cifar10 with a known checksum" in text
    (tmp_path / FILE.path).write_bytes(CONTENT)
    code, text = run("verify", "cifar10", "--data-dir", tmp_path)
    assert code == 0
    assert plain(text).endswith(f"ok {FILE.path} size and md5 as published")
    (tmp_path / "cifar10-test.zip").write_bytes(b"foreign")
    code, text = run("verify", folder=tmp_path, columns=300)  # every dataset
    assert code == 1
    rows = [line.split()[:2] for line in text.splitlines()]
    assert ["ok", FILE.path] in rows
    assert ["BAD", "cifar10-test.zip"] in rows
    (tmp_path / "cifar10-test.zip").write_bytes(b"packed")
    assert run("verify", folder=tmp_path)[0] == 0


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["list", "info", "fetch", "verify"])
def test_help_reads_well_at_eighty_columns(verb: str) -> None:
    code, text = run(verb, "--help")
    assert code == 0
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "DMST_DATA" in text
    headline, _, rest = (inspect.getdoc(getattr(cli.data, f"data_{verb}")) or "").partition("\n\n")
    assert headline.endswith(".")
    assert 0 < max(len(line) for line in rest.splitlines()) <= 76  # typer keeps these breaks
    assert plain(rest) in plain(text)


def test_the_help_of_the_whole_names_the_verbs() -> None:
    code, text = run("--help")
    assert code == 0
    for verb in ("list", "info", "fetch", "verify"):
        assert verb in text
    assert "dmst data list" in (cli.__doc__ or "")
