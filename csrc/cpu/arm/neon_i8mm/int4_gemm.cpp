// GEMMs of int4 W with fixed-point or int8 x, and of fp4 W (groups of 32), with `smmla`.
// fp4 W takes fixed-point x.
#include "cpu/arm/neon_i8mm/dot.h"

namespace qao::cpu {
namespace {
using Dot = MatrixDot;
}
}  // namespace qao::cpu

#include "cpu/arm/int4_gemm.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void neon_i8mm::fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kFp4 ? run_fp4<2>(job, begin, end) : run_fixed_point(job, begin, end);
}
void neon_i8mm::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) { run_int8(job, begin, end); }

}  // namespace qao::cpu
