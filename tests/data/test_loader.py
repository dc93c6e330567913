"""Streams: the same bits for any number of processes, workers and micro-steps, from any step on; loud failures."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dmst.data.augment import Augment
from dmst.data.loader import Batch, EvalStream, Shard, TrainStream, View
from dmst.data.sets import ArraySet, ImageSet
from dmst.errors import BadImageError, DmstError, OptionError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # from Python 3.12 on

SIZE, CLASSES = 12, 5
VIEW = View(SIZE, 3, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))
SOME = Augment(crop_padding=2, flip=0.5, cutout=3, mixup=0.8, cutmix=1.0, mixup_prob=0.9)
EVERYTHING = Augment(
    resized_crop=0.4,
    crop_padding=2,
    flip=0.5,
    rotate=20.0,
    zoom=0.2,
    shift=1.0,
    aa="rand-m9-mstd0.5-inc1-p1",
    reprob=0.5,
    cutout=3,
    mixup=0.8,
    cutmix=1.0,
)


def toy(n: int = 40, c: int = 3, size: int = SIZE) -> ArraySet:
    rng = np.random.default_rng(n)
    images = rng.integers(0, 256, (n, size, size, c), dtype=np.uint8)
    return ArraySet("toy", "train", [f"class {k}" for k in range(CLASSES)], np.arange(n) % CLASSES, images)


def ramps() -> ArraySet:
    """Images that tell where and how large a crop is: values grow evenly, along a direction of each channel's own."""
    rng = np.random.default_rng(0)
    slopes = rng.uniform(-9, 9, (40, 1, 1, 3, 2))
    y, x = np.mgrid[:9, :11][..., None] - np.array([4, 5])[:, None, None, None]
    images = 127 + slopes[..., 0] * y + slopes[..., 1] * x
    return ArraySet("ramps", "train", ["one"], np.zeros(40, np.int64), images.astype(np.uint8))


class Files(ImageSet):
    """A set without an array: images of two sizes; `refused` are damaged, `deadly` kill the worker that reads them, and where
    `broken` are the disk itself fails."""

    def __init__(
        self,
        n: int = 40,
        c: int = 3,
        refused: tuple[int, ...] = (),
        deadly: tuple[int, ...] = (),
        broken: tuple[int, ...] = (),
        one_size: bool = False,
    ) -> None:
        super().__init__("files", "train", [f"class {k}" for k in range(CLASSES)], np.arange(n) % CLASSES, fingerprint="")
        self.c, self.refused, self.deadly, self.broken, self.one_size = c, refused, deadly, broken, one_size

    def where(self, index: int) -> str:
        return f"folder/{index}.jpg"

    def read(self, index: int) -> np.ndarray:
        if index in self.refused:
            raise BadImageError(self.where(index), "truncated")
        if index in self.broken:
            raise OSError("the disk is gone")
        if index in self.deadly and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        shape = (SIZE, SIZE) if self.one_size else (17, 23) if index % 2 else (31, 19)
        return np.random.default_rng(index).integers(0, 256, (*shape, self.c), dtype=np.uint8)


def stream(image_set: ImageSet | None = None, augment: Augment = SOME, **options: Any) -> TrainStream:
    return TrainStream(image_set or toy(), VIEW, augment, **{"batch_size": 16, "seed": 3} | options)


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(torch.cat(part) for part in zip(*batches, strict=True)))


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assembled(first: int, last: int, world: int, micro_steps: int, *given: Any, **options: Any) -> list[Batch]:
    """The global batches, put together from what each process gets."""
    ranks = []
    for rank in range(world):
        mine = list(stream(*given, shard=Shard(rank, world, micro_steps), **options).batches(first, last))
        assert len(mine) == (last - first) * micro_steps
        ranks.append(mine)
    steps = range(last - first)
    return [joined([batch for mine in ranks for batch in mine[i * micro_steps : (i + 1) * micro_steps]]) for i in steps]


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [SOME, EVERYTHING], ids=["some", "everything"])
def test_resident_batches_do_not_depend_on_who_asks(augment: Augment) -> None:
    """40 images, batches of 16: two steps an epoch; five steps reach into the third."""
    whole = list(stream(augment=augment).batches(0, 5))
    assert [x.shape for x in whole[0]] == [(16, 3, SIZE, SIZE), (16, CLASSES), (16,), (16,)]
    assert [x.dtype for x in whole[0]] == [torch.float32, torch.float32, torch.int64, torch.int64]
    for world, micro_steps, first in ((2, 1, 0), (4, 1, 1), (1, 2, 3), (2, 2, 0)):
        parts = assembled(first, 5, world, micro_steps, None, augment)
        assert all(same(a, b) for a, b in zip(parts, whole[first:], strict=True)), (world, micro_steps, first)


