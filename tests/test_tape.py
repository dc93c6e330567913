"""A pass that is played from its tape: the same bits as the pass itself, and the pass itself wherever a tape could be wrong.

In Triton's interpreter, whose launches a tape makes through `launch`; those of compiled kernels over the machine of
tests/test_launch.py. tests/test_device_tape.py asks the same of a GPU.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from dmst import kernels, use_kernels
from dmst.errors import ShapeError
from dmst.kernels import choice, plan
from tests.cases import FAMILY, label

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from dmst.kernels import registered, registered_step
from dmst.kernels.fused import calls, launch, layer, tape
from tests import test_fused, test_fused_step
from tests.test_fused import BF16, F16, F32, draw
from tests.test_fused_step import bits, draw_step
from tests.test_launch import Machine, machine, plainly  # noqa: F401 (a fixture)

interpreted = pytest.mark.skipif(
    not choice.interpreted(),
    reason="Triton's interpreter is off: there is a CUDA device (`pytest -m gpu`), or TRITON_INTERPRET is not 1",
)
read = pytest.mark.skipif(
    ".".join(triton.__version__.split(".")[:2]) not in launch.READ, reason="the launcher of this Triton was not read"
)
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
SMALL = (2, 5, 24, 3)  # b, n, d, k
SHIFT = tl.constexpr(3)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No tape of another test, and no kernel that fell back: it would be compared with itself."""
    registered._broken.clear()
    tape._forget()
    yield
    broken = set(registered._broken)
    registered._broken.clear()
    tape._forget()
    assert not broken
    assert not tape._replaced
    assert launch.recording.by is None


@contextmanager
def by_itself() -> Iterator[None]:
    """Every pass as it is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape, "play", lambda function, key, tensors, *rest: function(tensors, *rest))
        yield


def played() -> list[int]:
    """A list that grows with each tape that is played from here on."""
    count: list[int] = []
    for kind, replay in list(tape._tapes.items()):
        if type(replay) is FunctionType:

            @functools.wraps(replay)
            def counted(*args: Any, _replay: Any = replay) -> Any:
                count.append(1)
                return _replay(*args)

            tape._tapes[kind] = counted
    tape._quick.clear()
    return count


def recorded() -> list[Any]:
    return [replay for replay in tape._tapes.values() if type(replay) is FunctionType]


def thrice(fused: Callable[[Any], dict[str, Any]], draw: Callable[[], Any], passes: int = 2) -> None:
    """The first call looks, the second is recorded, the third is played: each with numbers of its own."""
    for turn in range(3):
        made = draw()
        count = played()
        found = fused(made)
        assert len(count) == (passes if turn == 2 else 0)
        with by_itself():
            bits(found, fused(made))
    assert len(tape._tapes) == len(recorded()) == passes, list(tape._tapes.values())


@interpreted
@pytest.mark.parametrize(
    ("case", "save"), [*((case, "projected") for case in FAMILY), *((case, "nothing") for case in test_fused.LOW)], ids=str
)
def test_every_form(case: tuple, save: str) -> None:
    def made() -> Any:
        drawn = draw(case, SMALL, excited=True)
        return drawn._replace(form=replace(drawn.form, save=save))

    thrice(test_fused.fused, made)


@interpreted
@pytest.mark.parametrize("case", test_fused.LOW, ids=label)
def test_every_form_in_float16(case: tuple) -> None:
    """Under autocast: weights are cast together, and so are the gradients on their way back."""
    thrice(lambda made: test_fused.fused(made, F16), lambda: draw(case, SMALL, F16))


@interpreted
@pytest.mark.parametrize(("dtype", "save"), [(F32, "projected"), (BF16, "nothing")], ids=str)
@pytest.mark.parametrize("case", [*test_fused_step.CASES, *test_fused_step.OTHERS], ids=label)
def test_every_step(case: tuple, dtype: torch.dtype, save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "STEPS", True)

    def made() -> Any:
        drawn = draw_step(case, SMALL, dtype, keep=save == "nothing")
        return drawn._replace(form=replace(drawn.form, save=save))

    thrice(lambda made: test_fused_step.fused(made, dtype), made)


@interpreted
def test_what_is_written_is_names_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is executed: no word of it may come from elsewhere. Objects go by names that the writer makes up."""
    monkeypatch.setattr(plan, "STEPS", True)
    for _ in range(3):
        test_fused.fused(draw(("dmsa", {"membership_bias": True}), SMALL, F16), F16)
        test_fused_step.fused(draw_step(test_fused_step.LISTING, SMALL))
    ours = re.compile(r"[vp]\d+|c\d+|_|tensors|addresses|stream|STALE|new|launch|replay")
    assert len(recorded()) == 4
    for replay in recorded():
        tree = ast.parse(replay.source)
        assert all(ours.fullmatch(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name))
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        words = {value for value in values if isinstance(value, str)}
        assert all(value is None or type(value) in (bool, int, str) for value in values)
        assert all(word.isidentifier() for word in words)
        assert not any(isinstance(node, ast.Import | ast.ImportFrom | ast.Lambda) for node in ast.walk(tree))


