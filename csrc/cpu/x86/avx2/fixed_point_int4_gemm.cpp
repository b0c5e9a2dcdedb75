// W4A16 GEMM with x in fixed point and `vpmaddubsw`.
// Eight rows of W are in the lanes of a register, four k at a time.
//
// Per chunk of K, the nibbles of 16 rows of W are expanded into a panel in L1, [four k][16 rows][4 bytes]. Every row of
// x then broadcasts four bytes to multiply it. Sums of eight fours stay in 16 bits (8 * 2 * 15 * 128 < 2^15) and are
// then widened.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx2/int4_panel.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kQuadsAtOnce = 8;              // that fit in 16-bit sums
constexpr int kPanelRow = 4 * kTileN;        // bytes
constexpr int kTilePanel = kTileN * kTileK;  // bytes of a K-tile's panel
constexpr int kMaxTiles = kMaxSection / kTileK;
constexpr int kVectors = kTileN / 8;
constexpr int kRowsX = 4;

__m256i broadcast_quad(const int8_t* bytes) {
  int32_t quad;
  __builtin_memcpy(&quad, bytes, 4);
  return _mm256_set1_epi32(quad);
}

struct Section {  // of one N-tile
  __m256 scale[kVectors], zero[kVectors];
};
Section load_section(const Job& job, int64_t tile, int64_t s) {
  const int64_t offset = (tile * job.groups + s / job.sections_per_group) * job.parameters * kTileN;
  Section section;
  for (int v = 0; v < kVectors; ++v) {
    section.scale[v] = load8(job.scales, offset + 8 * v, job.scale_dtype);
    section.zero[v] = job.parameters == 2 ? load8(job.scales, offset + kTileN + 8 * v, job.scale_dtype)
                                          : _mm256_set1_ps(int4::kSymmetricZero);
  }
  return section;
}

// sums += weight_of_plane * (W * x) over eight quads; panel and x start at the first of them.
template <int kM>
__attribute__((always_inline)) inline void add_quads(const uint8_t* panel, const int8_t* x, int64_t x_row, int first,
                                                     __m256i plane_weight, __m256i (&sums)[kM][kVectors]) {
  __m256i products[kM][kVectors];
  for (auto& row : products) {
    for (auto& product : row) product = _mm256_setzero_si256();
  }
#pragma GCC unroll 8
  for (int visit = 0; visit < kQuadsAtOnce; ++visit) {
    const __m256i* row = reinterpret_cast<const __m256i*>(panel + (first + visit) * 64);
    const __m256i w[kVectors] = {_mm256_load_si256(row), _mm256_load_si256(row + 1)};
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) {
      const __m256i four = broadcast_quad(x + i * x_row + quad_of(first + visit) * 4);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const __m256i product = _mm256_maddubs_epi16(w[v], four);
        products[i][v] = _mm256_add_epi16(products[i][v], product);
        asm("" : "+x"(products[i][v]));  // add now: products kept until the end would spill
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = _mm256_add_epi32(sums[i][v], _mm256_madd_epi16(products[i][v], plane_weight));
    }
  }
}

// Sums of word `w` of section `s` for rows m .. m + kM of x, in units of that word.
template <int kM>
__attribute__((always_inline)) inline void multiply_word(const Job& job, int64_t m, int64_t s, int w,
                                                         const uint8_t* panel, const Section& section,
                                                         __m256 (&values)[kM][kVectors]) {
  const int64_t tile = s * job.section / kTileK, tiles = least(job.fixed_point.chunk_tiles, job.tiles_k - tile);
  constexpr int64_t kXTile = 2 * kTileK;
  const int64_t x_row = job.tiles_k * kXTile;
  const bool whole = job.section >= kTileK;  // not half of a K-tile
  const int8_t* x = job.fixed_point.bytes[w] + m * x_row + tile * kXTile;
  __m256i sums[kM][kVectors];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm256_setzero_si256();
  }
  for (int plane = 0; plane < 2; ++plane) {
    const __m256i plane_weight = _mm256_set1_epi16(plane == 0 ? 256 : 1);
    for (int64_t t = 0; t < tiles; ++t) {
      const int8_t* bytes = x + t * kXTile + plane * kTileK;
      const uint8_t* tile_panel = panel + t * kTilePanel;
      if (whole || s % 2 == 0) add_quads<kM>(tile_panel, bytes, x_row, 0, plane_weight, sums);
      if (whole || s % 2 == 1) add_quads<kM>(tile_panel, bytes, x_row, kQuadsAtOnce, plane_weight, sums);
    }
  }
  for (int i = 0; i < kM; ++i) {
    const __m256 x_sum = _mm256_set1_ps(job.fixed_point.sums[w][(m + i) * job.sections + s]);
    for (int v = 0; v < kVectors; ++v) {
      values[i][v] = _mm256_fnmadd_ps(section.zero[v], x_sum, _mm256_cvtepi32_ps(sums[i][v]));
    }
  }
}

