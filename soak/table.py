"""The summary: one line for each row of each area, from the files of results/soak alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soak.case import AREAS

BEGIN, END = "<!-- begin results/soak -->", "<!-- end results/soak -->"


def read(file: Path) -> list[dict[str, Any]]:
    """The first line, which says of what the others are, and one line a case. A line that a kill cut off is left out."""
    lines = file.read_text().splitlines() if file.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def markdown(folder: Path) -> str:
    """The table, and below it of what it is."""
    out = ["| area | tried | cases | failures | core-seconds | worst error |", "|---|---|---|---|---|---|"]
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


def into_readme(readme: Path, folder: Path) -> None:
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{markdown(folder)}\n{END}{rest.split(END)[1]}")
