"""Compiled MoE block with router and experts: tokens per second against bfloat16; needs transformers.

The block is transformers' own, with Qwen3-30B-A3B's sizes and random weights. bfloat16 runs its experts with torch's
grouped GEMM. On a GPU compiled calls are replayed as CUDA graphs that rotate over inputs, so that experts are not
cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import qao
import torch
from torch import Tensor

from .markdown import caption, table
from .meta import describe
from .schemes import LAYER_SCHEMES
from .timing import Graph, interleaved, replayed, settle_clocks

MODEL = "Qwen3-30B-A3B"
TOKENS = (1, 32, 2048)
CONTENDERS: dict[str, qao.Scheme] = {
    **LAYER_SCHEMES,
    "int8_int4_rows": qao.Int8DynamicActivationInt4Weight(symmetric=True, integer_scales=True),
}
SCHEMES = ("int4", "fp4", "int8_int8", "int8_int4_rows", "fp8_fp8")
_INPUTS, _SECONDS = 16, 0.3


def make_block(scheme: qao.Scheme | None, device: str) -> Any:
    """[1, T, K] → [1, T, K], frozen."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).requires_grad_(False).eval()
    if scheme is not None:
        report = qao.quantize_(block, {"experts": scheme}, progress=False)
        if not any(isinstance(module, qao.nn.QuantExperts) for module in block.modules()):
            raise RuntimeError(f"the experts were not quantized:\n{report}")
    block = block.to_empty(device=device)
    torch.manual_seed(0)
    for name, parameter in block.named_parameters():
        _fill(name, parameter.detach())
    return block


def _fill(name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.int8:
        tensor.random_(-127, 128)
    elif name.endswith("scales"):
        tensor.fill_(2.0**-10)  # group factors, relative to row scales
    else:
        tensor.copy_(torch.randn(tensor.shape, device=tensor.device, dtype=torch.bfloat16).mul_(0.02))


def run(
    device: str,
    tokens: Sequence[int] = TOKENS,
    schemes: Iterable[str] = SCHEMES,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure, print one line per cell, and return the content of the results file."""
    results: dict[str, Any] = {"meta": describe(device), "rows": []}
    contenders = {"bf16": None, **{word: CONTENDERS[word] for word in schemes}}
    if device == "cuda":
        settle_clocks()
    blocks = {name: make_block(scheme, device) for name, scheme in contenders.items()}
    for count in tokens:
        times = _times(blocks, count, device)
        for name, time in times.items():
            row = {"model": MODEL, "name": name, "tokens": count, "us": time * 1e6, "tokens_s": count / time}
            row["times_bf16"] = times["bf16"] / time
            print(*(f"{v:.2f}" if isinstance(v, float) else v for v in row.values()), flush=True)
            results["rows"].append(row)
        save(results)
    return results


@torch.inference_mode()
def _times(blocks: dict[str, Any], tokens: int, device: str) -> dict[str, float]:
    torch._dynamo.reset()  # contenders share compiled code, so reset for each
    calls = {name: _compiled(block, tokens, device) for name, block in blocks.items()}
    if device == "cuda":
        seconds = replayed([Graph(call, _INPUTS, 20e-6) for call in calls.values()], _SECONDS)
    else:
        seconds = interleaved(list(calls.values()), _SECONDS, device)
    return dict(zip(calls, seconds, strict=True))


def _compiled(block: Any, tokens: int, device: str) -> Callable[[], Tensor]:
    compiled = torch.compile(lambda x: block(x), fullgraph=True, dynamic=False)
    inputs = cycle([torch.randn(1, tokens, 2048, device=device).bfloat16() for _ in range(_INPUTS)])
    compiled(next(inputs))

    def call() -> Tensor:
        y: Any = compiled(next(inputs))
        return y[0] if isinstance(y, tuple) else y

    return call


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    cells: dict[str, list[str]] = {}
    for row in results["rows"]:
        text = f"{row['us']:.0f} ({row['tokens_s']:,.0f}; {row['times_bf16']:.2f}x)"
        cells.setdefault(row["name"], []).append(text)
    tokens = list(dict.fromkeys(row["tokens"] for row in results["rows"]))
    body = table(
        ["experts", *(f"{count} tokens" for count in tokens)], [[name, *found] for name, found in cells.items()]
    )
    return f"{caption(results['meta'])}; block of {MODEL}, µs (tokens a second; times as fast as bf16).\n\n{body}"
