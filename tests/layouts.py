"""Small datasets on disk, for tests: pictures of noise, files, tar archives, CIFAR's records."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, kind)
    return out.getvalue()


def put(path: Path, data: bytes | str | np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = encoded(data) if isinstance(data, np.ndarray) else data.encode() if isinstance(data, str) else data
    path.write_bytes(raw)
    return path


def tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as out:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def records(labels: list[int], images: np.ndarray, *, coarse: bool = False) -> bytes:
    """A batch of CIFAR: label, then the planes of each colour."""
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    head = b"\x07" if coarse else b""
    return b"".join(head + bytes([label]) + row.tobytes() for label, row in zip(labels, rows, strict=True))


def sample(key: str, image: np.ndarray, label: int | None, ending: str = "png") -> dict[str, bytes]:
    """One sample of a WebDataset shard."""
    told = {} if label is None else {f"{key}.cls": str(label).encode()}
    return {f"{key}.{ending}": encoded(image), **told}
