"""New weights in place: GB/s of ``load_float_``, beside those of a copy.

    python -m bench.update --device cuda

Bytes are those of the bfloat16 weight that is read and of the packed one that is written; a copy reads and writes as
many as the weight has. Ranges are not searched.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import qao
import torch

from .markdown import table
from .meta import RESULTS, describe, device_slug, write

SHAPES = {"4096x4096": (4096, 4096), "14336x4096": (14336, 4096), "8192x28672": (8192, 28672)}
SCHEMES: dict[str, qao.Scheme] = {
    "int4": qao.Int4WeightOnly(clip_search=False),
    "int4 symmetric": qao.Int4WeightOnly(symmetric=True, clip_search=False),
    "int8": qao.Int8WeightOnly(clip_search=False),
    "fp8": qao.Float8WeightOnly(),
    "fp8 block": qao.Float8WeightOnly(granularity="block"),
}


def seconds(call: object, rounds: int, device: str) -> float:
    taken = []
    for _ in range(rounds + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()  # type: ignore[operator]
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.update", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="instead of bench/results/<device>")
    arguments = parser.parse_args()
    device, rows = arguments.device, []
    for shape in arguments.shapes:
        n, k = SHAPES[shape]
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        to = torch.empty_like(weight)
        copied = 2 * weight.nbytes / seconds(lambda weight=weight, to=to: to.copy_(weight), arguments.rounds, device)
        for name, scheme in SCHEMES.items():
            packed = scheme.quantize(weight)
            layer = qao.QuantLinear(k, n, scheme, packed, None, torch.bfloat16)
            written = sum(one.nbytes for one in layer.parameters())
            taken = seconds(lambda layer=layer, weight=weight: layer.load_float_(weight), arguments.rounds, device)
            moved = (weight.nbytes + written) / taken
            rows.append(
                {"scheme": name, "shape": shape, "us": 1e6 * taken, "gbs": moved / 1e9, "of_copy": moved / copied}
            )
    columns = ["scheme", "shape", "us", "gbs", "of_copy"]
    print(table(columns, [[f"{v:.3g}" if isinstance(v, float) else v for v in row.values()] for row in rows]))
    folder = arguments.out or RESULTS / device_slug(device)
    write({"meta": describe(device), "rows": rows}, folder / "update.json")


if __name__ == "__main__":
    main()
