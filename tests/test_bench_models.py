"""`dmst bench models`: rows that are whole, times that have their proof, targets that can be missed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from dmst import cli, kernels
from dmst.bench import (
    acceptance,
    measure,
    model_figure,
    model_parity,
    model_plan,
    model_row,
    model_tables,
    models,
    networks,
    record,
    timing,
)
from dmst.bench.draw import Draw
from dmst.errors import BadFileError, MissingExtraError, OptionError, UnknownNameError

CPU = torch.device("cpu")
SETTING = model_row.Setting(CPU, "float32", "abc")
DIGITS = model_plan.Task("eager", 8, 6, "dmst_digits")
TINY = ("bench", "models", "--sizes", "8", "--batch", "6", "--commit", "abc123")
# images a second in inference and training, MiB: about what an H200 does
SEEN = {
    "vit_small": (25_000, 8_500, 8_400), "vit_small:dmsa": (33_000, 12_500, 6_900), "dmst_small": (30_000, 11_500, 8_000),
    "timm:vit_small_patch16_224": (25_500, 8_600, 8_369), "timm:xcit_small_12_p16_224": (15_800, 4_600, 15_000),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PATIENCE", 0.0)  # three repetitions


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def made_up(changed: str = "", modes: Sequence[str] = tuple(model_plan.MODES), **changes: Any) -> list[record.Row]:
    """Rows of a device that keeps every promise; `changes` are laid over the rows of one network in these modes."""
    rows = []
    for mode, pixels, batch in (("compiled", 224, 256), ("recorded", 224, 256), ("graph", 1024, 12)):
        for what, (inference, training, peak) in SEEN.items():
            row = dict.fromkeys(model_row.KEYS) | {
                "what": what,
                "mode": mode,
                "B": batch,
                "pixels": pixels,
                "dtype": "bfloat16",
            }
            row |= {"inference": inference / pixels, "training": training / pixels, "error": 8e-3}
            row["peak_mb"] = None if mode == "recorded" else peak
            row |= {"kernel": "fused" if "dms" in what else "torch", "versions": {"torch": "2"}, "commit": "x"}
            rows.append(row | changes if what == changed and row["mode"] in modes else row)
    return rows


def written(path: Path, rows: list[record.Row]) -> str:
    path.write_text(record.text({"device": "made up"}, rows))
    return str(path)


def replaced(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], object]) -> None:
    """Every network that is built goes through `change`."""
    build = networks.build

    def changed(*asked: Any) -> nn.Module:
        model = build(*asked)
        change(model)
        return model

    monkeypatch.setattr(networks, "build", changed)


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_writes_every_key_of_every_network(tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    code, text = run(*TINY, "--only", "vit_digits,vit_digits:dmsa,dmst_digits", "--out", str(out))
    assert code == 0, text
    told = json.loads(out.read_text())
    rows = {row["what"]: row for row in told["rows"]}
    assert list(rows) == ["vit_digits", "vit_digits:dmsa", "dmst_digits"]
    for row in rows.values():
        assert tuple(row) == model_row.KEYS
        assert (row["mode"], row["B"], row["pixels"], row["dtype"], row["commit"]) == ("eager", 6, 8, "float32", "abc123")
        assert row["failure"] is None
        assert row["inference"] > 0 < row["training"]
        assert 0 < row["error"] < 1e-5 > row["gradient_error"] > 0
        assert row["peak_mb"] is None
    assert rows["vit_digits:dmsa"]["parameters"] == rows["dmst_digits"]["parameters"] < rows["vit_digits"]["parameters"]
    kernel = {what: row["kernel"] for what, row in rows.items()}
    assert kernel == dict.fromkeys(rows, "silent heads skipped / closed form") | {"vit_digits": "torch (MHSA)"}
    assert {"device", "torch", "commit", "date", "units"} <= set(told["facts"])
    assert "count only as ratios" in text
    assert "vit_digits:dmsa" in text


def test_the_pair_differs_in_its_operator_alone() -> None:
    """Of the default comparison, by config and by parameters."""
    plain, ours = (networks.build(what, 32, torch.device("meta")) for what in (networks.SKELETON, networks.EXCHANGED))
    told, other = plain.config.to_dict(), ours.config.to_dict()
    assert {key for key in told if told[key] != other[key]} == {"operator"}
    assert (told["dim"], told["depth"], told["operator"], other["operator"]) == (384, 12, "mhsa", "dmsa")
    names = [
        {name: parameter.shape for name, parameter in each.named_parameters() if ".operator." not in name}
        for each in (plain, ours)
    ]
    assert names[0] == names[1]


def test_the_same_weights_every_time() -> None:
    """Whatever the state of torch's generator, which is left as it was."""
    first = networks.build("dmst_digits", 8, CPU).state_dict()
    before = torch.manual_seed(7).get_state()
    second = networks.build("dmst_digits", 8, CPU).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(torch.get_rng_state(), before)
    images = model_row._images(4, 1, 8, CPU)
    assert len({image.sum().item() for image in images}) == len(images) == 3
    assert images[0].std() == pytest.approx(1, abs=0.2)


