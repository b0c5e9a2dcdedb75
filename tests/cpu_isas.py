"""Values of QAO_CPU_ISA on this architecture, from few features to many."""

from __future__ import annotations

import os
import platform

import torch

# Flags in /proc/cpuinfo required for each level (csrc/cpu/features.h).
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi")
AVX512_BF16 = (*AVX512, "avx512_bf16")
X86_FLAGS: dict[str, tuple[str, ...]] = {
    "scalar": (),
    "avx2": AVX2,
    "avx_vnni": (*AVX2, "avx_vnni"),
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
    "amx": (*AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"),
}
ARM_FLAGS: dict[str, tuple[str, ...]] = {
    "scalar": (),
    "neon": ("asimd",),
    "neon_dotprod": ("asimd", "asimddp"),
    "neon_i8mm": ("asimd", "asimddp", "i8mm"),
    "neon_bf16": ("asimd", "asimddp", "i8mm", "bf16"),
}
ISA_FLAGS = ARM_FLAGS if platform.machine() == "aarch64" else X86_FLAGS


def runs_amx() -> bool:
    """Whether this process has AMX and is not limited to less."""
    return torch.cpu._is_amx_tile_supported() and os.environ.get("QAO_CPU_ISA", "amx") == "amx"
