// Division that rounds up, for host code.
#pragma once

#include <cstdint>

namespace qao {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace qao
