"""What each test came to, as it comes, for tests/gpu.py: a process may be cut short. No torch: it is in every process."""

from __future__ import annotations

import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    told = os.environ.get("DMST_VERDICTS")
    if told and (report.when == "call" or report.outcome != "passed"):
        with open(told, "a") as file:
            file.write(f"{report.outcome} {report.duration:.1f} {report.nodeid}\n")
            for line in str(report.longrepr).splitlines() if report.outcome == "failed" else ():
                file.write(f"# {line}\n" if line.startswith("E ") else "")
