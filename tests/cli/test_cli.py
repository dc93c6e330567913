"""The command line, called in process."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dmst import cli
from dmst.models import list_models
from dmst.operators import OPERATORS


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def test_operators_lists_every_operator_and_its_options() -> None:
    code, text = run("operators")
    assert code == 0
    for name in OPERATORS:
        assert name in text
    assert "mode='listing'" in text
    assert "Decoupled" in text


def test_models_fit_a_narrow_terminal() -> None:
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(cli.app, ["models", "*tiny*"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list_models("*tiny*")
    assert max(len(line) for line in lines[:-1]) <= 80
    row = next(line for line in lines if line.startswith("dmst_tiny_patch16_224"))
    assert row.split() == ["dmst_tiny_patch16_224", "dmsa", "192", "12", "4", "196", "5,587,426", "5,778,496"]
    assert run("models", "crate")[1].count("crate_") == len(list_models("crate_*"))
    code, text = run("models", "resnet*")
    assert code == 1
    assert "No network matches 'resnet*'" in text


def test_version_and_help() -> None:
    code, text = run("--version")
    assert code == 0
    assert text.startswith("dmst ")
    assert run()[0] == 2  # no verb: the help, and a status that says so
    assert run("--help")[0] == 0


def test_the_help_is_in_groups() -> None:
    """A newcomer finds what to use first; every verb is in a group."""
    text = run("--help")[1]
    places = [text.index(f"─ {panel} ─") for panel in ("Use", "Train", "Look inside", "Research", "Machine")]
    assert places == sorted(places) and "─ Commands ─" not in text
    panels = [text[a:b] for a, b in zip(places, [*places[1:], None], strict=True)]
    verbs = [
        [line.split()[1] for line in panel.splitlines()[1:] if line.startswith("│ ") and line[2] != " "] for panel in panels
    ]
    assert verbs == [
        ["classify", "explore", "export", "convert", "models", "demo"],
        ["train", "evaluate", "recipes", "data"],
        ["report", "analyze"],
        ["operators", "reproduce"],
        ["doctor"],
    ]


def test_an_unknown_verb_is_an_error() -> None:
    code, text = run("operator")
    assert code == 2
    assert "operators" in text


def test_main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["dmst", "--version"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
