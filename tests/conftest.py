"""Every test starts from one seed, on one thread, and so do the processes it starts: two workers share two cores.

Without a CUDA device the fused kernels run in Triton's interpreter. Triton reads its variable when it is imported, so it is set
here, before any test is.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from tests.verdicts import pytest_runtest_logreport  # noqa: F401 (a hook, by its name)

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # children that wait for each other's cores took ten times as long
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("dmst", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dmst")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
