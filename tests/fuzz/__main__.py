"""The command line of the fuzzers.

python -m fuzz operators calls readers layers --seconds 60 --ledger    # what make fuzz does
python -m fuzz operators --seed 7 --count 1000                   # cases 0 to 999 of seed 7
python -m fuzz operators --case '{"op": "int4_mm", "seed": 5}'   # one case, in this process
python -m fuzz ledger                                            # sums of all runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from . import ledger, workers

FUZZERS = ("operators", "calls", "readers", "layers")


def levels_of(fuzzer: str) -> list[str]:
    """Instruction sets of this CPU, and its GPU; only operators differ."""
    if fuzzer != "operators":
        return ["default"]
    import torch
    from cpu_isas import ISA_FLAGS

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith(("flags", "Features"))).split()
    levels = [level for level, needed in ISA_FLAGS.items() if all(flag in flags for flag in needed)]
    return levels + (["cuda"] if torch.cuda.is_available() else [])


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        fuzzer, level, seed, first, count, end, place = sys.argv[2:]
        workers.work(fuzzer, level, int(seed), int(first), int(count), float(end), place)
        return 0
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("fuzzers", nargs="+", choices=(*FUZZERS, "ledger"))
    parser.add_argument("--seconds", type=float, help="for each fuzzer; default: 60 without --count")
    parser.add_argument("--seed", type=int, help="default: the time")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, help="number of cases, at each level")
    parser.add_argument("--level", help="a value of QAO_CPU_ISA, cuda, or default; default: each in turn")
    parser.add_argument("--case", help="run this case alone")
    parser.add_argument("--ledger", nargs="?", const=ledger.LEDGER, type=Path, help="append the run to this file")
    options = parser.parse_args()
    if options.fuzzers == ["ledger"]:
        print("\n".join(ledger.summary()))
        return 0
    if options.case is not None:
        return replay(options.fuzzers[0], json.loads(options.case), options.level)
    seed = int(time.time()) if options.seed is None else options.seed
    seconds = options.seconds or (60 if options.count is None else float("inf"))
    found = 0
    for fuzzer in options.fuzzers:
        levels = [options.level] if options.level else levels_of(fuzzer)
        for level in levels:
            count = options.count or 1 << 60
            found += fuzz(fuzzer, level, seed, options.first, count, seconds / len(levels), options.ledger)
    return min(found, 1)


def fuzz(fuzzer: str, level: str, seed: int, first: int, count: int, seconds: float, file: Path | None) -> int:
    """Run a fuzzer at one level and print the result. Returns the number of findings."""
    begin, made_of = time.monotonic(), ledger.made_of(level)
    outcome = workers.run(fuzzer, level, seed, first, count, seconds)
    took = time.monotonic() - begin
    print(
        f"{fuzzer} {level}: seed {seed}, {outcome.cases} cases from {first}, {outcome.problems:,} problems in "
        f"{took:.0f} s ({outcome.problems / took:,.0f} a second), {len(outcome.findings)} findings",
        flush=True,
    )
    for case, wrong in outcome.findings:
        print(f"  {wrong}\n    {workers.command_of(fuzzer, case, level)}", flush=True)
    if file is not None:
        row = {"fuzzer": fuzzer, "level": level, "seed": seed, "first": first, "cases": outcome.cases}
        row |= {"problems": outcome.problems, "findings": len(outcome.findings), "seconds": round(took)}
        ledger.append(file, row | made_of)
    return len(outcome.findings)


def replay(fuzzer: str, case: dict[str, object], level: str | None) -> int:
    if level not in (None, "default", "cuda"):
        os.environ["QAO_CPU_ISA"] = level
    problems, wrong = workers.attempt(fuzzer, case, "cuda" if level == "cuda" else "cpu")
    print(wrong or f"{problems} problems, nothing found")
    return wrong is not None


if __name__ == "__main__":
    raise SystemExit(main())
