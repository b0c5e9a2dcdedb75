"""The core of the suite with other versions of Python, torch and transformers: ``python tools/versions.py WHEEL``.

Each combination is a virtual environment in build/versions with the wheel installed, as users have it; a second run
uses the environments again. Writes tests/versions.json and the table of docs/policy.md. A Python that is not on this
machine is left out of the run and keeps its last result. Exit status 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
RESULTS = ROOT / "tests" / "versions.json"
PAGE = ROOT / "docs" / "policy.md"
MARKS = "<!-- versions -->\n", "<!-- /versions -->"  # of the generated part of a page
sys.path.insert(0, str(ROOT))

from bench import markdown  # noqa: E402
from bench.meta import source_hash  # noqa: E402


class Versions(NamedTuple):
    """Python by its minor version; the others as pip takes them."""

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"{self.python}-torch{self.torch.strip('>=*.')}"


# The lowest of each, the versions in between, and the newest that pip offers, also before their release.
COMBINATIONS = (
    Versions("3.10", "==2.11.*", "==4.57.*"),
    Versions("3.11", "==2.12.*", "==5.22.*"),
    Versions("3.12", "==2.14.*", "==5.23.*"),
    Versions("3.13", ">=2.15", "==5.24.*"),
    Versions("3.14", ">=2.15", ">=5.24"),
)
PACKAGES = ("pytest>=9", "pytest-xdist>=3.5", "numpy", "accelerate", "cloudpickle", "gguf", "peft", "psutil")
# What another version can break: operators as torch sees them, layers, compilers, files and models.
CORE = (
    *("test_schemas.py", "test_features.py", "test_linear.py", "test_modes.py", "test_state.py", "test_autograd.py"),
    *("test_quantize.py", "test_schemes.py", "test_compile.py", "test_export.py", "test_inductor.py"),
    *("test_inductor_models.py", "test_saving.py", "test_corpus.py", "test_from_pretrained.py", "test_quantizer.py"),
    *("test_models.py", "test_peft.py", "test_training.py", "test_deprecations.py"),
    *("test_gguf_models.py", "test_gguf_tokenizer.py", "test_gguf_write.py"),
)
SHOW = """
import json, platform, torch, transformers
print(json.dumps([platform.python_version(), torch.__version__, transformers.__version__]))
"""
_COUNTS = re.compile(r"(\d+) (passed|skipped)")


def interpreter(python: str) -> str | None:
    """A Python of this minor version: on PATH, or of pyenv."""
    on_path = shutil.which(f"python{python}")
    if on_path and subprocess.run([on_path, "--version"], capture_output=True).returncode == 0:  # no idle shim of pyenv
        return on_path
    return next(map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}")), None)


def environment(versions: Versions, executable: str, wheel: Path) -> Path:
    """The Python of the combination's environment, with the wheel as it is now."""
    folder = FOLDER / versions.name
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if not (folder / "installed").exists():
        subprocess.run([executable, "-m", "venv", "--clear", str(folder)], check=True)
        wanted = [f"torch{versions.torch}", f"transformers{versions.transformers}"]
        subprocess.run([*pip, *(["--pre"] if ">" in versions.torch else []), *wanted, *PACKAGES], check=True)
        (folder / "installed").touch()
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, str(wheel)], check=True)
    return python


def run(versions: Versions, python: Path, workers: int) -> dict[str, Any]:
    seen = json.loads(subprocess.run([python, "-c", SHOW], capture_output=True, text=True, check=True).stdout)
    begin = time.monotonic()
    result = subprocess.run(
        [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "worksteal", *CORE],
        cwd=ROOT / "tests",
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(result.stdout[-6000:] if result.returncode else result.stdout[-200:], flush=True)
    if result.returncode not in (0, 1):
        sys.exit(f"{versions.name}: pytest did not finish, exit status {result.returncode}; nothing is recorded")
    counts = {word: int(number) for number, word in _COUNTS.findall(result.stdout.splitlines()[-1])}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return {
        **dict(zip(("python", "torch", "transformers"), seen, strict=True)),
        **{"passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0), "failed": failed},
        **{"exit_status": result.returncode, "seconds": round(time.monotonic() - begin)},
        **{"date": datetime.date.today().isoformat(), "source_hash": source_hash()},
    }


def table(results: dict[str, Any]) -> str:
    lines = []
    for versions in COMBINATIONS:
        if row := results.get(versions.name):
            cells = (row["python"], row["torch"], row["transformers"], row["passed"], len(row["failed"]), row["date"])
        else:
            cells = (*(text.strip("=*.") for text in versions), "not run", "", "")
        lines.append([str(cell) for cell in cells])
    return markdown.table(["Python", "torch", "transformers", "passed", "failed", "date"], lines) + "\n"


def record(results: Path, name: str, row: dict[str, Any], page: Path, table: Callable[[dict[str, Any]], str]) -> None:
    """Add a row to a file of results, and write their table into a page."""
    rows = json.loads(results.read_text()) if results.exists() else {}  # another run may have written
    rows[name] = row
    results.write_text(json.dumps(rows, indent=2) + "\n")
    text = page.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    page.write_text(text[:begin] + table(rows) + text[end:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of qao, as make wheel writes it")
    names = [versions.name for versions in COMBINATIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"combinations, of {', '.join(names)}; default: all")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*names}:
        parser.error(f"no such combination: {', '.join(sorted(unknown))}")
    status = 0
    for versions in COMBINATIONS:
        if arguments.names and versions.name not in arguments.names:
            continue
        executable = interpreter(versions.python)
        if executable is None:
            print(f"{versions.name}: no Python {versions.python} here")
            continue
        print(f"== {versions.name}", flush=True)
        row = run(versions, environment(versions, executable, arguments.wheel.resolve()), arguments.workers)
        status |= row["exit_status"] != 0
        record(RESULTS, versions.name, row, PAGE, table)
    return status


if __name__ == "__main__":
    sys.exit(main())
