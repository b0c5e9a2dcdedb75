// Quantization of weights to int4, partitioned as in unit.cuh.
// A quad of lanes handles groups of up to 128 columns, a CTA wider ones, rereading what did not fit in registers.
//
// Almost every group has a scale for which corrected quotients are exact, and an integer zero point. Other groups, and
// those that may lie on a grid of sixteen steps, take a slow path in functions outside of the kernels.
#include "common/check.h"
#include "common/integers.h"
#include "quantize_weight/int4.cuh"

namespace qao::weight {
inline namespace int4_kernels {

constexpr int kWideWarps = 16;

// Minimum and maximum of a group of `per` vectors from vector j of row r, over a quad.
template <DType dtype>
__device__ __forceinline__ Bounds bounds_slowly(const Unit<dtype>& unit, int r, int j, int per) {
  Extremes<dtype> all[1];
#pragma unroll 1
  for (int i = j; i < j + per; ++i) {
    const auto one = Extremes<dtype>::template of<1>([&](int) { return unit.vector[r][i]; });
    i == j ? static_cast<void>(all[0] = one) : all[0].add(one);
  }
  reduce_over_quad(all);
  return {all[0].low(), all[0].high()};
}

// Whether all of this lane's values of a row's vectors from j on lie on the grid.
template <DType dtype>
__device__ __forceinline__ bool on_grid(const Unit<dtype>& unit, int r, int j, int per, const Grid& grid) {
  const Divisor by = divisor(grid.scale);
  bool all = true;
#pragma unroll 1
  for (int i = j; i < j + per; ++i) {
    float value[kVector];
    unit.vector[r][i].unpack(value);
#pragma unroll
    for (int e = 0; e < kVector; ++e) all = all && !misses(value[e], grid, by);
  }
  return all;
}

template <DType dtype>
__device__ __noinline__ void groups_slowly(const Params& p, const Unit<dtype>& unit, int64_t row_tile, int per) {
  Grid grid[2][kVectors];
  const int64_t first = unit.first / kUnit * kUnit;
#pragma unroll 1
  for (int of = 0; of < 2 * kVectors; of += per) {
    const int r = of / kVectors, j = of % kVectors;
    const Bounds bounds = bounds_slowly(unit, r, j, per);
    Grid own = search_none(p, bounds);
    const bool whole_group = first + (j + per) * 32 <= p.k;
    const Grid steps = p.symmetric || p.whole_zeros || !whole_group ? Grid{0, 0} : sixteen_steps(p, bounds);
    bool kept = steps.scale != 0 && on_grid(unit, r, j, per, steps);
    kept &= __shfl_xor_sync(~0u, kept, 1);
    kept &= __shfl_xor_sync(~0u, kept, 2);
    if (kept) own = steps;
    for (int i = 0; i < per; ++i) grid[r][j + i] = own;
    const int64_t n = row_tile * int4::kTileN + threadIdx.x % 32 / 4 + 8 * r;
    if (threadIdx.x % 4 == 0) store_scales(p, n, first / (32 * per) + j / per, own);
  }
  store_slowly(p, unit, row_tile, grid);
}

// Quantizes groups of 32 * kPer columns.
template <DType dtype, int kPer, bool kTwice>
__global__ void __launch_bounds__(32 * kWarps) groups_kernel(const __grid_constant__ Params p) {
  constexpr int kOfRow = kVectors / kPer, kGroups = 2 * kOfRow;
  const auto [row_tile, first] = place_of_warp(p);
  if (row_tile >= int4::tiles_n(p.n)) return;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool stop = is_stopped(p);
  Unit<dtype> unit;
  unit.load(p, row_tile * int4::kTileN + g, first);

  // Find the extremes of each group
  Extremes<dtype> extremes[kGroups];
#pragma unroll
  for (int e = 0; e < kGroups; ++e) {
    extremes[e] = Extremes<dtype>::template of<kPer>(
        [&](int j) -> const Packed<dtype>& { return unit.vector[e / kOfRow][e % kOfRow * kPer + j]; });
  }
  reduce_over_quad(extremes);
  if (stop) return;

  // Compute scales and zero points
  Grid own[kOwned<kGroups>];
  float steps_zero[kOwned<kGroups>];  // zero point of the sixteen-step grid; NaN if there is none
  bool slow = false;
#pragma unroll
  for (int i = 0; i < kOwned<kGroups>; ++i) {
    const Bounds bounds{extremes[i].low(), extremes[i].high()};
    if (isnan(bounds.low) || isnan(bounds.high)) *p.fault = 1;
    const float scale = full_scale(p, bounds), below = steps_below(bounds, scale);
    own[i] = {scale, whole_zero(p, below)};
    steps_zero[i] = NAN;
    slow |= needs_division(bounds, scale);
    const int e = t * kGroups / 4 + i;
    const bool whole_group = first + (e % kOfRow + 1) * 32 * kPer <= p.k;
    if (!p.symmetric && !p.whole_zeros && whole_group && scale > p.smallest) {
      const float zero = rounded_to(p.scale_dtype, below);
      if (may_be_zero(zero)) steps_zero[i] = zero;
      // If all values have one sign, the grid has another scale.
      if (bounds.low > 0 || bounds.high < 0) slow |= sixteen_steps(p, bounds).scale != 0;
    }
  }
  // Distribute them over the quad, and detect possible grids
  uint32_t maybe = 0;
  Grid grid[kGroups];
#pragma unroll
  for (int e = 0; e < kGroups; ++e) {
    const int owner = owner_of<kGroups>(e), i = e % kOwned<kGroups>;
    grid[e] = {__shfl_sync(~0u, own[i].scale, owner, 4), __shfl_sync(~0u, own[i].zero, owner, 4)};
    if (p.symmetric || p.whole_zeros) continue;
    float value[kVector];
    unit.vector[e / kOfRow][e % kOfRow * kPer].unpack(value);
    const float zero = __shfl_sync(~0u, steps_zero[i], owner, 4);
    if (!surely_misses(value[0], ptx::reciprocal(grid[e].scale), zero)) maybe |= 1u << e;
  }
  if (!p.symmetric && !p.whole_zeros) {
    maybe &= __shfl_xor_sync(~0u, maybe, 1);
    maybe &= __shfl_xor_sync(~0u, maybe, 2);
  }
  if (__any_sync(~0u, slow || maybe != 0)) {
    const Unit<dtype> copy = unit;  // in local memory, as the function needs it
    groups_slowly(p, copy, row_tile, kPer);
    return;
  }
  // Store codes and scales
  unit.store(p, row_tile, [&](int r, int j, uint32_t (&code)[4]) {
    Steps<kTwice>(grid[r * kOfRow + j / kPer]).codes(unit.vector[r][j], code);
  });
#pragma unroll
  for (int i = 0; i < kOwned<kGroups>; ++i) {
    const int e = t * kGroups / 4 + i, r = e / kOfRow;
    if (kGroups >= 4 || t % 2 == 0) {
      store_scales(p, row_tile * int4::kTileN + g + 8 * r, first / (32 * kPer) + e % kOfRow, own[i]);
    }
  }
}

// Quantizes wider groups: a CTA has 16 rows of one group, and its warps take blocks of 128 columns in turn.
template <DType dtype, bool kTwice>
__global__ void __launch_bounds__(32 * kWideWarps) wide_kernel(const __grid_constant__ Params p) {
  constexpr int kKept = dtype == DType::kFloat32 ? 1 : 2;  // units kept in registers
  __shared__ float lows[kWideWarps][int4::kTileN], highs[kWideWarps][int4::kTileN];
  __shared__ uint32_t off_grid[int4::kTileN];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, g = threadIdx.x % 32 / 4;
  const int64_t row_tile = blockIdx.x / p.block_columns, group = blockIdx.x % p.block_columns;
  const int64_t row = row_tile * int4::kTileN + g;
  const int64_t begin = group * p.columns, end = min(begin + p.columns, p.k);
  const int64_t own = begin + warp * kUnit, step = int64_t{warps} * kUnit;
  const bool stop = is_stopped(p);
  Unit<dtype> kept[kKept];
#pragma unroll
  for (int u = 0; u < kKept; ++u) {
    if (own + u * step < end) kept[u].load(p, row, own + u * step);
  }
  // Calls task(unit) for every unit of the warp.
  const auto for_all = [&](const auto& task) {
#pragma unroll
    for (int u = 0; u < kKept; ++u) {
      if (own + u * step < end) task(kept[u]);
    }
#pragma unroll 1
    for (int64_t first = own + kKept * step; first < end; first += step) {
      Unit<dtype> unit;
      unit.load(p, row, first);
      task(unit);
    }
  };

  // Find the extremes of each row's group
  Bounds bounds[2];
  float poison = 0;
  for_all([&](const Unit<dtype>& unit) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (unit.column(j) >= end) continue;
        const auto one =
            Extremes<dtype>::template of<1>([&](int) -> const Packed<dtype>& { return unit.vector[r][j]; });
        bounds[r].low = fminf(bounds[r].low, one.low()), bounds[r].high = fmaxf(bounds[r].high, one.high());
        poison += one.low();
      }
    }
  });
  if (stop) return;
  if (isnan(poison)) *p.fault = 1;
  if (threadIdx.x < int4::kTileN) off_grid[threadIdx.x] = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
      bounds[r].low = fminf(bounds[r].low, __shfl_xor_sync(~0u, bounds[r].low, lane));
      bounds[r].high = fmaxf(bounds[r].high, __shfl_xor_sync(~0u, bounds[r].high, lane));
    }
    lows[warp][g + 8 * r] = bounds[r].low, highs[warp][g + 8 * r] = bounds[r].high;
  }
  __syncthreads();
  // Compute scales and zero points
  Grid grid[2], steps[2];
  uint32_t maybe = 0;
  const bool whole_group = begin + p.columns <= p.k && p.columns % 16 == 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    for (int w = 0; w < warps; ++w) {
      bounds[r].low = fminf(bounds[r].low, lows[w][g + 8 * r]);
      bounds[r].high = fmaxf(bounds[r].high, highs[w][g + 8 * r]);
    }
    grid[r] = search_none(p, bounds[r]), steps[r] = sixteen_steps(p, bounds[r]);
    if (!p.symmetric && !p.whole_zeros && whole_group && steps[r].scale != 0) maybe |= 1u << r;
  }

  bool slow = needs_division(bounds[0], grid[0].scale) || needs_division(bounds[1], grid[1].scale);
  if (!p.symmetric && !p.whole_zeros) {
    // Grids are rare: checking eight values per lane excludes almost every group.
    if (own < end) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (maybe >> r & 1 && kept[0].column(0) < end) {
          float value[kVector];
          kept[0].vector[r][0].unpack(value);
          bool off = false;
#pragma unroll
          for (int i = 0; i < kVector; ++i) off |= misses(value[i], steps[r], divisor(steps[r].scale));
          if (off) off_grid[g + 8 * r] = 1;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) maybe &= ~(off_grid[g + 8 * r] << r);
    if (__syncthreads_or(maybe != 0)) {
#pragma unroll 1
      for (int64_t first = own; first < end; first += step) {
        Unit<dtype> unit;
        unit.load(p, row, first);
#pragma unroll 1
        for (int of = 0; of < 2 * kVectors; ++of) {
          const int r = of / kVectors, j = of % kVectors;
          if (!(maybe >> r & 1) || unit.column(j) >= end) continue;
          if (!on_grid(unit, r, j, 1, steps[r])) off_grid[g + 8 * r] = 1;
        }
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (maybe >> r & 1 && !off_grid[g + 8 * r]) grid[r] = steps[r], slow = true;
      }
    }
  }
  // Store the codes
  if (__any_sync(~0u, slow)) {
    const Grid all[2][kVectors] = {{grid[0], grid[0], grid[0], grid[0]}, {grid[1], grid[1], grid[1], grid[1]}};
#pragma unroll 1
    for (int64_t first = own; first < end; first += step) {
      Unit<dtype> unit;
      unit.load(p, row, first);
      store_slowly(p, unit, row_tile, all);
    }
  } else {
    const Steps<kTwice> by[2] = {Steps<kTwice>(grid[0]), Steps<kTwice>(grid[1])};
    for_all([&](const Unit<dtype>& unit) {
      unit.store(p, row_tile, [&](int r, int j, uint32_t (&code)[4]) { by[r].codes(unit.vector[r][j], code); });
    });
  }
  // Store the scales
  if (warp != 0 || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) store_scales(p, row + 8 * r, group, grid[r]);
}

