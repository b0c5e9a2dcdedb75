// 8-bit weight policies of bf16_gemm.h.
// int8 and e4m3 are exact in bfloat16. Per-row and per-tensor scales multiply y. Scales of 128 x 128 blocks multiply
// the sums of a section or, if y is no more precise and W is expanded rarely, W.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/amx/bf16_gemm.h"
#include "cpu/x86/amx/bf16_pairs.h"
#include "cpu/x86/avx512/expand.h"

namespace qao::cpu {
namespace {

// The operand that the scales of W multiply.
enum class Scales { kY, kSections, kWeight };

template <Format kFormat, int kPartsOfX, Scales kScales>
struct Bytes {
  static constexpr int kParts = kPartsOfX;
  static constexpr bool kHalves = false, kSectioned = kScales == Scales::kSections, kScaledX = kScales == Scales::kY;

  template <int kN, bool kWholeK>
  __attribute__((always_inline)) static void expand(const Job& job, int64_t tile_n, int index, const Section& section,
                                                    uint16_t* out) {
    const int64_t n = tile_n * kTileN, last = least(kTileN, job.n - n) - 1;
    __m512 scale;
    if constexpr (kScales == Scales::kWeight)
      scale = _mm512_set1_ps(block_scale(job, tile_n, section.tile * kTileK / kScaleBlock));
    for (int64_t t = 0; t < section.tiles; ++t, out += 2 * kTileValues) {
      const int64_t k = (section.tile + t) * kTileK;
      const uint8_t* weight = job.weight + n * job.k + k;
      if constexpr (kWholeK) fetch_streams<kN>(job, tile_n, index, section.tile + t);
      for (int64_t r = 0; r < kTileN; ++r) {  // past N the last row again; its results are not written
        const uint8_t* row = weight + least(r, last) * job.k;
        if constexpr (!kWholeK) _mm_prefetch(row + kN * kTileN * job.k, _MM_HINT_T1);
        alignas(64) uint8_t padded[kTileK];
        if (k + kTileK > job.k) {
          const __mmask64 inside = ~__mmask64{0} >> (k + kTileK - job.k);
          _mm512_store_si512(padded, _mm512_maskz_loadu_epi8(inside, row));
          row = padded;
        }
        __m512i halves[2];
        expand_row(row, halves);
        if constexpr (kScales == Scales::kWeight) {
          for (__m512i& half : halves) half = scale_bf16(half, scale);
        }
        _mm512_store_si512(out + r * 32, halves[0]);
        _mm512_store_si512(out + kTileValues + r * 32, halves[1]);
      }
    }
  }

  // total += scale * c. Both operands' scales belong to one block of K.
  static void add_section(const Job& job, int64_t tile_n, int64_t tile_m, int64_t s, const float* c, float* total) {
    const __m512 scale =
        _mm512_mul_ps(_mm512_load_ps(job.bf16_tiles.block_scales + (s * job.tiles_m + tile_m) * kRowsX),
                      _mm512_set1_ps(block_scale(job, tile_n, s)));
    for (int i = 0; i < kTileSums; i += kRowsX) {
      _mm512_store_ps(total + i, _mm512_fmadd_ps(scale, _mm512_load_ps(c + i), _mm512_load_ps(total + i)));
    }
  }

  static __m512 row_scales(const Job& job, int64_t n, __mmask16 mask) {
    if (kScales != Scales::kY) return _mm512_set1_ps(1);
    if (job.weight_scaling == Scaling::kRow) return load16(job.scales, n, DType::kFloat32, mask);
    return _mm512_set1_ps(*static_cast<const float*>(job.scales));
  }

 private:
  static float block_scale(const Job& job, int64_t tile_n, int64_t section) {
    return static_cast<const float*>(job.scales)[tile_n * kTileN / kScaleBlock * job.sections + section];
  }

  // The next kN N-tiles are contiguous: prefetches them as four streams, a share with each K-tile
  // (x86/weight_stream.h).
  template <int kN>
  __attribute__((always_inline)) static void fetch_streams(const Job& job, int64_t tile_n, int index, int64_t tile_k) {
    constexpr int kStreams = 4, kShare = kTileN * kTileK / kStreams;
    const int64_t tiles_bytes = kN * kTileN * job.k;
    const uint8_t* next = job.weight + (tile_n - index + kN) * kTileN * job.k + (tile_k * kN + index) * kShare;
    for (int stream = 0; stream < kStreams; ++stream) {
      for (int line = 0; line < kShare; line += 64) {
        _mm_prefetch(next + stream * (tiles_bytes / kStreams) + line, _MM_HINT_T1);
      }
    }
  }

  __attribute__((always_inline)) static void expand_row(const uint8_t* row, __m512i (&halves)[2]) {
    if constexpr (kFormat == Format::kFp8) {
      expand_fp8(_mm512_loadu_si512(row), halves);
    } else {
      const __m128i* bytes = reinterpret_cast<const __m128i*>(row);
      for (int h = 0; h < 2; ++h) {
        const __m512 first = widen_int8(_mm_loadu_si128(bytes + 2 * h));
        const __m512 second = widen_int8(_mm_loadu_si128(bytes + 2 * h + 1));
        halves[h] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      }
    }
  }
};

template <Format kFormat, Scales kScales>
void run_format(const Job& job, int64_t begin, int64_t end) {
  with_parts(job, [&]<int kParts>() { run_gemm<Bytes<kFormat, kParts, kScales>>(job, begin, end); });
}

}  // namespace

void amx::bf16_w8_gemm(const Job& job, int64_t begin, int64_t end) {
  if (job.weight_format == Format::kInt8) return run_format<Format::kInt8, Scales::kY>(job, begin, end);
  if (job.weight_scaling != Scaling::kBlock) return run_format<Format::kFp8, Scales::kY>(job, begin, end);
  if (job.bf16_tiles.block_scales != nullptr) return run_format<Format::kFp8, Scales::kSections>(job, begin, end);
  run_gemm<Bytes<Format::kFp8, 1, Scales::kWeight>>(job, begin, end);
}

}  // namespace qao::cpu
