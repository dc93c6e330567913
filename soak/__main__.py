"""python -m soak [AREA ...]: run what is missing of each area, one JSON line a case in results/soak, then the summary.

A run that was cut off goes on; other source, or other versions, begin an area anew. Exit status 1 if any case failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dmst import provenance
from soak import table
from soak.case import AREAS, module_of

ROOT = Path(__file__).resolve().parent.parent
WARM = 300.0  # seconds that a worker may take to say how many cases there are


def source(area: str) -> str:
    """One hash of the package and of what tries it."""
    files = {path for path in (ROOT / "dmst").rglob("*") if path.suffix in (".py", ".toml")}
    todo = [Path(module_of(area).__file__ or "")]
    while todo:  # the area's file, and what it imports of ours, however far down
        if (path := todo.pop()) not in files and path.is_file():
            files.add(path)
            names = re.findall(r"^\s*(?:from|import) ((?:soak|tests)[\w.]*)(?: import (\w+))?", path.read_text(), re.MULTILINE)
            todo += [
                ROOT.joinpath(*f"{package}{dot}".split(".")).with_suffix(".py")
                for package, name in names
                for dot in ("", f".{name}")
            ]
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return total.hexdigest()[:16]


class Worker:
    """A process that does every jobs-th case, and is replaced when one of them kills it or takes too long."""

    def __init__(self, area: str, k: int, jobs: int, most: int, done: set[str], log: Any) -> None:
        command = [sys.executable, "-m", "soak.worker", area, str(k), str(jobs), str(most)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        self.k, self.at, self.end = (
            k,
            {"begin": "the beginning", "row": "the beginning", "limit": WARM},
            time.monotonic() + WARM,
        )
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(sorted(done)).encode())
        self.process.stdin.close()
        self.rest, self.done = b"", False

    def lines(self) -> list[dict[str, Any]] | None:
        """What it told since; None at its end."""
        assert self.process.stdout is not None
        piece = os.read(self.process.stdout.fileno(), 1 << 16)
        *whole, self.rest = (self.rest + piece).split(b"\n")
        return [json.loads(line) for line in whole] if piece else None

    def end_it(self) -> None:
        if self.done:  # it tidies up
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def run(area: str, out: Path, most: int, commit: str) -> bool:
    """Every case of an area that is not done; returns whether all are well."""
    file = out / f"{area}.jsonl"
    head = {"area": area, "source": source(area), "most": most, "versions": provenance.versions()}
    told = table.read(file)
    if not told or {key: told[0].get(key) for key in head} != head:
        file.parent.mkdir(parents=True, exist_ok=True)
        begun = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
        file.write_text(json.dumps(head | begun) + "\n")
        told = []
    done = {each["case"] for each in told[1:] if each["ok"]}
    kept = [json.dumps(each) + "\n" for each in told if each.get("ok", True)]
    if told:
        file.write_text("".join(kept))  # what failed is tried again
    jobs = getattr(module_of(area), "JOBS", min(2, os.cpu_count() or 1))
    failed: dict[str, str] = {}
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    waiting = selectors.DefaultSelector()
    with tempfile.TemporaryFile() as log, file.open("a") as lines, Progress(*columns) as bar, waiting as ready:
        task = bar.add_task(area, total=None, completed=len(done))

        def start(k: int) -> None:
            worker = Worker(area, k, jobs, most, done, log)
            ready.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

        def write(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            done.add(line["case"])
            bar.update(task, completed=len(done))
            if not line["ok"]:
                failed[line["case"]] = line["why"]
                bar.console.print(f"[red]failed[/red] {area}: {line['case']}: {line['why']}")

        for k in range(jobs):
            start(k)
        while ready.get_map():
            for key, _ in ready.select(1.0):
                worker = key.data
                news = worker.lines()
                for line in news or []:
                    if "total" in line:
                        bar.update(task, total=line["total"])
                    elif "end" in line:
                        worker.done, news = True, None
                        break
                    elif "begin" in line:
                        worker.at, worker.end = line, time.monotonic() + line["limit"]
                    else:
                        write(line)
                if news is None:
                    ready.unregister(key.fileobj)
                    worker.end_it()
                    if not worker.done:
                        why = f"the process ended with status {worker.process.returncode}"
                        write({"row": worker.at["row"], "case": worker.at["begin"], "ok": False, "why": why})
                        if worker.at["row"] != "the beginning":
                            start(worker.k)
            for key in list(ready.get_map().values()):
                if time.monotonic() > key.data.end:
                    worker = key.data
                    ready.unregister(key.fileobj)
                    worker.end_it()
                    why = f"no answer in {worker.at['limit']:.0f} s"
                    write({"row": worker.at["row"], "case": worker.at["begin"], "ok": False, "why": why})
                    if worker.at["row"] != "the beginning":
                        start(worker.k)
        if failed:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 6000))
            print(log.read().decode(errors="replace"))
    table.shorten(file)
    if source(area) != head["source"]:  # processes that began later had other source than those before
        print(f"{area}: the source was changed while it ran: what it found belongs to no version. Run it again.")
        return False
    return not failed


def main() -> int:
    parse = argparse.ArgumentParser(
        prog="python -m soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all if none is named")
    parse.add_argument("--out", type=Path, default=ROOT / "results/soak")
    parse.add_argument("--most", type=int, default=0, help="cases of each row, for a quick look")
    parse.add_argument("--commit", help="what to call the source; else DMST_COMMIT, else what git says")
    ask = parse.parse_args()
    if unknown := set(ask.areas) - set(AREAS):
        parse.error(f"no area is called {', '.join(sorted(unknown))}: choose of {', '.join(AREAS)}")
    well = [run(area, ask.out, ask.most, provenance.commit(ask.commit)) for area in ask.areas or AREAS]
    print(table.markdown(ask.out))
    if ask.out == ROOT / "results/soak" and not ask.most:
        table.into(ROOT / "docs/reliability.md", ask.out)
    return 0 if all(well) else 1


if __name__ == "__main__":
    raise SystemExit(main())
