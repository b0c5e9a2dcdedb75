// One call of a product: an operator function says what it has, step by step, each step checks its part and adds it to
// the problem, run() computes.
#pragma once

#include <optional>

#include "int4_operands.h"
#include "qao/mm.h"
#include "quantized_x.h"
#include "rows.h"
#include "tensor.h"

namespace qao {

// An operator and its x.
struct Call {
  Call(const char* name, const Tensor& tensor) : op(name), x("x", tensor) { op.involve(&x); }
  Call(const Call&) = delete;  // op points to x

  Op op;
  const Argument x;
};

// A weight of eight bits, row-major [N, K].
struct RowMajor {
  Format format;
  int32_t (*dtype)();    // torch's; a tensor of int8 may stand for its bytes
  const char* must_be;   // what the weight must be
  bool may_have_blocks;  // scales of 128 x 128
};
inline constexpr RowMajor kInt8Rows = {Format::kInt8, int8_code, "weight must be int8 of shape [N, K]", false};
inline constexpr RowMajor kFp8Rows = {Format::kFp8, fp8_code,
                                      "weight must be float8_e4m3fn (or its bytes as int8) of shape [N, K]", true};

class Product {
 public:
  Product(Op& op, const Argument& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
          const std::optional<Tensor>& weight_sums = std::nullopt);
  Product(const Product&) = delete;  // op points to the arguments

  // Sizes as they were given, or those of the packed tensors where all are left out.
  PackedSizes int4_sizes(const PackedSizes& given) const;
  PackedSizes fp4_sizes(const PackedSizes& given) const;

  // 1. W in eight bits: one scale a row, one for all, or one a block; or packed, of integers or of floats.
  void use_weight(const RowMajor& rows);
  void use_packed_weight(const PackedSizes& sizes);
  void use_fp4_weight(const PackedSizes& sizes);
  void use_row_scales(const Argument& row_scales);  // of a packed weight

  // 2. x as the tensor cores take it; in eight bits with its scales; in a float dtype, to be quantised by the product
  // or before it, where `x_scale` is a scale of all of x that is known beforehand; int8: of x rotated, unless that is
  // 0.
  void use_float_x(const Tensor& tensor);
  void use_scaled_x(const Tensor& tensor, Format format, const Argument& x_scales, const Argument* x_zeros,
                    torch::headeronly::ScalarType out_dtype);
  void use_dynamic_x(const Tensor& tensor, Format format, Scaling scaling, const Argument* x_scale = nullptr,
                     int64_t rotation = 0);

  // 3. y [..., N], or the gated half of it.
  Tensor run(bool batch_invariant = false);

  mm::Problem problem;
  mm::Arguments arguments;

 protected:
  void set_sizes(int64_t n, int64_t k);
  void use_sizes(const PackedSizes& sizes);
  bool has_block_scales() const;
  void use_rows(const Tensor& tensor, int64_t element_size);
  void check_blocks();
  void check_x_scales(const Argument& x_scales);
  void use_bias_and_sums();
  void make_quantized_x();  // before a product on a CPU
  void keep_rows_apart();

  Op& op_;
  const Argument& x_;
  Argument weight_, scales_;
  std::optional<Argument> bias_, weight_sums_;
  std::optional<Rows> rows_;
  const Tensor* tensor_ = nullptr;  // that they are of
  std::optional<QuantizedX> quantized_;
};

// The GPU of x.
#if defined(QAO_WITH_CUDA)
Gpu gpu_of(const Op& op, const Argument& x);
#endif

}  // namespace qao
