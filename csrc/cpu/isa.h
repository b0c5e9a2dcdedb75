// Which instruction set the CPU kernels use: the best this CPU and its OS offer, or the one QAO_CPU_ISA names.
#pragma once

#include <string>

#include "qao/status.h"

namespace qao::cpu {

// Each level includes the ones before it. kAvx512 asks for F, BW, DQ, VL, VNNI and VBMI (Ice Lake, Zen 4 and newer);
// kAvx512Bf16 adds AVX512_BF16; kAmx adds AMX-TILE and AMX-BF16 and the OS's permission to use tiles.
enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

const char* name_of(Isa isa);  // "scalar", "avx2", "avx512", "avx512_bf16", "amx"

// What a kernel is called and what multiplies in it, for reports.
struct KernelName {
  const char* name;
  const char* instruction;
};

Isa detected_isa();
// The level in use: QAO_CPU_ISA if set, read once; an unknown or unavailable name is an error, never a silent fallback.
Status selected_isa(Isa* isa);

}  // namespace qao::cpu
