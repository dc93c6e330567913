"""The ledger and its tables: what was run is found again, gaps are shown, the same ledger gives the same bytes."""

from __future__ import annotations

import copy
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from dmst import cli
from dmst.atomic import sealed
from dmst.engine import prepare, several
from dmst.engine.console import Quiet, in_words, remaining
from dmst.engine.distributed import Group
from dmst.engine.recipe import read_recipe
from dmst.errors import BadFileError, DmstError, OptionError
from dmst.models import VisionModel, load_model
from dmst.operators.orthonormal import OrthonormalLinear
from dmst.reproduce import figure, ledger, pack, render, run
from dmst.reproduce.tables import TABLES, Cell, Table, operator
from tests.runs import SMALL, TWELVE

CELLS = (
    Cell("DMSA", operator("dmsa"), 50.0, seeds=3),
    Cell("TSSA", operator("tssa"), seeds=3, published=60.0),
    Cell("MHSA", operator("mhsa"), seeds=3),
)
TINY = Table(
    "Three layers on digits",
    "digits",
    CELLS,
    "TSSA",
    changes=(*SMALL, *TWELVE, "optim.opt=adamw"),
    pairs=(("DMSA", "TSSA"), ("DMSA", "MHSA")),
    layers=("zero_gates", "never"),
    marks=("DMSA", "TSSA"),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "tiny", TINY)


def line(cell: str, seed: int, top1: float, **more: Any) -> dict[str, Any]:
    recipe = TINY.recipe_of(next(each for each in TINY.cells if each.name == cell), seed)
    told: dict[str, Any] = dict.fromkeys(ledger.KEYS, "x") | {"cell": cell, "seed": seed, "config": ledger.config_of(recipe)}
    told |= {"seconds": 6.0, "parameters": 1234, "commit": "abcdefghij", "versions": {"torch": "2"}}
    told |= {"data": {"name": "digits", "variant": ""}, "metrics": {"top1": top1, "train_loss": 1.5}}
    return told | more


def test_every_cell_is_a_network_and_no_two_of_a_table_are_the_same() -> None:
    networks = {}
    for name, table in TABLES.items():
        configs = [ledger.config_of(table.recipe_of(cell, 3)) for cell in table.cells]
        assert len(set(configs)) == len(configs), name
        assert {cell.against or table.against for cell in table.cells} <= {cell.name for cell in table.cells}
        found = [table.recipe_of(cell, 0).model_config(num_classes=10) for cell in table.cells]
        networks |= {repr(config): config for config in found}
    for config in networks.values():
        VisionModel(config, device="meta")
    shared = {ledger.config_of(TABLES[name].recipe_of(cell, 0)) for name in ("gain", "gates") for cell in TABLES[name].cells}
    dmsa = ledger.config_of(TABLES["sparsity-cifar10"].recipe_of(TABLES["sparsity-cifar10"].cells[2], 0))
    assert dmsa in shared and len(shared) == len(TABLES["gain"].cells) + len(TABLES["gates"].cells) - 1


def test_scaled_gates_start_where_sparsemax_does() -> None:
    """A quarter, whatever the images: the table says so."""
    images = F.interpolate(torch.randn(16, 3, 4, 4), size=32, mode="bicubic")
    table = TABLES["gates"]
    for name, printed in (("sigmoid", 0.5), ("relu", 0.078), ("gelu", 0.081), ("sparsemax", 0.25)):
        for cell in table.cells:
            scale = {"as printed": 1.0, "gate x 32": 32.0}.get(cell.name.removeprefix(f"{name}, "), 0.25 / printed)
            if cell.name.startswith(name) and scale != 32:
                models = [prepare.build_model(table.recipe_of(cell, seed), "0123456789", 3).eval() for seed in range(3)]
                with torch.no_grad():
                    gates = [layer.parts.gate.abs().mean() for model in models for layer in model.trace(images).layers]
                assert sum(gates).item() / len(gates) == pytest.approx(printed * scale, rel=0.15), cell.name