@interpreted
@pytest.mark.parametrize("programs", [1, 512])
def test_without_gradients_nothing_is_kept(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PROGRAMS", programs)
    made = draw(("dmsa", {}), SMALL)
    with use_kernels("fused"), torch.no_grad():
        found = [kernels.attend(made.z, made.weights, made.form, grid=made.grid) for _ in range(3)]
    assert all(torch.equal(x, found[0]) for x in found)
    (replay,) = recorded()
    last = replay.source.splitlines()[-1]
    assert last.count("None") == len(calls.Kept._fields)


@interpreted
def test_memory_that_starts_as_nan() -> None:
    """torch fills what it allocates: the tape takes no number from where the recorded call left one."""
    made = draw(("dmsa", {"mode": "proximal"}), SMALL)
    right, _ = (test_fused.fused(made) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()  # else it proves nothing
        count = played()
        found = test_fused.fused(made)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(count) == 2
    bits(found, right)


@interpreted
def test_through_the_operators() -> None:
    made = draw(("dmsa", {}), SMALL)
    tables = (None,) * 4
    given = (made.z, *made.weights, *tables, replace(made.form, rotary="none").text, 0, F32)
    first = torch.ops.dmst.attend(*given)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(torch.ops.dmst.attend(*given), first, strict=True))
    wanted = [True, *(w is not None for w in made.weights)]
    back = (made.grad, *given[:13], *first[1:], wanted, *given[13:])
    right = torch.ops.dmst.attend_backward(*back)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(torch.ops.dmst.attend_backward(*back), right, strict=True))
    assert len(recorded()) == 2


# --- kinds ------------------------------------------------------------------------------------------------------------


def shifted(x: Tensor) -> Tensor:
    """The same numbers four bytes off."""
    return torch.empty(x.numel() + 16)[1 : x.numel() + 1].view_as(x).copy_(x)


@interpreted
def test_other_layouts_are_other_kinds() -> None:
    made = draw(("dmsa", {}), SMALL)
    others = [made.map(change) for change in (test_fused.transposed, test_fused.strided, shifted)]
    others.append(draw(("dmsa", {}), (2, 6, 24, 3)))
    for count, each in enumerate([made, *others]):
        for _ in range(3):
            found = test_fused.fused(each)
        with by_itself():
            bits(found, test_fused.fused(each))
        assert len(recorded()) == 2 * (count + 1)


def add(tensors: Any, scale: float) -> Tensor:
    x, y = tensors
    return x.mT.mT.add(y, alpha=scale)


X, Y = torch.randn(4, 8), torch.randn(4, 8)


def test_the_key_the_grad_mode_and_nothing_are_told_apart() -> None:
    for _ in range(2):
        for scale in (1.0, 2.0):
            assert torch.equal(tape.play(add, (scale,), (X, Y), scale), X + scale * Y)
    with torch.no_grad():
        tape.play(add, (2.0,), (X, Y), 2.0)
    tape.play(lambda tensors: tensors[0] + 1, (), (X, None))
    assert len(recorded()) == 2
    assert len(tape._tapes) == 4


