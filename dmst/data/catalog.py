"""Every dataset by name: classes, splits, licence, source, and the forms in which it may lie on disk, in the order of trying.

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

from dmst.data.formats import (
    SPLITS,
    Asked,
    Format,
    cifar,
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
from dmst.data.sets import ImageSet, complete
from dmst.errors import BadFileError, OptionError, choose, unknown_name

VARIABLE = "DMST_DATA"


class Entry(NamedTuple):
    """A dataset. `classes` are the names in label order, or their number where the files bring the names."""

    title: str
    classes: tuple[str, ...] | int
    counts: Mapping[str, int]  # images, by split
    size: str
    licence: str
    source: str
    citation: str
    formats: tuple[Format, ...] = ()
    built_in: Callable[[Asked], ImageSet] | None = None  # needs no data folder
    fetched: bool = False  # `dmst data fetch` can get it


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


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

# packed sheets by sha256
CIFAR10_SHEETS = {
    "train": Pack(
        {
            "cifar10-train-1of2.zip": "50eca2d8fc44c500d47ccddc0d437be1c0556bf40ed3170d57150324bf35fb31",
            "cifar10-train-2of2.zip": "b8dcbbe305f526f9a05a2647601a92d343003b7030501ae8b7c7a053b8f389d1",
        },
        "near-lossless JPEG train",
    ),
    "test": Pack({"cifar10-test.zip": "7b5db931110625e472fb04d3b740b38f8fea7f3071f2adf3d6cf239a2e78bc64"}),  # exact
}
CIFAR100_SHEETS = {
    "train": Pack(
        {
            "cifar100-train-1of2.zip": "2415a96aed0926098015ccfb9780c81ab3f7e89477b21b58c6f2aaa9a81365f2",
            "cifar100-train-2of2.zip": "e03c19162adfafea0e43f4d86efc0ad2df0a459325e503b780b849de97b26a8d",
        },
        "near-lossless JPEG train",
    ),
    "test": Pack(
        {"cifar100-test.zip": "13b57ef3aa61d3cd746ab8d707e597d0f852c54a508c808448ac77b302905b26"}, "near-lossless JPEG test"
    ),
}
SVHN_SHEETS = {
    "train": Pack({"svhn-train.zip": "a0c9359780ccf5d653a7a16cce4c8e23f938a4ca539cb20f034f21f2b6feeff7"}, "re-cropped"),
    "test": Pack({"svhn-test.zip": "3c78c817c0e587f6855463487a97053b4626d1dd413c703cb82703d8515b1007"}, "re-cropped"),
}
PETS_SHEETS = {
    "train": Pack({"pets128-trainval.zip": "481ec3be3e1d16c79a6151dd94a8b4636da8f33177d4236be985d377976b7a46"}, "128 px"),
    "test": Pack({"pets128-test.zip": "adb21b1222e0fbd7e4856db9ddd48966a54a2e68b42fa6afbfb13fbc8dd0b246"}, "128 px"),
}
SAMPLE_SHEETS = {
    "sample": Pack(
        {"imagenet-sample1000-224.zip": "96b9650d3efdd72395a0e2b4665f415898e67b7ee5e2b0956bb1bea6070874e0"},
        "1,000-image ImageNet sample",
    )
}

CATALOG: Mapping[str, Entry] = {
    "digits": Entry(
        title="Digits of scikit-learn",
        classes=DIGITS,
        counts={"train": 1438, "test": 359},
        size="8 x 8 grey",
        licence="CC BY 4.0",
        source="scikit-learn, from the UCI Machine Learning Repository",
        citation="E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, 1998",
        built_in=digits.read,
    ),
    "cifar10": Entry(
        title="CIFAR-10",
        classes=CIFAR10,
        counts={"train": 50_000, "test": 10_000},
        size="32 x 32",
        licence="none stated by the authors; research use",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        formats=(
            sheets.form(CIFAR10_SHEETS),
            cifar.form("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
            folders.form("cifar10"),
            cifar.python_form("cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
        ),
        fetched=True,
    ),
    "cifar100": Entry(
        title="CIFAR-100",
        classes=CIFAR100,
        counts={"train": 50_000, "test": 10_000},
        size="32 x 32",
        licence="none stated by the authors; research use",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        formats=(
            sheets.form(CIFAR100_SHEETS),
            cifar.form("cifar-100-binary", "cifar-100-binary.tar.gz"),
            folders.form("cifar100"),
            cifar.python_form("cifar-100-python", "cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
        ),
        fetched=True,
    ),
    "svhn": Entry(
        title="SVHN, cropped digits",
        classes=DIGITS,
        counts={"train": 73_257, "test": 26_032},
        size="32 x 32",
        licence="non-commercial use only",
        source="http://ufldl.stanford.edu/housenumbers",
        citation="Y. Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, 2011",
        formats=(sheets.form(SVHN_SHEETS), svhn.form(), folders.form("svhn")),
        fetched=True,
    ),
    "pets": Entry(
        title="Oxford-IIIT Pets",
        classes=PETS,
        counts={"train": 3_680, "test": 3_669},
        size="of any size, with masks",
        licence="CC BY-SA 4.0; the images belong to their owners",
        source="https://www.robots.ox.ac.uk/~vgg/data/pets",
        citation="O. M. Parkhi et al., Cats and Dogs, 2012",
        formats=(sheets.form(PETS_SHEETS), pets.form(), folders.form("pets")),
        fetched=True,
    ),
    "food101": Entry(
        title="Food-101",
        classes=101,
        counts={"train": 75_750, "test": 25_250},
        size="of any size, at most 512",
        licence="none stated by the authors; the images belong to their owners; research use",
        source="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101",
        citation="L. Bossard et al., Food-101: Mining Discriminative Components with Random Forests, 2014",
        formats=(food.form(), folders.form("food101")),
        fetched=True,
    ),
    "imagenet": Entry(
        title="ImageNet-1K",
        classes=1000,
        counts={"train": 1_281_167, "test": 50_000},
        size="of any size",
        licence="non-commercial research only; the images belong to their owners",
        source="https://image-net.org, with an account; the test split is the validation set, as everywhere",
        citation="O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, 2015",
        formats=(imagenet.form(),),
    ),
    "imagenet-sample": Entry(
        title="ImageNet sample",
        classes=1000,
        counts={"sample": 1_000},
        size="224 x 224",
        licence="non-commercial research only; the images belong to their owners",
        source="one image of every class, of which split is not known: no accuracy from it means anything",
        citation="O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, 2015",
        formats=(sheets.form(SAMPLE_SHEETS),),
    ),
}


def open_set(name_or_folder: str | Path, split: str, *, data_dir: str | Path | None = None) -> ImageSet:
    """A split of a dataset of the catalog, or of a folder (also one below the data folder)."""
    name = str(name_or_folder)
    if name not in CATALOG:
        return complete(_open_folder(name, split, data_dir))
    entry = CATALOG[name]
    choose(f"split of {name}", split, entry.counts)
    asked = Asked(name, split, entry.classes if isinstance(entry.classes, tuple) else ())
    found = entry.built_in(asked) if entry.built_in else _found(entry, asked, _data_folder(name, data_dir))
    _right_number_of_classes(entry, found)
    if len(found) != entry.counts[split]:
        said = f"{len(found):,} of {entry.counts[split]:,} images"
        found.variant = f"{found.variant}, {said}" if found.variant else said
    return complete(found)


def _found(entry: Entry, asked: Asked, folder: Path) -> ImageSet:
    for form in entry.formats:
        for place in form.places[asked.split]:
            if (folder / place).exists():
                return form.read(folder / place, asked)
    looked = "; ".join(f"{' or '.join(form.places[asked.split])} ({form.what})" for form in entry.formats)
    remedy = (
        f"Get it with `dmst data fetch {asked.name}`, or" if entry.fetched else f"Get it from its source ({entry.source}), and"
    )
    raise BadFileError(
        f"{asked.name} {asked.split} is not in {folder}. Looked for, in this order: {looked}. "
        f"{remedy} set {VARIABLE} (or data_dir, --data-dir) to the folder that contains it."
    )


def _data_folder(name: str, data_dir: str | Path | None) -> Path:
    told = data_dir if data_dir is not None else os.environ.get(VARIABLE)
    if not told:
        raise OptionError(
            f"where is {name}? Set the environment variable {VARIABLE} (or data_dir, --data-dir) to the folder that has it."
        )
    if not Path(told).is_dir():
        raise OptionError(f"{'data_dir' if data_dir is not None else VARIABLE} is {str(told)!r}, which is not a folder.")
    return Path(told)


def _right_number_of_classes(entry: Entry, found: ImageSet) -> None:
    wanted = entry.classes if isinstance(entry.classes, int) else len(entry.classes)
    if len(found.classes) != wanted:
        raise BadFileError(
            f"{found} has {len(found.classes)} classes, {found.classes[0]} to {found.classes[-1]}; {entry.title} has {wanted}. "
            "To open only a part of it, give the path of its folder, not its name."
        )


def _open_folder(name: str, split: str, data_dir: str | Path | None) -> ImageSet:
    below = data_dir if data_dir is not None else os.environ.get(VARIABLE)
    places = [Path(name), *([Path(below) / name] if below else [])]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise unknown_name("dataset, and not a folder either:", name, CATALOG)
    choose(f"split of {name}", split, SPLITS)
    read = next((form.read for form in (huggingface, shards) if form.is_here(folder)), folders.read)
    return read(folder, Asked(folder.resolve().name, split))
