"""What a network answers over many images, kept small: a row per image, no picture.

Answers    best class, how sure, whether the label is among the five likeliest; gates of every layer
counted    confusion and calibration of these rows (dmst/calibration.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dmst.analysis.running import Tick, only_looking
from dmst.calibration import Measured, measured
from dmst.errors import OptionError
from dmst.models import VisionModel


class Answers(NamedTuple):
    says: Tensor  # (n)
    sure: Tensor  # (n)       probability of what it says
    labels: Tensor  # (n)     -1 where none is known
    top5: Tensor  # (n)       whether the label is among the five likeliest
    gates: list[Tensor | None]  # (n, k) a layer; None where the operator has no gate

    @property
    def right(self) -> Tensor:
        return self.says == self.labels

    @property
    def labelled(self) -> bool:
        return bool((self.labels >= 0).all())


def answers(model: VisionModel, batches: Iterable[tuple[Tensor, Tensor | None]], tick: Tick = lambda images: None) -> Answers:
    """One pass; only numbers are kept."""
    rows: list[tuple[Tensor, ...]] = []
    gates: list[list[Tensor]] = [[] for _ in model.blocks]
    with only_looking(model):
        for images, given in batches:
            trace = model.trace(images)
            probabilities = trace.logits.double().softmax(-1).cpu()
            labels = torch.full((len(images),), -1) if given is None else given.cpu()
            best = probabilities.topk(min(5, probabilities.shape[1])).indices
            sure, says = probabilities.max(-1)
            rows.append((says, sure, labels, (best == labels[:, None]).any(1)))
            for kept, layer in zip(gates, trace.layers, strict=True):
                if layer.parts.gate is not None:
                    kept.append(layer.parts.gate.float().cpu())
            tick(len(images))
    if not rows:
        raise OptionError("no images were given.")
    says, sure, labels, top5 = (torch.cat(column) for column in zip(*rows, strict=True))
    return Answers(says, sure, labels, top5, [torch.cat(kept) if kept else None for kept in gates])


def counted(found: Answers, name: str, classes: int) -> Measured:
    """Confusion and calibration of these answers; `name` says which images."""
    if not found.labelled:
        raise OptionError("these images have no labels of the network's classes: there is no right and wrong.")
    return measured(name, classes, found.says, found.sure, found.labels, found.top5)