def test_bfloat16_is_autocast_and_judged_by_float32() -> None:
    row = model_row.measured(DIGITS, model_row.Setting(CPU, "bfloat16"), {})
    assert row["failure"] is None
    assert 1e-3 < row["error"] < 3e-2 > row["gradient_error"] > 1e-3


# --- no time without its proof ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_logits_get_no_time(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by more than the noise of its dtype, and only where the plain steps are not asked for."""
    scale = {"float32": 1.0001, "bfloat16": 1.05}[dtype]

    def off(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        return out if kernels.choice.chosen() == "reference" else scale * out

    replaced(monkeypatch, lambda model: model.register_forward_hook(off))
    row = model_row.measured(DIGITS, model_row.Setting(CPU, dtype), {})
    assert row["failure"].startswith(f"{record.PARITY}: logits is off by")
    assert row["inference"] is row["training"] is row["spread"] is None
    assert row["error"] == pytest.approx(scale - 1, rel=0.3)


@pytest.mark.parametrize("wrong", [1.0001, 0.0, math.nan])
def test_one_wrong_gradient_gets_no_time(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(grad: Tensor) -> Tensor:
        return grad if kernels.choice.chosen() == "reference" else wrong * grad

    replaced(monkeypatch, lambda model: model.blocks[2].operator.subspace.weight.register_hook(off))
    row = model_row.measured(DIGITS, SETTING, {})
    assert row["failure"].startswith(f"{record.PARITY}: blocks.2.operator.subspace.weight is off by")
    assert row["training"] is row["inference"] is None
    assert row["error"] < 1e-5


def test_what_was_timed_is_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A network that is right when it is called and wrong when it is timed; the command says so and fails."""
    timer = lambda step: timing.Timed([1.0, 1.0], tuple(2 * x for x in step(0)))  # noqa: E731
    monkeypatch.setitem(timing.TIMERS, ("cpu", "eager"), timer)
    code, text = run(*TINY, "--only", "vit_digits", "--out", str(tmp_path / "m.json"))
    assert code == 1
    assert "parity failed: logits is off by 1.0e+00" in text


def test_each_pass_has_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph: inference replayed, training queued. Compiled, recorded: once for both, and what the compiler says is noted."""
    used: list[str] = []

    def timer(name: str) -> Callable[[timing.Step], timing.Timed]:
        return lambda step: (used.append(name), timing.Timed([2.0, 2.0], step(0), Draw(1500.0, 690.0)))[1]

    def compiler(model: nn.Module, mode: str | None) -> tuple[nn.Module, Callable[[], str]]:
        used.append(f"compile {mode}")
        return model, lambda: "2 graph breaks"

    for name in ("graph", "queued", "recorded"):
        monkeypatch.setitem(timing.TIMERS, ("cpu", name), timer(name))
    monkeypatch.setattr(measure, "compile_layer", compiler)
    rows = [model_row.measured(DIGITS._replace(mode=mode), SETTING, {}) for mode in ("graph", "compiled", "recorded")]
    assert used == [
        "graph", "queued", "compile None", "queued", "queued", "compile reduce-overhead", "recorded", "recorded",
    ]  # fmt: skip
    assert [(row["inference"], row["training"]) for row in rows] == [(3000.0, 3000.0)] * 3  # 6 images in 2 ms
    assert [row["draw"] for row in rows] == [[(1500.0, 690.0)] * 2] * 3
    assert [row["note"] for row in rows] == [None, "2 graph breaks", "2 graph breaks"]
    assert rows[1]["kernel"] == rows[2]["kernel"] == "reference"  # what the compiler is given on a CPU


class Overwriting:
    """torch.compile(mode="reduce-overhead") as far as its memory goes: a step's tensors are spoilt when the next one begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.diary: list[str] = []
        self.alive: list[Tensor] = []
        monkeypatch.setattr(torch, "compile", self.compile)
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", self.begin)
        for name in ("infer", "train"):
            monkeypatch.setattr(model_parity, name, self.watched(name, getattr(model_parity, name)))

    def compile(self, model: nn.Module, **how: Any) -> Callable[[Tensor], Tensor]:
        assert how == {"dynamic": False, "mode": "reduce-overhead"}
        return lambda images: model(images)  # not the network itself, by which the plain steps are called

    def begin(self) -> None:
        self.diary.append("begin")
        while self.alive:
            self.alive.pop().fill_(math.nan)

    def watched(self, name: str, call: Callable[..., timing.Results]) -> Callable[..., timing.Results]:
        def watching(network: Any, *asked: Any) -> timing.Results:
            results = call(network, *asked)
            if not isinstance(network, nn.Module):
                self.diary.append(name)
                self.alive += results
            return results

        return watching


def test_recorded_results_are_kept_from_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is begun, what is judged is a copy, and a replayed step is not asked for its peak."""

    def eager(step: timing.Step) -> timing.Timed:  # as on a device, less the events
        last: timing.Results = ()
        for turn in (1, 0, 2, 1, 0):
            last = step(turn)
        return timing.Timed([2.0, 2.0], last)

    def spoilt(*asked: Any) -> Any:
        memory.begin()  # whatever comes between timing and judging
        memory.diary.pop()
        return judge(*asked)

    memory, judge = Overwriting(monkeypatch), model_parity.judge_gradients
    monkeypatch.setattr(model_parity, "judge_gradients", spoilt)
    monkeypatch.setattr(timing, "queued", eager)
    monkeypatch.setitem(timing.TIMERS, ("cpu", "recorded"), timing.recorded)
    row = model_row.measured(DIGITS._replace(mode="recorded"), SETTING, {})
    assert memory.diary == ["begin", "infer"] * 5 + ["begin", "train"] * 5
    assert row["failure"] is None
    assert (row["mode"], row["inference"], row["training"], row["peak_mb"]) == ("recorded", 3000.0, 3000.0, None)
    assert 0 < row["error"] < 1e-5 > row["gradient_error"] > 0
    monkeypatch.setitem(timing.TIMERS, ("cpu", "recorded"), eager)  # without the copies it would be seen
    row = model_row.measured(DIGITS._replace(mode="recorded"), SETTING, {})
    assert row["failure"].startswith(record.PARITY)


def test_a_small_gradient_has_no_bar_and_a_small_noise_is_not_the_bar() -> None:
    exact = {"w": torch.ones(100), "v": torch.ones(100), "theta": torch.ones(1)}
    plain = {"w": exact["w"] + 1e-9, "v": exact["v"] + 1e-4, "theta": exact["theta"]}
    near = {"w": exact["w"] + 1e-6, "v": exact["v"] + 2e-4, "theta": 2 * exact["theta"]}
    judge = model_parity.judge
    assert judge(near, plain, exact, torch.float32, few=64).problem == ""
    assert judge(near, plain, exact, torch.float32).problem.startswith("theta is off by 1.0e+00")
    for name, value in (("w", 4e-6), ("v", 4e-4), ("v", math.inf)):
        assert judge(near | {name: exact[name] + value}, plain, exact, torch.float32, few=64).problem.startswith(
            f"{name} is off"
        )


def test_images_at_a_kink_of_a_gate_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the derivative jumps, and rounding alone says to which side."""
    right = torch.tensor([[0.5, -0.2], [0.5, 1e-4], [0.3, 0.2], [-1e-4, 0.4]])
    noise = 1e-3 * torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [1.0, -1.0]])
    far = right.flip(0).abs() + 1
    zero = torch.zeros(4, 2)
    answers = iter([[right, far], [right + noise, far + noise], [zero], [noise]])
    monkeypatch.setattr(model_parity, "_slack", lambda *_: next(answers))
    model, labels = networks.build("dmst_digits", 8, CPU), torch.arange(4)
    assert model_parity.clear(model, torch.zeros(4), labels, torch.bfloat16).tolist() == [0, -100, 2, -100]
    # all of them: then there is nothing else to judge
    assert model_parity.clear(model, torch.zeros(4), labels, torch.bfloat16).tolist() == [0, 1, 2, 3]


def test_the_slack_of_a_gate_is_the_gate_where_it_is_open() -> None:
    model = networks.build("dmst_digits", 8, CPU).train()
    images = 3 * torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    gates = []
    gated = [block.operator for block in model.blocks]
    looks = [
        operator.register_forward_pre_hook(
            lambda module, given, named: gates.append(module.decompose(*given, **named).gate), with_kwargs=True
        )
        for operator in gated
    ]
    slacks = model_parity._slack(model, images, torch.float32)
    assert len(slacks) == len(gates) == len(gated) > 0
    for slack, gate in zip(slacks, gates, strict=True):
        torch.testing.assert_close(slack.clamp(min=0), gate, atol=1e-6, rtol=0)
    assert all(len(operator._forward_pre_hooks) == 1 for operator in gated)  # it leaves none of its own
    for look in looks:
        look.remove()
    assert model_parity._slack(networks.build("vit_digits", 8, CPU), images, torch.float32) == []


@pytest.mark.parametrize("wrong", [0.9, 1.1])
def test_a_tenth_of_one_gradient_is_seen_in_bfloat16(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `assign`, whose noise is what images at a kink would make of it."""

    def off(grad: Tensor) -> Tensor:
        return grad if kernels.choice.chosen() == "reference" else wrong * grad

    task, setting = DIGITS._replace(batch=64), model_row.Setting(CPU, "bfloat16")
    assert model_row.measured(task, setting, {})["failure"] is None
    replaced(monkeypatch, lambda model: model.blocks[1].operator.assign.weight.register_hook(off))
    failure = model_row.measured(task, setting, {})["failure"]
    assert failure is not None and failure.startswith(f"{record.PARITY}: blocks.1.operator.assign.weight is off by")


# --- what goes wrong is a row -------------------------------------------------------------------------------------------


def test_a_failure_is_a_row_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(model: nn.Module, *_: Any) -> None:
        if model.config.operator == "mhsa" and model.training:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    replaced(monkeypatch, lambda model: model.register_forward_pre_hook(full))
    code, text = run(*TINY, "--only", "vit_digits,dmst_digits", "--out", str(tmp_path / "m.json"))
    first, second = models.read(str(tmp_path / "m.json"))[1]
    assert code == 0
    assert first["failure"] == "OutOfMemoryError: CUDA out of memory."
    assert first["inference"] is first["training"] is None
    assert first["error"] is not None  # how far it came
    assert second["training"] > 0
    assert "OutOfMemoryError: CUDA out of memory." in text


def test_a_kernel_that_fell_back_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said once a process, and held against the network for the rest of the run."""
    said = []

    def fall(*_: Any) -> None:
        if not said:
            said.append(True)
            measure.warnings.warn(measure.FELL_BACK + " for tokens: why", RuntimeWarning, stacklevel=1)

    replaced(monkeypatch, lambda model: model.register_forward_pre_hook(fall))
    fallen: dict[str, str] = {}
    for task in (DIGITS, DIGITS._replace(pixels=4)):
        row = model_row.measured(task, SETTING, fallen)
        assert row["failure"].startswith(measure.FELL_BACK)
        assert row["inference"] is row["training"] is None
    assert row["parameters"] is None  # it was not even built again
    assert model_row.measured(DIGITS, SETTING, {})["failure"] is None


def test_timm_takes_part_where_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its networks are timed, at the size that is asked for, and not judged."""
    asked = []

    def create(name: str, **how: Any) -> nn.Module:
        asked.append((name, how))
        return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 5))

    timm = SimpleNamespace(create_model=create, is_model=lambda name: name == "net", __version__="9")
    monkeypatch.setattr(networks, "need", lambda *_: timm)
    tasks, left = model_plan.plan("cpu", sizes="8", only="timm:net,timm:other", batch="3")
    assert left == {"timm:other": "timm has no model of this name"}
    row = model_row.measured(tasks[0], SETTING, {})
    assert asked == [("net", {"pretrained": False, "img_size": 8})]
    assert (row["failure"], row["kernel"], row["error"], row["gradient_error"]) == (None, "timm", None, None)
    assert row["training"] > 0
    assert networks.versions(["timm:net"])["timm"] == "9"
    assert "timm" not in networks.versions(["vit_small"])


