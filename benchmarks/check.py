"""The targets of targets.csv beside what was reached, from files of operators.py and models.py. Nothing is measured.

    python benchmarks/check.py results/h200/operators.json results/h200/models.json [--before OLD.json]

`--before` names the file of an older commit, of the same hour: each recorded network may be 5 % slower than there.
A target is a ratio of two rows: `value` of layer or network `of` divided by that of `over`, in one mode at one shape or size,
bfloat16. `must` is the promise, `goal` the wish. The exit status is 1 if a `must` is missed or was not measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).with_name("targets.csv")
BEFORE = 0.95


def value(rows: list[dict[str, Any]], target: dict[str, str], what: str) -> float:
    """Of the row that passed parity; NaN if there is none."""
    for row in rows:
        at = str(row["pixels"]) if "pixels" in row else f"{row['B']}x{row['N']}"
        named = (row["what"], row["mode"], at, row["dtype"]) == (what, target["mode"], target["at"], "bfloat16")
        if named and "reference" not in (row.get("backend"), row.get("kernels")) and not row["failure"]:
            return row[target["value"]] or math.nan
    return math.nan


def rows_of(path: str) -> list[dict[str, Any]]:
    try:
        return json.loads(Path(path).read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{path} is no file of a benchmark ({type(error).__name__}): write one with --json"
        ) from error


def named(target: dict[str, str]) -> str:
    return "{mode} {at} {value}: {of} / {over}".format(**target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=rows_of)
    parser.add_argument("--before", type=rows_of, default=[])
    ask = parser.parse_args()
    by_script = {"models" if rows and "pixels" in rows[0] else "operators": rows for rows in ask.files}
    if ask.before and "models" not in by_script:
        parser.error("--before compares networks: give a file of models.py too")
    missed = 0
    for target in csv.DictReader(TARGETS.open()):
        if target["script"] in by_script:
            rows = by_script[target["script"]]
            ratio, sign = value(rows, target, target["of"]) / value(rows, target, target["over"]), target["rule"]
            bars = {bar: float(target[bar]) for bar in ("must", "goal") if target[bar]}
            kept = {bar: ratio <= x if sign == "<=" else ratio >= x for bar, x in bars.items()}
            missed += not kept["must"]
            words = {bar: "not measured" if math.isnan(ratio) else "yes" if held else "no" for bar, held in kept.items()}
            told = ", ".join(f"{bar} {sign} {bars[bar]:g}: {word}" for bar, word in words.items())
            print(f"{named(target):<80} {'' if math.isnan(ratio) else f'{ratio:.3f}':>7}  {told}")
    for row in (row for row in ask.before if row.get("pixels") and row["mode"] == "recorded"):
        target = {"mode": "recorded", "at": str(row["pixels"]), "of": row["what"], "over": "the same before"}
        for what in ("inference", "training"):
            ratio = value(by_script["models"], target | {"value": what}, row["what"]) / (row[what] or math.nan)
            missed += not ratio >= BEFORE
            print(f"{named(target | {'value': what}):<80} {ratio:7.3f}  must >= {BEFORE}: {'yes' if ratio >= BEFORE else 'no'}")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
