// Weights of four bits. A warp has 16 rows and 128 columns, two tiles of the packed layout: lane 4 g + t reads of rows
// g and g + 8 the vectors of eight columns t, 4 + t, 8 + t and 12 + t, keeps them in registers until scales are known,
// and hands codes to the lanes that store them. Groups of up to 128 columns are the affair of a quad. Wider ones are
// that of a CTA, which reads again what its registers did not hold.
#include "common/check.h"
#include "common/integers.h"
#include "common/quantize.cuh"
#include "int4/layout.h"
#include "weight/load.cuh"
#include "weight/params.h"
#include "weight/quotient.cuh"

namespace qao::weight {
namespace {

using quantize::kVector;
using quantize::Packed;

constexpr int kUnit = 2 * int4::kTileK;        // columns of a warp
constexpr int kVectors = kUnit / kVector / 4;  // of a row and a lane
constexpr int kWarps = 4, kWideWarps = 8;
constexpr float kHighest = 15;
// As csrc/cpu/quantize_group.h, which says what they mean.
constexpr float kGridTolerance = 0x1p-4f, kWholeTolerance = 0x1p-12f, kLargestZero = 64;

__device__ __forceinline__ float rounded_to(DType dtype, float value) {
  if (dtype == DType::kFloat32) return value;
  return dtype == DType::kBFloat16 ? __bfloat162float(__float2bfloat16(value)) : __half2float(__float2half(value));
}

struct Bounds {
  float low = INFINITY, high = -INFINITY;
  __device__ __forceinline__ void add(float value) { low = fminf(low, value), high = fmaxf(high, value); }
  __device__ __forceinline__ void add(const Bounds& other) {
    low = fminf(low, other.low), high = fmaxf(high, other.high);
  }
  __device__ __forceinline__ void over_quad() {
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
      add(Bounds{__shfl_xor_sync(~0u, low, lane), __shfl_xor_sync(~0u, high, lane)});
    }
  }
};

struct Grid {
  float scale, zero;
};

__device__ __forceinline__ Grid search_none(const Params& p, const Bounds& bounds) {
  const float low = fminf(bounds.low, 0.0f), high = fmaxf(bounds.high, 0.0f);
  float scale = p.symmetric ? (-low >= high ? low : high) / -8.0f : __fdiv_rn(__fsub_rn(high, low), kHighest);
  scale = rounded_to(p.scale_dtype, fabsf(scale) < p.smallest ? p.smallest : scale);
  if (p.symmetric) return {scale, int4::kSymmetricZero};
  return {scale, fminf(fmaxf(rintf(__fdiv_rn(-low, scale)), 0.0f), kHighest)};
}

// What the group is if its values are sixteen steps from the lowest to the highest; scale 0: it is not, for sure.
__device__ __forceinline__ Grid sixteen_steps(const Params& p, const Bounds& bounds) {
  const float scale = rounded_to(p.scale_dtype, __fdiv_rn(__fsub_rn(bounds.high, bounds.low), kHighest));
  if (!(scale > p.smallest)) return {0, 0};
  const float zero = rounded_to(p.scale_dtype, __fdiv_rn(-bounds.low, scale));
  const bool maybe = fabsf(zero) < kLargestZero && fabsf(__fsub_rn(zero, rintf(zero))) >= kWholeTolerance;
  return maybe ? Grid{scale, zero} : Grid{0, 0};
}

__device__ __forceinline__ bool misses(float value, const Grid& grid, const Divisor& by) {
  const float steps = __fadd_rn(by.quotient(value), grid.zero);
  return !(fabsf(__fsub_rn(steps, fminf(fmaxf(rintf(steps), 0.0f), kHighest))) < kGridTolerance);
}

template <DType dtype>
struct Unit {
  Packed<dtype> vector[2][kVectors];  // rows g and g + 8
  int64_t first;                      // column of vector 0 of this lane

