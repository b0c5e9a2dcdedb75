"""Grouped products of experts beside the loop over experts with the dense operator, and bfloat16.

One projection (gate and up together) of the experts of real models, tokens sent to experts evenly or by Zipf's law.
Contenders of a cell take turns: every scheme as one grouped operator, torch's grouped_mm in bfloat16; and on a CPU
loops of dense operators and of F.linear, which on a GPU would wait for the routing. There calls rotate over routings,
so that few tokens meet experts that no cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import qao  # noqa: F401  # the operators
import torch
import torch.nn.functional as F
from torch import Tensor

from .markdown import caption, table
from .meta import describe, warn_if_busy
from .timing import Graph, interleaved, replayed, settle_clocks

Call = Callable[[], Tensor]


class Model(NamedTuple):
    experts: int
    top_k: int
    n: int
    k: int


MODELS = {
    "Qwen3-30B-A3B": Model(128, 8, 2 * 768, 2048),
    "GPT-OSS-20B": Model(32, 4, 2 * 2880, 2880),
    "OLMoE-1B-7B": Model(64, 8, 2 * 1024, 2048),
}
TOKENS = (1, 4, 16, 128, 512)
ROUTINGS = ("uniform", "zipf")
SCHEMES = ("int4", "int8", "fp8", "int8_int8", "int8_int4", "fp8_fp8", "fp8_int4")
GROUP_SIZE = 32  # divides the K of all of them
BAR_BF16, BAR_LOOP = 2.0, 1.0  # times as fast: bfloat16's best up to 16 tokens, and the loop at any number

_CELL_S, _GRAPHS_S, _QUICK = 1.0, 0.05, 4  # of one contender on a CPU, on a GPU; --quick divides it
_ROUTINGS_A_GRAPH = 8


def run(device: str, models: list[str], tokens: list[int], quick: bool = False) -> dict[str, Any]:
    """Measures, prints a line a contender, and returns what belongs in the results file."""
    meta = describe(device)
    warn_if_busy(meta)
    seconds = (_CELL_S if device == "cpu" else _GRAPHS_S) / (_QUICK if quick else 1)
    rows: list[dict[str, Any]] = []
    if device == "cuda":
        settle_clocks()
    with torch.inference_mode():
        for name in models:
            experts = Experts(MODELS[name], device)
            for routing in ROUTINGS:
                for count in tokens:
                    calls = experts.calls(count, routing)
                    experts.check(calls)
                    times = _times(list(calls.values()), seconds, device)
                    rows += _rows(
                        {"model": name, "routing": routing, "tokens": count}, dict(zip(calls, times, strict=True))
                    )
    return {"meta": meta, "rows": rows}


def _times(calls: list[Call], seconds: float, device: str) -> list[float]:
    if device == "cpu":
        return interleaved(calls, seconds, device)
    return replayed([Graph(call, _ROUTINGS_A_GRAPH, 1.0) for call in calls], seconds)


def _rows(cell: dict[str, Any], times: dict[str, float]) -> Iterator[dict[str, Any]]:
    bf16 = min(time for name, time in times.items() if name.startswith("bf16"))
    for name, time in times.items():
        row = cell | {"name": name, "us": time * 1e6, "times_bf16": bf16 / time}
        if loop := times.get(f"{name} loop"):
            row["times_loop"] = loop / time
        print(*(f"{value:.2f}" if isinstance(value, float) else f"{value}" for value in row.values()), flush=True)
        yield row


def misses(rows: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Cells of ours that miss a bar, and how many there are."""
    ours = [row for row in rows if row["name"] in SCHEMES]
    late = [
        row
        for row in ours
        if row.get("times_loop", BAR_LOOP) < BAR_LOOP or (row["tokens"] <= 16 and row["times_bf16"] < BAR_BF16)
    ]
    lines = [
        f"{row['model']}, {row['routing']}, {row['tokens']} tokens, {row['name']}: "
        + (f"{row['times_loop']:.2f} times the loop, " if "times_loop" in row else "")
        + f"{row['times_bf16']:.2f} times bfloat16"
        for row in late
    ]
    return lines, len(ours)


