"""Layouts of datasets on disk, each on tiny files made for it: exact when complete, refused by name when not."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmst.data.catalog import CIFAR10, CIFAR100, DIGITS, PETS
from dmst.data.formats import Asked, arrays, folders, huggingface, imagenet, lists, shards
from dmst.data.sets import ImageSet
from dmst.errors import BadFileError, BadImageError, MissingExtraError
from tests.layouts import encoded, noise, put, records, sample, tar

NAMES = ("cat", "dog", "eel")
BEASTS = noise(11, 5, 5, 3)
KINDS = [k % 3 for k in range(11)]


def same(found: ImageSet, images: np.ndarray, labels: list[int]) -> None:
    """Pixel for pixel, in order; and ready for torch.from_numpy, which warns of arrays that cannot be written to."""
    assert found.labels.tolist() == labels and found.labels.dtype == np.int64 and len(found) == len(labels)
    assert all(np.array_equal(found.read(i), image) for i, image in enumerate(images))
    pixels = found.pixels()
    assert pixels is None or (np.array_equal(pixels, images) and pixels.flags.writeable and pixels.flags.c_contiguous)


# --- CIFAR, SVHN, digits ---------------------------------------------------------------------------------------------


def cifar10(folder: Path, changed: dict[int, bytes] | None = None) -> tuple[np.ndarray, list[int]]:
    """Five batches of three; those of `changed` with other bytes."""
    images, labels = noise(15, 32, 32, 3), [k % 10 for k in range(3, 18)]
    for k in range(5):
        part = slice(3 * k, 3 * k + 3)
        put(folder / f"data_batch_{k + 1}.bin", (changed or {}).get(k + 1, records(labels[part], images[part])))
    return images, labels


def read_cifar10(folder: Path, split: str = "train") -> ImageSet:
    return arrays.read_cifar(folder, Asked("cifar10", split, CIFAR10), kind="cifar-10-batches-bin")


def test_cifar10(tmp_path: Path) -> None:
    images, labels = cifar10(tmp_path)
    found = read_cifar10(tmp_path)
    same(found, images, labels)
    assert (found.name, found.split, found.variant, found.classes) == ("cifar10", "train", "", CIFAR10)
    put(tmp_path / "test_batch.bin", records([5, 7], images[:2]))
    same(read_cifar10(tmp_path, "test"), images[:2], [5, 7])


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    images, labels = noise(4, 32, 32, 3), [99, 0, 42, 17]
    put(tmp_path / "train.bin", records(labels, images, coarse=True))
    same(arrays.read_cifar(tmp_path, Asked("cifar100", "train", CIFAR100), kind="cifar-100-binary"), images, labels)


def test_bad_batches_are_refused(tmp_path: Path) -> None:
    for raw, told in (
        (b"", "whole records of 3073"),
        (bytes(3072), r"data_batch_2\.bin has 3,072 bytes"),
        (records([3, 10], noise(2, 32, 32, 3)), "image 4: its label is 10, and the labels of cifar10 go from 0 to 9"),
    ):
        cifar10(tmp_path, {2: raw})
        with pytest.raises(BadFileError, match=told):
            read_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(BadFileError, match=r"misses data_batch_3\.bin"):
        read_cifar10(tmp_path)


def test_svhn_writes_0_as_10(tmp_path: Path) -> None:
    save = pytest.importorskip("scipy.io", reason="scipy is absent: pip install 'dmst[data]'").savemat
    images = noise(5, 32, 32, 3)
    for compressed in (False, True):
        save(
            tmp_path / "a.mat",
            {"X": images.transpose(1, 2, 3, 0), "y": np.uint8([[10], [1], [9], [10], [3]])},
            do_compression=compressed,
        )
        same(arrays.read_svhn(tmp_path / "a.mat", Asked("svhn", "train", DIGITS)), images, [0, 1, 9, 0, 3])


def test_bad_svhn_is_refused(tmp_path: Path) -> None:
    save = pytest.importorskip("scipy.io", reason="scipy is absent: pip install 'dmst[data]'").savemat
    pixels, path = noise(32, 32, 3, 2), tmp_path / "train_32x32.mat"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"X": pixels, "y": np.uint8([[1], [0]])}, "image 1: y is 0; the official files write 1 to 10"),
        ({"X": pixels, "y": np.uint8([[1]])}, r"X is uint8 \(32, 32, 3, 2\)"),
        ({"X": pixels, "y": np.float64([[1.5], [2]])}, "y float64"),
        ({"X": pixels}, "not an SVHN file"),
    ]
    for content, told in cases:
        save(path, content)
        with pytest.raises(BadFileError, match=told):
            arrays.read_svhn(path, Asked("svhn", "train", DIGITS))
    with pytest.raises(BadFileError, match=r"train_32x32\.mat is not an SVHN file"):
        arrays.read_svhn(put(path, path.read_bytes()[:150]), Asked("svhn", "train", DIGITS))


def test_digits_are_scikit_learn_s() -> None:
    bunch = pytest.importorskip("sklearn.datasets", reason="scikit-learn is absent: pip install 'dmst[data]'").load_digits()
    held_out = np.arange(len(bunch.images)) % 5 == 4
    for split, mine in (("train", ~held_out), ("test", held_out)):
        found = arrays.read_digits(Asked("digits", split, DIGITS))
        assert found.labels.tolist() == bunch.target[mine].tolist()
        assert found.pixels().shape == (mine.sum(), 8, 8, 1)
        assert abs(found.pixels()[..., 0] * (16 / 255) - bunch.images[mine]).max() <= 8 / 255 + 1e-9
        assert (found.pixels().min(), found.pixels().max()) == (0, 255)


# --- files in folders ------------------------------------------------------------------------------------------------


def test_class_folders(tmp_path: Path) -> None:
    names = {
        "train/b/2.PNG": 1,
        "train/b/10.png": 1,
        "train/a/x.jpeg": 0,
        "train/Z/y.png": 2,
        "val/a/1.png": 0,
        "val/b/1.png": 1,
    }
    images = {name: noise(4 + k, 7, 3, seed=k) for k, name in enumerate(names)}
    for name, image in images.items():
        put(tmp_path / name, image)
    put(tmp_path / "val/Z/v.png", noise(2, 3, 3))
    for name in ("train/a/.hidden.png", "train/a/notes.txt", "train/.git/a.png", "train/a/deeper/z.png", "train/readme.png"):
        put(tmp_path / name, b"no image")
    found = folders.read(tmp_path, Asked("birds", "train"))
    assert found.classes == ("Z", "a", "b")
    order = ["train/Z/y.png", "train/a/x.jpeg", "train/b/10.png", "train/b/2.PNG"]
    same(found, [images[name] for name in order], [0, 1, 2, 2])  # type: ignore[arg-type]
    assert found.where(2) == str(tmp_path / "train/b/10.png") and found.pixels() is None and found.masks(0) is None
    test = folders.read(tmp_path, Asked("birds", "test"))
    assert test.classes == found.classes and test.labels.tolist() == [0, 1, 2] and test.split == "test"


def test_a_folder_without_splits_is_train(tmp_path: Path) -> None:
    """Also with a class called train, as CIFAR-100 has one."""
    for name in ("train", "tree", "test"):
        put(tmp_path / name / "1.png", noise(3, 5, 3))
    found = folders.read(tmp_path, Asked("things", "train"))
    assert found.classes == ("test", "train", "tree") and found.where(1) == str(tmp_path / "train/1.png")
    with pytest.raises(BadFileError, match=r"no split 'test': it needs a folder test/ or val/"):
        folders.read(tmp_path, Asked("things", "test"))


@pytest.mark.parametrize(
    ("change", "split", "told"),
    [
        (lambda root: put(root / "test/c/1.png", noise(2, 2, 3)), "test", "test has the unknown class c"),
        (lambda root: (root / "test/b").rename(root / "test/.b"), "test", "misses the class b"),
        (lambda root: (root / "train/b/1.png").rename(root / "train/b/1.txt"), "train", r"b has no images: .* end in \.jpg"),
        (lambda root: (root / "test").rename(root / "exam"), "test", "has no split 'test'"),
        (lambda root: (root / "train/b/2.png").symlink_to(root / "gone.png"), "train", r"2\.png cannot be read"),
    ],
)
def test_bad_class_folders_are_refused(change: Callable[[Path], Any], split: str, told: str, tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"):
        put(tmp_path / name, noise(2, 3, 3))
    folders.read(tmp_path, Asked("birds", split))
    change(tmp_path)
    with pytest.raises(BadFileError, match=told):
        folders.read(tmp_path, Asked("birds", split))


def test_the_fingerprint_of_folders(tmp_path: Path) -> None:
    """Names, sizes and labels; neither the time nor the place."""

    def mark(root: Path, *names: str) -> str:
        for name in names:
            put(root / name, name.encode())
        return folders.read(root, Asked("birds", "train")).fingerprint

    first = mark(tmp_path / "1", "a/1.png", "b/2.png")
    os.utime(tmp_path / "1/a/1.png", (1, 1))
    assert mark(tmp_path / "1") == first == mark(tmp_path / "2", "a/1.png", "b/2.png") and len(first) == 64
    put(tmp_path / "2/a/1.png", b"longer than before")
    other = mark(tmp_path / "3", "a/1.png", "b/3.png"), mark(tmp_path / "4", "a/1.png", "a/2.png", "b/2.png")
    assert len({first, mark(tmp_path / "2"), *other}) == 4


# --- Pets, Food-101, ImageNet ----------------------------------------------------------------------------------------


def pets_folder(root: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    images, masks = [], []
    rows = ["# Image CLASS-ID SPECIES BREED ID", "Siamese_10 33 1 1", "beagle_2 5 2 4", "Abyssinian_100 1 1 1"]
    for k, row in enumerate(rows[1:]):
        name = row.split()[0]
        images.append(noise(6, 5 + k, 3, seed=k))
        masks.append(noise(6, 5 + k, seed=k) % 3 + 1)
        put(root / "images" / f"{name}.jpg", images[-1])  # PNG inside, as some of the official ones are not JPEG either
        put(root / "annotations/trimaps" / f"{name}.png", masks[-1])
    put(root / "annotations/trainval.txt", "\n".join(rows) + "\n")
    put(root / "annotations/test.txt", "beagle_2 5 2 4\n")
    return images, masks


def test_pets(tmp_path: Path) -> None:
    images, masks = pets_folder(tmp_path)
    found = lists.read_pets(tmp_path / "annotations", Asked("pets", "train", PETS))
    same(found, images, [32, 4, 0])  # type: ignore[arg-type]
    assert all(np.array_equal(found.masks(i), masks[i]) for i in range(3))  # type: ignore[arg-type]
    assert [found.classes[k] for k in found.labels] == ["Siamese", "beagle", "Abyssinian"]
    assert lists.read_pets(tmp_path / "annotations", Asked("pets", "test", PETS)).labels.tolist() == [4]
    put(tmp_path / "annotations/trimaps/beagle_2.png", np.full((6, 6), 4, np.uint8))
    with pytest.raises(BadImageError, match=r"beagle_2\.png: a mask with values 4\.\.4"):
        found.masks(1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: put(root / "annotations/trainval.txt", "beagle_2 38 2 4\n"), "class ids 1 to 37"),
        (lambda root: put(root / "annotations/trainval.txt", "../beagle_2 5 2 4\n"), "is not NAME CLASS-ID"),
        (lambda root: put(root / "annotations/trainval.txt", b"\xff\xfe\x00"), "is not text"),
        (lambda root: (root / "images/beagle_2.jpg").unlink(), r"beagle_2\.jpg is not there, and .*trainval\.txt lists it"),
    ],
)
def test_bad_pets_are_refused(change: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    pets_folder(tmp_path)
    change(tmp_path)
    with pytest.raises(BadFileError, match=told):
        lists.read_pets(tmp_path / "annotations", Asked("pets", "train", PETS))


def test_food(tmp_path: Path) -> None:
    names = {"train": ["sushi/7", "apple_pie/12", "sushi/3"], "test": ["apple_pie/1", "sushi/1"]}
    images = {name: noise(5, 4, 3, seed=k) for k, name in enumerate(names["train"] + names["test"])}
    put(tmp_path / "meta/classes.txt", "apple_pie\nsushi\n")
    for split, listed in names.items():
        put(tmp_path / f"meta/{split}.txt", "\n".join(listed))
    for name, image in images.items():
        put(tmp_path / f"images/{name}.jpg", image)
    same(lists.read_food(tmp_path / "meta", Asked("food101", "train")), [images[x] for x in names["train"]], [1, 0, 1])  # type: ignore[arg-type]
    same(lists.read_food(tmp_path / "meta", Asked("food101", "test")), [images[x] for x in names["test"]], [0, 1])  # type: ignore[arg-type]
    for line, told in (("soup/1", "'soup/1' is not CLASS/NUMBER"), ("sushi/99", r"99\.jpg is not there")):
        put(tmp_path / "meta/train.txt", f"{line}\n")
        with pytest.raises(BadFileError, match=told):
            lists.read_food(tmp_path / "meta", Asked("food101", "train"))


IDS = ("n01440764", "n02084071", "n03995372")


def tiny_folder(root: Path) -> list[np.ndarray]:
    """Two classes that share a word and one that does not; wnids.txt in another order than sorted, as the official one is."""
    put(root / "wnids.txt", f"{IDS[2]}\n{IDS[0]}\n{IDS[1]}\n")
    put(root / "words.txt", f"n00001740\tentity\n{IDS[0]}\tpole, stick\n{IDS[1]}\tdog, hound\n{IDS[2]}\tpole\n")
    images = [noise(4, 6, 3, seed=k) for k in range(5)]
    for k, name in enumerate(IDS):
        put(root / f"train/{name}/images/{name}_0.JPEG", images[k])
        put(root / f"train/{name}/{name}_boxes.txt", f"{name}_0.JPEG\t{k}\t1\t4\t3\n")
    for k in (3, 4):
        put(root / f"val/images/val_{k}.JPEG", images[k])
    put(root / "val/val_annotations.txt", f"val_3.JPEG\t{IDS[1]}\t0\t0\t5\t3\nval_4.JPEG\t{IDS[0]}\t2\t1\t3\t2\n")
    return images


def test_tiny_imagenet(tmp_path: Path) -> None:
    images = tiny_folder(tmp_path)
    train, val = (lists.read_tiny_imagenet(tmp_path, Asked("tinyimagenet", split)) for split in ("train", "test"))
    same(train, images[:3], [0, 1, 2])  # type: ignore[arg-type]
    same(val, images[3:], [1, 0])  # type: ignore[arg-type]
    assert train.classes == val.classes == (f"pole ({IDS[0]})", "dog", f"pole ({IDS[2]})")
    assert [train.box(i) for i in range(3)] == [(k, 1, 4, 3) for k in range(3)] and val.box(1) == (2, 1, 3, 2)
    assert folders.read(tmp_path / "train" / IDS[0], Asked("x", "train")).box(0) is None
    for file, text, told in (
        (f"train/{IDS[1]}/{IDS[1]}_boxes.txt", "a.JPEG\t1\t2\t3\n", "is not a name and a box"),
        (f"train/{IDS[1]}/{IDS[1]}_boxes.txt", "a.JPEG\t1\t2\t3\t4\n", r"a\.JPEG is not there"),
        ("val/val_annotations.txt", "val_3.JPEG\tn99999999\t0\t0\t5\t3\n", "'n99999999', which is not in wnids.txt"),
    ):
        put(tmp_path / file, text)
        with pytest.raises(BadFileError, match=told):
            lists.read_tiny_imagenet(tmp_path, Asked("tinyimagenet", "test" if "val" in file else "train"))


def imagenet_folder(root: Path, flat: bool) -> list[np.ndarray]:
    for k, name in enumerate(IDS):
        put(root / f"train/{name}/{name}_{k}.JPEG", encoded(noise(4, 5, 3), "JPEG"))
    images = [noise(3 + k, 4, 3, seed=k) for k in range(4)]
    for k, image in enumerate(images):
        name = f"ILSVRC2012_val_0000000{k + 1}.JPEG"
        put(root / "val" / (name if flat else f"{(*IDS, IDS[1])[k]}/{name}"), image)
    return images


def test_imagenet_in_class_folders(tmp_path: Path) -> None:
    images = imagenet_folder(tmp_path, flat=False)
    assert imagenet.read(tmp_path / "train", Asked("imagenet", "train")).labels.tolist() == [0, 1, 2]
    found = imagenet.read(tmp_path / "val", Asked("imagenet", "test"))
    same(found, [images[k] for k in (0, 1, 3, 2)], [0, 1, 1, 2])  # type: ignore[arg-type]
    assert found.classes == IDS
    (tmp_path / f"val/{IDS[2]}/ILSVRC2012_val_00000003.JPEG").unlink()
    (tmp_path / "val" / IDS[2]).rmdir()
    with pytest.raises(BadFileError, match=f"misses the class {IDS[2]}"):
        imagenet.read(tmp_path / "val", Asked("imagenet", "test"))
    put(tmp_path / "train/dogs/1.JPEG", b"x")
    with pytest.raises(BadFileError, match="dogs is not called like a WordNet id"):
        imagenet.read(tmp_path / "train", Asked("imagenet", "train"))


@pytest.mark.parametrize("beside", ["", "val/", "../../../"])
def test_imagenet_flat_with_a_solution(beside: str, tmp_path: Path) -> None:
    root = tmp_path / "ILSVRC/Data/CLS-LOC"
    images = imagenet_folder(root, flat=True)
    ids = (IDS[2], IDS[0], IDS[2], IDS[1])
    rows = [f"ILSVRC2012_val_0000000{k + 1},{name} 1 2 3 4 {name} 5 6 7 8 " for k, name in enumerate(ids)]
    solution = put(root / beside / "LOC_val_solution.csv", "\n".join(["ImageId,PredictionString", *rows[::-1]]))
    same(imagenet.read(root / "val", Asked("imagenet", "test")), images, [2, 0, 2, 1])  # type: ignore[arg-type]
    for changed, told in (
        (rows[:3], "does not know the image ILSVRC2012_val_00000004"),
        ([*rows, f"ILSVRC2012_val_00000009,{IDS[0]} 1 2 3 4"], "lists ILSVRC2012_val_00000009, which is not there"),
        ([*rows[:3], "ILSVRC2012_val_00000004,dog"], "is not ImageId"),
        ([*rows[:3], "ILSVRC2012_val_00000004,n99999999 1"], f"misses the class {IDS[1]}"),
    ):
        put(solution, "\n".join(["ImageId,PredictionString", *changed]))
        with pytest.raises(BadFileError, match=told):
            imagenet.read(root / "val", Asked("imagenet", "test"))
    solution.unlink()
    with pytest.raises(BadFileError, match=r"is flat and nothing says which class .*LOC_val_solution\.csv"):
        imagenet.read(root / "val", Asked("imagenet", "test"))


# --- WebDataset shards -----------------------------------------------------------------------------------------------


def shard_folder(root: Path) -> np.ndarray:
    images = noise(5, 4, 6, 3)
    first = sample("a/0001", images[0], 1) | sample("b/0001", images[1], 0, "PNG")
    tar(root / "train-000000.tar", first | {"b/0001.seg.png": b"not looked at"})
    tar(root / "train-000001.tar", {"c.cls": b" 2\n"} | sample("c", images[2], None) | sample("d", images[3], 0))
    tar(root / "val-000000.tar", sample("e", images[4], 0))
    return images


@pytest.mark.parametrize("named", [True, False], ids=["classes.txt", "numbers"])
def test_shards(named: bool, tmp_path: Path) -> None:
    images = shard_folder(tmp_path)
    if named:
        put(tmp_path / "classes.txt", "cat\ndog\neel\n")
    assert shards.is_here(tmp_path)
    found = shards.read(tmp_path, Asked("beasts", "train"))
    same(found, images[:4], [1, 0, 2, 0])
    assert found.classes == (("cat", "dog", "eel") if named else ("0", "1", "2"))
    assert found.where(1) == f"{tmp_path / 'train-000000.tar'}, b/0001" and np.array_equal(found.read(3), images[3])
    test = shards.read(tmp_path, Asked("beasts", "test"))
    same(test, images[4:], [0])
    assert test.classes == found.classes and test.fingerprint != found.fingerprint


def test_shards_by_name_and_without_splits(tmp_path: Path) -> None:
    images = noise(2, 4, 6, 3)
    tar(tmp_path / "2/part-1.tar", sample("a", images[1], 0))
    tar(tmp_path / "2/part-0.tar", sample("a", images[0], 1))
    same(shards.read(tmp_path / "2", Asked("x", "train")), images, [1, 0])
    tar(tmp_path / "3/birds1k-train-0.tar", sample("a", images[0], 0))
    tar(tmp_path / "3/birds1k-validation-0.tar", sample("\udcff", images[1], 0))
    for split, image in zip(("train", "test"), images, strict=True):
        same(shards.read(tmp_path / "3", Asked("x", split)), image[None], [0])
    assert all(shards.is_here(tmp_path / name) for name in "23")
    put(tmp_path / "2/cat/1.png", images[0])
    assert not shards.is_here(tmp_path / "2")  # what class folders were unpacked from
    with pytest.raises(BadFileError, match=r"no shards of the split 'test': they would be called test-\*\.tar"):
        shards.read(tmp_path / "2", Asked("x", "test"))


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (sample("a", BEASTS[0], None), r"x\.tar: a has no label"),
        ({"a.cls": b"1"}, r"x\.tar: a has no image"),
        (sample("a", BEASTS[0], 1) | {"a.jpg": b""}, "a has two images"),
        (sample("a", BEASTS[0], None) | {"a.cls": b"one"}, r"a\.cls is not a label"),
        (sample("a", BEASTS[0], 3), "a: its label is 3, and the labels of beasts go from 0 to 2"),
    ],
)
def test_bad_shards_are_refused(members: dict[str, bytes], told: str, tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", members)
    put(tmp_path / "classes.txt", "cat\ndog\neel\n")
    with pytest.raises(BadFileError, match=told):
        shards.read(tmp_path, Asked("beasts", "train"))
    (tmp_path / "classes.txt").unlink()
    tar(tmp_path / "x.tar", sample("a", BEASTS[0], 200_000_000))
    with pytest.raises(BadFileError, match="a label is 200000000, and 1 images cannot"):
        shards.read(tmp_path, Asked("beasts", "train"))


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    """tarfile itself takes a damaged header for the end, and would leave out the rest without a word."""
    members = {name: raw for k in range(3) for name, raw in sample(f"k{k}", noise(9, 9, 3), k).items()}
    whole = tar(tmp_path / "x.tar", members).read_bytes()
    second = whole.index(b"k1.png")
    for damaged in (whole[:second], whole[: second + 700], b"", whole.replace(b"k1.png", b"k1\xffpng")):
        with pytest.raises(BadFileError, match=r"x\.tar"):
            shards.read(put(tmp_path / "x.tar", damaged).parent, Asked("beasts", "train"))
    tar(tmp_path / "x.tar", members, "w:gz")
    with pytest.raises(BadFileError, match=r"x\.tar is not a sound tar"):
        shards.read(tmp_path, Asked("beasts", "train"))


# --- Hugging Face datasets on disk -----------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    library = pytest.importorskip("datasets", reason="datasets is absent: pip install 'dmst[data]'")
    library.disable_progress_bars()
    return library


def table(hub: Any, images: list[Any], labels: list[int], label: str = "label", **more: Any) -> Any:
    features = {"image": hub.Image(), label: hub.ClassLabel(names=list(NAMES))} | {k: v for k, (v, _) in more.items()}
    rows = {"image": images, label: labels} | {k: v for k, (_, v) in more.items()}
    return hub.Dataset.from_dict(rows, features=hub.Features(features))


def test_hugging_face(hub: Any, tmp_path: Path) -> None:
    held = [{"bytes": encoded(image), "path": None} for image in BEASTS]
    splits = hub.DatasetDict({"train": table(hub, held, KINDS), "validation": table(hub, held[:3], [0, 1, 2])})
    splits.save_to_disk(str(tmp_path / "saved"))
    assert huggingface.is_here(tmp_path / "saved") and not huggingface.is_here(tmp_path)
    found = huggingface.read(tmp_path / "saved", Asked("beasts", "train"))
    same(found, BEASTS, KINDS)
    assert found.classes == NAMES and found.where(3) == "beasts train, image 3"
    assert np.array_equal(pickle.loads(pickle.dumps(found)).read(4), BEASTS[4])  # as it goes to a worker
    test = huggingface.read(tmp_path / "saved", Asked("beasts", "test"))
    same(test, BEASTS[:3], [0, 1, 2])
    assert test.fingerprint != found.fingerprint == huggingface.read(tmp_path / "saved", Asked("beasts", "train")).fingerprint


def test_hugging_face_columns(hub: Any, tmp_path: Path) -> None:
    held = [{"bytes": encoded(image), "path": None} for image in BEASTS[:3]]
    coarse = hub.ClassLabel(names=["x", "y"]), [1, 1, 0]
    table(hub, held, [2, 1, 0], "fine_label", coarse_label=coarse).save_to_disk(str(tmp_path / "two"))
    same(huggingface.read(tmp_path / "two", Asked("x", "train")), BEASTS[:3], [2, 1, 0])
    with pytest.raises(BadFileError, match="no split 'test': its splits are train"):
        huggingface.read(tmp_path / "two", Asked("x", "test"))
    table(hub, held, [2, 1, 0], "kind", coarse_label=coarse).save_to_disk(str(tmp_path / "which"))
    with pytest.raises(
        BadFileError, match=r"has 2 columns of type ClassLabel; .* Its columns: image \(Image\), kind \(ClassLabel\)"
    ):
        huggingface.read(tmp_path / "which", Asked("x", "train"))
    hub.Dataset.from_dict({"label": [1]}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(BadFileError, match="no columns of type Image"):
        huggingface.read(tmp_path / "none", Asked("x", "train"))


def test_bad_hugging_face_sets_are_refused(hub: Any, tmp_path: Path) -> None:
    held = [{"bytes": encoded(image), "path": None} for image in BEASTS[:2]]
    for folder, images, labels, told in (
        (tmp_path / "label", [*held, None], [0, 1, -1], "image 2: its label is -1"),
        (tmp_path / "missing", held, [0, None], "some labels are missing"),
    ):
        table(hub, images, labels).save_to_disk(str(folder))  # type: ignore[arg-type]
        with pytest.raises(BadFileError, match=told):
            huggingface.read(folder, Asked("x", "train"))
    table(hub, [None, *held], [0, 1, 2]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(BadImageError, match="x train, image 0: its row holds no image"):
        huggingface.read(tmp_path / "saved", Asked("x", "train")).read(0)
    put(next((tmp_path / "saved").glob("*.arrow")), b"broken")
    with pytest.raises(BadFileError, match="is not a dataset saved with save_to_disk"):
        huggingface.read(tmp_path / "saved", Asked("x", "train"))
    for text in ('{"splits": ["train", "exam"]}', "[]"):
        put(tmp_path / "dict/dataset_dict.json", text)
        with pytest.raises(BadFileError, match="is not a dataset saved with save_to_disk"):
            huggingface.read(tmp_path / "dict", Asked("x", "test"))


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "scipy.io", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    put(tmp_path / "state.json", "{}")
    for read in (
        lambda: huggingface.read(tmp_path, Asked("x", "train")),
        lambda: arrays.read_svhn(tmp_path / "state.json", Asked("svhn", "train", DIGITS)),
        lambda: arrays.read_digits(Asked("digits", "train", DIGITS)),
    ):
        with pytest.raises(MissingExtraError, match=r"dmst\[(data|demo)\]"):
            read()
