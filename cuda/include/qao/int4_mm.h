// int4_mm: y[M,N] = x[M,K] · W[N,K]ᵀ + bias[N], W stored in four bits (layout: cuda/int4/layout.h).
// This is the C++ API; csrc/int4_mm.cpp is its only caller in qao, and nothing here knows torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qao/cost.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao::int4_mm {

// Everything the choice of a kernel may depend on.
struct Problem {
  int64_t m = 0;           // tokens
  int64_t n = 0;           // out_features
  int64_t k = 0;           // in_features
  int64_t group_size = 0;  // 32, 64, 128, 256 or k (one group per row)
  bool has_zeros = false;  // asymmetric: the scales tensor also holds zero points
  bool has_bias = false;
  bool x_aligned = true;  // base address and row stride of x are multiples of 16 bytes
  // x is RMSNorm(x + residual) * norm_weight, and if gated, y [m, n / 2] is SiLU(its first half) * the second. Only for
  // problems that fuses_norm() names; residual and norm_weight have the dtype of x, and x_aligned is true of them too.
  bool normed = false, gated = false;
  DType x_dtype = DType::kBFloat16;
  DType scale_dtype = DType::kBFloat16;
  DType bias_dtype = DType::kBFloat16;

  int64_t groups() const { return (k + group_size - 1) / group_size; }
};

struct Arguments {
  const void* x = nullptr;          // [m, k] of x_dtype, unit stride along k
  int64_t x_stride = 0;             // elements from one row of x to the next
  const uint8_t* weight = nullptr;  // packed nibbles, [ceil(n/16), ceil(k/64), 512]
  const void* scales = nullptr;     // [ceil(n/16), groups, has_zeros ? 2 : 1, 16] of scale_dtype
  const void* bias = nullptr;       // [n] of bias_dtype, or null
  void* y = nullptr;                // [m, n] of x_dtype, contiguous
  // normed
  const void* residual = nullptr;     // [m, k], or null for zeros
  int64_t residual_stride = 0;        // elements
  const void* norm_weight = nullptr;  // [k], or null for ones
  void* sum = nullptr;                // [m, k] x + residual, is written
  float eps = 0;
  void* workspace = nullptr;  // Plan::workspace_bytes, may hold anything on entry
};

// How one problem is run on one GPU. Printable, testable without a GPU.
struct Plan {
  const char* kernel = "";       // name of the kernel body, as in kernels()
  const char* reason = "";       // the rule that chose it
  const char* instruction = "";  // the tensor cores' instruction, for people
  int config = -1;               // row of configs.inc
  int tile_n = 0;                // rows of W per CTA
  int tile_m = 0;                // tokens per CTA
  int warps = 0;                 // warps per CTA
  int stages = 0;                // depth of the shared-memory pipeline
  int split_k = 1;               // CTAs that share one output tile, summed in a fixed order
  bool splits_last = false;      // pairs of CTAs share each tile that is left over after full waves
  int64_t ctas = 0;
  int64_t shared_bytes = 0;     // dynamic shared memory per CTA
  int64_t workspace_bytes = 0;  // partial sums and, for float32 x, its bfloat16 parts
};

// Pure: the same problem and GPU give the same plan on every rank, run and machine.
Status plan(const Problem& problem, const Gpu& gpu, Plan* plan);
// Whether one kernel does a normed problem; else the norm is a kernel of its own, and so is SiLU-multiply.
bool fuses_norm(const Problem& problem, const Gpu& gpu);
std::string to_string(const Plan& plan);

// Every plan that could run the problem on this GPU, of the portable body only plan()'s. For bench/sweep.cpp.
std::vector<Candidate<Plan>> candidates(const Problem& problem, const Gpu& gpu);

// Enqueues the plan on `stream` (a cudaStream_t) of the current device. Asynchronous; safe to capture in a CUDA graph.
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream);

}  // namespace qao::int4_mm
