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

import dmst
from dmst import kernels, use_kernels
from dmst.errors import OptionError, ShapeError, UnknownNameError
from dmst.kernels import Form, Weights, choice, closed_form, plan, reference, silent
from dmst.operators import DMSA
from tests.cases import build, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)
F32, F64 = torch.float32, torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FORM = Form(3)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """The choice is one for the process, and what is known about Triton is remembered: both are put back."""
    before = choice._chosen
    remembered = (choice.triton_problem, choice.interpreted, choice._warn_once)
    yield
    choice._chosen = before
    for function in remembered:
        function.cache_clear()


def layer(dtype: torch.dtype = F32, **options: Any) -> tuple[Tensor, Weights, Form]:
    operator = build("dmsa", options, dtype=dtype)
    return tokens(dtype=dtype), Weights(*(None if w is None else w.detach() for w in operator.weights())), operator.form


def kernel(z: Tensor, weights: Weights, form: Form, dtype: torch.dtype = F32) -> str:
    """The module of the kernel that would be used."""
    found = choice.kernel_for(z, weights, form, dtype)
    homes = {reference.attend: "reference", closed_form.attend: "closed_form", silent.attend: "silent"}
    return {**homes, choice._fused_attend: "fused"}[found]


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """A CUDA device of this capability, with a Triton that works."""
    monkeypatch.setattr(choice, "triton_problem", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


# --- use_kernels ------------------------------------------------------------------------------------------------------


def test_as_a_function_it_holds() -> None:
    assert dmst.use_kernels is kernels.use_kernels is use_kernels
    assert choice._chosen == "auto"
    use_kernels("reference")
    assert choice._chosen == "reference"
    use_kernels("auto")
    assert choice._chosen == "auto"


def test_in_a_with_it_holds_inside() -> None:
    with use_kernels("reference"):
        assert choice._chosen == "reference"
        with use_kernels("fused"):
            assert choice._chosen == "fused"
            with use_kernels("auto"):
                assert choice._chosen == "auto"
            assert choice._chosen == "fused"
        assert choice._chosen == "reference"
    assert choice._chosen == "auto"


def test_after_an_error_it_is_as_it_was() -> None:
    use_kernels("reference")
    with pytest.raises(ZeroDivisionError), use_kernels("auto"):
        raise ZeroDivisionError
    assert choice._chosen == "reference"


@pytest.mark.parametrize("name", ["fussed", "Fused", "triton", "", None, 1])
def test_an_unknown_name_says_what_there_is(name: Any) -> None:
    with pytest.raises(UnknownNameError, match="auto, fused, reference") as error:
        use_kernels(name)
    if str(name).lower().startswith("fus"):
        assert "Did you mean 'fused'?" in str(error.value)
    assert choice._chosen == "auto"  # and changes nothing


# --- what decides -----------------------------------------------------------------------------------------------------


def test_on_the_cpu_auto_is_never_fused() -> None:
    """Also where the interpreter is on: it is for tests."""
    z, weights, form = layer()
    assert kernel(z, weights, form) == "silent"
    assert kernel(z.requires_grad_(), weights, form) == "closed_form"
    z, weights, form = layer(gate_activation="sigmoid")
    assert kernel(z, weights, form) == "reference"
    answer = choice.verdict(CPU, F32, form, 24)
    assert not answer.fused
    assert answer.why == "fused kernels need a CUDA device, and this is cpu"


def test_reference_means_no_triton() -> None:
    answer = choice.verdict(CUDA, F32, FORM, 24, "reference")
    assert answer == (False, 'use_kernels("reference")')
    with use_kernels("reference"):
        assert choice.verdict(CUDA, F32, FORM, 24) == answer


@pytest.mark.skipif(bool(choice.triton_problem()), reason=choice.triton_problem() or "Triton works")
def test_fused_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    z, weights, form = layer()
    with use_kernels("fused"):
        assert kernel(z, weights, form) == "fused"
        assert choice.verdict(CPU, F32, form, 24) == (True, 'use_kernels("fused")')


def test_fused_without_a_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    z, weights, form = layer()
    with (
        use_kernels("fused"),
        pytest.raises(OptionError, match=r'need a CUDA device, and this is cpu.*use_kernels\("auto"\)'),
    ):
        kernels.attend(z, weights, form)
    with use_kernels("fused"), pytest.raises(OptionError, match="need a CUDA device"):
        DMSA(24, 3)(z)


def test_the_interpreter_is_asked_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, answer in (("1", True), ("0", False), (None, False)):
        choice.interpreted.cache_clear()
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if value is not None:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        assert choice.interpreted() is answer


def test_other_devices_give_the_reference_with_the_reason() -> None:
    for name in ("meta", "mps", "xpu"):
        answer = choice.verdict(torch.device(name), F32, FORM, 24, "fused")
        assert answer == (False, f"fused kernels need a CUDA device, and this is {name}")


def no_spec(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return r"Triton is not installed \(pip install 'dmst\[kernels\]'\)"


def found(monkeypatch: pytest.MonkeyPatch, triton: Any) -> None:
    real = importlib.import_module

    def load(name: str) -> Any:
        if name != "triton":
            return real(name)
        if isinstance(triton, Exception):
            raise triton
        return triton

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", load)


def old(monkeypatch: pytest.MonkeyPatch) -> str:
    found(monkeypatch, SimpleNamespace(__version__="3.5.1"))
    return r"Triton 3\.5\.1 is older than 3\.6"


def ancient(monkeypatch: pytest.MonkeyPatch) -> str:
    found(monkeypatch, SimpleNamespace(__version__="2.10.1+git123"))
    return r"Triton 2\.10\.1\+git123 is older than 3\.6"


def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    found(monkeypatch, OSError("libtriton.so: undefined symbol"))
    return r"Triton cannot be used \(OSError: libtriton\.so: undefined symbol\)"


def unreadable(monkeypatch: pytest.MonkeyPatch) -> str:
    found(monkeypatch, SimpleNamespace(__version__="nightly"))
    return r"Triton cannot be used \(ValueError"


@pytest.mark.parametrize("trouble", [no_spec, old, ancient, broken, unreadable])
def test_without_a_triton_that_works(trouble: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference under "auto", with the reason for whoever asks; under "fused" the reason is the error."""
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choice.triton_problem.cache_clear()
    reason = trouble(monkeypatch)
    answer = choice.verdict(CUDA, F32, FORM, 24, "auto")
    assert not answer.fused
    assert re.search(reason, answer.why)
    with pytest.raises(OptionError, match=reason), use_kernels("fused"):
        kernels.attend(*layer())
    z, weights, form = layer()
    assert torch.equal(kernels.attend(z, weights, form), reference.attend(z, weights, form, dtype=F32))


@pytest.mark.parametrize("version", ["3.9.0", "3.10.0+git123", "4.0"])
def test_a_triton_that_was_not_tested_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning with the remedy, and plain torch; whoever asks for the fused kernels gets an error."""
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choice.triton_problem.cache_clear()
    found(monkeypatch, SimpleNamespace(__version__=version))
    reason = rf"Triton {re.escape(version)} is newer than 3\.8, the newest that was tested"
    with use_kernels("fused"), pytest.raises(OptionError, match=reason):
        kernels.attend(*layer())
    kernels.attend(*layer())  # where no such device is, nobody needs to know
    with pytest.warns(UserWarning, match=rf"{reason}.*pip install --upgrade 'dmst\[kernels\]'"):
        choice.verdict(CUDA, F32, FORM, 24, "auto")
    answer = choice.verdict(CUDA, F32, FORM, 24, "auto")  # a second warning would be an error here
    assert not answer.fused and re.fullmatch(reason, answer.why)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.8.1+git123"])
def test_a_triton_that_was_tested_is_neither_old_nor_new(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice.triton_problem.cache_clear()
    found(monkeypatch, SimpleNamespace(__version__=version))
    assert " than " not in choice.triton_problem()


def test_devices_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 5))
    answer = choice.verdict(CUDA, torch.float16, FORM, 24, "auto")
    assert answer == (False, "fused kernels need compute capability 8.0 or newer")
    pretend(monkeypatch, (8, 0))
    assert choice.verdict(CUDA, torch.bfloat16, FORM, 24, "auto") == (True, "measured fastest in CUDA graphs")
    for dtype in set(choice.AUTO) - choice.TIMED:  # nothing is called measured that was not
        assert choice.verdict(CUDA, dtype, FORM, 24, "auto") == (True, "as bfloat16; not timed in this dtype")
    monkeypatch.setitem(choice.AUTO, torch.float16, False)
    assert choice.verdict(CUDA, torch.float16, FORM, 24, "auto") == (False, "measured slower in float16")
    assert choice.verdict(CUDA, torch.float16, FORM, 24, "fused").fused


def test_float64_and_heads_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    for chosen in ("auto", "fused"):
        assert choice.verdict(CUDA, F32, Form(64), 64 * 128, chosen).fused
        for form, dim in ((Form(65), 65 * 8), (Form(2), 2 * 129)):
            answer = choice.verdict(CUDA, F32, form, dim, chosen)
            assert answer == (False, f"fused kernels take up to {plan.MOST_HEADS} heads of up to {plan.WIDEST} channels")
        answer = choice.verdict(CUDA, F64, FORM, 24, chosen)
        assert answer == (False, "fused kernels compute in at most float32, and this is float64")


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "why"), [(F64, 24, 3, "float64"), (F32, 130, 65, "64 heads"), (F32, 258, 2, "128 ch")]
)
def test_what_does_not_fit_is_the_reference_or_an_error(
    dtype: torch.dtype, dim: int, heads: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    operator, z = DMSA(dim, heads, dtype=dtype), torch.randn(1, 5, dim, dtype=dtype)
    with use_kernels("fused"), pytest.raises(OptionError, match=why):
        operator(z)
    with torch.no_grad():
        usual = reference.attend(z, operator.weights(), operator.form, dtype=dtype)
        torch.testing.assert_close(operator(z), usual, rtol=0, atol=1e-7)
    if dtype == F64:  # autocast leaves float64 alone, and so does the choice
        with use_kernels("fused"), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(OptionError, match="float64"):
            operator(z)


def test_low_precision_under_autocast_is_what_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in float32, products in bfloat16: the table is asked about bfloat16."""
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    monkeypatch.delitem(choice.AUTO, torch.bfloat16)
    z, weights, form = layer()
    with use_kernels("fused"), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(OptionError, match="bfloat16"):
        kernels.attend(z, weights, form)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(name: str) -> dict[str, Any]:
    """A change of (z, weights) that does not fit, and what the message must say."""
    z, weights, _ = layer(membership_bias=True)
    t, p = layer(mode="proximal")[1], build("tssa", {}, dtype=F32).weights()
    changes: dict[str, tuple[Tensor, Weights, str]] = {
        "two axes": (z[0], weights, r"z is \(7, 24\) in torch\.float32"),
        "four axes": (z[None], weights, r"z is \(1, 2, 7, 24\)"),
        "whole numbers": (z.long(), weights, r"z is .* in torch\.int64"),
        "complex numbers": (z.to(torch.complex64), weights, r"z is .* in torch\.complex64"),
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
    z, weights, message = changes[name]
    return {"z": z, "weights": weights, "message": message}


REFUSED = [
    "two axes", "four axes", "whole numbers", "complex numbers", "another width", "no whole heads", "a weight elsewhere",
    "tokens elsewhere", *Weights._fields,
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("chosen", ["auto", "fused"])
def test_what_does_not_fit_is_named_before_anything_is_launched(
    name: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from dmst.kernels.fused import layer as fused_layer

    launched = []
    for kind in ("forward", "backward"):
        monkeypatch.setattr(fused_layer, kind, lambda *_: launched.append(1))
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    bad = refused(name)
    with use_kernels(chosen), pytest.raises(ShapeError, match=bad["message"]):
        kernels.attend(bad["z"], bad["weights"], FORM)
    assert not launched


@pytest.mark.parametrize("grid", [None, (2, 3), (7,), "11"])
def test_a_grid_that_does_not_fit(grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    z, weights, form = layer(rotary="2d")
    for chosen in ("reference", "fused"):
        with use_kernels(chosen), pytest.raises(ShapeError, match="grid"):
            kernels.attend(z, weights, form, grid=grid)


def test_one_object_entered_twice() -> None:
    once = use_kernels("reference")
    with once:
        with once:
            pass
        assert choice._chosen == "reference"
    assert choice._chosen == "auto"


def test_forms_that_no_operator_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    for form in (Form(3, token_sparse_rescale=True), Form(3, membership="energy", gate=None, uniform_moment=True)):
        assert "this form" in choice.verdict(CUDA, F32, form, 24, "auto").why


def test_exporting_is_asked_of_torch_itself() -> None:
    """In torch 2.11 the compiler took `is_exporting()` for true in all that it compiled, and every compiled layer was plain."""
    from dmst import tracing

    assert tracing._exporting._dynamo_marked_constant
    assert not tracing.exported()
