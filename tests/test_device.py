"""The same layer on a GPU: equal to the CPU's float64, within the bars in low precision, one graph under inductor."""

from __future__ import annotations

import copy

import pytest
import torch

from dmst.operators import DMSA, Spatial
from tests.cases import FAMILY, VARIANTS, build, excite, gradients, label, relative, tokens
from tests.test_precision import BARS, PRECISE, excess, rounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run `pytest -m gpu` where there is one"),
]


@pytest.mark.parametrize("case", VARIANTS, ids=label)
def test_gpu_is_cpu(case: tuple) -> None:
    operator, z, grad = build(*case), tokens(n=35), torch.randn(2, 35, 24, dtype=torch.float64)
    here = gradients(operator, z, grad, grid=(5, 7))
    there = gradients(copy.deepcopy(operator).cuda(), z.cuda(), grad.cuda(), grid=(5, 7))
    for name, value in here.items():
        assert relative(there[name].cpu(), value) < 1e-10 or (there[name].cpu() - value).norm() < 1e-12, name
    with torch.no_grad():
        assert relative(copy.deepcopy(operator).cuda()(z.cuda(), grid=(5, 7)).cpu(), here["out"]) < 1e-10


@pytest.mark.parametrize("case", PRECISE, ids=label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_the_gpu(case: tuple, dtype: torch.dtype) -> None:
    operator, z, grad = rounded(case, dtype, 1.0, 3, 197, 192, 4)
    exact = gradients(copy.deepcopy(operator).double(), z.double(), grad.double(), grid=(1, 197))
    with torch.autocast("cuda", dtype=dtype):
        found = gradients(operator.cuda(), z.cuda(), grad.cuda(), grid=(1, 197))
    assert found["out"].dtype == dtype
    assert excess(found["out"].cpu(), exact["out"], dtype) <= BARS[dtype][0]
    assert excess(found["z"].cpu(), exact["z"], dtype) <= BARS[dtype][1]


@pytest.mark.parametrize("case", [FAMILY[0], ("dmsa", {}), ("dmsa", {"mode": "equation"})], ids=label)
def test_inductor_on_the_gpu(case: tuple) -> None:
    torch._dynamo.reset()
    operator = excite(build(*case, dtype=torch.float32)).cuda()
    compiled = torch.compile(operator, fullgraph=True, dynamic=True)
    for n in (64, 197):
        z, grad = tokens(n=n, dtype=torch.float32).cuda(), torch.randn(2, n, 24, device="cuda")
        eager, traced = gradients(operator, z, grad), gradients(compiled, z, grad)
        for name, value in eager.items():
            assert relative(traced.get(name, traced.get(f"_orig_mod.{name}")), value) < 1e-4, name


def test_repeats_are_equal_to_the_bit() -> None:
    operator = excite(DMSA(384, 8)).cuda()
    z, grad = torch.randn(4, 197, 384, device="cuda"), torch.randn(4, 197, 384, device="cuda")
    first = gradients(operator, z, grad)
    for _ in range(20):
        again = gradients(operator, z, grad)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_maps_and_long_sequences() -> None:
    layer = Spatial(DMSA(96, 4, rotary="2d")).cuda()
    x = torch.randn(1, 96, 256, 256, device="cuda", requires_grad=True)  # 65,536 tokens
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
