"""Networks: every family and every operator on two skeletons does what it says, however it is run."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from dmst.errors import OptionError, ShapeError
from dmst.models import Trace, VisionModel, create_model
from dmst.operators.orthonormal import OrthonormalLinear
from tests.cases import gradients, relative
from tests.networks import (
    BATCH,
    DROPS,
    F64,
    FAMILIES,
    OPTIONS,
    Case,
    build,
    every,
    images,
    label,
    some,
)

# --- shapes ----------------------------------------------------------------------------------------------------------


@every
def test_any_size_that_the_patch_divides(case: Case) -> None:
    """One tensor out, in training and evaluation, also at sizes it was not built for. GMSA refuses too few patches."""
    model = build(case)
    sizes = [(32, 48), (48, 32), (16, 16), (96, 80)]
    if model.blocks[0].operator.least_tokens > 1:
        with pytest.raises(ShapeError, match=r"larger images"):
            model(images(sizes.pop(2), 2))
    for size in sizes:
        for training in (True, False):
            logits = model.train(training)(images(size, 2))
            assert type(logits) is Tensor and logits.shape == (2, 7) and logits.dtype == F64
            assert logits.isfinite().all()
    tokens = model.forward_features(images((96, 80), 2))
    assert tokens.shape == (2, 30 + (model.cls_token is not None), 24)
    assert model(images(batch=0)).shape == (0, 7)


@every
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    """From the logits each parameter has one; from all tokens together none is 0 (a class token may be left untouched)."""
    model = build(case).train()
    for key, gradient in gradients(model, images(), torch.randn(BATCH, 7, dtype=F64)).items():
        assert gradient is not None and gradient.isfinite().all(), key
    model.zero_grad()
    tokens = model.forward_features(images())
    (model.forward_head(tokens).sum() + (tokens * torch.randn_like(tokens)).sum()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("listened", [None, "norm", "class_blocks.1"])
def test_what_nobody_reads_changes_no_logit_and_no_gradient(listened: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last class block the patches are left out, unless somebody listens to that block or to the norm."""
    model, x, grad = build(("dmst_tiny", {})).train(), images(), torch.randn(BATCH, 7, dtype=F64)
    parameters, normed = list(model.parameters()), list[int]()
    wanted = model.forward_head(model.forward_features(x))
    right = torch.autograd.grad(wanted, parameters, grad)
    if listened:
        model.get_submodule(listened).register_forward_hook(lambda *_: None)
    forward = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda norm, z: normed.append(z.shape[1]) or forward(norm, z))
    logits = model(x)
    assert normed[-1] == (7 if listened else 1)
    assert relative(logits, wanted) < 1e-14
    for mine, other in zip(torch.autograd.grad(logits, parameters, grad), right, strict=True):
        assert relative(mine, other) < 1e-12


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
            torch.testing.assert_close(layer.z + scaled, layer.after_operator)  # there in one operation
            assert torch.equal(block.feedforward(layer.after_operator, found.grid), layer.after_feedforward)
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


def test_indices_that_are_none() -> None:
    model = build(("dmst_tiny", {}))
    for indices in (0, 3, [2], [-3], [], [0, 5]):
        with pytest.raises(OptionError, match="the model has blocks 0 to 1"):
            model.forward_intermediates(images(), indices)
    with pytest.raises(OptionError, match=r"unknown output_fmt 'NHWC'\. Did you mean 'NCHW'"):
        model.forward_intermediates(images(), output_fmt="NHWC")


