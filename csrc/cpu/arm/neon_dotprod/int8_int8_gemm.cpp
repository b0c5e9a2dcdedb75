// W8A8 GEMM with `sdot`.
#include "cpu/arm/neon_dotprod/dot.h"

namespace qao::cpu {
namespace {
using Dot = LaneDot<Sdot>;
}
}  // namespace qao::cpu

#include "cpu/arm/int8_gemm.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void neon_dotprod::int8_int8_gemm(const Job& job, int64_t begin, int64_t end) { run_int8(job, begin, end); }

}  // namespace qao::cpu
