"""Contenders of ``bench experts``: random expert weights, routings, and every grouped GEMM by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import qao  # noqa: F401  # the operators
import torch
import torch.nn.functional as F
from torch import Tensor

from .peers import engines, vllm_experts
from .timing import copies_of

Call = Callable[[], Tensor]


class Model(NamedTuple):
    experts: int
    top_k: int
    n: int
    k: int


ROUTINGS_IN_TURN = 8
FP8_PEER = "fp8 scaled_grouped_mm"
DEEP_GEMM = "fp8 DeepGEMM"
# Peers of other libraries and the scheme with their weights, or weights of the same size.
OTHERS = {
    "bf16 grouped_mm": "bf16",
    FP8_PEER: "fp8_fp8",
    DEEP_GEMM: "fp8_fp8",
    vllm_experts.MARLIN: "int4",
    vllm_experts.TRITON_BF16: "bf16",
    vllm_experts.TRITON_FP8: "fp8_fp8",
}


def route(model: Model, tokens: int, routing: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The row of x for each row of y, sorted by expert, and the end offsets of the experts."""
    generator = torch.Generator().manual_seed(tokens + (seed << 32))
    chance = torch.ones(model.experts)
    if routing == "zipf":
        chance /= torch.arange(1, model.experts + 1).roll(seed)
    chosen = torch.multinomial(chance.expand(tokens, -1), model.top_k, generator=generator).flatten()
    order = chosen.sort(stable=True)
    ends = torch.bincount(chosen, minlength=model.experts).cumsum(0, dtype=torch.int32)
    return order.indices // model.top_k, ends


