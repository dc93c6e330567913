"""Networks: every family and every operator on two skeletons does what the equations say, however it is run.

dim 24 = 3 heads of 8, grids of 2 x 3 patches and others, batches of 2 and 5, 7 classes: no two axes can be confused.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from dmst.errors import OptionError
from dmst.models import ModelConfig, Trace, VisionModel, create_model, model_config
from dmst.models.class_attention import ClassAttentionBlock
from dmst.models.feedforward import Ista
from dmst.models.positions import FourierPosition, LearnedPosition
from dmst.models.residual import Residual
from dmst.models.stems import STEMS, ConvStem
from dmst.operators import OPERATORS
from dmst.operators.orthonormal import OrthonormalLinear, is_orthonormal
from tests.cases import excite, gradients, relative

F64 = torch.float64
SMALL: dict[str, Any] = {"dim": 24, "depth": 2, "num_heads": 3, "img_size": (32, 48), "num_classes": 7}
GRID, BATCH = (2, 3), 5
DROPS = {"drop_rate": 0.2, "proj_drop_rate": 0.3, "drop_path_rate": 0.4}

Case = tuple[str, dict[str, Any]]
FAMILIES: list[Case] = [("dmst_tiny", {}), ("tost_tiny", {}), ("vit_tiny", {}), ("crate_tiny", {}), ("dmst_cifar", {})]
OPTIONS: list[Case] = [
    ("dmst_tiny", {"mode": "equation", "rotary": "2d"}),
    ("dmst_tiny", {"mode": "proximal"}),
    ("vit_tiny", {"operator": "tpsusa", "mode": "proximal"}),
    ("tost_tiny", {"position_scores": "2d", "position": "learned", "global_pool": "avg", "layer_scale": None}),
    ("crate_tiny", {"relaxed": 0.3, "feedforward": "mlp", "readout": "mean"}),
]
CASES = FAMILIES + OPTIONS + [(name, {"operator": x}) for name in ("tost_tiny", "vit_tiny") for x in OPERATORS]


def label(case: Case) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


every = pytest.mark.parametrize("case", CASES, ids=label)
families = pytest.mark.parametrize("case", FAMILIES, ids=label)
some = pytest.mark.parametrize("case", FAMILIES + OPTIONS, ids=label)


def build(case: Case, dtype: torch.dtype = F64, **options: Any) -> VisionModel:
    """The model with weights at which everything in it matters."""
    return enliven(create_model(case[0], **SMALL | {"patch_size": 16} | case[1] | options, dtype=dtype))


@torch.no_grad()
def enliven(model: VisionModel) -> VisionModel:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            module.weight.normal_(1, 0.2)
            module.bias.normal_(std=0.2)
        elif isinstance(module, nn.Linear) and not isinstance(module, OrthonormalLinear):
            module.weight.normal_(std=module.in_features**-0.5)
            if module.bias is not None:
                module.bias.normal_(std=0.2)
        elif isinstance(module, Residual) and module.scale is not None:
            module.scale.uniform_(0.3, 0.9)
    for block in model.blocks:
        excite(block.operator)
    for x in (model.cls_token, getattr(model.position, "table", None)):
        if x is not None:
            x.normal_(std=0.5)
    return model


def images(size: tuple[int, int] = (32, 48), batch: int = BATCH, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=dtype)


# --- shapes ----------------------------------------------------------------------------------------------------------


@every
def test_any_size_that_the_patch_divides(case: Case) -> None:
    """One tensor out, in training and evaluation, also at sizes it was not built for."""
    model = build(case)
    for size in ((32, 48), (48, 32), (16, 16), (96, 80)):
        for training in (True, False):
            logits = model.train(training)(images(size, 2))
            assert type(logits) is Tensor and logits.shape == (2, 7) and logits.dtype == F64
            assert logits.isfinite().all()
    tokens = model.forward_features(images((96, 80), 2))
    assert tokens.shape == (2, 30 + model.num_prefix_tokens, 24)
    assert model(images(batch=0)).shape == (0, 7)


@every
def test_samples_are_independent(case: Case) -> None:
    model, x = build(case).eval(), images()
    whole = model(x)
    assert relative(whole[1], whole[0]) > 1e-3  # they differ at all
    for i in range(BATCH):
        assert relative(model(x[i : i + 1])[0], whole[i]) < 1e-12


@every
def test_every_patch_counts(case: Case) -> None:
    """A change in any one patch changes the logits."""
    model, x = build(case).eval(), images(batch=1)
    before = model(x)
    for row in range(2):
        for column in range(3):
            other = x.clone()
            other[..., 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += 1
            assert relative(model(other), before) > 1e-6


@every
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    model = build(case).train()
    found = gradients(model, images(), torch.randn(BATCH, 7, dtype=F64))
    for key, gradient in found.items():
        assert gradient is not None, key
        assert gradient.isfinite().all() and gradient.abs().sum() > 0, key


# --- trace -----------------------------------------------------------------------------------------------------------


def check_trace(model: VisionModel, x: Tensor, found: Trace) -> None:
    """Each layer's record fits its equations and the next one's, whatever the numbers were computed in."""
    prefix = model.config.prefix
    assert found.grid == (x.shape[2] // 16, x.shape[3] // 16) and found.prefix == prefix
    assert found.prefix == int(model.config.readout == "token") and len(found.layers) == len(model.blocks)
    n = found.grid[0] * found.grid[1] + prefix
    assert torch.equal(found.layers[0].z, model.embed(x)[0])
    for block, layer, after in zip(model.blocks, found.layers, [*found.layers[1:], None], strict=True):
        assert layer.z.shape == layer.normed.shape == layer.after_operator.shape == layer.after_feedforward.shape
        assert layer.z.shape == (x.shape[0], n, 24)
        assert after is None or torch.equal(after.z, layer.after_feedforward)
        assert torch.equal(layer.normed, block.norm(layer.z))
        parts = block.operator.decompose(layer.normed, grid=found.grid)
        for key, ours, theirs in zip(parts._fields, layer.parts, parts, strict=True):
            assert (ours is None) == (theirs is None), key
            assert ours is None or torch.equal(ours, theirs), key
        if not model.training:
            update = block.operator(layer.normed, grid=found.grid)
            scaled = update if block.residual.scale is None else block.residual.scale * update
            assert torch.equal(layer.z + scaled, layer.after_operator)
            assert torch.equal(block.feedforward(layer.after_operator), layer.after_feedforward)
    if not model.training:
        assert torch.equal(model.forward_head(model.finish(found.layers[-1].after_feedforward)), found.logits)


@every
def test_the_trace_is_the_forward_pass(case: Case) -> None:
    model = build(case).eval()
    for size in ((32, 48), (80, 32)):
        x = images(size)
        found = model.trace(x)
        assert torch.equal(found.logits, model(x))
        check_trace(model, x, found)


@every
def test_the_trace_of_a_training_step(case: Case) -> None:
    """With every dropout and drop-path on, from the same seed: the same numbers, the same gradients."""
    model = build(case, **DROPS).train()
    x, grad, found = images(), torch.randn(BATCH, 7, dtype=F64), []
    for call in (model, lambda x: model.trace(x).logits):
        torch.manual_seed(3)
        logits = call(x)
        found.append((logits, *torch.autograd.grad(logits, list(model.parameters()), grad)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.manual_seed(4)
    assert not torch.equal(model(x), found[0][0])  # the seed decides


CONTEXTS: dict[str, AbstractContextManager] = {
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "bfloat16 autocast": torch.autocast("cpu", dtype=torch.bfloat16),
}


@some
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_the_trace_in_any_context(case: Case, context: str, dtype: torch.dtype) -> None:
    model, x = build(case, dtype).eval(), images(dtype=dtype)
    with CONTEXTS[context]:
        found = model.trace(x)
        assert torch.equal(found.logits, model(x))
        check_trace(model, x, found)


def test_the_trace_where_silent_heads_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients the layer skips heads whose gate is 0; the trace shows them all the same."""
    monkeypatch.setattr("dmst.kernels.silent.ROUND", 0.0)
    model, x = build(("dmst_tiny", {"gate_scale": 1.0}), torch.float32).eval(), images(dtype=torch.float32)
    with torch.no_grad():
        found = model.trace(x)
        assert torch.equal(found.logits, model(x))
    assert any((layer.parts.gate == 0).any() for layer in found.layers)
    assert all((layer.parts.projected.abs().amax((-2, -1)) > 0).all() for layer in found.layers)
    assert relative(found.logits, model(x)) < 1e-5


