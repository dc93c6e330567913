"""Large images, read and cut by worker processes. What a worker makes of a sample depends on (seed, epoch, sample) alone.

A bad image comes back as a value, and is raised here: torch would raise it again with a traceback for a name. A worker that
dies is found by the next batch, within seconds: torch's own way, an exception out of a signal handler, could strike in the
middle of an optimizer step, so its handler is taken out again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from dmst.data import chance
from dmst.data.augment import Augment
from dmst.data.batch import View
from dmst.data.scan import end_with
from dmst.data.sets import ImageSet
from dmst.data.transforms import eval_image, train_image
from dmst.errors import BadImageError, DmstError

Key = tuple[int, int]  # epoch, sample


class Samples(Dataset):
    """Samples by (epoch, sample); without `augment`, for evaluation."""

    def __init__(self, image_set: ImageSet, view: View, augment: Augment | None = None, seed: int = 0) -> None:
        self.image_set, self.view, self.augment, self.seed = image_set, view, augment, seed

    def __getitem__(self, key: Key) -> Tensor | BadImageError:
        epoch, sample = key
        index = sample % chance.COPY
        try:
            array = self.image_set.read(index)
        except BadImageError as error:
            return error
        if array.shape[2] > self.view.channels:
            reason = f"{array.shape[2]} channels, and the model takes {self.view.channels}"
            return BadImageError(self.image_set.where(index), reason)
        if self.augment is None:
            return eval_image(array, self.view)
        return train_image(array, self.view, self.augment, self.seed, epoch, sample)


def collate(found: list[Tensor | BadImageError]) -> Tensor | BadImageError:
    return next((x for x in found if isinstance(x, BadImageError)), None) or default_collate(found)


def _apart(worker: int, parent: int) -> None:
    """A process group of its own: Ctrl-C and a signal to the whole group ask the run to end, which still needs its workers.

    It ends with its parent. torch's own look-out takes whoever is the parent when it begins, and a kill may come before that.
    """
    os.setpgid(0, 0)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def read(samples: Samples, keys: Any, workers: int, device: torch.device) -> Iterator[Tensor]:
    """The batches of `keys`, an iterable of lists of keys, in its order: uint8 (b, c, size, size) on the device."""
    generator = torch.Generator()  # else every start of workers would draw from the global one
    loader = DataLoader(
        samples,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=collate,
        generator=generator,
        worker_init_fn=partial(_apart, parent=os.getpid()) if workers else None,
        pin_memory=device.type == "cuda",
    )
    batches = _without_handler(lambda: iter(loader))
    try:
        while True:
            try:
                found = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not workers or not _says_that_one_died(error):
                    raise
                raise DmstError(
                    f"a worker process that reads images has died ({str(error).strip() or type(error).__name__}). "
                    f"Mostly memory ran out: try fewer workers than {workers}, or look for the kernel's out-of-memory messages."
                ) from error
            if isinstance(found, BadImageError):
                raise found
            yield found.to(device, non_blocking=True)
    finally:
        if workers:  # now: left to the garbage collector, their queues may go first, and each is waited for five seconds
            batches._shutdown_workers()  # type: ignore[attr-defined]


def _says_that_one_died(error: Exception) -> bool:
    """torch says so; or a batch that waits in a dead worker's memory cannot be fetched. What a worker caught is not meant."""
    told = str(error)
    return told.startswith("DataLoader worker") if isinstance(error, RuntimeError) else not told.startswith("Caught ")


def _without_handler(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return start()
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return start()
    finally:
        signal.signal(signal.SIGCHLD, before)
