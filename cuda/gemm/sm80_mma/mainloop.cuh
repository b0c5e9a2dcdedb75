// Portable GEMM kernel: mma.sync with swap-AB.
// Weights are the 16-row operand and tokens the 8-column one. It supports all operators and every M. Tile shapes are
// the rows of tiles.inc and tiles_sm90.inc; with a float x and 4-bit W, of weight_only_tiles.inc.
#pragma once

#include "gemm/sm80_mma/load.cuh"

namespace qao::gemm::sm80_mma {

constexpr int kSteps = 4;  // k-steps per K-tile

// Float x with 4-bit W: this lane's words of a K-tile of W, one per k-step, and two k-steps of x if a warp has 8
// tokens. An empty base otherwise, since even unused members change the compiled code.
template <int tiles_n, bool weight_only>
struct WeightOnlyRegisters {};
template <int tiles_n>
struct WeightOnlyRegisters<tiles_n, true> {
  uint4 words[tiles_n];
  uint32_t x_words[4];
};

// One warp of a CTA. Without scales along K, tensor cores accumulate over all of K, exactly (int32) or about as float32
// does. Otherwise the sums of a K-tile or group are scaled and promoted to float32 sums.
template <typename X, typename W, typename TileOfWarp, typename CtaOfWarp>
struct Warp : WeightOnlyRegisters<TileOfWarp::kTilesN, CtaOfWarp::kWeightOnly> {
  using Product = sm80_mma::Product<X, W>;
  using Tile = TileOfWarp;
  using Cta = CtaOfWarp;
  using Codes = typename Cta::Codes;
  static constexpr bool quantizes = Cta::kQuantizes;
  static constexpr bool kScalesX = std::is_same_v<X, __nv_bfloat16> && std::is_same_v<W, Fp8> && Tile::kScalesX;
  using Math = std::conditional_t<kScalesX, sm80_mma::Product<__half, Fp8>, Product>;
  static constexpr bool kLosesNan = sm80_mma::kLosesNan<X, W> && !kScalesX;
  using KTile = typename Cta::KTile;
  using Value = typename Product::Sum;
  static constexpr bool kPacked = is_packed(Product::kWeight), kBlocks = may_have_blocks(Product::kWeight);
  static constexpr bool kFolds = kPacked || kBlocks;  // always; otherwise only for the parts of a float32 x
  static constexpr bool kWeightOnly = Cta::kWeightOnly;
  // Where registers are short: all slices walk as many K-tiles, which counts in a uniform register, and words of W are
  // loaded late. Others, and gathered rows with zero points, take fewer instructions without.
  static constexpr bool kFewRegisters = kWeightOnly && Tile::kTilesM == 4 && !(Cta::kGathers && Cta::kFractions);

  Cta& cta;
  typename Cta::template Sums<Value> product;
  typename Cta::template Sums<float> sum;
  uint32_t nan[Tile::kTilesN][2];  // of rows g and g + 8: bit 7 of a byte is set if NaN was seen
  float x_unit[Tile::kTilesM];     // kScalesX: inverse of the factor of token g's x