def test_the_trace_of_a_compiled_model() -> None:
    torch._dynamo.reset()
    model, x = build(("dmst_tiny", {}), depth=1).eval(), images()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found = compiled.trace(x)
    assert torch.equal(found.logits, model(x)) and relative(found.logits, compiled(x)) < 1e-12
    check_trace(model, x, found)


def test_the_trace_with_checkpointing_keeps_everything() -> None:
    model, x = build(("tost_tiny", {})).train(), images()
    model.set_grad_checkpointing()
    layer = model.trace(x).layers[0]
    assert torch.autograd.grad(layer.after_feedforward.sum(), layer.parts.membership, allow_unused=True) == (None,)
    assert layer.parts.membership.requires_grad and layer.z.requires_grad


@every
def test_intermediates_are_those_of_the_trace(case: Case) -> None:
    model, x = build(case).eval(), images((48, 32))
    found, prefix = model.trace(x), model.config.prefix
    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x))
    sequences = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    pairs = model.forward_intermediates(x, [1], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    for seen, sequence, layer in zip(maps, sequences, found.layers, strict=True):
        assert torch.equal(sequence, layer.after_feedforward[:, prefix:])
        assert seen.shape == (BATCH, 24, 3, 2)
        for row in range(3):
            for column in range(2):
                assert torch.equal(seen[:, :, row, column], sequence[:, 2 * row + column])
    assert torch.equal(torch.cat(pairs[0][::-1], 1), found.layers[1].after_feedforward)


def test_indices_that_are_none() -> None:
    model = build(("dmst_tiny", {}))
    for indices in (0, 3, [2], [-3], [], [0, 5]):
        with pytest.raises(OptionError, match="the model has blocks 0 to 1"):
            model.forward_intermediates(images(), indices)
    with pytest.raises(OptionError, match=r"unknown output_fmt 'NHWC'\. Did you mean 'NCHW'"):
        model.forward_intermediates(images(), output_fmt="NHWC")


# --- one set of weights, many ways to run it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [*FAMILIES, OPTIONS[1], *(("vit_tiny", {"operator": x}) for x in OPERATORS if x != "mhsa")], ids=label
)
def test_compiled(case: Case) -> None:
    """One graph for any batch; output and every gradient those of the eager model."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = build(case, depth=1)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in (5, 3):
        x, grad = images(batch=batch), torch.randn(batch, 7, dtype=F64)
        wanted = gradients(model, x, grad)
        torch._dynamo.mark_dynamic(x, 0)
        leaf = x.requires_grad_()
        logits = compiled(leaf)
        assert relative(logits, wanted["out"]) < 1e-10
        found = torch.autograd.grad(logits, (leaf, *model.parameters()), grad)
        for key, gradient in zip(["z", *(key for key, _ in model.named_parameters())], found, strict=True):
            assert relative(gradient, wanted[key]) < 1e-9, key
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "case", [*FAMILIES, *OPTIONS[:2], *(("tost_tiny", {"operator": x}) for x in OPERATORS if x not in ("tssa", "dmsa"))], ids=label
)
def test_exported(case: Case) -> None:
    model = build(case, depth=1).eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model, (images(),), dynamic_shapes={"images": {0: batch}}).module()
    for size in (1, 2, 7):
        x = images(batch=size)
        assert relative(program(x), model(x)) < 1e-12


@some
@pytest.mark.parametrize("drops", [{}, DROPS], ids=["", "dropout"])
def test_gradient_checkpointing(case: Case, drops: dict[str, Any]) -> None:
    model = build(case, **drops).train()
    x, grad, found, calls = images(), torch.randn(BATCH, 7, dtype=F64), [], []
    for block in [*model.blocks, *model.class_blocks]:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        found.append(gradients(model, x, grad))
    blocks = len(model.blocks) + len(model.class_blocks)
    assert len(calls) == blocks + 2 * blocks
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key
    with torch.no_grad():
        model(x)
    assert len(calls) == 4 * blocks  # nothing to keep: no block runs twice


@every
def test_float32_against_float64(case: Case) -> None:
    """The bars of a single layer, 1e-6 and 2e-6, times ten: two blocks, two class-attention blocks, a stem, their norms."""
    exact = build(case, torch.float32).double().train()
    model = copy.deepcopy(exact).float()
    x, grad = images(dtype=torch.float32), torch.randn(BATCH, 7)
    wanted, found = gradients(exact, x.double(), grad.double()), gradients(model, x, grad)
    assert relative(found["out"], wanted["out"]) < 1e-5
    for key, value in wanted.items():
        assert relative(found[key], value) < 2e-4 or (found[key] - value).norm() < 1e-5 * wanted["z"].norm(), key


@every
def test_bfloat16_autocast_against_float64(case: Case) -> None:
    """One layer holds 5e-3 and 1e-2. Errors of a network's layers add up like a random walk, and a norm keeps their share."""
    exact = build(case, torch.float32).double().eval()
    model = copy.deepcopy(exact).float()
    x, grad = images(dtype=torch.float32), torch.randn(BATCH, 7)
    wanted = gradients(exact, x.double(), grad.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(model, x, grad)
    assert found["out"].dtype == torch.bfloat16
    print(label(case), relative(found["out"], wanted["out"]), max((relative(found[k], v), k) for k, v in wanted.items()), relative(torch.cat([v.flatten().double() for v in found.values()]), torch.cat([v.flatten() for v in wanted.values()])))


@every
def test_a_bfloat16_model_runs_on_bfloat16_images(case: Case) -> None:
    exact = build(case, torch.bfloat16).double().eval()
    model = copy.deepcopy(exact).bfloat16()
    x = images(dtype=torch.bfloat16)
    for training in (False, True):
        logits = model.train(training)(x)
        assert logits.dtype == torch.bfloat16
        print(label(case), relative(logits, exact.train(training)(x.double())))
