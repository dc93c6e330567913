"""The layer's files against each other: closed form, silent heads, traced graphs, kept memory, low precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dmst import kernels
from dmst.kernels import closed_form, reference, silent
from dmst.operators import DMSA, TSSA, create
from dmst.operators.family import TokenStatistics
from tests.cases import FAMILY, VARIANTS, build, excite, gradients, grid_of, label, relative, tokens
from tests.published import AttentionDMSA, AttentionTSSA

F64 = torch.float64
family = pytest.mark.parametrize("case", FAMILY, ids=label)
variants = pytest.mark.parametrize("case", VARIANTS, ids=label)


def leaves(operator: TokenStatistics) -> tuple[list[Tensor], kernels.Weights]:
    """The layer's tensors as leaves that want gradients, so that each is checked on its own."""
    weights = operator.weights()
    fresh = [None if w is None else w.detach().clone().requires_grad_() for w in weights]
    return [w for w in fresh if w is not None], kernels.Weights(*fresh)  # type: ignore[arg-type]


# --- the closed form -------------------------------------------------------------------------------------------------


@family
@pytest.mark.parametrize("n", [1, 6, 63, 197])
def test_closed_form_is_autograd(case: tuple, n: int) -> None:
    operator = build(*case)
    z = tokens(n=n).requires_grad_()
    tensors, weights = leaves(operator)
    grad = torch.randn_like(z)
    results = []
    for attend in (closed_form.attend, reference.attend):
        out = attend(z, weights, operator.form, grid=grid_of(n), dtype=F64)
        results.append((out, *torch.autograd.grad(out, (z, *tensors), grad, allow_unused=True)))
    for found, expected in zip(*results, strict=True):
        if expected is None:  # a uniform gate with one use of assign never happens here; nothing may be lost silently
            assert found is None or found.abs().max() == 0
        else:
            assert relative(found, expected) < 1e-12 or (found - expected).norm() < 1e-13


@pytest.mark.parametrize("scale", [1e-13, 1e-12, 1e-10])
def test_tssa_at_the_floor_of_its_normalisation(scale: float) -> None:
    operator = build("tssa", {"bias": False})
    z = (scale * tokens()).requires_grad_()
    tensors, weights = leaves(operator)
    grad = torch.randn_like(z)
    found, expected = (
        torch.autograd.grad(attend(z, weights, operator.form, dtype=F64), (z, *tensors), grad)
        for attend in (closed_form.attend, reference.attend)
    )
    assert all(relative(a, b) < 1e-10 for a, b in zip(found, expected, strict=True))


@family
def test_second_derivatives_are_right(case: tuple) -> None:
    """The closed form keeps tensors without a graph; asked for a second derivative it must not use them."""
    operator = build(*case, dim=12)
    z = tokens(b=2, n=4, d=12).requires_grad_()
    tensors, weights = leaves(operator)

    def call(z: Tensor, *values: Tensor) -> Tensor:
        given = iter(values)
        mine = kernels.Weights(*(None if w is None else next(given) for w in weights))
        return closed_form.attend(z, mine, operator.form, grid=(2, 2), dtype=F64)

    assert torch.autograd.gradgradcheck(call, (z, *tensors))


@family
def test_only_what_is_wanted(case: tuple) -> None:
    """Frozen parameters get none, and the others get the same numbers as when all are wanted."""
    operator = build(*case)
    z, grad = tokens(), torch.randn(2, 7, 24, dtype=F64)
    full = gradients(operator, z, grad, grid=(1, 7))
    for wanted, _ in operator.named_parameters():
        one = copy.deepcopy(operator)
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name == wanted)
        one(z, grid=(1, 7)).backward(grad)
        for name, parameter in one.named_parameters():
            assert (parameter.grad is not None) == (name == wanted)
        assert relative(dict(one.named_parameters())[wanted].grad, full[wanted]) < 1e-13
    frozen = copy.deepcopy(operator).requires_grad_(False)
    moving = z.clone().requires_grad_()
    frozen(moving, grid=(1, 7)).backward(grad)
    assert relative(moving.grad, full["z"]) < 1e-13


