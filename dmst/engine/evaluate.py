"""How many images a model reads right: exact counts, every image once, whatever the number of processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from dmst.data.loader import EvalStream, Shard
from dmst.data.sets import ImageSet, with_classes
from dmst.engine import prepare
from dmst.engine.distributed import Group, joined
from dmst.errors import OptionError, bad_answer
from dmst.export.onnx_network import OnnxNetwork
from dmst.models import VisionModel


class Score(NamedTuple):
    images: int
    right: int  # the largest logit is the label's
    right5: int  # the label is among the five largest
    loss: float  # mean cross-entropy, nats
    by_class: list[tuple[int, int]]  # (right, count)

    @property
    def top1(self) -> float:
        return self.right / max(self.images, 1)

    @property
    def top5(self) -> float:
        return self.right5 / max(self.images, 1)

    @property
    def words(self) -> str:
        """ "top-1 93.20%, top-5 99.80%"; five of five classes would always be right, so top-5 is left out there."""
        return f"top-1 {self.top1:.2%}" + (f", top-5 {self.top5:.2%}" if len(self.by_class) > 5 else "")

    def to_dict(self) -> dict[str, Any]:
        return {"top1": self.top1, "top5": self.top5, "loss": self.loss, "right": self.right, "images": self.images}


AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision(amp: str, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, AMP[amp]) if amp in AMP else nullcontext()


@torch.no_grad()
def evaluate(model: VisionModel | OnnxNetwork, stream: EvalStream, group: Group, *, amp: str = "none") -> Score:
    """The score of `model`, in evaluation mode, on all that the processes' streams give."""
    was, device, dtype = model.training, group.device, next(model.parameters()).dtype
    counts = torch.zeros(3, len(stream.image_set.classes), dtype=torch.int64, device=device)  # right, right5, all: by class
    loss = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    try:
        for batch in stream:
            with precision(amp, device):
                logits = model(batch.images.to(dtype)).to(torch.promote_types(dtype, torch.float32))
            best = logits.topk(min(5, logits.shape[1])).indices == batch.labels[:, None]
            hits = torch.stack((logits.argmax(1) == batch.labels, best.any(1), torch.ones_like(batch.labels, dtype=torch.bool)))
            counts.index_add_(1, batch.labels, hits.to(counts.dtype))
            loss += F.cross_entropy(logits, batch.labels, reduction="none").sum(dtype=torch.float64)
            loss += (0 * logits).sum()  # NaN if any of them is not finite
    finally:
        model.train(was)
    counts, loss = group.sum(counts), group.sum(loss)
    if not loss.isfinite():
        raise bad_answer(model.config.name, f"images of {stream.image_set.name}")
    right, right5, count = (int(x) for x in counts.sum(1))
    by_class = list(zip(counts[0].tolist(), counts[2].tolist(), strict=True))
    return Score(count, right, right5, loss.item() / count, by_class)


def evaluate_weights(
    weights: str | Path,
    data: str | None = None,
    *,
    split: str = "",
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: int = 0,
    batch_size: int = 256,
    amp: str = "none",
    crop_pct: float = 0.0,
) -> tuple[Score, ImageSet]:
    """The score of a saved model, or of the one in final/ of a run, on a split of a dataset; and that split.

    Without `data`, of a run: the images that it did not learn from, its held-out share or its test images.
    """
    model = prepare.read_network(weights)
    if split and not data:
        raise OptionError(f"--split {split} needs --data: without it a run is evaluated on the images that it held out.")
    if data:
        image_set: ImageSet | None = prepare.images_of(data, split, data_dir)
    else:
        image_set, its_crop = prepare.evaluated_by(weights, data_dir)
        crop_pct = crop_pct or its_crop
    if image_set is None:
        raise OptionError(f"{weights} is no run with images for evaluation: give them, --data DATASET or --data FOLDER.")
    if model.class_names:
        image_set = with_classes(image_set, model.class_names)
    if len(image_set.classes) != model.num_classes:
        raise OptionError(
            f"{weights} tells {model.num_classes} classes apart, and {image_set.name} has {len(image_set.classes)}: fine-tune "
            f"it first (dmst train --data {data or 'FOLDER'} --init-from {weights} --out DIR)."
        )
    with joined(device) as group:
        model.to(group.device)
        view = prepare.view_of(model, crop_pct)
        shard = Shard(group.rank, group.world)
        stream = EvalStream(image_set, view, batch_size=batch_size, shard=shard, device=group.device, workers=workers)
        return evaluate(model, stream, group, amp=amp), image_set