def test_worker_batches_do_not_depend_on_who_asks() -> None:
    options: dict[str, Any] = {"path": "workers"}
    whole = list(stream(Files(), EVERYTHING, **options).batches(0, 5))
    for world, micro_steps, first, workers in ((2, 1, 0, 0), (1, 2, 3, 0), (1, 1, 1, 2)):
        parts = assembled(first, 5, world, micro_steps, Files(), EVERYTHING, workers=workers, **options)
        assert all(same(a, b) for a, b in zip(parts, whole[first:], strict=True)), (world, micro_steps, first, workers)


@pytest.mark.compile
def test_compiled_is_the_same() -> None:
    plain = list(stream(augment=EVERYTHING).batches(1, 4))
    fast = list(stream(augment=EVERYTHING, compiled="aot_eager").batches(1, 4))
    assert all(same(a, b) for a, b in zip(plain, fast, strict=True))


def test_both_paths_show_the_same() -> None:
    """Where nothing is interpolated, to the bit; else the same images, and crops that are alike."""
    augment = Augment(crop_padding=2, flip=0.5, aa="rand-m9-inc1", reprob=0.5, cutout=3, mixup=0.8)
    for one, two in zip(*(stream(augment=augment, path=path).batches(0, 5) for path in ("resident", "workers")), strict=True):
        assert same(one, two)
    crops = Augment(resized_crop=0.5, flip=0.5, interpolation="bilinear")
    for one, two in zip(*(stream(ramps(), crops, path=path).batches(0, 3) for path in ("resident", "workers")), strict=True):
        assert torch.equal(one.index, two.index)
        apart = ((one.images - two.images) * torch.tensor(VIEW.std)[:, None, None] * 255).abs()
        assert apart[..., 2:-2, 2:-2].max() < 1.01 and one.images.std() > 0.3  # at the edges of a box Pillow sees less


def test_epochs_and_seeds_differ() -> None:
    batches = list(stream(augment=Augment(crop_padding=2, flip=0.5), batch_size=40).batches(0, 3))
    orders = [b.index.tolist() for b in batches]
    assert all(sorted(order) == list(range(40)) for order in orders)  # every image once an epoch
    assert orders[0] != orders[1] != orders[2] and orders[0] != orders[2]
    by_image = [b.images[b.index.argsort()] for b in batches]
    changed = [(x != by_image[0]).flatten(1).any(1).float().mean() for x in by_image[1:]]
    assert min(changed) > 0.8  # of 50 crops and mirrors, another one
    other = next(stream(augment=Augment(), batch_size=40, seed=3 + 2**32).batches(0, 1))
    assert other.index.tolist() != orders[0]


def test_what_is_left_over_is_not_shown() -> None:
    s = stream(batch_size=16)
    assert s.steps_per_epoch == 2 and [s.epoch_of(step) for step in range(5)] == [0, 0, 1, 1, 2]
    shown = torch.cat([b.index for b in s.batches(2, 4)])
    assert len(shown.unique()) == 32


# --- what is in a batch ----------------------------------------------------------------------------------------------


def test_images_are_normalised_and_labels_their_own() -> None:
    s = toy()
    batch = next(stream(s, Augment()).batches(0, 1))
    pixels = torch.from_numpy(s.pixels()[batch.index.numpy()]).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(x)[:, None, None] for x in (VIEW.mean, VIEW.std))
    assert torch.equal(batch.images, (pixels.float() / 255 - mean) / std)
    assert torch.equal(batch.labels, batch.index % CLASSES)
    assert torch.equal(batch.targets, torch.eye(CLASSES)[batch.labels])


