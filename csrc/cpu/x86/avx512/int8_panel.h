// Shared base of panel_gemm.h formats for int8 x: a step is four columns, with `vpdpbusd`.
// Its first, unsigned operand is W. `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx512/panel.h"

namespace qao::cpu {
namespace {

struct Int8Panel : Avx512Panel {
  static constexpr int64_t kColumns = 4, kPanelColumns = kSteps * kColumns;
  static constexpr bool kSectioned = true;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  // Inline assembly because with the intrinsic GCC 12 copies sums between registers.
  __attribute__((always_inline)) static Sum multiply_add(Sum sum, Operand w, Operand x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
};

}  // namespace
}  // namespace qao::cpu