  __device__ __forceinline__ void load(const Params& p, int64_t row, int64_t first_column) {
    first = first_column + threadIdx.x % 4 * kVector;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* from = static_cast<const char*>(p.weight) + (row + 8 * r) * p.stride * size_of(dtype);
      const int columns = row + 8 * r < p.n ? static_cast<int>(p.k) : 0;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        load_vector<dtype>(vector[r][j], p, from, static_cast<int>(column(j)), columns);
      }
    }
  }
  __device__ __forceinline__ int64_t column(int j) const { return first + 4 * kVector * j; }

  // NaN if a value is not finite. Columns past K, which are 0, count as such.
  __device__ __forceinline__ float bounds(Bounds (&of)[2][kVectors]) {
    float poison = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float value[kVector];
        vector[r][j].unpack(value), vector[r][j].pin();
#pragma unroll
        for (int i = 0; i < kVector; ++i) of[r][j].add(value[i]), poison = fmaf(value[i], 0.0f, poison);
      }
    }
    return poison;
  }

  // Whether a value of vector j misses the grid; of its first value alone.
  __device__ __forceinline__ bool first_misses(int r, int j, const Grid& grid, const Divisor& by) const {
    float value[kVector];
    vector[r][j].unpack(value);
    return misses(value[0], grid, by);
  }
  __device__ __forceinline__ bool any_misses(int r, int j, const Grid& grid, const Divisor& by) const {
    float value[kVector];
    vector[r][j].unpack(value);
    bool any = false;
#pragma unroll
    for (int i = 0; i < kVector; ++i) any |= misses(value[i], grid, by);
    return any;
  }

  // Both tiles to `q`, grid_of(r, j) by vector.
  template <typename GridOf>
  __device__ __forceinline__ void store(const Params& p, int64_t row_tile, const GridOf& grid_of) const {
    const int64_t k_tiles = int4::tiles_k(p.k), first_tile = first / int4::kTileK;
    const bool edge = first_tile * int4::kTileK + kUnit > p.k || (row_tile + 1) * int4::kTileN > p.n;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t pair[4] = {};  // columns 2 c and 2 c + 1 of the tile's vector t, above them those of vector 4 + t
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = 2 * tile + half;
        float code[2][kVector];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Grid grid = grid_of(r, j);
          const Divisor by = divisor(grid.scale);
          const bool whole = grid.zero == rintf(grid.zero);
          const float inside = whole ? 0.0f : grid.zero, outside = whole ? grid.zero : 0.0f;
          vector[r][j].unpack(code[r]);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const float steps = rintf(__fadd_rn(by.quotient(code[r][i]), inside));
            code[r][i] = fminf(fmaxf(__fadd_rn(steps, outside), 0.0f), kHighest);
          }
          if (edge) {
            const int64_t n = row_tile * int4::kTileN + threadIdx.x % 32 / 4 + 8 * r;
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              if (n >= p.n || column(j) + i >= p.k) code[r][i] = int4::kSymmetricZero;
            }
          }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float low = fmaf(code[1][2 * c], 16, code[0][2 * c]);
          const float high = fmaf(code[1][2 * c + 1], 16, code[0][2 * c + 1]);
          pair[c] |= static_cast<uint32_t>(fmaf(high, 256, low)) << (16 * half);
        }
      }
      transpose(pair);
      if (first_tile + tile < k_tiles) {
        uint8_t* to = p.q + (row_tile * k_tiles + first_tile + tile) * int4::kTileBytes + threadIdx.x % 32 * 16;
        *reinterpret_cast<uint4*>(to) = {__byte_perm(pair[0], pair[1], 0x5140), __byte_perm(pair[2], pair[3], 0x5140),
                                         __byte_perm(pair[0], pair[1], 0x7362), __byte_perm(pair[2], pair[3], 0x7362)};
      }
    }
  }

  // Of the four words of four lanes: word c of lane t becomes word t of lane c.
  static __device__ __forceinline__ void transpose(uint32_t (&word)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int d = 0; d < 4; d += 2) {
      const uint32_t got = __shfl_xor_sync(~0u, odd ? word[d] : word[d + 1], 1);
      (odd ? word[d] : word[d + 1]) = got;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t got = __shfl_xor_sync(~0u, upper ? word[e] : word[2 + e], 2);
      (upper ? word[e] : word[2 + e]) = got;
    }
  }
};

