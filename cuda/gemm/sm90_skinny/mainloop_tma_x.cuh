// Skinny GEMM for 9 to 16 tokens from Hopper on, with all of x in shared memory.
// Arithmetic as in mainloop_ring_x.cuh, loop structure as in mainloop_smem_x.cuh; TMA loads x once.
//
// A CTA owns a run of n-tiles and computes kTilesN of them per pass. Its warps split K: each takes every kWarps-th
// K-step of 128 columns through its private cp.async ring, which keeps running across passes. Partial sums of the warps
// are added in a fixed order.
//
// Every CTA loads all of x as [K-step][two boxes of 64 columns][token], 128-byte rows with swizzled 16-byte chunks.
// Each K-step has an mbarrier, so a warp waits only for its own columns.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/kernels.h"
#include "gemm/sm90_skinny/params.h"
#include "layout/int4.h"

namespace qao::gemm::sm90_skinny::tma_x {

// T is the dtype of x. `half`: scales and zeros are float16, otherwise bfloat16.
template <typename Tile, typename T, bool zeros, bool half>
struct Tma {
  static constexpr int kR = Tile::kTilesN, kWarps = Tile::kWarps, kStages = Tile::kStages;
  static constexpr int kGroupBytes = tma_x_group_bytes(zeros), kStageBytes = tma_x_stage_bytes(kR, zeros);
  static constexpr int kColumnTiles = kTmaXTokens / 8;
  static constexpr int kBoxBytes = Tile::kTokens * kBoxRowBytes, kStepX = kStepBoxes * kBoxBytes;
  static constexpr int kSumsBytes = kTileN * kTmaXTokens * 4;  // of an n-tile
  static_assert(kR * kSumsBytes <= kStageBytes, "sums of a pass lie in a stage");
  const Params& p;
  const TmaXParams& d;
  // Overridden per expert, as in load_ring_x.cuh.
  const uint8_t *weight, *scales;
  int tokens;
  const int lane, slice;
  int row_tile0, row_tiles;  // of this CTA
  const uint32_t x, ring;

  __device__ __forceinline__ Tma(const Params& params, const TmaXParams& cut, uint32_t base)
      : p(params),
        d(cut),
        weight(params.weight),
        scales(params.scales),
        tokens(cut.tokens),
        lane(threadIdx.x % 32),
        slice(ptx::warp_index()),
        row_tile0(blockIdx.x * d.row_tiles + min(static_cast<int>(blockIdx.x), d.more_row_tiles)),
        row_tiles(d.row_tiles + (static_cast<int>(blockIdx.x) < d.more_row_tiles)),
        x(base),
        ring(base + d.ring_offset + slice * (kStages * kStageBytes)) {}

  // ---- Load x.

  __device__ __forceinline__ uint32_t arrived(int step) const { return x + d.barriers_offset + step * 8; }
  // Initializes the mbarriers, divided among the warps since lanes of one warp would serialize. TMA fills columns past
  // K with zeros and counts their bytes.
  __device__ __forceinline__ void expect_x() const {
    if (!ptx::elect_one()) return;
#pragma unroll 1
    for (int step = slice; step < d.steps; step += kWarps) {
      qao::tma::barrier_init(arrived(step), 1);
      qao::tma::barrier_expect(arrived(step), kStepBoxes * tokens * kBoxRowBytes);
    }
    qao::tma::barrier_init_fence();
  }
  // Issues the TMA loads in order of columns. All mbarriers are initialized by then.
  __device__ __forceinline__ void bring_x(const CUtensorMap& map) const {
    if (!ptx::elect_one()) return;
#pragma unroll 1
    for (int box = slice; box < d.steps * kStepBoxes; box += kWarps) {
      qao::tma::load_3d(x + box * kBoxBytes, &map, box * kBoxColumns, 0, 0, arrived(box / kStepBoxes));
    }
  }

  __device__ __forceinline__ void wait_for_x(int step) const { qao::tma::barrier_wait(arrived(step), 0); }

  // ---- Load weights.

  // Iterates over the K-steps of this warp, pass after pass, with this lane's global pointers.
  struct Cursor {
    int step;
    int tiles;  // remaining n-tiles of the CTA; zero or less past the last pass
    const uint8_t *weight, *scales;
  };
  static constexpr int kChunks = kGroupBytes / 16;  // of scales and zeros per n-tile
  static_assert(kR * kChunks <= 32, "a lane copies one");

