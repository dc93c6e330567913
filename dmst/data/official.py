"""The files of each dataset as they are published, by size and checksum: `dmst data fetch` gets them, `verify` compares.

Sizes and md5 are those that the authors' pages, their servers and torchvision state; md5 is all that the authors publish.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from dmst.data import catalog
from dmst.data.formats.sheets import Pack

Tick = Callable[[str, int, int], None]  # what is being done, how far, of how much
CHUNK = 1 << 20


class File(NamedTuple):
    """A file as its authors publish it; `unpacked` is the folder that comes out of an archive that is not read as it is."""

    path: str  # below the data folder
    url: str
    bytes: int
    md5: str
    unpacked: str = ""


TORONTO = "https://www.cs.toronto.edu/~kriz"
STANFORD = "https://ufldl.stanford.edu/housenumbers"
OXFORD = "https://www.robots.ox.ac.uk/~vgg/data/pets/data"
ZURICH = "https://data.vision.ee.ethz.ch/cvl"
FILES: Mapping[str, tuple[File, ...]] = {
    "cifar10": (
        File("cifar-10-binary.tar.gz", f"{TORONTO}/cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
    ),
    "cifar100": (
        File("cifar-100-binary.tar.gz", f"{TORONTO}/cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
    ),
    "svhn": (
        File("train_32x32.mat", f"{STANFORD}/train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
        File("test_32x32.mat", f"{STANFORD}/test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
    ),
    "pets": (
        File(
            "oxford-iiit-pet/images.tar.gz",
            f"{OXFORD}/images.tar.gz",
            791_918_971,
            "5c4f3ee8e5d25df40f4fd59a7f44e54c",
            "oxford-iiit-pet/images",
        ),
        File(
            "oxford-iiit-pet/annotations.tar.gz",
            f"{OXFORD}/annotations.tar.gz",
            19_173_078,
            "95a8c909bbe2e81eed6a22bccdf3f68f",
            "oxford-iiit-pet/annotations",
        ),
    ),
    "food101": (
        File("food-101.tar.gz", f"{ZURICH}/food-101.tar.gz", 4_996_278_331, "85eeb15f3717b99a5da872d97d918f87", "food-101"),
    ),
}
PACKED: Mapping[str, Mapping[str, Pack]] = {
    "cifar10": catalog.CIFAR10_SHEETS,
    "cifar100": catalog.CIFAR100_SHEETS,
    "svhn": catalog.SVHN_SHEETS,
    "pets": catalog.PETS_SHEETS,
    "imagenet-sample": catalog.SAMPLE_SHEETS,
}
NOT_FETCHED = {
    "digits": "digits needs no download: it comes with scikit-learn (pip install 'dmst[data]').",
    "imagenet": """ImageNet is not fetched: its terms ask every user to register.
Make an account at https://image-net.org and get ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, or join the
ImageNet Object Localization Challenge on Kaggle. These layouts are read, below {folder}/imagenet or {folder}:
  train/nXXXXXXXX/*.JPEG    1,000 folders, 1,281,167 images
  val/nXXXXXXXX/*.JPEG      the same folders, 50,000 images; or all of them in val/, with LOC_val_solution.csv beside it
Then `dmst data info imagenet` says what it finds.""",
    "imagenet-sample": "imagenet-sample is published nowhere: put imagenet-sample1000-224.zip into {folder} if you have it.",
}


def no_tick(what: str, done: int, total: int) -> None:
    """For those who do not look."""


def differs(path: Path, file: File, tick: Tick) -> tuple[str, str]:
    """How `path` differs from what is published (empty: not at all), and its sha256."""
    if (size := path.stat().st_size) != file.bytes:
        return f"it has {size:,} bytes instead of {file.bytes:,}", ""
    md5, sha256 = digests(path, tick)
    return ("" if md5 == file.md5 else f"its md5 is {md5} instead of {file.md5}"), sha256


def digests(path: Path, tick: Tick) -> tuple[str, str]:
    """md5, to compare with what is published, and sha256, which nobody can forge."""
    md5, sha256, total, done = hashlib.md5(usedforsecurity=False), hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            md5.update(data)
            sha256.update(data)
            done += len(data)
            tick(f"check {path.name.removesuffix('.part')}", done, total)
    return md5.hexdigest(), sha256.hexdigest()