def test_a_config_is_a_recipe_without_its_seed() -> None:
    cell = TINY.cells[0]
    assert ledger.config_of(TINY.recipe_of(cell, 0)) == ledger.config_of(TINY.recipe_of(cell, 7))
    assert ledger.config_of(TINY.recipe_of(cell, 0)) != ledger.config_of(TINY.recipe_of(TINY.cells[1], 0))


def test_a_ledger_is_appended_to_and_a_cut_line_costs_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "ledger/tiny.jsonl"
    ledger.add(file, line("DMSA", 0, 0.5))
    file.write_text(file.read_text() + '{"table": "ti')
    assert [each["seed"] for each in ledger.read(tmp_path / "ledger")] == [0]
    ledger.add(file, line("DMSA", 1, 0.6))
    assert [each["seed"] for each in ledger.read(tmp_path / "ledger")] == [0, 1]
    file.write_text(file.read_text().removesuffix("\n"))  # a whole run, its end of line lost
    ledger.add(file, line("DMSA", 2, 0.6))
    assert [each["seed"] for each in ledger.read(tmp_path / "ledger")] == [0, 1, 2]
    file.write_text(file.read_text().replace('"seed": 1', '"seed": '))
    with pytest.raises(BadFileError, match=r"tiny\.jsonl, line 2 is damaged"):
        ledger.read(tmp_path / "ledger")
    file.write_text(json.dumps({"table": "x"}) + "\n")
    with pytest.raises(BadFileError, match="line 1 is no run: it lacks cell, seed"):
        ledger.read(tmp_path / "ledger")
    with pytest.raises(BadFileError, match="lacks metrics"):
        ledger.add(file, {key: 0 for key in ledger.KEYS if key != "metrics"})


def test_a_claim_is_of_one_process(tmp_path: Path) -> None:
    with ledger.claimed(tmp_path, "abc") as mine, ledger.claimed(tmp_path, "abc") as other:
        assert mine and not other
    assert not list(tmp_path.iterdir())


def test_a_claim_on_a_file_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finishes removes the file between another's open and lock."""
    lock, path = fcntl.flock, tmp_path / ".abc.lock"

    def late(file: Any, how: int) -> None:
        path.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with ledger.claimed(tmp_path, "abc") as mine:
        assert not mine


def test_a_table_shows_means_intervals_and_gaps(tiny: None) -> None:
    lines = [line("TSSA", seed, top1) for seed, top1 in enumerate((0.80, 0.82, 0.81))]
    lines += [line("DMSA", seed, top1) for seed, top1 in enumerate((0.83, 0.84, 0.85))]
    lines += [line("DMSA", 0, 0.99), line("DMSA", 9, 0.99)]  # a second run of a seed, and a seed of no table
    shown = render.markdown("tiny", lines)
    assert "| DMSA | 50.00 | - | 84.00 ± 1.00 | 3 | +3.00 (+0.52 to +5.48, n = 3) | 1.5000 | 1,234 |" in shown
    assert "| TSSA | - | 60.00 | 81.00 ± 1.00 | 3 |  | 1.5000 | 1,234 |" in shown
    assert "| MHSA | - | - | not run | 0 of 3 | | | |" in shown
    assert "- digits; x, torch 2, commit abcdefg, x." in shown and "6 runs, 0.6 minutes of wall time" in shown
    assert "| DMSA | TSSA | +3.00 (+0.52 to +5.48, n = 3) |\n| DMSA | MHSA | not run |" in shown
    assert render.markdown("tiny", lines) == shown
    assert render.markdown("tiny", [*lines, line("MHSA", 0, 0.7)]) != shown


def test_a_table_shows_what_the_layers_did(tiny: None) -> None:
    def layered(seed: int, gates: list[float], never: list[list[int]]) -> dict[str, Any]:
        layers = {"images": 256, "zero_gates": gates, "never": never}
        return line("DMSA", seed, 0.5, metrics={"top1": 0.5, "train_loss": 1.0, "layers": layers})

    shown = render.markdown(
        "tiny", [layered(0, [0.25, 0.5], [[3], []]), layered(1, [0.75, 0.5], [[], []]), line("TSSA", 0, 0.5)]
    )
    assert "## Gates that are exactly 0, %, by layer\n\n| | 0 | 1 |\n|---|---|---|\n| DMSA | 50.0 | 50.0 |\n\n## Heads" in shown
    unknown = render.markdown("tiny", [layered(0, [None, 0.5], [[3], []])])  # type: ignore[list-item]
    assert "| DMSA | - | 50.0 |" in unknown
    assert "| DMSA | 0.5 | 0.0 |" in shown and "the first 256 of the images" in shown