  __device__ __forceinline__ void seek(Cursor& at) const {
    while (at.step >= d.steps) at.step -= d.steps, at.tiles -= kR;
    const int row_tile = row_tile0 + row_tiles - at.tiles;
    at.weight = weight + row_tile * d.row_tile_bytes + at.step * kStepBytes + lane * 16;
    at.scales = scales + (row_tile + lane / kChunks) * d.row_tile_scale_bytes +
                (at.step >> d.group_shift) * kGroupBytes + lane % kChunks * 16;
  }
  __device__ __forceinline__ Cursor first() const {
    Cursor at{slice, row_tiles};
    seek(at);
    return at;
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    at.step += kWarps;
    at.weight += kWarps * kStepBytes;
    at.scales += d.scale_advance;
    if (at.step >= d.steps) seek(at);
  }
  // Issues the copies of a K-step: the pass's n-tiles, their scales and zeros.
  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    fetch_weight(at, stage);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void fetch_weight(const Cursor& at, uint32_t stage) const {
    const uint32_t to = stage + lane * 16;
    const uint8_t* weight = at.weight;
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      if (i < at.tiles) {
        ptx::cp_async_16(to + i * kStepBytes, weight);
        ptx::cp_async_16(to + i * kStepBytes + kTileBytes, weight + kTileBytes);
      }
      if (i + 1 < kR) weight += d.row_tile_bytes;
    }
    if (lane < min(kR, at.tiles) * kChunks) ptx::cp_async_16(to + kR * kStepBytes, at.scales);
  }

  // ---- MMAs.

  using Sums = float[kR][kColumnTiles][4];

  // Scales and zeros of this lane's rows g and g + 8 as pairs of 16 bits. Transposed ldmatrix puts both in every second
  // column.
  using Parameters = uint32_t[kR][zeros ? 2 : 1];
  __device__ __forceinline__ void load_parameters(uint32_t from, Parameters& to) const {
    constexpr int kAll = kGroupBytes / 32 * kR;
    uint32_t pairs[kAll + 3];
#pragma unroll
    for (int i = 0; i < kAll; i += 4) {
      if (kAll - i > 2) {
        ptx::ldmatrix_x4_transposed(reinterpret_cast<uint32_t (&)[4]>(pairs[i]), from + i * 32);
      } else {
        ptx::ldmatrix_x2_transposed(reinterpret_cast<uint32_t (&)[2]>(pairs[i]), from + i * 32);
      }
    }
#pragma unroll
    for (int i = 0; i < kAll; ++i) to[i / (zeros ? 2 : 1)][i % (zeros ? 2 : 1)] = pairs[i];
  }
  static __device__ __forceinline__ float low(uint32_t pair) {
    return half ? Half<__half>::low(pair) : Half<__nv_bfloat16>::low(pair);
  }
  static __device__ __forceinline__ float high(uint32_t pair) {
    return half ? Half<__half>::high(pair) : Half<__nv_bfloat16>::high(pair);
  }

  // Per-lane offsets: ldmatrix addresses of x, weights and scales in a stage, and the lane that holds the sum of the
  // token of this lane's first column.
  struct Places {
    uint32_t x, weights, parameters, column;
  };
  __device__ __forceinline__ Places places() const {
    return {ptx::opaque(x + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4)), ptx::opaque(lane * 16),
            ptx::opaque(kR * kStepBytes + lane / 8 * 32 + lane % 2 * 16), ptx::opaque(lane % 4 * 8)};
  }

  // Accumulates one K-step. n-tiles and tokens past the end are multiplied as well; their sums are discarded.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t x_step, const Places& at, Sums& sum) const {
    float product[kR][kColumnTiles][4] = {};
    // Four 8-column operands form one 16-row operand: token g in rows g and g + 8.
    float x_sum[kColumnTiles][4] = {};
#pragma unroll
    for (int box = 0; box < kStepBoxes; ++box) {
      uint4 words[kR];
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        words[i] = ptx::load_shared_16(stage + at.weights + i * kStepBytes + box * kTileBytes);
      }
