"""One step: gradients of a batch, a look at them, and only then the weights.

    gradients    loss = sum_i CE_i / batch_size over the global batch, in micro-steps; the norm of all gradients
    look         loss and norm must be finite: else nothing is applied (fp16: the scale halves, the step is skipped and counted)
                 and the statistics of batch norms, which the forward pass moved, are put back
    apply        clipping, optimizer, orthonormal matrices, running mean

With `run.graph` torch.compile records the network as CUDA graphs: small ones leave a GPU waiting for the host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from dmst.data.chance import small_seed
from dmst.data.loader import Batch
from dmst.engine.distributed import Group, share_batch_norms
from dmst.engine.evaluate import precision
from dmst.engine.optim import Mean, Optimizer
from dmst.engine.recipe import Recipe
from dmst.errors import DeviceMemoryError, NonFiniteError, OptionError
from dmst.models import VisionModel
from dmst.operators.orthonormal import OrthonormalLinear, retract

MOST_SKIPS = 20
GROW = 2000  # steps without a skip after which fp16's scale doubles


class StepMetrics(NamedTuple):
    """Of one step."""

    loss: float  # mean over the images
    accuracy: float
    norm: float


def without_cudnn_attention() -> AbstractContextManager[None]:
    """On Hopper its backward pass gives NaN for 64 tokens once a token scores all others below -88.7 (pytorch issue 196678)."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class TrainStep:
    def __init__(self, model: VisionModel, recipe: Recipe, group: Group) -> None:
        run = recipe.run
        self.model, self.recipe, self.group = model, recipe, group
        recorded = run.graph and group.device.type == "cuda"
        if recorded and (group.world > 1 or run.accumulate > 1):
            raise OptionError("run.graph records one process and one micro-step: set run.graph=false, or run.accumulate=1.")
        if group.world > 1:
            share_batch_norms(model)
        if run.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.set_grad_checkpointing(run.grad_checkpointing)
        self.optimizer = Optimizer(model, recipe)
        self.mean = Mean(model, recipe.optim.model_ema) if recipe.optim.model_ema else None
        self.net: nn.Module = _compiled(model, group.device, recorded) if run.compile or recorded else model
        if group.world > 1:
            self.net = _averaged(self.net, group.device)
        self.parameters = list(self.optimizer.names)
        self.scale, self.good, self.skipped = (2.0**16 if run.amp == "fp16" else 1.0), 0, 0
        self._keeps(True)  # `_apply` orthonormalises after each step, so the layers need not
        self._sums = torch.zeros(3, dtype=torch.float64, device=group.device)  # loss, right; norm
        # what the forward pass itself moves
        self._statistics = [x for module in model.modules() if isinstance(module, nn.BatchNorm2d) for x in module.buffers()]

    def leave(self) -> None:
        """Training is over: the orthonormal layers look after their matrices themselves again."""
        self._keeps(False)

    def _keeps(self, kept: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, OrthonormalLinear):
                module.kept = kept

    @property
    def choice(self) -> str:
        """Which weights a run ends in: those of the last step, or their running mean."""
        asked = self.recipe.run.final
        return asked if asked != "auto" else "model" if self.mean is None else "ema"

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self, step: int, batches: Iterator[Batch], lr_factor: float) -> StepMetrics:
        """Take step number `step` (from 0) on the next micro-batches."""
        self.model.train()
        self.optimizer.set_lr(lr_factor)
        before = [x.clone() for x in self._statistics]
        try:
            self._gradients(step, batches)
            self._sums[:2] = self.group.sum(self._sums[:2].clone())
            loss, right, norm = self._sums.tolist()
            good = math.isfinite(loss) and math.isfinite(norm)
            if not good and (self.recipe.run.amp != "fp16" or not math.isfinite(loss) or self.skipped == MOST_SKIPS):
                raise NonFiniteError(
                    f"step {step}: {self._first_bad(loss)}. Nothing was applied. Mostly the learning rate is too high "
                    f"(--set optim.lr={self.recipe.optim.lr / 3:.1g}), or gradients need a limit (optim.clip_grad=1). "
                    "To go on in the same folder, add --allow-config-change."
                )
        except BaseException as error:
            self._take_back(before)
            if isinstance(error, torch.OutOfMemoryError):
                raise self._too_large(step) from error
            raise
        if good:
            self._apply(step)
        else:
            self._take_back(before)
        self._rescale(good)
        return StepMetrics(loss / self.recipe.run.batch_size, right / self.recipe.run.batch_size, norm)

    def _gradients(self, step: int, batches: Iterator[Batch]) -> None:
        """Those of all micro-batches. A GPU is still at work on them when this returns."""
        self.model.zero_grad()
        self._sums.zero_()
        micro_steps = self.recipe.run.accumulate
        for micro in range(micro_steps):
            batch = next(batches)
            # Dropout and stochastic depth are functions of the step: no generator's state needs saving.
            torch.manual_seed(small_seed("step", self.recipe.run.seed, step, micro, self.group.rank))
            later = micro + 1 < micro_steps and isinstance(self.net, DistributedDataParallel)
            with without_cudnn_attention(), self.net.no_sync() if later else nullcontext():  # type: ignore[operator]
                self._add(batch)
        self._measure()

    def _add(self, batch: Batch) -> None:
        """The gradients of one micro-batch, onto those that are there. Checkpointed blocks run again in the backward pass."""
        logits = self._logits(batch.images)
        smoothing = self.recipe.optim.smoothing
        loss = F.cross_entropy(logits, batch.targets.to(logits.dtype), label_smoothing=smoothing, reduction="none").sum()
        (loss * (self.group.world * self.scale / self.recipe.run.batch_size)).backward()  # processes take the mean
        right = (logits.detach().argmax(1) == batch.labels).sum()
        self._sums[:2] += torch.stack((loss.detach(), right.to(loss.dtype)))

    def _logits(self, images: Tensor) -> Tensor:
        """In the run's layout and precision."""
        run = self.recipe.run
        images = images.to(self.parameters[0].dtype)
        if run.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with precision(run.amp, self.group.device):
            logits = self.net(images)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _measure(self) -> None:
        """Gradients to their own scale, and their norm."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self.recipe.run.amp == "fp16":
            torch._foreach_mul_(grads, 1 / self.scale)
        self._sums[2] = nn.utils.get_total_norm(grads)

    def _apply(self, step: int) -> None:
        dtype = self.parameters[0].dtype
        if clip := self.recipe.optim.clip_grad:  # not before: a NaN in one gradient would be in all
            nn.utils.clip_grads_with_norm_(self.parameters, clip, self._sums[2].to(torch.promote_types(dtype, torch.float32)))
        self.optimizer.step()
        retract(self.model)
        if self.mean is not None:
            self.mean.update(step)
            retract(self.mean.model)

    def _take_back(self, before: list[Tensor]) -> None:
        """As it was before the step."""
        self.model.zero_grad()
        for now, was in zip(self._statistics, before, strict=True):
            now.copy_(was)

    def _rescale(self, good: bool) -> None:
        if self.recipe.run.amp != "fp16":
            return
        self.good, self.skipped = (self.good + 1, 0) if good else (0, self.skipped + 1)
        if not good:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good == GROW:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0

    # --- what a message says -----------------------------------------------------------------------------------------

    def _first_bad(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        for parameter, name in self.optimizer.names.items():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return f"the gradient of {name} holds NaN or infinity"
        return "the norm of the gradients is not finite"

    def _too_large(self, step: int) -> DeviceMemoryError:
        run = self.recipe.run
        each = run.batch_size // run.accumulate // self.group.world
        return DeviceMemoryError(
            f"step {step} does not fit on {self.group.device}, {each} images at a time. Nothing was applied. "
            f"Try --set run.accumulate={2 * run.accumulate}, or --set run.grad_checkpointing=true, with "
            "--allow-config-change."
        )


def _compiled(model: nn.Module, device: torch.device, recorded: bool) -> nn.Module:
    """By torch.compile. Before torch 2.13 its compiler has a padding bug on GPUs: plain operators had wrong gradients at 197
    tokens. So padding is switched off there (docs/lab-notes.md).
    """
    from torch._inductor import config

    config.fallback_random = True  # for the whole process: compiled networks draw what plain ones draw
    options: dict[str, Any] = {"triton.cudagraphs": True} if recorded else {}
    if device.type == "cuda" and torch.__version__ < "2.13":
        options["comprehensive_padding"] = False
    return torch.compile(model, dynamic=False, options=options or None)  # type: ignore[return-value]


def _averaged(net: nn.Module, device: torch.device) -> nn.Module:
    """Gradients averaged over processes, always in the same order.

    torch lays them out anew after the first step, by when they came, unless told that some may be unused. Where a gradient
    lies decides in which order three or more processes are summed: a run that goes on would end in other bits.
    """
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified", UserWarning)  # and all are used
    return DistributedDataParallel(net, [device] if device.type == "cuda" else None, find_unused_parameters=True)
