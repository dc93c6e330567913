"""GMSA's fused kernel against float64: output and every gradient. On a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dmst import use_kernels
from dmst.errors import DmstError, OptionError
from dmst.kernels.attempt import anew
from dmst.operators import GMSA
from tests.cases import VARIANTS, build, gradients, label, off, relative
from tests.parity import BF16, DEVICE, F32, by_default, fresh_memory_is_nan, needs_triton, on_gpu

pytestmark = needs_triton
PLAIN = ("rounds", "normalize_keys")  # options that plain torch alone computes, as the gate sigmoid
CASES = [
    (name, {key: x for key, x in options.items() if key not in PLAIN and x != "sigmoid"})
    for name, options in VARIANTS
    if name == "gmsa"
]
# tokens and patches: two have a token that is no patch, the last one is split over programs
SHAPES = [(13, (3, 4)), (7, (1, 7)), (64, (8, 8)), (331, (15, 22))]
WIDTH = {64: 144}  # heads of 48 channels, which are three pieces; else of 8, which are padded
cases = pytest.mark.parametrize("case", by_default(CASES, 3), ids=label)


def errors(case: tuple, n: int, grid: tuple[int, int], dtype: torch.dtype, kernels: str) -> dict[str, float]:
    """Of output and gradients in `dtype`, relative to those of the same numbers in float64."""
    torch.manual_seed(n)
    if "2d" in case[1].values():  # which knows patches alone
        n = grid[0] * grid[1]
    dim = WIDTH.get(n, 24)
    operator = build(*case, dim=dim, dtype=F32).to(DEVICE).to(dtype)
    z, grad = torch.randn(3, n, dim), torch.randn(3, n, dim, device=DEVICE).to(dtype)
    regions = F.interpolate(torch.randn(3, dim, 4, 4), size=grid).flatten(2).mT  # groups that differ, as those of an image do
    z[:, n - regions.shape[1] :] += regions
    z = z.to(DEVICE, dtype)
    exact = build(*case, dim=dim).to(DEVICE)
    exact.load_state_dict(operator.state_dict())
    with use_kernels(kernels):
        found = gradients(operator.eval(), z, grad, grid=grid)
    expected = gradients(exact.eval(), z.double(), grad.double(), grid=grid)
    return off(found, expected)


@cases
@pytest.mark.parametrize(("n", "grid"), SHAPES)
def test_as_near_to_float64_as_plain_torch(case: tuple, n: int, grid: tuple[int, int]) -> None:
    """Float32 itself loses digits where memberships saturate: three times what plain torch loses is allowed, or 5e-6."""
    fused, plain = (errors(case, n, grid, F32, kernels) for kernels in ("fused", "reference"))
    for name, error in fused.items():
        assert error < max(5e-6, 3 * plain[name]), (name, error, plain[name])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=label)
@pytest.mark.parametrize(("n", "grid"), [*SHAPES, (256, (16, 16)), (4097, (64, 64))])
def test_sixteen_bits(case: tuple, n: int, grid: tuple[int, int]) -> None:
    fused, plain = (errors(case, n, grid, BF16, kernels) for kernels in ("fused", "reference"))
    for name, error in fused.items():
        assert error < max(1e-2, 2 * plain[name]), (name, error, plain[name])


def test_autocast_casts_and_rotates_as_plain_torch_does() -> None:
    """Tokens in float32, products in bfloat16."""
    operator, z = build("gmsa", {"key_rotary": "1d"}, dtype=F32).to(DEVICE), torch.randn(2, 37, 24, device=DEVICE)
    found = {}
    for kernels in ("fused", "reference"):
        with use_kernels(kernels), torch.autocast(DEVICE, BF16):
            found[kernels] = gradients(operator, z, z, grid=(6, 6))
    assert found["fused"]["z"].dtype == F32
    assert max(off(found["fused"], found["reference"]).values()) < 3e-2


@pytest.mark.parametrize("mode", ["listing", "proximal"])
def test_a_nan_stays_in_its_sample_and_repeats_are_bit_equal(mode: str) -> None:
    operator = build("gmsa", {"mode": mode}, dtype=F32).to(DEVICE)
    z = torch.randn(3, 12, 24, device=DEVICE)
    dirty, grad = z.clone(), torch.randn_like(z)
    dirty[1, 3, 5] = torch.nan
    with use_kernels("fused"), fresh_memory_is_nan():
        clean, again, found = (gradients(operator, x, grad, grid=(3, 4)) for x in (z, z, dirty))
    for name, x in clean.items():
        assert torch.equal(x, again[name]), name
    for name in ("out", "z"):
        assert torch.equal(found[name][[0, 2]], clean[name][[0, 2]])
        assert found[name][1].isnan().any()


def test_what_it_does_not_serve_takes_plain_torch() -> None:
    several = {"wide": GMSA(260, 2, groups=4), "many": GMSA(96, 3, groups=65), "twice": GMSA(24, 3, groups=4, rounds=2)}
    several["unit"] = GMSA(24, 3, groups=4, normalize_keys=True)
    for operator in several.values():
        operator, z = operator.to(DEVICE), torch.randn(2, 65, operator.dim, device=DEVICE)
        with use_kernels("fused"), pytest.raises(OptionError, match=r"fused (GMSA takes|kernels take)"):
            operator(z)
        assert relative(operator(z), operator.double()(z.double())) < (1e-5 if DEVICE == "cpu" else 1e-3)


def test_a_second_derivative_says_no() -> None:
    operator, z = GMSA(24, 3, groups=4).to(DEVICE), torch.randn(2, 12, 24, device=DEVICE, requires_grad=True)
    with use_kernels("fused"):
        (first,) = torch.autograd.grad(operator(z).square().sum(), z, create_graph=True)
    with pytest.raises(DmstError, match=r'no second derivative.*use_kernels\("reference"\)'):
        first.sum().backward()


@pytest.mark.parametrize("way", ["_forward", "_backward"])
def test_a_kernel_that_fails_is_replaced_and_told_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    anew()
    monkeypatch.setattr(f"dmst.kernels.fused.layer.{way}", broken)
    operator, z = build("gmsa", {"groups": 3}, dtype=F32).to(DEVICE), torch.randn(2, 12, 24, device=DEVICE)
    with (
        use_kernels("fused"),
        pytest.warns(RuntimeWarning, match=r"GMSA does not work here for tokens \(2, 12, 24\) .*no such instruction"),
    ):
        found = gradients(operator, z, z, grid=(3, 4))
    with use_kernels("fused"):  # without a second warning, which would be an error
        again = gradients(operator, z, z, grid=(3, 4))
    with use_kernels("reference"):
        plain = gradients(operator, z, z, grid=(3, 4))
    anew()
    assert all(relative(found[name], x) < 1e-5 and relative(again[name], x) < 1e-5 for name, x in plain.items())


def test_no_samples() -> None:
    operator, z = GMSA(24, 3, groups=4).to(DEVICE), torch.randn(0, 12, 24, device=DEVICE, requires_grad=True)
    with use_kernels("fused"):
        operator(z, grid=(3, 4)).sum().backward()
    assert z.grad is not None and z.grad.shape == z.shape


if on_gpu:

    @pytest.mark.parametrize("mode", ["listing", "proximal"])
    def test_compiled_is_eager(mode: str) -> None:
        """Inductor hands scalars over in its own types: a kernel that is right alone may not compile there."""
        operator = GMSA(96, 4, mode=mode).to(DEVICE, BF16)
        z = torch.randn(4, 64, 96, device=DEVICE, dtype=BF16)
        grad = torch.randn_like(z)
        eager = gradients(operator, z, grad, grid=(8, 8))
        operator.compile(fullgraph=True)
        assert max(off(gradients(operator, z, grad, grid=(8, 8)), eager).values()) < 1e-2
