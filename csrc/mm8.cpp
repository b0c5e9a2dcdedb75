#include "cpu/mm.h"
#include "cpu/quantize.h"
#include "cpu/scratch.h"
#include "fp8_operands.h"
#include "int4_operands.h"
#include "ops.h"
#include "qao/mm.h"
#include "rows.h"

namespace qao {
namespace {

using cpu::divide_up;

constexpr int64_t kKeptBytes = 1 << 20;  // of a quantised x, that a thread keeps from call to call

// One call of a product: the operator function names what it has, each step checks its part, run() computes.
class Product {
 public:
  Product(const char* name, const Tensor& x, const Tensor& weight, const Tensor& scales,
          const std::optional<Tensor>& bias, const std::optional<Tensor>& weight_sums = std::nullopt)
      : op_(name), x_("x", x), weight_("weight", weight), scales_("scales", scales), x_tensor_(x) {
    op_.involve(&x_), op_.involve(&weight_), op_.involve(&scales_);
    if (bias) op_.involve(&bias_.emplace("bias", *bias));
    if (weight_sums) op_.involve(&weight_sums_.emplace("weight_sums", *weight_sums));
  }

  Op& op() { return op_; }
  const Argument& x() const { return x_; }

  // W in eight bits: [N, K], one scale a row, one for all, or with fp8 one a block of 128 x 128.
  void use_weight(Format format) {
    problem_.weight = format;
    const bool typed = weight_.dtype() == int8_code() || (format == Format::kFp8 && weight_.dtype() == fp8_code());
    op_.check(typed && weight_.dim() == 2 && weight_.size(0) >= 1 && weight_.size(1) >= 1,
              format == Format::kInt8 ? "weight must be int8 of shape [N, K]"
                                      : "weight must be float8_e4m3fn (or its bytes as int8) of shape [N, K]",
              "Quantise the weight first");
    set_sizes(weight_.size(0), weight_.size(1));
    const int64_t blocks_n = divide_up(problem_.n, kScaleBlock), blocks_k = problem_.k_blocks();
    op_.check(scales_.dtype() == float32_code(), "scales must be float32", "Pass scales.float()");
    if (scales_.numel() == problem_.n && (scales_.dim() == 1 || scales_.size(scales_.dim() - 1) == 1)) {
      problem_.weight_scaling = Scaling::kRow;
    } else if (scales_.numel() == 1) {
      problem_.weight_scaling = Scaling::kTensor;
    } else {
      op_.check(format == Format::kFp8 && scales_.has_shape({blocks_n, blocks_k}),
                format == Format::kFp8
                    ? "scales must have shape [N], [1], or [ceil(N / 128), ceil(K / 128)] for blocks of 128 x 128"
                    : "scales must have shape [N] or [1]",
                "Check scales.shape against weight.shape");
      problem_.weight_scaling = Scaling::kBlock;
    }
    problem_.weight_aligned = weight_.is_aligned(16) && problem_.k % 16 == 0;
    op_.check_operand(weight_, x_), op_.check_operand(scales_, x_);
  }

  // W in four bits, packed.
  void use_packed_weight(int64_t out_features, int64_t in_features, int64_t group_size) {
    op_.involve("out_features", out_features), op_.involve("in_features", in_features);
    op_.involve("group_size", group_size);
    check_packed_sizes(op_, out_features, in_features);
    problem_.weight = Format::kInt4;
    set_sizes(out_features, in_features);
    const int4::Weight packed = checked_packed(op_, weight_, scales_, x_, out_features, in_features, group_size);
    problem_.group_size = packed.group_size;
    problem_.has_zeros = packed.has_zeros;
    problem_.scale_dtype = packed.scale_dtype;
  }

  // x as the tensor cores take it.
  Tensor run_float() {
    problem_.x_dtype = problem_.y_dtype = op_.float_dtype(x_);
    const Rows rows(x_tensor_, x_);
    problem_.x_aligned = rows.is_aligned(size_of(problem_.x_dtype));
    return finish(rows.count, [&](const mm::Plan&, mm::Arguments& arguments) {
      arguments.x = rows.data;
      arguments.x_stride = rows.stride;
    });
  }

