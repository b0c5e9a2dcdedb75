"""vLLM's grouped GEMM of experts: marlin (int4, from its library) and Triton (bfloat16, e4m3).

They are not installed: the folder in ``QAO_BENCH_PEERS`` may contain vllm_moe.so (``_moe_C_stable_libtorch`` of the
wheel) and fused_moe.py and configs/ of ``model_executor/layers/fused_moe``. Missing files are skipped. Row-to-expert
metadata, padded to tiles, is computed beforehand. y is in token order, not expert order.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import engines

MARLIN, TRITON_BF16, TRITON_FP8 = "int4 vLLM marlin", "bf16 vLLM Triton", "fp8 vLLM Triton"
_KERNEL = ("write_zeros_to_output", "fused_moe_kernel")
Config = dict[str, int]


class Tiles(NamedTuple):
    """A routing for both kernels. A slot is token index times experts per token, plus the expert's rank."""

    # int32: the slot of each row of each tile, or the number of slots for padding. None: one tile per slot.
    slots: Tensor | None
    owners: Tensor  # int32: the expert of each tile
    rows: Tensor  # int32 [1]: rows of all tiles


Contender = tuple[str, Sequence[Tiles], Callable[..., Tensor]]  # name, routings, GEMM


@functools.cache
def load() -> frozenset[str]:
    """The available ones of "marlin" and "triton"."""
    folder, found = engines.folder(), set()
    if folder is None or "vllm" not in engines.load():
        return frozenset()
    if (library := folder / "vllm_moe.so").exists():
        torch.ops.load_library(library)
        found.add("marlin")
    if (folder / "fused_moe.py").exists():
        found.add("triton")
    return frozenset(found)


