"""The time-out of tests (pyproject.toml): one that hangs names itself and does not block the others forever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HANGS = "import time\n\ndef test_that_hangs():\n    time.sleep(60)\n\ndef test_after():\n    pass\n"


def test_a_test_that_hangs_is_ended_and_named(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 3600
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "-o", "faulthandler_timeout=1", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0
    assert "Timeout" in done.stderr and "in test_that_hangs" in done.stderr
