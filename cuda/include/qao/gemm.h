// Plan and launch of GEMMs with a quantized weight, y[M,N] = x[M,K] · W[N,K]ᵀ + bias[N]:
//
//   op             x        W
//   int4_mm        float    int4
//   int8_mm        float    int8
//   fp8_mm         float    fp8
//   fp4_mm         float    fp4
//   int8_int8_mm   int8     int8
//   int8_int4_mm   int8     int4
//   fp8_fp8_mm     fp8      fp8
//   fp8_int4_mm    fp8      int4
//
// 8-bit x is quantized by the caller (qao/quantize.h), or by the GEMM kernel if the plan says so. This is the C++ API,
// free of torch; csrc/ is the only caller in qao.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "qao/cost.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao::gemm {

// Everything that kernel selection may depend on.
struct Problem {
  int64_t m = 0;  // tokens
  int64_t n = 0;  // out_features
  int64_t k = 0;  // in_features
  Format x = Format::kFloat;
  Format weight = Format::kInt8;
  DType x_dtype = DType::kBFloat16;        // x == kFloat, or quantizes_x
  DType y_dtype = DType::kBFloat16;        // x_dtype if x == kFloat
  Scaling x_scaling = Scaling::kRow;       // x == kFp8; kBlock exactly if weight_scaling is
  Scaling weight_scaling = Scaling::kRow;  // weight != kInt4
  int64_t group_size = 0;                  // kInt4: 32, 64, 128, 256 or k (one group per row); kFp4: 32 or 16
  bool has_zeros = false;                  // weight == kInt4: asymmetric, zero points follow the scales
  DType scale_dtype = DType::kFloat32;     // kInt4; kFp4: bfloat16; other scales are float32
  int gguf_type = 0;                       // kGguf: ggml's type number
  bool has_bias = false;
  DType bias_dtype = DType::kBFloat16;
  bool x_zeros = false;     // x == kInt8: asymmetric, Arguments::x_zeros and weight_sums are given
  bool fast_accum = false;  // x == kFp8: accumulate in the tensor cores beyond 128 columns, without promotion
  // x != kFloat: the caller has x in floats of x_dtype. Plan::quantizes_x says whether the GEMM kernel quantizes them,
  // or expects x quantized beforehand, in rows aligned to 16 bytes. int8: symmetric unless x_zeros.
  bool quantizes_x = false;
  int x_rotation = 0;  // quantizes_x, int8: x is first multiplied by a Hadamard matrix (quantize::Problem::rotation)
  bool static_scale = false;  // quantizes_x, x_scaling kTensor: Arguments::x_scales is given
  // normed: x is RMSNorm(x + residual) * norm_weight. gated: y [m, n / 2] is SiLU(first half) * second half. Only where
  // fuses_norm() returns true; residual and norm_weight have the dtype of x, and x_aligned covers them too.
  bool normed = false, gated = false;
  bool x_aligned = true;  // base address and row stride are multiples of 16 bytes
  bool weight_aligned = true;
  // x != kFloat, weight == kInt4, no zeros: one scale per row, Arguments::row_scales, or the scale of its only group
  bool row_scales = false;
  // A row of y depends on its row of x and on W only, bit for bit: neither on m nor on other rows. `x_aligned` then
  // follows from k and the dtype of x.
  bool batch_invariant = false;

  int64_t groups() const { return (k + group_size - 1) / group_size; }
  int64_t k_blocks() const { return (k + kScaleBlock - 1) / kScaleBlock; }
  bool operator==(const Problem&) const = default;
};

struct Arguments {
  // [m, k]. 8 bits with an int4 weight on CUDA: quantize::Order::kInt4Tiles; else rows. Plan::quantizes_x: floats, and
  // of the x_... fields below only a static scale is set.
  const void* x = nullptr;
  int64_t x_stride = 0;                // elements
  const float* x_scales = nullptr;     // x != kFloat: kTensor [1], kRow [m], kBlock [m, k_blocks]
  const int32_t* x_zeros = nullptr;    // [m]
  const float* x_sums = nullptr;       // weight == kInt4, CUDA: [m, groups] sums of x's integers or e4m3 values
  const void* weight = nullptr;        // [n, k], row-major; int4, fp4: packed (cuda/int4/, layout/fp4.h)
  const void* scales = nullptr;        // float32: kTensor [1], kRow [n], kBlock [ceil(n/128), k_blocks]; else packed
  const float* weight_sums = nullptr;  // [n] sums over k of the dequantized weight
  const void* bias = nullptr;          // [n] of bias_dtype, or null
  void* y = nullptr;                   // [m, n] of y_dtype, contiguous
  // normed
  const void* residual = nullptr;     // [m, k], or null for zeros
  int64_t residual_stride = 0;        // elements
  const void* norm_weight = nullptr;  // [k], or null for ones
  void* sum = nullptr;                // [m, k] output: x + residual
  float eps = 0;
  void* workspace = nullptr;  // Plan::workspace_bytes, uninitialized
  // [n]: every scale of an int4 W is its row's scale times an integer from -15 to 16 (x == kInt8), or times a power of
  // two from 2^-14 to 2^5, of either sign (kFp8).
  const float* row_scales = nullptr;
};

