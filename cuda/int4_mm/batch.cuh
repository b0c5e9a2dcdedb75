// The body for 9 to 16 tokens on Hopper: decode.cuh's arithmetic (which see) on wgmma, with x brought to a CTA once.
//
// A CTA owns a run of row tiles and, in a cluster of two, half of K. Most of its warps multiply: warps_n side by side
// over row tiles times warps_k slices of K, four row tiles beside one another to a warpgroup's 64 rows. A warp takes
// every warps_k-th K-step of 128 columns of its row tiles through a cp.async ring of its own. The other warps bring x
// to a ring that all share. Sums of the slices, then of the CTAs, are added in their order.
#pragma once

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "int4_mm/batch_cta.cuh"
#include "int4_mm/decode_common.cuh"

namespace qao::int4_mm::batch {

template <typename Tile>
struct Batch : Cta<Tile> {
  using Base = Cta<Tile>;
  using Base::Base, Base::kR, Base::kTM, Base::kHalfBytes;
  using Base::d, Base::lane, Base::p, Base::rank, Base::ring, Base::row_tile0, Base::row_tiles, Base::shared;
  using Base::slice, Base::steps, Base::warp, Base::warp_n;
  using typename Base::Cursor, typename Base::Place;

  using Sums = float[kR][kTM][4];

