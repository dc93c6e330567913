"""Where a figure comes from: the source, and what it ran on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import torch

import dmst


def commit(asked: str | None = None) -> str:
    """As asked, else DMST_COMMIT, else what git says of this source tree."""
    given = asked or os.environ.get("DMST_COMMIT")
    root = Path(dmst.__file__).resolve().parent.parent
    if given or not (root / ".git").exists():
        return given or "unknown"
    try:
        said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=True)
        return said.stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def versions() -> dict[str, str | None]:
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    return {
        "dmst": dmst.__version__,
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
