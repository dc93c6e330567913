"""What a layer reads off its rotated tokens, in 16 bits: scores and their way back lose nothing that the tokens have."""

from __future__ import annotations

import pytest
import torch

from dmst import rotary
from tests.cases import relative
from tests.parity import DEVICE, F16, F32, F64, needs_triton

pytestmark = [*needs_triton, pytest.mark.interpreter]


@pytest.mark.parametrize("heads", [3, 12])
@pytest.mark.parametrize("mode", ["1d", "none"])
def test_sums_of_two_terms(mode: str, heads: int) -> None:
    """By one bfloat16 number in place of two any of these would be off by 1e-3; dz is stored in float16."""
    from dmst.kernels.fused import front

    b, n, d = 2, 70, 48
    z, product = (torch.randn(b, n, d, device=DEVICE).to(F16) for _ in range(2))
    assign, dscores = torch.randn(heads, d, device=DEVICE), torch.randn(b, n, heads, device=DEVICE)
    dpooled, turn = torch.randn(b, heads, device=DEVICE), front.tables(mode, z, None)
    scores = front.front(z, *turn, assign, None, None, None, False, False)[0]
    dassign = front.into_weights(z, dscores, dpooled, None, *turn)[0].sum(0)
    dz = front.into_tokens(0 * product, dscores, dpooled, assign, None, None, *turn)

    positions = rotary.table(mode, d, n, None, device=z.device, dtype=F64)
    turned = z.double() if positions is None else rotary.rotate(z.double(), positions)
    dl = (dscores + dpooled.unsqueeze(1)).double()
    back = dl @ assign.double()
    if positions is not None:
        back = rotary.rotate(back, rotary.Table(positions.cos, -positions.sin))
    assert scores.dtype == dassign.dtype == F32
    assert relative(scores, turned @ assign.double().mT) < 1e-4
    assert relative(dassign, dl.flatten(0, 1).mT @ turned.flatten(0, 1)) < 1e-4
    assert dz.dtype == F16 and relative(dz, back) < 3e-4
