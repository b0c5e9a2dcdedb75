"""The instruction sets that QAO_CPU_ISA may name on this architecture, from few features to many."""

from __future__ import annotations

import platform

# What /proc/cpuinfo must list for each level, beyond the levels before it (csrc/cpu/features.h).
X86_FLAGS = {
    "scalar": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi"),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
}
ARM_FLAGS = {
    "scalar": (),
    "neon": ("asimd",),
    "neon_dotprod": ("asimddp",),
    "neon_i8mm": ("i8mm",),
    "neon_bf16": ("bf16",),
}
ISA_FLAGS = ARM_FLAGS if platform.machine() == "aarch64" else X86_FLAGS
