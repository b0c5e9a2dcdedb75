// Quantization with one scale per row, and producers that need complete rows (RMSNorm).
//
// A CTA keeps one row in registers between the range reduction and the rounding.
//
//   load, producer  ->  range (and RMSNorm's sum of squares) over the CTA  ->  round, store
//
// Longer rows are split into tiles; the last one stays in registers, the others are read again (from L2).
#pragma once

#include <cfloat>
#include <limits>

#include "quantize_activation/reduce.cuh"
#include "quantize_activation/vector.cuh"

namespace qao::quantize {

// Launch bounds by vectors per thread: threads per CTA, and CTAs per SM (0: unspecified). Both limit registers.
constexpr int max_threads(int vectors) { return vectors == 8 ? 384 : 1024; }
constexpr int min_ctas(int vectors) { return vectors == 8 ? 2 : 0; }
constexpr int kAll = std::numeric_limits<int>::max();  // columns

// Values are x, optionally rotated. All roundings support them; other producers are symmetric, without sums.
QAO_HOST_DEVICE constexpr bool is_plain(Producer producer) {
  return producer == Producer::kNone || producer == Producer::kHadamard;
}
// Each value depends on its own columns only, so that without rounding a row may be split across CTAs.
QAO_HOST_DEVICE constexpr bool is_local(Producer producer) {
  return producer != Producer::kNone && producer != Producer::kRmsNorm;
}

QAO_HOST_DEVICE constexpr bool is_gate(Producer producer) {
  return producer == Producer::kSiluMul || producer == Producer::kSwiglu;
}

// kFast: Params::aligned. Otherwise elements are loaded one by one.
template <DType dtype, Producer producer, int kVectors, bool kFast>
class Row {
 public:
  __device__ __forceinline__ Row(const Params& p)
      : p_(p),
        x_(static_cast<const char*>(p.x) + blockIdx.x * p.x_stride * size_of(dtype)),
        other_(static_cast<const char*>(p.other) + blockIdx.x * p.other_stride * size_of(dtype)) {}

  // Adjacent lanes hold adjacent eight columns. A thread's vectors are at a constant stride.
  __device__ __forceinline__ int column(int tile, int vector) const {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    return (((tile * warps + warp) * kVectors + vector) * 32 + static_cast<int>(threadIdx.x % 32)) * kVector;
  }

  // RMSNorm: adds h^2 to `squares`.
  __device__ __forceinline__ void load(int tile, float* squares) {
    if constexpr (producer == Producer::kSwiglu) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) load_gated(column(tile, v), product_[v]);
      return;
    }
    Packed<dtype> other[kVectors];
    const bool two = producer == Producer::kSiluMul || (producer == Producer::kRmsNorm && p_.other != nullptr);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) packed_[v].template load<kFast>(x_, column(tile, v), p_.k);
    if (two) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) other[v].template load<kFast>(other_, column(tile, v), p_.k);
    }
    if constexpr (producer == Producer::kHadamard) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        packed_[v].unpack(product_[v]);
        rotate(p_, product_[v]);
      }
    } else if constexpr (producer == Producer::kSiluMul) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float up[kVector];
        packed_[v].unpack(product_[v]);
        other[v].unpack(up);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          product_[v][i] = __fdividef(product_[v][i], 1 + expf(-product_[v][i])) * up[i];
        }
      }
    } else if constexpr (producer == Producer::kRmsNorm) {
      if (two) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) packed_[v].add(other[v]);
      }
      if (p_.sum != nullptr) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) packed_[v].template store<kFast>(sum_row(), column(tile, v), p_.k);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float weight[kVector], sum = 0;
        load_weight(column(tile, v), weight);
        packed_[v].unpack(product_[v]);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          sum = fmaf(product_[v][i], product_[v][i], sum);
          product_[v][i] *= weight[i];
        }
        *squares += sum;
      }
    }
  }

  // x, optionally rotated; gate * up; or h * norm_weight, before RMSNorm's factor.
  __device__ __forceinline__ void value(int v, float (&value)[kVector]) const {
    if constexpr (producer == Producer::kNone) {
      packed_[v].unpack(value);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] = product_[v][i];
    }
  }

  // Makes value() unpack again after this point: unpacked, x would take twice the registers.
  __device__ __forceinline__ void stay_packed() {
    if constexpr (producer == Producer::kNone) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) packed_[v].pin();
    }
  }

  // Sum of h^2, for values out of range of float32. Requires a barrier after load().
  __device__ __forceinline__ double squares_in_float64() const {
    const void* h = p_.other == nullptr ? x_ : sum_row();
    double squares = 0;
#pragma unroll 1
    for (int k = threadIdx.x; k < p_.k; k += blockDim.x) {
      const double x = load_float(h, k, dtype);
      squares += x * x;
    }
    return squares;
  }

 private:
  // kSwiglu. Gate and up are 0 past the end, and so is the result.
  __device__ __forceinline__ void load_gated(int column, float (&value)[kVector]) const {
    const Gate& gate = p_.gate;
    Packed<dtype> packed[2];
    float first[kVector], second[kVector];
    if (gate.interleaved) {
      packed[0].template load<kFast>(x_, 2 * column, 2 * p_.k);
      packed[1].template load<kFast>(x_, 2 * column + kVector, 2 * p_.k);
    } else {
      packed[0].template load<kFast>(x_, column, p_.k);
      packed[1].template load<kFast>(other_, column, p_.k);
    }
    packed[0].unpack(first), packed[1].unpack(second);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float g = first[i], u = second[i];
      if (gate.interleaved) {
        const auto at = [&](int k) { return k < kVector ? first[k] : second[k - kVector]; };
        g = at(2 * i), u = at(2 * i + 1);
      }
      g = g > gate.limit ? gate.limit : g;  // keeps NaN
      u = u > gate.limit ? gate.limit : u < -gate.limit ? -gate.limit : u;
      value[i] = __fdividef(g, 1 + expf(-gate.alpha * g)) * (u + gate.shift);
    }
  }
  // Ones without a norm_weight, and past the end, where h is 0.
  __device__ __forceinline__ void load_weight(int column, float (&weight)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) weight[i] = 1;
    if constexpr (kFast) {
      Packed<dtype> packed;
      packed.pack(weight);
      if (p_.norm_weight != nullptr && column < p_.k) packed.template load<true, true>(p_.norm_weight, column, p_.k);
      packed.unpack(weight);
    } else if (p_.norm_weight != nullptr) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (column + i < p_.k) weight[i] = load_float(p_.norm_weight, column + i, p_.norm_weight_dtype);
      }
    }
  }
  __device__ __forceinline__ char* sum_row() const {
    return static_cast<char*>(p_.sum) + int64_t{blockIdx.x} * p_.k * size_of(dtype);
  }

  const Params& p_;
  const char *x_, *other_;
  Packed<dtype> packed_[kVectors];    // x; used by kNone
  float product_[kVectors][kVector];  // used by other producers
};

