"""tests/gpu.py, which runs the GPU tests, on three tests that need none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THREE = """
import time

def test_a(): pass
def test_b(): assert 0
def test_c(): time.sleep(60)
"""


def test_every_verdict_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(THREE)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/verdicts.py").read_text())
    command = [sys.executable, str(ROOT / "tests/gpu.py"), "test_three.py", "--root", str(tmp_path), "--processes", "1"]
    command += ["--seconds", "7", "--commit", "abc", "--out", str(tmp_path / "out.txt")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert run.returncode == 1
    told = (tmp_path / "out.txt").read_text()
    for words in ("commit abc", "1 passed", "1 failed", "1 no verdict"):
        assert words in told
    assert "::test_a" in told
    assert "::test_a" not in run.stdout  # only what did not pass is printed
    assert "::test_b" in run.stdout
    assert "assert 0" in told  # though its process was cut short
