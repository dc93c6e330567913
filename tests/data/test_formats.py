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

from dmst.data.catalog import CIFAR10, CIFAR100, DIGITS, PETS, open_set
from dmst.data.formats import Asked, arrays, lists, reading, shards
from dmst.data.sets import ImageSet
from dmst.errors import BadFileError, BadImageError, MissingExtraError, MissingSplitError, ShapeError
from tests.layouts import encoded, noise, put, records, sample, tar

NAMES = ("cat", "dog", "eel")
BEASTS = noise(11, 5, 5, 3)
KINDS = [k % 3 for k in range(11)]


def opened(read: Callable[[Path, Asked], ImageSet], place: Path, *asked: Any) -> ImageSet:
    """As the catalog opens it, with any number of classes."""
    with reading(place):
        return read(place, Asked(*asked))


def same(found: ImageSet, images: np.ndarray, labels: list[int]) -> None:
    """Pixel for pixel, in order; and ready for torch.from_numpy, which warns of arrays that cannot be written to."""
    assert found.labels.tolist() == labels and found.labels.dtype == np.int64 and len(found) == len(labels)
    assert all(np.array_equal(found.read(i), image) for i, image in enumerate(images))
    pixels = found.pixels()
    assert pixels is None or (np.array_equal(pixels, images) and pixels.flags.writeable and pixels.flags.c_contiguous)


# --- CIFAR, SVHN, digits ---------------------------------------------------------------------------------------------


def test_cifar(tmp_path: Path) -> None:
    images, labels = noise(15, 32, 32, 3), [k % 10 for k in range(3, 18)]
    for k in range(5):
        part = slice(3 * k, 3 * k + 3)
        put(tmp_path / f"data_batch_{k + 1}.bin", records(labels[part], images[part]))
    same(opened(arrays.read_cifar, tmp_path, "cifar10", "train", CIFAR10), images, labels)
    put(tmp_path / "train.bin", records([99, 0, 42, 17], images[:4], coarse=True))  # the fine labels are taken
    same(opened(arrays.read_cifar, tmp_path, "cifar100", "train", CIFAR100), images[:4], [99, 0, 42, 17])
    for raw, told in (
        (bytes(3072), r"data_batch_2\.bin cannot be read .*Copy or make it again"),
        (records([3, 10], images[:2]), "image 4: its label is 10, and the labels of cifar10 go from 0 to 9"),
    ):
        put(tmp_path / "data_batch_2.bin", raw)
        with pytest.raises(BadFileError, match=told):
            opened(arrays.read_cifar, tmp_path, "cifar10", "train", CIFAR10)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(BadFileError, match=r"data_batch_2\.bin cannot be read \(No such file"):
        opened(arrays.read_cifar, tmp_path, "cifar10", "train", CIFAR10)


def test_svhn_writes_0_as_10(tmp_path: Path) -> None:
    save = pytest.importorskip("scipy.io", reason="scipy is absent: pip install 'dmst[data]'").savemat
    images, path = noise(5, 32, 32, 3), tmp_path / "train_32x32.mat"
    pixels, digits = images.transpose(1, 2, 3, 0), np.uint8([[10], [1], [9], [10], [3]])
    save(path, {"X": pixels, "y": digits}, do_compression=True)
    same(opened(arrays.read_svhn, path, "svhn", "train", DIGITS), images, [0, 1, 9, 0, 3])
    save(path, {"X": pixels, "y": digits + 1})
    with pytest.raises(BadFileError, match="its label is 11"):
        opened(arrays.read_svhn, path, "svhn", "train", DIGITS)
    save(path, {"X": pixels})
    for raw in (path.read_bytes(), path.read_bytes()[:150]):
        with pytest.raises(BadFileError, match=r"train_32x32\.mat cannot be read"):
            opened(arrays.read_svhn, put(path, raw), "svhn", "train", DIGITS)


def test_digits_are_scikit_learn_s() -> None:
    bunch = pytest.importorskip("sklearn.datasets", reason="scikit-learn is absent: pip install 'dmst[data]'").load_digits()
    held_out = np.arange(len(bunch.images)) % 5 == 4
    for split, mine in (("train", ~held_out), ("test", held_out)):
        found = open_set("digits", split)
        assert found.labels.tolist() == bunch.target[mine].tolist()
        assert found.pixels().shape == (mine.sum(), 8, 8, 1)  # type: ignore[union-attr]
        assert abs(found.pixels()[..., 0] * (16 / 255) - bunch.images[mine]).max() <= 8 / 255 + 1e-9  # type: ignore[index]


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
    found = open_set(tmp_path, "train")
    assert found.classes == ("Z", "a", "b")
    order = ["train/Z/y.png", "train/a/x.jpeg", "train/b/10.png", "train/b/2.PNG"]
    same(found, [images[name] for name in order], [0, 1, 2, 2])  # type: ignore[arg-type]
    assert found.where(2) == str(tmp_path / "train/b/10.png") and found.pixels() is None and found.masks(0) is None
    test = open_set(tmp_path, "test")
    assert test.classes == found.classes and test.labels.tolist() == [0, 1, 2] and test.split == "test"


