"""Processes that train together: what torchrun set up, or one process alone.

    torchrun --nproc-per-node 2 -m dmst train digits --out runs/two

Gradients are averaged by DistributedDataParallel, batch norms count all processes' images, sums are exact in integers. Ranks
exchange a hash of their weights at each checkpoint. Nothing is pickled: only tensors travel. Inside a step processes wait
`timeout` for each other; for what one of them does alone (a look at a million images, a checkpoint on a slow disk), as long as
it lives.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce  # its gradient too is summed

from dmst.errors import DmstError, OptionError


@dataclass(frozen=True)
class Group:
    device: torch.device
    rank: int = 0
    world: int = 1
    patient: dist.ProcessGroup | None = None  # a gloo group of the same processes, with a timeout of 7 days

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, on each."""
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def all_same(self, digest: str) -> bool:
        """Whether every process has this hash."""
        return not self.any(self.broadcast_text(digest) != digest)

    def any(self, mine: bool) -> bool:
        """Whether it is so on any process."""
        return bool(self.sum(torch.tensor(int(mine))))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """The main process's values into everyone's."""
        if self.world > 1:
            for tensor in tensors:
                held = tensor.detach().to(self.device).contiguous()
                dist.broadcast(held, 0)
                tensor.copy_(held)

    def broadcast_text(self, text: str) -> str:
        """The main process's text."""
        raw = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor(len(raw))
        self.broadcast([size])
        if not self.main:
            raw = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast([raw])
        return raw.numpy().tobytes().decode()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What fails on one process fails on all, at once: the others do not wait for it."""
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = torch.tensor(int(failure is not None))
        if self.world > 1:
            dist.all_reduce(failed, group=self.patient)
        if failed:
            raise failure or DmstError(f"{what} failed in another process, which says why; this is process {self.rank}.")


@contextmanager
def joined(device: str | None = None, timeout: float = 60.0) -> Iterator[Group]:
    """The group that torchrun started, or a group of one. `device` is "cpu" or "cuda"; the best there is if None."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    world, rank, local = (int(os.environ.get(name, default)) for name, default in WORDS)
    try:
        chosen = torch.device(kind)
    except RuntimeError as error:
        raise OptionError(f"device is {device!r}: it must be cpu, cuda or cuda:N.") from error
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise OptionError("device is cuda, and no CUDA device can be used here: `dmst doctor` says why; or --device cpu.")
        chosen = torch.device("cuda", local if chosen.index is None else chosen.index)
        if chosen.index >= torch.cuda.device_count():
            raise OptionError(
                f"device is {chosen}, and there are {torch.cuda.device_count()}: fewer --nproc-per-node, or another."
            )
        torch.cuda.set_device(chosen)
    if world == 1:
        yield Group(chosen)
        return
    try:
        _meet("nccl" if chosen.type == "cuda" else "gloo", timedelta(seconds=timeout))
        yield Group(chosen, rank, world, dist.new_group(backend="gloo", timeout=timedelta(days=7)))
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise DmstError(
                f"process {rank} lost another one, which has ended (it says why), or did not answer for {timeout:g} seconds. "
                "Checkpoints are safe; the same command goes on."
            ) from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


WORDS = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))  # torchrun's
MEETINGS = itertools.count()


def _meet(backend: str, timeout: timedelta) -> None:
    """Find the other processes. torchrun's store outlives its restarts and our groups: without a count of both before every
    name, a process may find the address of a dead one there, and wait for it."""
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    except ValueError as error:
        raise OptionError(f"WORLD_SIZE asks for several processes, and {error}: start them with torchrun.") from error
    store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(MEETINGS)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


class SharedBatchNorm(nn.BatchNorm2d):
    """Batch norm over the images of all processes, on any device. Two sums travel: of x, then of (x - mean)^2."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        sums = all_reduce(torch.cat((wide.sum((0, 2, 3)), count)))
        total = sums[-1].detach()
        mean = (sums[:-1] / total)[:, None, None]
        variance = (all_reduce((wide - mean).square().sum((0, 2, 3))) / total)[:, None, None]
        with torch.no_grad():
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), self.momentum)  # type: ignore[union-attr, arg-type]
            unbiased = variance.flatten() * (total / (total - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)  # type: ignore[union-attr, arg-type]
        out = (wide - mean) * (variance + self.eps).rsqrt() * self.weight[:, None, None] + self.bias[:, None, None]
        return out.to(x.dtype)


def share_batch_norms(model: nn.Module) -> None:
    """In place; names and values stay."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SharedBatchNorm
