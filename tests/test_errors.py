"""Errors that help."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from dmst import errors
from dmst.models.zoo import model_config


def test_nearest_name_and_the_whole_list() -> None:
    error = errors.unknown_name("model", "dmst_smal", ["dmst_small", "dmst_tiny"])
    assert str(error) == "unknown model 'dmst_smal'. Did you mean 'dmst_small'? Known: dmst_small, dmst_tiny."
    assert isinstance(error, errors.OptionError) and isinstance(error, ValueError) and isinstance(error, errors.DmstError)
    assert str(errors.unknown_name("model", "x", [])) == "unknown model 'x'. Known: none."
    path = "/a/folder/that/is/quite/deep" * 8
    assert repr(path) in str(errors.unknown_name("dataset", path, ["digits"]))
    assert len(str(errors.unknown_name("dataset", "x" * 10**6, ["digits"]))) < 1000
    assert errors.choose("cap", None, (None, 1)) is None
    with pytest.raises(errors.UnknownNameError, match="'b'"):
        errors.choose("letter", "b", ("a",))


def test_what_python_cannot_write_is_refused_by_name() -> None:
    """Python refuses to write a number of over 4,300 digits, with a ValueError that names nothing."""
    for option in ("dim", "mlp_ratio", "qkv_bias", "stem", "operator", "gate_scale"):
        with pytest.raises(errors.OptionError, match=option):
            model_config("dmst_tiny", **{option: 10**5000})
    for option in ("groups", "key_dim", "rounds"):
        for value in (10**5000, 2**63):
            with pytest.raises(errors.OptionError, match=rf"{option} is .*at most 65,536"):
                model_config("gmst_tiny", **{option: value})
    with pytest.raises(errors.OptionError, match="gate_scale is 1000"):
        model_config("dmst_tiny", gate_scale=10**400)
    assert errors.number("x", 10**300, -float("inf"), float("inf")) == 1e300


def test_a_missing_or_broken_library_names_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert errors.need("json", "none").dumps([]) == "[]"
    with pytest.raises(errors.MissingExtraError, match=r"pip install 'dmst\[report\]'") as missing:
        errors.need("a_library_that_is_not_there", "report")
    assert isinstance(missing.value, ImportError)
    (tmp_path / "broken_vision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(errors.MissingExtraError, match=r"RuntimeError: operator torchvision::nms.*from the same index"):
        errors.need("broken_vision", "timm")


def test_without_timm_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dmst.integrations.timm", raising=False)
    for name in ("torchvision", "timm", "timm.layers", "timm.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.MissingExtraError, match=r"pip install 'dmst\[timm\]'"):
        importlib.import_module("dmst.integrations.timm")
