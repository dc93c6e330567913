"""Every dataset by name: classes, splits, licence, source, pixel statistics, its layout on disk, and its official files.

    open_set("cifar10", "train", data_dir=...)     a name of CATALOG; the folder, or the environment variable DMST_DATA
    open_set("photos/birds", "train")              any folder: class folders, a Hugging Face dataset, WebDataset shards

Nothing is downloaded here, no other folder is searched. A file that is there and damaged is an error, not passed over. A set
with another number of images than the official split says so in its `variant`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from dmst.data.formats import SPLITS, Asked, arrays, folders, huggingface, lists, reading, shards
from dmst.data.sets import ImageSet
from dmst.errors import BadFileError, OptionError, choose, unknown_name

VARIABLE = "DMST_DATA"


class Statistics(NamedTuple):
    """Mean and standard deviation of the pixels (0 to 1), per channel: how images of the dataset are normalised."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class File(NamedTuple):
    """A file as its authors publish it; `unpacked` is the folder, beside it, that comes out of an archive.

    Sizes and md5 are those that the authors' pages, their servers and torchvision state; md5 is all that the authors publish.
    """

    path: str  # below the data folder
    bytes: int
    md5: str
    unpacked: str = ""


class Entry(NamedTuple):
    """A dataset. `classes` are the names in label order, or their number where the files bring the names."""

    title: str
    classes: tuple[str, ...] | int
    counts: Mapping[str, int]  # images, by split
    size: str
    licence: str
    source: str
    citation: str
    statistics: Statistics
    layout: str  # in a message: "official binary batches"
    places: Mapping[str, tuple[str, ...]]  # by split, below the data folder: the first that exists is handed to `read`
    read: Callable[[Path, Asked], ImageSet]
    site: str = ""  # where `dmst data fetch` gets the files
    files: tuple[File, ...] = ()
    by_hand: str = ""  # where it gets none: what to do

    @property
    def class_count(self) -> int:
        return self.classes if isinstance(self.classes, int) else len(self.classes)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def both(*places: str) -> dict[str, tuple[str, ...]]:
    return {"train": places, "test": places}