  // B operands of k-step `step` for all tokens of the warp.
  using StepX = uint32_t[Tile::kTilesM][Product::kMmas][2];
  __device__ __forceinline__ void load_x(uint32_t x, int step, StepX& b) {
    const int first = cta.warp_m * Tile::kTilesM * 8;
    if constexpr (kWeightOnly && Tile::kTilesM == 1) {
      uint32_t (&two)[4] = this->x_words;
      if (step % 2 == 0) ptx::ldmatrix_x4(two, x + swizzled<128>(first + cta.lane % 8, 2 * step + cta.lane / 8));
      Product::x({two[step % 2 * 2], two[step % 2 * 2 + 1]}, b[0]);
    } else if constexpr (Product::kXBytes == 2 && !kWeightOnly) {
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
      if constexpr (quantizes) row = min(row, cta.tokens - 1);  // tokens past the end read an existing one
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

  static constexpr bool kCentred = [] {
    if constexpr (kPacked) return Product::kCentred;
    return false;
  }();
  // Whether the conversion of W depends on the group.
  static constexpr bool kConvertsByGroup = [] {
    if constexpr (kWeightOnly) return Product::kConvertsByGroup;
    return kCentred;
  }();

  __device__ __forceinline__ void load_words(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
      const int row_tile = i * Tile::kWarpsN + cta.warp_n;
      this->words[i] = ptx::load_shared_16(stage + row_tile * Cta::kWeightTileBytes + cta.lane * 16);
    }
  }

  // Loads and converts the A operand of k-step `step` of n-tile i. `fractions`: zero points are not whole.
  __device__ __forceinline__ void load_weight(uint32_t stage, int step, int i, const Codes& codes, bool fractions,
                                              uint32_t (&a)[Product::kMmas][4]) {
    const int row_tile = i * Tile::kWarpsN + cta.warp_n;
    if constexpr (kWeightOnly) {
      const uint4& of = this->words[i];
      Product::weight(step == 0 ? of.x : step == 1 ? of.y : step == 2 ? of.z : of.w, codes, fractions, a);
    } else if constexpr (kPacked) {
      const uint2 words = ptx::load_shared_8(stage + row_tile * Cta::kWeightTileBytes + step / 2 * int4::kTileBytes +
                                             cta.lane * 16 + step % 2 * 8);
      if constexpr (kCentred) {
        Product::weight({words.x, words.y}, codes, a);
      } else {
        Product::weight({words.x, words.y}, a);
      }
    } else {
      uint32_t words[4];
      const int row = row_tile * kTileN + cta.lane % 16;
      ptx::ldmatrix_x4(words, stage + swizzled<kTileK>(row, 2 * step + cta.lane / 16));
      if constexpr (kLosesNan) {
#pragma unroll
        for (int w = 0; w < 4; ++w) nan[i][w % 2] |= widen::nan_bytes(words[w]) & 0x80808080;
      }
      Math::weight(words, a);
    }
  }

  // Converts bfloat16 to float16. A power of two per token and K-tile brings x below 2^15: float16 then loses less than
  // 2^-39 of the largest value.
  __device__ __forceinline__ void scale_x(StepX (&b)[kSteps]) {
#pragma unroll
    for (int j = 0; j < Tile::kTilesM; ++j) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) largest = ptx::max_of_magnitudes(largest, b[i / 4][j][i / 2 % 2][i % 2]);
      largest = ptx::max_of_magnitudes(largest, largest >> 16);
      largest = ptx::max_of_magnitudes(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = ptx::max_of_magnitudes(largest, __shfl_xor_sync(~0u, largest, 2));
      const uint32_t exponent = max(largest >> 7 & 0xFF, 15u), factor = (268 - exponent) << 7;
      x_unit[j] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
        uint32_t& pair = b[i / 4][j][i / 2 % 2][i % 2];
        const uint32_t scaled = Half<__nv_bfloat16>::multiply_add(pair, factor * 0x10001, 0x80008000);
        pair = ptx::to_float16(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xFFFF0000));
      }
    }
  }

  template <int first_step, int steps>
  __device__ __forceinline__ void multiply(const KTile& tile, const Codes (&codes)[Tile::kTilesN]) {
    StepX scaled[kScalesX ? kSteps : 1];
    if constexpr (kScalesX) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_x(tile.x, step, scaled[step]);
      scale_x(scaled);
    }
    bool fractions = false;
    if constexpr (kWeightOnly && kConvertsByGroup) fractions = Product::any_fraction(codes, cta.p.parts);
#pragma unroll
    for (int step = first_step; step < first_step + steps; ++step) {
      StepX read;
      if constexpr (!kScalesX) load_x(tile.x, step, read);
      const StepX& b = kScalesX ? scaled[step] : read;
#pragma unroll
      for (int i = 0; i < Tile::kTilesN; ++i) {
        uint32_t a[Product::kMmas][4];
        load_weight(tile.weight, step, i, codes[i], fractions, a);
#pragma unroll
        for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
          for (int mma = 0; mma < Product::kMmas; ++mma) Math::mma(product[i][j], a[mma], b[j][mma]);
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
    clear_product();
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
      nan[i][0] = nan[i][1] = 0;
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e] = 0;
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

  // Promotes one group: sum += scale (product - zero point * sum of x).
  __device__ __forceinline__ void fold_group(const KTile& tile, int group, bool zeros) {
    if constexpr (kCentred) zeros &= cta.p.has_zeros;
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
          float value = static_cast<float>(product[i][j][e]);
          if (Product::kSumsRows && e >= 2) value -= static_cast<float>(product[i][j][e - 2]);
          sum[i][j][e] += of.scale[e / 2] * fmaf(-of.zero[e / 2], x_sum, value);
        }
      }
    }
  }

  // Promotes one block: sum += scale of the block of W * scale of the block of x * product.
  __device__ __forceinline__ void fold_block(const KTile& tile) {
    const bool blocks = cta.p.block_scales != nullptr;
    float scale[Tile::kTilesN];
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
      const uint32_t at = tile.weight + Cta::kWeightParametersAt + (i * Tile::kWarpsN + cta.warp_n) * 4;
      scale[i] = Math::kFactor * (blocks ? ptx::load_shared_float(at) : 1.0f);
    }