  // x of eight bits, with its scales.
  Tensor run_scaled(Format format, const Argument& x_scales, const Argument* x_zeros,
                    torch::headeronly::ScalarType out_dtype) {
    op_.check(x_.dtype() == (format == Format::kInt8 ? int8_code() : fp8_code()),
              format == Format::kInt8 ? "x must be int8" : "x must be float8_e4m3fn",
              "Quantise it with int8_quantize or fp8_quantize");
    problem_.x = format;
    problem_.y_dtype = op_.float_dtype("out_dtype", out_dtype);
    const Rows rows(x_tensor_, x_);
    problem_.x_aligned = rows.is_aligned(1);
    check_x_scales(x_scales, rows.count);
    if (x_zeros != nullptr) {
      op_.check(x_zeros->dtype() == int32_code() && x_zeros->numel() == rows.count,
                "x_zeros must be int32, one for each row of x", "Pass what int8_quantize returned");
      op_.check(weight_sums_.has_value(), "x_zeros need weight_sums", "Pass the row sums of the dequantised weight");
      op_.check_operand(*x_zeros, x_);
    } else {
      op_.check(!weight_sums_, "weight_sums without x_zeros", "Pass both, or neither for a symmetric x");
    }
    return finish(rows.count, [&](const mm::Plan&, mm::Arguments& arguments) {
      arguments.x = rows.data;
      arguments.x_stride = rows.stride;
      arguments.x_scales = static_cast<const float*>(x_scales.data());
      if (x_zeros != nullptr) arguments.x_zeros = static_cast<const int32_t*>(x_zeros->data());
    });
  }

  // x in a float dtype, quantised by the product or before it. `x_scale`: for Scaling::kTensor, a scale known
  // beforehand.
  Tensor run_dynamic(Format format, Scaling scaling, const Argument* x_scale = nullptr) {
    quantize::Problem quantization;
    quantization.x_dtype = problem_.x_dtype = problem_.y_dtype = op_.float_dtype(x_);
    quantization.format = problem_.x = format;
    quantization.scaling = problem_.x_scaling = scaling;
    quantization.symmetric = !weight_sums_;
    quantization.static_scale = problem_.static_scale = x_scale != nullptr;
    check_scalings();
    const Rows rows(x_tensor_, x_);
    problem_.quantizes_x = true;
    problem_.x_aligned = rows.is_aligned(size_of(problem_.x_dtype));
    quantization.m = rows.count;
    quantization.k = problem_.k;
    if (problem_.weight == Format::kInt4 && x_.is_cuda()) {
      quantization.order = quantize::Order::kInt4Tiles;
      quantization.sums_group = problem_.group_size;
    }
    quantize::Arguments q;
    q.x = rows.data;
    q.x_stride = rows.stride;
    q.q_stride = divide_up(problem_.k, 64) * 64;
    std::optional<Tensor> memory;
    return finish(rows.count, [&](const mm::Plan& plan, mm::Arguments& arguments) {
      if (plan.quantizes_x) {
        arguments.x = rows.data;
        arguments.x_stride = rows.stride;
        if (x_scale != nullptr) arguments.x_scales = static_cast<const float*>(x_scale->data());
        return;
      }
      const int64_t q_bytes = quantization.m * q.q_stride, scale_bytes = divide_up(quantization.scales() * 4, 16) * 16,
                    zero_bytes = divide_up(quantization.m * 4, 16) * 16,
                    sum_bytes = divide_up(quantization.m * quantization.sums_groups() * 4, 16) * 16;
      int64_t workspace_bytes = 0;
#if defined(QAO_WITH_CUDA)
      if (x_.is_cuda()) workspace_bytes = quantize::workspace_bytes(quantization);
#endif
      const int64_t bytes = q_bytes + scale_bytes + zero_bytes + sum_bytes + workspace_bytes;
      char* base;
      if (x_.is_cpu() && bytes <= kKeptBytes) {
        base = static_cast<char*>(cpu::scratch(cpu::Scratch::kQuantized, bytes));
      } else {
        base = static_cast<char*>(memory.emplace(empty({bytes}, uint8_code(), x_)).data_ptr());
      }
      q.q = base;
      q.scales = x_scale != nullptr ? static_cast<float*>(x_scale->data()) : reinterpret_cast<float*>(base + q_bytes);
      q.zeros = weight_sums_ ? reinterpret_cast<int32_t*>(base + q_bytes + scale_bytes) : nullptr;
      if (quantization.sums_group > 0) q.sums = reinterpret_cast<float*>(base + q_bytes + scale_bytes + zero_bytes);
      q.workspace = base + q_bytes + scale_bytes + zero_bytes + sum_bytes;
      if (x_.is_cpu()) {
        op_.check(cpu::quantize(quantization, q, torch_threads()));
      } else {
#if defined(QAO_WITH_CUDA)
        op_.check(quantize::launch(quantization, q, current_stream(x_)));
#endif
      }
      arguments.x = q.q;
      arguments.x_stride = q.q_stride;
      arguments.x_scales = q.scales;
      arguments.x_zeros = q.zeros;
      arguments.x_sums = q.sums;
    });
  }