// 1 / sqrt(mean) with float32 accuracy for any magnitude: splits off a power of four, so that the rest is in [1, 4).
__device__ __forceinline__ float inverse_root(double mean) {
  const int high = __double2hiint(mean), exponent = ((high >> 20) - 1023) & ~1;
  const float root = rsqrtf(static_cast<float>(__hiloint2double(high - (exponent << 20), __double2loint(mean))));
  const double power = __hiloint2double((1023 - exponent / 2) << 20, 0);
  return isnan(mean) ? NAN : static_cast<float>(root * power);
}

// Computes and stores the scale and zero point of the row.
__device__ __forceinline__ Rounding finish_range(const Params& p, const Target& target, const Range& range) {
  float scale;
  const Rounding rounding = rounding_of(range, target, &scale);
  if (threadIdx.x == 0) {
    p.scales[blockIdx.x] = scale;
    if (p.zeros != nullptr) p.zeros[blockIdx.x] = static_cast<int32_t>(rounding.zero);
  }
  return rounding;
}

// Sums of groups from the sums of their vectors, which are in adjacent lanes.
template <typename Row, int kVectors>
__device__ __forceinline__ void store_group_sums(const Params& p, const Row& row, int tile, float (&sum)[kVectors]) {
  const int lanes = p.group / kVector;
  sum_over_lanes(sum, lanes);
  if ((threadIdx.x & (lanes - 1)) != 0) return;
  float* sums = p.sums + blockIdx.x * static_cast<int64_t>(p.groups);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = row.column(tile, v);
    if (column < p.k) sums[column >> p.group_shift] = sum[v];
  }
}

// `target` repeats fields of `p` as constants. Past the end, values and their symmetric q are 0. Returns the sum of all
// q in units, if requested.
template <int kVectors, bool kProduct, bool kFast, typename Row>
__device__ __forceinline__ int64_t store_quantized(const Params& p, const Target& target, const Rounding& rounding,
                                                   const Row& row, int tile) {
  uint8_t* q = p.q + blockIdx.x * p.q_stride;
  uint2 word[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float value[kVector];
    row.value(v, value);
    word[v] = round_vector(target, rounding, value, row.column(tile, v));
  }
  int64_t row_sum = 0;
  if (!kProduct && p.sums != nullptr) {
    float sum[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = sum_of(target, word[v]);
    if (p.group == 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) row_sum += to_units(target, sum[v]);
    } else {
      store_group_sums(p, row, tile, sum);
    }
  }
  if (!kProduct && p.int4_tiles) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) word[v] = int4_tile_order(word[v]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) store_vector<kFast>(p, q, row.column(tile, v), word[v]);
  return row_sum;
}

