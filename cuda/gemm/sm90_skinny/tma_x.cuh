// Skinny GEMM for 9 to 16 tokens from Hopper on, with all of x in shared memory. Arithmetic as in mma_ring_x.cuh.
//
// Every CTA loads all of x with TMA, as [K-step][two boxes of 64 columns][token], 128-byte rows with swizzled 16-byte
// chunks. Each K-step has an mbarrier, so a warp waits only for its own columns.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/mma.cuh"
#include "common/tma.cuh"
#include "gemm/sm90_skinny/mainloop.cuh"

namespace qao::gemm::sm90_skinny::tma_x {

constexpr int kColumnTiles = kTmaXTokens / 8;
constexpr int kSumsBytes = kTileN * kTmaXTokens * 4;  // of an n-tile

// MMA policy. T is the dtype of x. `half`: scales and zeros are float16, otherwise bfloat16.
template <typename Tile_, typename T_, bool zeros, bool half>
class Mma {
 public:
  using Tile = Tile_;
  using T = T_;
  using Scale = Half<std::conditional_t<half, __half, __nv_bfloat16>>;
  static constexpr int kR = Tile::kTilesN, kGroupBytes = tma_x_group_bytes(zeros), kChunkShift = zeros ? 2 : 1;
  static constexpr int kStageBytes = tma_x_stage_bytes(kR, zeros);
  static constexpr int kBoxBytes = Tile::kTokens * kBoxRowBytes, kStepX = kStepBoxes * kBoxBytes;
  using Sums = float[kR][kColumnTiles][4];

  // `x`: its address in shared memory.
  __device__ __forceinline__ Mma(uint32_t x, int lane)
      : x_(ptx::opaque(x + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4))),
        weights_(ptx::opaque(lane * 16)),
        parameters_(ptx::opaque(kR * kStepBytes + lane / 8 * 32 + lane % 2 * 16)),
        column_(ptx::opaque(lane % 4 * 8)) {}

  // Accumulates one K-step. n-tiles and tokens past the end are multiplied as well; their sums are discarded.
  __device__ __forceinline__ void multiply(uint32_t stage, int step, Sums& sum) const {
    const uint32_t x_step = x_ + step * kStepX;
    float product[kR][kColumnTiles][4] = {};
    // Four 8-column operands form one 16-row operand: token g in rows g and g + 8.
    float x_sum[kColumnTiles][4] = {};
#pragma unroll
    for (int box = 0; box < kStepBoxes; ++box) {
      uint4 words[kR];
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        words[i] = ptx::load_shared_16(stage + weights_ + i * kStepBytes + box * kTileBytes);
      }
      // Load x, convert W and issue the MMAs
#pragma unroll
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
            make_operand<false>(word, a);
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
      for (int e = 0; e < 2; ++e) xs[j][e] = __shfl_sync(kAllLanes, of_token, column_ + e * 4);
    }
    // Apply scales and zero points
    Parameters parameters;
    load_parameters(stage + parameters_, parameters);
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      const float scale[2] = {Scale::low(parameters[i][0]), Scale::high(parameters[i][0])};
      float zero[2] = {kSymmetricZero, kSymmetricZero};
      if constexpr (zeros) zero[0] = Scale::low(parameters[i][1]), zero[1] = Scale::high(parameters[i][1]);
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) promote(product[i][j], xs[j], scale, zero, sum[i][j]);
    }
  }

 private:
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

  // Per-lane offsets: ldmatrix addresses of x, weights and scales in a stage, and the lane that holds the sum of the
  // token of this lane's first column.
  const uint32_t x_, weights_, parameters_, column_;
};

template <typename Mma>
struct Cta : WeightLoader<typename Mma::Tile, TmaXParams> {
  using Tile = typename Mma::Tile;
  using T = typename Mma::T;
  using Base = WeightLoader<Tile, TmaXParams>;
  using Base::d, Base::kR, Base::kWarps, Base::lane, Base::p, Base::row_tile0, Base::row_tiles, Base::slice;
  using Base::shared, Base::tokens;  // x comes first in shared memory
  using typename Base::Cursor;
  static_assert(kR * kSumsBytes <= Mma::kStageBytes, "sums of a pass lie in a stage");
  static constexpr bool kFp4 = false;

