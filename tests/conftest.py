"""Every test starts from one seed, on one thread, and so do the processes it starts: two workers share two cores.

Without a CUDA device the fused kernels run in Triton's interpreter, and tests marked `gpu` are skipped. Triton reads its
variable when it is imported, so it is set here, before any test is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.quick import quicken

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # children that wait for each other's cores took ten times as long
if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses deterministic algorithms
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("dmst", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dmst")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device here; run `pytest -m gpu` where there is one")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            quicken(patch)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
