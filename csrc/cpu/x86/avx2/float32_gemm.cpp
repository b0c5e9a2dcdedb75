// float32 GEMM of float x and any W that expands to float32 (panel_gemm.h).
// Scales of groups and blocks are applied to the expanded W, block scales of x to the packed x.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx2/expand.h"
#include "cpu/x86/avx2/fp4.h"
#include "cpu/x86/avx2/gguf_floats.h"
#include "cpu/x86/avx2/panel.h"

namespace qao::cpu {
namespace {

struct Float32Sums : Avx2Panel, FloatTotals {
  static constexpr int kStepsOfPart = 1;
  static constexpr int64_t kSteps = 256, kColumns = 1, kPanelColumns = kSteps;
  static constexpr bool kSectioned = false;
  using Sum = __m256;
  using Operand = __m256;
  static Sum zero() { return _mm256_setzero_ps(); }
  static Operand load(const uint32_t* words) { return _mm256_load_ps(reinterpret_cast<const float*>(words)); }
  static Operand broadcast(const uint32_t* word) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(word)); }
  static Sum multiply_add(Sum sum, Operand w, Operand x) { return _mm256_fmadd_ps(w, x, sum); }
};

struct Float32Panel : PlainTotals<Float32Sums> {
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    const bool has_bytes = job.weight_format == Format::kInt8 || job.weight_format == Format::kFp8;
    const bool has_scales = has_bytes && job.weight_scaling != Scaling::kBlock;
    each_eight(job, tile_n, totals, [&](int64_t n, const uint32_t* eight) {
      const Columns columns = load_columns(job, n);
      const __m256 scales = has_scales ? load_scales(job, n) : _mm256_set1_ps(1);
      for (int64_t m = rows.begin; m < rows.end; ++m) {
        const __m256 y = _mm256_fmadd_ps(load_total(eight + m * kTileRows), scales, columns.bias);
        store_first(job.y, m * job.n + n, job.y_dtype, y, columns.count);
      }
    });
  }
};

template <Format kFormat>
struct Bytes : Float32Panel, EightBits {
  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    constexpr int kAtOnce = 16;  // columns
    const int64_t blocks = divide_up(job.k, kScaleBlock);
    const float* scales = static_cast<const float*>(job.scales) + tile_n * kTileRows / kScaleBlock * blocks;
    for (int half = 0; half < 2; ++half) {
      for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kAtOnce) {
        const int64_t at = panel * kPanelColumns + k;
        const __m256 scale = _mm256_set1_ps(job.weight_scaling == Scaling::kBlock ? scales[at / kScaleBlock] : 1);
        __m256i rows[2][8];
        for (int r = 0; r < 8; ++r) {
          uint8_t padded[kAtOnce];
          const uint8_t* bytes = row_bytes(job, tile_n * kTileRows + 8 * half + r, at, padded);
          __m256 values[2];
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)), values);
          for (int i = 0; i < 2; ++i) rows[i][r] = _mm256_castps_si256(_mm256_mul_ps(values[i], scale));
        }
        for (int i = 0; i < 2; ++i) {
          store_steps(rows[i], out + (k + 8 * i) * stride + 8 * half, stride, [](int step) { return step; });
        }
      }
    }
  }

 private:
  static void widen(__m128i bytes, __m256 (&out)[2]) {
    kFormat == Format::kInt8 ? expand_int8(bytes, out) : expand_fp8(bytes, out);
  }
};

struct Gguf : Float32Panel {
  static constexpr int kBits = 0;
  using Parameters = Nothing;
  static void prepare(const Job&, int64_t, int64_t, Parameters*) {}

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    static_assert(kPanelColumns == gguf::kUnit);
    const int64_t columns = least(job.k - panel * kPanelColumns, kPanelColumns);
    for (int half = 0; half < 2; ++half) {
      alignas(32) float values[8][kPanelColumns];
      for (int r = 0; r < 8; ++r) {
        const int64_t n = least(tile_n * kTileRows + 8 * half + r, job.n - 1);
        const uint8_t* row = job.weight + n * job.row_bytes;
        gguf::with_type(job.gguf_type, [&]<gguf::Type kType> {
          using B = gguf::Blocks<kType>;
          gguf::to_floats<kType>(row + panel * (kPanelColumns / B::kColumns) * B::kBytes, columns, values[r]);
        });
      }
      for (int64_t k = 0; k < columns; k += 8) {
        __m256i rows[8];
        for (int r = 0; r < 8; ++r) rows[r] = _mm256_load_si256(reinterpret_cast<const __m256i*>(values[r] + k));
        store_steps(rows, out + k * stride + 8 * half, stride, [](int step) { return step; });
      }
    }
  }
};

