// Every product with a quantised weight, y[M,N] = x[M,K] · W[N,K]ᵀ + bias[N]:
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
// An x of eight bits is quantised already (qao/quantize.h), or by the product itself where a plan says so. This is the
// C++ API; csrc/ is its only caller in qao, and nothing here knows torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qao/cost.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao::mm {

// Everything the choice of a kernel may depend on.
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
  bool has_bias = false;
  DType bias_dtype = DType::kBFloat16;
  bool x_zeros = false;     // x == kInt8: asymmetric, Arguments::x_zeros and weight_sums are given
  bool fast_accum = false;  // x == kFp8: the tensor cores may keep their short sums beyond 128 columns
  // x != kFloat: x comes as floats of x_dtype. Plan::quantizes_x says whether the product takes them, or wants them
  // quantised first, into rows aligned to 16 bytes. int8: symmetric unless x_zeros.
  bool quantizes_x = false;
  int x_rotation = 0;  // quantizes_x, int8: x is multiplied by a Hadamard matrix first (quantize::Problem::rotation)
  bool static_scale = false;  // quantizes_x, x_scaling kTensor: Arguments::x_scales is given
  // x is RMSNorm(x + residual) * norm_weight, and if gated, y [m, n / 2] is SiLU(its first half) * the second. Only for
  // problems that fuses_norm() names; residual and norm_weight have the dtype of x, and x_aligned is true of them too.
  bool normed = false, gated = false;
  bool x_aligned = true;  // base address and row stride are multiples of 16 bytes
  bool weight_aligned = true;
  // x != kFloat, weight == kInt4, no zeros: one scale a row, Arguments::row_scales, or that of its only group
  bool row_scales = false;
  // The bits of a row of y depend on nothing but its row of x and W: neither on m nor on other rows. `x_aligned` then
  // follows from k and the dtype of x.
  bool batch_invariant = false;

  int64_t groups() const { return (k + group_size - 1) / group_size; }
  int64_t k_blocks() const { return (k + kScaleBlock - 1) / kScaleBlock; }
};

struct Arguments {
  // [m, k]; of eight bits beside an int4 weight on CUDA in quantize::Order::kInt4Tiles, else rows. Plan::quantizes_x:
  // floats, and none of the x_... below but a static scale.
  const void* x = nullptr;
  int64_t x_stride = 0;                // elements
  const float* x_scales = nullptr;     // x != kFloat: kTensor [1], kRow [m], kBlock [m, k_blocks]
  const int32_t* x_zeros = nullptr;    // [m]
  const float* x_sums = nullptr;       // weight == kInt4, CUDA: [m, groups] sums of x's integers or e4m3 values
  const void* weight = nullptr;        // [n, k], rows adjacent; int4, fp4: packed (cuda/int4/, fp4/layout.h)
  const void* scales = nullptr;        // float32: kTensor [1], kRow [n], kBlock [ceil(n/128), k_blocks]; else packed
  const float* weight_sums = nullptr;  // [n] sums over k of the dequantised weight
  const void* bias = nullptr;          // [n] of bias_dtype, or null
  void* y = nullptr;                   // [m, n] of y_dtype, contiguous
  // normed
  const void* residual = nullptr;     // [m, k], or null for zeros
  int64_t residual_stride = 0;        // elements
  const void* norm_weight = nullptr;  // [k], or null for ones
  void* sum = nullptr;                // [m, k] x + residual, is written
  float eps = 0;
  void* workspace = nullptr;  // Plan::workspace_bytes, may hold anything on entry
  // [n]: every scale of an int4 W is that of its row times a whole number from -15 to 16 (x == kInt8), or times a power
  // of two from 2^-14 to 2^5, of either sign (kFp8).
  const float* row_scales = nullptr;
};

// The kernel bodies, in the folders of cuda/mm/.
enum class Body : int {
  kStreamResident = 0,  // few tokens, W streams once past an x that lies in shared memory
  kStreamTma,           // the same, with x brought there by the copy engine
  kStreamRing,          // the same, with x in the ring beside W
  kWgmma,               // Hopper's warpgroup instructions
  kMmaSync,             // mma.sync: x or W or both in eight bits
  kMmaSyncFp8,          // the same on fp8 tensor cores
  kMmaSyncFloatInt4,    // mma.sync: a float x beside an int4 weight
};

constexpr const char* name_of(Body body) {
  switch (body) {
    case Body::kStreamResident:
      return "stream resident";
    case Body::kStreamTma:
      return "stream tma";
    case Body::kStreamRing:
      return "stream ring";
    case Body::kWgmma:
      return "wgmma";
    case Body::kMmaSync:
    case Body::kMmaSyncFloatInt4:
      return "mma.sync";
    case Body::kMmaSyncFp8:
      return "mma.sync fp8";
  }
  return "?";
}

// How one problem is run on one GPU. Printable, testable without a GPU.
struct Plan {
  Body body = Body::kMmaSync;
  const char* reason = "";       // the rule that chose it
  const char* instruction = "";  // the tensor cores' instruction, for people: "mma.sync s8", "wgmma e4m3", ...
  bool quantizes_x = false;      // the product quantises x (Problem::quantizes_x) itself
  const char* quantizer = "";    // with Problem::quantizes_x: who quantises x, and why
  int config = -1;               // row of the body's table of tiles
  int tile_n = 0;                // rows of W per CTA
  int tile_m = 0;                // tokens per CTA
  int warps = 0;                 // warps per CTA
  int stages = 0;                // depth of the shared-memory pipeline
  bool runs = false;         // a CTA walks its equal share of the rows of W, tile_n at a time; else it is a tile of y
  int split_k = 1;           // CTAs that share one output tile, summed in a fixed order
  bool splits_last = false;  // pairs of CTAs share each tile that is left over after full waves
  int64_t ctas = 0;
  int ctas_at_once = 0;      // of experts that stream: by it the GPU chooses how many share an expert's rows of W
  int64_t shared_bytes = 0;  // dynamic shared memory per CTA
  int sums_at = 0;           // offset of the epilogue's sums in it; 0: they take the place of the pipeline
  int sum_places = 1;        // 2: double-buffered, so a pass need not wait until the sums of the last one are read
  int prefetch_bytes = 0;    // of W that a CTA asks for before it waits for the previous kernel
  bool next_early = false;   // the next kernel may start while this one runs
  int64_t workspace_bytes = 0;
};

// Pure: the same problem and GPU give the same plan on every rank, run and machine.
Status plan(const Problem& problem, const Gpu& gpu, Plan* plan);
// Whether one kernel does a normed problem; else the norm is a kernel of its own, and so is SiLU-multiply.
bool fuses_norm(const Problem& problem, const Gpu& gpu);
std::string to_string(const Plan& plan);

// Every plan that could run the problem on this GPU; of the portable bodies only the one that plan() would take without
// the others. For bench/sweep.cpp.
std::vector<Candidate<Plan>> candidates(const Problem& problem, const Gpu& gpu);

// Enqueues the plan on `stream` (a cudaStream_t) of the current device. Asynchronous; safe to capture in a CUDA graph.
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream);

}  // namespace qao::mm
