"""What PyTorch is doing with the current call: asked under each of its ways to look."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dmst import tracing


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_only_an_eager_call_that_nobody_watches_is_plain() -> None:
    z, answers = torch.randn(2, 5), []

    def ask(x: torch.Tensor) -> torch.Tensor:
        answers.append(tracing.is_plain_eager())
        return x + 1

    ask(z)
    torch.func.vmap(ask)(z)
    torch.func.jvp(ask, (z,), (z,))
    torch.jit.trace(ask, z, check_trace=False)
    with FakeTensorMode():
        ask(torch.empty(2, 5))
    assert answers == [True, False, False, False, False]
    assert not tracing.exported()