def test_the_picture_shows_every_run(tiny: None) -> None:
    lines = [line("TSSA", 0, 0.80), line("TSSA", 1, 0.84), line("DMSA", 0, 0.9)]
    drawn = figure.svg("tiny", lines)
    assert drawn.count("<circle") == 3 and drawn.count('class="mean"') == 2 and drawn.index(">DMSA<") < drawn.rindex(">TSSA<")
    assert "MHSA" not in drawn and figure.svg("tiny", lines[:2]) != drawn
    assert "<circle" not in figure.svg("tiny", [])


def test_a_pack_carries_ledger_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MOST", 700)
    here, weights, there = tmp_path / "ledger", tmp_path / "weights", tmp_path / "there"
    for seed in range(3):
        ledger.add(here / "tiny.jsonl", line("DMSA", seed, 0.5))
    mine = ledger.config_of(TINY.recipe_of(TINY.cells[0], 0))
    for name in ("0123456789abcdef-0", "0123456789abcdef-1", f"{mine}-1"):
        (weights / name).mkdir(parents=True)
        (weights / name / "config.json").write_text(name)
        (weights / name / "model.safetensors").write_bytes(bytes(range(256)) * 5)
    parts = pack.pack(here, weights, tmp_path / "pack")
    sizes = [path.stat().st_size for path in sorted(parts.glob("part-*"))]
    assert len(sizes) > 4 and max(sizes) <= 700
    ledger.add(there / "ledger/tiny.jsonl", line("DMSA", 1, 0.9))  # a run that is here already stays what it is
    assert pack.unpack(parts, there / "ledger", there / "weights") == (2, 2)
    assert [(each["seed"], each["metrics"]["top1"]) for each in ledger.read(there / "ledger")] == [(1, 0.9), (0, 0.5), (2, 0.5)]
    assert not list((there / "weights").glob(f"{mine}-1"))  # weights of a run that is here as another one
    for path in weights.glob("0*/*"):
        assert (there / "weights" / path.relative_to(weights)).read_bytes() == path.read_bytes()
    assert pack.unpack(parts, there / "ledger", there / "weights") == (0, 0)
    with pytest.raises(OptionError, match="weights of 3 runs: say where they go"):
        pack.unpack(parts, tmp_path / "new", None)
    with pytest.raises(OptionError, match="exists"):
        pack.pack(here, None, parts)
    with pytest.raises(OptionError, match="holds no weights"):
        pack.pack(here, tmp_path / "typo", tmp_path / "second")
    (weights / "notes").mkdir()
    (weights / "notes/x").write_text("x")
    with pytest.raises(OptionError, match="neither a ledger nor weights"):
        pack.pack(here, weights, tmp_path / "second")
    with pytest.raises(OptionError, match="nothing to pack"):
        pack.pack(tmp_path / "empty", None, tmp_path / "second")
    assert not (tmp_path / "new").exists() and not (tmp_path / "second").exists()