  void fast_accum(bool value) { problem_.fast_accum = value; }

 private:
  void set_sizes(int64_t n, int64_t k) {
    problem_.n = n;
    problem_.k = k;
    op_.check(x_.dim() >= 1 && x_.size(x_.dim() - 1) == k, "x must have shape [..., in_features]",
              "Check x.shape against the layer's in_features");
  }

  void check_scalings() {
    if (problem_.x != Format::kFp8 || problem_.weight != Format::kFp8) return;
    // The scale of a weight of one block looks like that of a tensor, or of one row.
    const bool blocks = scales_.has_shape({divide_up(problem_.n, kScaleBlock), problem_.k_blocks()});
    if (problem_.x_scaling == Scaling::kBlock && blocks) problem_.weight_scaling = Scaling::kBlock;
    op_.check((problem_.x_scaling == Scaling::kBlock) == (problem_.weight_scaling == Scaling::kBlock),
              "blocks of 128 columns of x go with blocks of 128 x 128 of weight, and neither without the other",
              "Quantise x and weight alike");
  }

  void check_x_scales(const Argument& x_scales, int64_t rows) {
    op_.check(x_scales.dtype() == float32_code(), "x_scales must be float32", "Pass x_scales.float()");
    const int64_t count = x_scales.numel();
    const bool blocks = problem_.weight_scaling == Scaling::kBlock;
    if (problem_.x == Format::kInt8) {
      op_.check(count == rows, "x_scales must hold one scale for each row of x", "Pass what int8_quantize returned");
      problem_.x_scaling = Scaling::kRow;
    } else {
      op_.check(blocks ? count == rows * problem_.k_blocks() : count == rows || count == 1,
                blocks ? "with 128 x 128 blocks of weight, x_scales must hold one scale for each 128 columns of a row"
                       : "x_scales must hold one scale for each row of x, or one for all",
                "Pass what fp8_quantize returned");
      problem_.x_scaling = blocks ? Scaling::kBlock : count == rows ? Scaling::kRow : Scaling::kTensor;
    }
    op_.check_operand(x_scales, x_);
  }

  // `give_x` fills the arguments that are about x as the plan wants them (that of a CPU is empty); it is called if
  // there is something to compute, on x's device.
  template <typename GiveX>
  Tensor finish(int64_t rows, const GiveX& give_x) {
    problem_.m = rows;
    if (bias_) {
      problem_.has_bias = true;
      problem_.bias_dtype = op_.check_bias(*bias_, x_, problem_.n);
    }
    if (weight_sums_) {
      problem_.x_zeros = true;
      op_.check(weight_sums_->dtype() == float32_code() && weight_sums_->has_shape({problem_.n}),
                "weight_sums must be float32 of shape [out_features]",
                "Pass the row sums of the dequantised weight, or None for a symmetric x");
      op_.check_operand(*weight_sums_, x_);
    }
    Tensor y = empty_rows(problem_.n, torch_dtype(problem_.y_dtype), x_);
    if (rows == 0) return y;

    const DeviceScope scope(x_);
    mm::Plan plan;
    mm::Arguments arguments;
    arguments.weight = weight_.data();
    arguments.scales = scales_.data();
    arguments.weight_sums = weight_sums_ ? static_cast<const float*>(weight_sums_->data()) : nullptr;
    arguments.bias = bias_ ? bias_->data() : nullptr;
    arguments.y = y.data_ptr();
    if (x_.is_cpu()) {
      give_x(plan, arguments);
      op_.check(cpu::mm(problem_, arguments, torch_threads(rows * problem_.n * problem_.k)));
      return y;
    }
#if defined(QAO_WITH_CUDA)
    Gpu gpu;
    op_.check(query_gpu(x_.device_index(), &gpu));
    op_.check(mm::plan(problem_, gpu, &plan));
    give_x(plan, arguments);
    std::optional<Tensor> workspace;
    if (plan.workspace_bytes > 0) {
      arguments.workspace = workspace.emplace(empty({plan.workspace_bytes}, uint8_code(), x_)).data_ptr();
    }
    op_.check(mm::launch(problem_, plan, arguments, current_stream(x_)));
    return y;
#else
    op_.fail_without_cuda();
#endif
  }

