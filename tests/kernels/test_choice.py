"""Who computes a layer: `use_kernels`, what decides, and what is refused before anything is launched."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dmst import kernels, use_kernels
from dmst.errors import OptionError, ShapeError, UnknownNameError
from dmst.kernels import Form, Weights, choice, plan, reference
from dmst.operators import DMSA
from tests.cases import build, tokens

F32, F64 = torch.float32, torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FORM = Form(3)
TRITON = pytest.mark.skipif(bool(choice.triton_problem()), reason=choice.triton_problem() or "Triton works")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """The choice is one for the process, and what is known about Triton is remembered: both are put back."""
    before, remembered = choice.chosen(), (choice.triton_problem, choice.interpreted, choice._warn_once)
    yield
    use_kernels(before)
    for function in remembered:
        function.cache_clear()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "interpreted", lambda: True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A CUDA device of this capability."""
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choice._card_problem.cache_clear()
    return capability


def layer(dtype: torch.dtype = F32, **options: Any) -> tuple[Tensor, Weights, Form]:
    operator = build("dmsa", options, dtype=dtype)
    return tokens(dtype=dtype), Weights(*(None if w is None else w.detach() for w in operator.weights())), operator.form


# --- use_kernels ------------------------------------------------------------------------------------------------------


def test_as_a_function_it_holds_and_in_a_with_inside() -> None:
    assert choice.chosen() == "auto"
    use_kernels("reference")
    assert choice.chosen() == "reference"
    once = use_kernels("fused")
    with once:
        with use_kernels("auto"), once:
            assert choice.chosen() == "fused"
        assert choice.chosen() == "fused"
    assert choice.chosen() == "reference"
    with pytest.raises(ZeroDivisionError), use_kernels("auto"):
        raise ZeroDivisionError
    assert choice.chosen() == "reference"


@pytest.mark.parametrize("name", ["fussed", "triton", None])
def test_an_unknown_name_says_what_there_is(name: Any) -> None:
    with pytest.raises(UnknownNameError, match="auto, fused, reference") as error:
        use_kernels(name)
    if name == "fussed":
        assert "Did you mean 'fused'?" in str(error.value)
    assert choice.chosen() == "auto"  # and changes nothing


# --- what decides -----------------------------------------------------------------------------------------------------


def test_on_the_cpu_auto_is_never_fused(interpreted: None) -> None:
    """Also where the interpreter is on: it is for tests."""
    z, weights, form = layer()
    for given in (z, z.clone().requires_grad_()):
        assert choice.kernel_for(given, weights, form, F32) is reference.attend
    assert choice.verdict(CPU, F32, form, 24) == (False, "fused kernels need a CUDA device, and this is cpu")


@TRITON
def test_reference_means_no_triton_and_fused_means_triton(interpreted: None) -> None:
    for device, chosen in ((CUDA, "reference"), (CPU, "fused")):
        answer = choice.verdict(device, F32, FORM, 24, chosen)
        assert answer == (chosen == "fused", f'use_kernels("{chosen}")')
        with use_kernels(chosen):
            assert choice.verdict(device, F32, FORM, 24) == answer


def test_fused_without_a_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    with use_kernels("fused"), pytest.raises(OptionError, match=r'need a CUDA device, and this is cpu.*use_kernels\("auto"\)'):
        kernels.attend(*layer())
    for name in ("meta", "mps", "xpu"):
        answer = choice.verdict(torch.device(name), F32, FORM, 24, "fused")
        assert answer == (False, f"fused kernels need a CUDA device, and this is {name}")


def pretend_triton(monkeypatch: pytest.MonkeyPatch, triton: Any) -> None:
    """Triton is this module, or raises this when it is imported, or is missing."""
    real = importlib.import_module

    def load(name: str) -> Any:
        if name != "triton":
            return real(name)
        if isinstance(triton, Exception):
            raise triton
        return triton

    choice.triton_problem.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton and object())
    monkeypatch.setattr(importlib, "import_module", load)


