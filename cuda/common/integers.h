// Integer helpers of host code.
#pragma once

#include <cstdint>

namespace qao {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
template <typename T>
constexpr T round_up(T a, int b) {  // to a multiple of b
  return (a + b - 1) / b * b;
}
constexpr int log2_of(int64_t value) { return value <= 1 ? 0 : 1 + log2_of(value / 2); }  // rounded down

}  // namespace qao