def contenders(x: Tensor, n: int, experts: int, routings: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Contender]:
    """x: bfloat16 [S, K]; routings: for each row of y, sorted by expert, its row of x, and the experts' end offsets."""
    tokens, k = x.shape
    top_k = len(routings[0][0]) // tokens
    if "marlin" in load() and k % engines.GROUP == n % engines.GROUP == 0:
        block = next((b for b in (8, 16, 32, 48) if tokens * top_k / experts / b < 0.9), 64)
        turns = [tiles(*routing, top_k, block) for routing in routings]
        yield MARLIN, turns, functools.partial(_marlin, x, block, top_k)
    if "triton" in load():
        for name, dtype in ((TRITON_BF16, ""), (TRITON_FP8, ",dtype=fp8_w8a8")):
            config = config_of(tokens, experts, n // 2, dtype)
            alone = tokens * top_k * 4 <= experts
            turns = [tiles(*routing, top_k, config["BLOCK_SIZE_M"], alone) for routing in routings]
            yield name, turns, functools.partial(_triton, x, config, top_k)


def tiles(index: Tensor, ends: Tensor, top_k: int, block: int, alone: bool = False) -> Tiles:
    """Every expert's slots in tiles of ``block``; ``alone``: one tile per slot, if few experts have several."""
    rows, experts, device = len(index), len(ends), index.device
    order = torch.arange(rows, device=device)
    expert = torch.searchsorted(ends, order, right=True)
    slot = torch.empty_like(order)
    slot[index.argsort(stable=True)] = order
    if alone:
        owners = torch.empty_like(expert)
        owners[slot] = expert
        return Tiles(None, owners.int(), torch.tensor([rows * block], dtype=torch.int32, device=device))
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    of_expert = (counts + block - 1) // block
    begins = (of_expert.cumsum(0) - of_expert) * block
    most = rows + experts * (block - 1) if rows >= experts else rows * block
    slots = torch.full((most,), rows, dtype=torch.int32, device=device)
    slots[begins[expert] + order - (ends - counts)[expert]] = slot.int()
    owners = torch.zeros(-(-most // block), dtype=torch.int32, device=device)
    owners[: int(of_expert.sum())] = torch.arange(experts, device=device).repeat_interleave(of_expert).int()
    return Tiles(slots, owners, of_expert.sum(0, keepdim=True).mul(block).int())


def config_of(tokens: int, experts: int, n: int, dtype: str) -> Config:
    """vLLM's launch configuration of the Triton kernel, from its table for the GPU or its rule. n: the gate alone."""
    name = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else ""
    gpu = "NVIDIA_H200" if "H200" in name.split("_") else name
    folder = engines.folder()
    path = folder / "configs" / f"E={experts},N={n},device_name={gpu}{dtype}.json" if folder else None
    if path and path.exists():
        of_tokens = {int(m): config for m, config in json.loads(path.read_text()).items() if m.isdigit()}
        return dict(of_tokens[min(of_tokens, key=lambda m: abs(m - tokens))])
    return {
        "BLOCK_SIZE_M": 16 if tokens <= 32 else 32 if tokens <= 96 else 64 if tokens <= 512 else 128,
        "BLOCK_SIZE_N": 64 if tokens <= 64 else 128,
        "BLOCK_SIZE_K": 128 if dtype or tokens <= 64 else 64,
        "GROUP_SIZE_M": 16 if tokens // experts > 128 else 1,
        "num_warps": 4 if tokens <= 128 else 8,
        "num_stages": 4 if tokens <= 32 else 3,
    }


def kernel_source(text: str) -> str:
    """Extract the Triton kernel from fused_moe.py, which imports all of vLLM."""
    lines, parts = text.splitlines(), ["import triton", "import triton.language as tl"]
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in _KERNEL:
            parts += ["", "", *lines[node.decorator_list[0].lineno - 1 : node.end_lineno]]
    return "\n".join(parts) + "\n"


@functools.cache
def _kernel() -> Any:
    folder = engines.folder()
    assert folder is not None
    path = Path(tempfile.mkdtemp()) / "vllm_fused_moe_kernel.py"
    path.write_text(kernel_source((folder / "fused_moe.py").read_text()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_moe_kernel


@functools.cache
def _workspace() -> Tensor:
    return torch.zeros(4 * torch.cuda.get_device_properties().multi_processor_count, dtype=torch.int32, device="cuda")


def _marlin(x: Tensor, block: int, top_k: int, packed: Tensor, scales: Tensor, *routing: Tensor) -> Tensor:
    """packed: as many bytes as marlin's layout; scales: bfloat16, one per group of 128 columns."""
    (tokens, k), experts = x.shape, len(packed)
    n = packed.nbytes // experts * 2 // k
    y, nothing = x.new_empty(tokens * top_k, n), None
    weights = x.new_empty(tokens, top_k, dtype=torch.float32)
    of_weight = (
        packed.view(torch.int32).view(experts, k // 16, n * 2),
        nothing,
        scales.view(experts, k // engines.GROUP, n),
    )
    to = nothing, nothing, nothing, nothing, nothing, _workspace()
    sizes = block, top_k, False, engines.U4B8, tokens, n, k, True, False, True, False, -1, -1, -1
    out: Tensor = torch.ops._moe_C.moe_wna16_marlin_gemm(x, y, *of_weight, *to, *routing, weights, *sizes)
    return out


def _triton(x: Tensor, config: Config, top_k: int, weight: Tensor, *rest: Any) -> Tensor:
    """weight: bfloat16 [E, N, K]; or e4m3 and scales [E, N, 1]. A token's x is quantized by vLLM's own kernel."""
    import triton.language as tl

    *of_rows, slots, owners, rows = rest
    scales = of_rows[0] if of_rows else None
    tokens, block, n = len(x), config["BLOCK_SIZE_M"], weight.shape[1]
    y = x.new_empty(tokens, top_k, n)
    if scales is None:
        a, a_scale, strides = x, None, (0, 0, 0, 0, 0)
    else:
        a, a_scale = engines.fp8_rows(x)
        strides = (*a_scale.stride(), scales.stride(0), scales.stride(2), scales.stride(1))
    all_rows = tokens * top_k * block if slots is None else len(slots)
    if slots is not None and tokens < block:
        all_rows = min(all_rows, tokens * top_k * block)
    grid = (-(-all_rows // block) * -(-n // config["BLOCK_SIZE_N"]),)
    own = {name: config[name] for name in config if name != "SPLIT_K"}
    _kernel()[grid](
        *(a, weight, y, None, a_scale, scales, None, slots, owners, rows),
        *(n, x.shape[1], all_rows, tokens * top_k),
        *(*a.stride(), weight.stride(0), weight.stride(2), weight.stride(1), y.stride(1), y.stride(2)),
        *(*strides, 0, 0, 0, 0),
        naive_block_assignment=slots is None,
        SPLIT_K=1,
        MUL_ROUTED_WEIGHT=False,
        top_k=top_k,
        compute_type=tl.bfloat16,
        use_fp8_w8a8=scales is not None,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        per_channel_quant=scales is not None,
        HAS_BIAS=False,
        SWAP_AB=scales is not None and block < 64 and config["BLOCK_SIZE_N"] >= 64,
        **own,
    )
    return y.view(-1, n)