#pragma unroll
    for (int j = 0; j < Tile::kTilesM; ++j) {
      float2 x_scales = {1, 1};
      if (blocks && Product::kXBytes == 1) x_scales = cta.read_tokens(tile, 0, j);
      if constexpr (kScalesX) {
        x_scales = {__shfl_sync(~0u, x_unit[j], cta.lane % 4 * 8), __shfl_sync(~0u, x_unit[j], cta.lane % 4 * 8 + 4)};
      }
#pragma unroll
      for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[i][j][e] += scale[i] * (e % 2 == 0 ? x_scales.x : x_scales.y) * product[i][j][e];
        }
      }
    }
  }

  // Promotes one group of a float x with 4-bit W: sum += scale * product.
  __device__ __forceinline__ void fold_scaled(const KTile& tile, int group, const Codes (&codes)[Tile::kTilesN]) {
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
      const Codes of = kConvertsByGroup ? codes[i] : cta.read_codes(tile.weight, group, i);
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e] += of.scale[e / 2] * product[i][j][e];
      }
    }
  }

  template <int first_step, int steps>
  __device__ __forceinline__ void multiply_group(const KTile& tile, bool zeros) {
    Codes codes[Tile::kTilesN];
    if constexpr (kConvertsByGroup) {
#pragma unroll
      for (int i = 0; i < Tile::kTilesN; ++i) codes[i] = cta.read_codes(tile.weight, first_step / steps, i);
    }
    if constexpr (kFewRegisters && first_step == 0) load_words(tile.weight);
    clear_product();
    multiply<first_step, steps>(tile, codes);
    if constexpr (kWeightOnly) {
      fold_scaled(tile, first_step / steps, codes);
    } else {
      fold_group(tile, first_step / steps, zeros);
    }
  }

  template <int tile_groups>
  __device__ __forceinline__ void multiply_k_tile(const KTile& tile, int k_tile) {
    Codes none[Tile::kTilesN];  // not read
    if constexpr (kWeightOnly && !kFewRegisters) load_words(tile.weight);
    if constexpr (!kFolds) {
      multiply<0, kSteps>(tile, none);
      // Tensor cores truncate long sums. A float32 y (x in parts) would show that; a 16-bit y does not.
      if (Product::kXBytes == 2 && cta.p.parts > 1) {
        fold_block(tile);
        clear_product();
      }
    } else if constexpr (kBlocks) {
      clear_product();
      multiply<0, kSteps>(tile, none);
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

  // Prologue: starts filling the ring, and computes a resident x.
  __device__ __forceinline__ void start() {
    if constexpr (quantizes) cta.bring_x();
#pragma unroll
    for (int i = 0; i < Tile::kStages - 1; ++i) {
      if (Cta::kOnePass ? cta.step < cta.steps : cta.row_tiles > 0) cta.fetch(i);
      ptx::cp_async_commit();
      cta.advance();
    }
    if constexpr (quantizes) cta.quantize_x();
  }

  // Mainloop of one pass: this slice's K-tiles from `step` on. Leaves in `step` the first K-tile of the next pass.
  template <int tile_groups>
  __device__ __forceinline__ void walk(int& step, int& stage_now, int& stage_ahead) {
    const int all = (cta.steps + Tile::kWarpsK - 1) / Tile::kWarpsK;
    for (int i = 0; kFewRegisters ? i < all : step < cta.steps; ++i, step += Tile::kWarpsK) {
      ptx::cp_async_wait<Tile::kStages - 2>();
      cta.sync_slice();  // this stage has arrived in all threads, and all have read the previous one
      if (Cta::kOnePass ? cta.step < cta.steps : cta.row_tiles > 0) cta.fetch(stage_ahead);
      ptx::cp_async_commit();
      cta.advance();
      const int k_tile = cta.begin + step;
      const KTile tile = cta.k_tile_at(stage_now, k_tile);
      stage_ahead = stage_now;
      stage_now = stage_now + 1 == Tile::kStages ? 0 : stage_now + 1;
      if (kFewRegisters && step >= cta.steps) continue;
      multiply_k_tile<tile_groups>(tile, k_tile);
    }
    step -= cta.steps;
  }

  // Converts sums accumulated over all of K to float32, or keeps int32 in the bits of a float. Restores NaN lost in the
  // conversion of W.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bool is_nan = false;
        if constexpr (kLosesNan) {
          is_nan = (__ballot_sync(0xFFFFFFFFu, nan[i][e / 2] != 0) >> (cta.lane & 28) & 15) != 0;
        }
#pragma unroll
        for (int j = 0; j < Tile::kTilesM; ++j) {
          if constexpr (Cta::kWholeSums) {
            const int whole = product[i][j][e];
            sum[i][j][e] = cta.p.epilogue.whole_sums ? as_part(whole) : static_cast<float>(whole);
          } else if constexpr (!kFolds) {
            sum[i][j][e] += Product::kFactor * static_cast<float>(product[i][j][e]);
          }
          if (is_nan) sum[i][j][e] = __uint_as_float(0x7FC00000u);
        }
      }
    }
    if constexpr (kWeightOnly) Product::finish(*this);
  }

  // Runs all passes of the CTA.
  __device__ __forceinline__ void run(uint8_t* shared, int split) {
    start();
    int step = cta.slice, stage_now = 0, stage_ahead = Tile::kStages - 1;
    for (int pass = 0, passes = cta.passes(); pass < passes; ++pass) {
      const typename Cta::EarlyRows rows(cta, pass);
      clear();
      if constexpr (Cta::kGroups > 0) {
        walk<Cta::kGroups>(step, stage_now, stage_ahead);
      } else if (!kPacked || cta.p.tile_groups == 1) {
        walk<1>(step, stage_now, stage_ahead);
      } else if (kWeightOnly || cta.p.tile_groups == 2) {
        walk<2>(step, stage_now, stage_ahead);
      } else {
        walk<4>(step, stage_now, stage_ahead);
      }
      finish();
      cta.write_result(sum, shared, pass, split, rows);
    }
  }
};

