// The portable body: mma.sync, weights as the 16-row operand and tokens as the 8-column one. It serves every operation
// and every M; tile shapes are the rows of configs.inc.
#pragma once

#include "mm8/cta.cuh"

namespace qao::mm8::sm80 {

constexpr int kSteps = kTileK / 32;  // k-steps of a K-tile

// One warp of a CTA. int8 W is summed by the tensor cores over all of K, exactly (int32) or about as float32 does;
// otherwise products of a K-tile or a group are added to float32 sums, with what scales there are.
template <typename X, typename W, typename Tile, bool quantizes>
struct Warp {
  using Product = mm8::Product<X, W>;
  using Cta = mm8::Cta<Product, Tile, quantizes>;
  using KTile = typename Cta::KTile;
  using Value = typename Product::Sum;
  static constexpr bool kFolds = Product::kWeight != Format::kInt8;  // always; else only the parts of a float32 x

  Cta& cta;
  typename Cta::template Sums<Value> product;
  typename Cta::template Sums<float> sum;
  uint32_t nan[Tile::kTilesN][2];  // of rows g and g + 8: bit 7 of a byte is set if NaN was met

  // Operands of k-step `step` for all tokens of the warp.
  __device__ __forceinline__ void load_x(uint32_t x, int step, uint32_t (&b)[Tile::kTilesM][Product::kMmas][2]) const {
    const int first = cta.warp_m * Tile::kTilesM * 8;
    if constexpr (Product::kXBytes == 2) {
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first + j * 8 + cta.lane / 4, chunk = 4 * step + 2 * half + cta.lane % 4 / 2;
          const uint2 words = ptx::load_shared_8(x + swizzled<Cta::kXRowBytes>(row, chunk) + cta.lane % 2 * 8);
          b[j][half][0] = words.x, b[j][half][1] = words.y;
        }
      }
    } else if constexpr (Tile::kTilesM == 1) {
      int row = first + cta.lane % 8;
      if constexpr (quantizes) row = min(row, cta.tokens - 1);  // any, where there is none
      uint32_t words[2];
      ptx::ldmatrix_x2(words, x + swizzled<kTileK>(row, 2 * step + cta.lane / 8 % 2));
      Product::x(words, b[0]);
    } else {
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; j += 2) {
        uint32_t words[4];
        const int row = first + j * 8 + cta.lane / 16 * 8 + cta.lane % 8;
        ptx::ldmatrix_x4(words, x + swizzled<kTileK>(row, 2 * step + cta.lane / 8 % 2));
        Product::x({words[0], words[1]}, b[j]);
        Product::x({words[2], words[3]}, b[j + 1]);
      }
    }
  }

  // The operand of k-step `step` of row tile i.
  __device__ __forceinline__ void load_weight(uint32_t stage, int step, int i, uint32_t (&a)[Product::kMmas][4]) {
    const int row_tile = i * Tile::kWarpsN + cta.warp_n;
    if constexpr (Product::kWeight == Format::kInt4) {
      const uint2 words = ptx::load_shared_8(stage + row_tile * Cta::kWeightTileBytes + step / 2 * int4_mm::kTileBytes +
                                             cta.lane * 16 + step % 2 * 8);
      Product::weight({words.x, words.y}, a);
    } else {
      uint32_t words[4];
      const int row = row_tile * kTileN + cta.lane % 16;
      ptx::ldmatrix_x4(words, stage + swizzled<kTileK>(row, 2 * step + cta.lane / 16));
      if constexpr (kLosesNan<X, W>) {
#pragma unroll
        for (int w = 0; w < 4; ++w) nan[i][w % 2] |= widen::nan_bytes(words[w]) & 0x80808080;
      }
      Product::weight(words, a);
    }
  }

  template <int first_step, int steps>
  __device__ __forceinline__ void multiply(const KTile& tile) {
#pragma unroll
    for (int step = first_step; step < first_step + steps; ++step) {
      uint32_t b[Tile::kTilesM][Product::kMmas][2];
      load_x(tile.x, step, b);
#pragma unroll
      for (int i = 0; i < Tile::kTilesN; ++i) {
        uint32_t a[Product::kMmas][4];
        load_weight(tile.weight, step, i, a);
#pragma unroll
        for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
          for (int mma = 0; mma < Product::kMmas; ++mma) Product::mma(product[i][j], a[mma], b[j][mma]);
        }
      }
    }
  }

  __device__ __forceinline__ void clear_product() {
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) product[i][j][e] = 0;
      }
    }
  }

  // sum += scale (product - zero point * sum of x), for one group.
  __device__ __forceinline__ void fold_group(const KTile& tile, int group, bool zeros) {
    float2 x_sums[Tile::kTilesM];
#pragma unroll
    for (int j = 0; j < Tile::kTilesM; ++j) {
      x_sums[j] = zeros ? cta.read_tokens(tile, group, j) : float2{0, 0};
    }
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
      typename Cta::Group of;
      cta.read_group(tile.weight, group, i, of);
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x_sum = e % 2 == 0 ? x_sums[j].x : x_sums[j].y;
          sum[i][j][e] += of.scale[e / 2] * fmaf(-of.zero[e / 2], x_sum, static_cast<float>(product[i][j][e]));
        }
      }
    }
  }

  // sum += scale of the block of W * scale of the block of x * product.
  __device__ __forceinline__ void fold_block(const KTile& tile) {
    const bool blocks = cta.p.block_scales != nullptr;
    const float scale =
        Product::kFactor * (blocks ? ptx::load_shared_float(tile.weight + Cta::kWeightParametersAt) : 1.0f);
#pragma unroll
    for (int j = 0; j < Tile::kTilesM; ++j) {
      float2 scales = {scale, scale};
      if (blocks && Product::kXBytes == 1) {
        const float2 x_scales = cta.read_tokens(tile, 0, j);
        scales.x *= x_scales.x, scales.y *= x_scales.y;
      }
#pragma unroll
      for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e] += (e % 2 == 0 ? scales.x : scales.y) * product[i][j][e];
      }
    }
  }

  template <int first_step, int steps>
  __device__ __forceinline__ void multiply_group(const KTile& tile, bool zeros) {
    clear_product();
    multiply<first_step, steps>(tile);
    fold_group(tile, first_step / steps, zeros);
  }

  template <int tile_groups>
  __device__ __forceinline__ void multiply_k_tile(const KTile& tile, int k_tile) {
    if constexpr (Product::kWeight == Format::kInt8) {
      multiply<0, kSteps>(tile);
      // The tensor cores cut off what a long sum does not hold; 16-bit results do not show it.
      if (Product::kXBytes == 2 && cta.p.parts > 1) {
        fold_block(tile);
        clear_product();
      }
    } else if constexpr (Product::kWeight == Format::kFp8) {
      clear_product();
      multiply<0, kSteps>(tile);
      fold_block(tile);
    } else if constexpr (tile_groups == 1) {
      multiply_group<0, 4>(tile, cta.begins_group(k_tile));
    } else if constexpr (tile_groups == 2) {
      multiply_group<0, 2>(tile, true);
      multiply_group<2, 2>(tile, true);
    } else {
      multiply_group<0, 1>(tile, true);
      multiply_group<1, 1>(tile, true);
      multiply_group<2, 1>(tile, true);
      multiply_group<3, 1>(tile, true);
    }
  }

  // K-tiles of this slice, and what the slice with the most has.
  __device__ __forceinline__ int own_steps(int begin, int end) const {
    return (end - begin - cta.slice + Tile::kWarpsK - 1) / Tile::kWarpsK;
  }
  static __device__ __forceinline__ int most_steps(int begin, int end) {
    return (end - begin + Tile::kWarpsK - 1) / Tile::kWarpsK;
  }

  // Starts filling the ring, and makes what of x stays in shared memory.
  __device__ __forceinline__ void start(int begin, int end) {
    const int mine = own_steps(begin, end);
    if constexpr (quantizes) cta.bring_x();
    cta.seek(begin + cta.slice);
#pragma unroll
    for (int i = 0; i < Tile::kStages - 1; ++i) {
      if (i < mine) cta.fetch(i);
      ptx::cp_async_commit();
      cta.advance();
    }
    if constexpr (quantizes) cta.quantize_x();
  }

  template <int tile_groups>
  __device__ __forceinline__ void run(int begin, int end) {
    const int mine = own_steps(begin, end), steps = most_steps(begin, end);
    int stage_now = 0, stage_ahead = Tile::kStages - 1, k_tile = begin + cta.slice;
    for (int i = 0; i < steps; ++i, k_tile += Tile::kWarpsK) {
      ptx::cp_async_wait<Tile::kStages - 2>();
      cta.sync_slice();  // this stage has arrived for all, the previous one has been read by all
      if (i + Tile::kStages - 1 < mine) cta.fetch(stage_ahead);
      ptx::cp_async_commit();
      cta.advance();
      const KTile tile = cta.k_tile_at(stage_now, k_tile);
      stage_ahead = stage_now;
      stage_now = stage_now + 1 == Tile::kStages ? 0 : stage_now + 1;
      if (i < mine) multiply_k_tile<tile_groups>(tile, k_tile);
    }
  }

  // What the tensor cores summed over all of K becomes float32; NaN that they did not see is put back.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bool is_nan = false;
        if constexpr (kLosesNan<X, W>) {
          is_nan = (__ballot_sync(0xFFFFFFFFu, nan[i][e / 2] != 0) >> (cta.lane & 28) & 15) != 0;
        }
