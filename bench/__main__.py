"""``python -m bench int4 --device cpu`` measures; ``python -m bench table`` puts the results into the documents."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from . import bars, table
from .int4 import PEERS, Int4
from .meta import RESULTS, device_slug
from .runner import LAYERS, TOKENS, Run, run, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("int4", help="time torch.ops.qao.int4_mm")
    measure.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    measure.add_argument("--peers", action="store_true", help="also time the other int4 operators found here")
    measure.add_argument("--quick", action="store_true", help="a quarter of the time a cell: rougher medians")
    measure.add_argument("--layers", nargs="+", metavar="NAME", help="only these layers")
    measure.add_argument("--m", nargs="+", type=int, metavar="M", help="only these numbers of tokens")
    measure.add_argument("--group-size", type=int, default=128, choices=[32, 64, 128, 256])
    measure.add_argument("--symmetric", action="store_true", help="no zero points")
    measure.add_argument("--check", action="store_true", help="exit 1 if a cell misses its bar in bench/bars.py")
    measure.add_argument("--out", type=Path, help="results file, instead of bench/results/<device>/int4.json")
    tables = commands.add_parser("table", help="write the results into README.md and docs/benchmarks.md")
    tables.add_argument("--check", action="store_true", help="change nothing; exit 1 if a document is out of date")
    arguments = parser.parse_args()
    return table.update(arguments.check) if arguments.command == "table" else _int4(parser, arguments)


def _int4(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU")
    known = {layer.name: layer for layer in LAYERS[device]}
    if unknown := set(arguments.layers or ()) - set(known):
        parser.error(f"no layer {', '.join(sorted(unknown))} on {device}; there are {', '.join(known)}")
    layers = [known[name] for name in arguments.layers or known]
    if odd := [layer.name for layer in layers if layer.k % arguments.group_size]:
        parser.error(
            f"--group-size {arguments.group_size} does not divide K of {', '.join(odd)}: choose other --layers"
        )
    request = Run(
        scheme="int4",
        ours=Int4,
        peers=PEERS if arguments.peers or arguments.check else (),
        device=device,
        layers=layers,
        tokens=arguments.m or TOKENS[device],
        group_size=arguments.group_size,
        symmetric=arguments.symmetric,
        quick=arguments.quick,
    )
    results = run(request)
    write(results, arguments.out or RESULTS / device_slug(device) / f"{request.scheme}.json")
    if not arguments.check:
        return 0
    lines, compared = bars.misses(results["rows"], device, bars.INT4)
    print(f"\n{compared - len(lines)} of {compared} cells reach their bar", *lines, sep="\n  ")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
