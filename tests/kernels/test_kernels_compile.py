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
from dmst.kernels.fused import adjoint, energy, gate, mixture, moments, norm, score, score_adjoint, turn

B, F, I = "*bf16", "*fp32", "i32"
BLOCK = dict(K=8, P=48, HEADS=2, WIDTH=64, TOKENS=16)
ALONG = dict(BLOCK, delta=1e-8, sign=-1.0, UNIFORM=False, NORMALIZE=False, DELTA=True, GATED=True, UPDATE=True, MODE=0,
             STAGES=2)
SUMS = dict(ALONG, UPDATE=False)
TURNED = dict(D=384, K=8, TOKENS=16, CHANNELS=32, ROTARY=True, LEVEL=True)
SCORE = dict(TURNED, Z=1, ASSIGN=1, BIAS=False, SIGMOID=True, SUMS=True)
FINISH = dict(delta=1e-8, K=8, P=48, WIDTH=64, PARTS=256, UNIFORM=False, DELTA=True)
ADJOINT = dict(BLOCK, sign=-1.0, MODE=0, GATED=True, UNIFORM=False, SIGMOID=True, SUM=True, PULL=True, BIAS=True,
               UPDATE=True, STAGES=2)
BACK, ASSIGN = dict(TURNED, ASSIGN=1, GATED=True), dict(TURNED, Z=1, GATED=True)
UPDATE = dict(BLOCK, sign=-1.0, MODE=0, GATED=True, STAGES=2)
ENERGY = dict(BLOCK, HEADS=8, NORMALIZE=True, SCORED=True)
NORM_BACK = dict(TOKENS=1, CHANNELS=128)
NORM = dict(eps=1e-6, D=384, K=8, TOKENS=4, CHANNELS=128, Z=3, ASSIGN=3, ROTARY=True, LEVEL=True, SCORES=True,
            BIAS=False, SIGMOID=True, SUMS=True)
PASS = dict(D=384, TOKENS=16, CHANNELS=128, ROTARY=True, LEVEL=True)
MIXTURE = dict(K=8, P=48, R=16, SHARPNESS=0.25, CHANNELS=64, KEYS=16, TOKENS=64)
CASES = {
    "score": [(score.score_kernel, c) for c in (
        SCORE, dict(SCORE, K=3, BIAS=True, ASSIGN=0, Z=2), dict(SCORE, Z=0, ROTARY=False, SIGMOID=False),
        dict(SCORE, Z=3, ASSIGN=3, LEVEL=False, K=12, D=100))],
    "gate": [(gate.gate_kernel, dict(scale=1.0, K=8, ALL=8, GATE=1, ACTIVE=2, ROWS=1024))],
    "moments": [(moments.moments_kernel, c) for c in (
        ALONG, SUMS, dict(ALONG, GATED=False, MODE=2), dict(ALONG, UNIFORM=True, GATED=False, DELTA=False),
        dict(SUMS, NORMALIZE=True, GATED=False), dict(ALONG, MODE=1))],
    "finish": [(moments.finish_kernel, c) for c in (FINISH, dict(FINISH, UNIFORM=True, DELTA=False))],
    "adjoint": [(adjoint.adjoint_kernel, c) for c in (
        ADJOINT, dict(ADJOINT, PULL=False), dict(ADJOINT, SUM=False, MODE=1), dict(ADJOINT, MODE=2),
        dict(ADJOINT, UNIFORM=True, GATED=False, SIGMOID=False), dict(ADJOINT, BIAS=False, UPDATE=False))],
    "score_adjoint": [(score_adjoint.into_tokens_kernel, c) for c in (
        BACK, dict(BACK, ASSIGN=0, ROTARY=False, GATED=False), dict(BACK, ASSIGN=3, LEVEL=False, K=12))]
    + [(score_adjoint.into_assign_kernel, c) for c in (
        ASSIGN, dict(ASSIGN, Z=0, ROTARY=False, GATED=False), dict(ASSIGN, Z=3, LEVEL=False, K=12))]
    + [(gate.gate_adjoint_kernel, dict(scale=1.0, K=8, ALL=8, GATE=g, ACTIVE=2 * (g == 1))) for g in (1, 2, 3, 4, 5)],
    "norm": [(norm.norm_score_kernel, c) for c in (
        NORM, dict(NORM, SCORES=False, SUMS=False, ROTARY=False, D=192, CHANNELS=64),
        dict(NORM, D=100, K=12, Z=0, ASSIGN=0, LEVEL=False, BIAS=True), dict(NORM, D=15, K=3, ROTARY=False, CHANNELS=16, Z=0,
        ASSIGN=0, SIGMOID=False, SUMS=False), dict(NORM, D=640, TOKENS=2, Z=1, ASSIGN=1))]
    + [(norm.norm_adjoint_kernel, dict(NORM_BACK, D=d, K=k, ASSIGN=a, ROTARY=r, SCORES=a != 9, GATED=r, WEIGHTS=w))
       for d, k, a, r, w in (
           (384, 8, 3, True, True), (100, 3, 0, False, False), (640, 12, 1, True, True), (384, 8, 9, False, True))],
    "mixture": [(kernel, dict(MIXTURE, MODE=m, EXACT=e, GROUPS=g, G=g, PHASE=phase, **more))
                for kernel, phase, more in (
                    (mixture.forward_kernel, 0, {}), (mixture.forward_kernel, 1, {}), (mixture.forward_kernel, 2, {}),
                    (mixture.forward_kernel, 3, {}), (mixture.backward_kernel, 0, dict(WANTED=True)),
                    (mixture.backward_kernel, 1, dict(WANTED=False)), (mixture.backward_kernel, 2, dict(WANTED=True)))
                for m, e, g in ((0, False, 16), (2, False, 64), (1, True, 16))]
    + [(mixture.spread_kernel, dict(K=8, R=16, G=16, TOKENS=64, KEYS=16))]
    + [(turn.turn_kernel, dict(PASS, Z=3, LOW=True)), (turn.turn_kernel, dict(PASS, Z=0, LOW=False, D=100, LEVEL=False)),
       (turn.turn_back_kernel, dict(PASS, Z=1, GATED=True)), (turn.turn_back_kernel, dict(PASS, Z=0, GATED=False, D=100))],
    "rest": [(moments.update_kernel, UPDATE), (moments.update_kernel, dict(UPDATE, MODE=2, GATED=False)),
             (energy.energy_kernel, ENERGY), (energy.energy_kernel, dict(ENERGY, NORMALIZE=False, SCORED=False)),
             (energy.energy_adjoint_kernel, dict(BLOCK, NORMALIZE=True, BIAS=True, STAGES=2))],
}
LOW = {"z_ptr", "s_ptr", "x_ptr", "assign_ptr", "grad_ptr", "ds_ptr", "update_ptr", "product_ptr", "dz_ptr",
       "dy_ptr", "projected_ptr", "keys_ptr", "dupdate_ptr", "dkeys_ptr", "dturned_ptr", "turned_ptr", "low_ptr"}
