"""The summary, from the files of results/soak alone: a line for each row of each area."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmst import atomic
from soak.case import AREAS

BEGIN, END = "<!-- begin results/soak -->", "<!-- end results/soak -->"


def read(file: Path) -> list[dict[str, Any]]:
    """The first line, which says of what the others are, and one line a case. A line that a kill cut off is left out."""
    lines = file.read_text().splitlines() if file.is_file() else []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            break
        if found:
            told = {"ok": True} | told
            told["row"] = found[0]["rows"][told["row"]] if isinstance(told["row"], int) else told["row"]
        found.append(told)
    return found


def shorten(file: Path) -> None:
    """Rows by their numbers, and no word about what is well: there are tens of thousands of lines."""
    head, *cases = read(file)
    rows = list(dict.fromkeys(case["row"] for case in cases))
    short = [
        {key: x for key, x in case.items() if (key, x) != ("ok", True)} | {"row": rows.index(case["row"])} for case in cases
    ]
    lines = [json.dumps(line, separators=(",", ":")) for line in (head | {"rows": rows}, *short)]
    atomic.write_text(file, "\n".join(lines) + "\n")


def markdown(folder: Path) -> str:
    """A table of rows, and below it of what it is."""
    out = ["| area | tried | cases | failures | seconds, summed | worst error |", "|---|---|---|---|---|---|"]
    facts: dict[str, list[str]] = {}
    for area in AREAS:
        head, *cases = read(folder / f"{area}.jsonl") or [{}]
        if not cases:
            out.append(f"| {area} | not run | | | | |")
            continue
        versions = f"dmst {head['versions']['dmst']}, torch {head['versions']['torch']}"
        told = f"commit {head['commit'][:7]}, {head['date']}, {versions}, {head['cores']} CPU cores"
        facts.setdefault(told, []).append(area)
        for row in dict.fromkeys(case["row"] for case in cases):
            mine = [case for case in cases if case["row"] == row]
            errors = [case["error"] for case in mine if "error" in case]
            worst = f"{max(errors):.1e}" if errors else ""
            failures, seconds = sum(not case["ok"] for case in mine), sum(case.get("s", 0) for case in mine)
            out.append(f"| {area} | {row} | {len(mine):,} | {failures} | {seconds:,.0f} | {worst} |")
    return "\n".join([*out, "", *(f"{', '.join(areas)}: {told}." for told, areas in facts.items())])


def into(document: Path, folder: Path) -> None:
    """Put it between the two lines that are there for it."""
    text = document.read_text()
    before, rest = text.split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n{markdown(folder)}\n{END}{rest.split(END)[1]}")
