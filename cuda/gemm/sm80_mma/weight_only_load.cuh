// CTA tile of weight_only_mainloop.cuh: cp.async ring, dequantization and epilogue.
//
//            tokens                    CTA: kN rows of W x kM tokens, K split among warps_k slices. Slice s takes
//         +---------+                  K-tiles begin + s, begin + s + warps_k, ... through its private cp.async ring,
//         |    x    |                  so a slice of one warp needs no barrier.
//         +---------+
//   +---+ +---------+                  y[m][n] = sum over groups of  scale[n] * sum over k of (q - zero)[n][k] x[m][k]
//   | W | |    y    |                  (q - zero) is exact in the 16-bit type (rounded once if zero is a fraction);
//   +---+ +---------+                  scales are applied to float32 sums.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/place.cuh"
#include "common/ptx.cuh"
#include "gemm/sm80_mma/store.cuh"
#include "gemm/sm80_mma/weight_only_kernels.h"
#include "gemm/sm80_mma/weight_only_tile.h"
#include "layout/int4.h"

namespace qao::gemm::sm80_mma::weight_only {

template <typename T, typename Tile, bool zeros>
struct Cta {
  const Params& p;
  const int slice, slice_thread, lane;
  const int warp_n, warp_m;        // within the slice; n-tile i of a warp is i * kWarpsN + warp_n
  const int64_t token0;            // first token of the CTA
  const int row_tile0;             // first n-tile of the CTA
  const int tokens, row_tiles;     // existing ones, at most kM and kRowTiles
  const uint32_t ring;             // shared address of this slice's ring
  const uint8_t *weight, *scales;  // first chunk of this thread in a K-tile; further chunks follow
  const T* x;                      // at constant distances
  int part, k_tile;                // next K-tile to fetch

  __device__ __forceinline__ Cta(const Params& params, int row_block, int token_block, uint32_t shared)
      : p(params),
        slice(Tile::kWarpsK == 1 ? 0 : threadIdx.x / Tile::kSliceThreads),
        slice_thread(threadIdx.x % Tile::kSliceThreads),
        lane(threadIdx.x % 32),
        warp_n(slice_thread / 32 % Tile::kWarpsN),
        warp_m(slice_thread / 32 / Tile::kWarpsN),
        token0(static_cast<int64_t>(token_block) * Tile::kM),
        row_tile0(row_block * Tile::kRowTiles),
        tokens(static_cast<int>(min(p.m - token0, static_cast<int64_t>(Tile::kM)))),
        row_tiles(min(p.row_tiles - row_tile0, Tile::kRowTiles)),
        ring(shared + slice * Tile::kStages * Tile::kStageBytes) {}

  // Moves the fetch pointers to step `index` along K. The parts of a float32 x are processed one after another.
  __device__ __forceinline__ void seek(int index) {
    part = p.parts == 1 ? 0 : index / p.k_tiles;
    k_tile = index - part * p.k_tiles;
    weight =
        p.weight + (static_cast<int64_t>(row_tile0 + slice_thread / 32) * p.k_tiles + k_tile) * kTileBytes + lane * 16;
    x = static_cast<const T*>(p.x) + (token0 + slice_thread / 8) * p.x_stride + slice_thread % 8 * 8 +
        part * p.part_stride + k_tile * kTileK;
    scales = p.scales +
             static_cast<int64_t>(row_tile0 + (slice_thread >> p.scale_chunk_shift)) * p.groups * p.group_bytes +
             (slice_thread & ((1 << p.scale_chunk_shift) - 1)) * 16;
  }
  __device__ __forceinline__ void advance() {
    k_tile += Tile::kWarpsK;
    weight += Tile::kWarpsK * kTileBytes;
    x += Tile::kWarpsK * kTileK;
    while (k_tile >= p.k_tiles) {
      k_tile -= p.k_tiles;
      ++part;
      weight -= static_cast<int64_t>(p.k_tiles) * kTileBytes;
      x += p.part_stride - p.k_tiles * kTileK;
    }
  }

  __device__ __forceinline__ uint32_t stage_address(int stage) const { return ring + stage * Tile::kStageBytes; }
  static __device__ __forceinline__ uint32_t x_address(uint32_t stage) { return stage + Tile::kWeightBytes; }
  static __device__ __forceinline__ uint32_t scale_address(uint32_t stage) {
    return stage + Tile::kWeightBytes + Tile::kXBytes;
  }

  __device__ __forceinline__ void sync_slice() const {
    if constexpr (Tile::kSliceThreads == 32) {
      __syncwarp();
    } else if constexpr (Tile::kWarpsK == 1) {
      __syncthreads();
    } else {
      ptx::named_barrier(1 + slice, Tile::kSliceThreads);
    }
  }