# --- one set of weights, many ways to run it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        FAMILIES[4],
        *(
            pytest.param(case, marks=pytest.mark.compile)
            for case in (*FAMILIES[:4], OPTIONS[2], ("vit_tiny", {"operator": "xca"}))
        ),
    ],
    ids=lambda case: label(case),
)
def test_compiled(case: Case) -> None:
    """One graph for any batch; output and every gradient those of the eager model."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = build(case, depth=1, readout_depth=1)
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


@pytest.mark.compile
@some
def test_exported(case: Case) -> None:
    """One graph for every batch and size; learned positions are resized inside it. A grid of 2d positions is fixed, and so is
    one that GMSA cuts into cells."""
    model = build(case, depth=1, readout_depth=1).eval()
    batch, height, width = (torch.export.Dim(axis, min=2, max=8) for axis in ("batch", "height", "width"))
    fixed = "2d" in case[1].values() or case[1].get("feedforward") == "local" or model.config.operator == "gmsa"
    shapes = {0: batch} if fixed else {0: batch, 2: 16 * height, 3: 16 * width}
    program = torch.export.export(model, (images((64, 48)),), dynamic_shapes={"images": shapes}).module()
    for size in [(64, 48)] if fixed else [(64, 48), (32, 32), (48, 128)]:
        x = images(size, batch=3)
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


def twins(case: Case, dtype: torch.dtype) -> tuple[VisionModel, VisionModel]:
    """A model in float64 and its copy in `dtype`, whose weights are the same numbers."""
    exact = build(case, dtype).double()
    for module in exact.modules():
        if isinstance(module, OrthonormalLinear):
            module.retract_()  # to the last bit of float64, else one twin would do it and the other would not
    return exact, copy.deepcopy(exact).to(dtype)


def whole(found: dict[str, Tensor]) -> Tensor:
    """Every gradient as one vector: a small one among them has no right to be exact."""
    return torch.cat([gradient.flatten().double() for key, gradient in found.items() if key != "out"])


@every
def test_float32_against_float64(case: Case) -> None:
    """One layer holds 1e-6 and 2e-6; a network of stem, two blocks and readout, twice that (seen: 6e-7 and 1.3e-6)."""
    exact, model = twins(case, torch.float32)
    x, grad = images(dtype=torch.float32), torch.randn(BATCH, 7)
    wanted, found = gradients(exact, x.double(), grad.double()), gradients(model, x, grad)
    assert relative(found["out"], wanted["out"]) < 2e-6
    assert relative(whole(found), whole(wanted)) < 4e-6


@every
def test_bfloat16_autocast_against_float64(case: Case) -> None:
    """One layer holds 5e-3 and 1e-2; a network of about ten roundings between norms holds some times that.

    Seen over four seeds: logits 1.9e-2, gradients 3e-2. A sparse gate and CRATE's relu have kinks, and what bfloat16 puts on
    the other side of one has another gradient: 7e-2 and 1e-1.
    """
    exact, model = twins(case, torch.float32)
    x, grad = images(dtype=torch.float32), torch.randn(BATCH, 7)
    wanted = gradients(exact, x.double(), grad.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(model, x, grad)
    assert found["out"].dtype == torch.bfloat16 and found["head.weight"].dtype == torch.float32
    assert relative(found["out"], wanted["out"]) < 4e-2
    assert relative(whole(found), whole(wanted)) < (2.5e-1 if model.config.feedforward == "ista" else 1e-1)


@every
def test_a_bfloat16_model_runs_on_bfloat16_images(case: Case) -> None:
    """Here the tokens between the layers are rounded too (seen over four seeds: 2.1e-2)."""
    exact, model = twins(case, torch.bfloat16)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    x = images(dtype=torch.bfloat16)
    for training in (False, True):
        logits = model.train(training)(x)
        assert logits.dtype == torch.bfloat16
        assert relative(logits, exact.train(training)(x.double())) < 5e-2


# --- the named ones --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dmst_digits", "crate_digits"])
def test_a_small_model_learns(name: str) -> None:
    """As it comes: which half of the picture is bright, in a few steps."""
    model = create_model(name, num_classes=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = 0.3 * torch.randn(32, 1, 8, 8), torch.arange(32) % 2
    x[y == 0, :, :, :4] += 1
    x[y == 1, :, :, 4:] += 1
    for _ in range(25):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model.eval()(x).argmax(1) == y).double().mean() > 0.9


def replica(module: nn.Module) -> nn.Module:
    """As nn.DataParallel makes one: weights are plain attributes, and `parameters()` is empty."""
    copied = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else replica(child)
    for name, parameter in module._parameters.items():
        copied._parameters.pop(name, None)
        setattr(copied, name, None if parameter is None else parameter.detach().clone())
    return copied


@pytest.mark.parametrize("name", ["dmst_tiny", "vit_tiny", "crate_tiny"])
def test_a_replica_of_data_parallel_runs(name: str) -> None:
    model = create_model(name, dim=24, depth=2, num_heads=3, img_size=32, num_classes=7).eval()
    x = torch.randn(2, 3, 32, 32)
    assert not list(replica(model).parameters())
    assert relative(replica(model)(x), model(x)) < 1e-5