#pragma unroll
        for (int j = 0; j < Tile::kTilesM; ++j) {
          if constexpr (!kFolds) sum[i][j][e] += Product::kFactor * static_cast<float>(product[i][j][e]);
          if (is_nan) sum[i][j][e] = __uint_as_float(0x7FC00000u);
        }
      }
    }
  }
};

template <typename X, typename W, typename Tile, bool quantizes>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm) mm8_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Warp = Warp<X, W, Tile, quantizes>;
  const Place at = place<Tile>(p);
  typename Warp::Cta cta(p, at, ptx::shared_address(shared));
  Warp warp{cta, {}, {}, {}};
  warp.start(at.begin, at.end);
  const typename Warp::Cta::EarlyRows rows(cta);
  if (Warp::Product::kWeight != Format::kInt4 || p.tile_groups == 1) {
    warp.template run<1>(at.begin, at.end);
  } else if (p.tile_groups == 2) {
    warp.template run<2>(at.begin, at.end);
  } else {
    warp.template run<4>(at.begin, at.end);
  }
  warp.finish();
  cta.write_result(warp.sum, reinterpret_cast<float*>(shared), at.split, rows);
}

// The kernel of a row of configs.inc, null where the row does not serve such an x.
template <XKind x, typename X, typename W, typename Tile>
constexpr Kernel kernel_for() {
  if constexpr (serves(x, Product<X, W>::kXBytes == 2)) {
    return &mm8_kernel<X, W, Tile, x == XKind::kQuantizes>;
  } else {
    return nullptr;
  }
}

}  // namespace qao::mm8::sm80
