// LaneDot with `sdot`.
#pragma once

#include "cpu/arm/lane_dot.h"

namespace qao::cpu {
namespace {

struct Sdot {
  static int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t x) { return vdotq_s32(sum, w, x); }
};

}  // namespace
}  // namespace qao::cpu
