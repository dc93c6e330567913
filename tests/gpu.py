"""Run the GPU tests in several processes at once, and write what each came to: most of their time is compilation.

Each process begins at a place of its own in the list, so that tests of one kind find their kernels compiled, and then takes
what is left of the others'.

    python3 tests/gpu.py [FILE ...] [--processes 12] [--seconds 300] [--commit ID] [--out results/h200/tests.txt]

Needs nothing but pytest. A test without a verdict when the time is up, or when it is told to end, counts as one that failed.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DEVICE = ("_fused", "_gluon", "", "_models", "_training", "_active", "_step", "_tape")
BESIDE = ("hidden",)  # where another torch or Triton may matter
FILES = (*(f"tests/test_device{which}.py" for which in DEVICE), *(f"tests/test_{which}.py" for which in BESIDE))
PYTEST = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--tb=short"]
PYTEST += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
WATCHED = [*PYTEST, "-p", "tests.verdicts"]


def collect(files: list[str], root: Path) -> list[str]:
    run = subprocess.run([*PYTEST, "--collect-only", *files], capture_output=True, text=True, cwd=root)
    found = [line for line in run.stdout.splitlines() if "::" in line]
    if not found or run.returncode:  # a file that cannot be imported would be missing in silence
        raise SystemExit(f"no test was found, or not all of them:\n{run.stdout}{run.stderr}")
    return found


def run(tests: list[str], root: Path, processes: int, end: float) -> tuple[dict[str, str], dict[str, float], list[str]]:
    """Each test with its verdict and its seconds (tests/verdicts.py writes them down as they come), and what went wrong."""
    count = min(processes, len(tests))
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), []
        environment = os.environ | {
            "DMST_VERDICTS": name,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        try:
            for i in range(count):
                first = i * len(tests) // count
                with (folder / f"{i}.log").open("w") as log:
                    command = [*WATCHED, *tests[first:], *tests[:first]]
                    running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=root, env=environment))
            signal.signal(signal.SIGTERM, stop)  # `timeout` says so before it kills
            for process in running:
                process.wait(max(end - time.monotonic(), 0.1))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for process in running:
            process.kill()
            process.wait()
        lines = [line for path in folder.glob("*.verdicts") for line in path.read_text().splitlines()]
        logs = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
    told = [line.split(" ", 2) for line in lines if not line.startswith("#")]
    verdicts, seconds_of = {test: word for word, _, test in told}, {test: float(taken) for _, taken, test in told}
    wrong = [line[2:] for line in lines if line.startswith("#")]
    wrong += [line for line in logs.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {test: verdicts.get(test, "no verdict") for test in tests}, seconds_of, wrong


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("files", nargs="*", default=list(FILES))
    parse.add_argument("--root", type=Path, default=ROOT, help="where the files are, if not in this repository")
    parse.add_argument("--processes", type=int, default=12)
    parse.add_argument("--seconds", type=float, default=300)
    parse.add_argument("--commit", default="unknown")
    parse.add_argument("--out", type=Path)
    ask = parse.parse_args()
    begun, tests = time.monotonic(), collect(ask.files, ask.root)
    verdicts, seconds_of, wrong = run(tests, ask.root, ask.processes, begun + ask.seconds)
    counts = collections.Counter(verdicts.values())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    lines = [
        f"python3 tests/gpu.py --processes {ask.processes}, commit {ask.commit}",
        f"{device}, torch {torch.__version__}, Python {platform.python_version()}, {time.monotonic() - begun:.0f} s",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()),
        "",
        *(f"{verdict:<10} {test}" for test, verdict in verdicts.items()),
    ]
    text = "\n".join([*lines, "", *wrong]).rstrip() + "\n"
    if ask.out:
        ask.out.parent.mkdir(parents=True, exist_ok=True)
        ask.out.write_text(text)
    print("\n".join([*lines[:3], *(line for line in lines[4:] if not line.startswith("passed")), *wrong[:60]]))
    slow = sorted((taken, test) for test, taken in seconds_of.items() if taken > 5)
    print("\n".join(f"{taken:6.1f} s  {test}" for taken, test in slow[:-11:-1]))
    return 0 if set(counts) <= {"passed"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
