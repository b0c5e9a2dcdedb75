"""Runner of tests/serving: cases with an engine's own Python sources, in a separate process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where `make test` put them; tools/serving.py says what lies there.
SOURCES = Path(os.environ.get("QAO_SERVING") or Path(sys.prefix, "serving"))


def sources_of(engine: str, version: str = "*") -> Path:
    """The folder of an engine's Python sources, by default of the newest; skips the test if there is none."""
    found = sorted(SOURCES.glob(f"{engine}-{version}"), key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    if not found:
        reason = f"no {engine} in {SOURCES}: python tools/serving.py {SOURCES} fetches it (Python 3.11 or newer)"
        if os.environ.get("CI") and sys.version_info >= (3, 11):
            pytest.fail(reason)
        pytest.skip(reason)
    return found[-1]


def environment(engine: str, version: str = "*") -> dict[str, str]:
    """That of a process for such sources."""
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return env | {"QAO_TEST_ENGINE": str(sources_of(engine, version)), "PYTHONPATH": os.pathsep.join(paths)}


def run_starts(engine: str, folder: Path, cases: list[str]) -> dict[str, dict[str, Any]]:
    """What tests/serving/<engine>_start.py found in each case."""
    folders = [ROOT / "tests" / "serving", ROOT / "tests"]
    env = environment(engine)
    env["PYTHONPATH"] = os.pathsep.join([*map(str, folders), env["PYTHONPATH"]])
    command = [sys.executable, str(folders[0] / f"{engine}_start.py"), str(folder), *cases]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["case"] for one in found] == cases, done.stderr[-4000:]
    return {one.pop("case"): one for one in found}


def run_cases(engine: str, version: str = "*") -> tuple[str, str]:
    """Runs tests/serving/<engine>_*cases.py; a character for the outcome of each case ("." passed), and the output."""
    env = environment(engine, version)
    cases = map(str, sorted((ROOT / "tests" / "serving").glob(f"{engine}_*cases.py")))
    options = ["-q", "-rfEs", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "error:qao does not work with this version", "-W", "error:qao: "]
    pytest_command = [sys.executable, "-m", "pytest", *options, *cases]
    done = subprocess.run(pytest_command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    output = done.stdout[-20000:] + done.stderr[-4000:]
    assert done.returncode in (0, 1), output  # pytest did not crash, and collected all cases
    # The config says -q as well, so that pytest prints no summary: count its dots.
    return "".join(re.findall(r"^([.sxXFE]+) +\[ *\d+%\]$", done.stdout, re.MULTILINE)), output


def passed_cases(engine: str) -> int:
    """How many cases passed with the newest version; none may fail or be skipped."""
    outcomes, output = run_cases(engine)
    assert set(outcomes) == {"."}, output
    return len(outcomes)
