// Skinny GEMM (decode) for up to 16 bfloat16 tokens from Hopper on: mma.sync with swap-AB.
// It is bound by weight bandwidth. Weights are the 16-row operand and tokens the 8-column one.
//
// A CTA owns a run of n-tiles and computes kTilesN of them per pass. Its warps split K: warp w takes K-steps w,
// w + kWarps, ... of 128 columns through its private cp.async ring, which keeps running across passes. Partial sums of
// the warps, and of the CTAs of a cluster that split K, are added in a fixed order.
//
// Four instructions convert eight nibbles to operands: a byte in the low half of a bfloat16 is a subnormal number of
// that value times 2^-133, exactly. So row g of the operand is q[g], row g + 8 is q[g] + 16 q[g + 8], and the float32
// sums are separated afterwards. x is scaled by 2^100 so that products do not underflow. Zero points are also
// subtracted from the sums, using the sum of x over each group, which an MMA with ones computes. Values that overflow,
// or were not finite to begin with, are recomputed by `exact`.
//
// MMA columns are tokens. Where a K-step has several groups and columns are free, they are (token, group) pairs: x is
// zero in the columns of other groups. A column then has one scale, and groups need no separate sums.
#pragma once

#include "common/mma.cuh"
#include "gemm/sm90_skinny/load_ring_x.cuh"

namespace qao::gemm::sm90_skinny::ring_x {

// `groups` is the number of groups per K-step that are accumulated separately, `dtype` that of the scales and zeros.
// fp4 has its own multiply() in mma_fp4_ring_x.cuh.
template <typename Tile, int groups, bool zeros, DType dtype, Format weight = Format::kInt4>
struct Ring : Cta<Tile> {
  using Base = Cta<Tile>;
  using Base::Base, Base::kR, Base::kTM, Base::x_offset;
  using Base::d, Base::lane, Base::p, Base::partials, Base::rank, Base::row_tile0, Base::row_tiles, Base::slice;
  using Base::tokens;

  // Columns are (token, group) pairs only with one 8-column tile.
  __device__ __forceinline__ int columns_of_token() const { return kTM == 1 ? d.columns_of_token : 1; }
  // The group within the K-step and the token of an MMA column.
  __device__ __forceinline__ int column_group(int column) const { return kTM == 1 ? column >> d.token_shift : 0; }
  __device__ __forceinline__ int column_token(int column) const {
    return kTM == 1 ? column & ((1 << d.token_shift) - 1) : column;
  }
  // Factors of this lane's x in the quarters of a K-step: zero outside its column's group.
  struct Units {
    uint32_t of[4];
  };
  __device__ __forceinline__ Units units() const {
    Units units;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const bool mine = columns_of_token() == 1 || quarter * columns_of_token() / 4 == column_group(lane / 4);
      units.of[quarter] = kTM > 1 || mine ? kScaleX : 0;
    }
    return units;
  }

  using X = uint32_t[8][kTM][2];  // MMA operands of eight k-steps of 16
  __device__ __forceinline__ void load_x(uint32_t x, const Units& units, X& b) const {
    const int last = tokens - 1;  // tokens past the end read the last one
    if constexpr (kTM == 1) {
      const int row = min(column_token(lane % 8), last);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t four[4];
        ptx::ldmatrix_x4(four, x + x_offset(row, 4 * i + lane / 8));
#pragma unroll
        for (int j = 0; j < 4; ++j) b[2 * i + j / 2][0][j % 2] = scale_x(four[j], units.of[i]);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < kTM / 2; ++pair) {
        const int row = min(pair * 16 + lane / 16 * 8 + lane % 8, last);
#pragma unroll
        for (int step = 0; step < 8; ++step) {
          uint32_t four[4];
          ptx::ldmatrix_x4(four, x + x_offset(row, 2 * step + lane / 8 % 2));
#pragma unroll
          for (int j = 0; j < 4; ++j) b[step][2 * pair + j / 2][j % 2] = scale_x(four[j]);
        }
      }
    }
  }

  // Offset in a stage of the scale of this lane's row g.
  static constexpr int kSize = size_of(dtype), kGroupBytes = (zeros ? 2 : 1) * kTileN * kSize;
  __device__ __forceinline__ uint32_t parameters() const {
    return d.scale_offset + column_group(lane % 4 * 2) * kGroupBytes + lane / 4 * kSize;
  }

  using Sums = float[kR][kTM][4];
  static constexpr int kColumnBytes = Tile::kPaddedRow * 4;
  static constexpr bool kFp4 = weight == Format::kFp4;
  static constexpr float kLowUnit = kFp4 ? kFp4Unit : kUnit, kHighUnit = kFp4 ? kFp4Unit : kUnit / 16;

  // Accumulates one K-step. n-tiles past the end are multiplied as well; their sums are discarded.
  __device__ __forceinline__ void multiply(uint32_t stage, const Units& units, uint32_t parameters, Sums& sum) const {
    X b;
    // Load x and sum it over each group
    load_x(stage + d.x_offset, units, b);
    constexpr int kSteps = 8 / groups, kTogether = kR % 2 == 0 ? 2 : 1;
    float x_sum[groups][kTM][4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint32_t ones[4] = {0x00010001, 0x00010001, 0x00010001, 0x00010001};
#pragma unroll
      for (int j = 0; j < kTM; ++j) Half<T>::mma(x_sum[step / kSteps][j], ones, b[step][j][0], b[step][j][1]);
    }
    // Load the weights
    const uint32_t words = stage + lane * 16;
    const uint32_t tile_parameters = (kTM == 1 ? d.groups_of_step : groups) * kGroupBytes;
#pragma unroll
    for (int first = 0; first < kR; first += kTogether) {
      uint32_t word[kTogether][8];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 four = ptx::load_shared_16(words + (first + i) * kStepBytes + half * kTileBytes);
          word[i][4 * half] = four.x, word[i][4 * half + 1] = four.y;
          word[i][4 * half + 2] = four.z, word[i][4 * half + 3] = four.w;
        }
      }
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        float scale[kTogether][2], zero[kTogether][2];  // of rows g and g + 8
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const uint32_t from = stage + parameters + (first + i) * tile_parameters + group * kGroupBytes;
#pragma unroll
          for (int high = 0; high < 2; ++high) {
            scale[i][high] = load_shared_float<dtype>(from + high * 8 * kSize);
            zero[i][high] = zeros ? load_shared_float<dtype>(from + (kTileN + high * 8) * kSize) : kSymmetricZero;
          }
        }
        // Convert W and issue the MMAs
        float product[kTogether][kTM][4] = {};