template <DType dtype, int kVectors, bool kFast, typename Row>
__device__ __forceinline__ void store_values(const Params& p, float factor, const Row& row, int tile) {
  char* y = static_cast<char*>(p.y) + int64_t{blockIdx.x} * p.k * size_of(dtype);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float value[kVector];
    row.value(v, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) value[i] *= factor;
    Packed<dtype> packed;
    packed.pack(value);
    packed.template store<kFast>(y, row.column(tile, v), p.k);
  }
}

// With few rows, prefetches into L2 the inputs of RMSNorm that the previous kernel is least likely to have written. A
// hint: it does not affect the result of later loads.
template <DType dtype>
__device__ __forceinline__ void prefetch_norm(const Params& p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kFewRows = 16;
  if (gridDim.x > kFewRows || threadIdx.x != 0) return;
  const int bytes = p.k * static_cast<int>(size_of(dtype));
  if (blockIdx.x == 0 && p.norm_weight != nullptr) ptx::prefetch_l2(p.norm_weight, bytes);
  if (p.other != nullptr) {
    ptx::prefetch_l2(static_cast<const char*>(p.other) + blockIdx.x * p.other_stride * size_of(dtype), bytes);
  }
#endif
}

template <DType dtype, Producer producer, int kVectors, bool kFast>
__global__ void __launch_bounds__(max_threads(kVectors), min_ctas(kVectors))
    rows_kernel(const __grid_constant__ Params p) {
  // Wait for the previous kernel
  if constexpr (kFast && producer == Producer::kRmsNorm) prefetch_norm<dtype>(p);
  ptx::wait_then_launch_dependents();
  constexpr bool kProduct = !is_plain(producer), kNorm = producer == Producer::kRmsNorm;
  const bool quantized = producer == Producer::kNone || p.y == nullptr;
  Row<dtype, producer, kVectors, kFast> row(p);
  Partial part;
  if (is_local(producer) && !quantized) {  // one tile per CTA
    row.load(blockIdx.y, &part.squares);
    const bool scaled = is_gate(producer) && p.row_scale != nullptr;
    const float factor = scaled ? load_float(p.row_scale, blockIdx.x, p.row_scale_dtype) : 1;
    return store_values<dtype, kVectors, kFast>(p, factor, row, blockIdx.y);
  }
  // Load, and find the range
  for (int tile = p.tiles - 1; tile >= 0; --tile) {
    row.load(tile, &part.squares);
    if (!quantized) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float value[kVector];
      row.value(v, value);
      part.range.add(value, kProduct || p.symmetric);
    }
  }
  row.stay_packed();
  if (kNorm || quantized) part = reduce_over_cta<kNorm>(part);
  float factor = 1;
  if constexpr (kNorm) {
    factor = rsqrtf(__fdividef(part.squares, p.k) + p.eps);
    if (!(part.squares > 0x1p-100f && part.squares < 0x1p120f)) {
      factor = inverse_root(sum_over_cta(row.squares_in_float64()) * __frcp_rn(p.k) + p.eps);
    }
    part.range.scale(factor);  // rounding is monotonic, so this equals the range of the scaled values
  }
  Rounding rounding;
  if (quantized) rounding = finish_range(p, {p.fp8, kProduct || p.symmetric, p.k}, part.range);
  rounding.inverse = fminf(rounding.inverse * factor, FLT_MAX);  // for the unscaled values

  // Round and store
  int64_t row_sum = 0;
  for (int tile = 0; tile < p.tiles; ++tile) {
    float unused;
    if (tile > 0) row.load(tile, &unused);
    if (!quantized) {
      store_values<dtype, kVectors, kFast>(p, factor, row, tile);
    } else if (p.fp8) {
      row_sum += store_quantized<kVectors, kProduct, kFast>(p, {true, true, kAll}, rounding, row, tile);
    } else if (kProduct || p.symmetric) {
      row_sum += store_quantized<kVectors, kProduct, kFast>(p, {false, true, kAll}, rounding, row, tile);
    } else {
      row_sum += store_quantized<kVectors, kProduct, kFast>(p, {false, false, p.k}, rounding, row, tile);
    }
  }
  if (!kProduct && p.sums != nullptr && p.group == 0) {
    row_sum = sum_over_cta(row_sum);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = from_units(p, row_sum);
  }
}

}  // namespace qao::quantize
