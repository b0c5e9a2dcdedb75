// GGUF W by a few rows of x in fixed point with AVX2, any block type.
//   y += x_scale * sum over segments of scale * sum(code * x) - minimum * sum(x)
// Types with scales of small integers (k_quant_unpack.h): bytes of codes by bytes of x, and the sums of 256 columns,
// scales included, are exact. Others: codes less their offset and words of x are 16-bit integers, and sums of a segment
// of 16 columns, or of two with one scale, are exact.
#include "cpu/gemm/kernels.h"
#include "cpu/gguf_blocks.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx2/k_quant_unpack.h"
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

// ---- K-quants ----

// A word of 256 columns of x in natural order.
struct Planes {
  alignas(32) int8_t high[kUnit], low[kUnit];                         // x = 256 * high + low
  alignas(32) int16_t high_offset[kUnit / 2], low_offset[kUnit / 2];  // pairs of columns, summed, times W's offset
};

// [m][chunks][kMaxWords]. Words that a chunk does not have are not written.
Planes* planes_of(const Job& job, int64_t m, int64_t chunk, Planes* planes) {
  return planes + (m * job.fixed_point.chunks + chunk) * kMaxWords;
}

template <Type kType>
Planes* make_planes(const Job& job) {
  const int64_t count = job.m * job.fixed_point.chunks * kMaxWords;
  auto* planes = static_cast<Planes*>(scratch(Scratch::kPanel, count * int64_t{sizeof(Planes)}));
  for (int64_t m = 0; m < job.m; ++m) {
    for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) {
      Planes* to = planes_of(job, m, chunk, planes);
      for (int w = 0; w < job.fixed_point.chunk_words[m * job.fixed_point.chunks + chunk]; ++w, ++to) {
        const int8_t* bytes = job.fixed_point.bytes[w] + (m * job.fixed_point.chunks + chunk) * 2 * kUnit;
        for (int s = 0; s < kUnitSegments; ++s) {
          const int place = job.fixed_point.segment_places[s];
          const int8_t* high = bytes + place / 4 * 2 * kTileColumns + place % 4 * kSegment;
          std::memcpy(to->high + s * kSegment, high, kSegment);
          std::memcpy(to->low + s * kSegment, high + kTileColumns, kSegment);
        }
        if constexpr (Blocks<kType>::kOffset != 0) {
          const __m256i offset = _mm256_set1_epi8(Blocks<kType>::kOffset);
          for (int k = 0; k < kUnit; k += 32) {
            store256(to->high_offset + k / 2, _mm256_maddubs_epi16(offset, load256(to->high + k)));
            store256(to->low_offset + k / 2, _mm256_maddubs_epi16(offset, load256(to->low + k)));
          }
        }
      }
    }
  }
  return planes;
}

// Compilers would move unpacking out of a loop over words, and add all products at the end: there are too few
// registers.
inline const uint8_t* renewed(const uint8_t* bytes) {
  asm("" : "+r"(bytes));
  return bytes;
}
inline void keep(__m256i* sum) { asm("" : "+x"(*sum)); }

// Row n of W by rows m .. m + kM of x.
template <Type kType, int kM>
void run_k_quant_row(const Job& job, int64_t n, int64_t m, Planes* planes) {
  using B = Blocks<kType>;
  using U = KQuant<kType>;
  __m256 sums[kM];
#pragma GCC unroll 2
  for (int i = 0; i < kM; ++i) sums[i] = _mm256_setzero_ps();
  const uint8_t* block = job.weight + n * job.row_bytes;
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk, block += B::kBytes) {
    for (int64_t byte = 0; byte < B::kBytes; byte += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(block + kAheadBytes + byte), _MM_HINT_T1);
    }
    int words = 0;
    float x_scale[kM];
    const Planes* x[kM];
