"""Inference on a CPU without silent heads: the same numbers, and only where it pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmst.kernels import reference, silent
from dmst.operators import DMSA
from tests.cases import excite, relative, tokens

F64 = torch.float64


def sleepy(mode: str = "listing", dtype: torch.dtype = F64, **options: Any) -> DMSA:
    """A layer whose gate is open on few heads, different ones for different samples."""
    operator = excite(DMSA(48, 8, mode=mode, dtype=dtype, **options))
    nn.init.normal_(operator.assign.weight)
    return operator.eval()


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
@pytest.mark.parametrize("options", [{}, {"membership_activation": "softmax"}, {"bias": False}, {"max_active_heads": 2}])
def test_row_16_leaving_silent_heads_out_changes_nothing(mode: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, z = sleepy(mode, **options), tokens(b=7, n=40, d=48)
    gate = operator.decompose(z).gate
    assert 0 < (gate != 0).float().mean() < 0.7
    assert len({tuple(row.tolist()) for row in gate != 0}) > 1
    monkeypatch.setattr(silent, "ROUND", 0.0)  # whatever it costs
    with torch.no_grad():
        skipped = operator(z)
    assert relative(skipped, operator(z).detach()) < 1e-12


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
def test_leaving_silent_heads_out_changes_no_bit(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a NaN that changes how a batch is grouped cannot reach its neighbours, not even their last bit."""
    operator = DMSA(192, 8, mode=mode, max_active_heads=3).eval()
    nn.init.normal_(operator.assign.weight)
    z = torch.randn(6, 64, 192)
    bad = z.clone()
    bad[2, 3, 5] = torch.nan
    with torch.no_grad():
        monkeypatch.setattr(silent, "ROUND", 0.0)
        sparse, dirty = operator(z), operator(bad)
        monkeypatch.setattr(silent, "ROUND", 1e30)
        dense = operator(z)
    assert torch.equal(sparse, dense)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(dirty[others], dense[others])
    assert dirty[2].isnan().all()


def test_silent_heads_in_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent, "ROUND", 0.0)
    for dtype, bar in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        operator, z = sleepy(dtype=dtype), tokens(b=7, n=40, d=48, dtype=dtype)
        with torch.no_grad():
            assert relative(operator(z), operator.double()(z.double())) < bar


def test_no_head_at_all_leaves_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent, "ROUND", 0.0)
    z = tokens(b=3, n=40, d=48)
    with torch.no_grad():
        listing = sleepy(gate_scale=0.0)
        assert torch.equal(listing(z), listing.out.bias.expand(3, 40, 48))
        assert torch.equal(sleepy("equation", gate_scale=0.0)(z), torch.zeros(3, 40, 48, dtype=F64))


def test_a_nan_gate_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent, "ROUND", 0.0)
    operator, z = sleepy(), tokens(b=3, n=40, d=48)
    with torch.no_grad():
        clean = operator(z)
        z[1, 3, 5] = torch.nan
        dirty = operator(z)
    assert dirty[1].isnan().all()
    assert torch.equal(clean[[0, 2]], dirty[[0, 2]])


def test_left_out_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers and open gates stay dense; a large layer with 1 of 8 heads on does not."""
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(silent, "project_active", lambda *_: pytest.fail("left heads out where it does not pay"))
        sleepy()(tokens(b=7, n=5, d=48))
        DMSA(384, 8)(torch.randn(8, 196, 384))  # at the start every head is on
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(reference, "project", lambda *_: pytest.fail("ran dense where leaving heads out pays"))
        patch.setattr(reference, "project_out", lambda *_: pytest.fail("ran dense where leaving heads out pays"))
        DMSA(384, 8, max_active_heads=1)(torch.randn(8, 196, 384))