// Of row g + 8 r; one lane of a quad calls it.
__device__ __forceinline__ void store_scales(const Params& p, int64_t row_tile, int64_t group, int r,
                                             const Grid& grid) {
  const int g = threadIdx.x % 32 / 4 + 8 * r, parameters = p.symmetric ? 1 : 2;
  const int64_t n = row_tile * int4::kTileN + g;
  const bool inside = n < p.n;
  store_float(p.scales, int4::scale_offset(n, group, p.block_columns, parameters, 0), p.scale_dtype,
              inside ? grid.scale : 0.0f);
  if (!p.symmetric) {
    store_float(p.scales, int4::scale_offset(n, group, p.block_columns, parameters, 1), p.scale_dtype,
                inside ? grid.zero : int4::kSymmetricZero);
  }
  if (inside && !isfinite(grid.scale)) *p.fault = 1;
}

__device__ __forceinline__ uint32_t any_of_quad(uint32_t bits) {
  bits |= __shfl_xor_sync(~0u, bits, 1);
  return bits | __shfl_xor_sync(~0u, bits, 2);
}

// Groups of 32 * kPer columns.
template <DType dtype, int kPer>
__global__ void __launch_bounds__(32 * kWarps) groups_kernel(Params p) {
  const int64_t units = (p.k + kUnit - 1) / kUnit, index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t row_tile = index / units, first = index % units * kUnit;
  if (row_tile >= int4::tiles_n(p.n)) return;
  Unit<dtype> unit;
  unit.load(p, row_tile * int4::kTileN + threadIdx.x % 32 / 4, first);
  Bounds bounds[2][kVectors];
  if (isnan(unit.bounds(bounds))) *p.fault = 1;

  Grid grid[2][kVectors / kPer];
  uint32_t maybe = 0;  // bits of groups that may be grids, by row and group
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int b = 0; b < kVectors / kPer; ++b) {
      Bounds& all = bounds[r][b * kPer];
#pragma unroll
      for (int j = 1; j < kPer; ++j) all.add(bounds[r][b * kPer + j]);
      all.over_quad();
      grid[r][b] = search_none(p, all);
      const bool whole_group = first + (b + 1) * 32 * kPer <= p.k;
      if (!p.symmetric && !p.whole_zeros && whole_group && sixteen_steps(p, all).scale != 0) {
        maybe |= 1u << (r * kVectors + b);
      }
    }
  }
  const auto look = [&](const auto& misses_at) {
    uint32_t off = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int b = 0; b < kVectors / kPer; ++b) {
        const uint32_t bit = 1u << (r * kVectors + b);
        if (!(maybe & bit)) continue;
        const Grid steps = sixteen_steps(p, bounds[r][b * kPer]);
        const Divisor by = divisor(steps.scale);
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          if (misses_at(r, b * kPer + j, steps, by)) off |= bit;
        }
      }
    }
    maybe &= ~any_of_quad(off);
  };
  if (!p.symmetric && !p.whole_zeros) {
    look([&](int r, int j, const Grid& steps, const Divisor& by) { return unit.first_misses(r, j, steps, by); });
    if (__any_sync(~0u, maybe != 0)) {
      look([&](int r, int j, const Grid& steps, const Divisor& by) { return unit.any_misses(r, j, steps, by); });
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int b = 0; b < kVectors / kPer; ++b) {
          if (maybe >> (r * kVectors + b) & 1) grid[r][b] = sixteen_steps(p, bounds[r][b * kPer]);
        }
      }
    }
  }
  unit.store(p, row_tile, [&](int r, int j) { return grid[r][j / kPer]; });
  if (threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int b = 0; b < kVectors / kPer; ++b) {
      const int64_t group = first / (32 * kPer) + b;
      if (group < p.block_columns) store_scales(p, row_tile, group, r, grid[r][b]);
    }
  }
}