#pragma unroll
        for (int step = group * kSteps; step < (group + 1) * kSteps; ++step) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            uint32_t a[4];
            make_operand(word[i][step], a);
#pragma unroll
            for (int j = 0; j < kTM; ++j) Half<T>::mma(product[i][j], a, b[step][j][0], b[step][j][1]);
          }
        }
// Apply scales and zero points
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int j = 0; j < kTM; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float low = product[i][j][e], both = product[i][j][e + 2], x = x_sum[group][j][e];
              sum[first + i][j][e] += scale[i][0] * (low - zero[i][0] * x);
              sum[first + i][j][e + 2] += scale[i][1] * (both - low - zero[i][1] * (16 * x));
            }
          }
        }
      }
    }
  }

  // Partial sums in shared memory: [slot][warp][token][columns of the token][kPaddedRow] float32. A slot holds the
  // n-tiles of one pass.
  __device__ __forceinline__ uint32_t partial(int slot, int of_slice, int token) const {
    return partials + ((slot * Tile::kWarps + of_slice) * tokens + token) * columns_of_token() * kColumnBytes;
  }
  __device__ __forceinline__ void keep(int slot, int tiles, const Sums& sum) const {
    const int column = lane % 4 * 2;
    const uint32_t to = partial(slot, slice, column_token(column)) + column_group(column) * kColumnBytes + lane / 4 * 4;
#pragma unroll
    for (int j = 0; j < kTM; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = j * 8 + e;  // relative to that of `column`
        if (token + column_token(column) >= tokens) continue;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          if (i >= tiles) break;
          const uint32_t at = to + token * columns_of_token() * kColumnBytes + i * (kTileN * 4);
          ptx::store_shared_float(at, sum[i][j][e] * kLowUnit);
          ptx::store_shared_float(at + 32, sum[i][j][e + 2] * kHighUnit);
        }
      }
    }
  }

  // Calls finish(slot, token, quad, n, exists) for each quad that this thread stores in the `slots` passes from `pass`
  // on. A quad is four rows of a token from row n on. All lanes of a warp iterate equally often.
  template <typename Finish>
  __device__ __forceinline__ void for_each_quad(int pass, int slots, int of_rank, int ranks,
                                                const Finish& finish) const {
    constexpr int kQuads = kR * kTileN / 4, kRowsAtOnce = Tile::kThreads / kQuads;
    const int m = tokens, quad = threadIdx.x % kQuads;
    for (int first = threadIdx.x / 32 * 32 / kQuads + of_rank * kRowsAtOnce; first < slots * m;
         first += ranks * kRowsAtOnce) {
      int slot = 0, token = first + threadIdx.x % 32 / kQuads;
      bool exists = token < slots * m;
      while (exists && token >= m) token -= m, ++slot;
      const int row_tile = (pass + slot) * kR + quad / 4, n = (row_tile0 + row_tile) * kTileN + quad % 4 * 4;
      finish(slot, token, quad, n, exists && row_tile < row_tiles);
    }
  }

  // Epilogue of the `slots` passes from `pass` on: adds the partial sums of warps and CTAs and stores y.
  template <bool clustered>
  __device__ __forceinline__ void write(int pass, int slots) const {
    __syncthreads();
    constexpr int kQuads = kR * kTileN / 4, kRowsAtOnce = Tile::kThreads / kQuads;
    static_assert(32 % kQuads == 0, "lanes of a warp share a token or have whole tokens");
    if constexpr (clustered) {
      const int m = tokens, quad = threadIdx.x % kQuads;
      for (int row = threadIdx.x / kQuads; row < slots * m; row += kRowsAtOnce) {
        int slot = 0, token = row;
        while (token >= m) token -= m, ++slot;
        float value[4] = {};
        add_slices(slot, token, quad, value);
        ptx::store_shared_16(partial(slot, 0, token) + quad * 16,
                             {__float_as_uint(value[0]), __float_as_uint(value[1]), __float_as_uint(value[2]),
                              __float_as_uint(value[3])});
      }
      ptx::cluster_barrier();
    }
    const int ranks = clustered ? gridDim.x : 1;
    const auto finish = [&](int slot, int token, int quad, int n, bool exists) {
      float value[4] = {};
      if (exists) {
        if constexpr (clustered) {
          for (int r = 0; r < ranks; ++r) {
            const float4 part = ptx::load_cluster_float4(ptx::cluster_address(partial(slot, 0, token) + quad * 16, r));
            value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
          }
        } else {
          add_slices(slot, token, quad, value);
        }
      }
      repair(p, d, n, token, value);
      if constexpr (kFp4) {
        if (exists) divide_rows(p, p.scales, n, value);
      }
      if (exists) store_rows(p, n, token, value);
    };
    for_each_quad(pass, slots, clustered ? rank : 0, ranks, finish);
  }
  __device__ __forceinline__ void add_slices(int slot, int token, int quad, float (&value)[4]) const {
    for (int column = 0; column < columns_of_token(); ++column) {
      sm90_skinny::add_slices<Tile::kWarps>(partial(slot, 0, token) + column * kColumnBytes + quad * 16,
                                            tokens * columns_of_token() * kColumnBytes, value);
    }
  }
};