def test_the_same_tensor_twice_is_two_inputs() -> None:
    for _ in range(2):
        tape.play(add, (), (X, X), 1.0)
    count = played()
    assert torch.equal(tape.play(add, (), (X, Y), 1.0), X + Y)
    assert torch.equal(tape.play(add, (), (Y, Y), 1.0), Y + Y)
    assert len(count) == 2


def test_the_least_recent_kinds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST", 3)
    for size in (1, 2, 3, 1, 4, 5, 1):
        tape.play(add, (), (torch.ones(size, 2), torch.ones(size, 2)), 1.0)
    assert [kind[0][2][0] for kind in tape._tapes] == [4, 5, 1]
    assert len(recorded()) == 1  # the only one that came again in time


# --- somebody looks ---------------------------------------------------------------------------------------------------


@interpreted
def test_a_number_of_the_plan_makes_all_tapes_void(monkeypatch: pytest.MonkeyPatch) -> None:
    made = draw(("dmsa", {}), (2, 130, 24, 3))
    right, *_ = [test_fused.fused(made) for _ in range(3)]
    monkeypatch.setattr(plan, "PROGRAMS", 1)
    assert not tape._tapes
    other = [test_fused.fused(made) for _ in range(3)]
    bits(other[2], other[0])
    assert any(not torch.equal(right[name], other[0][name]) for name in right)  # it is cut in another way
    monkeypatch.undo()
    bits(test_fused.fused(made), right)


@interpreted
def test_a_function_that_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = draw(("dmsa", {}), SMALL), []
    for _ in range(3):
        right = test_fused.fused(made)
    own = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args: seen.append(1) or own(*args))
    for _ in range(3):
        bits(test_fused.fused(made), right)
    assert len(seen) == 3
    assert not tape._tapes
    monkeypatch.undo()
    for _ in range(3):
        bits(test_fused.fused(made), right)
    assert len(seen) == 3
    assert len(recorded()) == 2


def hook(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])


