// A float32 as bfloat16 parts: what plans and kernels agree on.
#pragma once

namespace qao {

constexpr int kFloat32Parts = 3;  // bfloat16 values whose sum is a float32

}  // namespace qao