@pytest.mark.parametrize("harm", ["missing", "flipped", "cut", "index", "name", "short"])
def test_a_damaged_pack_writes_nothing(tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MOST", 700)
    ledger.add(tmp_path / "ledger/tiny.jsonl", line("DMSA", 0, 0.5))
    parts = pack.pack(tmp_path / "ledger", None, tmp_path / "pack")
    first, index = parts / "part-001", parts / "index.json"
    told = {key: value for key, value in json.loads(index.read_text()).items() if key != "self_sha256"}
    if harm == "missing":
        first.unlink()
    elif harm == "flipped":
        raw = bytearray(first.read_bytes())
        raw[-3] ^= 4
        first.write_bytes(raw)
    elif harm == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif harm == "index":
        index.write_text(index.read_text().replace("tiny", "tinx"))
    elif harm == "name":
        told["files"][0]["name"] = "ledger/../x.jsonl"
        index.write_bytes(sealed(told))
    else:
        told["files"][0]["size"] -= 1
        index.write_bytes(sealed(told))
    words = {"missing": "cannot be read", "flipped": "001 is damaged", "cut": "001 is damaged", "index": "self_sha256",
             "name": "names what no pack holds", "short": "does not fit"}[harm]  # fmt: skip
    with pytest.raises(BadFileError, match=words):
        pack.unpack(parts, tmp_path / "there", None)
    assert not (tmp_path / "there").exists()


def test_a_cell_is_compiled_once_for_all_its_seeds(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backend that compiles nothing: the check before training, five seeds, and the one after other cells."""
    seen: list[int] = []
    plain = torch.compile

    def counted(graph: Any, _: Any) -> Any:
        seen.append(1)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda net, **options: plain(net, **(options | {"backend": counted})))
    monkeypatch.setattr(prepare.Sets, "channels", 3)  # of one channel all layouts are the same
    sets, group = sets_and_group()
    for cell in (TINY.cells[0], TINY.cells[1]):
        changes = [*TINY.changes, *cell.changes, "run.compile=true", "run.channels_last=true"]
        recipes = [read_recipe("digits", [*changes, f"run.seed={seed}"]) for seed in range(3)]
        seen.clear()
        run.train_several(recipes, sets, group)
        assert len(seen) == 2, cell  # the network, and the making of batches


def test_a_compiled_network_with_stochastic_depth_is_checked_too(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and plain must leave out the same samples' steps, or half of them being left out looks like a wrong gradient."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net, **options: plain(net, **(options | {"backend": "aot_eager"})))
    sets, group = sets_and_group()
    changes = [
        *TINY.changes,
        "run.compile=true",
        "model.options.drop_path_rate=0.5",
        "model.options.layer_scale=1.0",
        "model.options.depth=3",
    ]
    run.check_compiled(several.start(read_recipe("digits", changes), sets, group))


class Said(Quiet):
    """What is said, without which runs begin; and that every step is told of."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def say(self, text: str) -> None:
        if not text.endswith(" at once"):
            self.lines.append(text)

    def begin(self, done: int, steps: int) -> None:
        self.done = done

    def step(self, done: int, steps: int, values: dict[str, Any]) -> None:
        assert done == self.done + 1 and in_words(values) and remaining(done, steps, values)
        self.done, self.steps = done, steps

    def end(self) -> None:
        self.ended = True


def test_only_what_is_missing_is_run(tiny: None, tmp_path: Path) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"data_dir": None, "device": "cpu", "commit": "abc", "watch": Said(said)}
    ledger.add(tmp_path / "other.jsonl", line("TSSA", 1, 0.5))
    config = ledger.config_of(TINY.recipe_of(TINY.cells[1], 0))
    with ledger.claimed(tmp_path, f"{config}-0") as mine, ledger.claimed(tmp_path, f"{config}-2") as too:
        assert mine and too
        run.run_table("tiny", tmp_path, **options, at_once=2)  # DMSA and MHSA: somebody is at TSSA
    assert len(said) == 7 and said.pop(3) == "tiny: TSSA: another process is at it" and not any("TSSA" in each for each in said)
    assert [(cell.name, seeds) for cell, seeds in run.missing(TINY, ledger.read(tmp_path))] == [("TSSA", [0, 2])]
    run.run_table("tiny", tmp_path, **options, at_once=3, weights=tmp_path / "weights")
    saved = sorted((tmp_path / "weights").iterdir())
    assert [load_model(each).config.operator for each in saved] == ["tssa"] * 2 and saved[1].name.endswith("-2")
    assert len(said) == 8 and said[-1].startswith("tiny: TSSA, seed 2: ")
    run.run_table("tiny", tmp_path, **options, at_once=3)
    assert len(said) == 8 and not list(tmp_path.glob(".*.lock"))
    found = {(each["cell"], each["seed"]): each for each in ledger.read(tmp_path)}
    alone, _ = run.train_several([TINY.recipe_of(TINY.cells[0], 2)], *sets_and_group())[0]
    assert found["DMSA", 2]["metrics"] == alone["metrics"]  # whether alone or beside others
    assert found["DMSA", 2]["changes"][-1] == "run.seed=2" and found["DMSA", 2]["data"]["images"] == [96, 359]
    layers = found["DMSA", 0]["metrics"]["layers"]
    assert len(layers["zero_gates"]) == 1 and layers["zero_memberships"] == [0.0]
    assert "zero_gates" not in found["MHSA", 0]["metrics"]["layers"]


def test_a_cell_may_have_a_recipe_of_its_own_and_ends_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line names that recipe, and its weights are the running mean where the recipe keeps one."""
    mean = ("optim.model_ema=0.9", "run.final=ema")
    cells = [
        Cell("last", operator("dmsa"), seeds=1, recipe="digits"),
        Cell("mean", (*operator("dmsa"), *mean), seeds=1, recipe="digits"),
    ]
    table = Table("Of another recipe", "cifar10", tuple(cells), "last", changes=TINY.changes)
    monkeypatch.setitem(TABLES, "own", table)
    options: dict[str, Any] = {"data_dir": None, "device": "cpu", "commit": "abc"}
    run.run_table("own", tmp_path, **options, at_once=1, weights=tmp_path / "weights")
    lines = ledger.read(tmp_path)
    assert [each["recipe"] for each in lines] == ["digits", "digits"]
    last, averaged = (load_model(tmp_path / "weights" / f"{each['config']}-0") for each in lines)
    assert lines[0]["metrics"]["train_loss"] == lines[1]["metrics"]["train_loss"]  # the same steps
    assert (
        not torch.equal(last.head.weight, averaged.head.weight) and lines[0]["metrics"]["loss"] != lines[1]["metrics"]["loss"]
    )


def test_a_cell_may_start_from_the_weights_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same seed; without them it says what to run first, and its line names the cell, no folder."""
    first = Table("First", "digits", (Cell("long", operator("dmsa"), seeds=2),), "", changes=TINY.changes)
    later = Table("Later", "digits", (Cell("from it", operator("dmsa"), seeds=2, start="long"),), "", changes=TINY.changes)
    monkeypatch.setitem(TABLES, "best", first)
    monkeypatch.setitem(TABLES, "later", later)
    options: dict[str, Any] = {"data_dir": None, "device": "cpu", "commit": "abc", "at_once": 2}
    for weights in (None, tmp_path / "weights"):
        with pytest.raises(DmstError, match="it starts from long of the table best: run that first, with the same --weights"):
            run.run_table("later", tmp_path, **options, weights=weights)
    run.run_table("best", tmp_path, **options, weights=tmp_path / "weights")
    seen: list[VisionModel] = []
    build = prepare.build_model
    monkeypatch.setattr(prepare, "build_model", lambda *given: seen.append(copy.deepcopy(model := build(*given))) or model)
    run.run_table("later", tmp_path, **options, weights=tmp_path / "weights")
    for seed, begun in enumerate(seen):
        saved = load_model(run.weights_of(first.recipe_of(first.cells[0], seed), tmp_path / "weights"))
        assert torch.equal(begun.head.weight, saved.head.weight)
    begun_from, *_, told = ledger.read(tmp_path)
    assert told["changes"][-2] == f'model.init_from="the weights of long, {begun_from["config"]}"'  # others: another run
    assert told["config"] != begun_from["config"]


def test_the_bar_goes_also_where_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a step")

    monkeypatch.setattr(run.several, "step", fails)
    watch = Said([])
    with pytest.raises(RuntimeError, match="a step"):
        run.train_several([TINY.recipe_of(TINY.cells[0], 0)], *sets_and_group(), watch=watch)
    assert watch.ended


def test_models_that_leave_the_engine_retract_by_themselves_again() -> None:
    """`kept` is a promise of the engine: who trains on without it gets Gram-Schmidt in the graph."""
    recipe = read_recipe("digits", [*TINY.changes, "model.options.mode=proximal", "optim.model_ema=0.9"])
    ((_, model),) = run.train_several([recipe], *sets_and_group())
    layers = [module for module in model.modules() if isinstance(module, OrthonormalLinear)]
    assert layers and not any(layer.kept for layer in layers)


def test_several_processes_share_the_seeds_of_a_cell(tiny: None, tmp_path: Path) -> None:
    """Somebody is at seed 1; the others are run one at a time, and no other cell."""
    said: list[str] = []
    options: dict[str, Any] = {"data_dir": None, "device": "cpu", "commit": "abc", "at_once": 1, "cells": ["TSSA"]}
    with ledger.claimed(tmp_path, f"{ledger.config_of(TINY.recipe_of(TINY.cells[1], 0))}-1"):
        run.run_table("tiny", tmp_path, **options, watch=Said(said))
    assert [(each["cell"], each["seed"]) for each in ledger.read(tmp_path)] == [("TSSA", 0), ("TSSA", 2)]
    assert said[-1] == "tiny: TSSA: another process is at it" and not list(tmp_path.glob(".*.lock"))


def test_a_cell_that_fails_costs_the_others_nothing(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = run.train_several

    def some_fail(recipes: Any, *rest: Any, watch: Any) -> Any:
        operator = recipes[0].model.options["operator"]
        if operator != "tssa":
            raise DmstError("no") if operator == "dmsa" else RuntimeError("the compiler broke")
        return train(recipes, *rest, watch=watch)

    monkeypatch.setattr(run, "train_several", some_fail)
    said: list[str] = []
    with pytest.raises(DmstError, match=r"2 of 3 cells of tiny failed: DMSA: no \| MHSA: RuntimeError: the compiler"):
        run.run_table("tiny", tmp_path, data_dir=None, device="cpu", commit="abc", at_once=3, watch=Said(said))
    assert {each["cell"] for each in ledger.read(tmp_path)} == {"TSSA"} and "tiny: DMSA: no" in said
    command = ["reproduce", "tiny", "--device", "cpu", "--ledger", str(tmp_path), "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(cli.app, command)
    assert "cells of tiny failed" in str(told.exception) and "| TSSA | - | 60.00 |" in (tmp_path / "out/tiny.md").read_text()


def sets_and_group() -> tuple[Any, Any]:
    return prepare.open_sets(TINY.recipe_of(TINY.cells[0], 0), data_dir=None), Group(torch.device("cpu"))


def test_the_command(tiny: None, tmp_path: Path) -> None:
    ledger.add(tmp_path / "ledger/tiny.jsonl", line("DMSA", 0, 0.5))
    places = ["--ledger", str(tmp_path / "ledger"), "--out", str(tmp_path / "out")]
    asked = CliRunner().invoke(cli.app, ["reproduce", "--list", *places])
    assert "1 of 9" in asked.output and "gates" in asked.output
    done = CliRunner().invoke(cli.app, ["reproduce", "--all", "--render", *places])
    assert done.exit_code == 0 and "not run" in (tmp_path / "out/gates.md").read_text()
    assert (tmp_path / "out/tiny.md").read_text() == render.markdown("tiny", ledger.read(tmp_path / "ledger"))
    for words, message in ((["gate"], "gates"), ([], "no table was named")):
        failed = CliRunner().invoke(cli.app, ["reproduce", *words, *places])
        assert failed.exit_code != 0 and message in str(failed.exception)


def test_the_committed_tables_are_those_of_the_committed_ledger() -> None:
    results = Path(__file__).parents[1] / "results"
    lines = ledger.read(results / "ledger")
    for name, table in TABLES.items():
        assert (results / f"{name}.md").read_text() == render.markdown(name, lines), name
        if table.marks:
            assert (results / f"{name}.svg").read_text() == figure.svg(name, lines), name
    known = {ledger.config_of(table.recipe_of(cell, 0)) for table in TABLES.values() for cell in table.cells}
    assert {line["config"] for line in lines} <= known  # a changed recipe must not orphan what was run