#pragma GCC unroll 2
    for (int i = 0; i < kM; ++i) {
      const int64_t at = (m + i) * job.fixed_point.chunks + chunk;
      words = job.fixed_point.chunk_words[at] > words ? job.fixed_point.chunk_words[at] : words;
      x_scale[i] = job.fixed_point.scales[at];
      x[i] = planes_of(job, m + i, chunk, planes);
    }
#pragma GCC unroll 1
    for (int word = 0; word < words; ++word) {
      const U unit(renewed(block));
      __m256i high[kM], low[kM];
#pragma GCC unroll 2
      for (int i = 0; i < kM; ++i) high[i] = low[i] = _mm256_setzero_si256();
      each<kUnit / 32>([&]<int v> __attribute__((always_inline)) {
        const __m256i codes = unit.template codes<v>(), scales = unit.template scales<v>();
#pragma GCC unroll 2
        for (int i = 0; i < kM; ++i) {
          __m256i of_high = _mm256_maddubs_epi16(codes, load256(x[i][word].high + 32 * v));
          __m256i of_low = _mm256_maddubs_epi16(codes, load256(x[i][word].low + 32 * v));
          if constexpr (B::kOffset != 0) {
            of_high = _mm256_sub_epi16(of_high, load256(x[i][word].high_offset + 16 * v));
            of_low = _mm256_sub_epi16(of_low, load256(x[i][word].low_offset + 16 * v));
          }
          high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(of_high, scales));
          low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(of_low, scales));
          keep(&high[i]), keep(&low[i]);
        }
      });
#pragma GCC unroll 2
      for (int i = 0; i < kM; ++i) {
        // Where a row has fewer words, the factor is 0 for any bytes.
        const bool has = word < job.fixed_point.chunk_words[(m + i) * job.fixed_point.chunks + chunk];
        const float unit_of_word = word == 0 ? 1.0f : word == 1 ? 0x1p-15f : 0x1p-30f;
        const __m256 sum =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(high[i]), _mm256_set1_ps(256), _mm256_cvtepi32_ps(low[i]));
        const float factor = has ? unit.scale() * (x_scale[i] * unit_of_word) : 0.0f;
        sums[i] = _mm256_fmadd_ps(sum, _mm256_set1_ps(factor), sums[i]);
      }
    }
    if constexpr (B::kHasMinima) {
      const U unit(renewed(block));
#pragma GCC unroll 2
      for (int i = 0; i < kM; ++i) {
        const float* x_sums = job.fixed_point.segment_sums + ((m + i) * job.fixed_point.chunks + chunk) * kUnitSegments;
        sums[i] = unit.less_minima(x_sums, sums[i]);
      }
    }
  }
  const float bias = job.bias != nullptr ? load(job.bias, n, job.bias_dtype) : 0.0f;
  for (int i = 0; i < kM; ++i) {
    store(job.y, (m + i) * job.n + n, job.y_dtype, lane_sum(sums[i]) + bias);
  }
}

template <typename Row>
void run_rows(const Job& job, int64_t begin, int64_t end, const Row& row) {
  for (int64_t n = begin * kTileRows; n < least(end * kTileRows, job.n); ++n) {
    int64_t m = 0;
    for (; m + 2 <= job.m; m += 2) row.template operator()<2>(n, m);
    if (m < job.m) row.template operator()<1>(n, m);
  }
}

}  // namespace

void avx2::fixed_point_gguf_gemv(const Job& job, int64_t begin, int64_t end) {
  with_type(job.gguf_type, [&]<Type kType> {
    if constexpr (kIsKQuant<kType>) {
      Planes* planes = make_planes<kType>(job);
      run_rows(job, begin, end, [&]<int kM>(int64_t n, int64_t m) { run_k_quant_row<kType, kM>(job, n, m, planes); });
    } else {
      int16_t* words = make_words(job);
      run_rows(job, begin, end, [&]<int kM>(int64_t n, int64_t m) { run_row<kType, kM>(job, n, m, words); });
    }
  });
}

}  // namespace qao::cpu
