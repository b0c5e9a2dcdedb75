// W4A8 GEMM with `vpmaddubsw`: W's unsigned nibbles times the bytes of x.
// Sums of eight steps stay in 16 bits (8 * 2 * 15 * 128 < 2^15) and are exact.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx2/panel.h"

namespace qao::cpu {
namespace {

struct Int4 : Int4Bytes {
  static constexpr int kStepsOfPart = 8;
  static Sum multiply_add(Sum sum, Operand w, Operand x) {
    return now(_mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)));
  }
  static Sum widen(Sum sum, Sum narrow) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
  }
};

}  // namespace

void avx2::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) { run_with_zeros<Int4>(job, begin, end); }

}  // namespace qao::cpu
