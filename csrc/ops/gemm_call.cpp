// GemmCall: weight and activation operands, plan and launch.
#include "ops/gemm_call.h"

#include "cpu/gemm/driver.h"
#include "ops/fp4_operands.h"
#include "ops/fp8_operands.h"
#include "ops/gguf_operands.h"
#include "ops/plan_cache.h"
#include "ops/rotation.h"

namespace qao {

GemmCall::GemmCall(Op& op, const Argument& x, const Tensor& weight, const Tensor* scales,
                   const std::optional<Tensor>& bias)
    : op_(op), x_(x), weight_("weight", weight) {
  op_.involve(&weight_);
  if (scales != nullptr) op_.involve(&scales_.emplace("scales", *scales));
  if (bias) op_.involve(&bias_.emplace("bias", *bias));
  arguments.weight = weight_.data();
  if (scales_) arguments.scales = scales_->data();
}

void GemmCall::add_weight_sums(const std::optional<Tensor>& weight_sums) {
  if (weight_sums) op_.involve(&weight_sums_.emplace("weight_sums", *weight_sums));
}

void GemmCall::add_row_scales(const std::optional<Tensor>& row_scales) {
  if (row_scales) op_.involve(&row_scales_.emplace("row_scales", *row_scales));
}

void GemmCall::add_x_scale(const std::optional<Tensor>& x_scale, int64_t x_group_size) {
  if (x_scale) op_.involve(&x_scale_.emplace("x_scale", *x_scale));
  op_.involve("x_group_size", x_group_size);
}

void GemmCall::set_sizes(int64_t n, int64_t k) {
  problem.n = n;
  problem.k = k;
  op_.check(x_.dim() >= 1 && x_.size(x_.dim() - 1) == k, "x must have shape [..., in_features]",
            "Check x.shape against the layer's in_features");
}

// One scale per 128 x 128 block.
bool GemmCall::has_block_scales() const {
  return scales_->has_shape({(problem.n + kScaleBlock - 1) / kScaleBlock, problem.k_blocks()});
}

void GemmCall::use_weight(const RowMajor& rows) {
  hide_experts();
  problem.weight = rows.format;
  const bool typed = weight_.dtype() == int8_code() || weight_.dtype() == rows.dtype();
  op_.check(typed && weight_.dim() == 2 && weight_.size(0) >= 1 && weight_.size(1) >= 1, rows.must_be,
            "Quantize the weight first");
  set_sizes(weight_.size(0), weight_.size(1));
  op_.check(scales_->dtype() == float32_code(), "scales must be float32", "Pass scales.float()");
  if (scales_->numel() == problem.n && (scales_->dim() == 1 || scales_->size(scales_->dim() - 1) == 1)) {
    problem.weight_scaling = Scaling::kRow;
  } else if (scales_->numel() == 1) {
    problem.weight_scaling = Scaling::kTensor;
  } else {
    op_.check(rows.may_have_blocks && has_block_scales(),
              rows.may_have_blocks
                  ? "scales must have shape [N], [1], or [ceil(N / 128), ceil(K / 128)] for blocks of 128 x 128"
                  : "scales must have shape [N] or [1]",
              "Check scales.shape against weight.shape");
    problem.weight_scaling = Scaling::kBlock;
  }
  problem.weight_aligned = weight_.is_aligned(16) && problem.k % 16 == 0;
  op_.check_operand(weight_, x_), op_.check_operand(*scales_, x_);
}

void GemmCall::use_packed_weight(const PackedSizes& given) {
  hide_experts();
  const PackedSizes sizes = given.left_out() ? int4_sizes_of(op_, weight_, *scales_) : given;
  use_sizes(sizes);
  problem.weight = Format::kInt4;
  const int4::Weight packed = checked_packed(op_, weight_, *scales_, x_, sizes.n, sizes.k, sizes.group_size);
  problem.group_size = packed.group_size;
  problem.has_zeros = packed.has_zeros;
  problem.scale_dtype = packed.scale_dtype;
  problem.row_scales = !problem.has_zeros && problem.groups() == 1;  // the scale of the only group
  if (row_scales_) use_row_scales();
}

void GemmCall::use_fp4_weight(const PackedSizes& given) {
  hide_experts();
  const PackedSizes sizes = given.left_out() ? fp4_sizes_of(op_, weight_, *scales_) : given;
  use_sizes(sizes);
  problem.weight = Format::kFp4;
  check_fp4(op_, weight_, *scales_, x_, sizes.n, sizes.k, sizes.group_size);
  problem.group_size = sizes.group_size;
  problem.scale_dtype = DType::kBFloat16;
}

void GemmCall::use_gguf_weight(int64_t qtype) {
  op_.involve("qtype", qtype);
  hide_experts();
  problem.weight = Format::kGguf;
  problem.gguf_type = static_cast<int>(qtype);
  const cpu::gguf::Weight rows = checked_gguf_weight(op_, weight_, x_, qtype);
  set_sizes(rows.n, rows.k);
}

void GemmCall::use_sizes(const PackedSizes& sizes) {
  op_.involve("out_features", sizes.n), op_.involve("in_features", sizes.k);
  op_.involve("group_size", sizes.group_size);
  check_packed_sizes(op_, sizes.n, sizes.k);
  set_sizes(sizes.n, sizes.k);
}

void GemmCall::use_row_scales() {
  op_.check(!problem.has_zeros, "row_scales are for a weight without zero points",
            "Pass None, or quantize with symmetric=True");
  op_.check(row_scales_->dtype() == float32_code() && row_scales_->has_shape({problem.n}),
            "row_scales must be float32 of shape [out_features]",
            "Pass the row scales of a weight quantized with two-level scales, or None");
  op_.check_operand(*row_scales_, x_);
  problem.row_scales = true;
  arguments.row_scales = static_cast<const float*>(row_scales_->data());
}

void GemmCall::use_bias_and_sums() {
  if (bias_) {
    problem.has_bias = true;
    problem.bias_dtype = op_.check_bias(*bias_, x_, problem.n);
    arguments.bias = bias_->data();
  }
  if (!weight_sums_) return;
  problem.x_zeros = true;
  op_.check(weight_sums_->dtype() == float32_code() && weight_sums_->has_shape({problem.n}),
            "weight_sums must be float32 of shape [out_features]",
            "Pass the row sums of the dequantized weight, or None for a symmetric x");
  op_.check_operand(*weight_sums_, x_);
  arguments.weight_sums = static_cast<const float*>(weight_sums_->data());
}

// ---- Activations ----

void GemmCall::use_rows(const Tensor& tensor, int64_t element_size) {
  const Rows& rows = rows_.emplace(tensor, x_);
  tensor_ = &tensor;
  problem.m = rows.count;
  problem.x_aligned = rows.is_aligned(element_size);
  arguments.x = rows.data;
  arguments.x_stride = rows.stride;
}

void GemmCall::use_float_x(const Tensor& tensor) {
  problem.x_dtype = problem.y_dtype = op_.float_dtype(x_);
  use_rows(tensor, size_of(problem.x_dtype));
}

void GemmCall::use_scaled_x(const Tensor& tensor, Format format, const Argument& x_scales, const Argument* x_zeros,
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

void GemmCall::check_x_scales(const Argument& x_scales) {
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

void GemmCall::use_int8_x(const Tensor& tensor, int64_t rotation) {
  use_dynamic_x(tensor, Format::kInt8, Scaling::kRow, rotation);
}

void GemmCall::use_fp8_x(const Tensor& tensor, int64_t x_group_size) {
  const Scaling scaling = x_scaling_of(op_, x_group_size);
  if (x_scale_) check_static_scale(op_, *x_scale_, x_, scaling);
  use_dynamic_x(tensor, Format::kFp8, scaling);
}

void GemmCall::use_dynamic_x(const Tensor& tensor, Format format, Scaling scaling, int64_t rotation) {
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
void GemmCall::check_blocks() {
  if (problem.x != Format::kFp8 || problem.weight != Format::kFp8) return;
  // A weight of one block has the same scale shape as one with a scale per tensor or row.
  const bool blocks = has_block_scales();
  if (problem.x_scaling == Scaling::kBlock && blocks) problem.weight_scaling = Scaling::kBlock;
  op_.check((problem.x_scaling == Scaling::kBlock) == (problem.weight_scaling == Scaling::kBlock),
            "x in blocks of 128 columns requires a weight in blocks of 128 x 128, and the reverse",
            "Quantize x and weight with the same granularity");
}

// Batch invariance: plans must not depend on a scale of all rows, nor on the alignment of the rows.
void GemmCall::keep_rows_apart() {
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

// ---- Plan and launch ----

#if defined(QAO_WITH_CUDA)
Gpu gpu_of(const Op& op, const Argument& x) {
  Gpu gpu;
  op.check(query_gpu(x.device_index(), &gpu));
  return gpu;
}
#endif

void GemmCall::make_quantized_x() {
  quantized_->make(op_, arguments);
  problem.quantizes_x = false;
}

Tensor GemmCall::make_y() {
  use_bias_and_sums();
  Tensor y = empty_rows(problem.gated ? problem.n / 2 : problem.n, torch_dtype(problem.y_dtype), x_);
  arguments.y = y.data_ptr();
  return y;
}

void GemmCall::launch([[maybe_unused]] const GemmCall* before) {
  if (problem.m == 0) return;
  if (x_.is_cpu()) {
    // The CPU GEMM quantizes rows itself, except with one scale for the whole tensor.
    if (quantized_ && problem.x_scaling == Scaling::kTensor) make_quantized_x();
    return op_.check(cpu::gemm(problem, arguments, torch_threads(problem.m * problem.n * problem.k)));
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(x_);
  const PlanKey key(problem, gpu_of(op_, x_));
  const gemm::Plan plan =
      planned(key, [&](Planned* made) { op_.check(gemm::plan(problem, key.gpu, &made->plan)); }).plan;
  if (quantized_ && !plan.quantizes_x && !(before && quantized_->take(*before->quantized_, arguments))) {
    quantized_->make(op_, arguments);
  }
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    arguments.workspace = workspace.emplace(empty({plan.workspace_bytes}, uint8_code(), x_)).data_ptr();
  }
  op_.check(gemm::launch(problem, plan, arguments, current_stream(x_)));
#else
  op_.fail_without_cuda();
#endif
}

Tensor GemmCall::run() {
  if (problem.batch_invariant) keep_rows_apart();
  Tensor y = make_y();
  launch();
  return y;
}

#if defined(QAO_WITH_CUDA)
std::optional<std::vector<Tensor>> GemmCall::run_fused(std::span<GemmCall* const> gemms, const gemm::Problem& first,
                                                       const gemm::Arguments& x) {
  const GemmCall& any = *gemms[0];
  if (any.x_.is_cpu() || first.m == 0 || gemms.size() > gemm::kMaxParts) return {};
  gemm::Problem problem = first;
  problem.n = 0;
  problem.has_bias = false;
  std::vector<int64_t> rows;
  for (GemmCall* gemm : gemms) {
    gemm->use_bias_and_sums();
    const gemm::Problem& own = gemm->problem;
    if (own.weight != first.weight || own.has_zeros != first.has_zeros || own.scale_dtype != first.scale_dtype ||
        own.group_size != first.group_size) {
      return {};
    }
    if (own.has_bias) {
      if (problem.has_bias && problem.bias_dtype != own.bias_dtype) return {};
      problem.has_bias = true, problem.bias_dtype = own.bias_dtype;
    }
    rows.push_back(own.n);
    problem.n += own.n;
  }
  const PlanKey key(problem, gpu_of(any.op_, any.x_), rows);
  const Planned found =
      planned(key, [&](Planned* made) { made->exists = gemm::merges(problem, rows, key.gpu, &made->plan); });
  if (!found.exists) return {};
  const gemm::Plan& plan = found.plan;

  std::vector<Tensor> ys;
  std::vector<gemm::Part> parts;
  for (GemmCall* gemm : gemms) {
    if (!problem.gated || ys.empty()) ys.push_back(gemm->make_y());
    const gemm::Arguments& own = gemm->arguments;
    parts.push_back({gemm->problem.n, own.weight, own.scales, own.bias, own.y});
  }
  const DeviceScope scope(any.x_);
  any.op_.check(gemm::launch(problem, plan, x, parts, current_stream(any.x_)));
  return ys;
}
#else
std::optional<std::vector<Tensor>> GemmCall::run_fused(std::span<GemmCall* const>, const gemm::Problem&,
                                                       const gemm::Arguments&) {
  return {};
}
#endif

std::vector<Tensor> GemmCall::run_merged(std::span<GemmCall* const> gemms) {
  if (auto fused = run_fused(gemms, gemms[0]->problem, gemms[0]->arguments)) return std::move(*fused);
  std::vector<Tensor> ys;
  for (GemmCall* gemm : gemms) ys.push_back(gemm->make_y());
  GemmCall& first = *gemms[0];
  const bool one_scale = first.quantized_ && first.problem.x_scaling == Scaling::kTensor;
  if (!first.x_.is_cpu() || first.problem.m == 0 || one_scale) {
    for (GemmCall* gemm : gemms) gemm->launch(gemm == &first ? nullptr : &first);
    return ys;
  }
  std::vector<cpu::Gemm> on_cpu;
  int64_t work = 0;
  for (GemmCall* gemm : gemms) {
    on_cpu.push_back({gemm->problem, gemm->arguments});
    work += gemm->problem.m * gemm->problem.n * gemm->problem.k;
  }
  first.op_.check(cpu::gemm(on_cpu, torch_threads(work)));
  return ys;
}

}  // namespace qao
