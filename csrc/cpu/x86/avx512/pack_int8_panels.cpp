// Packing of int8 x as panels (panel_gemm.h), with section sums.
// For int4 W the columns of each 64 are in the order in which W's bytes are expanded (int4_panel.h), the first half
// before the second.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/int4_panel.h"
#include "cpu/x86/avx512/int8_panel.h"

namespace qao::cpu {
namespace {

struct Order {
  alignas(64) uint8_t column[kTileColumns];
};
constexpr Order kInt4Order = [] {
  Order order = {};
  for (int i = 0; i < kTileColumns; ++i) {
    order.column[i] = static_cast<uint8_t>(int4::tile_column(quad_of(i / 4) * 4 + i % 4));
  }
  return order;
}();

}  // namespace

void avx512::pack_int8_panels(const Job& job, int64_t begin, int64_t end) {
  const __m512i order = _mm512_load_si512(kInt4Order.column), ones = _mm512_set1_epi8(1);
  constexpr __mmask16 kHalf = 0x00FF;
  for (int64_t m = begin; m < end; ++m) {
    const int8_t* x = static_cast<const int8_t*>(job.x) + m * job.x_stride;
    float* sums = job.x_sums + m * job.sections;
    const int zero = job.weight_format == Format::kInt4 && job.x_zeros != nullptr ? job.x_zeros[m] : 0;
    const __m512i zeros = _mm512_set1_epi8(static_cast<char>(zero)), four_zeros = _mm512_set1_epi32(4 * zero);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < divide_up(job.k, Int8Panel::kPanelColumns) * Int8Panel::kPanelColumns; k += kTileColumns) {
      const int64_t left = job.k - k;
      const __mmask64 inside = left >= kTileColumns ? ~__mmask64{0} : left <= 0 ? 0 : ~__mmask64{0} >> (64 - left);
      __m512i values = _mm512_mask_loadu_epi8(zeros, inside, x + k);
      sum = _mm512_dpbusd_epi32(_mm512_sub_epi32(sum, four_zeros), ones, values);
      const int64_t next = k + kTileColumns, s = k / job.section;
      if (left > 0 && job.section == kTileColumns / 2) {
        sums[s] = static_cast<float>(_mm512_mask_reduce_add_epi32(kHalf, sum));
        if (left > job.section) sums[s + 1] = static_cast<float>(_mm512_mask_reduce_add_epi32(~kHalf, sum));
        sum = _mm512_setzero_si512();
      } else if (left > 0 && (next % job.section == 0 || next >= job.k)) {
        sums[s] = static_cast<float>(_mm512_reduce_add_epi32(sum));
        sum = _mm512_setzero_si512();
      }
      if (job.weight_format == Format::kInt4) values = _mm512_permutexvar_epi8(order, values);
      uint32_t* panel = job.panels + (k / Int8Panel::kPanelColumns * job.m + m) * Int8Panel::kSteps;
      _mm512_store_si512(panel + k % Int8Panel::kPanelColumns / Int8Panel::kColumns, values);
    }
  }
}

}  // namespace qao::cpu