// Expands an N-tile of a panel of 4-bit W. values_of(k, eight) returns the conversion of codes and a row to float32,
// for bytes 8 eight .. 8 eight + 7 of the row pairs of the K-tile that begins at column k.
template <typename ValuesOf>
__attribute__((always_inline)) inline void expand_codes(const Job& job, int64_t tile_n, int64_t panel, uint32_t* out,
                                                        int64_t stride, const ValuesOf& values_of) {
  constexpr int64_t kColumns = Float32Panel::kPanelColumns;
  for (int64_t k = panel * kColumns; k < least((panel + 1) * kColumns, job.k); k += kTileColumns) {
    const uint8_t* weight = job.weight + (tile_n * job.tiles_k + k / kTileColumns) * int4::kTileBytes;
    uint32_t* of_tile = out + k % kColumns * stride;
    for (int eight = 0; eight < 8; ++eight) {
      const auto value = values_of(k, eight);
      __m256i low[8], high[8];
      for (int g = 0; g < 8; ++g) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(weight + g * 64 + eight * 8));
        const __m256i words = _mm256_cvtepu8_epi32(bytes);
        low[g] = _mm256_castps_si256(value(_mm256_and_si256(words, _mm256_set1_epi32(0x0F)), g));
        high[g] = _mm256_castps_si256(value(_mm256_srli_epi32(words, 4), g + 8));
      }
      const auto column = [eight](int i) { return int4::tile_column(8 * eight + i); };
      store_steps(low, of_tile, stride, column);
      store_steps(high, of_tile + 8, stride, column);
    }
  }
}

struct Int4 : Float32Panel {
  using Parameters = Int4Group;
  static constexpr int kBits = 4;
  static void prepare(const Job& job, int64_t tile_n, int64_t group, Int4Group* out) {
    load_int4_group(job, tile_n, group, out);
  }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Int4Group* groups, int groups_stride,
                     uint32_t* out, int64_t stride) {
    expand_codes(job, tile_n, panel, out, stride, [&](int64_t k, int eight) {  // all in the same half of the K-tile
      const Int4Group& group = groups[least(k + eight % 2 * 32, job.k - 1) / job.group_size * groups_stride];
      return [&](__m256i nibbles, int row) {
        return _mm256_mul_ps(_mm256_sub_ps(_mm256_cvtepi32_ps(nibbles), _mm256_broadcast_ss(group.zero + row)),
                             _mm256_broadcast_ss(group.scale + row));
      };
    });
  }
};

struct Fp4 : Float32Panel {
  struct Parameters {
    alignas(32) float scale[kTileRows];
  };
  static constexpr int kBits = 4;
  static void prepare(const Job& job, int64_t tile_n, int64_t group, Parameters* out) {
    for (int v = 0; v < 2; ++v) {
      const __m256 scale = _mm256_mul_ps(load_fp4_scales(job, tile_n, group, v), fp4_row_factors(job, tile_n, v));
      _mm256_store_ps(out->scale + 8 * v, scale);
    }
  }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters* groups, int groups_stride,
                     uint32_t* out, int64_t stride) {
    expand_codes(job, tile_n, panel, out, stride, [&](int64_t k, int eight) {  // four each of two k-steps
      const float* scales[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t step = least(k + (eight % 2 * 2 + i) * 16, job.k - 1);
        scales[i] = groups[step / job.group_size * groups_stride].scale;
      }
      return [low = scales[0], high = scales[1]](__m256i codes, int row) {
        return _mm256_mul_ps(fp4_value(codes),
                             _mm256_set_m128(_mm_broadcast_ss(high + row), _mm_broadcast_ss(low + row)));
      };
    });
  }
};

// Sums 32 columns separately: with widely spread values, a longer sum loses small ones that follow large ones.
template <typename F>
struct InSections : F {
  static constexpr bool kSectioned = true;
};

}  // namespace

void avx2::pack_float32_panels(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = Float32Panel::kPanelColumns;
  for (int64_t m = begin; m < end; ++m) {
    for (int64_t k = 0; k < job.tiles_k * kTileColumns; k += 8) {
      const __m256 scale = _mm256_set1_ps(job.x_scales[m * job.x_scale_stride + k / kScaleBlock * job.x_block_stride]);
      __m256 x = _mm256_setzero_ps();
      if (k < job.k) x = _mm256_mul_ps(load_first(job.x, m * job.x_stride + k, job.x_dtype, job.k - k), scale);
      uint32_t* panel = job.panels + (k / kColumns * job.m + m) * kColumns;
      _mm256_store_ps(reinterpret_cast<float*>(panel + k % kColumns), x);
    }
  }
}

void avx2::float32_gemm(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kGguf ? run_panels<Gguf>(job, begin, end)
                                     : run_format<Int4, Fp4, Bytes>(job, begin, end);
}

void avx2::float32_wide_gemm(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt4 ? run_panels<InSections<Int4>>(job, begin, end)
                                     : run_panels<InSections<Fp4>>(job, begin, end);
}

}  // namespace qao::cpu