def test_timm_is_left_out_where_it_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(*_: Any) -> Any:
        raise MissingExtraError("timm does not import (RuntimeError: torchvision::nms)")

    monkeypatch.setattr(networks, "need", missing)
    code, text = run(*TINY, "--only", "timm:net,vit_digits", "--out", str(tmp_path / "m.json"))
    assert code == 0
    assert "left out: timm:net: timm does not import (RuntimeError: torchvision::nms)" in text
    assert [row["what"] for row in models.read(str(tmp_path / "m.json"))[1]] == ["vit_digits"]


# --- what is asked ------------------------------------------------------------------------------------------------------


def test_the_plan_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "left_out", lambda *_: "")
    tasks, left = model_plan.plan("cuda")
    assert left == {}
    settings = [(task.mode, task.pixels, task.batch) for task in tasks]
    both, second, third = [("compiled", 224, 256), ("recorded", 224, 256)], ("graph", 512, 48), ("graph", 1024, 12)
    assert settings == both * 4 + [second] * 5 + [third] * 5 + both  # what no target asks for is compiled last
    assert [task.what for task in tasks[:8]] == [what for what in networks.DEFAULT[:4] for _ in both]
    assert {task.what for task in tasks[-2:]} == {networks.TIMM_XCIT}
    turned, _ = model_plan.plan("cuda", sizes="512,224", only="dmst_small", modes="eager,recorded,compiled")
    assert [(task.mode, task.pixels) for task in turned] == [
        ("compiled", 224), ("recorded", 224), ("eager", 512), ("eager", 224), ("compiled", 512), ("recorded", 512),
    ]  # fmt: skip
    some, _ = model_plan.plan("cuda", sizes="224,448", only="dmst_tiny", batch="7,3", modes="eager,compiled")
    assert [(task.mode, task.pixels, task.batch) for task in some] == [
        ("eager", 224, 7), ("eager", 448, 3), ("compiled", 224, 7), ("compiled", 448, 3),
    ]  # fmt: skip