def route(model: Model, tokens: int, routing: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The row of x for each row of y, sorted by expert, and the experts' last rows."""
    generator = torch.Generator().manual_seed(tokens + (seed << 32))
    chance = torch.ones(model.experts)
    if routing == "zipf":
        chance /= torch.arange(1, model.experts + 1).roll(seed)
    chosen = torch.multinomial(chance.expand(tokens, -1), model.top_k, generator=generator).flatten()
    order = chosen.sort(stable=True)
    ends = torch.bincount(chosen, minlength=model.experts).cumsum(0, dtype=torch.int32)
    return order.indices // model.top_k, ends


class Experts:
    """Random weights of all contenders."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device = model, device
        e, _, n, k = model
        generator = torch.Generator(device).manual_seed(n)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator)

        def scales(*shape: int) -> Tensor:
            return torch.rand(shape, device=device, generator=generator).add_(0.5).mul_(1e-3)

        tiles = -(-n // 16), -(-k // 64)
        four = integers(e, *tiles, 512), scales(e, tiles[0], k // GROUP_SIZE, 1, 16).bfloat16()
        eight = integers(e, n, k), scales(e, n)
        e4m3 = eight[0].to(torch.float8_e4m3fn), scales(e, n, 1)
        sizes = n, k, GROUP_SIZE
        self.operands: dict[str, tuple[tuple[Tensor, Tensor], tuple[Any, ...]]] = {
            "int4": (four, sizes),
            "int8": (eight, ()),
            "fp8": (e4m3, ()),
            "int8_int8": (eight, (None,)),
            "int8_int4": (four, (None, *sizes)),
            "fp8_fp8": (e4m3, (None, -1, False)),
            "fp8_int4": (four, sizes),
        }
        self.bf16 = torch.stack([(q * s.unsqueeze(1)).bfloat16() for q, s in zip(*eight, strict=True)])

    def calls(self, tokens: int, routing: str) -> dict[str, Call]:
        """Every contender by name."""
        generator = torch.Generator(self.device).manual_seed(1)
        x = torch.randn(tokens, self.model.k, device=self.device, generator=generator).bfloat16()
        # Zipf's favourites are spread over all experts.
        turns = [
            tuple(t.to(self.device) for t in route(self.model, tokens, routing, turn * self.model.experts // 8))
            for turn in range(_ROUTINGS_A_GRAPH if self.device == "cuda" else 1)
        ]
        calls: dict[str, Call] = {}
        for word in SCHEMES:
            (weight, scales), rest = self.operands[word]
            grouped = getattr(torch.ops.qao, f"{word}_grouped_mm").default
            dense = getattr(torch.ops.qao, f"{word}_mm").default

            def one(
                index: Tensor,
                ends: Tensor,
                grouped: Any = grouped,
                weight: Any = weight,
                scales: Any = scales,
                rest: Any = rest,
            ) -> Tensor:
                y: Tensor = grouped(x, weight, scales, None, ends, index, None, *rest)
                return y

            def loop(
                index: Tensor,
                ends: Tensor,
                dense: Any = dense,
                weight: Any = weight,
                scales: Any = scales,
                rest: Any = rest,
            ) -> Tensor:
                return self._loop(x, index, ends, lambda rows, e: dense(rows, weight[e], scales[e], None, *rest))

            calls |= {word: _by_turns(one, turns), f"{word} loop": _by_turns(loop, turns)}
        calls["bf16 loop"] = _by_turns(
            lambda index, ends: self._loop(x, index, ends, lambda rows, e: F.linear(rows, self.bf16[e])), turns
        )
        if hasattr(torch, "_grouped_mm"):
            calls["bf16 grouped_mm"] = _by_turns(
                lambda index, ends: torch._grouped_mm(x[index], self.bf16.mT, offs=ends), turns
            )
        return calls

    def _loop(self, x: Tensor, index: Tensor, ends: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
        rows, y, begin = x[index], x.new_empty(len(index), self.model.n), 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                y[begin:end] = product(rows[begin:end], expert)
            begin = end
        return y

    def check(self, calls: dict[str, Call]) -> None:
        """A grouped operator that does not give what its loop gives is not timed. On a GPU the kernels are others,
        whose sums are rounded in another order, and loops are not timed."""
        for word in SCHEMES:
            one, other = calls[word](), calls[f"{word} loop"]()
            difference = (one.float() - other.float()).abs().max().item()
            if difference > (0 if self.device == "cpu" else 2.0**-5 * other.abs().max().item()):
                raise RuntimeError(f"{word}_grouped_mm differs from the loop by {difference:.3g}")
        if self.device == "cuda":
            for name in [name for name in calls if name.endswith("loop")]:
                del calls[name]


def _by_turns(call: Callable[..., Tensor], turns: list[tuple[Tensor, ...]]) -> Call:
    """Each call with the next routing."""
    following = cycle(turns)
    return lambda: call(*next(following))


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file: times as fast as bfloat16's best, and as the loop."""
    rows = [row for row in results["rows"] if not row["name"].endswith("loop")]
    cells: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in rows:
        text = f"{row['us']:.0f} ({row['times_bf16']:.2f}x" + (
            f", {row['times_loop']:.2f}x)" if "times_loop" in row else ")"
        )
        cells.setdefault((row["model"], row["routing"], row["name"]), {})[row["tokens"]] = text
    tokens = sorted({row["tokens"] for row in rows})
    lines = [[*key, *(found.get(count, "") for count in tokens)] for key, found in cells.items()]
    header = ["experts of", "routing", "operator", *(f"{count} tokens" for count in tokens)]
    text = "µs (times as fast as bfloat16's best, and on a CPU as the loop over experts with the dense operator)"
    return f"{caption(results['meta'])}; {text}.\n\n{table(header, lines)}"
