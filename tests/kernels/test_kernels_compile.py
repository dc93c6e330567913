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
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dmst.kernels.fused import adjoint, energy, front, gate, mixture, moments, product

B, F, I = "*bf16", "*fp32", "i32"
BLOCK = dict(K=8, P=48, HEADS=2, WIDTH=64, TOKENS=16)
ALONG = dict(BLOCK, delta=1e-8, sign=-1.0, UNIFORM=False, NORMALIZE=False, DELTA=True, GATED=True, SUM=True, UPDATE=True,
             MODE=0, STAGES=2)
SUMS = dict(ALONG, UPDATE=False)
ADJOINT = dict(BLOCK, sign=-1.0, MODE=0, GATED=True, UNIFORM=False, SIGMOID=True, SUM=True, PULL=True, BIAS=True,
               UPDATE=True, STAGES=2)
ENERGY = dict(BLOCK, HEADS=8, NORMALIZE=True, SCORED=True)
FRONT = dict(D=384, K=8, HEADS=8, TERMS=2, SLOTS=16, Q=128, COLUMNS=128, TOKENS=64, CHANNELS=64, ROTARY=True, LEVEL=True,
             SCORES=True, KEYS=True, EXACT=False)
ASKED = dict(BIAS=True, SIGMOID=True, SUMS=True, KEY_BIAS=True, STAGES=2)
MIXTURE = dict(K=8, P=48, R=16, SHARPNESS=0.25, CHANNELS=64, KEYS=16, TOKENS=64, STAGES=2)
CASES = {
    "front": [(kernel, dict(FRONT, **asked, **more))
              for kernel, asked in ((front.front_kernel, ASKED), (front.into_tokens_kernel, dict(GATED=True)),
                                    (front.into_weights_kernel, dict(GATED=True, STAGES=2)))
              for more in ({}, dict(Q=0, COLUMNS=16, KEYS=False, D=100, LEVEL=False, TOKENS=32),
                           dict(ROTARY=False, EXACT=True, K=12, HEADS=16, TERMS=1),
                           dict(SCORES=False, K=12, HEADS=16, SLOTS=32))],
    "gate": [(gate.gate_kernel, dict(scale=1.0, K=8, ALL=8, GATE=1, ACTIVE=2, ROWS=1024))]
    + [(gate.gate_adjoint_kernel, dict(scale=1.0, K=8, ALL=8, GATE=g, ACTIVE=2 * (g == 1))) for g in (1, 2, 3, 4, 5)],
    "moments": [(moments.moments_kernel, c) for c in (
        ALONG, SUMS, dict(ALONG, GATED=False, MODE=2), dict(ALONG, UNIFORM=True, GATED=False, DELTA=False),
        dict(SUMS, NORMALIZE=True, GATED=False), dict(ALONG, MODE=1), dict(ALONG, SUM=False))],
    "adjoint": [(adjoint.adjoint_kernel, c) for c in (
        ADJOINT, dict(ADJOINT, PULL=False), dict(ADJOINT, SUM=False, MODE=1), dict(ADJOINT, MODE=2),
        dict(ADJOINT, UNIFORM=True, GATED=False, SIGMOID=False), dict(ADJOINT, BIAS=False, UPDATE=False))],
    "mixture": [(kernel, dict(MIXTURE, MODE=m, LOW=low, GROUPS=g, G=g, PHASE=phase, **more))
                for kernel, phase, more in (
                    (mixture.forward_kernel, 0, {}), (mixture.forward_kernel, 1, {}), (mixture.forward_kernel, 2, {}),
                    (mixture.forward_kernel, 4, {}), (mixture.backward_kernel, 0, dict(WANTED=True)),
                    (mixture.backward_kernel, 2, dict(WANTED=False)), (mixture.backward_kernel, 3, dict(WANTED=False)),
                    (mixture.backward_kernel, 4, dict(WANTED=True)))
                for m, low, g in ((0, 2, 16), (2, 1, 32), (1, 0, 16)) if phase != 3 or m == 2]
    + [(mixture.spread_kernel, dict(K=8, R=16, G=16, LOW=2, TOKENS=64, KEYS=16, GROUPS=16))],
    "rest": [(energy.energy_kernel, ENERGY), (energy.energy_kernel, dict(ENERGY, NORMALIZE=False, SCORED=False)),
             (energy.energy_adjoint_kernel, dict(BLOCK, NORMALIZE=True, BIAS=True, STAGES=2)),
             (product.linear_gelu_kernel, dict(D=384, H=1536, BIAS=True, ROWS=128, COLUMNS=128, CHANNELS=64, STAGES=3)),
             (product.linear_gelu_kernel, dict(D=48, H=80, BIAS=False, ROWS=128, COLUMNS=128, CHANNELS=64, STAGES=3))],
}
LOW = {"z_ptr", "s_ptr", "x_ptr", "key_ptr", "grad_ptr", "ds_ptr", "update_ptr", "product_ptr", "dz_ptr", "weight_ptr",
       "projected_ptr", "keys_ptr", "dupdate_ptr", "dkeys_ptr"}
REALS = {"scale", "delta", "sign"}


def kind(kernel, name, constants):
    if kernel is moments.moments_kernel and name == "weight_ptr":
        return F
    if name in LOW or (name == "out_ptr" and kernel is product.linear_gelu_kernel):
        return B
    return F if name.endswith("_ptr") or name.endswith(("_cos", "_sin")) else I


groups, capability = sys.argv[1].split(), int(sys.argv[2])
for kernel, constants in (case for group in groups for case in CASES[group]):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(kernel, name, constants) for name in names}
    places = {(names.index(name),): value for name, value in constants.items() if name in names}
    # Inductor hands a float over in float64: in what it sees a float must be a constant
    assert not REALS & {x.name for x in kernel.params if not x.is_constexpr}, kernel
    source = ASTSource(kernel, signature, places)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert done.asm["cubin"], kernel
    assert done.metadata.shared <= 227 * 1024, kernel
    print(kernel.__name__, len(done.asm["cubin"]))
"""


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
    "gate_kernel": "gate_ptr pooled_ptr",
    "gate_adjoint_kernel": "dpooled_ptr",
    "energy_kernel": "out_ptr",
    "energy_adjoint_kernel": "ds_ptr dbias_ptr",
    "spread_kernel": "dkeys_ptr",
}


@pytest.mark.compile
@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("dmsa", "front_kernel into_tokens_kernel into_weights_kernel"),
        ("tssa", "energy_kernel"),
        ("gmsa", "front_kernel forward_kernel backward_kernel"),
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
    "groups",
    [
        "front gate moments",
        "adjoint rest",
        "mixture",
    ],
)
def test_it_compiles_for_hopper(groups: str, tmp_path: Path) -> None:
    assert len(program(CODE, tmp_path, groups, "90")) >= 5


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
