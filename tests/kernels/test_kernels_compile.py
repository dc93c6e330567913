"""Every fused kernel compiles for the GPUs we name, without one: the interpreter alone forgives what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dmst[kernels]'")

CODE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
import dmst
from dmst.kernels.fused import adjoint, energy, front, gate, layer, mixture, moments, norm

low, half, wide = torch.bfloat16, torch.float16, torch.float32
what, capability, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Card:  # enough for a kernel to be compiled
    def get_current_target(self):
        return GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": most}


def launch(kernel, grid, *args, **constants):
    # Inductor hands a float over in float64: in what it sees a float must be a constant
    assert not any(isinstance(x, float) for x in args), kernel
    done = kernel.warmup(*args, grid=grid, **constants)
    assert done.asm["cubin"], kernel
    assert done.metadata.shared <= most, (kernel, done.metadata.shared)
    assert max((1, *grid[1:])) < 65536, (kernel, grid)
    print(kernel.__name__)


driver.set_active(Card())
for module in (adjoint, energy, front, gate, mixture, moments, norm):
    module.launch = launch


def passes(name, b, n, d, k, dtype, **options):
    operator, z = dmst.operators.create(name, d, k, device="meta", **options), torch.empty(b, n, d, device="meta", dtype=dtype)
    weights = operator.weights()
    maps = {name: x.to(dtype) for name in ("subspace", "out") if (x := getattr(weights, name)) is not None}  # as in `attend`
    weights = weights._replace(**maps)
    out, *kept = layer._forward(z, weights, operator.form, None)
    wanted = type(weights)(*(x is not None for x in weights))
    layer._backward(z, weights, operator.form, None, torch.empty_like(out), True, wanted, kept)


def norms(b, n, d, dtype):
    z, weight = torch.empty(b, n, d, device="meta"), torch.empty(d, device="meta")
    dy = norm.norm(z, weight, weight, 1e-6, dtype)
    norm.norm_adjoint(z, weight, dy, z, 1e-6)


with torch.no_grad():
    exec(what)
"""
CASES = {
    "the family": [
        "passes('dmsa', 64, 197, 384, 8, low, membership_bias=True)",
        "passes('dmsa', 1, 4096, 384, 8, low, mode='proximal')",
        "passes('dmsa', 1, 1, 48, 1, low)",  # a size of 1 is a constant
        "passes('dmsa', 64, 197, 100, 2, wide, mode='equation', rotary='none', gate_activation='gelu')",
        "passes('tssa', 64, 197, 384, 8, low, position_scores='1d')",
        "passes('tssa', 1, 4096, 96, 4, wide, normalize_tokens=False)",
        "norms(64, 197, 384, low)",
    ],
    "GMSA": [
        "passes('gmsa', 64, 197, 384, 8, low)",
        "passes('gmsa', 1, 8192, 384, 8, low, mode='proximal')",
        "passes('gmsa', 64, 197, 96, 2, half, own=False, gate_activation='none')",
        "passes('gmsa', 64, 64, 96, 3, wide, groups=32, mode='equation')",
    ],
    "the largest": [  # that are served
        "passes('dmsa', 4, 197, 1024, 64, wide)",
        "passes('dmsa', 4, 197, 1024, 8, low, mode='proximal')",
        "passes('gmsa', 4, 197, 128, 64, wide, key_dim=64)",
        "passes('gmsa', 4, 197, 1024, 8, low, groups=16)",
        "norms(4, 197, 2048, half)",
    ],
}


SEEN = """
import sys
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
import dmst
from dmst.kernels.fused import layer

class Hopper:  # enough for a kernel to be looked at
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
operator = dmst.operators.create(sys.argv[1], 96, 4)
inside = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
with inside:
    z = torch.empty(2, 197, 96, requires_grad=True)
    given = operator.weights()._asdict()
    weights = {name: torch.empty(x.shape, requires_grad=True) for name, x in given.items() if x is not None}

def run(z, *tensors):
    made = type(operator.weights())(**dict(zip(weights, tensors)))
    return (layer.attend(z, made, operator.form, dtype=torch.bfloat16),)

with inside:
    graph = aot_export_joint_simple(run, (z, *weights.values()), trace_joint=True).graph
for node in graph.nodes:
    assert "dmst" not in str(node.target), node.target  # an operator that the compiler cannot look into
    if "triton_kernel_wrapper" in str(node.target):
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        print(getattr(kernel, "fn", kernel).__name__, *node.kwargs["tensors_to_clone"])
"""
WRITES = {
    "front_kernel": "out_ptr sum_ptr keys_ptr",
    "into_tokens_kernel": "dz_ptr",
    "into_weights_kernel": "dassign_ptr dkey_ptr",
    "gate_adjoint_kernel": "dpooled_ptr",
    "energy_kernel": "out_ptr",
    "energy_adjoint_kernel": "ds_ptr dbias_ptr",
    "centres_kernel": "centre_ptr",
    "statistics_kernel": "pi_ptr sums_ptr",
    "update_kernel": "update_ptr gate_ptr pooled_ptr",
    "spread_kernel": "dkeys_ptr sums_ptr",
}


@pytest.mark.compile
@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("dmsa", "front_kernel into_tokens_kernel into_weights_kernel"),
        ("tssa", "energy_kernel"),
        ("gmsa", "front_kernel centres_kernel statistics_kernel update_kernel pull_kernel spread_kernel"),
    ],
)
def test_the_compiler_sees_the_kernels(what: str, least: str, tmp_path: Path) -> None:
    """Forward and backward are traced down to kernels and plain operators, and it knows what each kernel writes: of anything
    else that it must take for written it would make a copy first."""
    seen = dict(line.split(" ", 1) for line in program(SEEN, tmp_path, what))
    assert set(least.split()) <= seen.keys() and len(seen) >= 3
    for kernel, written in seen.items():
        assert set(written.split()) <= set(WRITES.get(kernel, written).split()), kernel
        read = {"z_ptr", "s_ptr", "projected_ptr", "membership_ptr"} | ({"keys_ptr"} if kernel != "front_kernel" else set())
        assert not read & set(written.split()), kernel


@pytest.mark.compile
@pytest.mark.parametrize(
    ("what", "capability", "most"),  # bytes of shared memory
    [*((what, 90, 232448) for what in CASES), *((what, 89, 101376) for what in ("GMSA", "the largest"))],
)
def test_what_a_layer_launches_compiles(what: str, capability: int, most: int, tmp_path: Path) -> None:
    """Of a layer on tensors without memory: the very kernels and tiles that a GPU would be given."""
    assert len(program(CODE, tmp_path, "\n".join(CASES[what]), str(capability), str(most))) >= 2


def program(code: str, place: Path, *arguments: str) -> list[str]:
    """The lines that it prints. From a file: Triton reads the source of what it compiles."""
    script = place / "program.py"
    script.write_text(code)
    root = Path(__file__).resolve().parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(place), "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), *arguments]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()
