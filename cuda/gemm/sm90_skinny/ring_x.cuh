// Skinny GEMM (decode) for up to 16 bfloat16 tokens from Hopper on, with x in the ring next to W, again in each pass.
//
// Clusters of CTAs may split K, too. Their partial sums are added in a fixed order through distributed shared memory.
#pragma once

#include "gemm/sm90_skinny/mainloop.cuh"
#include "gemm/sm90_skinny/mma_ring_x.cuh"

namespace qao::gemm::sm90_skinny::ring_x {

template <typename Mma_>
struct Cta : SlotCta<typename Mma_::Tile, RingXParams> {
  using Mma = Mma_;
  using Tile = typename Mma::Tile;
  using Base = SlotCta<Tile, RingXParams>;
  using Base::d, Base::kR, Base::lane, Base::p, Base::tokens;
  using typename Base::Cursor;
  static constexpr int kTM = Mma::kTM;
  static constexpr bool kFp4 = Mma::kFp4;
  const uint8_t* const x0;  // this lane's chunk of row lane / 16 of x

  // blockIdx.x is the rank among the CTAs that split K.
  __device__ __forceinline__ Cta(const Params& params, const RingXParams& cut, uint32_t memory)
      : Base(memory + Tile::kWarps * cut.stages * cut.stage_bytes, Mma::kPairs ? cut.columns_of_token : 1, params, cut,
             blockIdx.y, blockIdx.x * cut.steps + min(static_cast<int>(blockIdx.x), cut.more_steps),
             cut.steps + (static_cast<int>(blockIdx.x) < cut.more_steps),
             Stages{cut.stages, cut.stage_bytes, cut.scale_offset, cut.chunk_shift, cut.groups_of_step,
                    params.group_bytes, cut.row_tile_bytes, cut.row_tile_scale_bytes},
             memory, memory),
        x0(ptx::opaque(static_cast<const uint8_t*>(params.x) + (lane / 16 * params.x_stride + lane % 16 * 8) * 2)) {}
  __device__ __forceinline__ Mma mma() const { return {d, tokens}; }

  // ---- Load x.

  static constexpr int kRowsAtOnce = 2;  // tokens that a warp copies at once
  __device__ __forceinline__ const T* x_at(int step) const {
    return reinterpret_cast<const T*>(x0) + step * kStepColumns;
  }

  // Issues the copies of a K-step of W and x.
  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    if (kTM == 1 && at.tiles <= 0) return;  // saves much time in short mainloops
    if (at.step >= d.plain_steps) {
      if (at.tiles > 0) fetch_slowly(p, d, at.step, at.tiles, at.weight, at.scales, stage);
      return;
    }
    this->fetch_weight(at, stage);
    const T* x = x_at(at.step);
    const uint32_t to_x = stage + d.x_offset + x_offset(lane / 16, lane % 16);
    const int rows = at.tiles > 0 ? tokens - lane / 16 : 0;
#pragma unroll
    for (int i = 0; i * kRowsAtOnce < Tile::kTokens; ++i) {
      if (i == 1 && tokens <= kRowsAtOnce) break;
      ptx::cp_async_16_if(i * kRowsAtOnce < rows,
                          (to_x ^ (i * kRowsAtOnce % 8 << 4)) + i * kRowsAtOnce * kStepColumns * 2, x);
      x += kRowsAtOnce * p.x_stride;
    }
  }
  // Copies any K-step: one that ends past K, one with more than 64 chunks of scales, or x that is not 16-byte aligned.
  // Kept out of the mainloop's code and registers.
  static __device__ __noinline__ void fetch_slowly(const Params& p, const RingXParams& d, int step, int tiles,
                                                   const uint8_t* weight, const uint8_t* scales, uint32_t stage) {
    fetch_edge(p, d, d.tokens, step, tiles, weight, scales, stage, [](int token) { return token; });
  }
  // row_of(token) is a row of x.
  template <typename Row>
  static __device__ __forceinline__ void fetch_edge(const Params& p, const RingXParams& d, int tokens, int step,
                                                    int tiles, const uint8_t* weight, const uint8_t* scales,
                                                    uint32_t stage, const Row& row_of) {
    Base::fetch_weight_slowly(p, d, step, tiles, weight, scales, d.scale_offset, d.row_tile_bytes,
                              d.row_tile_scale_bytes, stage);
    const int lane = threadIdx.x % 32, chunk = lane % 16, columns = p.k - step * kStepColumns;
    const T* x = static_cast<const T*>(p.x) + step * kStepColumns + chunk * 8;
    for (int token = lane / 16; token < tokens; token += kRowsAtOnce) {
      const T* from = x + row_of(token) * p.x_stride;
      const uint32_t to = stage + d.x_offset + x_offset(token, chunk);
      if (p.x_aligned && (chunk + 1) * 8 <= columns) {
        ptx::cp_async_16(to, from);
        continue;
      }
      T values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = chunk * 8 + i < columns ? from[i] : T(0.0f);
      ptx::store_shared_16(to, *reinterpret_cast<const uint4*>(values));
    }
  }

  // ---- Epilogue.

  __device__ __forceinline__ void finish(const Quad& at, float (&value)[4]) const {
    repair(p, d, at.n, at.token, value);
    if (kFp4 && at.exists) divide_rows(p, p.scales, at.n, value);
    if (at.exists) store_rows(p, at.n, at.token, value);
  }
  // Epilogue of CTAs that split K: each adds its warps' sums, then all add those of the CTAs.
  __device__ __forceinline__ void write_clustered(int pass, int slots) const {
    for_each_quad(*this, pass, slots, 0, 1, [&](const Quad& at) {
      if (!at.exists) return;
      float value[4] = {};
      this->add_slices(at, value);
      ptx::store_shared_16(this->partial_of(at), {__float_as_uint(value[0]), __float_as_uint(value[1]),
                                                  __float_as_uint(value[2]), __float_as_uint(value[3])});
    });
    ptx::cluster_barrier();
    const int ranks = gridDim.x;
    for_each_quad(*this, pass, slots, blockIdx.x, ranks, [&](const Quad& at) {
      float value[4] = {};
      if (at.exists) {
        for (int r = 0; r < ranks; ++r) {
          const float4 part = ptx::load_cluster_float4(ptx::cluster_address(this->partial_of(at), r));
          value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
        }
      }
      finish(at, value);
    });
    ptx::cluster_barrier();  // the other CTAs have read this CTA's partial sums
  }
};

template <typename Mma>
__global__ void __launch_bounds__(Mma::Tile::kThreads, Mma::Tile::kCtasPerSm)
    sm90_skinny_ring_x(const __grid_constant__ Params p, const __grid_constant__ RingXParams d) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta<Mma> cta(p, d, ptx::shared_memory(shared));
  cta.prefetch_first_pass();
  auto ahead = cta.first();
  const Mma mma = cta.mma();
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  fill(cta, ahead);
  walk(cta, mma, ahead, d.passes, [&](int pass, int slots) {
    if (d.clustered) {
      cta.write_clustered(pass, slots);
    } else {
      write(cta, pass, slots);
      if (pass + slots < d.passes) __syncthreads();
    }
  });
}

}  // namespace qao::gemm::sm90_skinny::ring_x