def test_an_output_nobody_differentiates() -> None:
    operator = build("dmsa", {})
    z = tokens().requires_grad_()
    operator(z)  # dropped
    assert closed_form._Attend.backward is not None
    out = closed_form._Attend.apply(z, *operator.weights(), operator.form, None, F64)
    assert all(not step.requires_grad for step in out[1:] if step is not None)


@family
def test_checkpointing_gives_the_same_gradients(case: tuple) -> None:
    operator = build(*case)
    z, grad = tokens(), torch.randn(2, 7, 24, dtype=F64)
    plain = gradients(operator, z, grad, grid=(1, 7))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = operator

        def forward(self, z: Tensor) -> Tensor:
            return checkpoint(lambda z: self.operator(z, grid=(1, 7)), z, use_reentrant=False)

    for name, value in gradients(Wrapped(), z, grad).items():
        assert torch.equal(value, plain[name.removeprefix("operator.")])


@variants
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_nothing_of_the_callers_is_written(case: tuple, dtype: torch.dtype) -> None:
    """Buffers are used again inside; tokens, output gradient, weights and what is kept for a second backward are not."""
    operator = build(*case, dtype=dtype)
    z, grad = tokens(n=12, dtype=dtype).requires_grad_(), torch.randn(2, 12, 24, dtype=dtype)
    mine = (z, grad, *operator.parameters())
    before = [t.detach().clone() for t in mine]
    out = operator(z, grid=(3, 4))
    wanted = (z, *operator.parameters())
    first = torch.autograd.grad(out, wanted, grad, retain_graph=True)
    second = torch.autograd.grad(out, wanted, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        operator(z, grid=(3, 4))
        operator.decompose(z, grid=(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


@variants
def test_same_input_same_bits(case: tuple) -> None:
    operator = build(*case, dtype=torch.float32)
    z, grad = tokens(n=63, dtype=torch.float32), torch.randn(2, 63, 24)
    first = gradients(operator, z, grad, grid=(7, 9))
    for _ in range(10):
        again = gradients(operator, z, grad, grid=(7, 9))
        assert all(torch.equal(first[name], again[name]) for name in first)


# --- kept memory -----------------------------------------------------------------------------------------------------


def kept(layer: nn.Module, z: Tensor) -> float:
    """Distinct storages that autograd holds after forward, parameters left out, in units of z."""
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), *layer.buffers())}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = layer(z, grid=grid_of(z.shape[1])) if not isinstance(layer, AttentionDMSA | AttentionTSSA) else layer(z)
    nodes = [held.grad_fn]
    for node in nodes:  # what a node holds outside of the hooks' sight counts too
        for value in getattr(node, "__dict__", {}).values():
            if isinstance(value, Tensor):
                pack(value)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return sum(found.values()) / z.numel()


@family
def test_the_layer_keeps_two_tensors(case: tuple) -> None:
    operator = create(case[0], 384, 8, **case[1])
    z = torch.randn(8, 196, 384, requires_grad=True)
    limit = 2.1
    if "proximal" in case[1].values():  # its QR keeps a few matrices of d x d, whatever the batch
        limit += 4 * 384 * 384 / z.numel()
    assert 2.0 <= kept(operator, z) <= limit


def test_the_published_layers_keep_three_times_as_much() -> None:
    z = torch.randn(8, 196, 384, requires_grad=True)
    assert kept(AttentionDMSA(384, 8, qkv_bias=True), z) > 7.0
    assert kept(AttentionTSSA(384, 8, qkv_bias=True), z) > 6.0


# --- silent heads ----------------------------------------------------------------------------------------------------