  // Issues the copies of the current K-tile. Rows past M or N are not fetched: their results are never stored.
  __device__ __forceinline__ void fetch(int stage) const {
    const uint32_t to = stage_address(stage);
    fetch_weight(to);
    if (p.x_aligned && (k_tile + 1) * kTileK <= p.k) {
      fetch_x(x_address(to));
    } else {
      fetch_x_edge(x_address(to), x, p.x_stride, p.k - k_tile * kTileK, tokens);
    }
    fetch_scales(scale_address(to));
  }

  __device__ __forceinline__ void fetch_weight(uint32_t to) const {
    constexpr int kWarps = Tile::kSliceThreads / 32;
    const int64_t distance = static_cast<int64_t>(kWarps) * p.k_tiles * kTileBytes;
#pragma unroll
    for (int i = 0; i * kWarps < Tile::kRowTiles; ++i) {
      const int row_tile = slice_thread / 32 + i * kWarps;
      if (row_tile < row_tiles) ptx::cp_async_16(to + row_tile * kTileBytes + lane * 16, weight + i * distance);
    }
  }

  // The 16-byte chunks of a token's 128 bytes are swizzled (the hardware's 128-byte pattern) against bank conflicts.
  static __device__ __forceinline__ uint32_t x_offset(int row, int chunk) {
    return row * Tile::kRowBytes + ((chunk ^ (row & 7)) << 4);
  }
  static constexpr int kRowsAtOnce = Tile::kSliceThreads / 8;  // tokens per copy of all of the slice's threads

  __device__ __forceinline__ void fetch_x(uint32_t to) const {
    const int64_t distance = kRowsAtOnce * p.x_stride;
#pragma unroll
    for (int i = 0; i * kRowsAtOnce < Tile::kM; ++i) {
      const int row = slice_thread / 8 + i * kRowsAtOnce;
      if (row < tokens) ptx::cp_async_16(to + x_offset(row, slice_thread % 8), x + i * distance);
    }
  }

  // As fetch_x(), for a K-tile that ends past K (zero-filled) and for x that is not 16-byte aligned. Kept out of the
  // mainloop's code and registers.
  static __device__ __noinline__ void fetch_x_edge(uint32_t to, const T* x, int64_t x_stride, int columns, int tokens) {
    const int thread = threadIdx.x % Tile::kSliceThreads, chunk = thread % 8;
    for (int row = thread / 8; row < tokens; row += kRowsAtOnce, x += kRowsAtOnce * x_stride) {
      T values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = chunk * 8 + i < columns ? x[i] : T(0.0f);
      ptx::store_shared_16(to + x_offset(row, chunk), *reinterpret_cast<const uint4*>(values));
    }
  }

  // Copies scales and zeros of one group, or of two adjacent groups of 32. A second group past K gets scale 0.
  __device__ __forceinline__ void fetch_scales(uint32_t to) const {
    const int shift = p.scale_chunk_shift;
    const int group = p.group_shift < 0 ? 2 * k_tile : k_tile >> p.group_shift;
    const int offset = (slice_thread & ((1 << shift) - 1)) * 16;
    const bool exists = (p.groups - group) * p.group_bytes > offset;
#pragma unroll
    for (int i = 0; i * Tile::kSliceThreads < Tile::kRowTiles * Tile::kScaleTileBytes / 16; ++i) {
      const int row_tile = (slice_thread + i * Tile::kSliceThreads) >> shift;
      const uint32_t at = to + row_tile * Tile::kScaleTileBytes + offset;
      const int64_t skipped = static_cast<int64_t>(i * Tile::kSliceThreads >> shift) * p.groups + group;
      if (row_tile >= row_tiles) break;
      if (exists) {
        ptx::cp_async_16(at, scales + skipped * p.group_bytes);
      } else {
        ptx::store_shared_16(at, {0, 0, 0, 0});
      }
    }
  }

