// What this CPU and its OS offer, as a set of features, and the part of it that kernels may use: all, or the set of the
// level that QAO_CPU_ISA names.
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
  kHasAmxTile = 1u << 11,  // with the OS's permission to use tiles
  kHasAmxInt8 = 1u << 12,
  kHasAmxBf16 = 1u << 13,

  kHasAsimd = 1u << 24,  // aarch64
  kHasAsimdDp = 1u << 25,
  kHasI8mm = 1u << 26,
  kHasBf16 = 1u << 27,
};

// What the files of a folder are compiled for, and so what their kernels need (CMakeLists.txt has the same as flags).
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

// A name that QAO_CPU_ISA may have.
struct Level {
  const char* name;
  Features features;
};
std::span<const Level> levels();             // of this architecture, from few features to many
const Level& highest_level(Features offer);  // the last one that is part of `offer`
std::string names_of(Features features);     // as /proc/cpuinfo spells them, separated by spaces

Features detect_features();    // asks the CPU and the OS: detect.cpp of the architecture
Features detected_features();  // asked once
// The features in use, read once from QAO_CPU_ISA; a name that is unknown or not available is an error, never a silent
// fallback.
Status selected_features(Features* features);

}  // namespace qao::cpu