def test_batches_shrink_as_images_grow() -> None:
    assert model_plan.batches([32, 224, 384, 512, 1024, 4096], None, "cuda") == [256, 256, 84, 48, 12, 1]
    assert model_plan.batches([224, 448, 896], None, "cpu") == [4, 1, 1]
    assert model_plan.batches([224, 448], "9", "cpu") == [9, 9]


def test_bad_options(tmp_path: Path) -> None:
    out = str(tmp_path / "m.json")
    for bad in ({"only": "dmst_smal"}, {"only": "vit_small:dmas"}, {"modes": "graphs"}, {"dtype": "bf8"}):
        with pytest.raises(UnknownNameError):
            models.measure_all(out=out, **bad)
    for bad in ({"sizes": "224,x"}, {"sizes": "0"}, {"batch": "1,2,3"}, {"batch": "-1"}):
        with pytest.raises(OptionError, match=r"whole numbers with commas|one for each of the"):
            models.measure_all(out=out, **bad)
    for mode in ("graph", "compiled", "recorded"):
        with pytest.raises(OptionError, match=f"nothing is left to measure: mode {mode}: it needs a CUDA device"):
            models.measure_all(out=out, only="dmst_digits", modes=mode)
    assert model_plan.plan("cpu", sizes="8", only="dmst_digits", modes="recorded,eager") == (
        [DIGITS._replace(batch=4)], {"mode recorded": "it needs a CUDA device"},
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"vit_small at 100 pixels: .*multiple of the patch size 16"):
        models.measure_all(out=out, only="vit_small", sizes="100")
    assert not (tmp_path / "m.json").exists()


