"""Every test starts from one seed, on one thread: two workers share two cores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("dmst", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dmst")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
