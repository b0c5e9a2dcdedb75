// GEMMs of int4 W with fixed-point or int8 x, and of fp4 W with fixed-point x, with `sdot`.
#include "cpu/arm/neon_dotprod/dot.h"

namespace qao::cpu {
namespace {
using Dot = LaneDot<Sdot>;
}
}  // namespace qao::cpu

#include "cpu/arm/int4_gemm.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void neon_dotprod::fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  if (job.weight_format != Format::kFp4) return run_fixed_point(job, begin, end);
  job.group_size == fp4::kMxGroup ? run_fp4<2>(job, begin, end) : run_fp4<4>(job, begin, end);
}
void neon_dotprod::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) { run_int8(job, begin, end); }

}  // namespace qao::cpu