REALS = {"scale", "delta", "sign", "eps"}


def kind(kernel, name, constants):
    words = {1: "*bf16", 2: "*fp16", 3: "*fp32"}
    named = {"z_ptr": "Z", "assign_ptr": "ASSIGN"}
    if (word := words.get(constants.get(named.get(name)))) is not None:
        return word
    if name == "y_ptr":
        return B
    if kernel is norm.norm_adjoint_kernel and name in ("z_ptr", "dz_ptr"):
        return F
    if name in LOW or (name == "out_ptr" and kernel is moments.update_kernel):
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
from dmst.kernels.fused import layer, mixture_layer

class Hopper:  # enough for a kernel to be looked at
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
what, operator = sys.argv[1], dmst.operators.create(sys.argv[1].split()[0], 96, 4)
inside = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
with inside:
    z, gamma, beta = (torch.empty(*shape, requires_grad=True) for shape in ((2, 197, 96), (96,), (96,)))
    given = operator.weights()._asdict()
    weights = {name: torch.empty(x.shape, requires_grad=True) for name, x in given.items() if x is not None}

def run(z, gamma, beta, *tensors):
    made = type(operator.weights())(**dict(zip(weights, tensors)))
    if what.endswith("step"):
        return (layer.residual_step(z, gamma, beta, None, 1e-6, made, operator.form, grid=None, dtype=torch.bfloat16),)
    return ((mixture_layer if what == "gmsa" else layer).attend(z + gamma + beta, made, operator.form, dtype=torch.bfloat16),)

with inside:
    graph = aot_export_joint_simple(run, (z, gamma, beta, *weights.values()), trace_joint=True).graph
for node in graph.nodes:
    assert "dmst" not in str(node.target), node.target  # an operator that the compiler cannot look into
    if "triton_kernel_wrapper" in str(node.target):
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        print(getattr(kernel, "fn", kernel).__name__, *node.kwargs["tensors_to_clone"])
"""
WRITES = {
    "norm_score_kernel": "y_ptr mean_ptr rstd_ptr out_ptr sum_ptr",
    "score_kernel": "out_ptr sum_ptr",
    "gate_kernel": "gate_ptr pooled_ptr",
    "gate_adjoint_kernel": "dpooled_ptr",
    "into_assign_kernel": "dassign_ptr",
    "into_tokens_kernel": "dz_ptr",
    "norm_adjoint_kernel": "dz_ptr part_ptr",
    "energy_kernel": "out_ptr",
    "energy_adjoint_kernel": "ds_ptr dbias_ptr",
    "spread_kernel": "dkeys_ptr",
}


@pytest.mark.compile
@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("dmsa", "score_kernel into_tokens_kernel"),
        ("dmsa step", "norm_score_kernel norm_adjoint_kernel"),
        ("tssa step", "energy_kernel"),
        ("gmsa", "forward_kernel backward_kernel"),
    ],
)
def test_the_compiler_sees_the_kernels(what: str, least: str, tmp_path: Path) -> None:
    """Forward and backward are traced down to kernels and plain operators, and it knows what each kernel writes: of anything
    else that it must take for written it would make a copy first."""
    seen = dict(line.split(" ", 1) for line in program(SEEN, tmp_path, what))
    assert set(least.split()) <= seen.keys() and len(seen) >= 3
    for kernel, written in seen.items():
        assert set(written.split()) <= set(WRITES.get(kernel, written).split()), kernel
        assert not {"z_ptr", "s_ptr", "projected_ptr", "keys_ptr", "membership_ptr"} & set(written.split()), kernel


@pytest.mark.compile
@pytest.mark.parametrize(
    "groups",
    [
        "score gate moments finish",
        "adjoint score_adjoint rest",
        "norm",
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