def test_pairs_are_neighbours_of_the_epoch() -> None:
    for batch in stream(augment=Augment(mixup=1.0)).batches(0, 4):
        for i in range(0, 16, 2):
            pair = set(batch.labels[i : i + 2].tolist())
            for j in (i, i + 1):
                assert set(batch.targets[j].nonzero()[:, 0].tolist()) <= pair
                torch.testing.assert_close(batch.targets[j].sum(), torch.tensor(1.0))
        assert (batch.targets.max(1).values < 1).float().mean() > 0.4


def test_a_whole_batch_mixed_says_so() -> None:
    s = stream(augment=Augment(mixup=1.0, mixup_mode="batch"))
    assert any("mixup_mode=batch" in note for note in s.notes) and stream().notes == []
    plain = next(stream(augment=Augment()).batches(0, 1))
    batch = next(s.batches(0, 1))
    share = ((batch.images - plain.images) / (plain.images.flip(0) - plain.images)).nanmedian()
    torch.testing.assert_close(batch.images, torch.lerp(plain.images, plain.images.flip(0), share), atol=1e-4, rtol=1e-3)
    odd = stream(augment=Augment(mixup=1.0, mixup_mode="batch"), batch_size=5)
    assert len(next(odd.batches(0, 1)).images) == 5
    assert len({float(b.targets.max(1).values.min()) for b in s.batches(0, 6)}) == 6  # each batch its own share


@pytest.mark.parametrize("make", [lambda c: toy(c=c), lambda c: Files(c=c)], ids=["resident", "workers"])
def test_grey_images(make: Any) -> None:
    batch = next(stream(make(1), Augment()).batches(0, 1))
    back = batch.images * torch.tensor(VIEW.std)[:, None, None] + torch.tensor(VIEW.mean)[:, None, None]
    torch.testing.assert_close(back[:, 0], back[:, 1], atol=1e-6, rtol=0)
    torch.testing.assert_close(back[:, 0], back[:, 2], atol=1e-6, rtol=0)
    grey = View(SIZE, 1, (0.5,), (0.5,))
    augment = Augment(flip=0.5, aa="rand-m9-inc1", reprob=0.5)
    assert next(TrainStream(make(1), grey, augment, batch_size=8, seed=0).batches(0, 1)).images.shape == (8, 1, SIZE, SIZE)
    for kind in (TrainStream, EvalStream):
        options = {"augment": Augment(), "seed": 0} if kind is TrainStream else {}
        with pytest.raises(OptionError, match=r"3 channels and the model takes 1: choose a model with in_chans=3"):
            kind(make(3), grey, batch_size=8, **options)


def test_repeated_augmentation() -> None:
    """512 places for 600 images, each three times, in a batch or across its end; copies differ, and none is beside another."""
    s = stream(toy(600), Augment(crop_padding=2, flip=0.5, repeats=3), batch_size=64)
    assert s.steps_per_epoch == 8
    batches = list(s.batches(0, 8))
    shown = Counter(torch.cat([b.index for b in batches]).tolist())
    assert sum(shown.values()) == 512 and Counter(shown.values()) == {3: 170, 2: 1}
    different = []
    for batch in batches:
        index = batch.index.tolist()
        assert all(a != b for a, b in zip(index[::2], index[1::2], strict=True))
        first: dict[int, Tensor] = {}
        for i, image in zip(index, batch.images, strict=True):
            different.append(not torch.equal(first.setdefault(i, image), image))
    assert 0.6 < np.mean(different) < 2 / 3  # all but the first ones, but for crops that happen to be the same
    parts = assembled(3, 5, 2, 2, toy(600), s.augment, batch_size=64)
    assert all(same(a, b) for a, b in zip(parts, batches[3:5], strict=True))


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [toy, Files], ids=["resident", "workers"])
@pytest.mark.parametrize(("n", "world"), [(13, 3), (2, 3)])
def test_every_image_is_evaluated_once(n: int, world: int, make: Any) -> None:
    seen: Counter[int] = Counter()
    for rank in range(world):
        for batch in EvalStream(make(n), VIEW, batch_size=4, shard=Shard(rank, world)):
            assert len({len(x) for x in batch}) == 1 and 0 < len(batch.index) <= 4
            seen.update(batch.index.tolist())
            assert torch.equal(batch.labels, batch.index % CLASSES)
    assert seen == Counter(range(n))


