// Quantization of weight groups with NEON: sixteen lanes in four registers.
#include <arm_neon.h>

#include "cpu/quantize_group.h"

namespace qao::cpu {
namespace {

constexpr int kRegisters = kLanes / 4;

struct Four {
  float32x4_t v[kRegisters];
  static Four all(float value) {
    const float32x4_t v = vdupq_n_f32(value);
    return {v, v, v, v};
  }
  static Four load(const float* values) {
    return {vld1q_f32(values), vld1q_f32(values + 4), vld1q_f32(values + 8), vld1q_f32(values + 12)};
  }
};

template <typename Each>
inline Four each(const Four& a, const Four& b, const Each& of) {
  return {of(a.v[0], b.v[0]), of(a.v[1], b.v[1]), of(a.v[2], b.v[2]), of(a.v[3], b.v[3])};
}

Four add(const Four& a, const Four& b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); });
}
Four sub(const Four& a, const Four& b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vsubq_f32(x, y); });
}
Four mul(const Four& a, const Four& b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); });
}
Four div(const Four& a, const Four& b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vdivq_f32(x, y); });
}
// Returns b if either is NaN, like the scalar code.
Four least(const Four& a, const Four& b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); });
}
Four largest(const Four& a, const Four& b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); });
}
float lowest_of(const Four& lanes) {
  float values[kLanes];
  for (int i = 0; i < kRegisters; ++i) vst1q_f32(values + 4 * i, lanes.v[i]);
  float lowest = values[0];
  for (float lane : values) lowest = lane < lowest ? lane : lowest;
  return lowest;
}
float sum_of(const Four& lanes) {  // halves added to halves, in the order of all instruction sets
  const float32x4_t four = vaddq_f32(vaddq_f32(lanes.v[0], lanes.v[2]), vaddq_f32(lanes.v[1], lanes.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
void to_bytes(const Four& lanes, uint8_t (&bytes)[kLanes]) {
  const auto halves = [](float32x4_t a, float32x4_t b) {
    return vcombine_u16(vmovn_u32(vreinterpretq_u32_f32(a)), vmovn_u32(vreinterpretq_u32_f32(b)));
  };
  vst1q_u8(bytes, vcombine_u8(vmovn_u16(halves(lanes.v[0], lanes.v[1])), vmovn_u16(halves(lanes.v[2], lanes.v[3]))));
}

}  // namespace

const GroupKernels neon::kGroups = group_kernels<Four>;

}  // namespace qao::cpu