  Op op_;
  const Argument x_, weight_, scales_;
  std::optional<Argument> bias_, weight_sums_;
  const Tensor& x_tensor_;
  mm::Problem problem_;
};

}  // namespace

Tensor int8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias) {
  Product product("int8_mm", x, weight, scales, bias);
  product.use_weight(Format::kInt8);
  return product.run_float();
}

Tensor fp8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias) {
  Product product("fp8_mm", x, weight, scales, bias);
  product.use_weight(Format::kFp8);
  return product.run_float();
}

Tensor int8_int8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& weight_sums) {
  Product product("int8_int8_mm", x, weight, scales, bias, weight_sums);
  product.use_weight(Format::kInt8);
  return product.run_dynamic(Format::kInt8, Scaling::kRow);
}

Tensor int8_int4_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& weight_sums, int64_t out_features, int64_t in_features,
                       int64_t group_size) {
  Product product("int8_int4_mm", x, weight, scales, bias, weight_sums);
  product.use_packed_weight(out_features, in_features, group_size);
  return product.run_dynamic(Format::kInt8, Scaling::kRow);
}

Tensor fp8_fp8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                     const std::optional<Tensor>& x_scale, int64_t x_group_size, bool fast_accum) {
  Product product("fp8_fp8_mm", x, weight, scales, bias);
  std::optional<Argument> given;
  if (x_scale) product.op().involve(&given.emplace("x_scale", *x_scale));
  product.op().involve("x_group_size", x_group_size);
  product.use_weight(Format::kFp8);
  product.fast_accum(fast_accum);
  const Scaling scaling = x_scaling_of(product.op(), x_group_size);
  if (given) check_static_scale(product.op(), *given, product.x(), scaling);
  return product.run_dynamic(Format::kFp8, scaling, given ? &*given : nullptr);
}

Tensor fp8_int4_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                      int64_t out_features, int64_t in_features, int64_t group_size) {
  Product product("fp8_int4_mm", x, weight, scales, bias);
  product.use_packed_weight(out_features, in_features, group_size);
  return product.run_dynamic(Format::kFp8, Scaling::kRow);
}

Tensor int8_scaled_mm_op(const Tensor& x, const Tensor& x_scales, const std::optional<Tensor>& x_zeros,
                         const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& weight_sums, torch::headeronly::ScalarType out_dtype) {
  Product product("int8_scaled_mm", x, weight, scales, bias, weight_sums);
  const Argument scales_of_x("x_scales", x_scales);
  product.op().involve(&scales_of_x);
  std::optional<Argument> zeros;
  if (x_zeros) product.op().involve(&zeros.emplace("x_zeros", *x_zeros));
  product.use_weight(Format::kInt8);
  return product.run_scaled(Format::kInt8, scales_of_x, zeros ? &*zeros : nullptr, out_dtype);
}

Tensor fp8_scaled_mm_op(const Tensor& x, const Tensor& x_scales, const Tensor& weight, const Tensor& scales,
                        const std::optional<Tensor>& bias, torch::headeronly::ScalarType out_dtype, bool fast_accum) {
  Product product("fp8_scaled_mm", x, weight, scales, bias);
  const Argument scales_of_x("x_scales", x_scales);
  product.op().involve(&scales_of_x);
  product.use_weight(Format::kFp8);
  product.fast_accum(fast_accum);
  return product.run_scaled(Format::kFp8, scales_of_x, nullptr, out_dtype);
}

}  // namespace qao
