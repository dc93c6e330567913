"""What a network says of photos: any file that the image policy admits, any size; what cannot be read costs itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmst.data.images import decode
from dmst.data.loader import EvalStream, View
from dmst.data.sets import ImageSet
from dmst.engine import prepare
from dmst.errors import BadImageError, OptionError, bad_answer
from dmst.export.onnx_network import OnnxNetwork
from dmst.models import Trace, VisionModel
from dmst.words import visible

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # looked for in folders; a named file may be any


class Photos(ImageSet):
    """Pictures without labels, in memory: pixels (h, w, c), and how a message calls each."""

    def __init__(self, pixels: Sequence[np.ndarray], names: Sequence[str]) -> None:
        self._pixels, self.names = pixels, names
        super().__init__("photos", "given", ["none"], np.zeros(len(pixels), np.int64), fingerprint="")

    @classmethod
    def open(cls, paths: Sequence[Path], channels: int) -> Photos:
        names = [visible(path) for path in paths]
        return cls([decode(path, name, grey=channels == 1) for path, name in zip(paths, names, strict=True)], names)

    def read(self, index: int) -> np.ndarray:
        return self._pixels[self.places[index]]

    def where(self, index: int) -> str:
        return self.names[self.places[index]]

    def seen(self, view: View, device: torch.device | str = "cpu") -> Tensor:
        """The first, (1, c, h, w), as a network takes it: cut and normalised as `dmst evaluate` does it."""
        return next(iter(EvalStream(self, view, batch_size=1, device=device, path="workers"))).images


class Answer(NamedTuple):
    """Of one photo: the likeliest classes and their probabilities; or why there is none."""

    path: Path
    top: list[tuple[str, float]]
    problem: str = ""
    image: Tensor | None = None  # (1, c, h, w) as the network saw it
    trace: Trace | None = None  # where it was asked for


def photos_in(words: Sequence[str]) -> list[Path]:
    """Files as they are named; of a folder the images in it, in the order of their names."""
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if not word:
            raise OptionError("a photo's name is empty: give image files, or folders of them.")
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES and each.is_file())
            if not inside:
                raise OptionError(f"{path} has no images ({', '.join(SUFFIXES)}; folders in it are not searched): give others.")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise OptionError(f"{path} does not exist: give image files, or folders of them.")
    return found


@torch.no_grad()
def classify(
    model: VisionModel | OnnxNetwork,
    paths: Sequence[Path],
    *,
    top: int = 5,
    device: torch.device | str = "cpu",
    traced: bool = False,
) -> Iterator[Answer]:
    """One answer a photo, in order, as they come."""
    if not model.config.num_classes:
        raise OptionError("the network has no classifier (num_classes is 0): model.reset_classifier(...), then train it.")
    model = model.to(device).eval()
    dtype = next(model.parameters()).dtype
    names = model.class_names or tuple(f"class {i}" for i in range(model.config.num_classes))
    view = prepare.view_of(model)
    for path in paths:
        try:
            image = Photos.open([path], model.config.in_chans).seen(view, device).to(dtype)
        except BadImageError as error:
            yield Answer(path, [], str(error))
            continue
        trace = model.trace(image) if traced else None
        logits = model(image) if trace is None else trace.logits
        if not torch.isfinite(logits).all():
            raise bad_answer(model.config.name, str(path))
        best = logits[0].float().softmax(-1).topk(min(top, len(names)))
        told = [(names[i], p) for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        yield Answer(path, told, image=image, trace=trace)
