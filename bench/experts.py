"""Grouped GEMM of MoE experts against a loop over experts with the dense operator, and bfloat16.

One projection (gate and up together) of the experts of real models; tokens are routed uniformly or by Zipf's law.
Contenders of a cell alternate: every scheme as one grouped operator; torch's grouped GEMM in bfloat16, on a GPU also in
fp8; DeepGEMM and vLLM if ``QAO_BENCH_PEERS`` is set; and on a CPU loops of dense operators and of F.linear, which on a
GPU would synchronize on the routing. All take bfloat16 tokens. Times include quantization (for torch by qao's kernel)
and the gather of rows. Routing metadata, for some contenders with rows padded to tiles and their owners, is computed
beforehand. On a GPU calls rotate over routings and copies of the weights, so that experts are not cached.

On a GPU a row has a floor, the device's minimum time for its operands: the bytes of the selected experts at the
measured read bandwidth, or the operations at the measured bfloat16 GEMM rate, doubled if both operands have eight bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import torch

from .experts_contenders import OTHERS, ROUTINGS_IN_TURN, Call, Experts, Model
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .timing import Graph, ceilings, interleaved, replayed, settle_clocks

MODELS = {
    "Qwen3-30B-A3B": Model(128, 8, 2 * 768, 2048),
    "Mixtral-8x7B": Model(8, 2, 2 * 14336, 4096),
    "GPT-OSS-20B": Model(32, 4, 2 * 2880, 2880),
    "DeepSeek-V3-rank": Model(32, 8, 2 * 2048, 7168),  # one of eight
    "OLMoE-1B-7B": Model(64, 8, 2 * 1024, 2048),
}
SMALL = ("Qwen3-30B-A3B", "GPT-OSS-20B", "OLMoE-1B-7B")  # on a CPU
TOKENS = {"cpu": (1, 4, 16, 128, 512), "cuda": (1, 4, 16, 32, 64, 256, 512, 2048, 8192)}
ROUTINGS = ("uniform", "zipf")
# ..._rows: with integer_scales, power_of_two_scales; ..._fast: with fast_accum, only on GPUs.
SCHEMES = (
    *("int4", "fp4", "int8", "fp8", "int8_int8", "int8_int4", "int8_int4_rows", "fp8_fp8", "fp8_fp8_fast"),
    *("fp8_int4", "fp8_int4_rows"),
)
EIGHT_BITS = ("int8_int8", "fp8_fp8", "fp8_fp8_fast")
# CPU bars: against the best bfloat16 up to 16 tokens, and against the loop at any number.
BAR_BF16, BAR_LOOP = 2.0, 1.0
# GPU bars: int4 up to 64 tokens against its floor and the best peer, more tokens against torch's grouped GEMM.
BAR_FLOOR, BAR_SHORT_FLOOR, SHORT_US, BAR_PEER, BAR_FP8 = 1.35, 2.0, 10.0, 1.6, 1.1

_CELL_S, _GRAPHS_S, _QUICK = 1.0, 0.05, 4  # per contender on a CPU, on a GPU; divided by --quick


def run(
    device: str,
    models: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    routings: Sequence[str] = ROUTINGS,
    schemes: Sequence[str] = SCHEMES,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure, print one line per contender, and return the content of the results file."""
    meta = describe(device)
    warn_if_busy(meta)
    if device == "cpu":
        schemes = [name for name in schemes if not name.endswith("_fast")]
    seconds = (_CELL_S if device == "cpu" else _GRAPHS_S) / (_QUICK if quick else 1)
    rows: list[dict[str, Any]] = []
    rates = (0.0, 0.0)
    if device == "cuda":
        settle_clocks()
        rates = ceilings(device)
    with torch.inference_mode():
        for name in models or (MODELS if device == "cuda" else SMALL):
            experts = Experts(MODELS[name], device, schemes)
            for routing in routings:
                for count in tokens or TOKENS[device]:
                    calls = experts.calls(count, routing)
                    floors = experts.floors(count, routing, rates) if device == "cuda" else {}
                    experts.check(calls)
                    times = _times(calls, floors, seconds, device)
                    rows += _rows({"model": name, "routing": routing, "tokens": count}, times, floors)
            del experts
    return {"meta": meta, "rows": rows}


def _times(calls: dict[str, Call], floors: dict[str, float], seconds: float, device: str) -> dict[str, float]:
    if device == "cpu":
        times = interleaved(list(calls.values()), seconds, device)
    else:
        times = replayed([Graph(call, ROUTINGS_IN_TURN, floors[name]) for name, call in calls.items()], seconds)
    return dict(zip(calls, times, strict=True))


