"""Tools that replace, hook, prune, quantize or differentiate layers meet what they expect."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import dmst
from dmst.models import create_model, save_model
from dmst.operators import create
from dmst.operators.orthonormal import OrthonormalLinear
from tests.cases import FAMILY, VARIANTS, N, build, grid_of, label, tokens
from tests.forked import python

GRID = grid_of(N)
Case = tuple[str, dict[str, Any]]
MAPS = ("subspace", "assign", "out")

# --- gradients ---------------------------------------------------------------------------------------------------------


def gradients(operator: nn.Module, z: Tensor, h: Tensor, grid: Any) -> dict[str, Tensor]:
    operator.zero_grad()
    (operator(z, grid=grid) * h).sum().backward()
    return {name: p.grad for name, p in operator.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", VARIANTS, ids=label)
def test_gradients_are_the_same_in_both_modes(case: Case, dtype: torch.dtype) -> None:
    """Fine-tuning with frozen batch norms, and influence methods, ask in evaluation mode."""
    operator = build(*case, dtype=dtype)
    z, h = tokens(dtype=dtype), tokens(dtype=dtype)
    trained = gradients(operator.train(), z, h, GRID)
    evaluated = gradients(operator.eval(), z, h, GRID)
    assert trained.keys() == evaluated.keys() == {name for name, _ in operator.named_parameters()}
    for name, found in evaluated.items():
        assert torch.equal(found, trained[name]), name


# --- layers that were replaced or are listened to ----------------------------------------------------------------------


class LoRA(nn.Module):
    """As PEFT wraps a layer: `weight` is that of the layer inside, and no part of the adapter."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        like = {"dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, base.out_features, bias=False, **like)
        nn.init.normal_(self.up.weight, std=0.3)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def maps_of(operator: nn.Module) -> list[str]:
    return [name for name in MAPS if getattr(operator, name, None) is not None]


@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_an_adapter_does_what_its_matrix_does(case: Case) -> None:
    """LoRA on each map, against the same operator with the product of the two matrices added to the weight."""
    z = tokens()
    for name in maps_of(build(*case)):
        operator = build(*case).eval()
        before = operator(z, grid=GRID)
        merged = copy.deepcopy(operator)
        adapter = LoRA(getattr(operator, name))
        setattr(operator, name, adapter)
        changed = getattr(merged, name)
        if isinstance(changed, OrthonormalLinear):  # which would be put back onto its manifold
            plain = nn.Linear(changed.in_features, changed.out_features, changed.bias is not None, dtype=torch.float64)
            plain.load_state_dict(changed.state_dict())
            merged.subspace = changed = plain
        with torch.no_grad():
            changed.weight.add_(adapter.up.weight @ adapter.down.weight)
        after, expected = operator(z, grid=GRID), merged(z, grid=GRID)
        assert (after - before).norm() > 1e-6 * before.norm(), name
        torch.testing.assert_close(after, expected)
        parts, wanted = operator.decompose(z, grid=GRID), merged.decompose(z, grid=GRID)
        torch.testing.assert_close(parts.projected, wanted.projected)
        torch.testing.assert_close(parts.membership, wanted.membership)
        torch.testing.assert_close(operator.subspaces(), merged.subspaces())
        after.square().sum().backward()
        assert adapter.up.weight.grad.abs().max() > 0 and adapter.down.weight.grad.abs().max() > 0


@pytest.mark.parametrize("case", FAMILY, ids=label)
def test_hooks_on_the_maps_fire_and_can_change_what_they_see(case: Case) -> None:
    operator, z = build(*case).eval(), tokens()
    plain = operator(z, grid=GRID)
    for name in maps_of(operator):
        seen: list[str] = []
        with getattr(operator, name).register_forward_hook(lambda module, given, out: seen.append("here")):  # noqa: B023
            torch.testing.assert_close(operator(z, grid=GRID), plain)
        assert seen, name
        with getattr(operator, name).register_forward_hook(lambda module, given, out: -3 * out):
            assert not torch.allclose(operator(z, grid=GRID), plain), name
    assert torch.equal(operator(z, grid=GRID), plain)  # and nothing is left behind


