// Shared base of panel_gemm.h formats for float32 x: a step is a column. `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx512/panel.h"

namespace qao::cpu {
namespace {

struct Float32Panel : PlainTotals<FloatSums> {
  static constexpr int64_t kColumns = 1, kPanelColumns = kSteps;
  static constexpr bool kSectioned = false;
  static Sum multiply_add(Sum sum, Operand w, Operand x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
  }
};

}  // namespace
}  // namespace qao::cpu