// The kernel's name begins with the architecture it is compiled for: launch_sm89.cu and launch_sm90.cu define others.
#ifndef QAO_KERNEL
#define QAO_KERNEL sm80_mma
#endif
// static: tiles.inc and tiles_sm90.inc share tiles.
template <typename X, typename W, typename Tile, bool quantizes>
static __global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    QAO_KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Warp = Warp<X, W, Tile, Cta<Product<X, W>, Tile, quantizes>>;
  const Place at = place<Tile>(p);
  // A resident x next to 8-bit W is up to 3 % slower with its address in a register.
  typename Warp::Cta cta(p, at, quantizes && !Warp::kPacked ? ptx::shared_address(shared) : ptx::shared_memory(shared));
  cta.seek();
#if __CUDA_ARCH__ >= 900
  // PDL: nothing that the previous kernel writes, even workspace, may be touched before it ends.
  cta.prefetch();
  ptx::wait_for_previous_kernel();
  if (p.next_early) ptx::launch_dependents();
#endif
  Warp warp{{}, cta};
  warp.run(shared, at.split);
}

// The kernel of a row, or null if the row does not support these operands.
template <XKind x, WeightKind weight, typename X, typename W, typename Tile>
constexpr Kernel kernel_for() {
  if constexpr (serves(x, Product<X, W>::kXBytes == 2) && serves(weight, Product<X, W>::kWeight)) {
    return &QAO_KERNEL<X, W, Tile, x == XKind::kQuantizes>;
  } else {
    return nullptr;
  }
}

}  // namespace qao::gemm::sm80_mma