  // Row tiles that do not exist are multiplied like others: their sums go nowhere.
  template <int groups>
  __device__ __forceinline__ void multiply(uint32_t stage, uint64_t x, uint32_t x_sums, uint32_t param, uint32_t select,
                                           bool half_scales, Sums& sum) const {
    const uint32_t size = size_of(p.scale_dtype);
    constexpr int kSteps = 8 / groups;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      float2 xs[kTM];
#pragma unroll
      for (int j = 0; j < kTM; ++j) xs[j] = ptx::load_shared_float2(x_sums + (group * Tile::kTokens + j * 8) * 4);
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        uint32_t words[kSteps], a[kSteps][4];
#pragma unroll
        for (int s = 0; s < kSteps; s += 2) {  // not four: registers are few
          const int step = group * kSteps + s;
          const uint2 two = ptx::load_shared_8(stage + i * kStepBytes + step / 4 * kTileBytes + step % 4 * 4);
          words[s] = two.x, words[s + 1] = two.y;
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const uint32_t odd = __byte_perm(words[s], 0, 0x4341);
          a[s][0] = words[s] & 0x000F000F, a[s][1] = words[s] & 0x00FF00FF;
          a[s][2] = odd & 0x000F000F, a[s][3] = odd;
        }
        float product[kTM][4];
        wgmma::fence();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const int step = group * kSteps + s;
          wgmma::Product<T, Tile::kTokens>::run(product, a[s], x + step / 4 * (kHalfBytes >> 4) + step % 4 * 2, s > 0);
        }
        wgmma::commit();
        float parameter[4];
#pragma unroll
        for (int which = 0; which < 4; ++which) {
          if (which >= 2 && !d.zeros) {
            parameter[which] = kSymmetricZero;
            continue;
          }
          parameter[which] = __uint_as_float(__byte_perm(
              ptx::load_shared_word(param + (i * groups + group) * p.group_bytes + which * 8 * size), 0, select));
        }
        if (half_scales) {
#pragma unroll
          for (int which = 0; which < 4; ++which) {
            if (which < 2 || d.zeros) ptx::half_to_float_if(true, parameter[which]);
          }
        }
        wgmma::wait<0>();
#pragma unroll
        for (int j = 0; j < kTM; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float low = product[j][e], both = product[j][e + 2], of_x = e == 0 ? xs[j].x : xs[j].y;
            sum[i][j][e] += parameter[0] * (low - parameter[2] * of_x);
            sum[i][j][e + 2] += parameter[1] * (both - low - 16 * parameter[3] * of_x);
          }
        }
      }
    }
  }

  template <int groups>
  __device__ __forceinline__ void walk(Cursor& ahead, Sums& sum) const {
    const uint32_t g = lane / 4, size = size_of(p.scale_dtype), param = ptx::opaque((g * size & ~3u) + kR * kStepBytes);
    const bool half = p.scale_dtype == DType::kFloat16;
    const uint32_t select = ptx::opaque(size == 4 ? 0x3210
                                        : g % 2   ? (half ? 0x4432 : 0x3244)
                                                  : (half ? 0x4410 : 0x1044));
    const uint32_t stage_bytes = d.stage_bytes, end = ring + Tile::kStages * stage_bytes;
    const bool scales = this->copies_scales();
    uint32_t stage = ring, stage_ahead = end - stage_bytes;
    Place at{slice, 0};
#pragma unroll 1
    for (int step = slice; step < steps; step += d.warps_k) {
      ptx::cp_async_wait<Tile::kStages - 2>();
      __syncwarp();
      this->fetch(ahead, scales, stage_ahead);
      tma::barrier_wait(this->full(at.slot), at.round & 1);
      multiply<groups>(stage + lane * 16, wgmma::descriptor(this->x_stage(at.slot)),
                       this->x_sums(at.slot) + lane % 4 * 8, stage + param, select, half, sum);
      __syncwarp();
      if (lane == 0) tma::barrier_arrive(this->empty(at.slot));
      this->move(at, d.warps_k);
      stage_ahead = stage;
      stage += stage_bytes;
      if (stage == end) stage = ring;
    }
  }

  // ---- Sums, in shared memory that x and weights leave: [slice][token][padded_row] float32.

  __device__ __forceinline__ uint32_t partial(int of_slice, int token) const {
    return shared + kBatchX + (of_slice * d.tokens + token) * (d.padded_row * 4);
  }
  __device__ __forceinline__ void keep(const Sums& sum) const {
    const uint32_t to = partial(slice, lane % 4 * 2) + (warp_n * kTileN + lane / 4) * 4;
#pragma unroll
    for (int j = 0; j < kTM; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j * 8 + lane % 4 * 2 + e >= d.tokens) continue;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          const uint32_t at = to + ((j * 8 + e) * d.padded_row + i * d.warps_n * kTileN) * 4;
          ptx::store_shared_float(at, sum[i][j][e] * kUnit);
          ptx::store_shared_float(at + 32, sum[i][j][e + 2] * (kUnit / 16));
        }
      }
    }
  }
  __device__ __forceinline__ void add(int token, int quad, float (&value)[4]) const {
    const uint32_t from = partial(0, token) + quad * 16;
    for (int s = 0; s < d.warps_k; ++s) add_slices<1>(from + s * d.tokens * (d.padded_row * 4), 0, value);
  }
  // Stores y: a warp a token, a lane four rows. Of the two CTAs of a cluster each has half of the tokens.
  __device__ __forceinline__ void write() const {
    const bool clustered = gridDim.x > 1;
    const int middle = (d.tokens + 1) / 2, quads = row_tiles * (kTileN / 4);
    const uint32_t received = shared + d.received_offset;
    const int begins = clustered && rank == 1 ? middle : 0, ends = clustered && rank == 0 ? middle : d.tokens;
    if (clustered) {
      const int others = middle - begins;  // the first token of the CTA beside
      const uint32_t to = ptx::cluster_address(received, 1 - rank);
      ptx::cluster_wait();  // it has started
      for (int token = others + warp; token < (rank == 1 ? middle : d.tokens); token += Tile::kAllWarps) {
        for (int quad = lane; quad < quads; quad += 32) {
          float value[4] = {};
          add(token, quad, value);
          ptx::store_cluster_float4(to + (token - others) * (d.padded_row * 4) + quad * 16, value);
        }
      }
      ptx::cluster_barrier();
    }
    // Several tokens at once hide each other's latencies.
    constexpr int kAtOnce = 2;
#pragma unroll 1
    for (int first = 0; first < quads; first += 32) {
      const int quad = first + lane, n = (row_tile0 + quad / 4) * kTileN + quad % 4 * 4;
#pragma unroll 1
      for (int token0 = begins + warp; token0 < ends; token0 += kAtOnce * Tile::kAllWarps) {
        float value[kAtOnce][4] = {};
        const auto each = [&](const auto& work) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int token = token0 + i * Tile::kAllWarps;
            if (quad < quads && token < ends) work(token, value[i]);
          }
        };
#pragma unroll 1
        for (int s = 0; s < d.warps_k; ++s) {
          each([&](int token, float (&to)[4]) { add_slices<1>(partial(s, token) + quad * 16, 0, to); });
        }
        if (clustered) {
          each([&](int token, float (&to)[4]) {
            add_slices<1>(received + (token - begins) * (d.padded_row * 4) + quad * 16, 0, to);
          });
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) repair(p, d, n, token0 + i * Tile::kAllWarps, value[i]);
        each([&](int token, float (&of)[4]) { store_rows(p, n, token, of); });
      }
    }
  }
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    batch_kernel(const __grid_constant__ Params p, const __grid_constant__ BatchParams d) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Batch<Tile> cta(p, d, ptx::shared_address(shared));
  const bool multiplies = cta.warp < d.warps_n * d.warps_k;
  if (gridDim.x > 1) ptx::cluster_arrive();

  // The kernel before this one may still run. What it writes must not be read before the wait, and might be anything,
  // weights too: they are brought as far as the L2 cache, where a later write to them still counts.
  if (threadIdx.x < cta.row_tiles) {
    const int row_tile = cta.row_tile0 + threadIdx.x;
    const int bytes = min(min(cta.steps * kStepBytes, (p.k_tiles - 2 * cta.begin) * kTileBytes), kPrefetchBytes);
    ptx::prefetch_l2(p.weight + row_tile * d.row_tile_bytes + cta.begin * kStepBytes, bytes);
    ptx::prefetch_l2(p.scales + row_tile * d.row_tile_scale_bytes, static_cast<int>(d.row_tile_scale_bytes));
  }
  if (threadIdx.x < d.x_stages) {
    tma::barrier_init(cta.full(threadIdx.x), 32);
    tma::barrier_init(cta.empty(threadIdx.x), d.warps_n);
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();

  typename Batch<Tile>::Sums sum = {};
  auto ahead = cta.first();
  if (multiplies) {
#pragma unroll 1
    for (int i = 0; i < Tile::kStages - 1; ++i) cta.fetch(ahead, cta.copies_scales(), cta.ring + i * d.stage_bytes);
  }
  const auto run = [&]<int groups>() {
    if (multiplies) {
      cta.template walk<groups>(ahead, sum);
    } else {
      cta.template bring_x<groups>();
    }
  };
  if (d.groups_of_step == 1) {
    run.template operator()<1>();
  } else if (d.groups_of_step == 2) {
    run.template operator()<2>();
  } else {
    run.template operator()<4>();
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (multiplies) cta.keep(sum);
  __syncthreads();
  cta.write();
}

}  // namespace qao::int4_mm::batch