  // Parameters of a group for rows g and g + 8 of one n-tile of this warp. Weights are computed as ((magic + q) +
  // offset) + fraction in pairs of T, so the integer part of the zero point is subtracted exactly.
  struct Group {
    float scale[2];
    uint32_t offset[2], fraction[2];
  };
  template <DType dtype>
  __device__ __forceinline__ void read_group(uint32_t from, Group& to) const {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const uint32_t at = from + (lane / 4 + high * 8) * size_of(dtype);
      to.scale[high] = load_shared_float<dtype>(at);
      if constexpr (zeros && dtype == Half<T>::kDType) {
        // Adding the magic number rounds to an integer.
        const uint32_t minus_zero = Half<T>::negate(Half<T>::pair(ptx::load_shared_2(at + kTileN * size_of(dtype))));
        to.offset[high] = Half<T>::add(minus_zero, Half<T>::pair(-Half<T>::kMagicValue));
        to.fraction[high] = Half<T>::add(
            Half<T>::negate(Half<T>::add(to.offset[high], Half<T>::pair(Half<T>::kMagicValue))), minus_zero);
      } else if constexpr (zeros) {
        const float zero = load_shared_float<dtype>(at + kTileN * size_of(dtype));
        to.offset[high] = Half<T>::pair(-Half<T>::kMagicValue - zero);
        to.fraction[high] = Half<T>::pair(-Half<T>::kMagicValue - zero - Half<T>::low(to.offset[high]));
      } else {
        to.offset[high] = Half<T>::pair(-Half<T>::kMagicValue - kSymmetricZero);
      }
    }
  }
  // Reads n-tile i of this warp. `group` counts within the K-tile; n-tiles are `distance` bytes apart.
  __device__ __forceinline__ void read_group(uint32_t stage, int group, int i, Group& to,
                                             int distance = Tile::kScaleTileBytes) const {
    const uint32_t from = scale_address(stage) + (i * Tile::kWarpsN + warp_n) * distance + group * p.group_bytes;
    if (p.scale_dtype == DType::kBFloat16) {
      read_group<DType::kBFloat16>(from, to);
    } else if (p.scale_dtype == DType::kFloat16) {
      read_group<DType::kFloat16>(from, to);
    } else {
      read_group<DType::kFloat32>(from, to);
    }
  }

  // Four words of one n-tile: word s holds the eight weights of k-step s.
  __device__ __forceinline__ uint4 read_words(uint32_t stage, int i) const {
    return ptx::load_shared_16(stage + (i * Tile::kWarpsN + warp_n) * kTileBytes + lane * 16);
  }
  static __device__ __forceinline__ uint32_t word_of(const uint4& words, int step) {
    return step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w;
  }
  // Converts W to the A operand of one k-step, minus the integer part of the zero point. Registers are rows g, g + 8,
  // g, g + 8.
  static __device__ __forceinline__ void dequantize(uint32_t word, const Group& group, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Half<T>::add(ptx::and_or(word >> (4 * i), 0x000F000F, Half<T>::kMagic), group.offset[i % 2]);
    }
  }
  // Most zero points are integers. The fraction is subtracted only if a row of this warp has one. With a float32 x it
  // would be rounded here, so sm80_mma_weight_only_reduce subtracts it instead.
  template <int count>
  __device__ __forceinline__ bool any_fraction(const Group (&groups)[count]) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; zeros && i < count; ++i) bits |= groups[i].fraction[0] | groups[i].fraction[1];
    return zeros && p.parts == 1 && __any_sync(0xFFFFFFFFu, (bits & 0x7FFF7FFF) != 0);
  }
  static __device__ __forceinline__ void take_fraction(const Group& group, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Half<T>::add(a[i], group.fraction[i % 2]);
  }

  using Sums = float[Tile::kTilesN][Tile::kTilesM][4];

  // Adds the slices in a fixed order, transposed to token-major through shared memory, and calls `write` for four rows
  // at a time.
  template <typename Write>
  __device__ __forceinline__ void add_slices(const Sums& sum, float* tile, const Write& write) const {
    ptx::cp_async_wait<0>();
    ptx::named_barrier(0, Tile::kThreads);  // all slices are done with their rings, which `tile` overlays
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = (i * Tile::kWarpsN + warp_n) * kTileN + lane / 4 + (e / 2) * 8;
          const int token = (warp_m * Tile::kTilesM + j) * 8 + lane % 4 * 2 + e % 2;
          tile[(slice * Tile::kM + token) * Tile::kPaddedN + row] = sum[i][j][e];
        }
      }
    }
    ptx::named_barrier(0, Tile::kThreads);
    constexpr int kQuads = Tile::kN / 4;
    for (int i = threadIdx.x; i < Tile::kM * kQuads; i += Tile::kThreads) {
      const int token = i / kQuads, row = i % kQuads * 4, n = row_tile0 * kTileN + row;
      if (token >= tokens) break;
      if (n >= p.n) continue;
      float value[4] = {};
#pragma unroll
      for (int s = 0; s < Tile::kWarpsK; ++s) {
        const float4 part = *reinterpret_cast<const float4*>(&tile[(s * Tile::kM + token) * Tile::kPaddedN + row]);
        value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (p.bias != nullptr && n + e < p.n) value[e] += load_float(p.bias, n + e, p.bias_dtype);
      }
      write(token, n, value);
    }
  }
  __device__ __forceinline__ void write_result(const Sums& sum, float* tile, int split) const {
    add_slices(sum, tile, [&](int token, int n, const float (&value)[4]) {
      store_four(p.y, p.y_dtype, split * p.m + token0 + token, n, p.n, value);
    });
  }
};

}  // namespace qao::gemm::sm80_mma::weight_only
