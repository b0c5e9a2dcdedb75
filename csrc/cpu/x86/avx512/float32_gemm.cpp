// float32 GEMM of float x and any W that expands to float32.
// It serves x that is not bfloat16, and CPUs without AVX512-BF16. Scales of groups and blocks are applied to the
// expanded W, block scales of x to the packed x.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/expand.h"
#include "cpu/x86/avx512/float32_panel.h"
#include "cpu/x86/avx512/fp4.h"
#include "cpu/x86/avx512/int4_parameters.h"

namespace qao::cpu {
namespace {

template <Format kFormat>
struct Bytes : Float32Panel, EightBits {
  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    __m512 scale = _mm512_set1_ps(1);
    if (job.weight_scaling == Scaling::kBlock) {
      const int64_t blocks = divide_up(job.k, kScaleBlock), block = panel * kPanelColumns / kScaleBlock;
      scale = _mm512_set1_ps(static_cast<const float*>(job.scales)[tile_n * kTileRows / kScaleBlock * blocks + block]);
    }
    __m512i bytes[kTileRows];
    load_lanes(job, tile_n, panel * kPanelColumns, bytes);
    kFormat == Format::kInt8 ? lanes_to_quads(bytes) : lanes_to_pairs(bytes);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      __m512 columns[4];
      widen(bytes[i], columns);
      for (int j = 0; j < 4; ++j) {
        if (job.weight_scaling == Scaling::kBlock) columns[j] = _mm512_mul_ps(columns[j], scale);
        store_floats(out + (4 * i + j) * stride, columns[j]);
      }
    }
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, false>(job, tile_n, totals, rows, [&](int64_t tile) {
      return job.weight_scaling == Scaling::kBlock ? no_scales(tile) : load_scales(job, tile * kTileRows);
    });
  }

 private:
  // Converts four columns of 16 rows.
  __attribute__((always_inline)) static void widen(__m512i bytes, __m512 (&columns)[4]) {
    if constexpr (kFormat == Format::kInt8) {
      for (int j = 0; j < 4; ++j) columns[j] = widen_byte(bytes, j);
    } else {
      __m512i pairs[2];
      expand_fp8_halves(bytes, pairs);
      for (int i = 0; i < 2; ++i) {
        columns[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16));
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
        columns[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(pairs[i], upper));
      }
    }
  }
};

struct Int4 : Float32Panel {
  using Parameters = Int4Parameters;
  static constexpr int kBits = 4;
  static void prepare(const Job& job, int64_t tile_n, int64_t group, Parameters* out) {
    load_parameters(job, tile_n, group, out);
  }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters* groups, int groups_stride,
                     uint32_t* out, int64_t stride) {
    const uint8_t* weight = job.weight + (tile_n * job.tiles_k + panel) * int4::kTileBytes;
    const int64_t k = panel * kPanelColumns;
    // The two halves of the K-tile may belong to two groups.
    const Parameters* const halves[2] = {&groups[k / job.group_size * groups_stride],
                                         &groups[least(k + 32, job.k - 1) / job.group_size * groups_stride]};
    __m512i quads[kTileRows];
    load_nibbles(weight, quads);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const Parameters& group = *halves[i % 4 / 2];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i nibbles = _mm512_and_si512(_mm512_srli_epi32(quads[i], 8 * j), _mm512_set1_epi32(0x0F));
        const __m512 difference = _mm512_sub_ps(_mm512_cvtepi32_ps(nibbles), _mm512_load_ps(group.zero));
        store_floats(out + int4::tile_column(4 * i + j) * stride,
                     _mm512_mul_ps(difference, _mm512_load_ps(group.scale)));
      }
    }
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, false>(job, tile_n, totals, rows, no_scales);
  }
};

struct Fp4 : Float32Panel {
  struct Parameters {
    alignas(64) float scale[kTileRows];
  };
  static constexpr int kBits = 4;
  static void prepare(const Job& job, int64_t tile_n, int64_t group, Parameters* out) {
    _mm512_store_ps(out->scale, _mm512_mul_ps(load_fp4_scales(job, tile_n, group), fp4_row_factors(job, tile_n)));
  }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters* groups, int groups_stride,
                     uint32_t* out, int64_t stride) {
    __m512 scales[4];  // of the four k-steps
    for (int step = 0; step < 4; ++step) {
      const int64_t k = least(panel * kPanelColumns + 16 * step, job.k - 1);
      scales[step] = _mm512_load_ps(groups[k / job.group_size * groups_stride].scale);
    }
    __m512i quads[kTileRows];
    load_nibbles(job.weight + (tile_n * job.tiles_k + panel) * int4::kTileBytes, quads);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512 code = _mm512_permutexvar_ps(_mm512_srli_epi32(quads[i], 8 * j), fp4_values());
        store_floats(out + int4::tile_column(4 * i + j) * stride, _mm512_mul_ps(code, scales[i % 4]));
      }
    }
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, false>(job, tile_n, totals, rows, no_scales);
  }
};

// Columns k .. k + 63 of row m as floats, which pack() may round to fp8.
void load_x(const Job& job, int64_t m, int64_t k, float scale, __m512 (&values)[4]) {
  const int64_t left = job.k - k;
  if (job.floats != nullptr) {
    const __m512 inverse = _mm512_set1_ps(1 / scale);
    for (int i = 0; i < 4; ++i) {
      const int64_t index = m * job.floats_stride + k + 16 * i;
      const __m512 x = load16(job.floats, index, job.floats_dtype, first(left - 16 * i));
      values[i] = rounded_to_fp8(_mm512_mul_ps(x, inverse));
    }
  } else if (job.x_format == Format::kFp8) {
    const __mmask64 inside = left >= kTileColumns ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    const uint8_t* x = static_cast<const uint8_t*>(job.x) + m * job.x_stride + k;
    __m512i halves[2];
    expand_fp8(_mm512_maskz_loadu_epi8(inside, x), halves);
    for (int i = 0; i < 4; ++i) {
      const __m256i bits =
          i % 2 == 0 ? _mm512_castsi512_si256(halves[i / 2]) : _mm512_extracti64x4_epi64(halves[i / 2], 1);
      values[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      values[i] = load16(job.x, m * job.x_stride + k + 16 * i, job.x_dtype, first(left - 16 * i));
    }
  }
}

}  // namespace

void avx512::pack_float32_panels(const Job& job, int64_t begin, int64_t end) {
  static_assert(Float32Panel::kPanelColumns == kTileColumns);
  for (int64_t m = begin; m < end; ++m) {
    for (int64_t k = 0; k < job.k; k += kTileColumns) {
      const float scale = job.x_scales[m * job.x_scale_stride + k / kScaleBlock * job.x_block_stride];
      __m512 values[4];
      load_x(job, m, k, scale, values);
      uint32_t* panel = job.panels + k * job.m + m * kTileColumns;
      for (int i = 0; i < 4; ++i) store_floats(panel + 16 * i, _mm512_mul_ps(values[i], _mm512_set1_ps(scale)));
    }
  }
}

void avx512::float32_gemm(const Job& job, int64_t begin, int64_t end) { run_format<Int4, Fp4, Bytes>(job, begin, end); }

}  // namespace qao::cpu
