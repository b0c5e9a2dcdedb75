// Hadamard rotation of a row of floats, in vectors of the includer's instruction set.
// Nothing here has external linkage: see numeric.h.
#pragma once

#include <climits>
#include <cstring>
#include <utility>

#include "qao/quantize.h"

namespace qao::cpu {
namespace {

// g++ does not shuffle vectors with a size that depends on the enclosing class.
template <int kLanes>
struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef int Ints __attribute__((vector_size(4 * kLanes)));
};

template <int kLanes>
struct Lanes {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;
  Floats v;

  // Sums and differences of elements kStep, 2 kStep, ... apart.
  template <int kStep>
  __attribute__((always_inline)) void mix() {
    if constexpr (kStep < kLanes) {
      mix_at<kStep>(std::make_integer_sequence<int, kLanes>());
      mix<2 * kStep>();
    }
  }

 private:
  template <int kStep, int... kLane>
  __attribute__((always_inline)) void mix_at(std::integer_sequence<int, kLane...>) {
    const Ints neighbours = {(kLane ^ kStep)...}, signs = {((kLane & kStep) != 0 ? INT_MIN : 0)...};
    v = __builtin_shuffle(v, neighbours) + reinterpret_cast<Floats>(reinterpret_cast<Ints>(v) ^ signs);
  }
};

template <int kLanes, int kBlock>
void rotate_blocks(float* values, int64_t count) {
  constexpr int kVectors = kBlock / kLanes;
  constexpr float kFactor = quantize::hadamard_factor(kBlock);
  for (int64_t k = 0; k < count; k += kBlock) {
    Lanes<kLanes> lanes[kVectors];
#pragma GCC unroll 64
    for (int i = 0; i < kVectors; ++i) {
      std::memcpy(&lanes[i].v, values + k + i * kLanes, sizeof lanes[i].v);
      lanes[i].template mix<1>();
    }
#pragma GCC unroll 8
    for (int step = 1; step < kVectors; step *= 2) {
#pragma GCC unroll 64
      for (int i = 0; i < kVectors; ++i) {
        if ((i & step) != 0) continue;
        const auto low = lanes[i].v, high = lanes[i + step].v;
        lanes[i].v = low + high, lanes[i + step].v = low - high;
      }
    }
#pragma GCC unroll 64
    for (int i = 0; i < kVectors; ++i) {
      lanes[i].v *= kFactor;
      std::memcpy(values + k + i * kLanes, &lanes[i].v, sizeof lanes[i].v);
    }
  }
}

// QuantizeKernels::rotate.
template <int kLanes>
void rotate_row(float* values, int64_t count, int rotation) {
  if (rotation == 16) return rotate_blocks<kLanes, 16>(values, count);
  if (rotation == 32) return rotate_blocks<kLanes, 32>(values, count);
  if (rotation == 64) return rotate_blocks<kLanes, 64>(values, count);
  if (rotation == 128) return rotate_blocks<kLanes, 128>(values, count);
  return rotate_blocks<kLanes, 256>(values, count);
}

}  // namespace
}  // namespace qao::cpu