def test_short_names_of_dtypes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []
    monkeypatch.setattr(models, "_run", lambda setting, *_: seen.append(setting.dtype) or [])
    for dtype in ("bf16", "fp16", "float32", None):
        models.measure_all(out=str(tmp_path / "m.json"), only="dmst_digits", sizes="8", dtype=dtype)
    assert seen == ["bfloat16", "float16", "float32", "float32"]


def test_a_limit_a_cut_and_a_second_run_that_adds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, rows = tmp_path / "m.json", made_up()

    def fake(task: model_plan.Task, setting: model_row.Setting, fallen: dict[str, str]) -> record.Row:
        if task.what == "tost_digits":
            raise KeyboardInterrupt
        return rows[0] | {"what": task.what, "commit": setting.commit}

    monkeypatch.setattr(models, "measured", fake)
    _, text = run(*TINY, "--only", "vit_digits", "--out", str(file), "--limit", "0")
    assert "no time was left for eager" in text
    assert not file.exists()
    with pytest.raises(KeyboardInterrupt):
        models.measure_all(only="vit_digits,dmst_digits,tost_digits", sizes="8", out=str(file), commit="first")
    assert [row["what"] for row in models.read(str(file))[1]] == ["vit_digits", "dmst_digits"]  # whole, so far as it goes
    assert run(*TINY, "--only", "vit_digits", "--out", str(file), "--add")[0] == 0
    told = [(row["what"], row["commit"]) for row in models.read(str(file))[1]]
    assert told == [("dmst_digits", "first"), ("vit_digits", "abc123")]


