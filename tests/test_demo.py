"""The demo, small: it trains by the engine, goes on where it was cut short, and its page shows what was measured."""

from __future__ import annotations

import inspect
import json
import math
import os
import queue
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import dmst
from dmst import cli
from dmst.data import catalog
from dmst.demo import Results, _make_ready, run_demo, summary
from dmst.demo.page import _unseen
from dmst.demo.runs import Job, Run, _end, _hear, _next, told, train_all
from dmst.engine import journal
from dmst.engine.folder import RunFolder
from dmst.engine.recipe import differences, read_recipe
from dmst.engine.train_loop import train
from dmst.errors import DmstError, MissingExtraError, OptionError, SaveError, Stopped
from dmst.terminal import Terminal
from tests.test_report import check_page

MINE = Job("dmst_digits", 0)
RECIPE = MINE.recipe(1)
quiet = Terminal(quiet=True)


def test_the_split_is_fixed_and_whole() -> None:
    learnt, unseen = (catalog.open_set("digits", split) for split in ("train", "test"))
    assert [np.asarray(each.pixels()).shape for each in (learnt, unseen)] == [(1438, 8, 8, 1), (359, 8, 8, 1)]
    assert (np.bincount(learnt.labels) + np.bincount(unseen.labels)).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    batch = _unseen(dmst.create_model("dmst_digits"))
    assert batch.images.shape == (359, 1, 8, 8) and batch.labels.tolist() == unseen.labels.tolist() and batch.weight.all()
    assert batch.images.min() == -1 and batch.images.max() == 1


