// W8A8 GEMM with `vpmaddwd`.
// Both operands are 16-bit integers, two columns per step, with sums in int32 over all of K.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx2/panel.h"

namespace qao::cpu {
namespace {

struct Int16 : IntegerTotals {
  static constexpr int64_t kSteps = 128, kColumns = 2, kPanelColumns = kSteps * kColumns;
  static Sum multiply_add(Sum sum, Operand w, Operand x) { return now(_mm256_add_epi32(sum, _mm256_madd_epi16(w, x))); }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    constexpr int kAtOnce = 16;  // columns
    for (int half = 0; half < 2; ++half) {
      for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kAtOnce) {
        __m256i rows[8];
        for (int r = 0; r < 8; ++r) {
          uint8_t padded[kAtOnce];
          const uint8_t* bytes = row_bytes(job, tile_n * kTileRows + 8 * half + r, panel * kPanelColumns + k, padded);
          rows[r] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
        }
        store_steps(rows, out + k / kColumns * stride + 8 * half, stride, [](int step) { return step; });
      }
    }
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    finish_int8(job, tile_n, totals, rows, 0);
  }
};

}  // namespace

void avx2::pack_int16_panels(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = Int16::kPanelColumns;
  for (int64_t m = begin; m < end; ++m) {
    const int8_t* x = static_cast<const int8_t*>(job.x) + m * job.x_stride;
    for (int64_t k = 0; k < divide_up(job.k, kColumns) * kColumns; k += 16) {
      alignas(16) int8_t padded[16] = {};
      const int64_t inside = least(16, job.k - k);
      if (inside > 0) __builtin_memcpy(padded, x + k, static_cast<size_t>(inside));
      uint32_t* panel = job.panels + (k / kColumns * job.m + m) * Int16::kSteps + k % kColumns / Int16::kColumns;
      const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(padded));
      _mm256_store_si256(reinterpret_cast<__m256i*>(panel), _mm256_cvtepi8_epi16(bytes));
    }
  }
}

void avx2::int8_int8_gemm(const Job& job, int64_t begin, int64_t end) { run_panels<Int16>(job, begin, end); }

}  // namespace qao::cpu