CIFAR10 = words("airplane automobile bird cat deer dog frog horse ship truck")
CIFAR100 = words(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
    forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
    mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
    wolf woman worm"""
)
PETS = words(
    """Abyssinian american_bulldog american_pit_bull_terrier basset_hound beagle Bengal Birman Bombay boxer British_Shorthair
    chihuahua Egyptian_Mau english_cocker_spaniel english_setter german_shorthaired great_pyrenees havanese japanese_chin
    keeshond leonberger Maine_Coon miniature_pinscher newfoundland Persian pomeranian pug Ragdoll Russian_Blue saint_bernard
    samoyed scottish_terrier shiba_inu Siamese Sphynx staffordshire_bull_terrier wheaten_terrier yorkshire_terrier"""
)
DIGITS = words("0 1 2 3 4 5 6 7 8 9")

IMAGENET = Statistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = Statistics((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # SVHN's too: weights of one start the other
TINY = Statistics((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))  # as commonly published
REGISTER = """ImageNet is not fetched: its terms ask every user to register.
Make an account at https://image-net.org and get ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, or join the
ImageNet Object Localization Challenge on Kaggle. These layouts are read, below {folder}/imagenet or {folder}:
  train/nXXXXXXXX/*.JPEG    1,000 folders, 1,281,167 images
  val/nXXXXXXXX/*.JPEG      the same folders, 50,000 images; or all of them in val/, with LOC_val_solution.csv beside it
Then `dmst data info imagenet` says what it finds."""
UNZIP = """Tiny-ImageNet is not fetched: its zip is published without a checksum.
Get http://cs231n.stanford.edu/tiny-imagenet-200.zip and unpack it in {folder}: it becomes {folder}/tiny-imagenet-200.
Then `dmst data info tinyimagenet` says what it finds."""

CIFAR_10 = Entry(
    title="CIFAR-10",
    classes=CIFAR10,
    counts={"train": 50_000, "test": 10_000},
    size="32 x 32",
    licence="none stated by the authors; research use",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    statistics=CIFAR,
    layout="official binary batches",
    places=both("cifar-10-batches-bin"),
    read=arrays.read_cifar,
    site="https://www.cs.toronto.edu/~kriz",
    files=(File("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"),),
)

CATALOG: Mapping[str, Entry] = {
    "digits": Entry(
        title="Digits of scikit-learn",
        classes=DIGITS,
        counts={"train": 1438, "test": 359},
        size="8 x 8 grey",
        licence="CC BY 4.0",
        source="scikit-learn, from the UCI Machine Learning Repository",
        citation="E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, 1998",
        statistics=Statistics((0.5,), (0.5,)),
        layout="in scikit-learn",
        places={},
        read=arrays.read_digits,
        by_hand="digits needs no download: it comes with scikit-learn (pip install 'dmst[data]').",
    ),
    "cifar10": CIFAR_10,
    "cifar100": CIFAR_10._replace(
        title="CIFAR-100",
        classes=CIFAR100,
        places=both("cifar-100-binary"),
        files=(File("cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary"),),
    ),
    "svhn": Entry(
        title="SVHN, cropped digits",
        classes=DIGITS,
        counts={"train": 73_257, "test": 26_032},
        size="32 x 32",
        licence="non-commercial use only",
        source="http://ufldl.stanford.edu/housenumbers",
        citation="Y. Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, 2011",
        statistics=CIFAR,
        layout="official .mat files",
        places={split: (f"{split}_32x32.mat", f"svhn/{split}_32x32.mat") for split in SPLITS},
        read=arrays.read_svhn,
        site="https://ufldl.stanford.edu/housenumbers",
        files=(
            File("train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
            File("test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
    "pets": Entry(
        title="Oxford-IIIT Pets",
        classes=PETS,
        counts={"train": 3_680, "test": 3_669},
        size="of any size, with masks",
        licence="CC BY-SA 4.0; the images belong to their owners",
        source="https://www.robots.ox.ac.uk/~vgg/data/pets",
        citation="O. M. Parkhi et al., Cats and Dogs, 2012",
        statistics=IMAGENET,
        layout="official images/ and annotations/",
        places=both("oxford-iiit-pet/annotations", "pets/annotations", "annotations"),
        read=lists.read_pets,
        site="https://www.robots.ox.ac.uk/~vgg/data/pets/data",
        files=(
            File("oxford-iiit-pet/images.tar.gz", 791_918_971, "5c4f3ee8e5d25df40f4fd59a7f44e54c", "images"),
            File("oxford-iiit-pet/annotations.tar.gz", 19_173_078, "95a8c909bbe2e81eed6a22bccdf3f68f", "annotations"),
        ),
    ),
    "food101": Entry(
        title="Food-101",
        classes=101,
        counts={"train": 75_750, "test": 25_250},
        size="of any size, at most 512",
        licence="none stated by the authors; the images belong to their owners; research use",
        source="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101",
        citation="L. Bossard et al., Food-101: Mining Discriminative Components with Random Forests, 2014",
        statistics=IMAGENET,
        layout="official images/ and meta/",
        places=both("food-101/meta", "food101/meta", "meta"),
        read=lists.read_food,
        site="https://data.vision.ee.ethz.ch/cvl",
        files=(File("food-101.tar.gz", 4_996_278_331, "85eeb15f3717b99a5da872d97d918f87", "food-101"),),
    ),
    "tinyimagenet": Entry(
        title="Tiny-ImageNet-200",
        classes=200,
        counts={"train": 100_000, "test": 10_000},
        size="64 x 64, with boxes",
        licence="non-commercial research only; the images belong to their owners",
        source="http://cs231n.stanford.edu/tiny-imagenet-200.zip; the test split is the validation set, which has labels",
        citation="Y. Le, X. Yang, Tiny ImageNet Visual Recognition Challenge, 2015",
        statistics=TINY,
        layout="official train/ and val/",
        places=both("tiny-imagenet-200"),
        read=lists.read_tiny_imagenet,
        by_hand=UNZIP,
    ),
    "imagenet": Entry(
        title="ImageNet-1K",
        classes=1000,
        counts={"train": 1_281_167, "test": 50_000},
        size="of any size",
        licence="non-commercial research only; the images belong to their owners",
        source="https://image-net.org, with an account; the test split is the validation set, as everywhere",
        citation="O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, 2015",
        statistics=IMAGENET,
        layout="train/ and val/",
        places={
            split: tuple(f"{folder}{name}" for folder in ("imagenet/", "ILSVRC2012/", f"{lists.CHALLENGE}/", ""))
            for split, name in (("train", "train"), ("test", "val"))
        },
        read=lists.read_imagenet,
        by_hand=REGISTER,
    ),
}


def open_set(name_or_folder: str | Path, split: str, *, data_dir: str | Path | None = None) -> ImageSet:
    """A split of a dataset of the catalog, or of a folder (also one below the data folder)."""
    name, told = str(name_or_folder), data_dir if data_dir is not None else os.environ.get(VARIABLE)
    data_folder = Path(told) if told else None
    if name not in CATALOG:
        return _open_folder(name, split, data_folder)
    entry = CATALOG[name]
    choose(f"split of {name}", split, entry.counts)
    place = _place(name, split, data_folder) if entry.places else Path()
    with reading(place):
        found = entry.read(place, Asked(name, split, entry.classes if isinstance(entry.classes, tuple) else ()))
    if len(found.classes) != entry.class_count:
        raise BadFileError(
            f"{found} has {len(found.classes)} classes, {found.classes[0]} to {found.classes[-1]}; {entry.title} has "
            f"{entry.class_count}. To open only a part of it, give the path of its folder, not its name."
        )
    if len(found) != entry.counts[split]:
        found.variant = f"{len(found):,} of {entry.counts[split]:,} images"
    return found


def located(entry: Entry, split: str, folder: Path) -> Path | None:
    """Where the split lies in the data folder."""
    return next((folder / place for place in entry.places[split] if (folder / place).exists()), None)


def _place(name: str, split: str, folder: Path | None) -> Path:
    """Where the split of a dataset of the catalog lies, or an error that says how it comes there."""
    remedy = f"Set the environment variable {VARIABLE} (or data_dir, --data-dir) to the folder that has it."
    if folder is None:
        raise OptionError(f"where is {name}? {remedy}")
    entry = CATALOG[name]
    if place := located(entry, split, folder):
        return place
    pickled = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(name, "")
    if pickled and (folder / pickled).exists():
        raise BadFileError(
            f"{folder / pickled} is a set of pickles, which can run code when they are read: refused. Get the binary archive "
            f"{entry.files[0].path} instead: dmst data fetch {name}."
        )
    raise BadFileError(
        f"{name} {split} is not in {folder}. Looked for: {' or '.join(entry.places[split])} ({entry.layout}). "
        f"`dmst data fetch {name}` gets it, or says how. If it is elsewhere: {remedy}"
    )


def _open_folder(name: str, split: str, data_folder: Path | None) -> ImageSet:
    places = [Path(name), *([data_folder / name] if data_folder else [])]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise unknown_name("dataset, and not a folder either:", name, CATALOG)
    choose(f"split of {name}", split, SPLITS)
    with reading(folder):
        read = next((form.read for form in (huggingface, shards) if form.is_here(folder)), folders.read)
        return read(folder, Asked(folder.resolve().name, split))
