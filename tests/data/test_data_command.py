"""`dmst data`, called in process, on folders that the tests make."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dmst import cli
from dmst.data import catalog
from dmst.data.catalog import CATALOG, File
from dmst.errors import FetchError, OptionError
from tests.layouts import noise, put, records

CONTENT = bytes(range(251)) * 7
FILE = File("cifar-10-binary.bin", len(CONTENT), hashlib.md5(CONTENT, usedforsecurity=False).hexdigest())


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that CIFAR-10 is fetched from: a file is published there, under the name of no archive."""
    place = put(tmp_path / "site" / FILE.path, CONTENT).parent
    monkeypatch.setitem(CATALOG, "cifar10", CATALOG["cifar10"]._replace(files=(FILE,), site=place.as_uri()))  # type: ignore[arg-type]
    return place


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
    """CIFAR-10, thirty images to learn from and ten to be asked about."""
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        labels = list(range(10)) if name == "test_batch" else [*range(6)] if name != "data_batch_1" else [6, 7, 8, 9, 0, 1]
        put(tmp_path / f"cifar-10-batches-bin/{name}.bin", records(labels, noise(len(labels), 32, 32, 3)))
    return tmp_path


# --- list -------------------------------------------------------------------------------------------------------------


def test_list_names_every_dataset_and_fits_a_narrow_terminal(folder: Path) -> None:
    code, text = run("list", "--data-dir", folder)
    assert code == 0
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(catalog.CATALOG)
    assert max(len(line) for line in lines[:-1]) <= 80
    rows = {line.split()[0]: plain(line) for line in lines[1:-1]}
    assert rows["cifar10"] == "cifar10 50,000 + 10,000 10 official binary batches"
    assert rows["food101"] == "food101 75,750 + 25,250 101 no: dmst data fetch food101"
    assert rows["digits"].endswith("in scikit-learn")
    assert rows["imagenet"].endswith("no: dmst data fetch imagenet")
    assert str(folder) in lines[-1]


def test_list_says_what_is_there_by_half(folder: Path) -> None:
    (folder / "train_32x32.mat").write_bytes(b"")
    text = run("list", "--data-dir", folder)[1]
    assert "official .mat files, train only" in text
    assert "official binary batches" in run("list", folder=folder)[1]  # by the variable
    assert "Set DMST_DATA" in run("list")[1]


# --- info -------------------------------------------------------------------------------------------------------------


def test_info_tells_all(folder: Path) -> None:
    code, text = run("info", "cifar10", "--data-dir", folder, columns=300)
    assert code == 0
    entry = catalog.CATALOG["cifar10"]
    facts = (*catalog.CIFAR10, entry.licence, entry.source, entry.citation, "train 50,000 images", "official binary batches")
    assert all(fact in text for fact in facts)
    assert f"{folder / 'cifar-10-batches-bin'}" in text
    variant = catalog.open_set("cifar10", "train", data_dir=folder).variant
    assert f"30 images of 32 x 32, 10 classes; name this with every result: {variant}" in text
    assert f"{entry.files[0].bytes / 1e6:,.0f} MB" in text


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
    put(folder / "cifar-10-batches-bin/data_batch_2.bin", b"cut")
    code, text = run("info", "cifar10", "--data-dir", folder, columns=300)
    assert code == 1
    assert "data_batch_2.bin cannot be read" in text
    assert "10 images of 32 x 32, 10 classes" in text  # of test
    assert run("info", "cifar10", "--quick", "--data-dir", folder)[0] == 0


def test_info_of_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        put(tmp_path / f"birds/{name}/1.png", noise(3, 4, 3))
    code, text = run("info", tmp_path / "birds", columns=300)
    assert code == 0
    assert "2 images, 2 classes" in text
    assert run("info", "birds/", folder=tmp_path)[0] == 0
    code, text = run("info", "cifar-11", columns=300)
    assert code == 2
    assert "Did you mean 'cifar10'" in plain(text) or "Did you mean 'cifar100'" in plain(text)


# --- fetch ------------------------------------------------------------------------------------------------------------


def test_fetch(published: Path, tmp_path: Path) -> None:
    code, text = run("fetch", "cifar10", folder=tmp_path / "new", columns=300)
    assert code == 0
    assert (tmp_path / "new" / FILE.path).read_bytes() == CONTENT
    assert f"ready {tmp_path / 'new' / FILE.path}" in text
    assert CATALOG["cifar10"].licence in text
    assert CATALOG["cifar10"].citation in text
    (published / FILE.path).unlink()
    with pytest.raises(FetchError, match=r"cannot be reached .*\nTo get it by hand, from https://www\.cs\.toronto\.edu"):
        run("fetch", "cifar10", "--data-dir", tmp_path)


def test_fetch_refuses(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="register"):
        run("fetch", "imagenet", "--data-dir", tmp_path)
    code, text = run("fetch", "cifar10")
    assert code == 2
    assert "DMST_DATA" in text


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify(published: Path, tmp_path: Path) -> None:
    code, text = run("verify", "cifar10", "--data-dir", tmp_path, columns=300)
    assert code == 1
    assert "no file of cifar10 with a known checksum" in text
    (tmp_path / FILE.path).write_bytes(CONTENT)
    code, text = run("verify", "cifar10", "--data-dir", tmp_path)
    assert code == 0
    assert plain(text).endswith(f"ok {FILE.path} size and md5 as published")
    (tmp_path / "test_32x32.mat").write_bytes(b"foreign")
    code, text = run("verify", folder=tmp_path, columns=300)  # every dataset
    assert code == 1
    rows = [line.split()[:2] for line in text.splitlines()]
    assert ["ok", FILE.path] in rows
    assert ["BAD", "test_32x32.mat"] in rows
