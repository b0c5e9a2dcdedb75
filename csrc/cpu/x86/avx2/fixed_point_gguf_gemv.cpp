// GGUF W by a few rows of x in fixed point with AVX2, any block type.
// Codes of 256 columns of a row of W, less their offset, and the words of x are 16-bit integers in natural order:
//   y += x_scale * sum over segments of scale * sum(code * x) - minimum * sum(x).
// Sums of a segment of 16 columns, or of two with one scale, are exact.
#include "cpu/gemm/kernels.h"
#include "cpu/gguf_blocks.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu {
namespace {

using namespace gguf;

constexpr int64_t kAheadBytes = 4096;  // distance of prefetches in W

// x as 16-bit words: [m][chunks][kMaxWords][256]. Words that a chunk does not have are not written.
int16_t* words_of(const Job& job, int64_t m, int64_t chunk, int16_t* words) {
  return words + (m * job.fixed_point.chunks + chunk) * kMaxWords * kUnit;
}

int16_t* make_words(const Job& job) {
  const int64_t count = job.m * job.fixed_point.chunks * kMaxWords * kUnit;
  auto* words = static_cast<int16_t*>(scratch(Scratch::kPanel, count * int64_t{sizeof(int16_t)}));
  const auto load = [](const int8_t* bytes) {
    return _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  };
  for (int64_t m = 0; m < job.m; ++m) {
    for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) {
      int16_t* to = words_of(job, m, chunk, words);
      for (int w = 0; w < job.fixed_point.chunk_words[m * job.fixed_point.chunks + chunk]; ++w, to += kUnit) {
        const int8_t* bytes = job.fixed_point.bytes[w] + (m * job.fixed_point.chunks + chunk) * 2 * kUnit;
        for (int s = 0; s < kUnitSegments; ++s) {
          const int place = job.fixed_point.segment_places[s];
          const int8_t* high = bytes + place / 4 * 2 * kTileColumns + place % 4 * kSegment;
          const __m256i word = _mm256_add_epi16(_mm256_slli_epi16(load(high), 8), load(high + kTileColumns));
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + s * kSegment), word);
        }
      }
    }
  }
  return words;
}

// Up to 256 columns of a row of W.
struct Unit {
  alignas(32) int16_t codes[kUnit];
  alignas(32) float scales[kUnitSegments], minima[kUnitSegments];
};

template <Type kType>
inline void unpack(const uint8_t* block, int64_t columns, Unit* unit) {
  using B = Blocks<kType>;
  alignas(32) uint8_t codes[kUnit];
  for (int64_t k = 0; k < columns; k += B::kColumns, block += B::kBytes) {
    B::codes(block, codes + k);
    B::scales(block, unit->scales + k / kSegment, unit->minima + k / kSegment);
  }
  for (int64_t s = columns / kSegment; B::kHasMinima && s < kUnitSegments; ++s) unit->minima[s] = 0;
  for (int64_t k = 0; k < columns; k += kSegment) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(codes + k)));
    const __m256i code = _mm256_sub_epi16(wide, _mm256_set1_epi16(B::kOffset));
    _mm256_store_si256(reinterpret_cast<__m256i*>(unit->codes + k), code);
  }
}

// The sum over segments of scale * sum(code * x), in eight parts.
template <Type kType>
__attribute__((always_inline)) inline __m256 multiply(const Unit& unit, const int16_t* x, int64_t columns) {
  const auto product = [&](int64_t k) {
    return _mm256_madd_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(unit.codes + k)),
                             _mm256_load_si256(reinterpret_cast<const __m256i*>(x + k)));
  };
  __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int64_t k = 0; k < columns; k += 2 * kSegment) {
    const __m256i first = product(k), second = product(k + kSegment);
    const __m256 scale = _mm256_broadcast_ss(unit.scales + k / kSegment);
    if constexpr (scale_columns(kType) == 2 * kSegment) {
      __m256& sum = sums[k / (2 * kSegment) % 2];
      sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(first, second)), scale, sum);
    } else {
      const __m256 other = _mm256_broadcast_ss(unit.scales + k / kSegment + 1);
      sums[0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(first), scale, sums[0]);
      sums[1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), other, sums[1]);
    }
  }
  return _mm256_add_ps(sums[0], sums[1]);
}

// Row n of W by rows m .. m + kM of x.
template <Type kType, int kM>
void run_row(const Job& job, int64_t n, int64_t m, int16_t* words) {
  using B = Blocks<kType>;
  constexpr int64_t kBytes = kUnitBytes<kType>;
  __m256 sums[kM];
#pragma GCC unroll 4
  for (int i = 0; i < kM; ++i) sums[i] = _mm256_setzero_ps();
  const uint8_t* row = job.weight + n * job.row_bytes;
  Unit unit;
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk, row += kBytes) {
    for (int64_t byte = 0; byte < kBytes; byte += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(row + kAheadBytes + byte), _MM_HINT_T1);
    }
    const int64_t columns = least(kUnit, job.k - chunk * kUnit);
    unpack<kType>(row, columns, &unit);
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) {
      const int64_t at = (m + i) * job.fixed_point.chunks + chunk;
      float x_scale = job.fixed_point.scales[at];
      const int16_t* x = words_of(job, m + i, chunk, words);
      for (int w = 0; w < job.fixed_point.chunk_words[at]; ++w, x += kUnit, x_scale *= 0x1p-15f) {
        const __m256 sum = columns == kUnit ? multiply<kType>(unit, x, kUnit) : multiply<kType>(unit, x, columns);
        sums[i] = _mm256_fmadd_ps(sum, _mm256_set1_ps(x_scale), sums[i]);
      }
      if constexpr (B::kHasMinima) {
        const float* x_sums = job.fixed_point.segment_sums + at * kUnitSegments;
        for (int s = 0; s < kUnitSegments; s += 8) {
          sums[i] = _mm256_fnmadd_ps(_mm256_load_ps(unit.minima + s), _mm256_loadu_ps(x_sums + s), sums[i]);
        }
      }
    }
  }
  const float bias = job.bias != nullptr ? load(job.bias, n, job.bias_dtype) : 0.0f;
  for (int i = 0; i < kM; ++i) {
    store(job.y, (m + i) * job.n + n, job.y_dtype, lane_sum(sums[i]) + bias);
  }
}

}  // namespace

void avx2::fixed_point_gguf_gemv(const Job& job, int64_t begin, int64_t end) {
  int16_t* words = make_words(job);
  with_type(job.gguf_type, [&]<Type kType> {
    for (int64_t n = begin * kTileRows; n < least(end * kTileRows, job.n); ++n) {
      int64_t m = 0;
      for (; m + 2 <= job.m; m += 2) run_row<kType, 2>(job, n, m, words);
      if (m < job.m) run_row<kType, 1>(job, n, m, words);
    }
  });
}

}  // namespace qao::cpu
