"""The short launch takes the kernel that Triton would take, with the same arguments, and steps aside where it cannot know.

Triton's own `JITFunction.run` is the judge: over a driver without a device, with a compiler that makes a new kernel for each
specialization it is asked for and a launcher that writes down what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dmst.kernels import plan
from dmst.kernels.fused import hopper, launch
from dmst.kernels.fused.launch import Launched, launched

pytestmark = pytest.mark.skipif(
    ".".join(triton.__version__.split(".")[:2]) not in launch.READ, reason="the launcher of this Triton was not read"
)
SHIFT = tl.constexpr(3)
HERE = -1  # the index of the CPU, where the tensors of these tests are


def work(x_ptr, y_ptr, bias_ptr, n, step, scale, SIZE: tl.constexpr, FLAG: tl.constexpr):
    tl.store(y_ptr + SHIFT, n)


def with_default(x_ptr, FLAG: tl.constexpr, SIZE: tl.constexpr = 16):
    tl.store(x_ptr, SIZE)


class Machine:
    """A CUDA device that is not there: `calls` is what its launcher was given, `asked` how often Triton went its own way."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.compiled: list[CompiledKernel] = []
        self.asked, self.device = 0, HERE

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compile(self, src: Any, **_: Any) -> CompiledKernel:
        src.fn.cache_key  # noqa: B018  # as compiling does, it collects the global variables
        made = object.__new__(CompiledKernel)
        number = len(self.compiled)
        made.__dict__.update(src=src, module=None, name="work", function=100 + number, packed_metadata=("metadata", number))
        made.__dict__.update(_run=lambda *args: self.calls.append(args), _init_handles=lambda: None)
        self.compiled.append(made)
        return made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr("triton.compiler.compile", made.compile)
    own = JITFunction.run

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        made.asked += 1
        return own(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", run)
    return made


@pytest.fixture
def kernel(machine: Machine) -> Launched:
    return launched(JITFunction(work))


def shifted(x: Tensor) -> Tensor:
    """The same values two or four bytes off."""
    room = torch.empty(x.numel() + 16, dtype=x.dtype)
    return room[1 : x.numel() + 1].view_as(x)


X, Y = torch.zeros(4, 8), torch.zeros(4, 8)


def call(kernel: Any, *, grid: Any = (5, 6, 7), changed: dict[int, Any] | None = None, **constants: Any) -> CompiledKernel:
    args: list[Any] = [X, Y, None, 197, 32, 0.5]
    for place, value in (changed or {}).items():
        args[place] = value
    return kernel[grid](*args, **{"SIZE": 16, "FLAG": True, "num_warps": 4, **constants})


def plainly(given: tuple) -> tuple:
    """What a launcher was given, without what only hooks read, and tensors as their addresses."""
    return given[:6] + tuple(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in given[9:])


def test_the_next_call_launches_what_the_first_one_found(machine: Machine, kernel: Launched) -> None:
    found = [call(kernel) for _ in range(3)]
    assert machine.asked == 1
    assert found == machine.compiled * 3
    first, *rest = machine.calls
    assert len(first) == 9 + 8  # Triton's way: the constants are among the arguments
    for given in rest:
        assert plainly(given) == plainly(first)
        assert given[6:9] == (None, None, None)
        assert not any(isinstance(arg, Tensor) for arg in given)


OTHERS: dict[str, dict[str, Any]] = {
    "alignment": {"changed": {0: shifted(X)}},
    "alignment of another": {"changed": {1: shifted(Y)}},
    "dtype": {"changed": {0: X.half()}},
    "tensor": {"changed": {2: X}},
    "none": {"changed": {1: None}},
    "one": {"changed": {3: 1}},
    "sixteen": {"changed": {3: 208}},
    "zero": {"changed": {3: 0}},
    "not sixteen": {"changed": {4: 33}},
    "long": {"changed": {3: 2**31}},
    "long, sixteen": {"changed": {3: 2**40}},
    "negative and long": {"changed": {3: -(2**31) - 1}},
    "unsigned": {"changed": {3: 2**63 + 1}},
    "integer for real": {"changed": {5: 2}},
    "one for real": {"changed": {5: 1}},
    "truth": {"changed": {3: True}},
    "constant": {"SIZE": 32},
    "flag": {"FLAG": False},
    "warps": {"num_warps": 8},
    "stages": {"num_stages": 2},
}
SAME: dict[str, dict[str, Any]] = {
    "grid": {"grid": (2,)},
    "integer": {"changed": {3: 199}},
    "negative": {"changed": {3: -5}},
    "last of 32 bits": {"changed": {3: 2**31 - 1}},
    "sixteens": {"changed": {4: 48}},
    "first of 32 bits": {"changed": {4: -(2**31)}},
    "real": {"changed": {5: 2.0}},
    "parameter": {"changed": {0: nn.Parameter(X)}},
    "shape": {"changed": {0: torch.zeros(3)}},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=list(OTHERS))
def test_what_triton_compiles_anew_is_remembered_apart(change: dict, machine: Machine, kernel: Launched) -> None:
    usual = call(kernel)
    other = call(kernel, **change)
    assert len(machine.compiled) == 2  # else it proves nothing
    asked = machine.asked
    assert [call(kernel), call(kernel, **change)] == [usual, other] == machine.compiled
    assert machine.asked == asked == 2
    assert [plainly(given) for given in machine.calls[2:]] == [plainly(given) for given in machine.calls[:2]]


@pytest.mark.parametrize("change", SAME.values(), ids=list(SAME))
def test_what_triton_takes_as_one_is_one(change: dict, machine: Machine, kernel: Launched) -> None:
    usual = call(kernel)
    assert call(kernel, **change) is usual
    assert machine.asked == 1
    judge = JITFunction(work)
    call(judge, **change)
    short, own = (plainly(given) for given in machine.calls[1:])
    assert short[:3] + short[6:] == own[:3] + own[6:]
    call(judge)
    assert len(machine.compiled) == 2  # Triton made one kernel of both too


def test_any_two_calls_share_a_kernel_where_they_do_in_triton(machine: Machine, kernel: Launched) -> None:
    judge, changes = JITFunction(work), [*OTHERS.values(), *SAME.values()]
    right = [call(judge, **change).function for change in changes]
    found = [[call(kernel, **change).function for change in changes] for _ in range(2)]
    assert found[0] == found[1]
    for i, one in enumerate(right):
        assert [one == other for other in right] == [found[0][i] == other for other in found[0]], changes[i]


def test_a_planned_launch_is_the_same_launch(machine: Machine, kernel: Launched) -> None:
    """What a shape fixes is given once; equal constants are one kind, wherever they were planned."""
    usual = call(kernel)
    for _ in range(2):
        cut = launch.planned((5, 6, 7), SIZE=16, FLAG=True, num_warps=4)
        assert launch.launch(kernel, cut, X, Y, None, 197, 32, 0.5) is usual
    assert machine.asked == 1
    assert [plainly(given) for given in machine.calls] == [plainly(machine.calls[0])] * 3
    other = launch.planned((5, 6, 7), SIZE=16, FLAG=True, num_warps=8)
    assert launch.launch(kernel, other, X, Y, None, 197, 32, 0.5) is not usual
    judge = JITFunction(work)
    launch.launch(judge, cut, X, Y, None, 197, 32, 0.5)  # a kernel that is left alone
    assert machine.asked == 3
    assert plainly(machine.calls[-1])[6:] == plainly(machine.calls[0])[6:]


def test_the_names_of_the_keywords_count(machine: Machine, kernel: Launched) -> None:
    for _ in range(2):
        for option in ("num_warps", "num_stages"):
            kernel[(1,)](X, Y, None, 197, 32, 0.5, SIZE=16, FLAG=True, **{option: 4})
    assert machine.asked == 2
    assert [given[4] for given in machine.calls] == [100, 101] * 2


def test_a_default_stands_in_its_place(machine: Machine) -> None:
    kernel = launched(JITFunction(with_default))
    for _ in range(2):
        kernel[(1,)](X, FLAG=True)
        kernel[(1,)](X, FLAG=True, SIZE=32)
    assert machine.asked == 2
    assert [given[9:] for given in machine.calls[2:]] == [(X.data_ptr(), True, 16), (X.data_ptr(), True, 32)]


def test_every_device_has_its_own(machine: Machine, kernel: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    call(kernel)
    machine.device = 1
    monkeypatch.setattr(Tensor, "get_device", lambda self: machine.device)
    here = [call(kernel), call(kernel)]
    assert here == [machine.compiled[1]] * 2
    assert machine.asked == 2
    assert machine.calls[-1][3] == 71  # its stream


# --- where it steps aside ---------------------------------------------------------------------------------------------


def enter(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])


def leave(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [lambda metadata: None])


def bare_hook(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)


def debug(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    monkeypatch.setattr(knobs.runtime, "debug", True)


def own_debug(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    monkeypatch.setattr(kernel, "debug", True)


def instrument(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "consan")


def stages(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"))


def before(monkeypatch: pytest.MonkeyPatch, kernel: Launched) -> None:
    kernel.add_pre_run_hook(lambda *args, **kwargs: None)


@pytest.mark.parametrize("look", [enter, leave, bare_hook, debug, own_debug, instrument, stages, before])
def test_it_steps_aside_where_somebody_looks(
    look: Callable, machine: Machine, kernel: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        call(kernel)
    with monkeypatch.context() as patch:
        look(patch, kernel)
        for _ in range(2):
            call(kernel)
    assert machine.asked == 3
    kernel.pre_run_hooks.clear()
    call(kernel)
    assert machine.asked == 3  # and is back afterwards


class Subclass(Tensor):
    pass


ASIDE: dict[str, dict[str, Any]] = {
    "grid as a function": {"grid": lambda constants: (constants["SIZE"],)},
    "grid as a list": {"grid": [3]},
    "subclass": {"changed": {0: torch.zeros(4).as_subclass(Subclass)}},
    "tuple": {"changed": {3: (1, 2)}},
    "constexpr": {"changed": {3: tl.constexpr(4)}},
    "wrapped": {"changed": {0: triton.runtime.jit.TensorWrapper(X, torch.float32)}},
}


@pytest.mark.parametrize("change", ASIDE.values(), ids=list(ASIDE))
def test_it_steps_aside_for_arguments_it_does_not_know(change: dict, machine: Machine, kernel: Launched) -> None:
    for _ in range(3):
        call(kernel, **change)
    assert machine.asked == 3
    assert not kernel.remembered


def test_a_tensor_elsewhere_is_left_to_triton(machine: Machine, kernel: Launched) -> None:
    """An address is no longer checked by the launcher: one on the CPU would be read on the device."""
    machine.device = 0
    for _ in range(2):
        call(kernel)
    assert machine.asked == 2


@pytest.mark.parametrize(
    "give",
    [
        lambda kernel: kernel[(1,)](X, Y, None, 197, 32, 0.5, 16, FLAG=True),  # a constant by position
        lambda kernel: kernel[(1,)](X, Y, None, 197, 32, scale=0.5, SIZE=16, FLAG=True),  # a number by name
        lambda kernel: kernel[(1,)](X, Y, None, 197, scale=0.5, step=32, SIZE=16, FLAG=True),
    ],
)
def test_other_ways_to_pass_arguments_are_not_remembered(give: Callable, machine: Machine, kernel: Launched) -> None:
    for _ in range(2):
        give(kernel)
    assert machine.asked == 2
    assert not kernel.remembered


def test_a_global_variable_set_anew_is_refused_as_by_triton(
    machine: Machine, kernel: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        call(kernel)
    monkeypatch.setitem(globals(), "SHIFT", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="Global variable SHIFT has changed"):
        call(kernel)


def test_a_kernel_that_is_still_compiling_is_not_remembered(machine: Machine, kernel: Launched) -> None:
    found = SimpleNamespace(run=None)
    assert kernel._remember((), found, (None,) * 6, {"SIZE": 16, "FLAG": True}) is found
    assert not kernel.remembered


def test_memory_is_bounded(machine: Machine, kernel: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST", 3)
    for warps in (1, 2, 4, 8, 16):
        call(kernel, num_warps=warps)
        assert 0 < len(kernel.remembered) <= 3


def test_what_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted, compiled = object(), JITFunction(work)
    assert launched(interpreted) is interpreted
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    assert type(launched(compiled)) is JITFunction
    monkeypatch.undo()
    assert launched(compiled) is compiled
    assert isinstance(compiled, Launched)
    assert isinstance(compiled, JITFunction)  # so that it compiles without a device as it did


def test_kernels_in_gluon_and_their_descriptors(machine: Machine) -> None:
    """A descriptor is compiled for its dtype, box and layout; where and how long its tensor is does not matter."""
    runtime = pytest.importorskip("triton.experimental.gluon._runtime", reason="this Triton has no Gluon")
    layouts = pytest.importorskip("triton.experimental.gluon.language").NVMMASharedLayout
    described = launch.TensorDescriptor
    swizzled, plain = layouts(128, 16, 2), layouts(32, 16, 2)

    def box(dtype: torch.dtype = torch.bfloat16, rows: int = 64, layout: Any = swizzled, height: int = 64) -> Any:
        return described(torch.zeros(rows, 64, dtype=dtype), [rows, 64], [64, 1], [height, 64], layout)

    kernel = launched(runtime.GluonJITFunction(work))
    assert type(kernel) is launch.LaunchedGluon
    hopper = pytest.importorskip("dmst.kernels.fused.hopper")
    x = torch.zeros(5, 32, 128, dtype=torch.bfloat16)
    assert hopper._pieces(x, 128) == described(x, [160, 128], [128, 1], [64, 64], swizzled)  # made without its checks
    z = x.float()
    assert hopper._pieces(z, 128) == described(z, [160, 128], [128, 1], [64, 32], layouts(128, 32, 2))
    first = box()
    known = call(kernel, changed={0: first})
    assert machine.asked == 1
    given = box(rows=640)
    assert call(kernel, changed={0: given}) is known
    assert machine.asked == 1
    assert machine.calls[1][9] is given  # the launcher makes the descriptor of the device from it
    assert plainly(machine.calls[1])[7:] == plainly(machine.calls[0])[7:]
    for other in (box(torch.float16), box(height=32), box(layout=plain)):
        assert call(kernel, changed={0: other}) is not known
    machine.device = 3
    asked = machine.asked
    call(kernel, changed={0: box()})
    assert machine.asked == asked + 1


def test_the_calls_of_gluon_kernels_fit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU runs these calls: here, that each gives its kernel every constant, on a Hopper GPU that is not there."""
    from dmst.kernels import plan
    from dmst.kernels.fused import hopper, resident, stream

    if not (hopper.GLUON and resident.GLUON):
        pytest.skip("this Triton's Gluon was not read")
    there = torch.device("cuda", 0)
    monkeypatch.setattr(hopper, "_machine", lambda index: (True, 132))
    monkeypatch.setattr(resident, "_room", lambda index: 233_472)
    for cached in (hopper._plan, resident._plan_settle, resident._plan_pull, resident._fits, resident._fits_pull):
        cached.cache_clear()
    shape, low = (256, 197, 384, 8), torch.bfloat16
    cuts = [
        (hopper.hopper_kernel, hopper._plan(0, 50_432, 384, 384, 48, 1, True, False, False, False)),
        (hopper.hopper_kernel, hopper._plan(0, 50_432, 384, 1536, 16, 1, True, False, False, True)),
        (hopper.hopper_kernel, hopper._plan(0, 100, 64, 320, 16, 1, True, False, False, True)),
        (resident.settle_kernel, resident._plan_settle(*shape, low, there, "listing", True, False, True)),
        (resident.pull_kernel, resident._plan_pull(*shape, low, there, "proximal", True, False, (True, True, False))),
        (stream.stream_kernel, stream._plan(64, 384, 8, plan.sweep(64, 1024, 8, 48), "listing", True, False, True, True, True)),
    ]
    for kernel, (grid, constants) in cuts:
        names = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        assert constants.keys() - {"num_warps", "maxnreg", "enable_fp_fusion"} == names
        written = kernel in (resident.pull_kernel, stream.stream_kernel)
        assert constants.get("enable_fp_fusion") is (False if written else None)  # whose bits are no choice of the compiler
        assert all(0 < size < 2**31 for size in grid)
    assert [cut.grid for _, cut in cuts] == [(132,), (132,), (5,), (256 * 6,), (256 * 8,), (64, 4, 2)]
    assert resident.fits(1024, 384, 48, low, there) and not resident.fits_pull(1024, 384, 48, low, there)
    for cached in (hopper._plan, resident._plan_settle, resident._plan_pull, resident._fits, resident._fits_pull):
        cached.cache_clear()  # of a machine that was not there


def test_the_calls_for_long_samples_without_silent_heads_fit_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for `active_hopper`: programs for each multiprocessor, and no more rows of sums than there must be."""
    from dmst.kernels.fused import active_hopper

    if not hopper.GLUON:
        pytest.skip("this Triton's Gluon was not read")
    monkeypatch.setattr(hopper, "_machine", lambda index: (True, 132))
    cached = (active_hopper._plan_project, active_hopper._plan_out, hopper._columns)
    for made in cached:
        made.cache_clear()
    found = []
    for b, n, d, k in ((64, 1024, 384, 8), (16, 4096, 384, 8), (1, 65_536, 384, 8), (3, 257, 256, 4), (1, 1, 64, 1)):
        cut, tiles, units = active_hopper._plan_project(0, b, n, d, k, True)
        out = active_hopper._plan_out(0, b * -(-n // 128), d, k)
        for kernel, (_, constants) in (
            (active_hopper.project_hopper_kernel, cut),
            (active_hopper.fold_out_hopper_kernel, out),
        ):
            names = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
            assert constants.keys() - {"num_warps", "maxnreg"} == names
        assert units * tiles * 128 >= n > (units - 1) * tiles * 128
        found.append((cut.grid, tiles, units, out.grid))
    assert found == [
        ((128,), 4, 2, (132,)), ((128,), 4, 8, (132,)), ((128,), 4, 128, (132,)), ((9,), 1, 3, (18,)), ((1,), 1, 1, (1,)),
    ]  # fmt: skip
    for made in cached:
        made.cache_clear()  # of a machine that was not there


def test_the_call_for_few_heads_fits_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for `few`, and that its descriptors are those that the constructor would make."""
    from dmst.kernels import Form
    from dmst.kernels.fused import few

    if not hopper.GLUON:
        pytest.skip("this Triton's Gluon was not read")
    monkeypatch.setattr(hopper, "_machine", lambda index: (True, 132))
    few._plan.cache_clear()
    cut = few._plan(0, Form(8), 256, 384, 256, True, True)
    small = few._plan(0, Form(4), 3, 64, 128, True, True)
    few._plan.cache_clear()  # of a machine that was not there
    names = {parameter.name for parameter in few.few_kernel.params if parameter.is_constexpr}
    assert cut.constants.keys() - {"num_warps", "maxnreg"} == names
    assert (cut.grid, small.grid) == ((132,), (3,))
    assert (small.constants["STAGES"], small.constants["BLOCKS"]) == (1, 1)
    z, weight = torch.zeros(3, 197, 384, dtype=torch.bfloat16), torch.zeros(384, 384, dtype=torch.bfloat16)
    for made, x, box in (
        (few._samples(z, 256), z, [1, 256, 64]),
        (few._rows(weight, 48), weight, [16, 64]),
        (few._rows(weight, 96), weight, [32, 64]),
        (few._rows(weight, 128), weight, [64, 64]),
    ):
        right = few.TensorDescriptor.from_tensor(x, box, made.layout)
        assert (made.base is x, made.padding, made.layout.rank) == (True, right.padding, len(box))
        assert (made.shape, made.strides, made.block_shape) == ([*right.shape], [*right.strides], right.block_shape)


@pytest.mark.parametrize(
    ("b", "n", "most"), [(64, 1024, 8), (16, 4096, 8), (1, 65536, 8), (1, 2**19, 8), (1, 2**20, 8), (5, 896, 1)]
)
def test_runs_of_the_first_product_are_long(b: int, n: int, most: int) -> None:
    """Single tiles would leave a row of sums for every 16 tokens, for one kernel to add up: 32,768 at half a million tokens."""
    tiles = hopper._tiles(b * n, n, 66)
    assert n // 64 % tiles == 0
    assert tiles == most
    busiest = {k: plan.over(plan.over(b * n, 128 * k), 66) * k for k in (8, 4, 2, 1) if n // 64 % k == 0}
    assert 16 * busiest[tiles] <= 17 * min(busiest.values())
