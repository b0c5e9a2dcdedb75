// CPU features of this machine, and the subset that kernels may use.
// The subset is all of them, or those of the level named by QAO_CPU_ISA.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "qao/status.h"

namespace qao::cpu {

// A set of features, one bit each.
using Features = uint32_t;

enum Feature : Features {
  kHasAvx2 = 1u << 0,
  kHasFma = 1u << 1,
  kHasF16c = 1u << 2,
  kHasAvxVnni = 1u << 3,
  kHasAvx512F = 1u << 4,
  kHasAvx512Bw = 1u << 5,
  kHasAvx512Dq = 1u << 6,
  kHasAvx512Vl = 1u << 7,
  kHasAvx512Vbmi = 1u << 8,
  kHasAvx512Vnni = 1u << 9,
  kHasAvx512Bf16 = 1u << 10,
  kHasAmxTile = 1u << 11,  // including the OS's permission to use tiles
  kHasAmxInt8 = 1u << 12,
  kHasAmxBf16 = 1u << 13,

  kHasAsimd = 1u << 24,  // aarch64
  kHasAsimdDp = 1u << 25,
  kHasI8mm = 1u << 26,
  kHasBf16 = 1u << 27,
};

// Features that the files of each folder are compiled for, and that their kernels require. CMakeLists.txt has them as
// flags.
constexpr Features kScalar = 0;
constexpr Features kAvx2 = kHasAvx2 | kHasFma | kHasF16c;
constexpr Features kAvxVnni = kAvx2 | kHasAvxVnni;
constexpr Features kAvx512 =
    kAvx2 | kHasAvx512F | kHasAvx512Bw | kHasAvx512Dq | kHasAvx512Vl | kHasAvx512Vbmi | kHasAvx512Vnni;
constexpr Features kAvx512Bf16 = kAvx512 | kHasAvx512Bf16;
constexpr Features kAmx = kAvx512Bf16 | kHasAmxTile | kHasAmxInt8 | kHasAmxBf16;
constexpr Features kNeon = kHasAsimd;
constexpr Features kNeonDotprod = kNeon | kHasAsimdDp;
constexpr Features kNeonI8mm = kNeonDotprod | kHasI8mm;
constexpr Features kNeonBf16 = kNeonI8mm | kHasBf16;

static constexpr bool includes(Features all, Features some) { return (all & some) == some; }

// A value of QAO_CPU_ISA.
struct Level {
  const char* name;
  Features features;
};
std::span<const Level> levels();             // of this architecture, in ascending order
const Level& highest_level(Features offer);  // the last one that is a subset of `offer`
std::string names_of(Features features);     // as in /proc/cpuinfo, separated by spaces

Features detect_features();    // queries the CPU and the OS: detect.cpp of the architecture
Features detected_features();  // cached
// The features in use, read once from QAO_CPU_ISA. An unknown or unavailable name is an error: there is no silent
// fallback.
Status selected_features(Features* features);

}  // namespace qao::cpu