def debug(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(knobs.runtime, "debug", True)


def instrument(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(knobs.compilation, "instrumentation_mode", "consan")


def module(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(calls, "torch", object())


@pytest.mark.parametrize("look", [hook, debug, instrument, module])
def test_no_tape_where_somebody_looks(look: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def function(tensors: Any) -> Tensor:
        asked.append(1)
        return tensors[0] + 1

    for _ in range(3):
        tape.play(function, (), (X,))
    assert len(asked) == 2
    with monkeypatch.context() as patch:
        look(patch)
        for _ in range(3):
            tape.play(function, (), (X,))
        assert len(asked) == 5
    for _ in range(3):
        tape.play(function, (), (X,))
    assert len(asked) == (7 if look is module else 5)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_no_tape_under_another_mode_or_of_a_subclass() -> None:
    with Mode():
        for _ in range(3):
            tape.play(add, (), (X, Y), 1.0)
    for _ in range(3):
        tape.play(add, (), (X.as_subclass(Subclass), Y), 1.0)
    assert not tape._tapes


ELSEWHERE = torch.ones(4, 8)
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "item": lambda tensors: tensors[0] * tensors[1].sum().item(),
    "branch": lambda tensors: tensors[0] if tensors[0].sum() > 0 else tensors[1],
    "list": lambda tensors: torch.tensor(tensors[0].tolist()),
    "elsewhere": lambda tensors: tensors[0] + ELSEWHERE,
    "mask": lambda tensors: tensors[0][tensors[1] > 0],
    "nonzero": lambda tensors: torch.nonzero(tensors[0]),
    "object": lambda tensors: {"x": tensors[0] + 1, "y": object()},
    "not torch": lambda tensors: torch.from_numpy(tensors[0].numpy() + 1),
}


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=list(UNKNOWN))
def test_what_cannot_be_recorded_takes_the_plain_way(function: Callable) -> None:
    for _ in range(4):
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        found, right = tape.play(function, (), (x, y)), function((x, y))
        if isinstance(right, dict):
            found, right = found["x"], right["x"]
        assert torch.equal(found, right)
    (replay,) = tape._tapes.values()
    assert isinstance(replay, str) and replay


def test_what_is_written_in_place_is_written_again() -> None:
    def function(tensors: Any) -> tuple:
        x, y = tensors
        total = torch.zeros_like(x)
        total += x
        total[1:].mul_(2)
        made = [torch.empty_like(x), torch.empty_like(y)]
        torch._foreach_copy_(made, [x, y])
        torch.mul(x, y, out=made[1])
        first, *rest = made[0].unbind(0)
        unused = x.exp()
        return total, {"made": made[1], "rest": (first, *rest)}, [x, None, 3.5, unused.shape[0]]

    for _ in range(3):
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        (total, named, listed), right = tape.play(function, (), (x, y)), function((x, y))
        assert torch.equal(total, right[0])
        assert torch.equal(named["made"], right[1]["made"])
        assert torch.equal(torch.stack(named["rest"]), x)
        assert listed[0] is x and listed[1:] == [None, 3.5, 4]
    assert len(recorded()) == 1


# --- memory, threads, failure -----------------------------------------------------------------------------------------


def test_a_temporary_is_gone_after_its_last_use() -> None:
    seen: list[weakref.ref] = []
    alive: list[int] = []

    def doubled(x: Tensor) -> Tensor:
        """A call of torch that looks who is alive."""
        if has_torch_function((x,)):
            return handle_torch_function(doubled, (x,), x)
        made = 2 * x
        alive.append(sum(each() is not None for each in seen))
        seen.append(weakref.ref(made))
        return made

    def function(tensors: Any) -> tuple[Tensor, Tensor]:
        x = doubled(tensors[0])
        y = doubled(x)
        z = doubled(doubled(doubled(y)))
        keep = doubled(z)
        x = z = doubled(keep.view(-1)).view(4, 8)
        return keep, doubled(x + z)

    for _ in range(3):
        first, second = tape.play(function, (), (X,))
        assert torch.equal(second, 2**8 * 2 * X)
        del first, second
    once = len(alive) // 3
    assert len(recorded()) == 1
    assert alive[once : 2 * once] == alive[:once]  # recording holds nothing
    assert all(mine <= right for mine, right in zip(alive[2 * once :], alive[:once], strict=True))
    assert alive[2 * once :] == [0, 1, 1, 1, 1, 1, 1, 1]


class Adds:
    """A kernel that is torch, and waits for the other thread in the middle of each pass."""

    def __init__(self) -> None:
        self.together = threading.Barrier(2, timeout=20)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run

    def run(self, x: Tensor, out: Tensor, more: float) -> None:
        self.together.wait()
        torch.add(x, more, out=out)


def test_threads_record_for_themselves() -> None:
    """Both are in the middle of a pass at the same time, of the same kind or not: neither has a step of the other."""
    kernel, found, both = Adds(), {}, threading.Barrier(2, timeout=20)

    def function(tensors: Any, more: float) -> Tensor:
        if more < 3:  # of two kinds: each pass begins before the other has launched anything
            both.wait()
        out = torch.empty_like(tensors[0])
        launch.launch(kernel, launch.planned((1,)), tensors[0], out, more)
        return 2 * out

    def work(name: str, key: float, more: float) -> None:
        x = torch.randn(4, 8)
        found[name] = [torch.equal(tape.play(function, (key,), (x,), more), 2 * (x + more)) for _ in range(4)]

    for keys in ((1.0, 2.0), (3.0, 3.0)):
        threads = [threading.Thread(target=work, args=(f"{key} {place}", key, key)) for place, key in enumerate(keys)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert all(each == [True] * 4 for each in found.values())
    assert len(recorded()) == 3
    assert all(replay.source.count("launch(") == 1 for replay in recorded())


@interpreted
def test_a_tape_that_fails_falls_back_and_says_so() -> None:
    made = draw(("dmsa", {}), SMALL)
    for _ in range(2):
        right = test_fused.fused(made)

    def fails(*_: Any) -> None:
        raise ValueError("no such layout")

    tape._quick.clear()
    for kind in tape._tapes:
        tape._tapes[kind] = fails
    with pytest.warns(RuntimeWarning, match=r"does not work here for tokens \(2, 5, 24\).*no such layout"):
        found = test_fused.fused(made)
    registered._broken.clear()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value)


@interpreted
def test_what_does_not_fit_is_refused_at_any_time() -> None:
    made = draw(("dmsa", {}), SMALL)
    wrong = made.weights._replace(out_bias=torch.zeros(25))
    for _ in range(3):
        with use_kernels("fused"):
            with pytest.raises(ShapeError, match=r"out_bias has shape \(25,\)"):
                kernels.attend(made.z, wrong, made.form, grid=made.grid)
            with pytest.raises(ShapeError, match=r"assign has shape \(4, 24\)"):  # the kernels would read it
                kernels.attend(made.z, made.weights._replace(assign=torch.zeros(4, 24)), made.form, grid=made.grid)
            with pytest.raises(ShapeError, match="out_bias has shape"):
                kernels.attend(made.z[:0], wrong, made.form, grid=made.grid)
            kernels.attend(made.z, made.weights, made.form, grid=made.grid)
    assert not registered._broken


def test_every_launch_of_a_pass_goes_through_launch() -> None:
    """One that went around it would be missing from the tape."""
    folder = Path(tape.__file__).parent
    around = [path.name for path in folder.glob("*.py") if re.search(r"_kernel\[", path.read_text())]
    assert around in ([], ["neighbours.py"])  # a pass of its own, which is not recorded
    assert "kernel[cut.grid]" in (folder / "launch.py").read_text()
    assert {"dmst.kernels.plan", "dmst.kernels.fused.calls", "dmst.kernels.fused.step"} <= tape._usual.keys()
    assert registered_step.tape is tape


# --- compiled kernels -------------------------------------------------------------------------------------------------


def work(x_ptr, y_ptr, bias_ptr, n, step, scale, SIZE: tl.constexpr, FLAG: tl.constexpr):
    tl.store(y_ptr + SHIFT, n)


@pytest.fixture
def kernel(machine: Machine) -> Any:  # noqa: F811
    return launch.launched(JITFunction(work))


def launches(kernel: Any, half: bool = True) -> Callable[[Any], tuple]:
    cut = launch.planned((5, 6), SIZE=16, FLAG=True, num_warps=4)

    def function(tensors: Any) -> tuple:
        x, bias = tensors
        made, scratch = torch.empty(8, 8), torch.empty(6)
        launch.launch(kernel, cut, x.view(torch.int32), made[4:], bias, 197, 32, 0.5)
        launch.launch(kernel, cut, scratch, made.mT, None, 1, 2**40, 0.25)
        return made, None

    return function


@read
def test_a_compiled_kernel_is_launched_as_it_was(machine: Machine, kernel: Any) -> None:  # noqa: F811
    function = launches(kernel)
    made = [tape.play(function, (), (X, Y[1:]))[0] for _ in range(3)]
    assert machine.asked == 2
    assert len(machine.calls) == 6
    first, second = plainly(machine.calls[4]), plainly(machine.calls[5])
    assert first[:3] == (5, 6, 1)
    assert first[6:] == (X.data_ptr(), made[2].data_ptr() + 4 * 8 * 4, Y[1:].data_ptr(), 197, 32, 0.5, 16, True)
    assert second[7:] == (made[2].data_ptr(), None, 1, 2**40, 0.25, 16, True)
    assert first[4:6] == plainly(machine.calls[0])[4:6]
    assert machine.calls[4][6:9] == (None, None, None)
    (replay,) = recorded()
    assert replay.source.count(" = c") == 2  # two allocations and no view


def cuda_launcher(launch: Callable[..., None], **changed: Any) -> Any:
    """Triton's own, of a kernel that was never compiled."""
    kind = pytest.importorskip("triton.backends.nvidia.driver").CudaLauncher
    made = object.__new__(kind)
    names = [f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align")]
    state: dict[str, Any] = dict.fromkeys(names, 0)
    state |= {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": True, "gsan_enabled": False, "launch": launch}
    state |= {"arg_annotations": ["annotation"], "kernel_signature": b"signature"}
    vars(made).update(state | changed)
    return made


@read
def test_the_launcher_is_left_out_where_it_only_passes_on(machine: Machine, kernel: Any) -> None:  # noqa: F811
    """What reaches the driver is what reaches it through Triton's launcher, whatever its version puts in between."""
    seen: list[tuple] = []
    cut = launch.planned((5, 6), SIZE=16, FLAG=True, num_warps=4)

    def function(tensors: Any) -> Tensor:
        launch.launch(kernel, cut, *tensors, None, 197, 32, 0.5)
        return tensors[0] + 1

    function((X, Y))
    machine.compiled[0]._run = cuda_launcher(lambda *args: seen.append(args))
    kernel.remembered.clear()
    for _ in range(4):  # Triton's way, from memory and recorded, played twice
        tape.play(function, (), (X, Y))
    assert len(seen) == 4
    own, *rest = [given[:3] + given[4:] for given in seen[1:]]  # without the stream: a CPU has none
    assert rest == [own, own]
    assert X.data_ptr() in (*seen[3], *seen[3][-1])
    (replay,) = recorded()
    assert not any(type(x).__name__ == "CudaLauncher" for x in replay.__globals__.values())


def test_a_launcher_that_does_more_is_called(machine: Machine) -> None:  # noqa: F811
    nothing = lambda *args: None  # noqa: E731
    assert launch.straight(cuda_launcher(nothing), 3) is not None
    assert launch.straight(cuda_launcher(nothing, global_scratch_size=8), 3) is None
    assert launch.straight(cuda_launcher(nothing, profile_scratch_size=8), 3) is None
    assert launch.straight(nothing, 3) is None

    class CudaLauncher:
        global_scratch_size = profile_scratch_size = 0
        launch = staticmethod(nothing)

        def __call__(self, *args: Any) -> None:
            self.launch(*args, object())

    assert launch.straight(CudaLauncher(), 3) is None  # something new at each call
    CudaLauncher.__call__ = lambda self, *args: self.launch(*args[:-1])  # type: ignore[method-assign]
    assert launch.straight(CudaLauncher(), 3) is None  # not all that it was given
    CudaLauncher.__call__ = lambda self, *args: self.launch(args[0] + 1)  # type: ignore[method-assign]
    assert launch.straight(CudaLauncher(), 3) is None  # it looks at them


@read
def test_a_descriptor_is_made_anew(machine: Machine) -> None:  # noqa: F811
    runtime = pytest.importorskip("triton.experimental.gluon._runtime", reason="this Triton has no Gluon")
    hopper = pytest.importorskip("dmst.kernels.fused.hopper")
    kernel = launch.launched(runtime.GluonJITFunction(work))
    cut = launch.planned((5, 6, 7), SIZE=16, FLAG=True)

    def function(tensors: Any) -> Tensor:
        out = torch.empty_like(tensors[0])
        given = hopper._pieces(tensors[0], 64), hopper._pieces(out, 64)
        launch.launch(kernel, cut, *given, None, 197, 32, 0.5)
        return out

    for _ in range(3):
        x = torch.zeros(5, 32, 64, dtype=BF16)
        out = tape.play(function, (), (x,))
        right, made = hopper._pieces(x, 64), machine.calls[-1][9:11]
        assert type(made[0]) is type(right)
        assert vars(made[0]) == vars(right)
        assert made[0].base is x and made[1].base is out
        assert made[0].padding == right.padding
    assert machine.asked == 1
    assert len(recorded()) == 1


@read
def test_the_own_hooks_of_a_kernel(machine: Machine, kernel: Any) -> None:  # noqa: F811
    function = launches(kernel)
    for _ in range(3):
        tape.play(function, (), (X, Y))
    assert machine.asked == 2
    kernel.add_pre_run_hook(lambda *args, **kwargs: None)
    tape.play(function, (), (X, Y))
    assert machine.asked == 4


@read
def test_a_global_variable_set_anew(machine: Machine, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    function = launches(kernel)
    for _ in range(3):
        tape.play(function, (), (X, Y))
    monkeypatch.setitem(globals(), "SHIFT", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="Global variable SHIFT has changed"):
        tape.play(function, (), (X, Y))
    assert not recorded()
