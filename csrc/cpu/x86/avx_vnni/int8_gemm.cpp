// W8A8 and W4A8 GEMMs with 256-bit `vpdpbusd`, sums in int32.
// Its first operand is unsigned: W's nibbles, or W ^ 0x80, which is W + 128; 128 times the sum of x is subtracted at
// the end.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx2/panel.h"

namespace qao::cpu {
namespace {

struct Int8 : IntegerTotals {
  static constexpr int64_t kSteps = 64, kColumns = 4, kPanelColumns = kSteps * kColumns;
  static Sum multiply_add(Sum sum, Operand w, Operand x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    constexpr int kAtOnce = 32;  // columns
    for (int half = 0; half < 2; ++half) {
      for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kAtOnce) {
        __m256i rows[8];
        for (int r = 0; r < 8; ++r) {
          uint8_t padded[kAtOnce];
          const uint8_t* bytes = row_bytes(job, tile_n * kTileRows + 8 * half + r, panel * kPanelColumns + k, padded);
          const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
          rows[r] = _mm256_xor_si256(values, _mm256_set1_epi8(-128));
        }
        store_steps(rows, out + k / kColumns * stride + 8 * half, stride, [](int step) { return step; });
      }
    }
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    finish_int8(job, tile_n, totals, rows, 128);
  }
};

struct Int4 : Int4Bytes {
  static constexpr int kStepsOfPart = 1;
  static Sum multiply_add(Sum sum, Operand w, Operand x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
};

}  // namespace

void avx_vnni::int8_int8_gemm(const Job& job, int64_t begin, int64_t end) { run_panels<Int8>(job, begin, end); }
void avx_vnni::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) { run_with_zeros<Int4>(job, begin, end); }

}  // namespace qao::cpu