// One of several weights that are multiplied with one x.
struct Part {
  int64_t n = 0;  // out_features
  const void *weight = nullptr, *scales = nullptr, *bias = nullptr;
  void* y = nullptr;  // [m, n], contiguous; null for the second part if gated
};
constexpr int kMaxParts = 4;

// Kernel families (families.inc). name_of() is the beginning of the names of a family's kernels: in reports, in the
// code
// (__global__ functions, in a folder of cuda/gemm/) and in a profiler.
enum class Family : int {
#define QAO_FAMILY(id, ...) id,
#include "qao/families.inc"
#undef QAO_FAMILY
};
constexpr const char* kFamilyNames[] = {
#define QAO_FAMILY(id, name, ...) name,
#include "qao/families.inc"
#undef QAO_FAMILY
};
constexpr const char* name_of(Family family) { return kFamilyNames[static_cast<int>(family)]; }

// How a problem runs on a GPU. Printable, testable without a GPU.
struct Plan {
  Family family = Family::kSm80Mma;
  const char* formats = "";      // of W and x, in the kernel's name: "w4a16"
  const char* reason = "";       // the rule that selected it
  const char* instruction = "";  // tensor-core instruction, for display: "mma.sync s8", "wgmma e4m3", ...
  bool quantizes_x = false;      // the GEMM kernel quantizes x itself (Problem::quantizes_x)
  const char* quantizer = "";    // with Problem::quantizes_x: which kernel quantizes x, and why
  int config = -1;               // row of the kernel family's tile table
  int tile_n = 0;                // rows of W per CTA
  int tile_m = 0;                // tokens per CTA
  int warps = 0;                 // warps per CTA
  int stages = 0;                // pipeline stages
  bool runs = false;  // a CTA iterates over an equal share of the rows of W, tile_n at a time; else one tile of y
  int split_k = 1;    // CTAs per output tile, reduced in a fixed order
  bool splits_last = false;  // pairs of CTAs share each tile of the last partial wave
  int64_t ctas = 0;
  int ctas_at_once = 0;  // streaming grouped GEMM: the device derives from it how many CTAs share an expert's rows of W
  int64_t shared_bytes = 0;  // dynamic shared memory per CTA
  int sums_at = 0;           // offset of the epilogue's sums in shared memory; 0: they overlay the pipeline
  int sum_places = 1;        // 2: double-buffered, so that a pass does not wait for readers of the previous sums
  int prefetch_bytes = 0;    // bytes of W that a CTA prefetches before the PDL wait
  bool next_early = false;   // the next kernel may start while this one runs (PDL)
  int partials = 0;          // partial results that the kernel leaves to a second one: float32 [partials, m, n]
  int64_t workspace_bytes = 0;
};

// Pure: the same problem and GPU give the same plan on every rank, run and machine.
Status plan(const Problem& problem, const Gpu& gpu, Plan* plan);
// Whether one kernel runs a normed problem; else RMSNorm and SiLU-multiply are separate kernels.
bool fuses_norm(const Problem& problem, const Gpu& gpu);
// Whether one kernel multiplies x with weights of `rows` out_features each, and its plan. problem.n is their sum, and
// `gated` stands for two parts of equal size, gate and up. The weights agree in everything else.
bool merges(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan);
// The kernel's name: architecture and role, formats of W and x, rows of W and tokens per CTA: "sm90_ws_w4a16_128x256".
std::string kernel_name(const Plan& plan);
std::string to_string(const Plan& plan);

// All plans that can run the problem on this GPU; from the portable families only the plan that plan() would select
// among them. For bench/sweep.cpp.
std::vector<Candidate<Plan>> candidates(const Problem& problem, const Gpu& gpu);

// Enqueues the plan on `stream` (a cudaStream_t) of the current device. Asynchronous; safe to capture in a CUDA graph.
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream);
// The same for a plan of merges(). Weight, scales, bias and y of `arguments` are not read.
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
              void* stream);

}  // namespace qao::gemm