  __device__ __forceinline__ Cta(const Params& params, const TmaXParams& cut, uint32_t memory)
      : Base(params, cut, blockIdx.x, 0, cut.steps,
             {Tile::kStages, Mma::kStageBytes, kR * kStepBytes, Mma::kChunkShift, 1, Mma::kGroupBytes,
              cut.row_tile_bytes, cut.row_tile_scale_bytes},
             memory, memory + cut.ring_offset) {}
  __device__ __forceinline__ Mma mma() const { return {shared, lane}; }

  // ---- Load x.

  __device__ __forceinline__ uint32_t arrived(int step) const { return shared + d.barriers_offset + step * 8; }
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
      qao::tma::load_3d(shared + box * Mma::kBoxBytes, &map, box * kBoxColumns, 0, 0, arrived(box / kStepBoxes));
    }
  }

  __device__ __forceinline__ void wait_for_x(int step) const { qao::tma::barrier_wait(arrived(step), 0); }

  // Issues the copies of a K-step of W.
  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const { this->fetch_weight(at, stage); }

  // ---- Partial sums. Each warp's lie in the stage that it read last, [n-tile][token][row] float32. Against bank
  // conflicts, the two lowest bits of a token's index are swapped, and rows g and g + 8 are swapped in every other four
  // tokens.

  __device__ __forceinline__ uint32_t address_of_sums(int of_slice) const {
    return shared + d.places_offset + of_slice * 4;
  }
  __device__ __forceinline__ int slots() const { return 1; }
  // `to`: the stage.
  __device__ __forceinline__ void keep(const Mma&, int, uint32_t to, const typename Mma::Sums& sum) const {
    __syncwarp();  // all lanes have read it
    const int g = lane / 4, t = lane % 4;
    if (lane == 0) ptx::store_shared_4(address_of_sums(slice), to);
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

  static constexpr int kQuads = kSumsBytes / 16;  // of an n-tile
  __device__ __forceinline__ int quads(int) const { return kR * kQuads; }
  __device__ __forceinline__ Quad quad(int pass, int i, int) const {
    const int at = i % kQuads / 4, row_tile = pass * kR + i / kQuads;
    const int token = (at & ~3) | at % 2 * 2 | at / 2 % 2, quad = i % 4 ^ (at / 4 % 2 * 2);
    return {0, token, i, (row_tile0 + row_tile) * kTileN + quad * 4, token < tokens && row_tile < row_tiles};
  }
  __device__ __forceinline__ void add_slices(const Quad& at, float (&value)[4]) const {
#pragma unroll
    for (int s = 0; s < kWarps; ++s) {
      sm90_skinny::add_slices<1>(ptx::load_shared_word(address_of_sums(s)) + at.place * 16, 0, value);
    }
  }
  __device__ __forceinline__ void finish(const Quad& at, float (&value)[4]) const {
    repair<GivenX<T>>(p, d, at.n, at.token, value);
    if (at.exists) store_rows<T>(p, at.n, at.token, value);
  }
};

template <typename Mma>
__global__ void __launch_bounds__(Mma::Tile::kThreads, 1)
    sm90_skinny_tma_x(const __grid_constant__ Params p, const __grid_constant__ TmaXParams d,
                      const __grid_constant__ CUtensorMap x) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Cta<Mma> cta(p, d, ptx::shared_memory(memory));
  cta.expect_x();
  cta.prefetch_first_pass();
  if (threadIdx.x == 0) qao::tma::prefetch_map(&x);
  auto ahead = cta.first();
  __syncthreads();
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();

  cta.bring_x(x);
  __syncwarp();
  fill(cta, ahead);
  walk(cta, cta.mma(), ahead, d.passes);
}

}  // namespace qao::gemm::sm90_skinny::tma_x
