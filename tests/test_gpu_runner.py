"""tests/gpu.py, which runs the GPU tests, on three tests that need none."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THREE = """
import time

def test_a(): pass
def test_b(): assert 0
def test_c():
    open("done", "w").close()
    time.sleep(60)
"""


def command(folder: Path, processes: int, seconds: int, tests: str = THREE) -> list[str]:
    (folder / "test_three.py").write_text(tests)
    asked = ["test_three.py", "--root", str(folder), "--processes", str(processes), "--seconds", str(seconds)]
    return [sys.executable, str(ROOT / "tests/gpu.py"), *asked, "--commit", "abc", "--out", str(folder / "out.txt")]


def test_every_verdict_is_told(tmp_path: Path) -> None:
    run = subprocess.run(command(tmp_path, 2, 12), capture_output=True, text=True, timeout=110)
    assert run.returncode == 1
    told = (tmp_path / "out.txt").read_text()
    for words in ("commit abc", "1 passed", "1 failed", "1 no verdict"):
        assert words in told
    assert "::test_a" in told
    assert "::test_a" not in run.stdout  # only what did not pass is printed
    assert "::test_b" in run.stdout
    assert told.count("E   assert 0") == 1  # whether or not its process was cut short, and only one of them had it


def test_it_tells_what_it_knows_when_it_must_end(tmp_path: Path) -> None:
    run = subprocess.Popen(command(tmp_path, 1, 100), stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("done")) and time.monotonic() < end:
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 1
    assert "1 passed, 1 failed, 1 no verdict" in (tmp_path / "out.txt").read_text()


def test_a_lost_device_takes_no_more_tests(tmp_path: Path) -> None:
    lost = "def test_a(): raise RuntimeError('CUDA error: an illegal memory access')\ndef test_b(): pass\n"
    run = subprocess.run(command(tmp_path, 1, 60, lost), capture_output=True, text=True, timeout=110)
    assert run.returncode == 1
    assert "1 failed, 1 no verdict" in (tmp_path / "out.txt").read_text()


def test_a_file_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    asked = command(tmp_path, 1, 60, "def test_a(): pass\n")
    (tmp_path / "test_broken.py").write_text("import nosuchmodule\n")
    run = subprocess.run([*asked[:3], "test_broken.py", *asked[3:]], capture_output=True, text=True, timeout=110)
    assert run.returncode == 1
    assert "nosuchmodule" in run.stderr


def test_the_script_of_everything() -> None:
    """It can be read, and what it calls is there."""
    script = ROOT / "benchmarks/everything.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    called = set(re.findall(r"python3 ((?:benchmarks|tests)/\w+\.py)", script.read_text()))
    assert len(called) >= 5
    assert all((ROOT / name).exists() for name in called)
