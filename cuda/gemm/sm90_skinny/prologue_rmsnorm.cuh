// Prologue of smem_x.cuh: loads x to shared memory, plain or through RMSNorm.
// The layout is [K-step][token][kTokenBytes], scaled bfloat16.
//
// With RMSNorm the GEMM's input is RMSNorm(x + residual) * norm_weight. Every CTA computes all of it. Shared memory
// holds (x + residual) * norm_weight; the sums are multiplied at the end by 1 / sqrt(mean of squares + eps), one factor
// per token. So the mainloop does not wait for complete rows.
#pragma once

#include "common/quantize.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/kernels.h"
#include "gemm/sm90_skinny/params.h"

namespace qao::gemm::sm90_skinny::smem {

// In shared memory: kSmemXTokens factors, then the sum of squares of each unit (a token's columns of one K-step).
struct Factors {
  uint32_t base;
  __device__ __forceinline__ float of(int token) const {
    return __uint_as_float(ptx::load_shared_word(base + token * 4));
  }
  __device__ __forceinline__ uint32_t squares(int unit) const { return base + (kSmemXTokens + unit) * 4; }

  // One warp computes the factor of a token from its sums of squares. NaN if float32 overflows or underflows: repair()
  // recomputes those.
  __device__ __forceinline__ void make(const Params& p, int steps, int token) const {
    const int lane = threadIdx.x % 32;
    float sum = 0;
    for (int step = lane; step < steps; step += 32) {
      sum += __uint_as_float(ptx::load_shared_word(squares(token * steps + step)));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    const float mean = __fdividef(sum, p.k) + p.norm.eps;
    if (lane == 0) ptx::store_shared_float(base + token * 4, mean > 0x1p-100f && mean < 0x1p100f ? rsqrtf(mean) : NAN);
  }
};

// Sixteen threads copy a unit, a token's columns of one K-step. Each thread copies eight columns of several units at
// once.
template <typename T, int threads, int batch>
struct Units {
  static constexpr int kAtOnce = batch * threads / 16;

  __device__ __forceinline__ Units(const Params& params, const SmemXParams& few, uint32_t base)
      : p(params), d(few), shared(base) {}
  // Sets the batch that begins with unit `first`.
  __device__ __forceinline__ void seek(int first) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      step[i] = first + i * (threads / 16), token[i] = 0;
      while (step[i] >= d.steps) step[i] -= d.steps, ++token[i];
    }
  }
  __device__ __forceinline__ bool exists(int i) const { return token[i] < d.tokens; }
  __device__ __forceinline__ int column(int i) const { return step[i] * kStepColumns + threadIdx.x % 16 * 8; }
  // An address for load(), computed before the PDL wait ends.
  static __device__ __forceinline__ const uint8_t* address(const void* data, int64_t element) {
    return ptx::opaque(static_cast<const uint8_t*>(data) + element * 2);
  }
  __device__ __forceinline__ void store(int i, uint4 v) const {
    const auto scaled = [](uint32_t pair) { return std::is_same_v<T, __half> ? pair : scale_x(pair); };
    ptx::store_shared_16(shared + (step[i] * d.tokens + token[i]) * kTokenBytes + threadIdx.x % 16 * 16,
                         {scaled(v.x), scaled(v.y), scaled(v.z), scaled(v.w)});
  }

  const Params& p;
  const SmemXParams& d;
  const uint32_t shared;
  int step[batch], token[batch];
};

constexpr int kPlainBatch = 4;
template <typename T, int threads>
class PlainX : public Units<T, threads, kPlainBatch> {
 public:
  using Base = Units<T, threads, kPlainBatch>;
  using Base::Base, Base::p, Base::d, Base::step, Base::token;

  __device__ __forceinline__ void seek(int first) {
    Base::seek(first);
#pragma unroll
    for (int i = 0; i < kPlainBatch; ++i) from_[i] = this->address(p.x, token[i] * p.x_stride + this->column(i));
  }
  __device__ __forceinline__ void load() {
    const bool plain = p.x_aligned && d.steps * kStepColumns <= p.k;
#pragma unroll
    for (int i = 0; i < kPlainBatch; ++i) {
      if (!this->exists(i)) continue;
      value_[i] = plain ? *reinterpret_cast<const uint4*>(from_[i]) : load_slowly(from_[i], p.k - this->column(i));
    }
  }
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < kPlainBatch; ++i) {
      if (this->exists(i)) Base::store(i, value_[i]);
    }
  }

 private:
  // Loads any eight columns: zeros from `columns` on, no 16-byte alignment.
  static __device__ __noinline__ uint4 load_slowly(const uint8_t* from, int columns) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < columns) words[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(from)[i]} << (i % 2 * 16);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  const uint8_t* from_[kPlainBatch];
  uint4 value_[kPlainBatch];
};

