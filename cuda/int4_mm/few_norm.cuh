// RMSNorm on the way of x to few.cuh's shared memory: what x is multiplied by is RMSNorm(x + residual) * norm_weight.
//
// Every CTA makes all of it: shared memory gets (x + residual) * norm_weight, and 1 / sqrt(mean of squares + eps), one
// factor a token, multiplies the sums at the end. So nothing waits for a row to be complete.
#pragma once

#include "common/quantize.cuh"
#include "int4_mm/decode_common.cuh"
#include "int4_mm/few.h"
#include "int4_mm/kernels.h"

namespace qao::int4_mm::few {

// In shared memory: kFewTokens factors, then a sum of squares for every unit, a token's columns of a K-step.
struct Factors {
  uint32_t base;
  __device__ __forceinline__ float of(int token) const {
    return __uint_as_float(ptx::load_shared_word(base + token * 4));
  }
  __device__ __forceinline__ uint32_t squares(int unit) const { return base + (kFewTokens + unit) * 4; }

  // By a warp, when the squares of the token are there. NaN where float32 does not hold them: repair() sees to those.
  __device__ __forceinline__ void make(const Params& p, int steps, int token) const {
    const int lane = threadIdx.x % 32;
    float sum = 0;
    for (int step = lane; step < steps; step += 32) {
      sum += __uint_as_float(ptx::load_shared_word(squares(token * steps + step)));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    const float mean = __fdividef(sum, p.k) + p.eps;
    if (lane == 0) ptx::store_shared_float(base + token * 4, mean > 0x1p-100f && mean < 0x1p100f ? rsqrtf(mean) : NAN);
  }
};

// The unit of a thread, eight columns of it: sixteen threads have one.
template <int threads>
class NormedX {
 public:
  using Vector = quantize::Packed<DType::kBFloat16>;
  static constexpr int kBatch = 2, kUnitsAtOnce = threads / 16;

  __device__ __forceinline__ NormedX(const Params& params, const FewParams& few) : p(params), d(few) {}

  // Before the wait: addresses alone.
  __device__ __forceinline__ void seek(int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      unit_[i] = first + i * kUnitsAtOnce, step_[i] = unit_[i], token_[i] = 0;
      while (step_[i] >= d.steps) step_[i] -= d.steps, ++token_[i];
      const int column = step_[i] * kStepColumns + threadIdx.x % 16 * 8;
      from_[i] = address(p.x, token_[i] * p.x_stride + column);
      residual_from_[i] = address(p.residual, token_[i] * p.residual_stride + column);
      weight_from_[i] = address(p.norm_weight, column);
    }
  }
  __device__ __forceinline__ void load() {
    constexpr int kAll = quantize::kVector;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (token_[i] >= d.tokens) continue;
      x_[i].template load<true>(from_[i], 0, kAll);
      if (p.residual != nullptr) residual_[i].template load<true>(residual_from_[i], 0, kAll);
      if (p.norm_weight != nullptr) weight_[i].template load<true, true>(weight_from_[i], 0, kAll);
    }
  }
  __device__ __forceinline__ void store(uint32_t shared, const Factors& factors) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool exists = token_[i] < d.tokens;
      float squares = 0;
      if (exists) {
        if (p.residual != nullptr) x_[i].add(residual_[i]);
        if (blockIdx.x == 0) {
          x_[i].template store<true>(static_cast<__nv_bfloat16*>(p.sum) + static_cast<int64_t>(token_[i]) * p.k,
                                     column(i), p.k);
        }
        float value[quantize::kVector], weight[quantize::kVector];
        x_[i].unpack(value);
        weight_[i].unpack(weight);
#pragma unroll
        for (int c = 0; c < quantize::kVector; ++c) {
          squares = fmaf(value[c], value[c], squares);
          if (p.norm_weight != nullptr) value[c] *= weight[c];
        }
        Vector product;
        product.pack(value);
        const uint4 v = product.part[0];
        ptx::store_shared_16(shared + (step_[i] * d.tokens + token_[i]) * kTokenBytes + threadIdx.x % 16 * 16,
                             {scale_x(v.x), scale_x(v.y), scale_x(v.z), scale_x(v.w)});
      }
#pragma unroll
      for (int distance = 8; distance > 0; distance /= 2) squares += __shfl_xor_sync(kAllLanes, squares, distance);
      if (exists && threadIdx.x % 16 == 0) ptx::store_shared_float(factors.squares(unit_[i]), squares);
    }
  }

 private:
  static __device__ __forceinline__ const uint8_t* address(const void* data, int64_t element) {
    return ptx::opaque(static_cast<const uint8_t*>(data) + element * 2);
  }
  __device__ __forceinline__ int column(int i) const { return step_[i] * kStepColumns + threadIdx.x % 16 * 8; }

  const Params& p;
  const FewParams& d;
  int unit_[kBatch], step_[kBatch], token_[kBatch];
  const uint8_t *from_[kBatch], *residual_from_[kBatch], *weight_from_[kBatch];
  Vector x_[kBatch], residual_[kBatch], weight_[kBatch];
};

// A token of x, given or normed, for exact(): by a warp, a value at a time.
class FewX {
 public:
  __device__ __forceinline__ FewX(const Params& params, int token) : p(params), token_(token) {
    if (p.sum == nullptr) return;
    double squares = 0;
    for (int k = threadIdx.x % 32; k < p.k; k += 32) squares += static_cast<double>(sum(k)) * sum(k);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(kAllLanes, squares, distance);
    factor_ = 1 / sqrt(squares / p.k + p.eps);
  }
  __device__ __forceinline__ float operator()(int k) const {
    if (p.sum == nullptr) return sum(k);
    const float weight = p.norm_weight == nullptr ? 1 : load_float(p.norm_weight, k, DType::kBFloat16);
    return static_cast<float>(sum(k) * factor_) * weight;
  }

 private:
  __device__ __forceinline__ float sum(int k) const {
    const float x = load_float(p.x, token_ * p.x_stride + k, DType::kBFloat16);
    if (p.residual == nullptr) return x;
    return __bfloat162float(
        __float2bfloat16_rn(x + load_float(p.residual, token_ * p.residual_stride + k, DType::kBFloat16)));
  }

  const Params& p;
  int token_;
  double factor_ = 1;
};

}  // namespace qao::int4_mm::few
