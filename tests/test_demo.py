"""The demo, small: it trains, its batches are a function of seed and epoch, its page shows what was measured."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import queue
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import dmst
from dmst import cli
from dmst.data.digits import digits
from dmst.demo import Job, Results, _fresh, _next, _say, _train_all, run_demo, summary
from dmst.demo.training import Recipe, Run, accuracy, batches, distort, mix, schedule, train
from dmst.errors import DmstError, MissingExtraError, OptionError, SaveError
from tests.test_report import check_page


def test_the_split_is_fixed_and_whole() -> None:
    split = digits()
    assert split.train_images.shape == (1438, 1, 8, 8) and split.test_images.shape == (359, 1, 8, 8)
    assert split.train_images.min() == -1 and split.train_images.max() == 1
    assert (torch.bincount(split.train_labels) + torch.bincount(split.test_labels)).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert torch.equal(digits().test_images, split.test_images)


def test_batches_are_a_function_of_seed_and_epoch() -> None:
    split, recipe = digits(), Recipe()
    first = list(batches(split, 1, 2, recipe))
    again = list(batches(split, 1, 2, recipe))
    assert len(first) == 22 and all(len(labels) == 64 for _, labels in first)
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], next(batches(split, 1, 3, recipe))[0])
    assert not torch.equal(first[0][0], next(batches(split, 2, 2, recipe))[0])


def test_distortion() -> None:
    images = digits().train_images[:5]
    still = distort(images, torch.Generator().manual_seed(0), Recipe(turn=0, zoom=0, shift=0))
    assert torch.allclose(still, images, atol=1e-5)
    moved = distort(images, torch.Generator().manual_seed(0), Recipe())
    assert moved.shape == images.shape and moved.min() >= -1.0001 and moved.max() <= 1.0001
    assert (moved - images).abs().mean() > 0.01


def test_mixing() -> None:
    images, labels = torch.arange(4.0).reshape(4, 1, 1, 1), torch.eye(4)
    mixed, shares = mix(images, labels, torch.Generator().manual_seed(0), 0.3)
    assert torch.allclose(shares.sum(-1), torch.ones(4)) and (shares.diagonal() >= 0.7).all()
    assert torch.allclose(mixed.flatten(), shares @ torch.arange(4.0))  # image and label take the same share
    assert torch.equal(mix(images, labels, torch.Generator(), 0.0)[0], images)


def test_the_schedule_rises_and_falls() -> None:
    values = [schedule(i / 100, 0.1) for i in range(101)]
    assert values[0] == 0 and max(values) == values[10] == 1 and values[100] == pytest.approx(0, abs=1e-12)
    assert all(b < a for a, b in itertools.pairwise(values[10:]))


def test_a_run_learns_and_repeats() -> None:
    """Two epochs on the digits: the loss falls, and the same seed gives the same bits."""
    split, recipe, told = digits(), Recipe(epochs=2), []
    model, run = train("dmst_digits", 0, split, recipe, told.append)
    assert run.losses[1] < run.losses[0] < math.log(10) + 0.3
    assert told == run.accuracies and run.accuracies[-1] == accuracy(model, split) > 0.3
    assert run.images == 2 * 22 * 64 and run.parameters == 51_554 and not model.training
    again, _ = train("dmst_digits", 0, split, recipe)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "out"
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(
        cli.app, ["demo", "--out", str(out), "--seeds", "1", "--epochs", "1", "--workers", "1"]
    )
    assert result.exit_code == 0, result.output
    return out, result.output


def test_the_command_s_defaults_are_the_recipe_s() -> None:
    defaults = {name: p.default.default for name, p in inspect.signature(cli.demo).parameters.items()}
    assert defaults["epochs"] == Recipe.epochs == inspect.signature(run_demo).parameters["epochs"].default
    assert defaults["seeds"] == inspect.signature(run_demo).parameters["seeds"].default == 3


def test_the_command_says_where_the_report_is(finished: tuple[Path, str]) -> None:
    out, text = finished
    joined = "".join(text.split())
    assert str(out / "report.html") in joined
    assert "dmst_digits" in text and "tost_digits" in text and "vit_digits" in text and "51,554" in text
    assert "Next:" in text


def test_the_page_is_whole_and_quotes_the_results(finished: tuple[Path, str]) -> None:
    out, _ = finished
    reader = check_page(out / "report.html")
    text = (out / "report.html").read_text()
    record = json.loads((out / "results.json").read_text())
    assert [run["model"] for run in record["runs"]] == ["vit_digits", "dmst_digits", "tost_digits"]
    read = next(run for run in record["runs"] if run["model"] == "dmst_digits")["accuracies"][-1]
    assert f"{read:.1%}" in text
    wrong = round((1 - read) * 359)
    assert f"{wrong} of 359 unseen digits" in text
    assert text.count("read as") == 10 * 5 + min(wrong, 24)  # ten examples in five views, and the surest mistakes
    assert "dmst demo --epochs 1 --seeds 1" in text
    assert len(reader.ids) == 6 + 5
    assert "nan" not in re.sub(r"data:image/png;base64,[^\"]*", "", text).lower()


def test_the_networks_are_kept(finished: tuple[Path, str]) -> None:
    out, _ = finished
    model = dmst.load_model(out / "models" / "dmst_digits-seed0")
    record = json.loads((out / "results.json").read_text())
    assert accuracy(model, digits()) == next(r for r in record["runs"] if r["model"] == "dmst_digits")["accuracies"][-1]


def test_the_table_averages_runs() -> None:
    runs = [Run("dmst_digits", i, 7, [1.0], [a], 2.0, 100) for i, a in enumerate((0.98, 0.99, 1.0))]
    runs += [Run(name, 0, 8, [1.0], [0.5], 1.0, 100) for name in ("tost_digits", "vit_digits")]
    rows = summary(Results(runs, Recipe(epochs=1), 1.0))
    assert rows[0] == ("dmst_digits", "dmsa", "99.0 % ± 1.0", "3", "7", "50")
    assert rows[2] == ("vit_digits", "mhsa", "50.0 %", "1", "8", "100")


def test_bad_input_and_failures(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="seeds is 0"):
        run_demo(tmp_path, seeds=0)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="holds something else than a demo"):
        run_demo(tmp_path / "file")
    with pytest.raises(SaveError, match="cannot be written to"):
        run_demo(tmp_path / "file" / "below")
    with pytest.raises(DmstError, match=r"the demo stopped: UnknownNameError: unknown model 'nobody'"):
        _train_all([Job("nobody", 0)], tmp_path, Recipe(epochs=1), 1, Console(quiet=True))


def test_an_earlier_demo_is_kept_and_anything_else_refused(tmp_path: Path) -> None:
    out, quiet = tmp_path / "[v1]", Console(quiet=True)
    for turn in range(3):
        assert _fresh(out, quiet) == out
        assert [x.name for x in out.iterdir()] == ["models"] and not any((out / "models").iterdir())
        (out / "results.json").write_text(str(turn))
    kept = {x.name: (x / "results.json").read_text() for x in tmp_path.iterdir()}
    assert kept == {"[v1]": "2", "[v1]-1": "0", "[v1]-2": "1"}
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(OptionError, match="holds something else than a demo"):
        _fresh(out, quiet)
    assert (out / "thesis.txt").read_text() == "mine" and (out / "results.json").read_text() == "2"


def test_a_run_without_its_parent_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        @staticmethod
        def is_alive() -> bool:
            return False

    monkeypatch.setattr("multiprocessing.parent_process", Gone)
    with pytest.raises(SystemExit):
        _say(None, 0, 0.5)


def test_a_run_that_died_is_noticed() -> None:
    class Dead:
        exitcode = -9

    class Silence:
        def get(self, timeout: float) -> object:
            raise queue.Empty

    assert _next(Silence(), [Dead()]) == (-1, "failed", "a process ended with code -9")
    Dead.exitcode = 1
    assert "__main__" in _next(Silence(), [Dead()])[2]


def test_without_scikit_learn_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dmst\[demo\]'"):
        digits()
    monkeypatch.setattr("sys.argv", ["dmst", "demo"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert "dmst[demo]" in capsys.readouterr().err
