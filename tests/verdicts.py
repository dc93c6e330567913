"""What each test came to, as it comes, for tests/gpu.py: a process may be cut short. No torch: it is in every process.

Several processes share one list: each takes the next test that nobody has taken, and so begins with what it likes. One whose
CUDA context is lost takes no more of them: they would all fail.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

LOST = ("CUDA error", "device-side assert", "illegal memory access")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    name = hashlib.sha256(item.nodeid.encode()).hexdigest()
    try:
        Path(os.environ["DMST_VERDICTS"], name).touch(exist_ok=False)
    except FileExistsError:
        return True  # another process has it
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=None)  # which of the rest is next is not known
    if any(report.failed and any(words in str(report.longrepr) for words in LOST) for report in reports):
        item.session.shouldstop = "the CUDA context is lost"
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["DMST_VERDICTS"], f"{os.getpid()}.verdicts").open("a") as file:
            file.write(f"{report.outcome} {report.duration:.1f} {report.nodeid}\n")
            for line in str(report.longrepr).splitlines() if report.outcome == "failed" else ():
                file.write(f"# {line}\n" if line.startswith("E ") else "")