class Experts:
    """Random weights for all contenders."""

    def __init__(self, model: Model, device: str, schemes: Sequence[str]) -> None:
        self.model, self.device, self.schemes = model, device, schemes
        e, _, n, k = model
        generator = torch.Generator(device).manual_seed(n)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator)

        def scales(*shape: int) -> Tensor:
            return torch.rand(shape, device=device, generator=generator).add_(0.5).mul_(1e-3)

        tiles, group_size = (-(-n // 16), -(-k // 64)), 32 if k % 128 else 128
        four = integers(e, *tiles, 512), scales(e, tiles[0], k // group_size, 1, 16).bfloat16()
        eight = integers(e, n, k), scales(e, n)
        codes = integers(e, *tiles, 512), torch.exp2(-integers(e, tiles[0], k // 32, 1, 16).remainder(4)).bfloat16()
        of_rows = scales(e, n)
        whole = integers(e, tiles[0], k // group_size, 1, 16).remainder(16) + 1
        scaled = four[0], (whole * of_rows.view(e, tiles[0], 1, 1, 16)).bfloat16()
        short = of_rows.bfloat16().float()  # times powers of two exactly representable in bfloat16
        powers = four[0], (torch.exp2(-whole.remainder(4)) * short.view(e, tiles[0], 1, 1, 16)).bfloat16()
        e4m3 = eight[0].to(torch.float8_e4m3fn), scales(e, n, 1)
        bf16 = (torch.stack([(q * s.unsqueeze(1)).bfloat16() for q, s in zip(*eight, strict=True)]),)
        sizes = n, k, group_size
        operands: dict[str, tuple[tuple[Tensor, ...], tuple[Any, ...]]] = {
            "int4": (four, sizes),
            "int8": (eight, ()),
            "fp8": (e4m3, ()),
            "int8_int8": (eight, (None,)),
            "int8_int4": (four, (None, None, *sizes)),
            "int8_int4_rows": (scaled, (None, of_rows, *sizes)),
            "fp4": (codes, (n, k, 32)),
            "fp8_fp8": (e4m3, (None, -1, False)),
            "fp8_fp8_fast": (e4m3, (None, -1, True)),
            "fp8_int4": (four, (None, *sizes)),
            "fp8_int4_rows": (powers, (short, *sizes)),
            "bf16": (bf16, ()),
        }
        self.operands = {
            word: (self._copies(operands[word][0]), operands[word][1])
            for word in {*schemes, "bf16", *(("fp8_fp8",) if device == "cuda" else ())}
        }

    def _copies(self, weights: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Copies of the weights; on a GPU enough to exceed the L2 cache by far."""
        if self.device == "cpu":
            return [weights]
        count = copies_of(sum(t.nbytes for t in weights), self.device)
        return [weights, *(tuple(t.clone() for t in weights) for _ in range(count - 1))]

    def floors(self, tokens: int, routing: str, rates: tuple[float, float]) -> dict[str, float]:
        """Minimum seconds of every contender, by bytes of selected experts or by operations."""
        _, top_k, n, k = self.model
        turns = [ends for _, ends in self._turns(tokens, routing)]
        touched = sum(len(ends.unique()) - int(ends[0] == 0) for ends in turns) / len(turns)
        operations = 2 * tokens * top_k * n * k / rates[1]
        floors = {}
        for word, (copies, _) in self.operands.items():
            read = sum(t.nbytes for t in copies[0]) * touched / self.model.experts / rates[0]
            floors[word] = max(read, operations / (2 if "_" in word else 1))
        return floors | {name: floors[word] for name, word in OTHERS.items() if word in floors}

    def _turns(self, tokens: int, routing: str) -> list[tuple[Tensor, Tensor]]:
        """Routings to rotate over, with Zipf's popular experts spread over all experts."""
        return [
            route(self.model, tokens, routing, turn * self.model.experts // ROUTINGS_IN_TURN)
            for turn in range(ROUTINGS_IN_TURN)
        ]

    def calls(self, tokens: int, routing: str) -> dict[str, Call]:
        """Every contender by name."""
        generator = torch.Generator(self.device).manual_seed(1)
        x = torch.randn(tokens, self.model.k, device=self.device, generator=generator).bfloat16()
        turns = [(index.to(self.device), ends.to(self.device)) for index, ends in self._turns(tokens, routing)]
        calls: dict[str, Call] = {}

        def add(name: str, word: str, call: Callable[..., Tensor]) -> None:
            calls[name] = _interleaved(call, self.operands[word][0], turns)

        for word in self.schemes:
            rest = self.operands[word][1]
            operator = word.removesuffix("_rows").removesuffix("_fast")
            grouped = getattr(torch.ops.qao, f"{operator}_grouped_mm").default
            dense = getattr(torch.ops.qao, f"{operator}_mm").default

            def one(
                weight: Tensor,
                scales: Tensor,
                index: Tensor,
                ends: Tensor,
                grouped: Any = grouped,
                rest: Any = rest,
            ) -> Tensor:
                y: Tensor = grouped(x, weight, scales, None, ends, index, None, *rest)
                return y

            def loop(
                weight: Tensor, scales: Tensor, index: Tensor, ends: Tensor, dense: Any = dense, rest: Any = rest
            ) -> Tensor:
                def product(rows: Tensor, e: int) -> Tensor:
                    own = (value[e] if isinstance(value, Tensor) else value for value in rest)
                    y: Tensor = dense(rows, weight[e], scales[e], None, *own)
                    return y

                return self._loop(x, index, ends, product)

            add(word, word, one)
            add(f"{word} loop", word, loop)
        add(
            "bf16 loop",
            "bf16",
            lambda weight, index, ends: self._loop(x, index, ends, lambda rows, e: F.linear(rows, weight[e])),
        )
        if hasattr(torch, "_grouped_mm"):
            add(
                "bf16 grouped_mm",
                "bf16",
                lambda weight, index, ends: torch._grouped_mm(x[index], weight.mT, offs=ends),
            )
        if self.device == "cuda" and hasattr(torch, "_scaled_grouped_mm"):

            def scaled(weight: Tensor, scales: Tensor, index: Tensor, ends: Tensor) -> Tensor:
                x8, scale = torch.ops.qao.fp8_quantize.default(x, -1, None)
                y: Tensor = torch._scaled_grouped_mm(
                    x8[index],
                    weight.mT,
                    scale[index].squeeze(-1),
                    scales.squeeze(-1),
                    offs=ends,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
                return y

            add(FP8_PEER, "fp8_fp8", scaled)
        if "deep_gemm" in engines.load() and self.model.n % 128 == self.model.k % 128 == 0:
            rows = {id(ends): engines.deep_gemm_rows(index, ends) for index, ends in turns}
            blocks = torch.rand(self.model.experts, self.model.n // 128, self.model.k // 128, device=self.device)
            add(
                DEEP_GEMM,
                "fp8_fp8",
                lambda weight, scales, index, ends: engines.deep_gemm_experts(x, *rows[id(ends)], weight, blocks),
            )
        if self.device == "cuda":
            for name, tiles, call in vllm_experts.contenders(x, self.model.n, self.model.experts, turns):
                if OTHERS[name] in self.operands:
                    calls[name] = _interleaved(call, self.operands[OTHERS[name]][0], tiles)
        return calls

    def _loop(self, x: Tensor, index: Tensor, ends: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
        rows, y, begin = x[index], x.new_empty(len(index), self.model.n), 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                y[begin:end] = product(rows[begin:end], expert)
            begin = end
        return y

    def check(self, calls: dict[str, Call]) -> None:
        """Check grouped operators against their loops before timing.

        GPU kernels of the loop accumulate in another order, and loops are not timed there.
        """
        for word in self.schemes:
            one, other = calls[word](), calls[f"{word} loop"]()
            difference = (one.float() - other.float()).abs().max().item()
            if difference > (0 if self.device == "cpu" else 2.0**-5 * other.abs().max().item()):
                raise RuntimeError(f"{word}_grouped_mm differs from the loop by {difference:.3g}")
        # Rows of vLLM's y have another order, and marlin's layout of the same bytes is another weight.
        for name, like in ((vllm_experts.TRITON_BF16, "bf16 grouped_mm"), (vllm_experts.TRITON_FP8, FP8_PEER)):
            if name in calls:
                sums, expected = (calls[each]().float().sum(1).sort().values for each in (name, like))
                if (sums - expected).abs().max() > 2.0**-5 * expected.abs().max():
                    raise RuntimeError(f"{name}: sums of rows are not those of {like}")
        if vllm_experts.MARLIN in calls and not calls[vllm_experts.MARLIN]().isfinite().all():
            raise RuntimeError(f"{vllm_experts.MARLIN}: y is not finite")
        if self.device == "cuda":
            for name in [name for name in calls if name.endswith("loop")]:
                del calls[name]


def _interleaved(
    call: Callable[..., Tensor], weights: Sequence[tuple[Tensor, ...]], turns: Sequence[tuple[Tensor, ...]]
) -> Call:
    """A call that rotates over weights and routings."""
    following, weight = cycle(turns), cycle(weights)
    return lambda: call(*next(weight), *next(following))