def sleepy(mode: str = "listing", dtype: torch.dtype = F64, **options: Any) -> DMSA:
    """A layer whose gate is open on few heads, different ones for different samples."""
    operator = excite(DMSA(48, 8, mode=mode, dtype=dtype, **options))
    nn.init.normal_(operator.assign.weight)
    return operator.eval()


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
@pytest.mark.parametrize("options", [{}, {"membership_activation": "softmax"}, {"bias": False}, {"max_active_heads": 2}])
def test_row_16_leaving_silent_heads_out_changes_nothing(mode: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, z = sleepy(mode, **options), tokens(b=7, n=40, d=48)
    gate = operator.decompose(z).gate
    assert 0 < (gate != 0).float().mean() < 0.7
    assert len({tuple(row.tolist()) for row in gate != 0}) > 1
    calls = []
    monkeypatch.setattr(silent, "project_active", lambda *a, _do=silent.project_active: calls.append(1) or _do(*a))
    monkeypatch.setattr(silent, "ROUND", 0.0)  # whatever it costs
    with torch.no_grad():
        skipped = operator(z)
    assert calls
    assert relative(skipped, operator(z).detach()) < 1e-12


@pytest.mark.parametrize("mode", ["listing", "equation", "proximal"])
def test_leaving_silent_heads_out_changes_no_bit(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a NaN that changes how a batch is grouped cannot reach its neighbours, not even their last bit."""
    operator = DMSA(192, 8, mode=mode, max_active_heads=3).eval()
    nn.init.normal_(operator.assign.weight)
    z = torch.randn(6, 64, 192)
    bad = z.clone()
    bad[2, 3, 5] = torch.nan
    with torch.no_grad():
        monkeypatch.setattr(silent, "ROUND", 0.0)
        sparse, dirty = operator(z), operator(bad)
        monkeypatch.setattr(silent, "ROUND", 1e30)
        dense = operator(z)
    assert torch.equal(sparse, dense)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(dirty[others], dense[others])
    assert dirty[2].isnan().all()


def test_silent_heads_in_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent, "ROUND", 0.0)
    for dtype, bar in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        operator, z = sleepy(dtype=dtype), tokens(b=7, n=40, d=48, dtype=dtype)
        with torch.no_grad():
            assert relative(operator(z), operator.double()(z.double())) < bar


def test_no_head_at_all_leaves_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent, "ROUND", 0.0)
    z = tokens(b=3, n=40, d=48)
    with torch.no_grad():
        listing = sleepy(gate_scale=0.0)
        assert torch.equal(listing(z), listing.out.bias.expand(3, 40, 48))
        assert torch.equal(sleepy("equation", gate_scale=0.0)(z), torch.zeros(3, 40, 48, dtype=F64))


def test_a_nan_gate_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent, "ROUND", 0.0)
    operator, z = sleepy(), tokens(b=3, n=40, d=48)
    with torch.no_grad():
        clean = operator(z)
        z[1, 3, 5] = torch.nan
        dirty = operator(z)
    assert dirty[1].isnan().all()
    assert torch.equal(clean[[0, 2]], dirty[[0, 2]])


def test_left_out_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers and open gates stay dense; a large layer with 1 of 8 heads on does not."""
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(silent, "project_active", lambda *_: pytest.fail("left heads out where it does not pay"))
        sleepy()(tokens(b=7, n=5, d=48))
        DMSA(384, 8)(torch.randn(8, 196, 384))  # at the start every head is on
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(reference, "project", lambda *_: pytest.fail("ran dense where leaving heads out pays"))
        patch.setattr(reference, "project_out", lambda *_: pytest.fail("ran dense where leaving heads out pays"))
        DMSA(384, 8, max_active_heads=1)(torch.randn(8, 196, 384))


def test_only_a_sparsemax_gate_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """relu and gelu are 0 with a slope, or close to 0: they take the plain path."""
    monkeypatch.setattr(silent, "attend", lambda *_, **__: pytest.fail("skipped"))
    with torch.no_grad():
        for gate in ("relu", "gelu", "sigmoid", "uniform"):
            sleepy(gate_activation=gate)(tokens(b=2, n=40, d=48))
        TSSA(48, 8, dtype=F64)(tokens(b=2, n=40, d=48))
    sleepy()(tokens(b=2, n=40, d=48))  # with gradients
    with torch.no_grad():
        torch.compile(sleepy(), fullgraph=True, backend="eager")(tokens(b=2, n=40, d=48))


# --- traced graphs ---------------------------------------------------------------------------------------------------


@variants
def test_compiles_to_one_graph_for_every_length(case: tuple) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    operator = build(*case)
    compiled = torch.compile(operator, fullgraph=True, dynamic=True, backend=backend)
    for n, grid in ((12, (3, 4)), (20, (4, 5)), (42, (6, 7))):
        z = tokens(n=n)
        torch.testing.assert_close(compiled(z, grid=grid), operator(z, grid=grid), rtol=1e-11, atol=1e-11)
    assert len(graphs) == 1


@variants
def test_compiled_training_agrees(case: tuple) -> None:
    torch._dynamo.reset()
    operator = build(*case)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    z, grad = tokens(n=12), torch.randn(2, 12, 24, dtype=F64)
    eager = gradients(operator, z, grad, grid=(3, 4))
    traced = gradients(compiled, z, grad, grid=(3, 4))
    for name, value in eager.items():
        found = traced.get(name, traced.get(f"_orig_mod.{name}"))
        assert relative(found, value) < 1e-10 or (found - value).norm() < 1e-12, name


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inside inductor's own import
def test_inductor_once() -> None:
    torch._dynamo.reset()
    operator = excite(DMSA(24, 3))
    compiled = torch.compile(operator, fullgraph=True, dynamic=True)
    for n in (20, 33):
        z, grad = tokens(n=n, dtype=torch.float32), torch.randn(2, n, 24)
        eager, traced = gradients(operator, z, grad), gradients(compiled, z, grad)
        for name, value in eager.items():
            assert relative(traced.get(name, traced.get(f"_orig_mod.{name}")), value) < 1e-5, name


@variants
def test_exports_with_any_batch_and_length(case: tuple) -> None:
    operator = build(*case).eval()
    if "2d" in case[1].values():  # a grid is part of the program: fixed
        shapes = {"z": {0: torch.export.Dim.DYNAMIC}, "grid": (None, None)}
        program = torch.export.export(operator, (tokens(n=12),), {"grid": (3, 4)}, dynamic_shapes=shapes)
        z = tokens(b=3, n=12)
        torch.testing.assert_close(program.module()(z, grid=(3, 4)), operator(z, grid=(3, 4)))
        return
    batch, length = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("length", min=2, max=65536)
    program = torch.export.export(operator, (tokens(n=12),), dynamic_shapes={"z": {0: batch, 1: length}})
    for b, n in ((1, 5), (3, 197)):
        z = tokens(b=b, n=n)
        torch.testing.assert_close(program.module()(z), operator(z), rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")  # it is old, and says so
def test_a_traced_program_holds_for_other_gates() -> None:
    """What is recorded once must not remember which heads were on: jit.trace, make_fx, and fake tensors without values."""
    operator = DMSA(384, 8, membership_bias=True).eval()
    nn.init.normal_(operator.assign.weight, std=0.3)
    one, other = torch.randn(8, 196, 384) + 1, torch.randn(8, 196, 384) - 1
    with torch.no_grad():
        assert not torch.equal(operator.decompose(one).gate > 0, operator.decompose(other).gate > 0)
        programs = [torch.jit.trace(operator, one, check_trace=False), make_fx(operator)(one)]
        for program in programs:
            torch.testing.assert_close(program(other), operator(other))
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(one)
            weights = kernels.Weights(*(None if w is None else mode.from_tensor(w) for w in operator.weights()))
            assert kernels.attend(fake, weights, operator.form).shape == one.shape
    with FakeTensorMode() as mode:  # and with gradients, where a real table is already shared
        fake = mode.from_tensor(one).requires_grad_()
        weights = kernels.Weights(*(None if w is None else mode.from_tensor(w) for w in operator.weights()))
        kernels.attend(fake, weights, operator.form).sum().backward()
        assert fake.grad.shape == one.shape


def test_an_exported_program_survives_a_file(tmp_path: Any) -> None:
    operator = build("dmsa", {}).eval()
    program = torch.export.export(operator, (tokens(),))
    torch.export.save(program, tmp_path / "dmsa.pt2")
    z = tokens()
    torch.testing.assert_close(torch.export.load(tmp_path / "dmsa.pt2").module()(z), operator(z))


# --- low precision ---------------------------------------------------------------------------------------------------

BARS = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (5e-3, 1e-2), torch.float16: (1e-3, 2e-3)}
PRECISE = [
    ("dmsa", {}), ("dmsa", {"mode": "equation"}), ("dmsa", {"mode": "proximal"}), ("dmsa", {"rotary": "2d"}),
    ("tssa", {}), ("tpusa", {}), ("tpsusa", {}), ("gated_channel", {}),
]  # fmt: skip
SHAPES = [(1, 1, 48, 3), (3, 2, 48, 3), (3, 17, 64, 8), (2, 197, 48, 1), (1, 197, 192, 4)]


def excess(found: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Relative error beyond one subnormal of the dtype for each element."""
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (found.double() - exact).norm() - subnormal * exact.numel() ** 0.5
    return (error.clamp(min=0) / exact.norm().clamp(min=1e-300)).item()


def rounded(case: tuple, dtype: torch.dtype, scale: float, b: int, n: int, d: int, heads: int) -> tuple:
    """Weights of nn.Linear's size, tokens and output gradient, all of which `dtype` can hold; stored in float32."""
    operator = create(case[0], d, heads, **case[1]).eval()
    if "proximal" in case[1].values():  # a rounded matrix is not orthonormal any more: take it as the numbers it is
        basis = operator.subspace.weight.detach()
        operator.subspace = nn.Linear(d, d)
        operator.subspace.weight.data.copy_(basis)
    with torch.no_grad():
        for key, parameter in operator.named_parameters():
            if parameter.shape == (d, d) and operator.state_dict().keys() >= {"theta"}:
                pass  # orthonormal, then rounded
            elif key.split(".")[0] in ("subspace", "assign", "out", "qkv"):
                parameter.uniform_(-(d**-0.5), d**-0.5)
            parameter.copy_(parameter.to(dtype))
    z = (scale * torch.randn(b, n, d)).to(dtype).float()
    return operator, z, torch.randn(b, n, d).to(dtype).float()


@pytest.mark.parametrize("case", [*PRECISE, ("mhsa", {}), ("xca", {}), ("mssa", {})], ids=label)
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_precision_at_scale_1(case: tuple, dtype: torch.dtype, shape: tuple) -> None:
    """Output and every gradient against float64 of the same rounded numbers, under autocast.

    theta and temperature are single sums whose terms cancel: their relative error has no bar; gradcheck judges them.
    TSSA divides each channel by its energy over tokens, which one or two tokens bring near 0: there the plain formula is off
    by up to 1.3e-5 in float32 (200 draws), and the next test's rule applies.
    """
    if case[0] == "tssa" and shape[1] <= 2:
        check_against_plain(case, dtype, 1.0, shape)
        return
    forward_bar, gradient_bar = BARS[dtype]
    for seed in range(3):
        torch.manual_seed(seed)
        operator, z, grad = rounded(case, dtype, 1.0, *shape)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            found = gradients(operator, z, grad, grid=grid_of(shape[1]))
        exact = gradients(copy.deepcopy(operator).double(), z.double(), grad.double(), grid=grid_of(shape[1]))
        assert found["out"].dtype == dtype
        assert excess(found["out"], exact["out"], dtype) <= forward_bar
        assert excess(found["z"], exact["z"], dtype) <= gradient_bar
        for name in ("subspace.weight", "out.weight"):
            if name in exact:
                assert excess(found[name], exact[name], dtype) <= gradient_bar, name


@pytest.mark.parametrize("case", PRECISE, ids=label)
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e2, 1e4])
def test_precision_at_other_scales(case: tuple, dtype: torch.dtype, scale: float) -> None:
    """The output holds its bar at every scale; the gradient holds its bar, or is as exact as the plain formula's.

    Large tokens saturate memberships, and what is left of the gradient can be one cancelling sum: no arithmetic in float32
    holds a fixed bar there. It must then be no worse than three times autograd's error on the reference, in the same dtype.
    """
    for shape in SHAPES:
        check_against_plain(case, dtype, scale, shape)


def check_against_plain(case: tuple, dtype: torch.dtype, scale: float, shape: tuple) -> None:
    forward_bar, gradient_bar = (1e-4, 5e-4) if dtype == torch.float32 and scale != 1 else BARS[dtype]
    operator, z, grad = rounded(case, dtype, scale, *shape)
    grid = grid_of(shape[1])
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        found = gradients(operator, z, grad, grid=grid)
    moving = z.clone().requires_grad_()
    plain = reference.attend(moving, operator.weights(), operator.form, grid=grid, dtype=dtype)
    (plain_z,) = torch.autograd.grad(plain, moving, grad.to(dtype))
    exact = gradients(copy.deepcopy(operator).double(), z.double(), grad.double(), grid=grid)
    assert excess(found["out"], exact["out"], dtype) <= forward_bar, shape
    allowed = max(gradient_bar, 3 * excess(plain_z, exact["z"], dtype))
    assert excess(found["z"], exact["z"], dtype) <= allowed, shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", PRECISE, ids=label)
def test_a_model_stored_in_low_precision(case: tuple, dtype: torch.dtype) -> None:
    """Weights and tokens in the dtype itself, no autocast: the same bars."""
    operator, z, grad = rounded(case, dtype, 1.0, 3, 17, 64, 8)
    exact = gradients(copy.deepcopy(operator).double(), z.double(), grad.double(), grid=(1, 17))
    found = gradients(operator.to(dtype), z.to(dtype), grad, grid=(1, 17))
    assert found["out"].dtype == found["z"].dtype == found["subspace.weight"].dtype == dtype
    assert excess(found["out"], exact["out"], dtype) <= BARS[dtype][0]
    assert excess(found["z"], exact["z"], dtype) <= BARS[dtype][1]


def test_scores_are_float32_under_autocast() -> None:
    """Logits near a tie: bfloat16 scores would move the gate by percents."""
    operator = DMSA(64, 8).eval()
    z = 30 * torch.randn(4, 33, 64)
    exact = copy.deepcopy(operator).double().decompose(z.double())
    for low in (torch.bfloat16, torch.float16):
        for tokens_in in (z, z.to(low)):  # a low-precision input must not switch it back on
            with torch.autocast("cpu", dtype=low):
                parts = operator.decompose(tokens_in)
            assert parts.membership.dtype == parts.gate.dtype == torch.float32
            assert parts.projected.dtype == low
            if tokens_in is z:
                torch.testing.assert_close(parts.gate.double(), exact.gate, rtol=0, atol=1e-5)
    rounded_scores = (z.bfloat16() @ operator.assign.weight.bfloat16().T).double().mean(1)
    assert rounded_scores.isfinite().all()


def test_backward_inside_autocast_is_the_same() -> None:
    operator, z = excite(DMSA(24, 3)), tokens(dtype=torch.float32)
    grads = []
    for inside in (True, False):
        moving = z.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = operator(moving)
            if inside:
                out.sum().backward()
        if not inside:
            out.sum().backward()
        grads.append(moving.grad)
    assert torch.equal(*grads)


def test_autocast_leaves_float64_alone() -> None:
    operator, z = build("dmsa", {}), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(operator(z), kernels.attend(z, operator.weights(), operator.form))
        assert operator(z).dtype == F64


def test_fp16_squares_do_not_overflow() -> None:
    """At scale 1e2 the listing in plain float16 is NaN: 256 squared is too large. Ours squares after the upcast."""
    published = AttentionDMSA(64, 8)
    published.freqs_cis = published.freqs_cis.to(torch.complex64)
    z = 1e3 * torch.randn(2, 17, 64)
    ours = excite(DMSA(64, 8, rotary="none")).half()
    s = ours.subspace(z.half())
    assert (s * s).isinf().any()
    assert ours(z.half()).isfinite().all()
