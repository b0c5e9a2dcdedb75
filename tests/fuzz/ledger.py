"""The ledger: one row for each run of a fuzzer, with the sources it ran on. ``python -m fuzz ledger`` sums it up."""

from __future__ import annotations

import csv
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))  # for bench

LEDGER = HERE / "ledger.csv"
COLUMNS = (
    *("date", "fuzzer", "device", "level", "seed", "first", "cases", "problems", "findings", "seconds"),
    *("torch", "sources", "fuzzers"),
)


def hash_of_fuzzers() -> str:
    """The generators that a seed belongs to."""
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def made_of(level: str) -> dict[str, str]:
    """The part of a row that describes machine and sources. Taken before the run."""
    from bench.meta import describe

    meta = describe("cuda" if level == "cuda" else "cpu")
    known = {"date": meta["date"], "device": meta["device"], "torch": meta["torch"]}
    return known | {"sources": meta["source_hash"][:12], "fuzzers": hash_of_fuzzers()}


def append(path: Path, row: dict[str, object]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def rows() -> list[dict[str, str]]:
    if not LEDGER.exists():
        return []
    with LEDGER.open(newline="") as file:
        return list(csv.DictReader(file))


def summary() -> Iterator[str]:
    """Sums over all rows, by fuzzer and level, and those of the present sources."""
    from bench.meta import source_hash

    present = source_hash()[:12]
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows():
        total = sums[row["fuzzer"], row["level"]]
        counts = int(row["cases"]), int(row["problems"]), int(row["findings"])
        counts += (counts[1] if row["sources"] == present else 0,)
        for i, count in enumerate(counts):
            total[i] += count
    for (fuzzer, level), (cases, problems, findings, now) in sorted(sums.items()):
        text = f"{cases:>12,} cases {problems:>14,} problems ({now:,} of these sources)"
        yield f"{fuzzer:10} {level:12} {text} {findings} findings"
