// Properties derived from a Problem, and the workspace layout of plan() and launch().
#pragma once

#include <cstdint>

#include "common/float32.h"
#include "common/integers.h"
#include "layout/fp4.h"
#include "layout/int4.h"
#include "qao/gemm.h"

namespace qao::gemm {

// Thresholds that the heuristics share: short K, tiny K, and a long run of row tiles.
constexpr int64_t kShortK = 8192, kTinyK = 2048, kLongRun = 6;

constexpr int64_t kMaxIntegerK = (int64_t{1} << 17) - 1;  // sums of (-128)^2 stay below 2^31
constexpr int64_t kInt32Columns = 65536;                  // mma.sync of int8: columns of one int32 sum

// A float32 x is split into bfloat16 parts.
inline bool is_split(const Problem& problem) {
  return problem.x == Format::kFloat && problem.x_dtype == DType::kFloat32;
}

// The formats of int4_mm.
inline bool is_float_int4(const Problem& problem) {
  return problem.x == Format::kFloat && problem.weight == Format::kInt4;
}

// The formats of fp4_mm.
inline bool is_float_fp4(const Problem& problem) {
  return problem.x == Format::kFloat && problem.weight == Format::kFp4;
}

// One scale per 128 x 128 block of W.
inline bool has_blocks(const Problem& problem) {
  return !is_packed(problem.weight) && problem.weight_scaling == Scaling::kBlock;
}

// Two-level scales: an integer (int8 x) or power of two (e4m3 x) per group, times one float32 scale per row of W.
inline bool has_row_scales(const Problem& problem) {
  return problem.row_scales && problem.x != Format::kFloat && problem.weight == Format::kInt4 && !problem.has_zeros;
}

// Accumulation over all of K is exact in int32, so every plan gives the same bits.
inline bool has_whole_sums(const Problem& problem) {
  return problem.x == Format::kInt8 && problem.weight == Format::kInt8 && problem.k <= kMaxIntegerK;
}

// Rows of packed scales per 16 rows of W: one per group, plus the NVFP4 divisor.
inline int64_t scale_rows(const Problem& problem) {
  return is_float_fp4(problem) ? fp4::scale_rows(problem.k, problem.group_size) : problem.groups();
}

inline int64_t weight_bytes(const Problem& problem) {
  return is_packed(problem.weight) ? int4::weight_bytes(problem.n, problem.k) : problem.n * problem.k;
}

// Bytes of parameters per group and 16 rows of a packed weight: 16 scales, then 16 zero points if asymmetric.
inline int group_bytes(const Problem& problem) {
  return (problem.has_zeros ? 2 : 1) * int4::kTileN * size_of(problem.scale_dtype);
}

// Columns of a split x that share one sum.
inline int64_t split_group(const Problem& problem) {
  return is_packed(problem.weight) ? problem.group_size : kScaleBlock;
}

struct Workspace {
  int64_t partials = -1;    // float32 [partials, m, n]; -1: the GEMM kernel writes y itself
  int64_t parts = -1;       // bfloat16 [m, 3, part_stride]: float32 x, split
  int64_t part_stride = 0;  // elements
  int64_t x_sums = -1;      // float32 [m, groups]: sums of that x for the zero points of an int4 weight
  int64_t bytes = 0;
};

// `partials`: Plan::partials.
inline Workspace workspace_of(const Problem& problem, int partials) {
  Workspace workspace;
  const auto take = [&](int64_t bytes) {
    const int64_t at = workspace.bytes;
    workspace.bytes += round_up(bytes, 256);
    return at;
  };
  if (partials > 0) workspace.partials = take(4 * partials * problem.m * problem.n);
  if (is_split(problem)) {
    workspace.part_stride = round_up(problem.k, 8);
    workspace.parts = take(2 * problem.m * kFloat32Parts * workspace.part_stride);
    if (problem.has_zeros) workspace.x_sums = take(4 * problem.m * problem.groups());
  }
  return workspace;
}

}  // namespace qao::gemm