def test_evaluation_resizes_and_cuts_as_said() -> None:
    """Both paths, to one level."""
    view = VIEW._replace(size=16, crop_pct=0.8, interpolation="bilinear")
    s = toy(6, size=25)
    resident, by_worker = (list(EvalStream(s, view, batch_size=4, path=path)) for path in ("resident", "workers"))
    for one, two in zip(resident, by_worker, strict=True):
        assert ((one.images - two.images) * torch.tensor(view.std)[:, None, None] * 255).abs().max() < 1.01
    again = list(EvalStream(s, view, batch_size=4, path="workers", workers=2))
    assert all(same(a, b) for a, b in zip(again, by_worker, strict=True))


# --- paths and refusals ----------------------------------------------------------------------------------------------


def test_paths() -> None:
    assert stream().path == "resident" and stream(path="workers").path == "workers"
    assert stream(Files()).path == "workers"
    read = stream(Files(one_size=True), Augment(), path="resident")
    assert read.path == "resident"
    for one, two in zip(read.batches(0, 2), stream(Files(one_size=True), Augment()).batches(0, 2), strict=True):
        assert same(one, two)
    with pytest.raises(OptionError, match=r"folder/1.jpg has shape \(17, 23, 3\) and folder/0.jpg has \(31, 19, 3\)"):
        stream(Files(), path="resident")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 18, "shard": Shard(0, 4)}, r"18: it must divide into 4 processes x 1 micro-steps; .*--batch 16"),
        ({"batch_size": 20, "shard": Shard(0, 2, 2)}, r"of 5 leaves one alone: .*--batch 24.*mixup_mode=batch"),
        ({"batch_size": 48}, r"40 images are fewer than one batch of 48: try --batch 40"),
        ({"augment": Augment(repeats=3)}, r"40 images, of which repeated .* 256, here 0, are fewer than one batch"),
        ({"augment": Augment(crop_padding=12)}, r"crop_padding is 12"),
        ({"path": "disk"}, r"unknown path 'disk'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stream(**options)


# --- worker processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named(workers: int) -> None:
    with pytest.raises(BadImageError) as caught:
        list(stream(Files(refused=(7,)), Augment(), workers=workers).batches(0, 3))
    assert (caught.value.name, caught.value.reason) == ("folder/7.jpg", "truncated")
    start = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):  # and nobody has died of it
        list(stream(Files(broken=(7,)), Augment(), workers=workers).batches(0, 3))
    gc.collect()
    assert time.monotonic() - start < 5  # nor is one waited for


def test_a_killed_worker_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it comes from the stream: no handler is left that could throw it into the middle of a training step."""
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)  # as in a fresh process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start = time.monotonic()
    deadly = int(next(stream(batch_size=4).batches(4, 5)).index[0])  # read only once the first of five batches is taken
    batches = stream(Files(deadly=(deadly,)), Augment(), batch_size=4, workers=2).batches(0, 5)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    with pytest.raises(DmstError, match=r"a worker process that reads images has died .*fewer workers than 2"):
        list(batches)
    assert time.monotonic() - start < 60


def test_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state()
    augment = Augment(resized_crop=0.5, flip=0.5, aa="rand-m10-mstd0.5-inc1-p1")
    plain, augmented = (list(stream(Files(), each).batches(0, 2)) for each in (replace(augment, aa=""), augment))
    assert torch.equal(torch.get_rng_state(), before)
    assert all((a.images != b.images).flatten(1).any(1).float().mean() > 0.9 for a, b in zip(plain, augmented, strict=True))