def _rows(cell: dict[str, Any], times: dict[str, float], floors: dict[str, float]) -> Iterator[dict[str, Any]]:
    bf16 = min(time for name, time in times.items() if name.startswith("bf16"))
    peer = min(bf16, *(times.get(other, bf16) for other in OTHERS))
    for name, time in times.items():
        row = cell | {"name": name, "us": time * 1e6, "times_bf16": bf16 / time, "times_peer": peer / time}
        if floor := floors.get(name):
            row["floor_us"] = floor * 1e6
        if loop := times.get(f"{name} loop"):
            row["times_loop"] = loop / time
        print(*(f"{value:.2f}" if isinstance(value, float) else f"{value}" for value in row.values()), flush=True)
        yield row


def misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """qao's cells that miss a bar, and the number of cells."""
    ours = [row for row in rows if row["name"] in SCHEMES]
    lines = [
        f"{row['model']}, {row['routing']}, {row['tokens']} tokens, {row['name']}: {', '.join(late)}"
        for row in ours
        if (late := _missed(row) if "times_loop" in row else _missed_on_gpu(row))
    ]
    return lines, len(ours)


def _missed(row: dict[str, Any]) -> list[str]:
    late = []
    if row["times_loop"] < BAR_LOOP:
        late.append(f"{row['times_loop']:.2f} times the loop")
    if row["tokens"] <= 16 and row["times_bf16"] < BAR_BF16:
        late.append(f"{row['times_bf16']:.2f} times bfloat16")
    return late


def _missed_on_gpu(row: dict[str, Any]) -> list[str]:
    late, over = [], row["us"] / row["floor_us"]
    if row["tokens"] <= 64 and row["name"] == "int4":
        if over > (BAR_SHORT_FLOOR if row["floor_us"] < SHORT_US else BAR_FLOOR):
            late.append(f"{over:.2f} times the floor of {row['floor_us']:.1f} us")
        if row["times_peer"] < BAR_PEER:
            late.append(f"{row['times_peer']:.2f} times the best other")
    elif row["tokens"] >= 256 and row["name"] in EIGHT_BITS and row["times_peer"] < BAR_FP8:
        late.append(f"{row['times_peer']:.2f} times the best other")
    elif row["tokens"] >= 256 and row["name"] == "int4" and row["times_bf16"] < 1:
        late.append(f"{row['times_bf16']:.2f} times bfloat16")
    return late


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file: times, the floor, the best bfloat16 and the best peer or the loop."""
    rows = [row for row in results["rows"] if not row["name"].endswith("loop")]
    cells: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in rows:
        if floor := row.get("floor_us"):
            text = f"{row['us']:.0f} ({row['us'] / floor:.2f}; {row['times_bf16']:.2f}x, {row['times_peer']:.2f}x)"
        else:
            text = f"{row['us']:.0f} ({row['times_bf16']:.2f}x"
            text += f", {row['times_loop']:.2f}x)" if "times_loop" in row else ")"
        cells.setdefault((row["model"], row["routing"], row["name"]), {})[row["tokens"]] = text
    tokens = sorted({row["tokens"] for row in rows})
    lines = [[*key, *(found.get(count, "") for count in tokens)] for key, found in cells.items()]
    header = ["experts of", "routing", "operator", *(f"{count} tokens" for count in tokens)]
    if any("floor_us" in row for row in rows):
        text = "µs (times as long as its floor; times as fast as bfloat16's best, as the best of others)"
    else:
        text = "µs (times as fast as bfloat16's best, as the loop over experts with the dense operator)"
    return f"{caption(results['meta'])}; {text}.\n\n{table(header, lines)}"


def render_means(results: dict[str, Any]) -> str:
    """Schemes by tokens, over models and routings: speedup over the best bfloat16 and the best peer."""
    rows = [row for row in results["rows"] if row["name"] in SCHEMES]
    tokens = sorted({row["tokens"] for row in rows})
    peers = any(row["times_peer"] != row["times_bf16"] for row in rows)
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [[row for row in rows if (row["name"], row["tokens"]) == (name, count)] for count in tokens]
        lines.append([f"`{name}`", *(_means(cell, ("times_bf16", "times_peer")[: 1 + peers]) for cell in cells)])
    text = "Geometric means over models and routings: times as fast as bfloat16's best"
    text += ", as the best of bfloat16 and others" if peers else ""
    return f"{caption(results['meta'])}. {text}.\n\n{table(['scheme', *(f'{m} tokens' for m in tokens)], lines)}"


def _means(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> str:
    return ", ".join(f"{geometric_mean(row[key] for row in rows):.2f}" for key in keys) if rows else "–"
