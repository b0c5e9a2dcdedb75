// Builder for one GEMM call.
//
// use_*() validate operands and fill in the Problem; run() plans and launches.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "ops/int4_operands.h"
#include "ops/quantized_x.h"
#include "qao/gemm.h"
#include "stable_abi/rows.h"
#include "stable_abi/tensor.h"

namespace qao {

// An operator and its activations.
struct Call {
  Call(const char* name, const Tensor& tensor) : op(name), x("x", tensor) { op.involve(&x); }
  Call(const Call&) = delete;  // op points to x

  Op op;
  const Argument x;
};

// An 8-bit weight, row-major [N, K].
struct RowMajor {
  Format format;
  int32_t (*dtype)();    // torch dtype code; int8 tensors are accepted as raw bytes
  const char* must_be;   // error message
  bool may_have_blocks;  // supports scales per 128 x 128 block
};
inline constexpr RowMajor kInt8Rows = {Format::kInt8, int8_code, "weight must be int8 of shape [N, K]", false};
inline constexpr RowMajor kFp8Rows = {Format::kFp8, fp8_code,
                                      "weight must be float8_e4m3fn (or its bytes as int8) of shape [N, K]", true};

class GemmCall {
 public:
  // `scales`: null for a weight that holds them itself.
  GemmCall(Op& op, const Argument& x, const Tensor& weight, const Tensor* scales, const std::optional<Tensor>& bias);
  GemmCall(const GemmCall&) = delete;  // op points to the arguments

  // 1. More operands, which may be absent: sums of W's rows, row scales of two-level scales, a static scale of x.
  void add_weight_sums(const std::optional<Tensor>& weight_sums);
  void add_row_scales(const std::optional<Tensor>& row_scales);
  void add_x_scale(const std::optional<Tensor>& x_scale, int64_t x_group_size);

  // 2. Weight: 8 bits with one scale per row, per tensor or per block; packed int4 or fp4; or blocks of a GGUF type.
  // Sizes that are all 0 are inferred from the packed tensors.
  void use_weight(const RowMajor& rows);
  void use_packed_weight(const PackedSizes& given);
  void use_fp4_weight(const PackedSizes& given);
  void use_gguf_weight(int64_t qtype);

  // 3. Activations: as the tensor cores read them; 8 bits with scales; or floats that the GEMM kernel or a preceding
  // kernel quantizes. `rotation`: int8, columns per block of the rotation, or 0.
  void use_float_x(const Tensor& tensor);
  void use_scaled_x(const Tensor& tensor, Format format, const Argument& x_scales, const Argument* x_zeros,
                    torch::headeronly::ScalarType out_dtype);
  void use_int8_x(const Tensor& tensor, int64_t rotation);
  void use_fp8_x(const Tensor& tensor, int64_t x_group_size = -1);

  // 4. Returns y [..., N], or [..., N / 2] if gated.
  Tensor run();
  // The same for products of one x: the results in order. On a CPU, x is packed once if the weights have one format. On
  // a GPU, one kernel multiplies them if there is one for them, or else x is quantized once.
  static std::vector<Tensor> run_merged(std::span<GemmCall* const> gemms);
  // One kernel on a GPU that applies what `first` says about x, an RMSNorm and a gate. Returns nothing if there is
  // none.
  static std::optional<std::vector<Tensor>> run_fused(std::span<GemmCall* const> gemms, const gemm::Problem& first,
                                                      const gemm::Arguments& x);

  // Allocates y: the first step of run(), for callers that compute it themselves.
  Tensor make_y();

  gemm::Problem problem;
  gemm::Arguments arguments;

 protected:
  // Called before the operands are checked: describes one expert's part of each.
  virtual void hide_experts() {}
  void set_sizes(int64_t n, int64_t k);
  void use_sizes(const PackedSizes& sizes);
  bool has_block_scales() const;
  void use_rows(const Tensor& tensor, int64_t element_size);
  void check_blocks();
  void check_x_scales(const Argument& x_scales);
  void use_row_scales();
  void use_dynamic_x(const Tensor& tensor, Format format, Scaling scaling, int64_t rotation = 0);
  void use_bias_and_sums();
  // Computes y, unless it is empty. On a GPU, `before` is a product of the same x that may have quantized it.
  void launch(const GemmCall* before = nullptr);
  void make_quantized_x();  // before a GEMM on the CPU
  void keep_rows_apart();

  Op& op_;
  const Argument& x_;
  Argument weight_;
  std::optional<Argument> scales_, bias_, weight_sums_, row_scales_, x_scale_;
  std::optional<Rows> rows_;
  const Tensor* tensor_ = nullptr;  // the tensor behind rows_
  std::optional<QuantizedX> quantized_;
};

// Properties of the GPU of x.
#if defined(QAO_WITH_CUDA)
Gpu gpu_of(const Op& op, const Argument& x);
#endif

}  // namespace qao