def test_a_job_is_the_recipe_for_its_network_and_seed() -> None:
    usual = read_recipe("digits")
    assert Job("dmst_digits", 0).recipe(usual.schedule.epochs) == usual  # so `dmst train digits` is a run of the demo
    assert differences(usual, Job("vit_digits", 3).recipe(5)) == [
        'model.name: "dmst_digits" -> "vit_digits"',
        "schedule.epochs: 16 -> 5",
        "schedule.warmup_epochs: 1.6 -> 0.5",
        "run.seed: 0 -> 3",
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo that was cut short, its run of DMST stopped after 7 of 22 steps by a signal as `_end` sends it; then gone on."""
    out = tmp_path_factory.mktemp("demo") / "out"

    def stop(values: Mapping[str, Any], step: int) -> None:
        if step == 7 and "loss" in values:  # the step itself; that it was saved is told as well
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(RECIPE, out / MINE.folder, device="cpu", listeners=[stop])
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(
        cli.app, ["demo", "--out", str(out), "--seeds", "1", "--epochs", "1", "--workers", "1"]
    )
    assert result.exit_code == 0, result.output
    return out, result.output


def test_the_command_s_defaults_are_the_recipe_s() -> None:
    defaults = {name: p.default.default for name, p in inspect.signature(cli.demo).parameters.items()}
    epochs = read_recipe("digits").schedule.epochs
    assert defaults["epochs"] == epochs == inspect.signature(run_demo).parameters["epochs"].default
    assert defaults["seeds"] == inspect.signature(run_demo).parameters["seeds"].default == 3


def test_the_command_says_where_the_report_is(finished: tuple[Path, str]) -> None:
    out, text = finished
    joined = "".join(text.split())
    assert str(out / "report.html") in joined and f"Continuingthedemoin{out}." in joined
    assert "dmst_digits" in text and "tost_digits" in text and "vit_digits" in text and "51,554" in text
    assert "Next:" in text


def test_a_demo_that_was_cut_short_goes_on(finished: tuple[Path, str]) -> None:
    out, _ = finished
    events = list(journal.read(out / MINE.folder / journal.NAME))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 23))
    kinds = [event["event"] for event in events if event["event"] != "step"]
    assert kinds == ["start", "checkpoint", "stopped", "evaluation", "checkpoint", "end"]
    for run in json.loads((out / "results.json").read_text())["runs"]:
        assert len(run["losses"]) == len(run["accuracies"]) == 1 and run["images"] == 22 * 64
        assert 0.5 < run["losses"][0] < math.log(10) + 0.3 and run["accuracies"][0] > 0.15 and run["seconds"] > 0
        assert run["parameters"] == {"dmst": 51_554, "tost": 51_058, "vit": 59_490}[run["model"].removesuffix("_digits")]


def test_the_page_is_whole_and_quotes_the_results(finished: tuple[Path, str]) -> None:
    out, _ = finished
    reader = check_page(out / "report.html")
    text = (out / "report.html").read_text()
    record = json.loads((out / "results.json").read_text())
    assert [run["model"] for run in record["runs"]] == ["vit_digits", "dmst_digits", "tost_digits"]
    assert record["recipe"] == RECIPE.tables(promise=False)
    read = next(run for run in record["runs"] if run["model"] == "dmst_digits")["accuracies"][-1]
    assert f"{read:.1%}" in text
    wrong = round((1 - read) * 359)
    assert f"{wrong} of 359" in text
    assert len(re.findall(r"predicted \d, \d", text)) == 10 * 5 and text.count("<br>confidence") == min(wrong, 24)
    assert "dmst demo --epochs 1 --seeds 1" in text
    assert len(reader.ids) == 6 + 5
    assert "nan" not in re.sub(r"data:image/png;base64,[^\"]*", "", text).lower()


def test_the_networks_are_kept(finished: tuple[Path, str]) -> None:
    out, text = finished
    kept = re.search(r"dmst\.load_model\('(.*)'\)", text.replace("\n", ""))
    assert kept is not None and Path(kept[1]) == out / MINE.folder / "final"
    model = dmst.load_model(kept[1])
    unseen = _unseen(model)
    read = (model(unseen.images).argmax(-1) == unseen.labels).sum().item() / 359
    record = json.loads((out / "results.json").read_text())
    assert read == next(r for r in record["runs"] if r["model"] == "dmst_digits")["accuracies"][-1]


def test_a_run_that_had_ended_is_not_repeated(finished: tuple[Path, str], tmp_path: Path) -> None:
    """In a demo that was killed before its page was written. The engine finds nothing to do, and the journal tells the same."""
    out = Path(shutil.copytree(finished[0], tmp_path / "out", ignore=shutil.ignore_patterns("report.html")))
    jobs = [MINE, Job("tost_digits", 0), Job("vit_digits", 0)]
    _make_ready(out, {job.folder: job.recipe(1) for job in jobs}, quiet)
    heard: list[Mapping[str, Any]] = []
    result = train(RECIPE, out / MINE.folder, device="cpu", listeners=[lambda values, step: heard.append(values)])
    record = next(r for r in json.loads((out / "results.json").read_text())["runs"] if r["model"] == "dmst_digits")
    assert not any("loss" in values for values in heard)  # no step
    assert told(MINE, RECIPE, result.journal) == Run(**record)


def test_a_run_by_its_journal() -> None:
    """Steps of 2 s, but for the first of each command; evaluations, and the hour between two commands, do not count."""
    start = {"event": "start", "step": 0, "time": 0.0, "parameters": 7, "steps": 6}
    steps = [{"event": "step", "step": i, "time": t} for i, t in enumerate((9, 11, 13, 3600, 3602, 3604), 1)]
    ends = [{"event": "evaluation", "train_loss": x, "model": {"top1": 1 - x}} for x in (0.5, 0.25)]
    events: list[dict[str, Any]] = [start, *steps[:3], ends[0], {"event": "stopped"}, *steps[3:], ends[1]]
    assert told(MINE, RECIPE, events) == Run("dmst_digits", 0, 7, [0.5, 0.25], [0.5, 0.75], 12.0, 6 * 64)


def test_the_table_averages_runs() -> None:
    every = [Run("dmst_digits", i, 7, [1.0], [a], 2.0, 100) for i, a in enumerate((0.98, 0.99, 1.0))]
    every += [Run(name, 0, 8, [1.0], [0.5], 1.0, 100) for name in ("tost_digits", "vit_digits")]
    rows = summary(Results(every, RECIPE))
    assert rows[0] == ("dmst_digits", "dmsa", "99.0 % ± 1.0", "3", "7", "50")
    assert rows[2] == ("vit_digits", "mhsa", "50.0 %", "1", "8", "100")


def test_bad_input_and_failures(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="seeds is 0"):
        run_demo(tmp_path, seeds=0)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="not of a demo"):
        run_demo(tmp_path / "file")
    with pytest.raises(SaveError, match="cannot be written"):
        run_demo(tmp_path / "file" / "below")
    with pytest.raises(DmstError, match=r"the demo stopped: OptionError: .*file/dmst_digits-seed0 cannot be the folder"):
        train_all({MINE: RECIPE}, tmp_path / "file", 1, quiet)


def test_an_earlier_demo_is_kept_and_anything_else_refused(tmp_path: Path) -> None:
    out = tmp_path / "[v1]"
    for turn in range(3):
        _make_ready(out, {MINE.folder: RECIPE}, quiet)
        assert out.is_dir() and not any(out.iterdir())
        (out / "report.html").write_text(str(turn))
    kept = {x.name: (x / "report.html").read_text() for x in tmp_path.iterdir()}
    assert kept == {"[v1]": "2", "[v1]-1": "0", "[v1]-2": "1"}
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(OptionError, match="not of a demo"):
        _make_ready(out, {MINE.folder: RECIPE}, quiet)
    assert (out / "thesis.txt").read_text() == "mine" and (out / "report.html").read_text() == "2"


def test_only_the_same_demo_goes_on(tmp_path: Path) -> None:
    """Cut short with these recipes: it stays. With others, with more seeds, or with networks in models/: aside."""
    out = tmp_path / "out"
    run = out / MINE.folder
    cases: list[tuple[str, str, bool]] = [
        (f"{MINE.folder}/recipe.toml", RECIPE.to_toml(), True),
        (f"{MINE.folder}/recipe.toml", MINE.recipe(2).to_toml(), False),
        ("dmst_digits-seed1/recipe.toml", Job("dmst_digits", 1).recipe(1).to_toml(), False),
        ("models/dmst_digits-seed0/config.json", "{}", False),
        (".results.json.4711", "{", True),
    ]
    for number, (name, text, stays) in enumerate(cases):
        run.mkdir(parents=True)  # killed before anything was said there
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
        _make_ready(out, {MINE.folder: RECIPE}, quiet)
        assert (out / name).exists() == stays and (out.with_name("out-1") / name).exists() != stays
        for folder in (out, out.with_name("out-1")):
            if folder.exists():
                folder.rename(tmp_path / f"seen-{number}-{folder.name}")


def test_a_demo_in_use_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "out" / MINE.folder
    with RunFolder(run):
        (tmp_path / "out" / "report.html").touch()
        with pytest.raises(OptionError, match=f"another run, process {os.getpid()}, is in it"):
            _make_ready(tmp_path / "out", {MINE.folder: RECIPE}, quiet)
    assert run.exists()


def test_a_run_without_its_parent_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        @staticmethod
        def is_alive() -> bool:
            return False

    monkeypatch.setattr("multiprocessing.parent_process", Gone)
    with pytest.raises(SystemExit):
        _hear(None, 0, {"loss": 0.5}, 1)


def test_a_run_that_died_is_noticed() -> None:
    class Dead:
        exitcode = -9

    class Silence:
        def get(self, timeout: float) -> object:
            raise queue.Empty

    assert _next(Silence(), [Dead()]) == (-1, "failed", "a process ended with code -9")
    Dead.exitcode = 1
    assert "__main__" in _next(Silence(), [Dead()])[2]


def test_a_run_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf:
        said: list[str] = []  # noqa: RUF012

        def __getattr__(self, name: str) -> Any:
            def call(*_: object) -> bool:
                self.said.append(name)
                return "kill" not in self.said

            return call

    _end([Deaf()], False)
    assert Deaf.said == ["terminate", "join", "is_alive", "kill", "join"]


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dmst.demo.train_all", interrupted)
    with pytest.raises(Stopped, match="the same command again") as stop:
        run_demo(tmp_path / "out")
    assert stop.value.exit_code == 130


def test_without_scikit_learn_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmst\[demo\]'"):
        run_demo(tmp_path)
    monkeypatch.setattr("sys.argv", ["dmst", "demo"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert "dmst[demo]" in capsys.readouterr().err
