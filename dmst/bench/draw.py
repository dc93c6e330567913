"""Clock and power of a GPU while it works: two rates of one network are comparable if these were.

An H200 that multiplies without a pause is at its power limit, and its clock falls until it keeps to it: products in a row drew
692 W of 700 at 1,455 MHz and took 106 microseconds each; the first of them, before it fell, 92 (docs/lab-notes.md).
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

QUERY = "--query-gpu=clocks.sm,power.draw.instant"
PATIENCE = 3.0  # seconds for an answer; it takes a tenth


class Draw(NamedTuple):
    mhz: float  # of the multiprocessors
    watts: float


def drawn(work: Callable[[], object], patience: float = PATIENCE) -> Draw | None:
    """What nvidia-smi says while `work` is done again and again; None where it does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    device = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = [command, device, QUERY, "--format=csv,noheader,nounits"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asked:
        begun = time.perf_counter()
        while asked.poll() is None and time.perf_counter() - begun < patience:
            work()
        if asked.poll() is None:
            asked.kill()
            return None
        told = asked.communicate()[0].split(",")
    try:
        mhz, watts = told
        return Draw(float(mhz), float(watts))
    except ValueError:  # a driver that does not know one of them
        return None
