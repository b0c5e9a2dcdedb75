// Quantization of one group of a weight on a CPU.
// These are the platform functions that qao/quantize_group.h and qao/quantize_fp4_group.h require. The `Lanes` of an
// instruction set must provide to_bytes(lanes, bytes). Nothing here has external linkage: see numeric.h.
#pragma once

#include <cstring>

#include "cpu/numeric.h"
#include "cpu/quantize_kernels.h"
#include "qao/quantize_fp4_group.h"
#include "qao/quantize_group.h"

namespace qao::cpu {

using groups::kLanes;

namespace {

struct GroupPlace {
  static float rounded_to(DType dtype, float value) {
    if (dtype == DType::kFloat32) return value;
    return dtype == DType::kBFloat16 ? from_bf16(to_bf16(value)) : from_fp16(to_fp16(value));
  }
  static const float* first_lanes(int64_t count) {
    static const float lanes[2 * kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    return count < kLanes ? lanes + kLanes - count : lanes;
  }
  template <typename Lanes>
  static void put_bytes(const Lanes& lanes, uint8_t* q, int64_t count) {
    uint8_t bytes[kLanes];
    to_bytes(lanes, bytes);
    std::memcpy(q, bytes, static_cast<size_t>(count));
  }
  static float to_e4m3(float value) { return from_fp8(to_fp8(value)); }
  static void put_signs(const float* values, uint8_t* q, int64_t count) {
    for (int64_t i = 0; i < count; ++i) q[i] |= static_cast<uint8_t>(float_to_bits(values[i]) >> 28 & 8);
  }
};

template <typename Lanes>
constexpr GroupKernels group_kernels = {groups::quantize_group<Lanes, GroupPlace>,
                                        groups::quantize_fp4_group<Lanes, GroupPlace>};

}  // namespace
}  // namespace qao::cpu