// A batch of two made GEMMs without a norm, which run in this kernel too, up to 0.9 µs slower.
constexpr int kNormedBatch = 1;
template <int threads>
class NormedX : public Units<__nv_bfloat16, threads, kNormedBatch> {
 public:
  using Vector = quantize::Packed<DType::kBFloat16>;
  using Base = Units<__nv_bfloat16, threads, kNormedBatch>;
  using Base::Base, Base::p, Base::d, Base::step, Base::token;

  __device__ __forceinline__ void seek(int first) {
    Base::seek(first);
#pragma unroll
    for (int i = 0; i < kNormedBatch; ++i) {
      const int column = this->column(i);
      from_[i] = this->address(p.x, token[i] * p.x_stride + column);
      residual_from_[i] = this->address(p.norm.residual, token[i] * p.norm.residual_stride + column);
      weight_from_[i] = this->address(p.norm.weight, column);
    }
  }
  __device__ __forceinline__ void load() {
    constexpr int kAll = quantize::kVector;
#pragma unroll
    for (int i = 0; i < kNormedBatch; ++i) {
      if (!this->exists(i)) continue;
      x_[i].template load<true>(from_[i], 0, kAll);
      if (p.norm.residual != nullptr) residual_[i].template load<true>(residual_from_[i], 0, kAll);
      if (p.norm.weight != nullptr) weight_[i].template load<true, true>(weight_from_[i], 0, kAll);
    }
  }
  // All lanes of a warp must call this.
  __device__ __forceinline__ void store() {
    const Factors factors{this->shared + d.factors_offset};
#pragma unroll
    for (int i = 0; i < kNormedBatch; ++i) {
      float squares = 0;
      if (this->exists(i)) {
        if (p.norm.residual != nullptr) x_[i].add(residual_[i]);
        if (blockIdx.x == 0) {
          x_[i].template store<true>(static_cast<__nv_bfloat16*>(p.norm.sum) + static_cast<int64_t>(token[i]) * p.k,
                                     this->column(i), p.k);
        }
        float value[quantize::kVector], weight[quantize::kVector];
        x_[i].unpack(value);
        weight_[i].unpack(weight);
#pragma unroll
        for (int c = 0; c < quantize::kVector; ++c) {
          squares = fmaf(value[c], value[c], squares);
          if (p.norm.weight != nullptr) value[c] *= weight[c];
        }
        Vector product;
        product.pack(value);
        Base::store(i, product.part[0]);
      }
#pragma unroll
      for (int distance = 8; distance > 0; distance /= 2) squares += __shfl_xor_sync(kAllLanes, squares, distance);
      if (this->exists(i) && threadIdx.x % 16 == 0) {
        ptx::store_shared_float(factors.squares(token[i] * d.steps + step[i]), squares);
      }
    }
  }

 private:
  const uint8_t *from_[kNormedBatch], *residual_from_[kNormedBatch], *weight_from_[kNormedBatch];
  Vector x_[kNormedBatch], residual_[kNormedBatch], weight_[kNormedBatch];
};

// A token of x, plain or normalized, for exact(). One warp reads it one value at a time.
template <typename T>
class FewX {
 public:
  __device__ __forceinline__ FewX(const Params& params, int token) : p(params), token_(token) {
    if (p.norm.sum == nullptr) return;
    double squares = 0;
    for (int k = threadIdx.x % 32; k < p.k; k += 32) squares += static_cast<double>(sum(k)) * sum(k);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(kAllLanes, squares, distance);
    factor_ = 1 / sqrt(squares / p.k + p.norm.eps);
  }
  __device__ __forceinline__ float operator()(int k) const {
    if (p.norm.sum == nullptr) return sum(k);
    const float weight = p.norm.weight == nullptr ? 1 : load_float(p.norm.weight, k, DType::kBFloat16);
    return static_cast<float>(sum(k) * factor_) * weight;
  }

 private:
  __device__ __forceinline__ float sum(int k) const {
    const float x = load_float(p.x, token_ * p.x_stride + k, Half<T>::kDType);
    if (p.norm.residual == nullptr) return x;
    return __bfloat162float(
        __float2bfloat16_rn(x + load_float(p.norm.residual, token_ * p.norm.residual_stride + k, DType::kBFloat16)));
  }

  const Params& p;
  int token_;
  double factor_ = 1;
};

}  // namespace qao::gemm::sm90_skinny::smem
