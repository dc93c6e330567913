"""The catalog finds what is there, in its order, and says what is not; sets keep their promises when they are cut up."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmst.data import catalog, sets
from dmst.data.catalog import CATALOG, CIFAR10, open_set
from dmst.data.sets import ArraySet, split_off, subset
from dmst.errors import BadFileError, OptionError, ShapeError, UnknownNameError
from tests.layouts import noise, put, records, sample, tar

TEN = noise(10, 32, 32, 3)


def numbered(n: int = 60, classes: int = 3, **more: Any) -> ArraySet:
    """Image i is filled with i."""
    pixels = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 2, 5, 1)).copy()
    return ArraySet("things", "train", [f"c{k}" for k in range(classes)], np.arange(n) % classes, pixels, **more)


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMST_DATA", raising=False)


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_entry_is_complete() -> None:
    lengths = {"digits": 10, "cifar10": 10, "cifar100": 100, "svhn": 10, "pets": 37, "food101": 101, "tinyimagenet": 200}
    assert {name: entry.class_count for name, entry in CATALOG.items()} == lengths | {"imagenet": 1000}
    for name, entry in CATALOG.items():
        assert list(entry.counts) == ["train", "test"] and entry.places.keys() in (entry.counts.keys(), set())
        assert bool(entry.files) != bool(entry.by_hand) and len(entry.statistics.mean) == (1 if name == "digits" else 3)
        assert all(len(file.md5) == 32 and file.bytes > 10**7 and entry.site.startswith("https://") for file in entry.files)
    assert list(catalog.CIFAR100) == sorted(catalog.CIFAR100) and list(CIFAR10) == sorted(CIFAR10)  # the official order
    assert list(catalog.PETS) == sorted(catalog.PETS, key=str.lower)


# --- what is found ---------------------------------------------------------------------------------------------------


def official(folder: Path, labels: list[int] | None = None) -> Path:
    labels = labels or list(range(10))
    for k in range(1, 6):
        put(folder / f"cifar-10-batches-bin/data_batch_{k}.bin", records(labels, TEN))
    put(folder / "cifar-10-batches-bin/test_batch.bin", records(labels, TEN))
    return folder


def test_a_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official(tmp_path)
    found = open_set("cifar10", "train", data_dir=tmp_path)
    assert (found.name, found.split, len(found), found.classes) == ("cifar10", "train", 50, CIFAR10)
    assert found.variant == "50 of 50,000 images"  # a part is never taken for the whole
    monkeypatch.setenv("DMST_DATA", str(tmp_path))
    assert open_set("cifar10", "train").fingerprint == found.fingerprint
    assert open_set("cifar10", "train", data_dir=str(tmp_path)).fingerprint == found.fingerprint
    with pytest.raises(BadFileError, match="is not in"):
        open_set("cifar10", "train", data_dir=put(tmp_path / "empty/x", b"").parent)  # the argument goes before the variable


@pytest.mark.parametrize("name", ["cifar10", "tinyimagenet"])
def test_what_is_not_there_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadFileError) as told:
        open_set(name, "train", data_dir=tmp_path)
    facts = f"{name} train is not in {tmp_path}", "DMST_DATA", f"dmst data fetch {name}", *CATALOG[name].places["train"]
    assert all(fact in str(told.value) for fact in facts)
    with pytest.raises(OptionError, match=f"where is {name}.* DMST_DATA"):
        open_set(name, "train")


@pytest.mark.parametrize(
    ("name", "split", "told"),
    [
        ("cifar1O", "train", "Did you mean 'cifar10'"),
        ("cifar10", "validation", "unknown split of cifar10 'validation'.*test, train"),
        ("/no/such/folder", "train", "not a folder either"),
        (".", "val", "unknown split"),
    ],
)
def test_unknown_names(name: str, split: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=told):
        open_set(name, split, data_dir=tmp_path)


def test_python_batches_are_refused_with_the_name_of_the_binary_archive(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(BadFileError, match=r"pickles.*cifar-10-binary\.tar\.gz"):
        open_set("cifar10", "train", data_dir=tmp_path)


def test_bad_splits_are_refused(tmp_path: Path) -> None:
    official(tmp_path, labels=[0, 1, 2, 3, 4, 5, 6, 7, 8, 200])
    with pytest.raises(BadFileError, match="image 9: its label is 200"):
        open_set("cifar10", "train", data_dir=tmp_path)
    put(tmp_path / "meta/classes.txt", "soup1\nsoup2\n")
    put(tmp_path / "meta/train.txt", "soup1/1\nsoup2/1\n")
    for k in (1, 2):
        put(tmp_path / f"images/soup{k}/1.jpg", TEN[0])
    with pytest.raises(BadFileError, match="food101 train has 2 classes, soup1 to soup2; Food-101 has 101"):
        open_set("food101", "train", data_dir=tmp_path)


def test_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("birds/train/a/1.png", "birds/train/b/1.png", "birds/valid/a/1.png", "birds/valid/b/1.png"):
        put(tmp_path / name, noise(3, 4, 3))
    found = open_set(tmp_path / "birds", "test")
    assert (found.name, found.split, found.classes, found.variant) == ("birds", "test", ("a", "b"), "")
    assert open_set("birds", "test", data_dir=tmp_path).fingerprint == found.fingerprint
    monkeypatch.chdir(tmp_path / "birds")
    assert open_set(".", "train").name == "birds"


# --- sets ------------------------------------------------------------------------------------------------------------


def test_arrays_are_checked() -> None:
    pixels, names = noise(3, 4, 5, 3), ["a", "b"]
    for wrong in (pixels[0], pixels[:2], pixels.astype(np.float32), pixels[..., :2]):
        with pytest.raises(ShapeError, match=r"x train: images are .* must be uint8 \(3, h, w, 1 or 3\)"):
            ArraySet("x", "train", names, np.array([0, 1, 0]), wrong)
    for labels in (np.array([0.0, 1, 0]), np.zeros((3, 1), int)):
        with pytest.raises(ShapeError, match="labels are"):
            ArraySet("x", "train", names, labels, pixels)
    with pytest.raises(BadFileError, match=r"x train, image 1: its label is 2, .* 0 to 1 \(2 of 3 labels are outside\)"):
        ArraySet("x", "train", names, np.array([0, 2, -1]), pixels)
    with pytest.raises(BadFileError, match="x train is empty"):
        ArraySet("x", "train", names, np.zeros(0, int), pixels[:0])


def test_fingerprints_follow_the_content() -> None:
    pixels = noise(4, 3, 6, 1)
    changed = pixels.copy()
    changed[3, 2, 5, 0] ^= 1
    made = [
        ArraySet("x", "train", ["a", "b"], np.array([0, 1, 0, 1]), pixels),
        ArraySet("x", "train", ["a", "b"], np.array([0, 1, 0, 0]), pixels),
        ArraySet("x", "train", ["a", "c"], np.array([0, 1, 0, 1]), pixels),
        ArraySet("x", "train", ["a", "b"], np.array([0, 1, 0, 1]), changed),
        ArraySet("x", "train", ["a", "b"], np.array([0, 1, 0, 1]), pixels.reshape(4, 6, 3, 1)),
    ]
    assert len({found.fingerprint for found in made}) == 5
    assert ArraySet("x", "train", ["a", "b"], np.uint8([0, 1, 0, 1]), pixels.copy()).fingerprint == made[0].fingerprint
    assert sets.digest("ab", "c") != sets.digest("a", "bc") and sets.digest("a", np.zeros(0)) != sets.digest("a")


def test_a_subset_is_a_view() -> None:
    base = numbered(variant="128 px")
    part = subset(base, [7, 59, 7, 0])
    assert (len(part), part.name, part.split, part.variant, part.classes) == (4, "things", "train", "128 px", base.classes)
    assert part.labels.tolist() == [1, 2, 1, 0] and [int(part.read(i)[0, 0, 0]) for i in range(4)] == [7, 59, 7, 0]
    assert np.array_equal(part.pixels(), base.pixels()[[7, 59, 7, 0]])
    assert part.where(1) == "things train, image 59" and np.shares_memory(part.read(1), base.pixels())
    nested = subset(part, np.array([1, 3]))
    assert nested.where(0) == "things train, image 59" and nested.read(1).max() == 0
    marks = [base, part, nested, subset(base, [7, 59, 0, 7]), subset(base, range(60))]
    assert len({x.fingerprint for x in marks}) == 5 and subset(base, (7, 59, 7, 0)).fingerprint == part.fingerprint


def test_split_off() -> None:
    base = numbered(200, 3, variant="128 px")
    rest, out = split_off(base, 0.1)
    places = [[int(x[0, 0, 0]) for x in part.pixels()] for part in (rest, out)]  # type: ignore[union-attr]
    assert sorted(places[0] + places[1]) == list(range(200)) and [sorted(p) for p in places] == places and len(out) == 20
    assert sorted(np.bincount(out.labels)) == [6, 7, 7]
    assert (rest.variant, out.variant) == ("128 px, without the 10 % held out", "128 px, 10 % held out")
    again = split_off(base, 0.1)
    assert [x.fingerprint for x in again] == [rest.fingerprint, out.fingerprint]
    other = split_off(base, 0.1, seed=1)[1]
    assert other.labels.shape == (20,) and other.fingerprint != out.fingerprint
    larger = [int(x[0, 0, 0]) for x in split_off(base, 0.3)[1].pixels()]  # type: ignore[union-attr]
    assert set(places[1]) < set(larger) and len(larger) == 60


def test_split_off_is_the_same_everywhere() -> None:
    """These indices are a promise: a run on another machine must hold out the same images."""
    _, out = split_off(numbered(40, 2), 0.2, seed=7)
    assert [int(x[0, 0, 0]) for x in out.pixels()] == [5, 10, 11, 13, 15, 18, 24, 26]  # type: ignore[union-attr]


def test_split_off_of_small_classes() -> None:
    labels = np.array([0] * 50 + [1, 1, 2])
    base = ArraySet("x", "train", ["a", "b", "c"], labels, noise(53, 2, 3, 1))
    rest, out = split_off(base, 0.99)
    assert np.bincount(rest.labels).tolist() == [1, 1, 1] and np.bincount(out.labels).tolist() == [49, 1]
    for share in (1e-6, 1.5, float("nan")):
        with pytest.raises(OptionError):
            split_off(base, share)


def test_sets_go_to_other_processes(tmp_path: Path) -> None:
    put(tmp_path / "a/\udcffodd é.png", noise(3, 4, 3))
    files = open_set(tmp_path, "train")
    tar(tmp_path / "s/x.tar", sample("k", noise(3, 4, 3), 0))
    for found in (numbered(), files, subset(files, [0]), open_set(tmp_path / "s", "train")):
        sent = pickle.loads(pickle.dumps(found))
        assert np.array_equal(sent.read(0), found.read(0))
        assert (sent.fingerprint, sent.where(0)) == (found.fingerprint, found.where(0))