// Wider groups: a CTA has 16 rows of one, a warp each so-many-th 128 columns of it.
template <DType dtype>
__global__ void __launch_bounds__(32 * kWideWarps) wide_kernel(Params p) {
  __shared__ float lows[kWideWarps][int4::kTileN], highs[kWideWarps][int4::kTileN];
  __shared__ uint32_t off_grid[int4::kTileN];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, g = threadIdx.x % 32 / 4;
  const int64_t row_tile = blockIdx.x / p.block_columns, group = blockIdx.x % p.block_columns;
  const int64_t row = row_tile * int4::kTileN + g;
  const int64_t begin = group * p.columns, end = min(begin + p.columns, p.k);
  const int64_t own = begin + warp * kUnit, step = int64_t{warps} * kUnit;
  Unit<dtype> kept;
  kept.load(p, row, own);
  // The rest of the group, task(unit).
  const auto for_rest = [&](const auto& task) {
    for (int64_t first = own + step; first < end; first += step) {
      Unit<dtype> unit;
      unit.load(p, row, first);
      task(unit);
    }
  };

  Bounds bounds[2];
  float poison = 0;
  const auto add = [&](Unit<dtype>& unit) {
    Bounds of[2][kVectors];
    poison += unit.bounds(of);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (unit.column(j) < end) bounds[r].add(of[r][j]);
      }
    }
  };
  if (own < end) add(kept);
  for_rest(add);
  if (isnan(poison)) *p.fault = 1;
  if (threadIdx.x < int4::kTileN) off_grid[threadIdx.x] = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    bounds[r].over_quad();
    lows[warp][g + 8 * r] = bounds[r].low, highs[warp][g + 8 * r] = bounds[r].high;
  }
  __syncthreads();
  Grid grid[2], steps[2];
  uint32_t maybe = 0;
  const bool whole_group = begin + p.columns <= p.k && p.columns % 16 == 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    for (int w = 0; w < warps; ++w) bounds[r].add(Bounds{lows[w][g + 8 * r], highs[w][g + 8 * r]});
    grid[r] = search_none(p, bounds[r]), steps[r] = sixteen_steps(p, bounds[r]);
    if (!p.symmetric && !p.whole_zeros && whole_group && steps[r].scale != 0) maybe |= 1u << r;
  }

  if (!p.symmetric && !p.whole_zeros) {
    // Grids are rare: most groups are out after one look at what registers hold.
    const auto look = [&](const Unit<dtype>& unit) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!(maybe >> r & 1)) continue;
        const Divisor by = divisor(steps[r].scale);
        bool off = false;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          off |= unit.column(j) < end && unit.any_misses(r, j, steps[r], by);
        }
        if (off) off_grid[g + 8 * r] = 1, maybe &= ~(1u << r);
      }
    };
    if (own < end) look(kept);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) maybe &= ~(off_grid[g + 8 * r] << r);
    if (__syncthreads_or(maybe != 0)) {
      for_rest(look);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (maybe >> r & 1 && !off_grid[g + 8 * r]) grid[r] = steps[r];
      }
    }
  }
  const auto put = [&](const Unit<dtype>& unit) { unit.store(p, row_tile, [&](int r, int) { return grid[r]; }); };
  if (own < end) put(kept);
  for_rest(put);
  if (warp != 0 || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) store_scales(p, row_tile, group, r, grid[r]);
}

template <DType dtype>
Status launch(const Params& p, cudaStream_t stream) {
  const int64_t tiles = int4::tiles_n(p.n), units = ceil_div(p.k, kUnit);
  if (p.columns != 32 && p.columns != 64 && p.columns != 128) {
    const int64_t of_group = ceil_div(p.columns, kUnit);
    const unsigned threads = 32 * static_cast<unsigned>(of_group < kWideWarps ? of_group : kWideWarps);
    wide_kernel<dtype><<<static_cast<unsigned>(tiles * p.block_columns), threads, 0, stream>>>(p);
    return launch_status("launching wide_kernel");
  }
  const unsigned grid = static_cast<unsigned>(ceil_div(tiles * units, kWarps));
  const auto kernel = p.columns == 32   ? groups_kernel<dtype, 1>
                      : p.columns == 64 ? groups_kernel<dtype, 2>
                                        : groups_kernel<dtype, 4>;
  kernel<<<grid, 32 * kWarps, 0, stream>>>(p);
  return launch_status("launching groups_kernel");
}

}  // namespace

Status quantize_int4(const Params& p, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch<DType::kFloat32>(p, stream);
  if (dtype == DType::kFloat16) return launch<DType::kFloat16>(p, stream);
  return launch<DType::kBFloat16>(p, stream);
}

}  // namespace qao::weight
