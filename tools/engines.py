"""The cases of tests/serving with other versions of vLLM and SGLang: ``python tools/engines.py FOLDER [NAME...]``.

FOLDER holds their Python sources, as ``python tools/serving.py FOLDER --all`` fetches them. Runs on a CPU, a minute or
two for each version. Writes tests/engines.json and the table of docs/serving.md. Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "engines.json"
PAGE = ROOT / "docs" / "serving.md"
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from serving import SOURCES  # noqa: E402
from versions import record  # noqa: E402

from bench import markdown  # noqa: E402
from bench.meta import source_hash  # noqa: E402

NAMES = [f"{engine}-{version}" for engine, versions in SOURCES.items() for version in versions]


def run(engine: str, version: str) -> dict[str, Any]:
    import torch
    from serving_support import run_cases

    begin = time.monotonic()
    outcomes, output = run_cases(engine, version)
    print(output[-6000:] if {*outcomes} != {"."} else f"{len(outcomes)} passed", flush=True)
    return {
        **{"python": platform.python_version(), "torch": torch.__version__},
        **{"passed": outcomes.count("."), "skipped": outcomes.count("s")},
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE),
        "reasons": sorted({*re.findall(r"^SKIPPED .*?: (.*)$", output, re.MULTILINE)}),
        **{"seconds": round(time.monotonic() - begin), "date": datetime.date.today().isoformat()},
        "source_hash": source_hash(),
    }


def table(results: dict[str, Any]) -> str:
    """A row for the versions of an engine with equal results."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in filter(results.get, NAMES):
        engine, version = name.split("-")
        found = results[name]
        counts = found["passed"], found["skipped"], len(found["failed"])
        cells = *counts, found["python"], found["torch"].partition("+")[0], found["date"]
        rows.setdefault((TITLES[engine], *map(str, cells)), []).append(version)
    lines = [[f"{title} {', '.join(versions)}", *cells] for (title, *cells), versions in rows.items()]
    return markdown.table(["version", "passed", "skipped", "failed", "Python", "torch", "date"], lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the engines' Python sources")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*NAMES}:
        parser.error(f"no such version: {', '.join(sorted(unknown))}")
    # With one thread, small layers are ten times as fast on a busy machine.
    os.environ |= {"QAO_SERVING": str(arguments.folder.resolve()), "OMP_NUM_THREADS": "1"}
    status = 0
    for name in arguments.names or NAMES:
        print(f"== {name}", flush=True)
        row = run(*name.split("-"))
        status |= bool(row["failed"])
        record(RESULTS, name, row, PAGE, table)
    return status


if __name__ == "__main__":
    sys.exit(main())
