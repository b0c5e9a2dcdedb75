// LaneDot with 16-bit products.
#pragma once

#include "cpu/arm/lane_dot.h"

namespace qao::cpu {
namespace {

struct Nibbles {  // w is at most 15: two products fit 16 bits
  static int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
  }
};

struct Bytes {  // sums land in other lanes, which are all added at the end
  static int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t x) {
    sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(w), vget_low_s8(x)));
    return vpadalq_s16(sum, vmull_high_s8(w, x));
  }
};

}  // namespace
}  // namespace qao::cpu
