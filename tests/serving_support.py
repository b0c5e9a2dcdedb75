"""Runs the cases of tests/serving with an engine's own Python sources, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where `make test` put them; tools/serving.py says what lies there.
SOURCES = Path(os.environ.get("QAO_SERVING") or Path(sys.prefix, "serving"))


def run_cases(engine: str) -> int:
    """Runs tests/serving/<engine>_*cases.py and returns how many cases passed; none may fail or be skipped."""
    found = sorted(SOURCES.glob(f"{engine}-*"))
    if not found:
        reason = f"no {engine} in {SOURCES}: python tools/serving.py {SOURCES} fetches it (Python 3.11 or newer)"
        if os.environ.get("CI") and sys.version_info >= (3, 11):
            pytest.fail(reason)
        pytest.skip(reason)
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"QAO_TEST_ENGINE": str(found[-1]), "PYTHONPATH": os.pathsep.join(paths)}
    cases = map(str, sorted((ROOT / "tests" / "serving").glob(f"{engine}_*cases.py")))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "error:qao does not work together", "-W", "error:qao: "]
    pytest_command = [sys.executable, "-m", "pytest", *options, *cases]
    done = subprocess.run(pytest_command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    # The config says -q as well, so that pytest prints no summary: count its dots.
    outcomes = "".join(re.findall(r"^([.sxX]+) +\[ *\d+%\]$", done.stdout, re.MULTILINE))
    assert set(outcomes) == {"."}, done.stdout
    return len(outcomes)