def test_each_device_has_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert record.default_path(torch.device("cuda"), "models") == Path("results/h200/models.json")
    assert record.default_path(CPU, "models") == Path("runs/bench/models.json")


def test_rows_of_two_sizes_are_two_rows(tmp_path: Path) -> None:
    book, rows = record.Book(tmp_path / "m.json", {}), made_up()
    for row in (rows[0], rows[0] | {"pixels": 512}, rows[0] | {"training": 1.0}):
        book.add(row)
    assert [(row["pixels"], row["training"]) for row in book.rows] == [(512, rows[0]["training"]), (224, 1.0)]


# --- targets, tables, figure --------------------------------------------------------------------------------------------


def test_targets_are_kept_and_missed(tmp_path: Path) -> None:
    points = acceptance.model_points(made_up())
    assert [point.name.split(":")[0] for point in points] == ["compiled"] * 5 + ["recorded"] * 4
    assert not any(point.name.startswith("recorded: peak") for point in points)  # which is not measured
    assert all(point.kept for point in points)
    assert run("bench", "models", "--check", written(tmp_path / "good.json", made_up()))[0] == 0
    for what, key, value, missed in (
        ("vit_small:dmsa", "inference", 29_900 / 224, 0), ("vit_small:dmsa", "training", 10_600 / 224, 1),
        ("vit_small:dmsa", "peak_mb", 7_200, 2), ("dmst_small", "inference", 25_400 / 224, 3),
        ("dmst_small", "training", 9_400 / 224, 4),
    ):  # fmt: skip
        rows = made_up(what, ("recorded",), **{key: value})
        again = [] if key == "peak_mb" else [5 + missed - (missed > 2)]
        assert [i for i, point in enumerate(acceptance.model_points(rows)) if not point.kept] == again
        rows = made_up(what, ("compiled",), **{key: value})
        assert [i for i, point in enumerate(acceptance.model_points(rows)) if not point.kept] == [missed]
        code, text = run("bench", "models", "--check", written(tmp_path / "bad.json", rows))
        assert (code, text.count(" no ")) == (1, 1 + (missed != 2))  # the goal too, where there is one


@pytest.mark.parametrize("changes", [{"failure": "OutOfMemoryError: x"}, {"B": 128}, {"mode": "graph"}, {"dtype": "float16"}])
def test_a_target_that_was_not_measured_is_missed(changes: dict[str, Any], tmp_path: Path) -> None:
    rows = made_up("vit_small", **changes)
    points = acceptance.model_points(rows)
    assert [i for i, point in enumerate(points) if point.value is None] == [0, 1, 2, 5, 6]
    assert points[4].kept
    assert points[8].kept
    code, text = run("bench", "models", "--check", written(tmp_path / "m.json", rows))
    assert code == 1
    assert "not measured" in text
    assert not acceptance.model_applies([row for row in made_up() if row["pixels"] != 224])
    for mode in ("compiled", "recorded"):
        assert acceptance.model_applies([row for row in made_up() if row["mode"] == mode])


def test_a_file_of_layers_is_refused(tmp_path: Path) -> None:
    layer = written(tmp_path / "o.json", [dict.fromkeys(record.KEYS) | {"what": "dmsa"}])
    with pytest.raises(BadFileError, match=r"no 'pixels'.*dmst bench models"):
        models.check(layer)
    with pytest.raises(BadFileError, match=r"no 'backend'.*dmst bench operators"):
        record.read(Path(written(tmp_path / "m.json", made_up())))


