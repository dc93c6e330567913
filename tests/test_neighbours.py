"""The 3x3 neighbours of a local MLP: the kernels against plain torch, in Triton's interpreter; what a traced graph holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from dmst import create_model
from dmst.errors import ShapeError
from dmst.kernels.neighbours import local_gelu

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dmst[kernels]'")

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import pytest
import torch
from tests.quick import quicken
quicken(pytest.MonkeyPatch())
from torch.nn import functional as F
import dmst
from dmst.kernels import neighbours
from dmst.kernels.fused import neighbours as kernels

def plain(h, w, grid):
    image = h.unflatten(1, grid).permute(0, 3, 1, 2)
    return F.gelu(h + F.conv2d(image, w, padding=1, groups=w.shape[0]).permute(0, 2, 3, 1).flatten(1, 2))

for b, grid, c, dtype, bar in [
    (3, (4, 5), 24, torch.float32, 2e-6), (1, (5, 8), 72, torch.float32, 2e-6), (1, (1, 7), 65, torch.float32, 2e-6),
    (5, (3, 3), 64, torch.bfloat16, 2e-2), (2, (1, 1), 8, torch.float32, 2e-6), (9, (2, 2), 4, torch.float32, 2e-6),
]:
    kernels.PROGRAMS = 4 if b == 9 else 1024  # several samples a program
    torch.manual_seed(0)
    h = torch.randn(b, grid[0] * grid[1], c, dtype=dtype)
    w = torch.randn(c, 1, 3, 3)
    g = torch.randn_like(h)
    with dmst.use_kernels("fused"):
        one = [h.clone().requires_grad_(), w.clone().requires_grad_()]
        y = neighbours.local_gelu(*one, grid)
        assert y.grad_fn is not None and "local_gelu" in type(y.grad_fn).__name__, type(y.grad_fn)
        grads = torch.autograd.grad(y, one, g)
    two = [h.double().requires_grad_(), w.double().requires_grad_()]
    right = plain(*two, grid)
    wanted = torch.autograd.grad(right, two, g.double())
    for got, want in zip((y, *grads), (right, *wanted), strict=True):
        assert got.shape == want.shape and ((got.double() - want).norm() <= bar * want.norm()), (b, grid, c, dtype)
    assert y.dtype == dtype and grads[0].dtype == dtype and grads[1].dtype == torch.float32
    assert not neighbours._broken, neighbours._broken

# through a network, compiled: one node forward, one backward, and the plain network's gradients
torch.manual_seed(0)
model = dmst.create_model("dmst_cifar", dim=24, depth=1, num_heads=3, feedforward="local", img_size=16)
torch.nn.init.normal_(model.blocks[0].feedforward.mlp.local.weight, std=0.3)
images = torch.randn(2, 3, 16, 16)
def gradients(net):
    return torch.autograd.grad(net(images).square().sum(), list(model.parameters()))
with dmst.use_kernels("reference"):
    plain_ones = gradients(model)
names = []
def backend(graph, _):
    names.extend(str(node.target) for node in graph.graph.nodes)
    return graph
with dmst.use_kernels("fused"):
    fused = gradients(torch.compile(model, backend=backend))
assert sum("dmst.local_gelu" in name for name in names) == 1, names
for got, want in zip(fused, plain_ones, strict=True):
    assert (got - want).norm() <= 1e-4 * want.norm() + 1e-6
with dmst.use_kernels("fused"):
    one = torch.randn(2, 6, 8, requires_grad=True)
    y = neighbours.local_gelu(one, torch.randn(8, 1, 3, 3), (2, 3))
    try:
        (first,) = torch.autograd.grad(y.square().sum(), one, create_graph=True)
        torch.autograd.grad(first.sum(), one)
        raise SystemExit("a second derivative of what has none")
    except dmst.errors.DmstError as error:
        assert "reference" in str(error)
tensors = torch.randn(2, 6, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
torch.library.opcheck(torch.ops.dmst.local_gelu.default, (*tensors, 2, 3))
"""


def test_the_kernels_are_the_plain_formula() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_does_not_fit_is_refused() -> None:
    h, w = torch.randn(2, 6, 4), torch.randn(4, 1, 3, 3)
    for given in ((h, w, (2, 4)), (h, w[:2], (2, 3)), (h, w[..., :2], (2, 3))):
        with pytest.raises(ShapeError, match="do not fit together"):
            local_gelu(*given)


def test_plain_where_no_kernel_runs() -> None:
    """On a CPU, with every derivative; and a class token has no neighbours."""
    torch.manual_seed(0)
    h, w = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 1, 3, 3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda h: local_gelu(h, w, (2, 3)), (h,))
    model = create_model("vit_tiny", dim=24, depth=1, num_heads=3, feedforward="local", img_size=32).eval()
    mlp = model.blocks[0].feedforward.mlp
    z = torch.randn(1, 5, 24)
    with torch.no_grad():
        torch.nn.init.normal_(mlp.local.weight)
        assert torch.allclose(mlp(z, (2, 2))[:, :1], mlp.fc2(F.gelu(mlp.fc1(z[:, :1]))), atol=1e-6)
        assert not torch.allclose(mlp(z, (2, 2))[:, 1:], mlp.fc2(F.gelu(mlp.fc1(z[:, 1:]))), atol=1e-3)
