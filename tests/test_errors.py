"""Errors that help."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dmst import errors
from dmst.engine.recipe import Run
from dmst.models.zoo import model_config
from tests import forked

ROOT = Path(errors.__file__).parent.parent


def test_nearest_name_and_the_whole_list() -> None:
    error = errors.unknown_name("model", "dmst_smal", ["dmst_small", "dmst_tiny"])
    assert str(error) == "unknown model 'dmst_smal'. Did you mean 'dmst_small'? Known: dmst_small, dmst_tiny."
    assert isinstance(error, errors.OptionError) and isinstance(error, ValueError) and isinstance(error, errors.DmstError)
    assert str(errors.unknown_name("model", "x", [])) == "unknown model 'x'. Known: none."


def test_choose() -> None:
    assert errors.choose("cap", None, (None, 1)) is None
    with pytest.raises(errors.UnknownNameError, match="'b'"):
        errors.choose("letter", "b", ("a",))


@pytest.mark.parametrize("value", [10**5000, [10**5000], -(10**5000)], ids=["long", "inside", "negative"])
def test_what_python_cannot_write_is_refused_by_name(value: object) -> None:
    """Python refuses to write a number of over 4,300 digits, with a ValueError that names nothing."""
    for option in ("dim", "mlp_ratio", "qkv_bias", "stem", "img_size", "operator", "max_active_heads", "gate_scale", "mode"):
        with pytest.raises(errors.OptionError, match=option):
            model_config("dmst_tiny", **{option: value})
    for key in ("keep", "compile", "amp"):
        with pytest.raises(errors.OptionError, match=key):
            Run(batch_size=8, **{key: value})


def test_a_number_beyond_every_float_is_refused() -> None:
    with pytest.raises(errors.OptionError, match="gate_scale is 1000"):
        model_config("dmst_tiny", gate_scale=10**400)
    assert errors.number("x", 10**300, -float("inf"), float("inf")) == 1e300


def test_a_missing_or_broken_library_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    assert errors.need("json", "none").dumps([]) == "[]"
    with pytest.raises(errors.MissingExtraError, match=r"pip install 'dmst\[report\]'") as missing:
        errors.need("a_library_that_is_not_there", "report")
    assert isinstance(missing.value, ImportError)
    (tmp_path / "broken_vision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")  # type: ignore[operator]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(errors.MissingExtraError, match=r"RuntimeError: operator torchvision::nms"):
        errors.need("broken_vision", "timm")


# torch, torchvision, the torch that torchvision asks for; what is said of them
PAIRS = [
    ("2.13.0+cpu", "0.28.0+cpu", "2.13.0", ""),
    ("2.13.0+cu130", "0.28.0+cu130", "2.13.0", ""),
    ("2.13.0", "0.28.0", "2.13.0", ""),
    ("2.13.0+cpu", "", "", ""),
    ("2.13.0+cpu", "0.28.0+cu130", "2.13.0", "0.28.0+cu130 (CUDA build) does not fit torch 2.13.0+cpu (CPU build)"),
    ("2.13.0+cu126", "0.28.0+cu130", "2.13.0", "0.28.0+cu130 (CUDA build) does not fit torch 2.13.0+cu126 (CUDA build)"),
    ("2.12.0+cpu", "0.28.0+cpu", "2.13.0", "0.28.0+cpu (CPU build) does not fit torch 2.12.0+cpu (CPU build)"),
]


@pytest.mark.parametrize(("torch", "vision", "asked", "said"), PAIRS)
def test_which_torchvision_fits(torch: str, vision: str, asked: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "build_of", {"torch": torch, "torchvision": vision}.get)
    monkeypatch.setattr(errors, "asked_by", lambda *_: asked)
    assert errors.misfit() == (said and f"torchvision {said}")


def test_a_pair_that_does_not_fit_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this machine, if it does not fit; else a pair of the same kind, and an import that fails as theirs does."""
    if not errors.misfit():

        def fails(name: str) -> None:
            raise RuntimeError("operator torchvision::nms does not exist")

        monkeypatch.setattr(errors, "build_of", {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cu130"}.get)
        monkeypatch.setattr(errors, "importlib", SimpleNamespace(import_module=fails))
    monkeypatch.delitem(sys.modules, "dmst.integrations.timm", raising=False)
    with pytest.raises(errors.MissingExtraError) as told:
        importlib.import_module("dmst.integrations.timm")
    assert f"{errors.misfit()}: install both from the same index" in str(told.value)
    assert "\n" not in str(told.value)


def test_without_timm_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dmst.integrations.timm", raising=False)
    for name in ("torchvision", "timm", "timm.layers", "timm.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.MissingExtraError, match=r"pip install 'dmst\[timm\]'"):
        importlib.import_module("dmst.integrations.timm")


def test_without_timm_a_script_of_timm_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "validate.py").write_text("raise RuntimeError('it ran')")
    hide = "import runpy, sys; sys.modules.update(dict.fromkeys(('torchvision', 'timm', 'timm.layers', 'timm.models')))"
    code = f"{hide}; runpy.run_module('dmst.integrations.timm', run_name='__main__', alter_sys=True)"
    done = forked.python("-c", code, str(tmp_path / "validate.py"), root=ROOT, strict=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("torchvision could not be imported") and "pip install 'dmst[timm]'" in done.stderr


def test_builds_and_what_a_package_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its files; it is not imported."""
    for folder in ("some_vision", "some_vision-1.2.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / "some_vision/__init__.py").write_text("raise RuntimeError")
    (tmp_path / "some_vision/version.py").write_text("__version__ = '1.2+cu130'\ncuda = '13.0'\n")
    asks = ["numpy", "torch-x==9", "torch (==2.13.0)", 'triton==3.7.1; platform_system == "Linux"', "pillow>=5.3"]
    lines = ["Metadata-Version: 2.1", "Name: some-vision", "Version: 1.2", *(f"Requires-Dist: {line}" for line in asks)]
    (tmp_path / "some_vision-1.2.dist-info/METADATA").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert errors.build_of("some_vision") == "1.2+cu130"
    assert errors.build_of("a_library_that_is_not_there") == errors.build_of("json") == ""
    found = [errors.asked_by("some-vision", other) for other in ("torch", "triton", "numpy", "pillow")]
    assert found == ["2.13.0", "3.7.1", "", ""]
    assert errors.asked_by("a_library_that_is_not_there", "torch") == ""


def test_a_path_that_is_no_name_is_told_in_full() -> None:
    path = "/a/folder/that/is/quite/deep" * 8
    assert repr(path) in str(errors.unknown_name("dataset", path, ["digits"]))
    assert len(str(errors.unknown_name("dataset", "x" * 10**6, ["digits"]))) < 1000