// Waits until at most stages - 2 copies are in flight.
__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages == 2) {
    ptx::cp_async_wait<0>();
  } else if (stages == 3) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<2>();
  }
}

// Prologue: fills all stages but one.
template <typename Cta>
__device__ __forceinline__ void fill_ring_x(const Cta& cta, typename Cta::Cursor& ahead) {
#pragma unroll 1
  for (int i = 0; i < cta.d.stages - 1; ++i) {
    cta.fetch(ahead, cta.stage_address(i));
    ptx::cp_async_commit();
    cta.advance(ahead);
  }
}

// Mainloop over `passes` passes with a filled ring. write(pass, slots) stores the results of the `slots` passes from
// `pass` on.
template <typename Tile, typename Cta, typename Write>
__device__ __forceinline__ void walk(const Cta& cta, typename Cta::Cursor ahead, const typename Cta::Units& units,
                                     uint32_t parameters, int passes, const Write& write) {
  const RingXParams& d = cta.d;
  uint32_t stage = cta.ring, stage_ahead = cta.stage_address(d.stages - 1);
  const uint32_t last_stage = stage_ahead;
  int step = cta.slice, slot = 0;
  for (int pass = 0; pass < passes; ++pass) {
    typename Cta::Sums sum = {};
    const int tiles = cta.row_tiles - pass * Tile::kTilesN;
    for (; step < cta.steps; step += Tile::kWarps) {
      wait_for_stage(d.stages);
      __syncwarp();  // this stage has arrived in all lanes, and all have read the previous one
      cta.fetch(ahead, stage_ahead);
      ptx::cp_async_commit();
      cta.advance(ahead);
      cta.multiply(stage, units, parameters, sum);
      stage_ahead = stage;
      stage = stage == last_stage ? cta.ring : stage + d.stage_bytes;
    }
    step -= cta.steps;
    cta.keep(slot, tiles, sum);
    if (++slot == d.slots || pass + 1 == passes) {
      write(pass + 1 - slot, slot);
      slot = 0;
    }
  }
}

template <typename Tile, typename Cta>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    sm90_skinny_ring_x(const __grid_constant__ Params p, const __grid_constant__ RingXParams d) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(p, d, ptx::shared_address(shared));

  // PDL: the previous kernel may still run and may write anything, even weights. Before the wait, only prefetch weights
  // to L2, where a later write to them is still seen.
  if (threadIdx.x < min(cta.row_tiles, Tile::kTilesN)) {
    const int row_tile = cta.row_tile0 + threadIdx.x;
    const int bytes = min(min(cta.steps * kStepBytes, (p.k_tiles - 2 * cta.begin) * kTileBytes), kPrefetchBytes);
    ptx::prefetch_l2(p.weight + row_tile * d.row_tile_bytes + cta.begin * kStepBytes, bytes);
    ptx::prefetch_l2(p.scales + row_tile * d.row_tile_scale_bytes, static_cast<int>(d.row_tile_scale_bytes));
  }
  auto ahead = cta.first();
  const auto units = cta.units();
  const uint32_t parameters = ptx::opaque(cta.parameters());
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  fill_ring_x(cta, ahead);
  walk<Tile>(cta, ahead, units, parameters, d.passes, [&](int pass, int slots) {
    if (d.clustered) {
      cta.template write<true>(pass, slots);
      ptx::cluster_barrier();  // the other CTAs have read this CTA's partial sums
    } else {
      cta.template write<false>(pass, slots);
      if (pass + slots < d.passes) __syncthreads();
    }
  });
}

}  // namespace qao::gemm::sm90_skinny::ring_x
