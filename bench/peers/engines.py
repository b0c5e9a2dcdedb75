"""Kernels of vLLM, SGLang and DeepGEMM on Hopper, from the libraries in their wheels.

They are not installed: ``QAO_BENCH_PEERS`` names a folder with vllm.so and sgl.so (vLLM's and sgl-kernel's extensions)
and deep_gemm/ (the package in vLLM's wheel). Missing files are skipped. Each peer takes bfloat16 x and quantizes it
with its own kernel.
"""

from __future__ import annotations

import functools
import glob
import os
import sys
from collections.abc import Callable, Iterator
from ctypes import CDLL, RTLD_GLOBAL
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Made = tuple[Tensors, Callable[..., Tensor]]  # the weight in the peer's layout, and the GEMM

_E4M3 = torch.float8_e4m3fn
GROUP = 128
U4B8 = 4 << 8 | 8 << 17 | 1 << 50  # vLLM's id of uint4 with bias 8


def folder() -> Path | None:
    """The folder of the peers, if set."""
    name = os.environ.get("QAO_BENCH_PEERS")
    return Path(name) if name else None


@functools.cache
def load() -> frozenset[str]:
    """The available ones of "vllm", "sgl", "deep_gemm"."""
    if (peers := folder()) is None:
        return frozenset()
    for pattern in ("libnvrtc.so.1*", "libnccl.so.2"):  # must be loaded in the process
        found = [
            *glob.glob(f"{Path(torch.__file__).parent}/../nvidia/*/lib/{pattern}"),
            *glob.glob(f"/usr/local/cuda/lib64/{pattern}"),
        ]
        for path in sorted(found)[:1]:
            CDLL(path, mode=RTLD_GLOBAL)
    loaded = set()
    for name in ("vllm", "sgl"):
        if (library := peers / f"{name}.so").exists():
            torch.ops.load_library(library)
            loaded.add(name)
    if "vllm" in loaded and (peers / "deep_gemm").is_dir():
        sys.path.insert(0, str(peers))
        loaded.add("deep_gemm")
    return frozenset(loaded)


def int8(weight: Tensor, there: frozenset[str]) -> Iterator[tuple[str, Made]]:
    if "vllm" in there:
        yield "vLLM int8", (_rows(weight, torch.int8, 127), lambda x, q, s: _vllm_mm(_int8_rows(x), q, s))


def fp8(weight: Tensor, there: frozenset[str]) -> Iterator[tuple[str, Made]]:
    tensors = _rows(weight, _E4M3, 448)
    if "vllm" in there:
        yield "vLLM fp8", (tensors, lambda x, q, s: _vllm_mm(fp8_rows(x), q, s))
    if "sgl" in there:
        yield "SGLang fp8", (tensors, _sgl_mm)
    if "vllm" in there and weight.shape[1] % (2 * GROUP) == 0:  # crashes with an odd number of groups
        yield "vLLM fp8 x int4", _vllm_w4a8(weight)


def blocks(weight: Tensor, there: frozenset[str]) -> Iterator[tuple[str, Made]]:
    if "deep_gemm" in there and weight.shape[0] % 128 == weight.shape[1] % 128 == 0:
        yield "DeepGEMM", (_blocks(weight), _deep_gemm)


def four_bits(weight: Tensor, there: frozenset[str]) -> Iterator[tuple[str, Made]]:
    if "vllm" in there and weight.shape[1] % GROUP == 0:
        q, scales = _groups(weight)
        packed = torch.ops._C.machete_prepack_B(
            _eight_a_word(q + 8).t().contiguous().t(), torch.bfloat16, U4B8, torch.bfloat16
        )
        yield "vLLM machete", ((packed, scales.t().contiguous()), _machete)


def _rows(weight: Tensor, dtype: torch.dtype, most: float) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-8) / most
    scaled = weight.float() / scale
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale


