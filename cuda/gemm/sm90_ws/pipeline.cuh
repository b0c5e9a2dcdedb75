// Pipeline of TMA loads: the ring of stages and the position of a role in it.
#pragma once

#include <cstdint>

#include "gemm/sm90_ws/kernel_traits.h"

namespace qao::gemm::sm90_ws {

// A stage has three mbarriers and a word that flags scales with a rest (RowScale).
template <typename K>
struct Ring {
  uint32_t data;  // shared address
  int stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t address() const { return data + stage * K::kStage.bytes; }
  __device__ __forceinline__ uint32_t arrived() const { return data + K::kStage.barriers + stage * 8; }
  __device__ __forceinline__ uint32_t released() const { return arrived() + kBarrierBytes; }
  __device__ __forceinline__ uint32_t scales_arrived() const { return arrived() + 2 * kBarrierBytes; }
  __device__ __forceinline__ uint32_t rest() const { return arrived() + 3 * kBarrierBytes; }
  __device__ __forceinline__ void advance() {
    if (++stage == K::kStage.count) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(int stages) {  // any number
    stage += stages;
    parity ^= stage / K::kStage.count & 1;
    stage %= K::kStage.count;
  }
  __device__ __forceinline__ void advance(int stages) {  // at most the number of stages
    stage += stages;
    if (stage >= K::kStage.count) stage -= K::kStage.count, parity ^= 1;
  }
};

}  // namespace qao::gemm::sm90_ws