#pragma unroll
      // Load x, convert W and issue the MMAs
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t b[kColumnTiles][4];
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          ptx::ldmatrix_x4(b[j], (x_step ^ pair * 64) + box * kBoxBytes + j * (8 * kBoxRowBytes));
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if constexpr (std::is_same_v<T, __nv_bfloat16>) b[j][c] = scale_x(b[j][c]);
          }
          Half<T>::mma(x_sum[j], b[j], 0x00010001, 0x00010001);
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int i = 0; i < kR; ++i) {
            const uint32_t word = pair == 0 ? (s == 0 ? words[i].x : words[i].y) : (s == 0 ? words[i].z : words[i].w);
            uint32_t a[4];
            make_operand(word, a);
#pragma unroll
            for (int j = 0; j < kColumnTiles; ++j) Half<T>::mma(product[i][j], a, b[j][2 * s], b[j][2 * s + 1]);
          }
        }
      }
    }
    float xs[kColumnTiles][2];  // of this lane's columns
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const float of_token = x_sum[j][0] + x_sum[j][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) xs[j][e] = __shfl_sync(kAllLanes, of_token, at.column + e * 4);
    }
    // Apply scales and zero points
    Parameters parameters;
    load_parameters(stage + at.parameters, parameters);
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      const float scale[2] = {low(parameters[i][0]), high(parameters[i][0])};
      float zero[2] = {kSymmetricZero, kSymmetricZero};
      if constexpr (zeros) zero[0] = low(parameters[i][1]), zero[1] = high(parameters[i][1]);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float first = product[i][j][e], both = product[i][j][e + 2];
          sum[i][j][e] += scale[0] * (first - zero[0] * xs[j][e]);
          sum[i][j][e + 2] += scale[1] * (both - first - 16 * zero[1] * xs[j][e]);
        }
      }
    }
  }

  // ---- Partial sums. Each warp's lie in the stage that it read last, [n-tile][token][row] float32. Against bank
  // conflicts, the two lowest bits of a token's index are swapped, and rows g and g + 8 are swapped in every other four
  // tokens.

  __device__ __forceinline__ uint32_t place_of(int of_slice) const { return x + d.places_offset + of_slice * 4; }
  __device__ __forceinline__ void keep(uint32_t to, const Sums& sum) const {
    const int g = lane / 4, t = lane % 4;
    if (lane == 0) ptx::store_shared_4(place_of(slice), to);
    to += (t / 2 * 4 + t % 2) * (kTileN * 4) + (t / 2 * 8 + g) * 4;
#pragma unroll
    for (int i = 0; i < kR; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t at = i * kSumsBytes + (j * 8 + e * 2) * (kTileN * 4);
          ptx::store_shared_float(to + at, sum[i][j][e] * kUnitOf<T>);
          ptx::store_shared_float((to ^ 32) + at, sum[i][j][e + 2] * (kUnitOf<T> / 16));
        }
      }
    }
  }
  // Epilogue: adds the warps' partial sums and stores y, four rows of a token per thread.
  __device__ __forceinline__ void write(int pass) const {
    for_each_quad(pass, [&](int token, int n, bool exists, float (&value)[4]) {
      repair<GivenX<T>>(p, d, n, token, value);
      if (exists) store_rows<T>(p, n, token, value);
    });
  }
  template <typename Use>
  __device__ __forceinline__ void for_each_quad(int pass, const Use& use) const {
    constexpr int kQuads = kSumsBytes / 16;
#pragma unroll 1
    for (int first = slice * 32; first < kR * kQuads; first += Tile::kThreads) {  // uniform across the warp
      const int i = first + lane, at = i % kQuads / 4, row_tile = pass * kR + i / kQuads;
      const int token = (at & ~3) | at % 2 * 2 | at / 2 % 2, quad = i % 4 ^ (at / 4 % 2 * 2);
      const int n = (row_tile0 + row_tile) * kTileN + quad * 4;
      const bool exists = token < tokens && row_tile < row_tiles;
      float value[4] = {};
      if (exists) {
#pragma unroll
        for (int s = 0; s < kWarps; ++s) add_slices<1>(ptx::load_shared_word(place_of(s)) + i * 16, 0, value);
      }
      use(token, n, exists, value);
    }
  }
};

// Mainloop over all K-steps of this warp, and epilogue of each pass.
template <typename Cta>
__device__ __forceinline__ void walk(const Cta& cta, typename Cta::Cursor& ahead, int passes) {
  constexpr int kStages = Cta::kStages, kStageBytes = Cta::kStageBytes;
  const auto at = cta.places();
  const uint32_t end = cta.ring + kStages * kStageBytes;
  uint32_t stage = cta.ring, stage_ahead = end - kStageBytes;
  int step = cta.slice;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    typename Cta::Sums sum = {};
#pragma unroll 1
    for (; step < cta.d.steps; step += Cta::kWarps) {
      // Wait for the stage
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();
      // Refill the previous stage
      cta.fetch(ahead, stage_ahead);
      cta.advance(ahead);
      // Wait for x, convert W and issue the MMAs
      if (pass == 0) cta.wait_for_x(step);
      cta.multiply(stage, at.x + step * Cta::kStepX, at, sum);
      stage_ahead = stage;
      stage += kStageBytes;
      if (stage == end) stage = cta.ring;
    }
    step -= cta.d.steps;
    // Store the partial sums and run the epilogue
    __syncwarp();
    cta.keep(stage_ahead, sum);
    __syncthreads();
    cta.write(pass);
    if (pass + 1 < passes) __syncthreads();
  }
}

template <typename Tile, typename T, bool zeros, bool half>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    sm90_skinny_tma_x(const __grid_constant__ Params p, const __grid_constant__ TmaXParams d,
                      const __grid_constant__ CUtensorMap x) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Tma<Tile, T, zeros, half> cta(p, d, ptx::shared_address(memory));
  cta.expect_x();

  // PDL: the previous kernel may still run and may write anything, even weights. Before the wait, only prefetch weights
  // to L2, where a later write to them is still seen.
  if (threadIdx.x < min(cta.row_tiles, Tile::kTilesN)) {
    const int row_tile = cta.row_tile0 + threadIdx.x;
    ptx::prefetch_l2(p.weight + row_tile * d.row_tile_bytes, min(p.k_tiles * kTileBytes, kPrefetchBytes));
    ptx::prefetch_l2(p.scales + row_tile * d.row_tile_scale_bytes, static_cast<int>(d.row_tile_scale_bytes));
  }
  if (threadIdx.x == 0) qao::tma::prefetch_map(&x);
  auto ahead = cta.first();
  __syncthreads();
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();

  cta.bring_x(x);
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < Tile::kStages - 1; ++i) {
    cta.fetch(ahead, cta.ring + i * cta.kStageBytes);
    cta.advance(ahead);
  }
  walk(cta, ahead, d.passes);
}

}  // namespace qao::gemm::sm90_skinny::tma_x