def _blocks(weight: Tensor) -> Tensors:
    n, k = weight.shape
    tiles = weight.float().view(n // 128, 128, k // 128, 128)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-8) / 448
    return (tiles / scale).to(_E4M3).view(n, k), scale.view(n // 128, k // 128).contiguous()


def _groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -8 to 7 [N, K] and scales [N, K / GROUP]."""
    n, k = weight.shape
    groups = weight.float().view(n, k // GROUP, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-8).bfloat16().float()
    return (groups / scale).round_().clamp_(-8, 7).int().view(n, k), scale.view(n, k // GROUP).bfloat16()


def _eight_a_word(q: Tensor) -> Tensor:
    """Pack [N, K] into int32 [K / 8, N], the first of eight in the lowest bits."""
    n, k = q.shape
    eights = q.t().reshape(k // 8, 8, n)
    words = torch.zeros(k // 8, n, dtype=torch.int32, device=q.device)
    for i in range(8):
        words |= (eights[:, i] & 15).int() << 4 * i
    return words


def _int8_rows(x: Tensor) -> Tensors:
    q, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    torch.ops._C.dynamic_scaled_int8_quant(q, x, scale, None)
    return q, scale


def fp8_rows(x: Tensor) -> Tensors:
    q, scale = torch.empty_like(x, dtype=_E4M3), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)
    return q, scale


def _vllm_mm(x: Tensors, q: Tensor, scale: Tensor) -> Tensor:
    y = q.new_empty(x[0].shape[0], q.shape[0], dtype=torch.bfloat16)
    torch.ops._C.cutlass_scaled_mm(y, x[0], q.t(), x[1], scale, None)
    return y


def _sgl_mm(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    rounded, x_scale = torch.empty_like(x, dtype=_E4M3), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    torch.ops.sgl_kernel.sgl_per_token_quant_fp8(x, rounded, x_scale)
    y: Tensor = torch.ops.sgl_kernel.fp8_scaled_mm(rounded, q.t(), x_scale, scale, torch.bfloat16, None)
    return y


def _deep_gemm(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    import deep_gemm

    y = x.new_empty(x.shape[0], q.shape[0])
    deep_gemm.fp8_gemm_nt(_fp8_blocks(x), (q, scale), y)
    return y


def _fp8_blocks(x: Tensor) -> Tensors:
    m, k = x.shape
    rounded = torch.empty_like(x, dtype=_E4M3)
    x_scale = torch.empty_strided((m, k // 128), (1, (m + 3) // 4 * 4), dtype=torch.float32, device=x.device)
    torch.ops._C.per_token_group_fp8_quant(x, rounded, x_scale, 128, 1e-10, -448.0, 448.0, False, True, True)
    return rounded, x_scale


def deep_gemm_rows(index: Tensor, ends: Tensor, tile: int = 128) -> Tensors:
    """Routing for DeepGEMM's grouped GEMM, with rows padded to whole tiles per expert.

    Returns the row of x for each row, and the expert of each row.
    """
    begin, rows, experts = 0, [], []
    for expert, end in enumerate(ends.tolist()):
        count = -(-(end - begin) // tile) * tile
        rows.append(torch.nn.functional.pad(index[begin:end], (0, count - (end - begin))))
        experts += [expert] * count
        begin = end
    return torch.cat(rows), torch.tensor(experts, dtype=torch.int32, device=index.device)


def deep_gemm_experts(x: Tensor, rows: Tensor, owners: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Quantize the tokens, gather their rows, and run the grouped GEMM.

    x: bfloat16 [S, K]; rows, owners: of deep_gemm_rows(); weight: e4m3 [E, N, K]; scales: float32 [E, N/128, K/128].
    """
    import deep_gemm

    rounded, x_scale = _fp8_blocks(x)
    gathered = rounded.view(torch.uint8)[rows].view(_E4M3), x_scale.t().index_select(1, rows).t()
    y = torch.empty(len(rows), weight.shape[1], dtype=torch.bfloat16, device=weight.device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(gathered, (weight, scales), y, owners)
    return y


def _machete(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    nothing: Any = None
    y: Tensor = torch.ops._C.machete_mm(x, packed, U4B8, nothing, scales, nothing, GROUP, nothing, nothing, nothing)
    return y


def _vllm_w4a8(weight: Tensor) -> Made:
    q, scales = _groups(weight)
    packed = torch.ops._C.cutlass_encode_and_reorder_int4b(_eight_a_word(q).t().contiguous().t())
    row = scales.float().amax(1, keepdim=True) / 448
    of_groups = ((scales.float() / row).to(_E4M3).float() / 8).to(_E4M3)
    tensors = packed, torch.ops._C.cutlass_pack_scale_fp8(of_groups.t().contiguous()), row * 8

    def mm(x: Tensor, *weight: Tensor) -> Tensor:
        rounded, x_scale = fp8_rows(x)
        y: Tensor = torch.ops._C.cutlass_w4a8_mm(rounded, weight[0], weight[1], GROUP, weight[2], x_scale, None, None)
        return y

    return tensors, mm