@pytest.mark.parametrize(
    ("triton", "reason"),
    [
        (None, r"Triton is not installed \(pip install 'dmst\[kernels\]'\)"),
        (SimpleNamespace(__version__="3.5.1+git123"), r"Triton 3\.5\.1\+git123 is older than 3\.6"),
        (SimpleNamespace(__version__="nightly"), r"Triton cannot be used \(ValueError"),
        (OSError("libtriton.so: undefined symbol"), r"Triton cannot be used \(OSError: libtriton\.so: undefined symbol\)"),
    ],
    ids=["missing", "old", "unreadable", "broken"],
)
def test_without_a_triton_that_works(
    triton: Any, reason: str, interpreted: None, device: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference under "auto", with the reason for whoever asks; under "fused" the reason is the error."""
    pretend_triton(monkeypatch, triton)
    answer = choice.verdict(CUDA, F32, FORM, 24, "auto")
    assert not answer.fused and re.search(reason, answer.why)
    with pytest.raises(OptionError, match=reason), use_kernels("fused"):
        kernels.attend(*layer())
    z, weights, form = layer()
    assert torch.equal(kernels.attend(z, weights, form), reference.attend(z, weights, form, dtype=F32))


def test_a_triton_that_was_not_tested_is_refused(interpreted: None, device: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning with the remedy, and plain torch; whoever asks for the fused kernels gets an error."""
    pretend_triton(monkeypatch, SimpleNamespace(__version__="3.10.0+git123"))
    reason = r"Triton 3\.10\.0\+git123 is newer than 3\.8, the newest that was tested"
    with use_kernels("fused"), pytest.raises(OptionError, match=reason):
        kernels.attend(*layer())
    kernels.attend(*layer())  # where no such device is, nobody needs to know
    with pytest.warns(UserWarning, match=rf"{reason}.*pip install --upgrade 'dmst\[kernels\]'"):
        choice.verdict(CUDA, F32, FORM, 24, "auto")
    answer = choice.verdict(CUDA, F32, FORM, 24, "auto")  # a second warning would be an error here
    assert not answer.fused and re.fullmatch(reason, answer.why)
    for version in ("3.6.0", "3.8.1+git123"):
        pretend_triton(monkeypatch, SimpleNamespace(__version__=version))
        assert " than " not in choice.triton_problem()


@TRITON
def test_what_a_device_computes(device: list) -> None:
    """By capability, dtype, number and width of heads, and form."""
    for dtype in (torch.bfloat16, torch.float16, F32):
        assert choice.verdict(CUDA, dtype, FORM, 24, "auto") == (True, "the default on this GPU")
    for chosen in ("auto", "fused"):
        assert choice.verdict(CUDA, F32, Form(64), 64 * 128, chosen).fused
        for form, dim in ((Form(65), 65 * 8), (Form(2), 2 * 129)):
            answer = choice.verdict(CUDA, F32, form, dim, chosen)
            assert answer == (False, f"fused kernels take up to {plan.MOST_HEADS} heads of up to {plan.WIDEST} channels")
        assert "at most float32, and this is float64" in choice.verdict(CUDA, F64, FORM, 24, chosen).why
    for form in (Form(3, token_sparse_rescale=True), Form(3, membership="energy", gate=None, uniform_moment=True)):
        assert "a relative of theirs" in choice.verdict(CUDA, F32, form, 24, "auto").why
    for form in (Form(3, gate="relu"), Form(3, max_active_heads=2)):
        assert "gates sparsemax and gelu" in choice.verdict(CUDA, F32, form, 24, "auto").why
    device[0] = (7, 5)
    choice._card_problem.cache_clear()
    assert choice.verdict(CUDA, F32, FORM, 24) == (False, "fused kernels need compute capability 8.0 or newer")
    choice._card_problem.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "why"), [(F64, 24, 3, "float64"), (F32, 130, 65, "64 heads"), (F32, 258, 2, "128 ch")]
)
def test_what_does_not_fit_is_the_reference_or_an_error(
    dtype: torch.dtype, dim: int, heads: int, why: str, interpreted: None
) -> None:
    operator, z = DMSA(dim, heads, dtype=dtype), torch.randn(1, 5, dim, dtype=dtype)
    with use_kernels("fused"), pytest.raises(OptionError, match=why):
        operator(z)
    if dtype == F64:  # autocast leaves float64 alone, and so does the choice
        with use_kernels("fused"), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(OptionError, match="float64"):
            operator(z)
    with torch.no_grad():
        usual = reference.attend(z, operator.weights(), operator.form, dtype=dtype)
        torch.testing.assert_close(operator(z), usual, rtol=0, atol=1e-7)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused() -> dict[str, tuple[Tensor, Weights, str]]:
    """Tokens and weights that do not fit, and what the message must say."""
    z, weights, _ = layer(membership_bias=True)
    t, p = layer(mode="proximal")[1], build("tssa", {}, dtype=F32).weights()
    return {
        "two axes": (z[0], weights, r"z is \(7, 24\) in torch\.float32"),
        "whole numbers": (z.long(), weights, r"z is .* in torch\.int64"),
        "another width": (z[..., :21], weights, r"subspace has shape \(24, 24\): for z of width 21 and 3 heads .* \(21, 21\)"),
        "no whole heads": (z[..., :22], weights, "width 22, which 3 heads do not divide"),
        "subspace": (z, weights._replace(subspace=weights.subspace[:12]), r"subspace has shape \(12, 24\).*\(24, 24\)"),
        "subspace_bias": (z, weights._replace(subspace_bias=torch.zeros(8)), r"subspace_bias has shape \(8,\)"),
        "assign": (z, weights._replace(assign=weights.assign.mT), r"assign has shape \(24, 3\).*\(3, 24\)"),
        "assign_bias": (z, weights._replace(assign_bias=torch.zeros(3, 1)), r"assign_bias has shape \(3, 1\)"),
        "out": (z, weights._replace(out=weights.out[:, :8]), r"out has shape \(24, 8\)"),
        "out_bias": (z, weights._replace(out_bias=torch.zeros(())), r"out_bias has shape \(\)"),
        "temperature": (z, p._replace(temperature=torch.ones(3)), r"temperature has shape \(3,\).*\(3, 1\)"),
        "theta": (z, t._replace(theta=torch.ones(1)), r"theta has shape \(1,\).*\(\)"),
        "a weight elsewhere": (z, weights._replace(out_bias=weights.out_bias.to("meta")), "out_bias is on meta and z on cpu"),
        "tokens elsewhere": (z.to("meta"), weights, "subspace is on cpu and z on meta"),
    }


@pytest.mark.parametrize("chosen", ["auto", "fused"])
def test_what_does_not_fit_is_named(chosen: str, interpreted: None) -> None:
    for z, weights, message in refused().values():
        with use_kernels(chosen), pytest.raises(ShapeError, match=message):
            kernels.attend(z, weights, FORM)


@pytest.mark.parametrize("grid", [None, (2, 3), (7,), "11"])
def test_a_grid_that_does_not_fit(grid: Any, interpreted: None) -> None:
    z, weights, form = layer(rotary="2d")
    for chosen in ("reference", "fused"):
        with use_kernels(chosen), pytest.raises(ShapeError, match="grid"):
            kernels.attend(z, weights, form, grid=grid)
