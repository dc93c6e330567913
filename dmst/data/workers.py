"""Large images, read and cut by worker processes: uint8 (c, size, size), by Pillow, a function of (seed, epoch, sample) alone.

training      random resized crop, with the draws of the resident path; or shorter side to size, and the middle
evaluation    shorter side to size / crop_pct, and the middle
masks         the same middle square, nearest neighbour, so that no value is made up between two

A bad image comes back as a value, and is raised here: torch would raise it again with a traceback for a name. A worker that
dies is found by the next batch, within seconds: torch's own way, an exception out of a signal handler, could strike in the
middle of an optimizer step, so its handler is taken out again.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from dmst.data import chance, geometry
from dmst.data.augment import Augment
from dmst.data.batching import View
from dmst.data.sets import ImageSet
from dmst.errors import BadImageError, DmstError

Key = tuple[int, int]  # epoch, sample
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class Samples(Dataset):
    """Samples by (epoch, sample); without `augment`, for evaluation."""

    def __init__(self, image_set: ImageSet, view: View, augment: Augment | None = None, seed: int = 0) -> None:
        self.image_set, self.view, self.augment, self.seed = image_set, view, augment, seed

    def __getitem__(self, key: Key) -> Tensor | BadImageError:
        epoch, sample = key
        try:
            array = self.image_set.read(sample % chance.COPY)
        except BadImageError as error:
            return error
        image = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
        image = image.convert("RGB") if self.view.channels == 3 else image
        view, augment = self.view, self.augment
        if augment is None:
            return _tensor(_middle(image, view.size, view.crop_pct, FILTERS[view.interpolation]))
        filter = FILTERS[augment.interpolation]
        if not augment.resized_crop:
            return _tensor(_middle(image, view.size, 1.0, filter))
        draws = chance.uniform("resized crop", self.seed, epoch, torch.tensor([sample]), geometry.BOX_DRAWS)
        boxes = geometry.resized_boxes(draws, image.height, image.width, augment.resized_crop)
        top, left, height, width = boxes[0].to(torch.int64).tolist()
        return _tensor(image.crop((left, top, left + width, top + height)).resize((view.size, view.size), filter))


def collate(found: list[Tensor | BadImageError]) -> Tensor | BadImageError:
    return next((x for x in found if isinstance(x, BadImageError)), None) or default_collate(found)


def read(samples: Samples, keys: Any, workers: int, device: torch.device) -> Iterator[Tensor]:
    """The batches of `keys`, an iterable of lists of keys, in its order: uint8 (b, c, size, size) on the device."""
    for found in through_workers(samples, keys, workers, collate, pin_memory=device.type == "cuda"):
        if isinstance(found, BadImageError):
            raise found
        yield found.to(device, non_blocking=True)


def through_workers(
    dataset: Dataset, keys: Any, workers: int, collate: Callable[[list[Any]], Any], pin_memory: bool = False
) -> Iterator[Any]:
    """What `collate` makes of the items of each list of keys, in order; without workers, in this process."""
    loader = DataLoader(
        dataset,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=collate,
        generator=torch.Generator(),  # else every start of workers would draw from the global one
        worker_init_fn=partial(_apart, parent=os.getpid()) if workers else None,
        pin_memory=pin_memory,
    )
    batches = _without_handler(lambda: iter(loader))
    try:
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:  # the last two: a batch waited in the memory of the dead
        told = str(error)
        died = told.startswith("DataLoader worker") if isinstance(error, RuntimeError) else not told.startswith("Caught ")
        if not workers or not died:
            raise
        raise DmstError(
            f"a worker process that reads images has died ({told.strip() or type(error).__name__}). Mostly memory ran out: try "
            f"fewer workers than {workers}, or look for the kernel's out-of-memory messages."
        ) from error
    finally:
        if workers:  # now: left to the garbage collector, their queues may go first, and each is waited for five seconds
            batches._shutdown_workers()  # type: ignore[attr-defined]


def _apart(worker: int, parent: int) -> None:
    """A process group of its own: Ctrl-C and a signal to the whole group ask the run to end, which still needs its workers.

    It ends with its parent. torch's own look-out takes whoever is the parent when it begins, and a kill may come before that.
    """
    os.setpgid(0, 0)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent: one that was killed could not do it."""
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os._exit(1)


def _without_handler(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return start()
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return start()
    finally:
        signal.signal(signal.SIGCHLD, before)


# --- one image --------------------------------------------------------------------------------------------------------


def mask_in_view(mask: np.ndarray, view: View) -> Tensor:
    """A mask (h, w) as `view` would cut the image it belongs to: (size, size) uint8."""
    return _tensor(_middle(Image.fromarray(mask), view.size, view.crop_pct, Image.Resampling.NEAREST))[0]


def _middle(image: Image.Image, size: int, crop_pct: float, filter: Image.Resampling) -> Image.Image:
    h, w = geometry.short_side(image.height, image.width, math.floor(size / crop_pct))
    if (w, h) != image.size:
        image = image.resize((w, h), filter)
    top, left = geometry.corner(h, w, size)
    return image.crop((left, top, left + size, top + size))


def _tensor(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1)))
