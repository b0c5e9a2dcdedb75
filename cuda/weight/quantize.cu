// Which kernel quantises a weight.
#include <limits>

#include "common/integers.h"
#include "weight/params.h"

namespace qao::weight {
namespace {

bool is_one_scale(const Problem& p) { return p.format == Format::kFp8 && p.rows >= p.n && p.columns >= p.k && p.n > 1; }
bool is_blocks(const Problem& p) {
  return p.format == Format::kFp8 && p.rows == kScaleBlock && p.columns == kScaleBlock;
}

}  // namespace

int64_t workspace_bytes(const Problem& problem) { return is_one_scale(problem) ? sizeof(uint32_t) : 0; }

Status quantize(const Problem& problem, const Arguments& a, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  Params p{};
  p.weight = a.weight, p.stride = a.weight_stride;
  p.q = a.q, p.scales = a.scales, p.fault = a.fault;
  p.largest = is_one_scale(problem) ? static_cast<uint32_t*>(a.workspace) : nullptr;
  p.n = problem.n, p.k = problem.k, p.columns = problem.columns;
  p.block_columns = static_cast<int>(problem.block_columns());
  p.symmetric = problem.symmetric, p.whole_zeros = problem.whole_zeros, p.scale_dtype = problem.scale_dtype;
  p.smallest = problem.scale_dtype == DType::kFloat16 ? 0x1p-24f : std::numeric_limits<float>::min();
  const int size = size_of(problem.weight_dtype);
  p.aligned = problem.k % 8 == 0 && reinterpret_cast<uintptr_t>(a.weight) % 16 == 0 &&
              (problem.n == 1 || a.weight_stride * size % 16 == 0);
  if (problem.format == Format::kInt4) return quantize_int4(p, problem.weight_dtype, stream);
  if (is_blocks(problem) && !p.largest) return quantize_blocks(p, problem.weight_dtype, stream);
  return quantize_rows(p, problem.weight_dtype, problem.format, stream);
}

}  // namespace qao::weight
