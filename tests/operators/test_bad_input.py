"""Bad input raises before anything is computed, and names the value, the rule and the nearest valid name."""

from __future__ import annotations

import pytest
import torch

from dmst.errors import OptionError, ShapeError, UnknownNameError
from dmst.operators import DMSA, MHSA, OPERATORS, TSSA, Operator, create

every = pytest.mark.parametrize("name", OPERATORS)


CASES = [  # one or two for each kind of rule
    (lambda: create("dmsa", 20, 3), OptionError, r"dim 20 is not divisible by num_heads 3; the nearest that divides it is"),
    (lambda: create("dmsa", 15, 3), OptionError, r"dim is 15: rotary='1d'.*divisible by 2"),
    (lambda: create("dmsa", 18, 3, rotary="2d"), OptionError, r"dim is 18: rotary='2d'.*divisible by 4"),
    (lambda: create("dsma", 24, 3), UnknownNameError, r"unknown operator 'dsma'. Did you mean 'dmsa'\? Known: dmsa, gated"),
    (lambda: create("dmsa", 24, 3, moed="listing"), UnknownNameError, r"option of DMSA 'moed'. Did you mean 'mode'"),
    (lambda: create("mhsa", 24, 3, biass=True), UnknownNameError, r"option of MHSA.*Did you mean 'bias'"),
    (lambda: DMSA(24, 3, mode="listings"), UnknownNameError, r"mode 'listings'. Did you mean 'listing'"),
    (lambda: DMSA(24, 3, gate_activation="softmax"), UnknownNameError, r"gate_activation 'softmax'. Did you mean 'sparsemax'"),
    (lambda: DMSA(24, 3, rotary="3d"), UnknownNameError, r"rotary mode '3d'"),
    (lambda: TSSA(24, 3, position_scores="yes"), UnknownNameError, r"position_scores 'yes'"),
    (lambda: DMSA(24, 3, max_active_heads=4), OptionError, r"max_active_heads is 4.*1 to num_heads 3"),
    (lambda: DMSA(24, 3, max_active_heads=True), OptionError, r"max_active_heads is True"),
    (lambda: DMSA(24, 3, max_active_heads=2, gate_activation="relu"), OptionError, r"caps a sparsemax gate only"),
    (lambda: DMSA(24, 3, gate_scale=float("nan")), OptionError, r"gate_scale is nan"),
    (lambda: DMSA(24, 0), OptionError, r"num_heads is 0"),
    (lambda: DMSA(24.0, 3), OptionError, r"dim is 24.0"),
    (lambda: create("mssa", 24, 3, relaxed=0.0), OptionError, r"relaxed is 0.0"),
    (lambda: DMSA(24, 3, attn_drop=0.1), OptionError, r"attn_drop is 0.1.*use proj_drop"),
    (lambda: create("xca", 24, 3, proj_drop="0.1"), OptionError, r"proj_drop is '0.1'"),
    (lambda: DMSA(24, 3, qk_scale=0.0), OptionError, r"qk_scale is 0.0: DMSA does not apply it"),
    (lambda: DMSA(24, 3, bias="false"), OptionError, r"bias is 'false': it must be True or False"),
    (lambda: DMSA(24, 3)(torch.randint(0, 9, (2, 7, 24))), ShapeError, r"torch.float32 weights .* torch.int64 tokens"),
    (lambda: MHSA(24, 3)(torch.randn(2, 7, 24).half()), ShapeError, r"convert one, or use torch.autocast"),
    (lambda: DMSA(24, 3, rotary="2d")(torch.randn(2, 6, 24), grid=6), ShapeError, r"grid is 6: .*needs grid=\(rows, columns\)"),
    (lambda: DMSA(24, 3)(torch.randn(2, 24)), ShapeError, r"\(batch, tokens, 24\), not \(2, 24\)"),
    (lambda: DMSA(24, 3, rotary="2d")(torch.randn(2, 6, 24)), ShapeError, r"needs grid"),
    (lambda: DMSA(24, 3, rotary="2d")(torch.randn(2, 6, 24), grid=(2, 2)), ShapeError, r"grid is \(2, 2\): .* of the 6 tokens"),
]


@pytest.mark.parametrize(("build_it", "error", "message"), CASES)
def test_bad_input_is_named(build_it: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        build_it()  # type: ignore[operator]
    assert issubclass(error, ValueError)


@every
def test_words_of_the_lineage_are_taken(name: str) -> None:
    """ToST's block passes qkv_bias, qk_scale, attn_drop and proj_drop; the printed listing fails there."""
    operator: Operator = OPERATORS[name](24, num_heads=3, qkv_bias=False, qk_scale=None, attn_drop=0.0, proj_drop=0.0)
    assert not any(key in ("subspace.bias", "qkv.bias") for key in operator.state_dict())
