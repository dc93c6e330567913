"""Whole networks on a GPU: equal to the CPU, traced and checkpointed alike, compiled by inductor, loaded onto the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmst import create_model, load_model, save_model, use_kernels
from dmst.analysis import layer_rates, maps
from dmst.models import VisionModel
from tests.cases import relative

pytestmark = pytest.mark.gpu
FAMILIES = ("dmst_tiny", "tost_tiny", "vit_tiny", "crate_tiny")


def small(name: str, **options: object) -> VisionModel:
    return create_model(name, **{"dim": 96, "depth": 3, "num_heads": 3, "img_size": 64, "num_classes": 7, **options})


@pytest.mark.parametrize("name", FAMILIES)
def test_gpu_is_cpu(name: str) -> None:
    model = small(name, dtype=torch.float64).train()
    images = torch.randn(3, 3, 64, 96, dtype=torch.float64)
    here = model(images)
    here.square().sum().backward()
    before = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    there = model.cuda()(images.cuda())
    there.square().sum().backward()
    assert relative(there.cpu(), here) < 1e-9
    for key, p in model.named_parameters():
        assert relative(p.grad.cpu(), before[key]) < 1e-7 or (p.grad.cpu() - before[key]).norm() < 1e-9, key


@pytest.mark.parametrize("name", FAMILIES)
def test_trace_checkpointing_and_autocast_agree(name: str) -> None:
    model, images = small(name, device="cuda"), torch.randn(4, 3, 64, 64, device="cuda")
    with torch.no_grad():
        exact = small(name, dtype=torch.float64, device="cuda")
        exact.load_state_dict(model.state_dict())
        told = exact.eval()(images.double())
        assert torch.equal(model.eval().trace(images).logits, model(images))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            mixed = model(images)
            assert torch.equal(model.trace(images).logits, mixed)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # or the stem's convolutions keep ten bits
        assert relative(model(images).double(), told) < 1e-5
    assert relative(mixed.double(), told) < 5e-2
    model.train()
    plain = model(images)
    model.set_grad_checkpointing()
    assert torch.allclose(model(images), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dmst_tiny", "gmst_tiny"])
def test_a_scale_in_the_last_map_has_the_gradients_of_a_scaled_update(name: str) -> None:
    """In eager training in bfloat16. Who listens to a step hears its update: that network scales updates."""
    model, images = small(name, device="cuda", layer_scale=0.5).train(), torch.randn(4, 3, 64, 64, device="cuda")

    def gradients() -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images).float().square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    found = gradients()
    for block in model.blocks:
        block.operator.register_forward_hook(lambda *_: None)
        block.feedforward.mlp.register_forward_hook(lambda *_: None)
    for (key, _), got, want in zip(model.named_parameters(), found, gradients(), strict=True):
        assert (got - want).norm() <= 5e-2 * want.norm() + 1e-3, key


def test_inductor_compiles_a_whole_network() -> None:
    torch._dynamo.reset()
    model = small("dmst_tiny", device="cuda").eval()
    compiled = torch.compile(model, fullgraph=True)
    images = torch.randn(4, 3, 64, 64, device="cuda")
    with torch.no_grad():
        assert relative(compiled(images), model(images)) < 1e-3
        assert maps(compiled.trace(images), 0).shape == (4, 3, 4, 4)
    compiled(images).sum().backward()


def test_saved_here_loaded_there(tmp_path: Path) -> None:
    model = small("dmst_tiny", device="cuda").eval()
    again = load_model(save_model(model, tmp_path / "m"), device="cuda")
    images = torch.randn(2, 3, 64, 64, device="cuda")
    assert next(again.parameters()).is_cuda
    assert torch.equal(again(images), model(images))


def test_rates_on_the_gpu_are_those_of_the_cpu() -> None:
    model, images = small("dmst_tiny").eval(), torch.randn(5, 3, 64, 64)
    here = layer_rates(model, images)
    there = layer_rates(model.cuda(), images.cuda())
    for name in here.mean:
        assert there.mean[name] == pytest.approx(here.mean[name], rel=1e-3)


def test_a_local_network_compiles() -> None:
    """Forward and backward of a compiled network: the gradients of the plain one, in bfloat16."""
    model = create_model("dmst_cifar10", depth=2).cuda().to(memory_format=torch.channels_last)
    for block in model.blocks:
        torch.nn.init.normal_(block.feedforward.mlp.local.weight, std=0.2)
    images = torch.randn(8, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16):
            net(images).float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    with use_kernels("reference"):
        plain = gradients(model)
    net = torch.compile(model, dynamic=False)
    for got, want in zip(gradients(net), plain, strict=True):
        assert (got - want).norm() <= 5e-2 * want.norm() + 1e-3
