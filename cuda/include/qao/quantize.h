// Quantization of activations to 8 bits, optionally with a fused producer. C++ API.
//
// q = round(value / scale) + zero. `value` is x, or the output of a producer such as RMSNorm. A producer's values can
// also be returned as y, in the dtype of x. Callers: csrc/ops/quantize.cpp and csrc/ops/quantized_x.cpp.
#pragma once

#include <cstdint>
#include <limits>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::quantize {

// Storage order of element (m, k) of q.
enum class Order : int {
  kRows = 0,       // row m, column k
  kInt4Tiles = 1,  // row m, each 64 columns permuted into mma.sync fragment order: int4_tile_slot()
};

// kInt4Tiles: slot of column `k` (0..63) inside its 64. Slot 32 j + 16 h + 4 t + i holds column 16 (2 j + h) + {2t, 2t
// + 8, 2t + 1, 2t + 9}[i]: the four k of one int4 word are adjacent.
QAO_HOST_DEVICE constexpr int int4_tile_slot(int k) {
  const int step = k / 16, c = k % 16;
  return 16 * step + 4 * (c % 8 / 2) + 2 * (c % 2) + c / 8;
}

// Producer of the values.
enum class Producer : int {
  kNone = 0,      // x
  kRmsNorm = 1,   // h / sqrt(mean(h^2) + eps) * norm_weight, h = x, or x + residual rounded to x's dtype
  kSiluMul = 2,   // silu(x) * up
  kSwiglu = 3,    // Gate: x holds the columns of gate and up
  kHadamard = 4,  // x, each run of Problem::rotation columns times the orthogonal Hadamard matrix
};

// g sigmoid(alpha g) (u + shift): gate g clamped to at most limit, up u clamped to +-limit; alpha, limit > 0.
struct Gate {
  float alpha = 1, limit = std::numeric_limits<float>::infinity(), shift = 0;
  bool interleaved = false;  // gate and up columns alternate; else halves

  bool is_silu_mul() const {
    return alpha == 1 && limit == std::numeric_limits<float>::infinity() && shift == 0 && !interleaved;
  }
};

// kHadamard: scale that makes Sylvester's matrix [n, n] of +-1 orthogonal. The transform is log2(n) butterfly stages at
// distances 1, 2, 4, ..., then this factor; every implementation uses this order, for equal bits.
QAO_HOST_DEVICE constexpr float hadamard_factor(int n) {
  constexpr float kRootHalf = 0.707106781f;
  float factor = 1;
  for (; n >= 4; n /= 4) factor /= 2;
  return n == 2 ? factor * kRootHalf : factor;
}
constexpr bool is_rotation(int64_t n) { return n >= 16 && n <= 256 && (n & (n - 1)) == 0; }

struct Problem {
  int64_t m = 0, k = 0;
  DType x_dtype = DType::kBFloat16;
  Format format = Format::kInt8;    // kInt8, kFp8; kFloat: y instead of q, requires a producer
  Scaling scaling = Scaling::kRow;  // int8: kRow only
  bool symmetric = true;            // int8: zero = 0, q in -127..127; else q in -128..127
  bool static_scale = false;        // fp8, kTensor: the scale is an input
  Order order = Order::kRows;
  int64_t sums_group = 0;  // columns per group of Arguments::sums; 0: no sums
  Producer producer = Producer::kNone;
  DType norm_weight_dtype = DType::kBFloat16;
  float eps = 0;
  Gate gate;         // kSwiglu
  int rotation = 0;  // kHadamard: is_rotation() and a divisor of k

  void rotate(int columns) {
    producer = columns == 0 ? Producer::kNone : Producer::kHadamard;
    rotation = columns;
  }
  int64_t blocks() const { return (k + kScaleBlock - 1) / kScaleBlock; }
  int64_t sums_groups() const { return sums_group == 0 ? 0 : (k + sums_group - 1) / sums_group; }
  int64_t scales() const { return scaling == Scaling::kTensor ? 1 : scaling == Scaling::kRow ? m : m * blocks(); }
};

struct Arguments {
  const void* x = nullptr;   // [m, k], kSwiglu [m, 2 k], of x_dtype, unit stride along k, any alignment
  int64_t x_stride = 0;      // elements
  const void* up = nullptr;  // kSiluMul: [m, k] of x_dtype
  int64_t up_stride = 0;
  const void* residual = nullptr;  // kRmsNorm: [m, k] of x_dtype, or null for zeros
  int64_t residual_stride = 0;
  void* sum = nullptr;                // kRmsNorm: h [m, k] of x_dtype; required with a residual, else optional
  const void* norm_weight = nullptr;  // kRmsNorm: [k] of norm_weight_dtype, or null for ones
  void* y = nullptr;                  // kFloat: [m, k] of x_dtype
  const void* row_scale = nullptr;    // kFloat with kSiluMul, kSwiglu: [m] of row_scale_dtype, factors of y; or null
  DType row_scale_dtype = DType::kFloat32;
  // For formats other than kFloat.
  void* q = nullptr;          // [m, q_stride]; columns from k to q_stride are set to 0
  int64_t q_stride = 0;       // bytes; kInt4Tiles: 64 * ceil(k / 64)
  float* scales = nullptr;    // kRow [m], kBlock [m, blocks], kTensor [1]; read if static_scale, else written
  int32_t* zeros = nullptr;   // int8 [m]: 0 if symmetric; optional
  float* sums = nullptr;      // [m, sums_groups] sums of q
  void* workspace = nullptr;  // workspace_bytes(problem)
};

// kTensor needs room for the partial maxima of x; others need no workspace.
int64_t workspace_bytes(const Problem& problem);

// Enqueues on `stream` (a cudaStream_t) of the current device.
Status launch(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::quantize
