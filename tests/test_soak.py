"""The long run itself: it counts what fails, dies and hangs, goes on where it was, and the README shows what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soak import __main__ as soak
from soak import precision, table
from soak.case import AREAS, module_of

ROOT = Path(__file__).parents[1]
PLANTED = "tests.planted"


def lines(out: Path) -> dict[str, dict]:
    _, *cases = table.read(out / f"{PLANTED}.jsonl")
    return {case["case"]: case for case in cases}


@pytest.mark.process
def test_what_fails_dies_or_hangs_is_counted_and_the_rest_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMST_PLANTED", "1")
    assert soak.run(PLANTED, tmp_path, 0, "abc") is False
    found = lines(tmp_path)
    assert len(found) == 13 and sorted(name for name in found if not found[name]["ok"]) == ["dies", "fails", "hangs"]
    assert found["fails"]["why"] == "AssertionError: a promise is broken"
    assert found["dies"]["why"] == "the process ended with status -9"
    assert found["hangs"]["why"] == "no answer in 1 s"
    monkeypatch.setattr(table, "AREAS", (PLANTED,))
    shown = table.markdown(tmp_path).splitlines()
    assert [line.split("|")[2:5] for line in shown[2:4]] == [[" fine ", " 10 ", " 0 "], [" bad ", " 3 ", " 3 "]]
    assert shown[2].endswith("| 2.0e-07 |") and "commit abc" in shown[-1]


@pytest.mark.process
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    assert soak.run(PLANTED, tmp_path, 0, "abc")
    file = tmp_path / f"{PLANTED}.jsonl"
    head, *cases = file.read_text().splitlines(keepends=True)
    marked = [json.dumps(json.loads(case) | {"old": True}) + "\n" for case in cases[:4]]
    file.write_text("".join([head, *marked, cases[5][:20]]))  # and half a line
    assert soak.run(PLANTED, tmp_path, 0, "abc")
    found = lines(tmp_path)
    assert len(found) == 10 and sum("old" in case for case in found.values()) == 4
    told = json.loads(head)
    file.write_text(json.dumps(told | {"source": "another"}) + "\n" + "".join(marked))
    assert soak.run(PLANTED, tmp_path, 2, "abc")
    assert sorted(lines(tmp_path)) == ["fine 0", "fine 1"]  # of another source nothing is kept; two of each row were asked for


def test_every_area_is_there_and_names_what_it_is() -> None:
    for area in AREAS:
        assert module_of(area).__doc__ and module_of(area).TITLE


@pytest.mark.process
@pytest.mark.parametrize("area", ["checkpoints", "configs", "kernels"])
def test_a_sample(area: str, tmp_path: Path) -> None:
    """One case of each row; the samples of the other areas are the tests that they are made from."""
    assert soak.run(area, tmp_path, 1, "abc")


def test_the_committed_results_are_whole_and_the_readme_shows_them() -> None:
    folder = ROOT / "results/soak"
    for area in AREAS:
        head, *cases = table.read(folder / f"{area}.jsonl")
        assert head["area"] == area and head["most"] == 0 and len(cases) == len({case["case"] for case in cases})
        assert all(case["ok"] for case in cases), area
    text = (ROOT / "docs/reliability.md").read_text()
    assert text.split(table.BEGIN)[1].split(table.END)[0].strip() == table.markdown(folder)


def test_the_document_shows_what_was_measured() -> None:
    told = table.read(ROOT / "results/soak/kernels.jsonl")[1:]
    text = (ROOT / "docs/reliability.md").read_text()
    assert text.split(precision.BEGIN)[1].split(precision.END)[0].strip() == precision.table(told)
    over = {row: f"{sum('over' in x for x in told if x['row'] == row)} of the" for row in dict.fromkeys(x["row"] for x in told)}
    said = [
        f"{count} {len([x for x in told if x['row'] == row]):,}" for row, count in over.items() if not count.startswith("0 ")
    ]
    assert len(said) >= 3 and all(each in " ".join(text.split()) for each in said), said
