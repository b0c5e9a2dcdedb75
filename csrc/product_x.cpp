// Product: activation operands.
#include "fp8_operands.h"
#include "product.h"
#include "rotation.h"

namespace qao {

void Product::use_rows(const Tensor& tensor, int64_t element_size) {
  const Rows& rows = rows_.emplace(tensor, x_);
  tensor_ = &tensor;
  problem.m = rows.count;
  problem.x_aligned = rows.is_aligned(element_size);
  arguments.x = rows.data;
  arguments.x_stride = rows.stride;
}

void Product::use_float_x(const Tensor& tensor) {
  problem.x_dtype = problem.y_dtype = op_.float_dtype(x_);
  use_rows(tensor, size_of(problem.x_dtype));
}

void Product::use_scaled_x(const Tensor& tensor, Format format, const Argument& x_scales, const Argument* x_zeros,
                           torch::headeronly::ScalarType out_dtype) {
  op_.check(x_.dtype() == (format == Format::kInt8 ? int8_code() : fp8_code()),
            format == Format::kInt8 ? "x must be int8" : "x must be float8_e4m3fn",
            "Quantize it with int8_quantize or fp8_quantize");
  problem.x = format;
  problem.y_dtype = op_.float_dtype("out_dtype", out_dtype);
  use_rows(tensor, 1);
  check_x_scales(x_scales);
  arguments.x_scales = static_cast<const float*>(x_scales.data());
  if (x_zeros == nullptr) {
    op_.check(!weight_sums_, "weight_sums without x_zeros", "Pass both, or neither for a symmetric x");
    return;
  }
  op_.check(x_zeros->dtype() == int32_code() && x_zeros->numel() == problem.m,
            "x_zeros must be int32, one for each row of x", "Pass what int8_quantize returned");
  op_.check(weight_sums_.has_value(), "x_zeros need weight_sums", "Pass the row sums of the dequantized weight");
  op_.check_operand(*x_zeros, x_);
  arguments.x_zeros = static_cast<const int32_t*>(x_zeros->data());
}

void Product::check_x_scales(const Argument& x_scales) {
  op_.check(x_scales.dtype() == float32_code(), "x_scales must be float32", "Pass x_scales.float()");
  const int64_t count = x_scales.numel();
  const bool blocks = problem.weight_scaling == Scaling::kBlock;
  if (problem.x == Format::kInt8) {
    op_.check(count == problem.m, "x_scales must hold one scale for each row of x", "Pass what int8_quantize returned");
    problem.x_scaling = Scaling::kRow;
  } else {
    op_.check(blocks ? count == problem.m * problem.k_blocks() : count == problem.m || count == 1,
              blocks ? "with 128 x 128 blocks of weight, x_scales must hold one scale for each 128 columns of a row"
                     : "x_scales must hold one scale for each row of x, or one for all",
              "Pass what fp8_quantize returned");
    problem.x_scaling = blocks ? Scaling::kBlock : count == problem.m ? Scaling::kRow : Scaling::kTensor;
  }
  op_.check_operand(x_scales, x_);
}

void Product::use_int8_x(const Tensor& tensor, int64_t rotation) {
  use_dynamic_x(tensor, Format::kInt8, Scaling::kRow, rotation);
}

void Product::use_fp8_x(const Tensor& tensor, int64_t x_group_size) {
  const Scaling scaling = x_scaling_of(op_, x_group_size);
  if (x_scale_) check_static_scale(op_, *x_scale_, x_, scaling);
  use_dynamic_x(tensor, Format::kFp8, scaling);
}

void Product::use_dynamic_x(const Tensor& tensor, Format format, Scaling scaling, int64_t rotation) {
  problem.x_dtype = problem.y_dtype = op_.float_dtype(x_);
  problem.x = format;
  problem.x_scaling = scaling;
  problem.quantizes_x = true;
  problem.x_zeros = weight_sums_.has_value();
  problem.static_scale = x_scale_.has_value();
  problem.x_rotation = checked_rotation(op_, rotation, problem.k);
  check_blocks();
  use_rows(tensor, size_of(problem.x_dtype));
  if (x_scale_) arguments.x_scales = static_cast<const float*>(x_scale_->data());
  quantized_.emplace(problem, x_, x_scale_ ? &*x_scale_ : nullptr);
}

// Blocks of x require blocks of W.
void Product::check_blocks() {
  if (problem.x != Format::kFp8 || problem.weight != Format::kFp8) return;
  // A weight of one block has the same scale shape as one with a scale per tensor or row.
  const bool blocks = has_block_scales();
  if (problem.x_scaling == Scaling::kBlock && blocks) problem.weight_scaling = Scaling::kBlock;
  op_.check((problem.x_scaling == Scaling::kBlock) == (problem.weight_scaling == Scaling::kBlock),
            "x in blocks of 128 columns requires a weight in blocks of 128 x 128, and the reverse",
            "Quantize x and weight with the same granularity");
}

// Batch invariance: plans must not depend on a scale of all rows, nor on the alignment of the rows.
void Product::keep_rows_apart() {
  problem.fast_accum = false;  // some tiles have no kernels for it
  op_.check(!(quantized_ && problem.x_scaling == Scaling::kTensor && !problem.static_scale),
            "with batch_invariant, x may not have one scale for all rows",
            "Pass x_scale, or x_group_size=-1 for one scale per row");
  if (!x_.is_cuda() || problem.m == 0 || quantized_) return;  // quantized rows are aligned
  const bool can_align = problem.k * (problem.x == Format::kFloat ? size_of(problem.x_dtype) : 1) % 16 == 0;
  if (can_align && !problem.x_aligned) {
    rows_->move(*tensor_, x_);
    arguments.x = rows_->data;
    arguments.x_stride = rows_->stride;
  }
  problem.x_aligned = can_align;
}

}  // namespace qao