def test_a_folder_without_splits_is_train(tmp_path: Path) -> None:
    """Also with a class called train, as CIFAR-100 has one."""
    for name in ("train", "tree", "test"):
        put(tmp_path / name / "1.png", noise(3, 5, 3))
    found = open_set(tmp_path, "train")
    assert found.classes == ("test", "train", "tree") and found.where(1) == str(tmp_path / "train/1.png")
    with pytest.raises(BadFileError, match="no split 'test': it would be called test or val"):
        open_set(tmp_path, "test")


@pytest.mark.parametrize(
    ("change", "split", "told"),
    [
        (lambda root: put(root / "test/c/1.png", noise(2, 2, 3)), "test", "test has the unknown class c"),
        (lambda root: (root / "train/b/1.png").rename(root / "train/b/1.txt"), "train", r"b has no images: .* end in \.jpg"),
        (lambda root: (root / "train/b/2.png").symlink_to(root / "gone.png"), "train", r"2\.png cannot be read"),
    ],
)
def test_bad_class_folders_are_refused(change: Callable[[Path], Any], split: str, told: str, tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"):
        put(tmp_path / name, noise(2, 3, 3))
    open_set(tmp_path, split)
    change(tmp_path)
    with pytest.raises(BadFileError, match=told):
        open_set(tmp_path, split)


def test_the_fingerprint_of_folders(tmp_path: Path) -> None:
    """Names, sizes and labels; neither the time nor the place."""

    def mark(root: Path, **content: str) -> str:
        for name, text in content.items():
            put(root / "a" / f"{name}.png", text)
        return open_set(root, "train").fingerprint

    first = mark(tmp_path / "1", x="one")
    os.utime(tmp_path / "1/a/x.png", (1, 1))
    assert mark(tmp_path / "1") == first == mark(tmp_path / "2", x="two")
    assert len({first, mark(tmp_path / "3", y="one"), mark(tmp_path / "4", x="three")}) == 3


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
    found = opened(lists.read_pets, tmp_path / "annotations", "pets", "train", PETS)
    same(found, images, [32, 4, 0])  # type: ignore[arg-type]
    assert all(np.array_equal(found.masks(i), masks[i]) for i in range(3))  # type: ignore[arg-type]
    assert [found.classes[k] for k in found.labels] == ["Siamese", "beagle", "Abyssinian"]
    assert opened(lists.read_pets, tmp_path / "annotations", "pets", "test", PETS).labels.tolist() == [4]
    put(tmp_path / "annotations/trimaps/beagle_2.png", np.full((6, 6), 4, np.uint8))
    with pytest.raises(BadImageError, match=r"beagle_2\.png: a mask with values 4\.\.4"):
        found.masks(1)


def test_bad_pets_are_refused(tmp_path: Path) -> None:
    pets_folder(tmp_path)
    told = tmp_path / "annotations/trainval.txt"
    for raw in (b"beagle_2 38 2 4\n", b"beagle_2 5\n", b"\xff\xfe\x00"):
        put(told, raw)
        with pytest.raises(BadFileError, match=r"trainval\.txt cannot be read"):
            opened(lists.read_pets, tmp_path / "annotations", "pets", "train", PETS)
    put(told, "pug_9 26 2 4\n")
    with pytest.raises(BadFileError, match=r"pug_9\.jpg cannot be read \(No such file"):
        opened(lists.read_pets, tmp_path / "annotations", "pets", "train", PETS)


def test_food(tmp_path: Path) -> None:
    names = {"train": ["sushi/7", "apple_pie/12", "sushi/3"], "test": ["apple_pie/1", "sushi/1"]}
    images = {name: noise(5, 4, 3, seed=k) for k, name in enumerate(names["train"] + names["test"])}
    put(tmp_path / "meta/classes.txt", "apple_pie\nsushi\n")
    for split, listed in names.items():
        put(tmp_path / f"meta/{split}.txt", "\n".join(listed))
    for name, image in images.items():
        put(tmp_path / f"images/{name}.jpg", image)
    same(opened(lists.read_food, tmp_path / "meta", "food101", "train"), [images[x] for x in names["train"]], [1, 0, 1])  # type: ignore[arg-type]
    same(opened(lists.read_food, tmp_path / "meta", "food101", "test"), [images[x] for x in names["test"]], [0, 1])  # type: ignore[arg-type]
    put(tmp_path / "meta/train.txt", "soup/1\n")
    with pytest.raises(BadFileError, match=r"train\.txt has the unknown class soup"):
        opened(lists.read_food, tmp_path / "meta", "food101", "train")


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
    train, val = (opened(lists.read_tiny_imagenet, tmp_path, "tinyimagenet", split) for split in ("train", "test"))
    same(train, images[:3], [0, 1, 2])  # type: ignore[arg-type]
    same(val, images[3:], [1, 0])  # type: ignore[arg-type]
    assert train.classes == val.classes == (f"pole ({IDS[0]})", "dog", f"pole ({IDS[2]})")
    assert [train.box(i) for i in range(3)] == [(k, 1, 4, 3) for k in range(3)] and val.box(1) == (2, 1, 3, 2)
    put(tmp_path / f"train/{IDS[1]}/{IDS[1]}_boxes.txt", f"{IDS[1]}_0.JPEG\t1\t2\t3\n")
    put(tmp_path / "val/val_annotations.txt", "val_3.JPEG\tn99999999\t0\t0\t5\t3\n")
    for split, told in (("train", "cannot be read"), ("test", r"val_annotations\.txt has the unknown class n99999999")):
        with pytest.raises(BadFileError, match=told):
            opened(lists.read_tiny_imagenet, tmp_path, "tinyimagenet", split)


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
    assert opened(lists.read_imagenet, tmp_path / "train", "imagenet", "train").labels.tolist() == [0, 1, 2]
    found = opened(lists.read_imagenet, tmp_path / "val", "imagenet", "test")
    same(found, [images[k] for k in (0, 1, 3, 2)], [0, 1, 1, 2])  # type: ignore[arg-type]
    assert found.classes == IDS
    put(tmp_path / "val/dogs/1.JPEG", b"x")
    with pytest.raises(BadFileError, match="val has the unknown class dogs"):
        opened(lists.read_imagenet, tmp_path / "val", "imagenet", "test")


@pytest.mark.parametrize("beside", ["", "../../../"])
def test_imagenet_flat_with_a_solution(beside: str, tmp_path: Path) -> None:
    root = tmp_path / "ILSVRC/Data/CLS-LOC"
    images = imagenet_folder(root, flat=True)
    ids = (IDS[2], IDS[0], IDS[2], IDS[1])
    rows = [f"ILSVRC2012_val_0000000{k + 1},{name} 1 2 3 4 {name} 5 6 7 8 " for k, name in enumerate(ids)]
    solution = put(root / beside / "LOC_val_solution.csv", "\n".join(["ImageId,PredictionString", *rows[::-1]]))
    same(opened(lists.read_imagenet, root / "val", "imagenet", "test"), images, [2, 0, 2, 1])  # type: ignore[arg-type]
    put(solution, "\n".join(["ImageId,PredictionString", *rows, "ILSVRC2012_val_00000004,n99999999 1"]))
    with pytest.raises(BadFileError, match=r"solution\.csv has the unknown class n99999999"):
        opened(lists.read_imagenet, root / "val", "imagenet", "test")
    solution.unlink()
    with pytest.raises(BadFileError, match=r"is flat and nothing says which class .*LOC_val_solution\.csv"):
        opened(lists.read_imagenet, root / "val", "imagenet", "test")


# --- WebDataset shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["classes.txt", "numbers"])
def test_shards(named: bool, tmp_path: Path) -> None:
    images = noise(5, 4, 6, 3)
    first = sample("a/0001", images[0], 1) | sample("b/0001", images[1], 0, "PNG")
    both = {"c.cls": b" 2\n"} | sample("c", images[2], None)
    tar(tmp_path / "train-000000.tar", first | {"b/0001.seg.png": b"not looked at"})
    tar(tmp_path / "train-000001.tar", both | sample("d", images[3], 0))
    tar(tmp_path / "val-000000.tar", first | both)
    if named:
        put(tmp_path / "classes.txt", "cat\ndog\neel\n")
    found = open_set(tmp_path, "train")
    same(found, images[:4], [1, 0, 2, 0])
    assert found.classes == (NAMES if named else ("0", "1", "2"))
    assert found.where(1) == f"{tmp_path / 'train-000000.tar'}, b/0001"
    test = open_set(tmp_path, "test")
    same(test, images[:3], [1, 0, 2])
    assert test.classes == found.classes and test.fingerprint != found.fingerprint


def test_shards_by_name_and_without_splits(tmp_path: Path) -> None:
    images = noise(2, 4, 6, 3)
    tar(tmp_path / "1/birds1k-train-0.tar", sample("a", images[0], 0))
    tar(tmp_path / "1/birds1k-validation-0.tar", sample("\udcff", images[1], 0))
    for split, image in zip(("train", "test"), images, strict=True):
        same(open_set(tmp_path / "1", split), image[None], [0])
    tar(tmp_path / "2/part-1.tar", sample("a", images[1], 0))
    tar(tmp_path / "2/part-0.tar", sample("a", images[0], 1))
    same(open_set(tmp_path / "2", "train"), images, [1, 0])
    with pytest.raises(MissingSplitError, match="no split 'test'"):
        open_set(tmp_path / "2", "test")
    put(tmp_path / "2/cat/1.png", images[0])
    assert not shards.is_here(tmp_path / "2")  # what class folders were unpacked from


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (sample("a", BEASTS[0], None), r"x\.tar: a has no label"),
        ({"a.cls": b"1"}, r"x\.tar: a has no image"),
        (sample("a", BEASTS[0], None) | {"a.cls": b"one"}, r"x\.tar cannot be read"),
        (sample("a", BEASTS[0], 2_000_000_000), "a: its label is 2000000000"),
    ],
)
def test_bad_shards_are_refused(members: dict[str, bytes], told: str, tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", members)
    with pytest.raises(BadFileError, match=told):
        open_set(tmp_path, "train")


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    """tarfile itself takes a damaged header for the end, and would leave out the rest without a word."""
    members = {name: raw for k in range(3) for name, raw in sample(f"k{k}", noise(9, 9, 3), k).items()}
    whole = tar(tmp_path / "x.tar", members).read_bytes()
    second = whole.index(b"k1.png")
    for damaged in (whole[:second], whole[: second + 700], b"", whole.replace(b"k1.png", b"k1\xffpng")):
        with pytest.raises(BadFileError, match=r"x\.tar"):
            open_set(put(tmp_path / "x.tar", damaged).parent, "train")
    tar(tmp_path / "x.tar", members, "w:gz")
    with pytest.raises(BadFileError, match=r"x\.tar cannot be read"):
        open_set(tmp_path, "train")


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
    found = open_set(tmp_path / "saved", "train")
    same(found, BEASTS, KINDS)
    assert found.classes == NAMES and found.where(3) == "saved train, image 3"
    assert np.array_equal(pickle.loads(pickle.dumps(found)).read(4), BEASTS[4])  # as it goes to a worker
    test = open_set(tmp_path / "saved", "test")
    same(test, BEASTS[:3], [0, 1, 2])
    assert test.fingerprint != found.fingerprint == open_set(tmp_path / "saved", "train").fingerprint


def test_hugging_face_columns(hub: Any, tmp_path: Path) -> None:
    held = [{"bytes": encoded(image), "path": None} for image in BEASTS[:3]]
    coarse = hub.ClassLabel(names=["x", "y"]), [1, 1, 0]
    table(hub, held, [2, 1, 0], "fine_label", coarse_label=coarse).save_to_disk(str(tmp_path / "two"))
    same(open_set(tmp_path / "two", "train"), BEASTS[:3], [2, 1, 0])
    with pytest.raises(BadFileError, match="no split 'test'"):
        open_set(tmp_path / "two", "test")
    table(hub, held, [2, 1, 0], "kind", coarse_label=coarse).save_to_disk(str(tmp_path / "which"))
    with pytest.raises(BadFileError, match=r"has 2 columns of type ClassLabel; .* Its columns: image, kind"):
        open_set(tmp_path / "which", "train")
    hub.Dataset.from_dict({"label": [1]}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(BadFileError, match="no columns of type Image"):
        open_set(tmp_path / "none", "train")


def test_bad_hugging_face_sets_are_refused(hub: Any, tmp_path: Path) -> None:
    held = [{"bytes": encoded(image), "path": None} for image in BEASTS[:2]]
    table(hub, held, [0, None]).save_to_disk(str(tmp_path / "missing"))  # type: ignore[list-item]
    with pytest.raises((BadFileError, ShapeError)):
        open_set(tmp_path / "missing", "train")
    table(hub, [None, *held], [0, 1, 2]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(BadImageError, match="saved train, image 0: its row holds no image"):
        open_set(tmp_path / "saved", "train").read(0)
    put(next((tmp_path / "saved").glob("*.arrow")), b"broken")
    with pytest.raises(BadFileError, match="saved cannot be read"):
        open_set(tmp_path / "saved", "train")
    put(tmp_path / "dict/dataset_dict.json", '{"splits": ["exam"]}')
    with pytest.raises(MissingSplitError, match="no split 'train'"):
        open_set(tmp_path / "dict", "train")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "scipy.io", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    put(tmp_path / "state.json", "{}")
    put(tmp_path / "train_32x32.mat", b"")
    for what in (tmp_path, "svhn", "digits"):
        with pytest.raises(MissingExtraError, match=r"dmst\[(data|demo)\]"):
            open_set(what, "train", data_dir=tmp_path)
