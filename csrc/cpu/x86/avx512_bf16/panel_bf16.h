// Shared base of panel_gemm.h formats for bfloat16 x: a step is two columns, with `vdpbf16ps`.
// `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx512/panel.h"

namespace qao::cpu {
namespace {

struct Bf16Panel : FloatSums {
  static constexpr int64_t kColumns = 2, kPanelColumns = kSteps * kColumns;
  static constexpr bool kSectioned = true;
  static Sum multiply_add(Sum sum, Operand w, Operand x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }
};

}  // namespace
}  // namespace qao::cpu
