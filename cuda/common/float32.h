// Number of bfloat16 parts of a float32, shared by plans and kernels.
#pragma once

namespace qao {

constexpr int kFloat32Parts = 3;  // bfloat16 parts that sum to a float32

}  // namespace qao