template <DType dtype, bool kTwice>
Status launch(const Params& p, cudaStream_t stream) {
  if (p.columns != 32 && p.columns != 64 && p.columns != 128) {
    const int64_t of_group = ceil_div(p.columns, kUnit);
    const unsigned threads = 32 * static_cast<unsigned>(of_group < kWideWarps ? of_group : kWideWarps);
    wide_kernel<dtype, kTwice><<<static_cast<unsigned>(int4::tiles_n(p.n) * p.block_columns), threads, 0, stream>>>(p);
    return launch_status("launching wide_kernel");
  }
  const auto kernel = p.columns == 32   ? groups_kernel<dtype, 1, kTwice>
                      : p.columns == 64 ? groups_kernel<dtype, 2, kTwice>
                                        : groups_kernel<dtype, 4, kTwice>;
  kernel<<<ctas_of(p), 32 * kWarps, 0, stream>>>(p);
  return launch_status("launching groups_kernel");
}

}  // namespace int4_kernels

Status quantize_int4(const Params& p, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch<DType::kFloat32, true>(p, stream);
  const bool twice = p.scale_dtype == DType::kFloat32;
  if (dtype == DType::kFloat16) {
    return twice ? launch<DType::kFloat16, true>(p, stream) : launch<DType::kFloat16, false>(p, stream);
  }
  return twice ? launch<DType::kBFloat16, true>(p, stream) : launch<DType::kBFloat16, false>(p, stream);
}

}  // namespace qao::weight
