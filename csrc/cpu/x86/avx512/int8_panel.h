// Formats of panel_gemm.h for int8 x: a step is four columns, `vpdpbusd`, whose first operand is unsigned: W's.
// `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx512/panel.h"

namespace qao::cpu {
namespace {

struct Int8Panel : Avx512Panel {
  static constexpr int64_t kColumns = 4, kPanelColumns = kSteps * kColumns;
  static constexpr bool kSectioned = true;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  // The intrinsic makes GCC 12 copy the sums from register to register.
  __attribute__((always_inline)) static Sum multiply_add(Sum sum, Operand w, Operand x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
};

}  // namespace
}  // namespace qao::cpu