// The last word of a single row, when its neighbors have none.
[[gnu::noinline]] void last_word(const Job& job, int64_t m, int64_t s, const uint8_t* panel, const Section& section,
                                 float (&last)[kTileN]) {
  __m256 values[1][kVectors];
  multiply_word<1>(job, m, s, job.fixed_point.words, panel, section, values);
  for (int v = 0; v < kVectors; ++v) _mm256_store_ps(last + 8 * v, values[0][v]);
}

// total[i][16] += section `s` for rows m .. m + kM of x.
template <int kM>
void multiply(const Job& job, int64_t m, int64_t s, const uint8_t* panel, const Section& section, float* total) {
  const int64_t chunk = s * job.section / kTileK / job.fixed_point.chunk_tiles;
  const auto has_more = [&](int i) {
    return job.fixed_point.chunk_words[(m + i) * job.fixed_point.chunks + chunk] > job.fixed_point.words;
  };
  int more = 0;  // number of rows with one more word
  for (int i = 0; i < kM; ++i) more += has_more(i);
  __m256 result[kM][kVectors];
  for (auto& row : result) {
    for (auto& value : row) value = _mm256_setzero_ps();
  }
  if (more > 0 && more < kM) {
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) {
      if (!has_more(i)) continue;
      alignas(32) float last[kTileN];
      last_word(job, m + i, s, panel, section, last);
      for (int v = 0; v < kVectors; ++v) result[i][v] = _mm256_load_ps(last + 8 * v);
    }
  }
  for (int w = more == kM ? job.fixed_point.words : job.fixed_point.words - 1; w >= 0; --w) {
    __m256 values[kM][kVectors];
    multiply_word<kM>(job, m, s, w, panel, section, values);
    for (int i = 0; i < kM; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        result[i][v] = _mm256_fmadd_ps(result[i][v], _mm256_set1_ps(1.0f / (1 << kWordShift)), values[i][v]);
      }
    }
  }
  for (int i = 0; i < kM; ++i) {
    const __m256 x_scale = _mm256_set1_ps(job.fixed_point.scales[(m + i) * job.fixed_point.chunks + chunk]);
    for (int v = 0; v < kVectors; ++v) {
      float* at = total + i * kTileN + 8 * v;
      const __m256 scaled = _mm256_mul_ps(result[i][v], x_scale);
      _mm256_store_ps(at, _mm256_fmadd_ps(scaled, section.scale[v], _mm256_load_ps(at)));
    }
  }
}

template <int kM = kRowsX>
void multiply_some(const Job& job, int64_t m, int64_t rows, int64_t s, const uint8_t* panel, const Section& section,
                   float* total) {
  if constexpr (kM > 0) {
    if (rows == kM) return multiply<kM>(job, m, s, panel, section, total);
    multiply_some<kM - 1>(job, m, rows, s, panel, section, total);
  }
}

void run_tile(const Job& job, int64_t tile_n) {
  uint8_t* panel = static_cast<uint8_t*>(scratch(Scratch::kPanel, int64_t{kMaxTiles} * kTilePanel));
  float* total = static_cast<float*>(scratch(Scratch::kSums, job.m * kTileN * int64_t{sizeof(float)}));
  for (int64_t i = 0; i < job.m * kVectors; ++i) _mm256_store_ps(total + i * 8, _mm256_setzero_ps());

  const int64_t sections_per_chunk = job.fixed_point.chunk_tiles * kTileK / job.section;
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) {
    const int64_t tile_k = chunk * job.fixed_point.chunk_tiles,
                  tiles = least(job.fixed_point.chunk_tiles, job.tiles_k - tile_k);
    const uint8_t* weight = job.weight + (tile_n * job.tiles_k + tile_k) * kTileBytes;
    for (int64_t t = 0; t < tiles; ++t) {
      for (int line = 0; line < kTileBytes; line += 64) {
        _mm_prefetch(weight + t * kTileBytes + kPrefetchBytes + line, _MM_HINT_T0);
      }
      expand_tile(weight + t * kTileBytes, panel + t * kTilePanel, kPanelRow);
    }
    const int64_t end = least(job.sections, (chunk + 1) * sections_per_chunk);
    for (int64_t s = chunk * sections_per_chunk; s < end; ++s) {
      const Section section = load_section(job, tile_n, s);
      for (int64_t m = 0; m < job.m; m += kRowsX) {
        multiply_some(job, m, least(kRowsX, job.m - m), s, panel, section, total + m * kTileN);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t row = tile_n * kTileN + 8 * v, count = job.n - row;
    if (count <= 0) break;
    const __m256 bias = job.bias != nullptr ? load_first(job.bias, row, job.bias_dtype, count) : _mm256_setzero_ps();
    for (int64_t m = 0; m < job.m; ++m) {
      const __m256 x_scale = _mm256_set1_ps(job.x_scales[m * job.x_scale_stride]);
      const __m256 y = _mm256_fmadd_ps(_mm256_load_ps(total + m * kTileN + 8 * v), x_scale, bias);
      store_first(job.y, m * job.n + row, job.y_dtype, y, count);
    }
  }
}

}  // namespace

void avx2::fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) run_tile(job, tile);
}

}  // namespace qao::cpu
