// What a GPU's compute capability says: the only place that asks for one.
#pragma once

#include "qao/types.h"

namespace qao::mm {

inline bool is_supported(const Gpu& gpu) { return gpu.compute_capability >= 80; }

// Code for sm_90a runs here and nowhere else.
inline bool is_hopper(const Gpu& gpu) { return gpu.compute_capability == 90; }

// Code for sm_90 runs here, on newer GPUs as PTX.
inline bool runs_sm90(const Gpu& gpu) { return gpu.compute_capability >= 90; }

// mma.sync multiplies e4m3; sm_90 and sm_100 only accept the instruction and widen to float16 themselves.
inline bool has_fp8_mma(const Gpu& gpu) { return gpu.compute_capability == 89 || gpu.compute_capability >= 120; }

}  // namespace qao::mm
