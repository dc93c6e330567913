"""The forms in which datasets lie on disk, each on tiny files made in that form: exact when whole, refused by name when not."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmst.data.catalog import CIFAR10, CIFAR100, DIGITS, PETS
from dmst.data.formats import (
    Asked,
    cifar,
    contents,
    digits,
    folders,
    food,
    huggingface,
    imagenet,
    pets,
    shards,
    sheets,
    svhn,
)
from dmst.data.formats.sheets import Pack
from dmst.data.sets import ImageSet
from dmst.errors import BadFileError, BadImageError, MissingExtraError

TEN = Asked("cifar10", "train", CIFAR10)
HUNDRED = Asked("cifar100", "train", CIFAR100)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, kind)
    return out.getvalue()


def put(path: Path, data: bytes | str | np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = encoded(data) if isinstance(data, np.ndarray) else data.encode() if isinstance(data, str) else data
    path.write_bytes(raw)
    return path


def tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as out:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def same(found: ImageSet, images: np.ndarray, labels: list[int]) -> None:
    """Pixel for pixel, in order; and ready for torch.from_numpy, which warns of arrays that cannot be written to."""
    assert found.labels.tolist() == labels and found.labels.dtype == np.int64 and len(found) == len(labels)
    assert all(np.array_equal(found.read(i), image) for i, image in enumerate(images))
    pixels = found.pixels()
    assert pixels is None or (np.array_equal(pixels, images) and pixels.flags.writeable and pixels.flags.c_contiguous)


# --- CIFAR -----------------------------------------------------------------------------------------------------------


def planes(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), 3072)


def binary(labels: list[int], data: np.ndarray, *, coarse: bool = False) -> bytes:
    return b"".join(
        (b"\x07" if coarse else b"") + bytes([label]) + row.tobytes() for label, row in zip(labels, data, strict=True)
    )


TRAIN = [(noise(3, 32, 32, 3, seed=k), [k, 9 - k, 3]) for k in range(5)]  # five batches of three
IMAGES = np.concatenate([images for images, _ in TRAIN])
LABELS = [label for _, labels in TRAIN for label in labels]


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_cifar10(packed: bool, tmp_path: Path) -> None:
    folder = "cifar-10-batches-bin"
    files = {f"data_batch_{k + 1}.bin": binary(labels, planes(images)) for k, (images, labels) in enumerate(TRAIN)}
    files["test_batch.bin"] = binary([5, 7], planes(noise(2, 32, 32, 3, seed=9)))
    if packed:  # in another order than the batches', with a name that would leave the folder
        place = tar(tmp_path / "x.tar.gz", {f"../{folder}/{name}": files[name] for name in sorted(files, reverse=True)}, "w:gz")
    else:
        place = tmp_path / folder
        for name, raw in files.items():
            put(place / name, raw)
    found = cifar.read(place, TEN, kind=folder)
    same(found, IMAGES, LABELS)
    assert (found.name, found.split, found.variant, found.classes) == ("cifar10", "train", "", CIFAR10)
    same(cifar.read(place, TEN._replace(split="test"), kind=folder), noise(2, 32, 32, 3, seed=9), [5, 7])


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    images, labels = noise(4, 32, 32, 3), [99, 0, 42, 17]
    put(tmp_path / "bin" / "train.bin", binary(labels, planes(images), coarse=True))
    same(cifar.read(tmp_path / "bin", HUNDRED, kind="cifar-100-binary"), images, labels)


def cifar_folder(folder: Path, **changed: bytes) -> tuple[Path, str]:
    for k, (images, labels) in enumerate(TRAIN):
        put(folder / f"data_batch_{k + 1}.bin", changed.get(f"batch_{k + 1}", binary(labels, planes(images))))
    return folder, "cifar-10-batches-bin"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "whole records of 3073"),
        (bytes(3072), "data_batch_2.bin has 3,072 bytes"),
        (
            binary([3, 10], planes(noise(2, 32, 32, 3))),
            "image 4: its label is 10, and the labels of cifar10 go from 0 to 9",
        ),
    ],
)
def test_bad_batches_are_refused(raw: bytes, told: str, tmp_path: Path) -> None:
    folder, kind = cifar_folder(tmp_path, batch_2=raw)
    with pytest.raises(BadFileError, match=told):
        cifar.read(folder, TEN, kind=kind)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    folder, kind = cifar_folder(tmp_path / "folder")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(BadFileError, match=r"misses data_batch_3\.bin"):
        cifar.read(folder, TEN, kind=kind)
    archive = tar(tmp_path / "x.tar.gz", {"a/data_batch_1.bin": binary([1], planes(noise(1, 32, 32, 3)))}, "w:gz")
    with pytest.raises(BadFileError, match=r"misses data_batch_2\.bin, data_batch_3\.bin, data_batch_4"):
        cifar.read(archive, TEN, kind=kind)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    files = {f"data_batch_{k}.bin": binary([1], planes(noise(1, 32, 32, 3, seed=k))) for k in range(1, 6)}
    raw = tar(tmp_path / "x.tar.gz", files, "w:gz").read_bytes()
    turned = bytearray(raw)
    turned[len(raw) // 2] ^= 0xFF
    squeeze = zlib.compressobj(wbits=31)
    long = tar(tmp_path / "x.tar", {"data_batch_1.bin": bytes(600_000)}).read_bytes()
    no_deflate = squeeze.compress(long[:400_000]) + squeeze.flush(zlib.Z_FULL_FLUSH) + b"\x07" * 99  # inside the batch
    for damaged in (raw[: len(raw) // 2], raw[:5], b"", b"plain", bytes(turned), no_deflate):
        with pytest.raises(BadFileError):
            cifar.read(put(tmp_path / "x.tar.gz", damaged), TEN, kind="cifar-10-batches-bin")


def test_a_file_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    path = put(tmp_path / "list.txt", "11 letters.")
    assert contents(path, 11) == b"11 letters."
    with pytest.raises(BadFileError, match=r"list\.txt is larger than 10 bytes"):
        contents(path, 10)


# --- SVHN, digits ----------------------------------------------------------------------------------------------------


def test_svhn_writes_0_as_10(tmp_path: Path) -> None:
    save = pytest.importorskip("scipy.io", reason="scipy is absent: pip install 'dmst[data]'").savemat
    images = noise(5, 32, 32, 3)
    for compressed in (False, True):
        save(
            tmp_path / "a.mat",
            {"X": images.transpose(1, 2, 3, 0), "y": np.uint8([[10], [1], [9], [10], [3]])},
            do_compression=compressed,
        )
        same(svhn.read(tmp_path / "a.mat", Asked("svhn", "train", DIGITS)), images, [0, 1, 9, 0, 3])


def test_bad_svhn_is_refused(tmp_path: Path) -> None:
    save = pytest.importorskip("scipy.io", reason="scipy is absent: pip install 'dmst[data]'").savemat
    pixels, path = noise(32, 32, 3, 2), tmp_path / "train_32x32.mat"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"X": pixels, "y": np.uint8([[1], [0]])}, "image 1: y is 0; the official files write 1 to 10"),
        ({"X": pixels, "y": np.uint8([[11], [1]])}, "image 0: y is 11"),
        ({"X": pixels, "y": np.uint8([[1]])}, r"X is uint8 \(32, 32, 3, 2\)"),
        ({"X": pixels.astype(np.int16), "y": np.uint8([[1], [2]])}, "X is int16"),
        ({"X": pixels, "y": np.float64([[1.5], [2]])}, "y float64"),
        ({"X": pixels}, "not an SVHN file"),
        ({"X": pixels[..., :0], "y": np.zeros((0, 1), np.uint8)}, "empty"),
    ]
    for content, told in cases:
        save(path, content)
        with pytest.raises(BadFileError, match=told):
            svhn.read(path, Asked("svhn", "train", DIGITS))
    for raw in (b"", b"MATLAB 5.0 MAT-file" + bytes(200), path.read_bytes()[:150]):
        with pytest.raises(BadFileError, match=r"train_32x32\.mat is not an SVHN file"):
            svhn.read(put(path, raw), Asked("svhn", "train", DIGITS))


def test_digits_are_scikit_learn_s() -> None:
    bunch = pytest.importorskip("sklearn.datasets", reason="scikit-learn is absent: pip install 'dmst[data]'").load_digits()
    held_out = np.arange(len(bunch.images)) % 5 == 4
    for split, mine in (("train", ~held_out), ("test", held_out)):
        found = digits.read(Asked("digits", split, DIGITS))
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


def test_a_folder_with_a_test_split_alone(tmp_path: Path) -> None:
    put(tmp_path / "val/a/1.png", noise(3, 5, 3))
    assert folders.read(tmp_path, Asked("things", "test")).classes == ("a",)
    with pytest.raises(BadFileError, match=r"no split 'train': it needs a folder train/ with"):
        folders.read(tmp_path, Asked("things", "train"))


def test_the_order_of_the_classes_can_be_given(tmp_path: Path) -> None:
    for name in ("Beagle", "abyssinian"):
        put(tmp_path / name / "1.png", noise(3, 5, 3))
    found = folders.read(tmp_path, Asked("pets", "train", ("abyssinian", "Beagle")))
    assert [Path(found.where(i)).parent.name for i in range(2)] == ["abyssinian", "Beagle"]


@pytest.mark.parametrize(
    ("change", "split", "told"),
    [
        (lambda root: put(root / "test/c/1.png", noise(2, 2, 3)), "test", "test has the unknown class c"),
        (
            lambda root: (root / "test/b/1.png").rename(root / "test/a/2.png") and (root / "test/b").rmdir(),
            "test",
            "misses the class b",
        ),
        (lambda root: (root / "train/b/1.png").rename(root / "train/b/1.txt"), "train", r"b has no images: .* end in \.jpg"),
        (lambda root: (root / "test/b/1.png").unlink(), "test", "test/b has no image"),
        (lambda root: (root / "test").rename(root / "exam"), "test", "has no split 'test'"),
        (lambda root: (root / "train").rename(root / "learn"), "train", "has no split 'train'"),
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


def test_a_folder_with_nothing_in_it(tmp_path: Path) -> None:
    put(tmp_path / "1.png", noise(2, 3, 3))
    with pytest.raises(BadFileError, match="holds no class folders"):
        folders.read(tmp_path, Asked("birds", "train"))


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
    assert (
        len(
            {
                first,
                mark(tmp_path / "2"),
                mark(tmp_path / "3", "a/1.png", "b/3.png"),
                mark(tmp_path / "4", "a/1.png", "a/2.png", "b/2.png"),
            }
        )
        == 4
    )


def test_a_broken_image_in_a_folder_is_named(tmp_path: Path) -> None:
    put(tmp_path / "a/1.png", b"broken")
    found = folders.read(tmp_path, Asked("birds", "train"))
    with pytest.raises(BadImageError, match=r"a/1\.png"):
        found.read(0)


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
    found = pets.read(tmp_path / "annotations", Asked("pets", "train", PETS))
    same(found, images, [32, 4, 0])  # type: ignore[arg-type]
    assert all(np.array_equal(found.masks(i), masks[i]) for i in range(3))  # type: ignore[arg-type]
    assert [found.classes[k] for k in found.labels] == ["Siamese", "beagle", "Abyssinian"]
    assert pets.read(tmp_path / "annotations", Asked("pets", "test", PETS)).labels.tolist() == [4]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: put(root / "annotations/trainval.txt", "beagle_2 38 2 4\n"), "class ids 1 to 37"),
        (lambda root: put(root / "annotations/trainval.txt", "beagle_2 0 2 4\n"), "'beagle_2 0 2 4' is not NAME"),
        (lambda root: put(root / "annotations/trainval.txt", "beagle_2 5\n"), "is not NAME CLASS-ID"),
        (lambda root: put(root / "annotations/trainval.txt", "../beagle_2 5 2 4\n"), "is not NAME CLASS-ID"),
        (lambda root: put(root / "annotations/trainval.txt", "# nothing\n"), "pets train is empty"),
        (lambda root: put(root / "annotations/trainval.txt", b"\xff\xfe\x00"), "is not text"),
        (lambda root: (root / "annotations/trainval.txt").unlink(), r"trainval\.txt cannot be read"),
        (lambda root: (root / "images/beagle_2.jpg").unlink(), r"beagle_2\.jpg is not there, and .*trainval\.txt lists it"),
        (lambda root: (root / "annotations/trimaps/Siamese_10.png").unlink(), r"Siamese_10\.png is not there"),
    ],
)
def test_bad_pets_are_refused(change: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    pets_folder(tmp_path)
    change(tmp_path)
    with pytest.raises(BadFileError, match=told):
        pets.read(tmp_path / "annotations", Asked("pets", "train", PETS))


def test_a_mask_with_other_values_is_refused(tmp_path: Path) -> None:
    pets_folder(tmp_path)
    put(tmp_path / "annotations/trimaps/beagle_2.png", np.full((6, 6), 4, np.uint8))
    with pytest.raises(BadImageError, match=r"beagle_2\.png: a mask with values 4\.\.4"):
        pets.read(tmp_path / "annotations", Asked("pets", "train", PETS)).masks(1)


def test_food(tmp_path: Path) -> None:
    names = {"train": ["sushi/7", "apple_pie/12", "sushi/3"], "test": ["apple_pie/1", "sushi/1"]}
    images = {name: noise(5, 4, 3, seed=k) for k, name in enumerate(names["train"] + names["test"])}
    put(tmp_path / "meta/classes.txt", "apple_pie\nsushi\n")
    for split, listed in names.items():
        put(tmp_path / f"meta/{split}.txt", "\n".join(listed))
    for name, image in images.items():
        put(tmp_path / f"images/{name}.jpg", image)
    same(food.read(tmp_path / "meta", Asked("food101", "train")), [images[x] for x in names["train"]], [1, 0, 1])  # type: ignore[arg-type]
    same(food.read(tmp_path / "meta", Asked("food101", "test")), [images[x] for x in names["test"]], [0, 1])  # type: ignore[arg-type]
    for line, told in (
        ("soup/1", "'soup/1' is not CLASS/NUMBER"),
        ("sushi", "not CLASS/NUMBER"),
        ("sushi/99", r"99\.jpg is not there"),
    ):
        put(tmp_path / "meta/train.txt", f"{line}\n")
        with pytest.raises(BadFileError, match=told):
            food.read(tmp_path / "meta", Asked("food101", "train"))


IDS = ("n01440764", "n02084071", "n03995372")


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
        ([*rows[:3], f"ILSVRC2012_val_00000004,{IDS[0]}"], f"misses the class {IDS[1]}"),
        ([*rows[:3], "ILSVRC2012_val_00000004,n99999999 1"], f"misses the class {IDS[1]}"),
    ):
        put(solution, "\n".join(["ImageId,PredictionString", *changed]))
        with pytest.raises(BadFileError, match=told):
            imagenet.read(root / "val", Asked("imagenet", "test"))
    solution.unlink()
    with pytest.raises(BadFileError, match=r"is flat and nothing says which class .*LOC_val_solution\.csv"):
        imagenet.read(root / "val", Asked("imagenet", "test"))


@pytest.mark.parametrize("with_train", [True, False])
def test_imagenet_flat_with_the_development_kit(with_train: bool, tmp_path: Path) -> None:
    """The kit counts its classes in another order than that of the WordNet ids."""
    save = pytest.importorskip("scipy.io", reason="scipy is absent: pip install 'dmst[data]'").savemat
    images = imagenet_folder(tmp_path, flat=True)
    if not with_train:
        (tmp_path / "train").rename(tmp_path / "elsewhere")
    kit = tmp_path / "ILSVRC2012_devkit_t12/data"
    truth = put(kit / "ILSVRC2012_validation_ground_truth.txt", "1\n3\n2\n1\n")
    with pytest.raises(BadFileError, match=r"needs meta\.mat"):
        imagenet.read(tmp_path / "val", Asked("imagenet", "test"))
    kinds = [(1, IDS[1], "dog", 0), (2, IDS[2], "pole", 0), (3, IDS[0], "tench", 0), (4, "n00001740", "entity", 3)]
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    save(kit / "meta.mat", {"synsets": np.array(kinds, dtype=fields).reshape(-1, 1)})
    same(imagenet.read(tmp_path / "val", Asked("imagenet", "test")), images, [1, 0, 2, 1])  # type: ignore[arg-type]
    for text, told in (
        ("1\n2\n", "2 lines for 4 images"),
        ("1\n2\n3\n4\n", "says '4'"),
        ("1\n1\n3\n3\n", f"misses the class {IDS[2]}"),
    ):
        put(truth, text)
        if with_train or "misses" not in told:
            with pytest.raises(BadFileError, match=told):
                imagenet.read(tmp_path / "val", Asked("imagenet", "test"))
    put(truth, "1\n3\n2\n1\n")
    put(kit / "meta.mat", b"broken")
    with pytest.raises(BadFileError, match=r"meta\.mat is not that of the development kit"):
        imagenet.read(tmp_path / "val", Asked("imagenet", "test"))


# --- packed sheets ---------------------------------------------------------------------------------------------------

SIDE, COLUMNS, ROWS = 5, 3, 2
NAMES = ("cat", "dog", "eel")


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def cells(images: np.ndarray, pad: int = 0) -> list[bytes]:
    """Contact sheets of COLUMNS x ROWS; the last row is padded, the last sheet lower."""
    each, out = COLUMNS * ROWS, []
    for start in range(0, len(images), each):
        part = images[start : start + each]
        rows = -(-len(part) // COLUMNS)
        full = np.full((rows * COLUMNS, *images.shape[1:]), pad, np.uint8)
        full[: len(part)] = part
        grid = full.reshape(rows, COLUMNS, *images.shape[1:]).swapaxes(1, 2)
        out.append(encoded(grid.reshape(rows * SIDE, COLUMNS * SIDE, *images.shape[3:])))
    return out


def packed(
    path: Path, images: np.ndarray, labels: list[int], masks: np.ndarray | None = None, blob: bool = False, **changed: Any
) -> Pack:
    """A zip of this format; `changed` overrides members (with a dot in the name) and words of info.json."""
    info = {"dataset": "beasts", "split": "train", "classes": list(NAMES), "count": len(images), "size": SIDE, "cols": COLUMNS}
    info |= {key: value for key, value in changed.items() if "." not in key}
    members = {"info.json": json.dumps(info).encode(), "labels.npy": npy(np.uint8(labels))}
    if blob:
        single = [encoded(image) for image in images]
        members["images.bin"] = b"".join(single)
        members["offsets.npy"] = npy(np.cumsum([0, *map(len, single)]).astype(np.uint32))
    else:
        members |= {f"images/{k:03}.png": raw for k, raw in enumerate(cells(images))}
    if masks is not None:
        members |= {f"masks/{k:03}.png": raw for k, raw in enumerate(cells(masks))}
    members |= {key: value for key, value in changed.items() if "." in key}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, raw in members.items():
            if raw is not None:
                out.writestr(name, raw)
    return Pack({path.name: hashlib.sha256(path.read_bytes()).hexdigest()}, "tiny")


def unpacked(path: Path, *packs: Pack, classes: tuple[str, ...] = NAMES) -> ImageSet:
    pack = Pack({name: sha for one in packs for name, sha in one.files.items()}, "tiny")
    return sheets.read(path, Asked("beasts", "train", classes), packs={"train": pack})


BEASTS, KINDS = noise(11, SIDE, SIDE, 3), [2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 1]


@pytest.mark.parametrize("blob", [False, True], ids=["sheets", "blob"])
def test_packed_sheets(blob: bool, tmp_path: Path) -> None:
    masks = noise(11, SIDE, SIDE) % 3 + 1
    path = tmp_path / "a.zip"
    found = unpacked(path, packed(path, BEASTS, KINDS, masks, blob))
    same(found, BEASTS, KINDS)
    assert all(np.array_equal(found.masks(i), masks[i]) for i in range(11))  # type: ignore[arg-type]
    assert (found.variant, found.classes, str(found)) == ("tiny", NAMES, "beasts train (tiny)")
    assert unpacked(path, packed(path, BEASTS, KINDS), classes=()).classes == NAMES


def test_two_halves(tmp_path: Path) -> None:
    first = packed(tmp_path / "1of2.zip", BEASTS[:7], KINDS[:7])
    second = packed(tmp_path / "2of2.zip", BEASTS[7:], KINDS[7:])
    same(unpacked(tmp_path / "1of2.zip", first, second), BEASTS, KINDS)
    same(unpacked(tmp_path / "2of2.zip", first, second), BEASTS, KINDS)  # whichever was found first
    (tmp_path / "2of2.zip").unlink()
    with pytest.raises(BadFileError, match=r"1of2\.zip is in .* without 2of2\.zip"):
        unpacked(tmp_path / "1of2.zip", first, second)
    other = packed(tmp_path / "2of2.zip", noise(2, SIDE, SIDE, 3), [0, 1], classes=["x", "y", "z"])
    with pytest.raises(BadFileError, match="not halves of one split"):
        unpacked(tmp_path / "1of2.zip", first, other, classes=())


def test_another_sha256_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    pack = packed(path, BEASTS, KINDS)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BadFileError, match=r"a\.zip is damaged or another file: its sha256 is [0-9a-f]{64}, not"):
        unpacked(path, pack)


OFFSETS = np.cumsum([0, *(len(encoded(image)) for image in BEASTS)])


@pytest.mark.parametrize(
    ("blob", "changed", "told"),
    [
        (False, {"count": 12}, r"labels\.npy is uint8 \(11,\), and info\.json says 12"),
        (False, {"count": 16, "labels.npy": npy(np.zeros(16, np.uint8))}, "images/ holds 12 cells, .* 16 images"),
        (False, {"count": -1}, "whole numbers above 0"),
        (False, {"count": 1 << 23, "size": 300, "labels.npy": npy(np.zeros(1 << 23, np.uint8))}, "more than fits"),
        (False, {"size": 5.0}, "whole numbers above 0"),
        (False, {"size": 4}, "not 3 cells of 4 across"),
        (False, {"cols": 4}, "not 4 cells of 5 across"),
        (False, {"classes": ["cat", "dog", "cow"]}, "its classes are not those of beasts"),
        (False, {"classes": "cat"}, "not a list of names"),
        (False, {"labels.npy": npy(np.uint8([3] * 11))}, "image 0: its label is 3, and the labels of beasts go from 0 to 2"),
        (False, {"labels.npy": npy(np.float32([1] * 11))}, "float32"),
        (False, {"labels.npy": npy(np.array([len] * 11, object))}, "not a packed split: Object arrays"),
        (False, {"labels.npy": b"\x93NUMPY"}, "not a packed split"),
        (False, {"info.json": b"[]"}, "not a packed split"),
        (False, {"info.json": b"{}"}, "no 'count'"),
        (False, {"info.json": b"[" * 100_000}, "not a packed split"),
        (False, {"labels.npy": None}, r"labels\.npy"),
        (True, {"images.bin": None}, r"images\.bin"),
        (True, {"offsets.npy": npy(OFFSETS[:-1])}, r"does not cut images\.bin"),
        (True, {"offsets.npy": npy(np.r_[OFFSETS[:-1], OFFSETS[-1] + 1])}, r"does not cut images\.bin"),
        (True, {"offsets.npy": npy(np.r_[0, 1 << 31, OFFSETS[2:]])}, r"does not cut images\.bin"),
        (True, {"size": 4}, "image 0 is 5 x 5: info.json says 4 x 4"),
    ],
)
def test_bad_packs_are_refused(blob: bool, changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    pack = packed(path, BEASTS, KINDS, blob=blob, **changed)
    with pytest.raises(BadFileError, match=told):
        unpacked(path, pack)


def test_bad_pictures_in_packs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    for changed, told in (
        ({"images/000.png": b"broken"}, r"a\.zip, images/000\.png"),
        ({"images/001.png": encoded(noise(7, 15, 3))}, "cut through one"),
        ({"masks/000.png": encoded(np.zeros((20, 15), np.uint8))}, r"masks/: a mask with values 0\.\.0"),
    ):
        pack = packed(path, BEASTS, KINDS, **changed)
        with pytest.raises((BadImageError, BadFileError), match=told):
            unpacked(path, pack)
    path.write_bytes(b"PK not a zip")
    with pytest.raises(BadFileError, match="not a packed split"):
        unpacked(path, Pack({"a.zip": hashlib.sha256(path.read_bytes()).hexdigest()}))


def test_a_zip_bomb_is_refused_by_the_size_it_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zip"
    pack = packed(path, BEASTS, KINDS, **{"labels.npy": bytes(1 << 20)})
    assert path.stat().st_size < 1 << 14
    monkeypatch.setattr(sheets, "MOST_BYTES", 1 << 14)
    with pytest.raises(BadFileError, match="said to have 1,048,576 bytes"):
        unpacked(path, pack)


# --- WebDataset shards -----------------------------------------------------------------------------------------------


def sample(key: str, image: np.ndarray, label: int | bytes | None, ending: str = "png") -> dict[str, bytes]:
    told = {} if label is None else {f"{key}.json": label} if isinstance(label, bytes) else {f"{key}.cls": str(label).encode()}
    return {f"{key}.{ending}": encoded(image), **told}


def shard_folder(root: Path) -> np.ndarray:
    images = noise(5, 4, 6, 3)
    first = sample("a/0001", images[0], 1) | sample("b/0001", images[1], 0, "PNG")
    first |= {"b/0001.seg.png": b"not looked at", "notes.txt.d/x": b""}
    first = {k: v for k, v in first.items() if not k.startswith("notes")}
    tar(root / "train-000000.tar", first)
    tar(
        root / "train-000001.tar",
        {"c.cls": b" 2\n"} | sample("c", images[2], b'{"label": 0, "text": "x"}') | sample("d", images[3], b'{"label": 0}'),
    )
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


def test_shards_in_folders_and_without_splits(tmp_path: Path) -> None:
    images = noise(2, 4, 6, 3)
    tar(tmp_path / "1/train/x.tar", sample("a", images[0], 0))
    tar(tmp_path / "1/test/x.tar", sample("a", images[1], 0))
    for split, image in zip(("train", "test"), images, strict=True):
        same(shards.read(tmp_path / "1", Asked("x", split)), image[None], [0])
    tar(tmp_path / "2/part-1.tar", sample("a", images[1], 0))
    tar(tmp_path / "2/part-0.tar", sample("a", images[0], 1))
    same(shards.read(tmp_path / "2", Asked("x", "train")), images, [1, 0])
    tar(tmp_path / "3/birds1k-train-0.tar", sample("a", images[0], 0))
    tar(tmp_path / "3/birds1k-validation-0.tar", sample("\udcff", images[1], 0))
    for split, image in zip(("train", "test"), images, strict=True):
        same(shards.read(tmp_path / "3", Asked("x", split)), image[None], [0])
    assert all(shards.is_here(tmp_path / name) for name in "123")
    put(tmp_path / "1/train/cat/1.png", images[0])
    put(tmp_path / "2/cat/1.png", images[0])
    assert not shards.is_here(tmp_path / "1") and not shards.is_here(tmp_path / "2")  # what class folders were unpacked from
    with pytest.raises(BadFileError, match=r"no shards of the split 'test': they would be called test-\*\.tar"):
        shards.read(tmp_path / "2", Asked("x", "test"))


def test_shards_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Not in that of the disk."""
    for name, folder in (("train-", "1"), ("train/", "2"), ("part", "3")):
        for k in (3, 0, 6, 1, 5, 2, 4):
            tar(tmp_path / folder / f"{name}{k}.tar", sample("a", BEASTS[k], k))
        same(shards.read(tmp_path / folder, Asked("x", "train")), BEASTS[:7], list(range(7)))


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (sample("a", BEASTS[0], None), r"x\.tar: a has no label"),
        ({"a.cls": b"1"}, r"x\.tar: a has no image"),
        ({"a.cls": b"1"} | sample("b", BEASTS[0], 1) | {"a.png": b""}, "a has no image"),  # not neighbours
        (sample("a", BEASTS[0], b'{"caption": 1}'), "a has no label"),
        (sample("a", BEASTS[0], b"[1]"), r"a\.json is not a label"),
        (sample("a", BEASTS[0], b'{"label": true}'), r"a\.json is not a label"),
        (sample("a", BEASTS[0], b'{"label": 1e3}'), r"a\.json is not a label"),
        (sample("a", BEASTS[0], None) | {"a.cls": b"one"}, r"a\.cls is not a label"),
        (sample("a", BEASTS[0], -1), "a: its label is -1"),
        (sample("a", BEASTS[0], 3), "a: its label is 3, and the labels of beasts go from 0 to 2"),
        ({"readme": b""}, "readme has no image"),
        ({}, "beasts train is empty"),
    ],
)
def test_bad_shards_are_refused(members: dict[str, bytes], told: str, tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", members)
    put(tmp_path / "classes.txt", "cat\ndog\neel\n")
    with pytest.raises(BadFileError, match=told):
        shards.read(tmp_path, Asked("beasts", "train"))


def test_a_label_beyond_all_images_is_refused(tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", sample("a", BEASTS[0], 2_000_000_000))
    with pytest.raises(BadFileError, match="a label is 2000000000, and 1 images cannot"):
        shards.read(tmp_path, Asked("beasts", "train"))


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    """tarfile itself takes a damaged header for the end, and would leave out the rest without a word."""
    members = {name: raw for k in range(3) for name, raw in sample(f"k{k}", noise(9, 9, 3), k).items()}
    whole = tar(tmp_path / "x.tar", members).read_bytes()
    second = whole.index(b"k1.png")
    for damaged in (
        whole[:second],
        whole[: second + 700],
        whole[: second + 100],
        whole[:100],
        b"",
        whole.replace(b"k1.png", b"k1\xffpng"),
    ):
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


def test_rows_that_name_a_file(tmp_path: Path) -> None:
    """As older releases of `datasets` saved them; newer ones put the bytes into the table."""
    rows = [{"image": {"bytes": None, "path": str(tmp_path / f"{k}.png")}} for k in range(2)]
    found = huggingface.TableSet(Asked("beasts", "test"), ["cat"], np.zeros(2, np.int64), rows, "image", "")
    put(tmp_path / "0.png", BEASTS[0])
    assert np.array_equal(found.read(0), BEASTS[0])
    with pytest.raises(BadImageError, match="beasts test, image 1"):
        found.read(1)


def test_hugging_face_columns(hub: Any, tmp_path: Path) -> None:
    held = [{"bytes": encoded(image), "path": None} for image in BEASTS[:3]]
    coarse = hub.ClassLabel(names=["x", "y"]), [1, 1, 0]
    table(hub, held, [2, 1, 0], "fine_label", coarse_label=coarse).save_to_disk(str(tmp_path / "two"))
    same(huggingface.read(tmp_path / "two", Asked("x", "train")), BEASTS[:3], [2, 1, 0])
    with pytest.raises(BadFileError, match="holds one dataset and no splits"):
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
    folder = tmp_path / "saved"
    for images, labels, told in (
        ([*held, None], [0, 1, -1], "image 2: its label is -1"),
        (held, [0, None], "missing"),
        ([], [], "empty"),
    ):
        table(hub, images, labels).save_to_disk(str(tmp_path / told[-5:]))  # type: ignore[arg-type]
        with pytest.raises(BadFileError, match=told):
            huggingface.read(tmp_path / told[-5:], Asked("x", "train"))
    table(hub, [None, *held], [0, 1, 2]).save_to_disk(str(folder))
    with pytest.raises(BadImageError, match="x train, image 0: its row holds no image"):
        huggingface.read(folder, Asked("x", "train")).read(0)
    put(next(folder.glob("*.arrow")), b"broken")
    with pytest.raises(BadFileError, match="is not a dataset saved with save_to_disk"):
        huggingface.read(folder, Asked("x", "train"))
    put(tmp_path / "dict/dataset_dict.json", '{"splits": ["train", "exam"]}')
    with pytest.raises(BadFileError, match="no split 'test': its splits are train, exam"):
        huggingface.read(tmp_path / "dict", Asked("x", "test"))
    put(tmp_path / "dict/dataset_dict.json", "[]")
    with pytest.raises(BadFileError, match=r"dataset_dict\.json is damaged"):
        huggingface.read(tmp_path / "dict", Asked("x", "train"))


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "scipy.io", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    put(tmp_path / "state.json", "{}")
    for read in (
        lambda: huggingface.read(tmp_path, Asked("x", "train")),
        lambda: svhn.read(tmp_path / "state.json", Asked("svhn", "train", DIGITS)),
        lambda: digits.read(Asked("digits", "train", DIGITS)),
    ):
        with pytest.raises(MissingExtraError, match=r"dmst\[(data|demo)\]"):
            read()