@pytest.mark.parametrize("name", MAPS)
def test_a_pruned_map_learns(name: str) -> None:
    operator, z = create("dmsa", 24, 3, dtype=torch.float64), tokens()
    layer = getattr(operator, name)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    optimizer = torch.optim.SGD(operator.parameters(), lr=0.1)
    results = []
    for _ in range(3):
        out = operator(z)
        results.append(out.detach())
        optimizer.zero_grad()
        out.square().sum().backward()
        optimizer.step()
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
    assert (layer.weight_orig.grad[layer.weight_mask == 0] == 0).all()
    prune.remove(layer, "weight")
    assert (layer.weight == 0).double().mean() >= 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("options", [{"mode": "listing"}, {"mode": "equation"}, {"mode": "proximal"}], ids=str)
def test_quantized_maps(options: dict[str, Any]) -> None:
    """int8 by torch itself: of every layer that it knows, the weights and not their names alone."""
    config = {"dim": 48, "depth": 2, "num_heads": 3, "img_size": 32, "num_classes": 7}
    model = create_model("dmst_cifar", **config, **options).eval()
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    kinds = [type(module).__module__ for module in small.modules() if type(module).__name__ == "Linear"]
    assert sum("quantized" in kind for kind in kinds) >= 2 * (4 if options["mode"] == "listing" else 3)
    images = torch.randn(2, 3, 32, 32)
    exact, rough = model(images), small(images)
    assert rough.isfinite().all() and (rough - exact).norm() < 0.2 * exact.norm()


# --- frozen ------------------------------------------------------------------------------------------------------------


def test_a_frozen_network_says_the_same(tmp_path: Path) -> None:
    model = create_model("dmst_cifar10", pretrained=True).eval()
    with torch.no_grad():
        model.blocks[1].operator.subspace.weight.add_(0.01)  # as an average of weights is: off the manifold
    frozen, images = dmst.freeze(model), torch.randn(3, 3, 32, 32)
    assert not any(isinstance(module, OrthonormalLinear) for module in frozen.modules())
    assert any(isinstance(module, OrthonormalLinear) for module in model.modules())
    assert not frozen.training and not any(p.requires_grad for p in frozen.parameters())
    with torch.no_grad():
        assert torch.equal(frozen(images), model(images))
    save_model(frozen, tmp_path / "frozen")
    save_model(model, tmp_path / "model")
    assert (tmp_path / "frozen/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


@pytest.mark.compile
def test_a_graph_of_a_frozen_network_has_no_qr() -> None:
    graph = torch.export.export(dmst.freeze(create_model("dmst_digits", mode="proximal")), (torch.randn(2, 1, 8, 8),)).graph
    assert not any("qr" in str(node.target) for node in graph.nodes)


SHARDED = """
import copy, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from dmst.models import create_model
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = create_model("dmst_cifar", dim=24, depth=2, num_heads=3, img_size=32, num_classes=5, mode="proximal")
plain = copy.deepcopy(model)
for part in (*model.blocks, model):
    fully_shard(part, mesh=mesh)
images = torch.randn(4, 3, 32, 32)
for net in (model, plain):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(images).logsumexp(1).sum().backward()
        optimizer.step()
torch.testing.assert_close(model(images), plain(images))
dist.destroy_process_group()
"""


def test_a_network_of_an_old_file_has_scalars() -> None:
    """They load as tensors of one number: FSDP2 shards along the first axis."""
    model, other = (create_model("dmst_cifar", dim=24, depth=1, num_heads=3, mode="proximal") for _ in range(2))
    assert all(p.ndim for p in model.parameters())
    other.load_state_dict({name: x.reshape(()) if x.shape == (1,) else x for name, x in model.state_dict().items()})
    assert all(torch.equal(x, y) for x, y in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.process
def test_a_proximal_network_can_be_sharded() -> None:
    done = python("-c", SHARDED, root=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
