// Capability queries on Gpu. No other file reads Gpu::compute_capability to select a kernel.
#pragma once

#include "qao/types.h"

namespace qao::gemm {

inline bool is_supported(const Gpu& gpu) { return gpu.compute_capability >= 80; }

// sm_90a code runs on Hopper only.
inline bool is_hopper(const Gpu& gpu) { return gpu.compute_capability == 90; }

// sm_90 code runs here, and on newer GPUs by JIT from PTX.
inline bool runs_sm90(const Gpu& gpu) { return gpu.compute_capability >= 90; }

// Native e4m3 mma.sync. sm_90 and sm_100 accept the instruction but emulate it by converting to float16.
inline bool has_fp8_mma(const Gpu& gpu) { return gpu.compute_capability == 89 || gpu.compute_capability >= 120; }

}  // namespace qao::gemm