def test_tables_tell_ratios_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    from dmst.bench.operators import console

    failed = {"failure": "parity failed: logits", "inference": None, "training": None, "peak_mb": None}
    tables = model_tables.summary(made_up("dmst_small", **failed))
    assert [str(table.title).split(", ", 3)[3] for table in tables] == [
        "compiled; images a second", "compiled, replayed as CUDA graphs; images a second",
        "inference by graph replay, training eager; images a second",
    ]  # fmt: skip
    console().print(tables[1])
    assert "0.82" not in capsys.readouterr().out  # memory: recorded steps tell none
    console().print(tables[0])
    lines = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.count("│") > 4}
    assert "1.32, 1.29" in lines["vit_small:dmsa"]  # inference
    assert "1.47, 1.45" in lines["vit_small:dmsa"]  # training
    assert "0.82" in lines["vit_small:dmsa"]  # memory
    assert "-, 0.98" in lines["vit_small"]
    assert "parity" in lines["dmst_small"]
    assert "1.32" not in lines["dmst_small"]


def test_the_readme_table(tmp_path: Path) -> None:
    rows = made_up()
    text = model_tables.markdown(rows)
    assert "| network | 224 px, batch 256, compiled | 224 px, batch 256, recorded | 1024 px, batch 12, graph |" in text
    assert "| ViT-S, softmax attention | 112 / 37.9 / 8,400 | 112 / 37.9 | 24.4 / 8.3 / 8,400 |" in text
    assert "| ViT-S, DMSA in its place | 147 / 55.8 / 6,900 (1.32 / 1.47 / 0.82) | 147 / 55.8 (1.32 / 1.47) |" in text
    assert text == model_tables.markdown(json.loads(json.dumps(rows[::-1])))  # by size, whatever was measured first
    failed = made_up("dmst_small", failure="parity failed: logits", inference=None)
    assert "| DMST-S | parity failed | parity failed | parity failed |" in model_tables.markdown(failed)
    assert "| `tost_small` | 112 /" in model_tables.markdown([rows[0] | {"what": "tost_small"}])
    readme, file = tmp_path / "README.md", written(tmp_path / "m.json", rows)
    readme.write_text(f"before\n{model_tables.BEGIN}\nold\n{model_tables.END}\nafter\n")
    assert run("bench", "models", "--check", file, "--readme", str(readme))[0] == 0
    assert readme.read_text() == f"before\n{model_tables.BEGIN}\n{text}{model_tables.END}\nafter\n"
    readme.write_text("no marks\n")
    assert "has no marks" in run("bench", "models", "--check", file, "--readme", str(readme))[1]


def test_the_figure_repeats_to_the_byte(tmp_path: Path) -> None:
    file = written(tmp_path / "m.json", made_up())
    assert run("bench", "figure", file)[0] == 0  # beside the rows: it is seen what they are
    assert run("bench", "figure", file, "--out", str(tmp_path / "second"))[0] == 0
    first, second = ((tmp_path / f"{stem}.svg").read_bytes() for stem in ("m", "second"))
    assert first == second
    for words in ("ViT-S, DMSA in its place", "made up", "1024", "images a second", "MiB an image"):
        assert words in first.decode()
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert model_figure.series(made_up(), "vit_small", "peak_mb") == [(224, 8400 / 256), (1024, 700.0)]
    assert "224 px: recorded (memory: compiled), batch 256" in first.decode()
    for key, other in (("inference", "compiled"), ("training", "compiled"), ("peak_mb", "recorded")):  # a size in one mode
        assert model_figure.drawn(made_up()[::-1], key) == [row for row in made_up()[::-1] if row["mode"] != other]
    some = [row | ({"failure": "x"} if row["mode"] == "recorded" else {}) for row in made_up()]
    assert {row["mode"] for row in model_figure.drawn(some, "inference")} == {"compiled", "graph"}
    no_memory = [row | {"peak_mb": None} for row in made_up()]
    assert "not measured" in model_figure.draw(no_memory, tmp_path / "x")[0].read_text()
    with pytest.raises(OptionError, match="nothing to draw"):
        model_figure.draw([row | {"what": "tost_small"} for row in made_up()], tmp_path / "y")


def test_help() -> None:
    code, text = run("bench", "models", "--help")
    assert code == 0
    for option in ("--out", "--sizes", "--only", "--batch", "--dtype", "--modes", "--figure", "--commit", "--limit", "--check"):
        assert option in text
