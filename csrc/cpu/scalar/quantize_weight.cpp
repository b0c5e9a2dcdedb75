// Quantization of weight groups in plain C++: sixteen lanes that the compiler may vectorize.
#include "cpu/quantize_group.h"

namespace qao::cpu {
namespace {

struct Plain {
  float v[kLanes];
  static Plain all(float value) {
    Plain lanes;
    for (float& lane : lanes.v) lane = value;
    return lanes;
  }
  static Plain load(const float* values) {
    Plain lanes;
    std::memcpy(lanes.v, values, sizeof lanes.v);
    return lanes;
  }
};

template <typename Each>
inline Plain each(const Plain& a, const Plain& b, const Each& of) {
  Plain lanes;
  for (int i = 0; i < kLanes; ++i) lanes.v[i] = of(a.v[i], b.v[i]);
  return lanes;
}

Plain add(const Plain& a, const Plain& b) {
  return each(a, b, [](float x, float y) { return x + y; });
}
Plain sub(const Plain& a, const Plain& b) {
  return each(a, b, [](float x, float y) { return x - y; });
}
Plain mul(const Plain& a, const Plain& b) {
  return each(a, b, [](float x, float y) { return x * y; });
}
Plain div(const Plain& a, const Plain& b) {
  return each(a, b, [](float x, float y) { return x / y; });
}
Plain least(const Plain& a, const Plain& b) {
  return each(a, b, [](float x, float y) { return x < y ? x : y; });
}
Plain largest(const Plain& a, const Plain& b) {
  return each(a, b, [](float x, float y) { return x > y ? x : y; });
}
float lowest_of(const Plain& lanes) {
  float lowest = lanes.v[0];
  for (float lane : lanes.v) lowest = lane < lowest ? lane : lowest;
  return lowest;
}
float sum_of(Plain lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes.v[i] += lanes.v[i + half];
  }
  return lanes.v[0];
}
void to_bytes(const Plain& lanes, uint8_t (&bytes)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<uint8_t>(float_to_bits(lanes.v[i]));
}

}  // namespace

const GroupKernels scalar::kGroups = group_kernels<Plain>;

}  // namespace qao::cpu
